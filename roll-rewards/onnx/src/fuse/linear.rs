//! Fuses a MatMul with a constant matrix and the Add of a constant row after it into one linear layer.

use super::super::graph::Node;
use super::super::ops::{Arithmetic, Linear, Role};
use super::super::value::Value;
use super::index::GraphIndex;
use super::{Fusion, constant, only_output};

/// Returns the MatMul at `index` and the Add after it, and the node that replaces both. `None` if they are no linear
/// layer with constant weights.
pub fn linear_at(graph_index: &GraphIndex, index: usize) -> Option<Fusion> {
    let node = &graph_index.graph.nodes[index];
    let (Role::MatMul, [Some(x), Some(weight)]) = (node.operator.role(), node.inputs.as_slice()) else { return None };
    let product = only_output(node)?;
    let (add_node, y) = graph_index.only_consumer(product)?;
    let bias = graph_index.other_operand(add_node, Arithmetic::Add, product)?;
    let (Value::Float(weight), Value::Float(bias)) =
        (constant(graph_index.graph, *weight)?, constant(graph_index.graph, bias)?)
    else {
        return None;
    };
    let operator = Box::new(Linear::new(weight, bias)?);
    let (name, kind) = (node.name.clone(), node.kind.clone());
    let fused = Node { name, kind, operator, inputs: vec![Some(*x)], outputs: vec![Some(y)] };
    Some((vec![index, add_node], fused))
}
