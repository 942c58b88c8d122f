//! The index by which fusions find chains of nodes: who computes and who reads each value.

use super::super::graph::Graph;
use super::super::ops::{Arithmetic, Role};
use super::super::value::Value;
use super::{constant, consumers, only_output};

/// The nodes that compute and read each value of a graph.
pub struct GraphIndex<'a> {
    pub graph: &'a Graph,
    /// The nodes that read each slot; [`super::GRAPH_OUTPUT`] represents the graph's outputs.
    pub consumers: Vec<Vec<usize>>,
    /// The node that computes each slot; `None` for inputs of the graph and constants.
    pub producers: Vec<Option<usize>>,
}

impl<'a> GraphIndex<'a> {
    /// Indexes the nodes of `graph`.
    pub fn of(graph: &'a Graph) -> Self {
        let mut producers = vec![None; graph.slot_count];
        for (index, node) in graph.nodes.iter().enumerate() {
            node.outputs.iter().flatten().for_each(|slot| producers[*slot] = Some(index));
        }
        Self { graph, consumers: consumers(graph), producers }
    }

    /// The node that reads `slot`, if it is the only reader and has one output, and the slot of this output.
    pub fn only_consumer(&self, slot: usize) -> Option<(usize, usize)> {
        match *self.consumers[slot].as_slice() {
            [reader] => Some((reader, only_output(self.graph.nodes.get(reader)?)?)),
            _ => None,
        }
    }

    /// The other operand of `node`, if the node applies `arithmetic` to `slot` and another value.
    pub fn other_operand(&self, node: usize, arithmetic: Arithmetic, slot: usize) -> Option<usize> {
        let node = &self.graph.nodes[node];
        let (Role::Arithmetic(found), [Some(a), Some(b)]) = (node.operator.role(), node.inputs.as_slice()) else {
            return None;
        };
        if found != arithmetic || a == b {
            None
        } else if slot == *a {
            Some(*b)
        } else if slot == *b {
            Some(*a)
        } else {
            None
        }
    }

    /// The slot that `node` multiplies by a constant number, and the number.
    pub fn times_constant(&self, node: usize) -> Option<(usize, f32)> {
        let node = &self.graph.nodes[node];
        let (Role::Arithmetic(arithmetic), [Some(a), Some(b)]) = (node.operator.role(), node.inputs.as_slice()) else {
            return None;
        };
        match (arithmetic, self.number(*a), self.number(*b)) {
            (Arithmetic::Mul, None, Some(number)) => Some((*a, number)),
            (Arithmetic::Mul, Some(number), None) => Some((*b, number)),
            (Arithmetic::Div, None, Some(number)) => Some((*a, 1.0 / number)),
            _ => None,
        }
    }

    /// Whether `node` adds the constant 1 to a value.
    pub fn adds_one(&self, node: usize) -> bool {
        let node = &self.graph.nodes[node];
        let is_sum = matches!(node.operator.role(), Role::Arithmetic(Arithmetic::Add));
        is_sum && node.inputs.len() == 2 && node.inputs.iter().flatten().any(|&slot| self.number(slot) == Some(1.0))
    }

    /// The element of a constant that has one element and at most one axis.
    pub fn number(&self, slot: usize) -> Option<f32> {
        let floats = self.graph.constants[slot].as_ref()?.floats.as_deref()?;
        match (floats, constant(self.graph, slot)?) {
            ([number], Value::Float(tensor)) if tensor.shape().len() <= 1 => Some(*number),
            _ => None,
        }
    }
}
