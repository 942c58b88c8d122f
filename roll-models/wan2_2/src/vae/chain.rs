//! A chain of causal layers that runs over a video chunk by chunk, forward and backward.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use roll_backends::{NdTensor, Tape, WeightStore, ops, to_host, vjp};
use roll_core::Result;
use roll_network::precision::as_dtype;

use super::layer::{Caches, Layer, LayerContext, LayerKind, Statistics};
use super::layout::ChunkLayout;

/// Receives the output of each layer, chunk by chunk: the layer's name and a `[C, T, H, W]` tensor.
pub type Probe<'a> = &'a mut dyn FnMut(&str, &roll_core::Tensor);

/// The encoder or the decoder.
#[derive(Clone)]
pub(super) struct CausalChain {
    pub layers: Vec<Layer>,
    pub statistics: Statistics,
    pub store: Arc<dyn WeightStore>,
    /// Dtype of the layers, except of those that stay f32 ([`Layer::dtype`]).
    pub dtype: DType,
    /// Memory order of a chunk's axes.
    pub layout: ChunkLayout,
}

/// The feature cache at a chunk border: the last frames of all layers' inputs, layer after layer, in the form of
/// [`ChunkLayout::copy_frames`]. Clones share memory.
#[derive(Clone, Debug)]
pub(super) struct ChainState {
    pub first: bool,
    pub caches: Vec<Option<NdTensor>>,
}

/// Cotangents of a [`ChainState`].
pub(super) type ChainStateCotangent = Vec<Option<NdTensor>>;

/// The inputs of a layer, stored to run the layer again under autodiff.
struct LayerInputs {
    x: Tensor<4>,
    caches: Vec<Option<NdTensor>>,
}

impl CausalChain {
    /// Returns the state before the first chunk.
    pub fn start(&self) -> ChainState {
        ChainState { first: true, caches: vec![None; self.slots()] }
    }

    /// Returns the state's cotangent after the last chunk: none for any cache.
    pub fn no_cotangent(&self) -> ChainStateCotangent {
        vec![None; self.slots()]
    }

    /// Runs a chunk without autodiff. Returns its output and the next state.
    pub fn advance(
        &self,
        x: Tensor<4>,
        state: &ChainState,
        probe: Option<Probe<'_>>,
    ) -> Result<(Tensor<4>, ChainState)> {
        let (y, caches, _) = self.run(x, state, self.layers.len(), false, probe)?;
        Ok((y, ChainState { first: false, caches }))
    }

    /// The pullback of a chunk: maps the cotangents of the output and of the state after the chunk to those of the
    /// input and of the state before it. It runs the chunk again and keeps the input of each layer; then it runs one
    /// layer at a time under autodiff and pulls it back, so that only one layer's graph exists at a time.
    pub fn pull(
        &self,
        x: Tensor<4>,
        state: &ChainState,
        cotangent: Tensor<4>,
        mut after: ChainStateCotangent,
    ) -> Result<(Tensor<4>, ChainStateCotangent)> {
        // The output of the last layer is not needed.
        let Some((last, others)) = self.layers.split_last() else { return Ok((cotangent, after)) };
        let (x, _, mut tape) = self.run(x, state, others.len(), true, None)?;
        let caches = state.caches[state.caches.len() - last.slots()..].to_vec();
        tape.push(LayerInputs { x: as_dtype(x, last.dtype(self.dtype)), caches });
        let mut before = Vec::with_capacity(after.len());
        let mut cotangent = cotangent;
        let mut branches: Vec<Tensor<4>> = Vec::new();
        for (layer, inputs) in self.layers.iter().zip(tape).rev() {
            let slots = after.split_off(after.len() - layer.slots());
            cotangent = as_dtype(cotangent, layer.dtype(self.dtype));
            match layer.kind {
                LayerKind::Branch => {
                    if let Some(branch) = branches.pop() {
                        let branch = as_dtype(branch, cotangent.dtype());
                        cotangent = cotangent + branch;
                    }
                }
                LayerKind::AddResidual { .. } | LayerKind::AddAverage { .. } | LayerKind::AddDuplicate { .. } => {
                    branches.push(self.pull_shortcut(layer, inputs.x, state.first, &cotangent)?);
                }
                LayerKind::Conv { .. } | LayerKind::Activated { .. } => {
                    let (x, cache) = self.pull_linear(layer, inputs, state.first, cotangent, slots)?;
                    cotangent = x;
                    before.push(cache);
                }
                // The layer is recorded by autodiff with the other layout, because another order of sums would change
                // bits.
                LayerKind::Upsample { .. } if self.layout == ChunkLayout::ChannelsLast => {
                    let cached = layer.slots() > 0;
                    let (x, cache) = self.pull_linear(layer, inputs, state.first, cotangent, slots)?;
                    cotangent = x;
                    before.extend(cached.then_some(cache));
                }
                _ => {
                    let (x, caches) = self.pull_layer(layer, inputs, state.first, cotangent, slots)?;
                    cotangent = x;
                    before.extend(caches.into_iter().rev());
                }
            }
        }
        before.reverse();
        Ok((cotangent, before))
    }

    fn slots(&self) -> usize {
        self.layers.iter().map(Layer::slots).sum()
    }

    /// Runs the first `count` layers. With `record` it returns the input of each layer; that of a shortcut is its branch.
    fn run(
        &self,
        x: Tensor<4>,
        state: &ChainState,
        count: usize,
        record: bool,
        mut probe: Option<Probe<'_>>,
    ) -> Result<(Tensor<4>, Vec<Option<NdTensor>>, Vec<LayerInputs>)> {
        let mut x = x;
        let mut rest = &state.caches[..];
        let mut next = Vec::with_capacity(state.caches.len());
        let mut tape = Vec::new();
        let mut branches: Vec<Tensor<4>> = Vec::new();
        for layer in &self.layers[..count] {
            let (own, others) = rest.split_at(layer.slots());
            rest = others;
            x = as_dtype(x, layer.dtype(self.dtype));
            match layer.kind {
                LayerKind::Branch => {
                    branches.push(x.clone());
                    if record {
                        tape.push(LayerInputs { x: x.clone(), caches: vec![] });
                    }
                }
                LayerKind::AddResidual { .. } | LayerKind::AddAverage { .. } | LayerKind::AddDuplicate { .. } => {
                    let Some(branch) = branches.pop() else { continue };
                    if record {
                        tape.push(LayerInputs { x: branch.clone(), caches: vec![] });
                    }
                    x = x + self.with_context(layer, state.first, |context| layer.shortcut(branch, context))?;
                }
                _ => {
                    if record {
                        tape.push(LayerInputs { x: x.clone(), caches: own.to_vec() });
                    }
                    let caches = self.restored(own)?;
                    let (y, new) = self.forward(layer, x, caches, state.first)?;
                    x = y;
                    next.extend(new.into_iter().map(|cache| cache.map(|cache| self.layout.copy_frames(cache))));
                }
            }
            if let Some(probe) = probe.as_mut().filter(|_| layer.is_probed()) {
                probe(&layer.name, &to_host(x.clone())?);
            }
        }
        Ok((x, next, tape))
    }

    /// Pulls back a layer by recording it under autodiff. Its caches are flat tensors in the order of their axes.
    fn pull_layer(
        &self,
        layer: &Layer,
        inputs: LayerInputs,
        first: bool,
        cotangent: Tensor<4>,
        after: ChainStateCotangent,
    ) -> Result<(Tensor<4>, ChainStateCotangent)> {
        let LayerInputs { x, caches } = inputs;
        let dims = x.dims();
        let present: Vec<bool> = caches.iter().map(Option::is_some).collect();
        let leaves: Vec<NdTensor> = [Some(x.into())].into_iter().chain(caches).flatten().collect();
        let mut cotangents = vec![Some(NdTensor::from(cotangent))];
        let (_, recorded) = vjp(&leaves, Tape::off(), |leaves, _| {
            let mut cached = leaves[1..].iter();
            let caches = present.iter().map(|&p| match p {
                true => cached.next().map(NdTensor::rank::<4>).transpose(),
                false => Ok(None),
            });
            let (y, new) = self.forward(layer, leaves[0].rank()?, caches.collect::<Result<_>>()?, first)?;
            let mut outputs = vec![NdTensor::from(y)];
            for (new, cotangent) in new.into_iter().zip(after) {
                if let (Some(new), Some(cotangent)) = (new, cotangent) {
                    outputs.push(new.into());
                    cotangents.push(Some(cotangent));
                }
            }
            Ok(outputs)
        })?;
        let mut pulled = recorded.pull(cotangents, None).into_iter();
        let x = match pulled.next().flatten() {
            Some(x) => x.rank()?,
            None => Tensor::zeros(dims, self.store.device()),
        };
        let before = present.iter().map(|&p| if p { pulled.next().flatten() } else { None }).collect();
        Ok((x, before))
    }

    /// Pulls back a convolution without running it again: it is linear in its input.
    fn pull_linear(
        &self,
        layer: &Layer,
        inputs: LayerInputs,
        first: bool,
        cotangent: Tensor<4>,
        after: ChainStateCotangent,
    ) -> Result<(Tensor<4>, Option<NdTensor>)> {
        let next = after.into_iter().next().flatten().map(|next| self.layout.restore_frames(&next)).transpose()?;
        self.with_context(layer, first, |context| {
            let (cache, input) = match layer.kind {
                LayerKind::Upsample { .. } => layer.pull_upsample(cotangent, next, context)?,
                _ => layer.pull_convolution(cotangent, next, context)?,
            };
            let cached = matches!(inputs.caches.first(), Some(Some(_)));
            let cache = cache.filter(|_| cached).map(|cache| self.layout.copy_frames(cache));
            let LayerKind::Activated { norm, .. } = layer.kind else { return Ok((input, cache)) };
            Ok((ops::channel_norm_silu_pull(inputs.x, layer.gamma(norm, context)?, input), cache))
        })
    }

    fn pull_shortcut(&self, layer: &Layer, branch: Tensor<4>, first: bool, cotangent: &Tensor<4>) -> Result<Tensor<4>> {
        match layer.kind {
            LayerKind::AddResidual { input, output } if input == output => Ok(cotangent.clone()),
            _ => self
                .with_context(layer, first, |context| pull(branch, cotangent.clone(), |x| layer.shortcut(x, context))),
        }
    }

    fn forward(&self, layer: &Layer, x: Tensor<4>, caches: Caches, first: bool) -> Result<(Tensor<4>, Caches)> {
        self.with_context(layer, first, |context| layer.forward(x, caches, context))
    }

    fn with_context<T>(&self, layer: &Layer, first: bool, f: impl FnOnce(&LayerContext<'_>) -> Result<T>) -> Result<T> {
        let weights = self.store.segment(&format!("{}.", layer.name))?;
        f(&LayerContext { weights: &weights, statistics: &self.statistics, first, layout: self.layout })
    }

    fn restored(&self, caches: &[Option<NdTensor>]) -> Result<Caches> {
        caches.iter().map(|cache| cache.as_ref().map(|cache| self.layout.restore_frames(cache)).transpose()).collect()
    }
}

/// Maps the cotangent of `f(x)` to the cotangent of `x`.
fn pull(x: Tensor<4>, cotangent: Tensor<4>, f: impl FnOnce(Tensor<4>) -> Result<Tensor<4>>) -> Result<Tensor<4>> {
    let dims = x.dims();
    let device = x.device();
    let (_, recorded) = vjp(&[x.into()], Tape::off(), |leaves, _| Ok(vec![f(leaves[0].rank()?)?.into()]))?;
    match recorded.pull(vec![Some(cotangent.into())], None).into_iter().next().flatten() {
        Some(pulled) => pulled.rank(),
        None => Ok(Tensor::zeros(dims, &device)),
    }
}
