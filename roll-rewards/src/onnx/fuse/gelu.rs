//! Fuses GELU as exporters write it, `x * (1 + erf(x / sqrt(2))) / 2`, with its factors in any order.

use super::super::graph::{Graph, Node};
use super::super::ops::{Arithmetic, Role, exact_gelu};
use super::search::Search;
use super::{Changes, only_output};

/// Replaces every GELU in `graph` by one node.
pub fn fuse(graph: Graph) -> Graph {
    let search = Search::of(&graph);
    let mut changes = Changes::none(&graph);
    for index in 0..graph.nodes.len() {
        let Some(found) = found(&search, index) else { continue };
        if found.nodes.iter().any(|&i| changes.gone[i]) {
            continue;
        }
        let name = graph.nodes[index].name.clone();
        let (inputs, outputs) = (vec![Some(found.x)], vec![Some(found.y)]);
        changes.replace(&found.nodes, Node { name, kind: "Gelu".to_owned(), operator: exact_gelu(), inputs, outputs });
    }
    changes.apply(graph)
}

/// A chain of nodes that computes the GELU of `x`.
struct Found {
    x: usize,
    y: usize,
    nodes: Vec<usize>,
}

/// The chain around the Erf node at `index`, if it is a GELU.
fn found(search: &Search, index: usize) -> Option<Found> {
    let erf = &search.graph.nodes[index];
    let Role::Erf = erf.operator.role() else { return None };
    let argument = erf.inputs.first().copied().flatten()?;
    let divided = search.makers[argument]?;
    let (x, factor) = search.scaled(divided)?;
    if search.readers[argument] != [index] || (factor - std::f32::consts::FRAC_1_SQRT_2).abs() > 1e-6 {
        return None;
    }
    let (plus, sum) = search.only_reader(only_output(erf)?)?;
    if !search.adds_one(plus) {
        return None;
    }
    let (product, first) = search.only_reader(sum)?;
    let nodes = [divided, index, plus, product];
    let done = |more: usize, y: usize| Some(Found { x, y, nodes: nodes.iter().copied().chain([more]).collect() });
    if search.scaled(product) == Some((sum, 0.5)) {
        let (last, y) = search.only_reader(first)?;
        return if search.other(last, Arithmetic::Mul, first)? == x { done(last, y) } else { None };
    }
    let mate = search.other(product, Arithmetic::Mul, sum)?;
    if mate == x {
        let (last, y) = search.only_reader(first)?;
        return if search.scaled(last)? == (first, 0.5) { done(last, y) } else { None };
    }
    let half = search.makers[mate]?;
    let is_half = search.scaled(half)? == (x, 0.5) && search.readers[mate] == [product];
    if is_half { done(half, first) } else { None }
}
