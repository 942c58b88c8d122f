//! Pattern matching on chains of nodes.

use super::super::graph::Graph;
use super::super::ops::{Arithmetic, Role};
use super::super::value::Value;
use super::{constant, consumers, only_output};

/// The nodes that compute and read each value of a graph.
pub struct GraphIndex<'a> {
    pub graph: &'a Graph,
    /// The nodes that read each value; [`super::GRAPH_OUTPUT`] represents the outputs.
    pub consumers: Vec<Vec<usize>>,
    /// The node that computes each value.
    pub producers: Vec<Option<usize>>,
}

impl<'a> GraphIndex<'a> {
    pub fn of(graph: &'a Graph) -> Self {
        let mut producers = vec![None; graph.slot_count];
        for (index, node) in graph.nodes.iter().enumerate() {
            node.outputs.iter().flatten().for_each(|slot| producers[*slot] = Some(index));
        }
        Self { graph, consumers: consumers(graph), producers }
    }

    /// The only node that reads a value, and the slot of its output.
    pub fn only_consumer(&self, slot: usize) -> Option<(usize, usize)> {
        match *self.consumers[slot].as_slice() {
            [reader] => Some((reader, only_output(self.graph.nodes.get(reader)?)?)),
            _ => None,
        }
    }

    /// The other operand of `node`, if it applies `arithmetic` to `slot` and another value.
    pub fn other_operand(&self, node: usize, arithmetic: Arithmetic, slot: usize) -> Option<usize> {
        let node = &self.graph.nodes[node];
        match (node.operator.role(), node.inputs.as_slice()) {
            (Role::Arithmetic(found), [Some(a), Some(b)]) if found == arithmetic && a != b => match slot {
                slot if slot == *a => Some(*b),
                slot if slot == *b => Some(*a),
                _ => None,
            },
            _ => None,
        }
    }

    /// The slot that a node multiplies by a constant number, and the number.
    pub fn scaled(&self, node: usize) -> Option<(usize, f32)> {
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

    pub fn adds_one(&self, node: usize) -> bool {
        let node = &self.graph.nodes[node];
        let is_sum = matches!(node.operator.role(), Role::Arithmetic(Arithmetic::Add));
        is_sum && node.inputs.len() == 2 && node.inputs.iter().flatten().any(|&slot| self.number(slot) == Some(1.0))
    }

    /// The number of a constant with one element.
    pub fn number(&self, slot: usize) -> Option<f32> {
        let floats = self.graph.constants[slot].as_ref()?.floats.as_deref()?;
        match (floats, constant(self.graph, slot)?) {
            ([number], Value::Float(tensor)) if tensor.shape().len() <= 1 => Some(*number),
            _ => None,
        }
    }
}
