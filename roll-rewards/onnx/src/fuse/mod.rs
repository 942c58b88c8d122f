//! Graph fusion: replaces chains of nodes by one operator when a graph is opened.
//!
//! A convolution absorbs the nodes after it. Normalisations by constants, and sums and products with one constant per
//! channel, are folded into its weights and bias. After these, one sum with another value and one elementwise function
//! run in the epilogue of the convolution. A value is fused away only if no other node reads it and it is not an output
//! of the graph.
//!
//! Functions that exporters write as several nodes (`gelu`, `layer_norm`, `linear`, `norm`) become one node.
//!
//! Weights are folded in f64; results differ from those of the original graph by a few roundings.

mod gelu;
mod index;
mod layer_norm;
mod linear;
mod norm;

use burn_tensor::Device;
use roll_backends::NdTensor;
use roll_backends::host::to_host_nd;
use roll_backends::ops::Epilogue;

use index::GraphIndex;

use super::graph::{Graph, Node};
use super::ops::{Arithmetic, Conv, FusedConv, Role};
use super::value::{Value, upload};

/// Returns `graph` with fewer nodes and the same results.
pub(super) fn fuse(graph: Graph, device: &Device) -> Graph {
    let elements = graph.constant_elements();
    let mut graph = fuse_convolutions(graph, device);
    for fusion_at in [gelu::gelu_at, layer_norm::layer_norm_at, linear::linear_at, norm::norm_at] {
        graph = fuse_chains(graph, fusion_at);
    }
    // The original weights are no longer needed once they are folded.
    graph.drop_unused_constants();
    graph.fused_elements = elements - graph.constant_elements();
    graph
}

/// A chain of nodes, and the node that replaces it.
type Fusion = (Vec<usize>, Node);

/// Replaces the chains that `fusion_at` recognises at each node. If chains have a common node, only the first one is
/// replaced.
fn fuse_chains(graph: Graph, fusion_at: fn(&GraphIndex, usize) -> Option<Fusion>) -> Graph {
    let graph_index = GraphIndex::of(&graph);
    let mut replacements = Replacements::none(&graph);
    for index in 0..graph.nodes.len() {
        if let Some((nodes, node)) = fusion_at(&graph_index, index)
            && !nodes.iter().any(|&i| replacements.removed[i])
        {
            replacements.replace(&nodes, node);
        }
    }
    replacements.apply(graph)
}

/// Changes of a graph's nodes, by the index of the original node.
struct Replacements {
    removed: Vec<bool>,
    /// The node that takes the place of the original node.
    inserted: Vec<Option<Node>>,
}

impl Replacements {
    /// No change.
    fn none(graph: &Graph) -> Self {
        let count = graph.nodes.len();
        Self { removed: vec![false; count], inserted: (0..count).map(|_| None).collect() }
    }

    /// Replaces `nodes` by `node`, at the position of the last of `nodes`. At an earlier position, an input of `node`
    /// might not be computed yet.
    fn replace(&mut self, nodes: &[usize], node: Node) {
        nodes.iter().for_each(|&i| self.removed[i] = true);
        if let Some(last) = nodes.iter().max() {
            self.inserted[*last] = Some(node);
        }
    }

    /// Returns `graph` with these changes.
    fn apply(self, mut graph: Graph) -> Graph {
        let all = std::mem::take(&mut graph.nodes).into_iter().zip(self.removed).zip(self.inserted);
        graph.nodes = all.filter_map(|((node, removed), inserted)| inserted.or((!removed).then_some(node))).collect();
        graph
    }
}

/// Fuses each convolution with the nodes after it, as far as possible.
fn fuse_convolutions(graph: Graph, device: &Device) -> Graph {
    let consumers = consumers(&graph);
    let mut replacements = Replacements::none(&graph);
    for index in 0..graph.nodes.len() {
        if replacements.removed[index] {
            continue;
        }
        let Some(mut chain) = Chain::start(&graph, index) else { continue };
        while chain.extend(&graph, &consumers, &replacements.removed) {}
        let Some(node) = chain.finish(&graph, device) else { continue };
        replacements.replace(&chain.nodes, node);
    }
    replacements.apply(graph)
}

/// The nodes that read each slot. [`GRAPH_OUTPUT`] is a reader of every output of the graph.
fn consumers(graph: &Graph) -> Vec<Vec<usize>> {
    let mut consumers = vec![vec![]; graph.slot_count];
    for (index, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().flatten().for_each(|slot| consumers[*slot].push(index));
    }
    graph.outputs.iter().for_each(|slot| consumers[*slot].push(GRAPH_OUTPUT));
    consumers
}

/// The index of no node: the reader that represents the graph's outputs.
const GRAPH_OUTPUT: usize = usize::MAX;

/// `[factor, offset]` per output channel: `y * factor + offset`.
type Affine = Vec<[f64; 2]>;

/// A convolution and the nodes after it that are already fused with it.
struct Chain {
    nodes: Vec<usize>,
    /// Slot of the convolution's input.
    input: usize,
    /// Slot of the last node's output.
    output: usize,
    /// Slot of the convolution's weights.
    weight: usize,
    /// Slot of the convolution's bias.
    bias: Option<usize>,
    conv: Conv,
    /// Number of output channels.
    channels: usize,
    /// Number of axes of the result.
    rank: usize,
    /// Applied to the result of the convolution, if anything was folded.
    affine: Option<Affine>,
    /// Slot of the value that the epilogue adds.
    added: Option<usize>,
    /// The function that the epilogue applies last.
    epilogue: Epilogue,
    /// The slopes of [`Epilogue::Slopes`], per channel.
    slopes: Option<Vec<f32>>,
}

impl Chain {
    /// Begins a chain at the node `index`; `None` if it is no convolution that can be fused.
    fn start(graph: &Graph, index: usize) -> Option<Self> {
        let node = &graph.nodes[index];
        let Role::Conv(conv) = node.operator.role() else { return None };
        let (input, output) = (node.inputs.first().copied().flatten()?, only_output(node)?);
        let weight = node.inputs.get(1).copied().flatten()?;
        let shape = constant(graph, weight)?.shape();
        let bias = node.inputs.get(2).copied().flatten();
        let bias_fits = |slot: usize| constant(graph, slot).is_some_and(|b| b.shape() == [shape[0]]);
        // A constant input, more than two spatial axes, or an unusual bias: the operator Conv computes or refuses it.
        if graph.constants[input].is_some() || !(3..=4).contains(&shape.len()) || !bias.is_none_or(bias_fits) {
            return None;
        }
        Some(Self {
            nodes: vec![index],
            input,
            output,
            weight,
            bias,
            conv: conv.clone(),
            channels: shape[0],
            rank: shape.len(),
            affine: None,
            added: None,
            epilogue: Epilogue::Nothing,
            slopes: None,
        })
    }

    /// Fuses the next node if possible. Returns whether it did.
    fn extend(&mut self, graph: &Graph, consumers: &[Vec<usize>], removed: &[bool]) -> bool {
        match *consumers[self.output].as_slice() {
            [next] if next != GRAPH_OUTPUT && !removed[next] => {
                self.fuse_affine(graph, next) || self.fuse_sum(graph, next) || self.fuse_function(graph, next)
            }
            [a, b] if a != GRAPH_OUTPUT && b != GRAPH_OUTPUT && !removed[a] && !removed[b] => {
                self.fuse_silu(graph, consumers, [a, b])
            }
            _ => false,
        }
    }

    /// Appends the node `index` to the chain; false if the node has not exactly one output.
    fn append(&mut self, graph: &Graph, index: usize) -> bool {
        let Some(output) = only_output(&graph.nodes[index]) else { return false };
        self.nodes.push(index);
        self.output = output;
        true
    }

    /// Folds a normalisation, or a sum or product with one number per channel, into weights and bias.
    fn fuse_affine(&mut self, graph: &Graph, next: usize) -> bool {
        if self.added.is_some() || self.epilogue != Epilogue::Nothing {
            return false;
        }
        let node = &graph.nodes[next];
        let next_affine = match node.operator.role() {
            Role::BatchNorm(epsilon) if node.inputs.first().copied().flatten() == Some(self.output) => {
                normalisation(graph, node, self.channels, epsilon)
            }
            Role::Arithmetic(arithmetic) => self.affine_of(graph, node, arithmetic),
            _ => None,
        };
        let Some(next_affine) = next_affine else { return false };
        let is_finite = |[factor, offset]: &[f64; 2]| factor.is_finite() && offset.is_finite();
        if !next_affine.iter().all(is_finite) || only_output(node).is_none() {
            return false;
        }
        let affine = self.affine.take().unwrap_or_else(|| vec![[1.0, 0.0]; self.channels]);
        let composed =
            affine.iter().zip(&next_affine).map(|([a, b], [factor, offset])| [a * factor, b * factor + offset]);
        self.affine = Some(composed.collect());
        self.append(graph, next)
    }

    /// The sum, difference, product or quotient of the chain's output and a constant, as an affine function of the
    /// output.
    fn affine_of(&self, graph: &Graph, node: &Node, arithmetic: Arithmetic) -> Option<Affine> {
        let [Some(left), Some(right)] = *node.inputs.as_slice() else { return None };
        let output_is_left = left == self.output;
        let values = self.by_channel(graph, if output_is_left { right } else { left })?;
        let factor_and_offset = |v: f32| {
            let v = f64::from(v);
            Some(match (arithmetic, output_is_left) {
                (Arithmetic::Add, _) => [1.0, v],
                (Arithmetic::Sub, true) => [1.0, -v],
                (Arithmetic::Sub, false) => [-1.0, v],
                (Arithmetic::Mul, _) => [v, 0.0],
                (Arithmetic::Div, true) => [1.0 / v, 0.0],
                // A constant divided by the output is not affine.
                (Arithmetic::Div, false) => return None,
            })
        };
        values.into_iter().map(factor_and_offset).collect()
    }

    /// The constant in `slot` as one number per channel, if it is constant along all other axes.
    fn by_channel(&self, graph: &Graph, slot: usize) -> Option<Vec<f32>> {
        let Value::Float(constant) = constant(graph, slot)? else { return None };
        let shape = constant.shape();
        // Broadcasting aligns the last axes; the channels are axis 1 of the result.
        let axis_of_result = |i: usize| i + self.rank - shape.len();
        if shape.len() > self.rank
            || !shape.iter().enumerate().all(|(i, &d)| d == 1 || axis_of_result(i) == 1 && d == self.channels)
        {
            return None;
        }
        let values = to_host_nd(constant).ok()?.to_f32_vec();
        match *values.as_slice() {
            [one] => Some(vec![one; self.channels]),
            _ => Some(values),
        }
    }

    /// Fuses a sum with another value into the epilogue.
    fn fuse_sum(&mut self, graph: &Graph, next: usize) -> bool {
        let node = &graph.nodes[next];
        let (Role::Arithmetic(Arithmetic::Add), [Some(left), Some(right)]) =
            (node.operator.role(), node.inputs.as_slice())
        else {
            return false;
        };
        let other = if *left == self.output { *right } else { *left };
        if self.added.is_some() || self.epilogue != Epilogue::Nothing || graph.constants[other].is_some() {
            return false;
        }
        let appended = self.append(graph, next);
        if appended {
            self.added = Some(other);
        }
        appended
    }

    /// Fuses an elementwise function into the epilogue. The chain ends with it.
    fn fuse_function(&mut self, graph: &Graph, next: usize) -> bool {
        let node = &graph.nodes[next];
        if self.epilogue != Epilogue::Nothing || node.inputs.first().copied().flatten() != Some(self.output) {
            return false;
        }
        let (epilogue, slopes) = match node.operator.role() {
            Role::Epilogue(function) => (function, None),
            Role::LeakyRelu(slope) => (Epilogue::Slopes, Some(vec![slope; self.channels])),
            Role::PRelu => match node.inputs.get(1).copied().flatten().and_then(|s| self.by_channel(graph, s)) {
                Some(slopes) => (Epilogue::Slopes, Some(slopes)),
                None => return false,
            },
            _ => return false,
        };
        let appended = self.append(graph, next);
        if appended {
            (self.epilogue, self.slopes) = (epilogue, slopes);
        }
        appended
    }

    /// Fuses SiLU, the product of the chain's output and its sigmoid, into the epilogue. The chain ends with it.
    /// `readers` are the two nodes that read the output.
    fn fuse_silu(&mut self, graph: &Graph, consumers: &[Vec<usize>], readers: [usize; 2]) -> bool {
        let is_sigmoid = |i: usize| matches!(graph.nodes[i].operator.role(), Role::Epilogue(Epilogue::Sigmoid));
        let [sigmoid, product] = if is_sigmoid(readers[0]) { readers } else { [readers[1], readers[0]] };
        let product_node = &graph.nodes[product];
        let is_product = matches!(product_node.operator.role(), Role::Arithmetic(Arithmetic::Mul));
        if !is_sigmoid(sigmoid) || !is_product {
            return false;
        }
        let Some(gate) = only_output(&graph.nodes[sigmoid]) else { return false };
        let operands = [Some(self.output), Some(gate)];
        let multiplies_both = product_node.inputs == operands || product_node.inputs == [operands[1], operands[0]];
        if self.epilogue != Epilogue::Nothing || !multiplies_both || consumers[gate] != [product] {
            return false;
        }
        let appended = self.append(graph, product);
        if appended {
            self.nodes.push(sigmoid);
            self.epilogue = Epilogue::Silu;
        }
        appended
    }

    /// The fused node; `None` if the original operators must run.
    fn finish(&self, graph: &Graph, device: &Device) -> Option<Node> {
        let Value::Float(weight) = constant(graph, self.weight)? else { return None };
        let bias = match self.bias {
            Some(slot) => Some(constant(graph, slot)?.float().ok()?.clone()),
            None => None,
        };
        let (weight, bias) = match &self.affine {
            None => (weight.clone(), bias),
            Some(affine) => folded(weight, bias.as_ref(), affine, device)?,
        };
        let slopes = self.slopes.clone().map(|slopes| upload(slopes, vec![self.channels], device));
        let epilogue = (self.epilogue, slopes);
        let operator = FusedConv::new(&self.conv, &weight, bias.as_ref(), epilogue, self.added.is_some())?;
        let convolution = &graph.nodes[self.nodes[0]];
        Some(Node {
            name: convolution.name.clone(),
            kind: convolution.kind.clone(),
            operator: Box::new(operator),
            inputs: [Some(self.input)].into_iter().chain(self.added.map(Some)).collect(),
            outputs: vec![Some(self.output)],
        })
    }
}

/// Weights and bias of a convolution whose result is that of the given weights and bias after `affine`. `None` if a
/// number exceeds the range of f32.
fn folded(
    weight: &NdTensor,
    bias: Option<&NdTensor>,
    affine: &[[f64; 2]],
    device: &Device,
) -> Option<(NdTensor, Option<NdTensor>)> {
    let channels = affine.len();
    let mut weights = to_host_nd(weight).ok()?.to_f32_vec();
    let biases = match bias {
        Some(bias) => to_host_nd(bias).ok()?.to_f32_vec(),
        None => vec![0.0; channels],
    };
    let weights_per_channel = weights.len() / channels.max(1);
    for (weights_of_channel, [factor, _]) in weights.chunks_exact_mut(weights_per_channel.max(1)).zip(affine) {
        weights_of_channel.iter_mut().for_each(|w| *w = (f64::from(*w) * factor) as f32);
    }
    let folded_biases: Vec<f32> =
        biases.iter().zip(affine).map(|(b, [factor, offset])| (f64::from(*b) * factor + offset) as f32).collect();
    if !weights.iter().chain(&folded_biases).all(|v| v.is_finite()) {
        return None;
    }
    let weight = upload(weights, weight.shape().to_vec(), device);
    Some((weight, Some(upload(folded_biases, vec![channels], device))))
}

/// The output of a node that has exactly one.
fn only_output(node: &Node) -> Option<usize> {
    match *node.outputs.as_slice() {
        [Some(output)] => Some(output),
        _ => None,
    }
}

/// The value in `slot`, if it is constant.
fn constant(graph: &Graph, slot: usize) -> Option<&Value> {
    graph.constants[slot].as_ref().map(|c| &c.value)
}

/// The BatchNorm `node` as an affine function, if its parameters are constants.
fn normalisation(graph: &Graph, node: &Node, channels: usize, epsilon: f32) -> Option<Affine> {
    let parameter = |input: usize| {
        let Value::Float(values) = constant(graph, node.inputs.get(input).copied().flatten()?)? else { return None };
        if values.shape() != [channels] {
            return None;
        }
        Some(to_host_nd(values).ok()?.to_f32_vec())
    };
    let (scale, bias, mean, variance) = (parameter(1)?, parameter(2)?, parameter(3)?, parameter(4)?);
    let factor_and_offset = |c: usize| {
        let factor = f64::from(scale[c]) / (f64::from(variance[c]) + f64::from(epsilon)).sqrt();
        [factor, f64::from(bias[c]) - f64::from(mean[c]) * factor]
    };
    Some((0..channels).map(factor_and_offset).collect())
}
