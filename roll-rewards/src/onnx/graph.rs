//! A graph that can run: typed operators in execution order, values in numbered slots.

use std::path::PathBuf;

use roll_core::DType;

use super::error::{OnnxError, Problem};
use super::ops::Operator;
use super::value::Constant;

/// An input or output of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// Its name in the file.
    pub name: String,
    /// The type of its elements: of an input what must be given, of an output f32 or i64 (booleans too).
    pub dtype: DType,
    /// Its declared shape; `None` is a free axis. Empty also when the file declares none.
    pub shape: Vec<Option<usize>>,
}

/// A graph in execution order. Values live in numbered slots.
#[derive(Debug)]
pub(super) struct Graph {
    pub path: PathBuf,
    pub inputs: Vec<Port>,
    pub output_ports: Vec<Port>,
    pub nodes: Vec<Node>,
    pub slots: usize,
    pub constants: Vec<Option<Constant>>,
    /// Numbers that operators hold themselves, out of constants of the file.
    pub fused: usize,
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
    /// A problem of `node`, with its name and the file's.
    pub fn node_error(&self, node: &Node, problem: Problem) -> OnnxError {
        OnnxError::Node {
            path: self.path.clone(),
            node: node.name.clone(),
            operator: node.kind.clone(),
            problem: problem.0,
        }
    }
}
