//! Fuses a product with a constant matrix and the sum with a constant row after it.

use super::super::graph::{Graph, Node};
use super::super::ops::{Arithmetic, Linear, Role};
use super::super::value::Value;
use super::search::Search;
use super::{Changes, constant, only_output};

/// Replaces every such product and sum in `graph` by one node.
pub fn fuse(mut graph: Graph) -> Graph {
    let search = Search::of(&graph);
    let mut changes = Changes::none(&graph);
    let mut numbers = 0;
    for index in 0..graph.nodes.len() {
        let Some((added, node, held)) = found(&search, index) else { continue };
        changes.replace(&[index, added], node);
        numbers += held;
    }
    graph.fused += numbers;
    changes.apply(graph)
}

/// The index of the sum after the product at `index`, the node that replaces both, and the number of weights in it.
fn found(search: &Search, index: usize) -> Option<(usize, Node, usize)> {
    let node = &search.graph.nodes[index];
    let (Role::MatMul, [Some(x), Some(weight)]) = (node.operator.role(), node.inputs.as_slice()) else { return None };
    let product = only_output(node)?;
    let (added, y) = search.only_reader(product)?;
    let bias = search.other(added, Arithmetic::Add, product)?;
    let (Value::Float(weight), Value::Float(bias)) = (constant(search.graph, *weight)?, constant(search.graph, bias)?)
    else {
        return None;
    };
    let operator = Box::new(Linear::new(weight, bias)?);
    let (name, kind) = (node.name.clone(), node.kind.clone());
    let node = Node { name, kind, operator, inputs: vec![Some(*x)], outputs: vec![Some(y)] };
    Some((added, node, weight.shape().iter().product()))
}
