//! Fuses a BatchNorm and the activation after it. A BatchNorm after a convolution is already part of the convolution,
//! because [`super::fuse`] fuses convolutions first.

use roll_backends::ops::Epilogue;

use super::super::graph::Node;
use super::super::ops::{ChannelAffine, Role};
use super::super::value::Value;
use super::index::GraphIndex;
use super::{Fusion, constant, normalisation, only_output};

/// Returns the chain at `index` and the node that replaces it. The chain is a BatchNorm and, if its only consumer is an
/// activation, this activation. `None` if the node is no BatchNorm with constant parameters.
pub fn norm_at(graph_index: &GraphIndex, index: usize) -> Option<Fusion> {
    let node = &graph_index.graph.nodes[index];
    let Role::BatchNorm(epsilon) = node.operator.role() else { return None };
    let x = node.inputs.first().copied().flatten()?;
    let Value::Float(scale) = constant(graph_index.graph, node.inputs.get(1).copied().flatten()?)? else { return None };
    let [channels] = *scale.shape() else { return None };
    let affine = normalisation(graph_index.graph, node, channels, epsilon)?;
    let (mut nodes, mut y, mut epilogue, mut slope) = (vec![index], only_output(node)?, Epilogue::Nothing, None);
    if let Some((next, output)) = graph_index.only_consumer(y) {
        match graph_index.graph.nodes[next].operator.role() {
            Role::Epilogue(function) => epilogue = function,
            // `Slopes` with one slope for all channels.
            Role::LeakyRelu(found) => (epilogue, slope) = (Epilogue::Slopes, Some(found)),
            _ => {}
        }
        if epilogue != Epilogue::Nothing {
            nodes.push(next);
            y = output;
        }
    }
    let operator = Box::new(ChannelAffine::new(&affine, epilogue, slope, &scale.device())?);
    let (name, kind) = (node.name.clone(), node.kind.clone());
    Some((nodes, Node { name, kind, operator, inputs: vec![Some(x)], outputs: vec![Some(y)] }))
}
