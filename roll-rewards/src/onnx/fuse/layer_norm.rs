//! Fuses layer norm as exporters write it for operator sets without LayerNormalization: `(x - mean) / sqrt(mean((x -
//! mean)^2) + epsilon)` over the last axis, times a row, plus a row.

use super::super::graph::{Graph, Node};
use super::super::ops::{Arithmetic, Role, layer_norm_of_rows};
use super::super::value::Value;
use super::search::Search;
use super::{Changes, constant, only_output};

/// Replaces every layer norm in `graph` by one node.
pub fn fuse(graph: Graph) -> Graph {
    let search = Search::of(&graph);
    let mut changes = Changes::none(&graph);
    for index in 0..graph.nodes.len() {
        let Some(found) = found(&search, index) else { continue };
        if found.nodes.iter().any(|&i| changes.gone[i]) {
            continue;
        }
        let node = Node {
            name: graph.nodes[index].name.clone(),
            kind: "LayerNormalization".to_owned(),
            operator: layer_norm_of_rows(found.epsilon),
            inputs: found.inputs.into_iter().map(Some).collect(),
            outputs: vec![Some(found.y)],
        };
        changes.replace(&found.nodes, node);
    }
    changes.apply(graph)
}

struct Found {
    /// The slots of x, gain and shift.
    inputs: [usize; 3],
    epsilon: f32,
    y: usize,
    nodes: Vec<usize>,
}

/// The chain around the Sqrt node at `index`, if it is a layer norm.
fn found(search: &Search, index: usize) -> Option<Found> {
    let node = |index: usize| &search.graph.nodes[index];
    let Role::Sqrt = node(index).operator.role() else { return None };
    let argument = node(index).inputs.first().copied().flatten()?;
    let plus = only_maker(search, argument, index)?;
    let (Role::Two(Arithmetic::Add), [Some(a), Some(b)]) = (node(plus).operator.role(), node(plus).inputs.as_slice())
    else {
        return None;
    };
    let (variance, epsilon) = match (search.number(*a), search.number(*b)) {
        (None, Some(epsilon)) => (*a, epsilon),
        (Some(epsilon), None) => (*b, epsilon),
        _ => return None,
    };
    let (mean_square, square) = row_mean(search, variance, plus)?;
    let squared = only_maker(search, square, mean_square)?;
    let centred = match (node(squared).operator.role(), node(squared).inputs.as_slice()) {
        (Role::Square, [Some(x), _]) => *x,
        (Role::Two(Arithmetic::Mul), [Some(a), Some(b)]) if a == b => *a,
        _ => return None,
    };
    let minus = search.makers[centred]?;
    let (Role::Two(Arithmetic::Sub), [Some(x), Some(mean)]) =
        (node(minus).operator.role(), node(minus).inputs.as_slice())
    else {
        return None;
    };
    let (mean, of) = row_mean(search, *mean, minus)?;
    let (divided, quotient) = search.only_reader(only_output(node(index))?)?;
    let is_quotient = matches!(node(divided).operator.role(), Role::Two(Arithmetic::Div))
        && node(divided).inputs == [Some(centred), only_output(node(index))];
    // No other node may read the centred value.
    let alone = search.readers[centred].iter().all(|reader| [squared, divided].contains(reader));
    if of != *x || !is_quotient || !alone {
        return None;
    }
    let (times, scaled) = search.only_reader(quotient)?;
    let gain = search.other(times, Arithmetic::Mul, quotient)?;
    let (added, y) = search.only_reader(scaled)?;
    let shift = search.other(added, Arithmetic::Add, scaled)?;
    let width = row(search, gain)?;
    let nodes = vec![mean, minus, squared, mean_square, plus, index, divided, times, added];
    let found = Found { inputs: [*x, gain, shift], epsilon, y, nodes };
    (row(search, shift)? == width && epsilon > 0.0).then_some(found)
}

/// The node that computes `slot`, if `reader` is its only reader.
fn only_maker(search: &Search, slot: usize, reader: usize) -> Option<usize> {
    (search.readers[slot] == [reader]).then(|| search.makers[slot])?
}

/// The node that computes `slot` as a mean over rows, and the slot that it averages, if `reader` is its only reader.
fn row_mean(search: &Search, slot: usize, reader: usize) -> Option<(usize, usize)> {
    let maker = only_maker(search, slot, reader)?;
    match (search.graph.nodes[maker].operator.role(), search.graph.nodes[maker].inputs.first()) {
        (Role::RowMean, Some(Some(of))) => Some((maker, *of)),
        _ => None,
    }
}

/// The length of a constant row. Rows of fewer than two numbers are excluded, because they broadcast to longer rows of
/// x.
fn row(search: &Search, slot: usize) -> Option<usize> {
    match constant(search.graph, slot)? {
        Value::Float(row) => match *row.shape() {
            [width] if width >= 2 => Some(width),
            _ => None,
        },
        Value::Int { .. } => None,
    }
}
