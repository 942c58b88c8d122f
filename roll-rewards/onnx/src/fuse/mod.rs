//! Graph fusion: replaces chains of nodes by one operator when a graph is opened.
//!
//! A convolution absorbs what follows it. Normalisations by constants, and sums and products with one constant per
//! channel, are folded into its weights. One sum with another value and one elementwise function after it run in the
//! epilogue of the convolution. A value is fused away only if no other node reads it and it is not an output.
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

/// Replaces the chains that `fusion_at` recognises at a node. Chains with a common node are not both replaced.
fn fuse_chains(graph: Graph, fusion_at: fn(&GraphIndex, usize) -> Option<Fusion>) -> Graph {
    let uses = GraphIndex::of(&graph);
    let mut replacements = Replacements::none(&graph);
    for index in 0..graph.nodes.len() {
        if let Some((nodes, node)) = fusion_at(&uses, index)
            && !nodes.iter().any(|&i| replacements.removed[i])
        {
            replacements.replace(&nodes, node);
        }
    }
    replacements.apply(graph)
}

struct Replacements {
    removed: Vec<bool>,
    inserted: Vec<Option<Node>>,
}

impl Replacements {
    fn none(graph: &Graph) -> Self {
        let count = graph.nodes.len();
        Self { removed: vec![false; count], inserted: (0..count).map(|_| None).collect() }
    }

    /// Replaces `nodes` by `node` at the position of the last of them, because its inputs may be computed immediately
    /// before.
    fn replace(&mut self, nodes: &[usize], node: Node) {
        nodes.iter().for_each(|&i| self.removed[i] = true);
        if let Some(last) = nodes.iter().max() {
            self.inserted[*last] = Some(node);
        }
    }

    fn apply(self, mut graph: Graph) -> Graph {
        let all = std::mem::take(&mut graph.nodes).into_iter().zip(self.removed).zip(self.inserted);
        graph.nodes = all.filter_map(|((node, removed), inserted)| inserted.or((!removed).then_some(node))).collect();
        graph
    }
}

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

/// The nodes that read each value. [`GRAPH_OUTPUT`] is a reader of every output.
fn consumers(graph: &Graph) -> Vec<Vec<usize>> {
    let mut consumers = vec![vec![]; graph.slot_count];
    for (index, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().flatten().for_each(|slot| consumers[*slot].push(index));
    }
    graph.outputs.iter().for_each(|slot| consumers[*slot].push(GRAPH_OUTPUT));
    consumers
}

const GRAPH_OUTPUT: usize = usize::MAX;

/// A convolution and the nodes after it that are already fused.
struct Chain {
    nodes: Vec<usize>,
    /// The slots of the convolution's input and of the last node's output.
    input: usize,
    output: usize,
    weight: usize,
    bias: Option<usize>,
    conv: Conv,
    channels: usize,
    /// Number of axes of the result.
    rank: usize,
    /// Factor of the weights and offset of each output channel, if anything was folded.
    affine: Option<Vec<[f64; 2]>>,
    added: Option<usize>,
    then: Epilogue,
    slopes: Option<Vec<f32>>,
}

impl Chain {
    fn start(graph: &Graph, index: usize) -> Option<Self> {
        let node = &graph.nodes[index];
        let Role::Conv(conv) = node.operator.role() else { return None };
        let (input, output) = (node.inputs.first().copied().flatten()?, only_output(node)?);
        let weight = node.inputs.get(1).copied().flatten()?;
        let shape = constant(graph, weight)?.shape();
        let bias = node.inputs.get(2).copied().flatten();
        let fits = |slot: usize| constant(graph, slot).is_some_and(|b| b.shape() == [shape[0]]);
        // Other inputs are left to the operator, which refuses or computes them.
        if graph.constants[input].is_some() || !(3..=4).contains(&shape.len()) || !bias.is_none_or(fits) {
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
            then: Epilogue::Nothing,
            slopes: None,
        })
    }

    /// Fuses the next node if possible.
    fn extend(&mut self, graph: &Graph, consumers: &[Vec<usize>], removed: &[bool]) -> bool {
        match *consumers[self.output].as_slice() {
            [next] if next != GRAPH_OUTPUT && !removed[next] => {
                self.fold(graph, next) || self.add(graph, next) || self.end(graph, next)
            }
            [a, b] if a != GRAPH_OUTPUT && b != GRAPH_OUTPUT && !removed[a] && !removed[b] => {
                self.silu(graph, consumers, [a, b])
            }
            _ => false,
        }
    }

    fn take(&mut self, graph: &Graph, index: usize) -> bool {
        let Some(output) = only_output(&graph.nodes[index]) else { return false };
        self.nodes.push(index);
        self.output = output;
        true
    }

    /// Folds a normalisation, or a sum or product with one number per channel, into weights and bias.
    fn fold(&mut self, graph: &Graph, next: usize) -> bool {
        if self.added.is_some() || self.then != Epilogue::Nothing {
            return false;
        }
        let node = &graph.nodes[next];
        let found = match node.operator.role() {
            Role::BatchNorm(epsilon) if node.inputs.first().copied().flatten() == Some(self.output) => {
                normalisation(graph, node, self.channels, epsilon)
            }
            Role::Arithmetic(arithmetic) => self.arithmetic(graph, node, arithmetic),
            _ => None,
        };
        let Some(found) = found else { return false };
        let finite = |[factor, offset]: &[f64; 2]| factor.is_finite() && offset.is_finite();
        if !found.iter().all(finite) || only_output(node).is_none() {
            return false;
        }
        let before = self.affine.take().unwrap_or_else(|| vec![[1.0, 0.0]; self.channels]);
        let both = before.iter().zip(&found).map(|([a, b], [factor, offset])| [a * factor, b * factor + offset]);
        self.affine = Some(both.collect());
        self.take(graph, next)
    }

    fn arithmetic(&self, graph: &Graph, node: &Node, arithmetic: Arithmetic) -> Option<Vec<[f64; 2]>> {
        let [Some(left), Some(right)] = *node.inputs.as_slice() else { return None };
        let (first, other) = if left == self.output { (true, right) } else { (false, left) };
        let values = self.by_channel(graph, other)?;
        let pair = |v: f32| {
            let v = f64::from(v);
            Some(match (arithmetic, first) {
                (Arithmetic::Add, _) => [1.0, v],
                (Arithmetic::Sub, true) => [1.0, -v],
                (Arithmetic::Sub, false) => [-1.0, v],
                (Arithmetic::Mul, _) => [v, 0.0],
                (Arithmetic::Div, true) => [1.0 / v, 0.0],
                (Arithmetic::Div, false) => return None,
            })
        };
        values.into_iter().map(pair).collect()
    }

    /// A constant as one number per channel, if it is constant along all other axes.
    fn by_channel(&self, graph: &Graph, slot: usize) -> Option<Vec<f32>> {
        let Value::Float(constant) = constant(graph, slot)? else { return None };
        let shape = constant.shape();
        let axis = |i: usize| i + self.rank - shape.len();
        if shape.len() > self.rank
            || !shape.iter().enumerate().all(|(i, &d)| d == 1 || axis(i) == 1 && d == self.channels)
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
    fn add(&mut self, graph: &Graph, next: usize) -> bool {
        let node = &graph.nodes[next];
        let (Role::Arithmetic(Arithmetic::Add), [Some(left), Some(right)]) =
            (node.operator.role(), node.inputs.as_slice())
        else {
            return false;
        };
        let other = if *left == self.output { *right } else { *left };
        if self.added.is_some() || self.then != Epilogue::Nothing || graph.constants[other].is_some() {
            return false;
        }
        let taken = self.take(graph, next);
        if taken {
            self.added = Some(other);
        }
        taken
    }

    /// Fuses an elementwise function into the epilogue, which ends the chain.
    fn end(&mut self, graph: &Graph, next: usize) -> bool {
        let node = &graph.nodes[next];
        if self.then != Epilogue::Nothing || node.inputs.first().copied().flatten() != Some(self.output) {
            return false;
        }
        let (then, slopes) = match node.operator.role() {
            Role::Epilogue(then) => (then, None),
            Role::LeakyRelu(slope) => (Epilogue::Slopes, Some(vec![slope; self.channels])),
            Role::PRelu => match node.inputs.get(1).copied().flatten().and_then(|s| self.by_channel(graph, s)) {
                Some(slopes) => (Epilogue::Slopes, Some(slopes)),
                None => return false,
            },
            _ => return false,
        };
        let taken = self.take(graph, next);
        if taken {
            (self.then, self.slopes) = (then, slopes);
        }
        taken
    }

    /// Fuses a product with its own sigmoid into the epilogue (SiLU), which ends the chain, too.
    fn silu(&mut self, graph: &Graph, consumers: &[Vec<usize>], pair: [usize; 2]) -> bool {
        let is_sigmoid = |i: usize| matches!(graph.nodes[i].operator.role(), Role::Epilogue(Epilogue::Sigmoid));
        let [sigmoid, product] = if is_sigmoid(pair[0]) { pair } else { [pair[1], pair[0]] };
        let product_node = &graph.nodes[product];
        let (true, Role::Arithmetic(Arithmetic::Mul)) = (is_sigmoid(sigmoid), product_node.operator.role()) else {
            return false;
        };
        let Some(gate) = only_output(&graph.nodes[sigmoid]) else { return false };
        let operands = [Some(self.output), Some(gate)];
        let both = product_node.inputs == operands || product_node.inputs == [operands[1], operands[0]];
        if self.then != Epilogue::Nothing || !both || consumers[gate] != [product] {
            return false;
        }
        let taken = self.take(graph, product);
        if taken {
            self.nodes.push(sigmoid);
            self.then = Epilogue::Silu;
        }
        taken
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
        let operator = FusedConv::new(&self.conv, &weight, bias.as_ref(), (self.then, slopes), self.added.is_some())?;
        let first = &graph.nodes[self.nodes[0]];
        Some(Node {
            name: first.name.clone(),
            kind: first.kind.clone(),
            operator: Box::new(operator),
            inputs: [Some(self.input)].into_iter().chain(self.added.map(Some)).collect(),
            outputs: vec![Some(self.output)],
        })
    }
}

/// Multiplies weights and adds to the bias per output channel. `None` if a result exceeds the range of f32.
fn folded(
    weight: &NdTensor,
    bias: Option<&NdTensor>,
    affine: &[[f64; 2]],
    device: &Device,
) -> Option<(NdTensor, Option<NdTensor>)> {
    let mut values = to_host_nd(weight).ok()?.to_f32_vec();
    let before = match bias {
        Some(bias) => to_host_nd(bias).ok()?.to_f32_vec(),
        None => vec![0.0; affine.len()],
    };
    let row = values.len() / affine.len().max(1);
    for (row, [factor, _]) in values.chunks_exact_mut(row.max(1)).zip(affine) {
        row.iter_mut().for_each(|w| *w = (f64::from(*w) * factor) as f32);
    }
    let bias: Vec<f32> =
        before.iter().zip(affine).map(|(b, [factor, offset])| (f64::from(*b) * factor + offset) as f32).collect();
    if !values.iter().chain(&bias).all(|v| v.is_finite()) {
        return None;
    }
    let channels = affine.len();
    Some((upload(values, weight.shape().to_vec(), device), Some(upload(bias, vec![channels], device))))
}

/// The output of a node that has exactly one.
fn only_output(node: &Node) -> Option<usize> {
    match *node.outputs.as_slice() {
        [Some(output)] => Some(output),
        _ => None,
    }
}

fn constant(graph: &Graph, slot: usize) -> Option<&Value> {
    graph.constants[slot].as_ref().map(|c| &c.value)
}

/// Factor and offset per channel of a normalisation, if its statistics are constants.
fn normalisation(graph: &Graph, node: &Node, channels: usize, epsilon: f32) -> Option<Vec<[f64; 2]>> {
    let one = |index: usize| {
        let Value::Float(values) = constant(graph, node.inputs.get(index).copied().flatten()?)? else { return None };
        (values.shape() == [channels]).then(|| to_host_nd(values).ok())?.map(|t| t.to_f32_vec())
    };
    let (scale, bias, mean, variance) = (one(1)?, one(2)?, one(3)?, one(4)?);
    let affine = |c: usize| {
        let factor = f64::from(scale[c]) / (f64::from(variance[c]) + f64::from(epsilon)).sqrt();
        [factor, f64::from(bias[c]) - f64::from(mean[c]) * factor]
    };
    Some((0..channels).map(affine).collect())
}
