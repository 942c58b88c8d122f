//! A chain of causal layers that runs over a video chunk by chunk, forward and backward.
//!
//! A chunk is a `[C, T, H, W]` tensor on the device. [`CausalChain::advance`] maps a chunk and the [`ChainState`]
//! before it to the output and the state after it; [`CausalChain::pull`] is the pullback of that map.

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
    /// Whether the next chunk is the first of the video.
    pub is_first_chunk: bool,
    /// [`Layer::cache_count`] entries per layer. `None` before the first chunk.
    pub caches: Vec<Option<NdTensor>>,
}

/// Cotangents of the caches of a [`ChainState`], in the same order. `None` is a cotangent of zero.
pub(super) type ChainStateCotangent = Vec<Option<NdTensor>>;

/// The inputs of a layer, stored to pull the layer back.
struct LayerInputs {
    /// The chunk that the layer reads. A shortcut reads the input of its block.
    x: Tensor<4>,
    caches: Vec<Option<NdTensor>>,
}

/// The results of [`CausalChain::run`].
struct ChunkRun {
    output: Tensor<4>,
    /// The caches after the chunk.
    caches: Vec<Option<NdTensor>>,
    /// The inputs of each layer. Empty unless they are recorded.
    inputs: Vec<LayerInputs>,
}

/// Whether [`CausalChain::run`] returns the inputs of each layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RecordInputs {
    Yes,
    No,
}

impl CausalChain {
    /// Returns the state before the first chunk.
    pub fn start(&self) -> ChainState {
        ChainState { is_first_chunk: true, caches: vec![None; self.cache_count()] }
    }

    /// Returns the cotangent of the state after the last chunk: zero, because nothing reads that state.
    pub fn no_cotangent(&self) -> ChainStateCotangent {
        vec![None; self.cache_count()]
    }

    /// Runs a chunk without autodiff. Returns its output and the next state.
    pub fn advance(&self, x: Tensor<4>, state: &ChainState) -> Result<(Tensor<4>, ChainState)> {
        self.advance_probed(x, state, None)
    }

    /// Runs a chunk like [`CausalChain::advance`]. `probe` receives every layer's output.
    pub fn advance_probed(
        &self,
        x: Tensor<4>,
        state: &ChainState,
        probe: Option<Probe<'_>>,
    ) -> Result<(Tensor<4>, ChainState)> {
        let run = self.run(x, state, self.layers.len(), RecordInputs::No, probe)?;
        Ok((run.output, ChainState { is_first_chunk: false, caches: run.caches }))
    }

    /// The pullback of a chunk: maps `cotangent`, of the output, and `after`, the cotangent of the state after the
    /// chunk, to the cotangents of the input and of `state`, the state before the chunk. It runs the chunk again and
    /// keeps the inputs of each layer; then it pulls back one layer at a time, last layer first, so that at most one
    /// layer's autodiff graph exists at a time.
    pub fn pull(
        &self,
        x: Tensor<4>,
        state: &ChainState,
        cotangent: Tensor<4>,
        mut after: ChainStateCotangent,
    ) -> Result<(Tensor<4>, ChainStateCotangent)> {
        // The output of the last layer is not needed, so the last layer does not run.
        let Some((last, others)) = self.layers.split_last() else { return Ok((cotangent, after)) };
        let no_probe = None;
        let run = self.run(x, state, others.len(), RecordInputs::Yes, no_probe)?;
        let mut inputs_of_layers = run.inputs;
        let last_caches = state.caches[state.caches.len() - last.cache_count()..].to_vec();
        inputs_of_layers.push(LayerInputs { x: as_dtype(run.output, last.dtype(self.dtype)), caches: last_caches });
        let is_first_chunk = state.is_first_chunk;
        // Last cache first.
        let mut before = Vec::with_capacity(after.len());
        let mut cotangent = cotangent;
        // Cotangents of the inputs of the blocks that are being pulled back, innermost block last.
        let mut branch_cotangents: Vec<Tensor<4>> = Vec::new();
        for (layer, inputs) in self.layers.iter().zip(inputs_of_layers).rev() {
            let layer_after = after.split_off(after.len() - layer.cache_count());
            cotangent = as_dtype(cotangent, layer.dtype(self.dtype));
            match layer.kind {
                // The start of a block: its input has been read by the block's layers and by its shortcut.
                LayerKind::Branch => {
                    if let Some(of_shortcut) = branch_cotangents.pop() {
                        let of_shortcut = as_dtype(of_shortcut, cotangent.dtype());
                        cotangent = cotangent + of_shortcut;
                    }
                }
                // The end of a block is a sum, so the block's layers receive `cotangent` as it is.
                LayerKind::AddResidual { .. } | LayerKind::AddAverage { .. } | LayerKind::AddDuplicate { .. } => {
                    branch_cotangents.push(self.pull_shortcut(layer, inputs.x, is_first_chunk, &cotangent)?);
                }
                LayerKind::Conv { .. } | LayerKind::NormSiluConv { .. } => {
                    let (x, cache) = self.pull_convolution(layer, inputs, is_first_chunk, cotangent, layer_after)?;
                    cotangent = x;
                    before.push(cache);
                }
                // With `ChannelsFirst`, `pull_layer` pulls an upsampling back, because another order of sums would
                // change bits.
                LayerKind::Upsample { .. } if self.layout == ChunkLayout::ChannelsLast => {
                    let has_cache = layer.cache_count() > 0;
                    let (x, cache) = self.pull_convolution(layer, inputs, is_first_chunk, cotangent, layer_after)?;
                    cotangent = x;
                    before.extend(has_cache.then_some(cache));
                }
                LayerKind::Patchify
                | LayerKind::Unpatchify
                | LayerKind::FromLatents { .. }
                | LayerKind::ToLatents { .. }
                | LayerKind::Attention { .. }
                | LayerKind::Upsample { .. }
                | LayerKind::Downsample { .. } => {
                    let (x, caches) = self.pull_layer(layer, inputs, is_first_chunk, cotangent, layer_after)?;
                    cotangent = x;
                    before.extend(caches.into_iter().rev());
                }
            }
        }
        before.reverse();
        Ok((cotangent, before))
    }

    /// Number of caches of all layers.
    fn cache_count(&self) -> usize {
        self.layers.iter().map(Layer::cache_count).sum()
    }

    /// Runs the first `count` layers.
    fn run(
        &self,
        mut x: Tensor<4>,
        state: &ChainState,
        count: usize,
        record: RecordInputs,
        mut probe: Option<Probe<'_>>,
    ) -> Result<ChunkRun> {
        // The caches of the layers that have not run yet.
        let mut remaining_caches = &state.caches[..];
        let mut new_caches = Vec::with_capacity(state.caches.len());
        let mut recorded = Vec::new();
        // Inputs of the blocks that are being run, innermost block last.
        let mut branches: Vec<Tensor<4>> = Vec::new();
        for layer in &self.layers[..count] {
            let (layer_caches, later_caches) = remaining_caches.split_at(layer.cache_count());
            remaining_caches = later_caches;
            x = as_dtype(x, layer.dtype(self.dtype));
            match layer.kind {
                // The start of a block.
                LayerKind::Branch => {
                    branches.push(x.clone());
                    if record == RecordInputs::Yes {
                        recorded.push(LayerInputs { x: x.clone(), caches: vec![] });
                    }
                }
                // The end of a block.
                LayerKind::AddResidual { .. } | LayerKind::AddAverage { .. } | LayerKind::AddDuplicate { .. } => {
                    let Some(branch) = branches.pop() else { continue };
                    if record == RecordInputs::Yes {
                        recorded.push(LayerInputs { x: branch.clone(), caches: vec![] });
                    }
                    let term =
                        self.with_context(layer, state.is_first_chunk, |context| layer.shortcut(branch, context))?;
                    x = x + term;
                }
                // A layer outside or inside a block.
                _ => {
                    if record == RecordInputs::Yes {
                        recorded.push(LayerInputs { x: x.clone(), caches: layer_caches.to_vec() });
                    }
                    let caches_before = self.restored(layer_caches)?;
                    let (y, caches_after) = self.forward(layer, x, caches_before, state.is_first_chunk)?;
                    x = y;
                    for cache in caches_after {
                        new_caches.push(cache.map(|cache| self.layout.copy_frames(cache)));
                    }
                }
            }
            if layer.is_probed()
                && let Some(probe) = probe.as_mut()
            {
                probe(&layer.name, &to_host(x.clone())?);
            }
        }
        Ok(ChunkRun { output: x, caches: new_caches, inputs: recorded })
    }

    /// Pulls back a layer by running it under autodiff. Returns the cotangents of its input and of its caches. Layers
    /// with caches come here only with [`ChunkLayout::ChannelsFirst`], so a stored cache has the axes of a chunk.
    fn pull_layer(
        &self,
        layer: &Layer,
        inputs: LayerInputs,
        is_first_chunk: bool,
        cotangent: Tensor<4>,
        after: ChainStateCotangent,
    ) -> Result<(Tensor<4>, ChainStateCotangent)> {
        let LayerInputs { x, caches } = inputs;
        let dims = x.dims();
        let has_value: Vec<bool> = caches.iter().map(Option::is_some).collect();
        let leaves: Vec<NdTensor> = [Some(x.into())].into_iter().chain(caches).flatten().collect();
        let mut cotangents = vec![Some(NdTensor::from(cotangent))];
        let (_, recorded) = vjp(&leaves, Tape::off(), |leaves, _| {
            let mut cache_leaves = leaves[1..].iter();
            let caches = has_value.iter().map(|&has_value| {
                if has_value { cache_leaves.next().map(NdTensor::rank::<4>).transpose() } else { Ok(None) }
            });
            let (y, new_caches) =
                self.forward(layer, leaves[0].rank()?, caches.collect::<Result<_>>()?, is_first_chunk)?;
            // A cache without a cotangent is not an output of the differentiated function.
            let mut outputs = vec![NdTensor::from(y)];
            for (cache, cotangent) in new_caches.into_iter().zip(after) {
                if let (Some(cache), Some(cotangent)) = (cache, cotangent) {
                    outputs.push(cache.into());
                    cotangents.push(Some(cotangent));
                }
            }
            Ok(outputs)
        })?;
        // One entry per leaf: the input, then the caches that have a value.
        let mut pulled = recorded.pull(cotangents, None).into_iter();
        let x = match pulled.next().flatten() {
            Some(x) => x.rank()?,
            None => Tensor::zeros(dims, self.store.device()),
        };
        let before =
            has_value.iter().map(|&has_value| if has_value { pulled.next().flatten() } else { None }).collect();
        Ok((x, before))
    }

    /// Pulls back a layer's convolution without running it again (the convolution is linear), and the norm and SiLU
    /// before it. Returns the cotangents of the layer's input and of its only cache.
    fn pull_convolution(
        &self,
        layer: &Layer,
        inputs: LayerInputs,
        is_first_chunk: bool,
        cotangent: Tensor<4>,
        after: ChainStateCotangent,
    ) -> Result<(Tensor<4>, Option<NdTensor>)> {
        let after = after.into_iter().next().flatten().map(|after| self.layout.restore_frames(&after)).transpose()?;
        self.with_context(layer, is_first_chunk, |context| {
            let (cache, convolved) = match layer.kind {
                LayerKind::Upsample { .. } => layer.pull_upsample(cotangent, after, context)?,
                _ => layer.pull_convolution(cotangent, after, context)?,
            };
            // In the second chunk an upsampling reads zeros instead of a cache: there is no cotangent to return.
            let has_cache = matches!(inputs.caches.first(), Some(Some(_)));
            let cache = if has_cache { cache.map(|cache| self.layout.copy_frames(cache)) } else { None };
            let LayerKind::NormSiluConv { norm, .. } = layer.kind else { return Ok((convolved, cache)) };
            Ok((ops::channel_norm_silu_pull(inputs.x, layer.gamma(norm, context)?, convolved), cache))
        })
    }

    /// Maps the cotangent of a block's output to the cotangent of the block's input (`branch`) by way of the shortcut.
    fn pull_shortcut(
        &self,
        layer: &Layer,
        branch: Tensor<4>,
        is_first_chunk: bool,
        cotangent: &Tensor<4>,
    ) -> Result<Tensor<4>> {
        match layer.kind {
            // The shortcut is the identity.
            LayerKind::AddResidual { input, output } if input == output => Ok(cotangent.clone()),
            _ => self.with_context(layer, is_first_chunk, |context| {
                pull(branch, cotangent.clone(), |x| layer.shortcut(x, context))
            }),
        }
    }

    /// Runs a layer that is not part of a shortcut. Returns its output and its caches after the chunk.
    fn forward(
        &self,
        layer: &Layer,
        x: Tensor<4>,
        caches: Caches,
        is_first_chunk: bool,
    ) -> Result<(Tensor<4>, Caches)> {
        self.with_context(layer, is_first_chunk, |context| layer.forward(x, caches, context))
    }

    /// Calls `f` with the layer's weights, read from the store, and the other operands.
    fn with_context<T>(
        &self,
        layer: &Layer,
        is_first_chunk: bool,
        f: impl FnOnce(&LayerContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let weights = self.store.segment(&format!("{}.", layer.name))?;
        f(&LayerContext { weights: &weights, statistics: &self.statistics, is_first_chunk, layout: self.layout })
    }

    /// Stored caches as the layer reads them.
    fn restored(&self, caches: &[Option<NdTensor>]) -> Result<Caches> {
        caches.iter().map(|cache| cache.as_ref().map(|cache| self.layout.restore_frames(cache)).transpose()).collect()
    }
}

/// Maps the cotangent of `f(x)` to the cotangent of `x`, by running `f` under autodiff.
fn pull(x: Tensor<4>, cotangent: Tensor<4>, f: impl FnOnce(Tensor<4>) -> Result<Tensor<4>>) -> Result<Tensor<4>> {
    let dims = x.dims();
    let device = x.device();
    let (_, recorded) = vjp(&[x.into()], Tape::off(), |leaves, _| Ok(vec![f(leaves[0].rank()?)?.into()]))?;
    match recorded.pull(vec![Some(cotangent.into())], None).into_iter().next().flatten() {
        Some(pulled) => pulled.rank(),
        None => Ok(Tensor::zeros(dims, &device)),
    }
}
