//! Fuses layer norm as exporters write it for operator sets without LayerNormalization: `(x - mean) / sqrt(mean((x -
//! mean)^2) + epsilon)` over the last axis, times a row, plus a row.

use super::super::graph::Node;
use super::super::ops::{Arithmetic, Role, layer_norm_of_rows};
use super::super::value::Value;
use super::index::GraphIndex;
use super::{Fusion, constant, only_output};

/// The chain around the Sqrt node at `index`, if it computes a layer norm, and the node that replaces it.
pub fn layer_norm_at(uses: &GraphIndex, index: usize) -> Option<Fusion> {
    let node = |index: usize| &uses.graph.nodes[index];
    let Role::Sqrt = node(index).operator.role() else { return None };
    let argument = node(index).inputs.first().copied().flatten()?;
    let plus = only_producer(uses, argument, index)?;
    let (Role::Arithmetic(Arithmetic::Add), [Some(a), Some(b)]) =
        (node(plus).operator.role(), node(plus).inputs.as_slice())
    else {
        return None;
    };
    let (variance, epsilon) = match (uses.number(*a), uses.number(*b)) {
        (None, Some(epsilon)) => (*a, epsilon),
        (Some(epsilon), None) => (*b, epsilon),
        _ => return None,
    };
    let (mean_square, square) = row_mean(uses, variance, plus)?;
    let squared = only_producer(uses, square, mean_square)?;
    let centred = match (node(squared).operator.role(), node(squared).inputs.as_slice()) {
        (Role::Square, [Some(x), _]) => *x,
        (Role::Arithmetic(Arithmetic::Mul), [Some(a), Some(b)]) if a == b => *a,
        _ => return None,
    };
    let minus = uses.producers[centred]?;
    let (Role::Arithmetic(Arithmetic::Sub), [Some(x), Some(mean)]) =
        (node(minus).operator.role(), node(minus).inputs.as_slice())
    else {
        return None;
    };
    let (mean, of) = row_mean(uses, *mean, minus)?;
    let (divided, quotient) = uses.only_consumer(only_output(node(index))?)?;
    let is_quotient = matches!(node(divided).operator.role(), Role::Arithmetic(Arithmetic::Div))
        && node(divided).inputs == [Some(centred), only_output(node(index))];
    // No other node may read the centred value.
    let alone = uses.consumers[centred].iter().all(|reader| [squared, divided].contains(reader));
    if of != *x || !is_quotient || !alone {
        return None;
    }
    let (times, scaled) = uses.only_consumer(quotient)?;
    let gain = uses.other_operand(times, Arithmetic::Mul, quotient)?;
    let (added, y) = uses.only_consumer(scaled)?;
    let shift = uses.other_operand(added, Arithmetic::Add, scaled)?;
    let width = row(uses, gain)?;
    if row(uses, shift)? != width || epsilon.is_nan() || epsilon <= 0.0 {
        return None;
    }
    let nodes = vec![mean, minus, squared, mean_square, plus, index, divided, times, added];
    let fused = Node {
        name: node(index).name.clone(),
        kind: "LayerNormalization".to_owned(),
        operator: layer_norm_of_rows(epsilon),
        inputs: [*x, gain, shift].map(Some).to_vec(),
        outputs: vec![Some(y)],
    };
    Some((nodes, fused))
}

/// The node that computes `slot`, if `reader` is its only reader.
fn only_producer(uses: &GraphIndex, slot: usize, reader: usize) -> Option<usize> {
    (uses.consumers[slot] == [reader]).then(|| uses.producers[slot])?
}

/// The node that computes `slot` as a mean over rows, and the slot that it averages, if `reader` is its only reader.
fn row_mean(uses: &GraphIndex, slot: usize, reader: usize) -> Option<(usize, usize)> {
    let maker = only_producer(uses, slot, reader)?;
    match (uses.graph.nodes[maker].operator.role(), uses.graph.nodes[maker].inputs.first()) {
        (Role::RowMean, Some(Some(of))) => Some((maker, *of)),
        _ => None,
    }
}

/// The length of a constant row. Rows of fewer than two numbers are excluded, because they broadcast to longer rows of
/// x.
fn row(uses: &GraphIndex, slot: usize) -> Option<usize> {
    match constant(uses.graph, slot)? {
        Value::Float(row) => match *row.shape() {
            [width] if width >= 2 => Some(width),
            _ => None,
        },
        Value::Int { .. } => None,
    }
}
