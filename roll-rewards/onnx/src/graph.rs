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
    /// Declared shape; `None` is a free axis. Empty for a scalar, and if the file declares no shape.
    pub shape: Vec<Option<usize>>,
}

/// A graph in execution order. Every value has a slot, which is its index in lists with one entry per value.
#[derive(Debug)]
pub(super) struct Graph {
    pub path: PathBuf,
    /// The ports of the inputs.
    pub inputs: Vec<Port>,
    /// The ports of the outputs.
    pub output_ports: Vec<Port>,
    pub nodes: Vec<Node>,
    pub slot_count: usize,
    /// The value in each slot; `None` if it is computed when the graph runs.
    pub constants: Vec<Option<Constant>>,
    /// Number of elements of constants that were moved into operators.
    pub fused_elements: usize,
    /// The slots of `inputs`.
    pub input_slots: Vec<usize>,
    /// The slots of `output_ports`.
    pub outputs: Vec<usize>,
}

/// An operator between slots.
#[derive(Debug)]
pub(super) struct Node {
    pub name: String,
    /// The operator's name in the file.
    pub kind: String,
    pub operator: Box<dyn Operator>,
    /// Slots; `None` for an optional input that is left out.
    pub inputs: Vec<Option<usize>>,
    /// Slots; `None` for an output that nothing reads.
    pub outputs: Vec<Option<usize>>,
}

impl Graph {
    /// Number of elements of all constants.
    pub fn constant_elements(&self) -> usize {
        self.constants.iter().flatten().map(|constant| constant.value.shape().iter().product::<usize>()).sum()
    }

    /// Removes constants that no node and no output uses, so that they do not occupy the device.
    pub fn drop_unused_constants(&mut self) {
        let mut used = vec![false; self.slot_count];
        for &slot in self.nodes.iter().flat_map(|node| node.inputs.iter().flatten()).chain(&self.outputs) {
            used[slot] = true;
        }
        for (constant, used) in self.constants.iter_mut().zip(used) {
            if !used {
                *constant = None;
            }
        }
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
