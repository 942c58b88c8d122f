//! A graph that can run: typed operators in execution order, and values in numbered slots.

use std::path::PathBuf;

use roll_core::DType;

use super::error::{OnnxError, Problem};
use super::ops::Operator;
use super::value::Constant;

/// An input or output of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// Name in the file.
    pub name: String,
    /// Type of the elements. Outputs are f32 or i64 (booleans, too).
    pub dtype: DType,
    /// Declared shape; `None` is a free axis. Also empty if the file declares no shape.
    pub shape: Vec<Option<usize>>,
}

/// A graph in execution order. Values are stored in numbered slots.
#[derive(Debug)]
pub(super) struct Graph {
    pub path: PathBuf,
    pub inputs: Vec<Port>,
    pub output_ports: Vec<Port>,
    pub nodes: Vec<Node>,
    pub slot_count: usize,
    pub constants: Vec<Option<Constant>>,
    /// Number of elements of constants that were moved into operators.
    pub fused_elements: usize,
    pub input_slots: Vec<usize>,
    pub outputs: Vec<usize>,
}

/// One node.
#[derive(Debug)]
pub(super) struct Node {
    pub name: String,
    pub kind: String,
    pub operator: Box<dyn Operator>,
    pub inputs: Vec<Option<usize>>,
    pub outputs: Vec<Option<usize>>,
}

impl Graph {
    pub fn constant_elements(&self) -> usize {
        self.constants.iter().flatten().map(|constant| constant.value.shape().iter().product::<usize>()).sum()
    }

    /// Removes constants that no node and no output uses, so that they do not occupy the device.
    pub fn drop_unused_constants(&mut self) {
        let mut used = vec![false; self.slot_count];
        self.nodes.iter().flat_map(|n| n.inputs.iter().flatten()).chain(&self.outputs).for_each(|s| used[*s] = true);
        self.constants.iter_mut().zip(used).filter(|(_, used)| !used).for_each(|(constant, _)| *constant = None);
    }

    /// Adds the names of `node` and of the file to a problem.
    pub fn node_error(&self, node: &Node, problem: Problem) -> OnnxError {
        OnnxError::Node {
            path: self.path.clone(),
            node: node.name.clone(),
            operator: node.kind.clone(),
            problem: problem.0,
        }
    }
}
