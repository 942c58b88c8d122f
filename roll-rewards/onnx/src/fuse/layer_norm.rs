//! Fuses layer norm as exporters write it for operator sets without LayerNormalization: `(x - mean) / sqrt(mean((x -
//! mean)^2) + epsilon)` over the last axis, times a row, plus a row.

use super::super::graph::Node;
use super::super::ops::{Arithmetic, Role, layer_norm_of_rows};
use super::super::value::Value;
use super::index::GraphIndex;
use super::{Fusion, constant, only_output};

/// Returns the chain around the Sqrt node at `index` and the node that replaces it. `None` if the chain does not
/// compute a layer norm.
///
/// The chain is followed backwards from the Sqrt to `x`, then forwards to the result. Names that end in `_node` are
/// indices of nodes, the names of tensors are slots of values.
pub fn layer_norm_at(graph_index: &GraphIndex, index: usize) -> Option<Fusion> {
    let node = |index: usize| &graph_index.graph.nodes[index];
    let sqrt_node = index;
    let Role::Sqrt = node(sqrt_node).operator.role() else { return None };
    // sqrt(variance + epsilon)
    let argument = node(sqrt_node).inputs.first().copied().flatten()?;
    let add_epsilon_node = producer_if_only_reader(graph_index, argument, sqrt_node)?;
    let (Role::Arithmetic(Arithmetic::Add), [Some(a), Some(b)]) =
        (node(add_epsilon_node).operator.role(), node(add_epsilon_node).inputs.as_slice())
    else {
        return None;
    };
    let (variance, epsilon) = match (graph_index.number(*a), graph_index.number(*b)) {
        (None, Some(epsilon)) => (*a, epsilon),
        (Some(epsilon), None) => (*b, epsilon),
        _ => return None,
    };
    // variance = mean(centred^2), the square as a power or as a product with itself
    let (variance_node, squares) = row_mean(graph_index, variance, add_epsilon_node)?;
    let square_node = producer_if_only_reader(graph_index, squares, variance_node)?;
    let centred = match (node(square_node).operator.role(), node(square_node).inputs.as_slice()) {
        (Role::Square, [Some(x), _]) => *x,
        (Role::Arithmetic(Arithmetic::Mul), [Some(a), Some(b)]) if a == b => *a,
        _ => return None,
    };
    // centred = x - mean(x)
    let centre_node = graph_index.producers[centred]?;
    let (Role::Arithmetic(Arithmetic::Sub), [Some(x), Some(mean)]) =
        (node(centre_node).operator.role(), node(centre_node).inputs.as_slice())
    else {
        return None;
    };
    let (mean_node, averaged) = row_mean(graph_index, *mean, centre_node)?;
    // centred / sqrt(..)
    let (divide_node, quotient) = graph_index.only_consumer(only_output(node(sqrt_node))?)?;
    let is_quotient = matches!(node(divide_node).operator.role(), Role::Arithmetic(Arithmetic::Div))
        && node(divide_node).inputs == [Some(centred), only_output(node(sqrt_node))];
    let only_chain_reads_centred =
        graph_index.consumers[centred].iter().all(|reader| [square_node, divide_node].contains(reader));
    if averaged != *x || !is_quotient || !only_chain_reads_centred {
        return None;
    }
    // quotient * gain + shift
    let (multiply_node, scaled) = graph_index.only_consumer(quotient)?;
    let gain = graph_index.other_operand(multiply_node, Arithmetic::Mul, quotient)?;
    let (add_shift_node, y) = graph_index.only_consumer(scaled)?;
    let shift = graph_index.other_operand(add_shift_node, Arithmetic::Add, scaled)?;
    let width = row_length(graph_index, gain)?;
    if row_length(graph_index, shift)? != width || epsilon.is_nan() || epsilon <= 0.0 {
        return None;
    }
    let nodes = vec![
        mean_node,
        centre_node,
        square_node,
        variance_node,
        add_epsilon_node,
        sqrt_node,
        divide_node,
        multiply_node,
        add_shift_node,
    ];
    let fused = Node {
        name: node(sqrt_node).name.clone(),
        kind: "LayerNormalization".to_owned(),
        operator: layer_norm_of_rows(epsilon),
        inputs: [*x, gain, shift].map(Some).to_vec(),
        outputs: vec![Some(y)],
    };
    Some((nodes, fused))
}

/// The node that computes `slot`, if `reader` is its only reader.
fn producer_if_only_reader(graph_index: &GraphIndex, slot: usize, reader: usize) -> Option<usize> {
    if graph_index.consumers[slot] == [reader] { graph_index.producers[slot] } else { None }
}

/// The node that computes `slot` as a mean over rows, and the slot that it averages, if `reader` is the only reader of
/// `slot`.
fn row_mean(graph_index: &GraphIndex, slot: usize, reader: usize) -> Option<(usize, usize)> {
    let producer = producer_if_only_reader(graph_index, slot, reader)?;
    match (graph_index.graph.nodes[producer].operator.role(), graph_index.graph.nodes[producer].inputs.first()) {
        (Role::RowMean, Some(Some(averaged))) => Some((producer, *averaged)),
        _ => None,
    }
}

/// The length of the constant row in `slot`. Rows of fewer than two numbers are excluded, because they broadcast to
/// longer rows of x.
fn row_length(graph_index: &GraphIndex, slot: usize) -> Option<usize> {
    match constant(graph_index.graph, slot)? {
        Value::Float(row) => match *row.shape() {
            [width] if width >= 2 => Some(width),
            _ => None,
        },
        Value::Int { .. } => None,
    }
}
