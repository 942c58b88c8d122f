//! Fuses a normalisation by constants that follows no convolution, and the function after it.

use roll_backends::ops::Epilogue;

use super::super::graph::{Graph, Node};
use super::super::ops::{ChannelAffine, Role};
use super::super::value::Value;
use super::search::Search;
use super::{Changes, constant, normalisation, only_output};

/// Replaces every such normalisation and the function after it by one node.
pub fn fuse(graph: Graph) -> Graph {
    let search = Search::of(&graph);
    let mut changes = Changes::none(&graph);
    for index in 0..graph.nodes.len() {
        let Some((nodes, node)) = found(&search, index) else { continue };
        changes.replace(&nodes, node);
    }
    changes.apply(graph)
}

/// The nodes that are fused around the normalisation at `index`, and the node that replaces them.
fn found(search: &Search, index: usize) -> Option<(Vec<usize>, Node)> {
    let node = &search.graph.nodes[index];
    let Role::BatchNorm(epsilon) = node.operator.role() else { return None };
    let x = node.inputs.first().copied().flatten()?;
    let Value::Float(scale) = constant(search.graph, node.inputs.get(1).copied().flatten()?)? else { return None };
    let [channels] = *scale.shape() else { return None };
    let affine = normalisation(search.graph, node, channels, epsilon)?;
    let (mut nodes, mut y, mut then, mut slope) = (vec![index], only_output(node)?, Epilogue::Nothing, None);
    if let Some((next, output)) = search.only_reader(y) {
        match search.graph.nodes[next].operator.role() {
            Role::Epilogue(function) => then = function,
            Role::Leaky(found) => (then, slope) = (Epilogue::Slopes, Some(found)),
            _ => {}
        }
        if then != Epilogue::Nothing {
            nodes.push(next);
            y = output;
        }
    }
    let operator = Box::new(ChannelAffine::new(&affine, then, slope, &scale.device())?);
    let (name, kind) = (node.name.clone(), node.kind.clone());
    Some((nodes, Node { name, kind, operator, inputs: vec![Some(x)], outputs: vec![Some(y)] }))
}
