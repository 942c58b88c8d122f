//! A pass of the encoder or decoder over a whole video, tile by tile and chunk by chunk, and its pullback in reverse
//! order. Input, output and cotangents are tensors in host memory.

use std::ops::Range;
use std::sync::Arc;

use burn_tensor::Tensor as Burn;
use roll_core::{Error, Grad, Pullback, Result, Tensor};

use super::chain::{CausalChain, ChainState, ChainStateCotangent, Probe};
use super::checkpointed::CheckpointedState;
use super::clamp::clamp;
use super::frames::{ChunkAccumulator, ChunkReader, chunk_frames, chunks_per_copy};
use super::schedule::{Reversible, Schedule};
use super::tiling::Tile;
use super::volume::{Volume, Window};

/// A network, the geometry of the video that passes through it, and what the pullback keeps. The first chunk is one
/// frame of the input and one frame of the output.
pub(super) struct Pass {
    pub chain: Arc<CausalChain>,
    pub input: Volume,
    pub output: Volume,
    /// Frames of the input per chunk, except in the first chunk.
    pub input_chunk: usize,
    /// Frames of the output per chunk, except in the first chunk.
    pub output_chunk: usize,
    /// Number of chunks.
    pub chunks: usize,
    /// Tiles with their windows in the input and in the output.
    pub tiles: Vec<Tile>,
    /// Number of checkpoints for the pullback. The state before the first chunk is not counted.
    pub checkpoints: usize,
    /// Whether checkpoints are kept in host memory.
    pub offloads_checkpoints: bool,
}

/// States before some chunks, ascending, each with its chunk's number.
type Checkpoints = Vec<(usize, CheckpointedState)>;

impl Pass {
    /// Computes the output and, with [`Grad::Record`], the pullback to the input.
    ///
    /// A pass with one tile stores the checkpoints for the pullback. If there are several tiles, the pullback runs each
    /// tile again, so that only one tile's states are in memory at a time.
    pub fn run(self, input: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let shape = self.output.shape();
        let no_probe = None;
        let (values, pullback) = self.output_values(input, grad, no_probe)?;
        Ok((Tensor::new(values, shape)?, pullback))
    }

    /// Computes the output like [`Pass::run`], without a gradient. `probe` receives every layer's output, chunk by
    /// chunk.
    pub fn run_probed(self, input: &Tensor, probe: Probe<'_>) -> Result<Tensor> {
        let shape = self.output.shape();
        let (values, _) = self.output_values(input, Grad::Skip, Some(probe))?;
        Tensor::new(values, shape)
    }

    /// Computes output and pullback like [`Pass::run`], with an output clamped to [-1, 1]. Values that the clamp
    /// changed receive no gradient.
    pub fn run_clamped(self, input: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let shape = self.output.shape();
        let no_probe = None;
        let (mut values, pullback) = self.output_values(input, grad, no_probe)?;
        let clamp_pullback = clamp(&mut values, &shape);
        let pullback =
            pullback.map(|pullback| Pullback::new(move |cotangent| pullback.pull(&clamp_pullback.pull(cotangent)?)));
        Ok((Tensor::new(values, shape)?, pullback))
    }

    /// Computes the values of the output, in the order of its volume, and the pullback like [`Pass::run`].
    fn output_values(
        self,
        input: &Tensor,
        grad: Grad,
        mut probe: Option<Probe<'_>>,
    ) -> Result<(Vec<f32>, Option<Pullback>)> {
        let schedule = Schedule::new(self.chunks, self.checkpoints);
        let positions = schedule.checkpoint_positions();
        let store_checkpoints = grad.is_on() && self.tiles.len() == 1;
        let mut checkpoints = Vec::new();
        let mut reader = self.reader(&self.input, input.f32s()?, self.input_chunk);
        let mut output = self.accumulator(&self.output, self.output_chunk);
        for tile in &self.tiles {
            let mut state = self.chain.start();
            for chunk in 0..self.chunks {
                if store_checkpoints && positions.contains(&chunk) {
                    self.push_checkpoint(&mut checkpoints, chunk, &state)?;
                }
                let x = reader.read(chunk, &window(&tile.input, chunk, self.input_chunk), None);
                // An explicit reborrow: `as_deref_mut` cannot shorten the lifetime of a boxed closure's captures.
                let probe: Option<Probe<'_>> = match &mut probe {
                    Some(probe) => Some(&mut **probe),
                    None => None,
                };
                let (y, next) = self.chain.advance_probed(x, &state, probe)?;
                state = next;
                output.add(window(&tile.output, chunk, self.output_chunk), y, tile.blend.as_deref())?;
            }
        }
        let output = output.finish()?;
        drop(reader);
        let pullback = grad.is_on().then(|| {
            let input = input.clone();
            Pullback::new(move |cotangent| self.pull(&input, cotangent, &schedule, checkpoints))
        });
        Ok((output, pullback))
    }

    /// Maps the cotangent of the output to the cotangent of the input. `stored` is empty unless there is one tile,
    /// whose checkpoints the forward pass has stored.
    fn pull(&self, input: &Tensor, cotangent: &Tensor, schedule: &Schedule, mut stored: Checkpoints) -> Result<Tensor> {
        if cotangent.shape() != self.output.shape() {
            let expected = format!("{:?}", self.output.shape());
            return Err(Error::shape("cotangent of the VAE's result", expected, cotangent.shape()));
        }
        let mut input = self.reader(&self.input, input.f32s()?, self.input_chunk);
        let mut cotangent = self.reader(&self.output, cotangent.f32s()?, self.output_chunk);
        let mut gradient = self.accumulator(&self.input, self.input_chunk);
        for tile in &self.tiles {
            let after = self.chain.no_cotangent();
            let checkpoints = if !stored.is_empty() {
                std::mem::take(&mut stored)
            } else if self.offloads_checkpoints {
                self.recompute_checkpoints(tile, &mut input, schedule)?
            } else {
                // The reversal makes further checkpoints itself, on the device.
                vec![(0, CheckpointedState::OnDevice(self.chain.start()))]
            };
            let (input, cotangent, gradient) = (&mut input, &mut cotangent, &mut gradient);
            schedule.reverse(&mut TilePull { pass: self, tile, input, cotangent, gradient, after }, checkpoints)?;
        }
        Tensor::new(gradient.finish()?, self.input.shape())
    }

    /// Runs a tile only to store its checkpoints.
    fn recompute_checkpoints(
        &self,
        tile: &Tile,
        input: &mut ChunkReader<'_>,
        schedule: &Schedule,
    ) -> Result<Checkpoints> {
        let positions = schedule.checkpoint_positions();
        let (mut state, mut checkpoints) = (self.chain.start(), Vec::new());
        for position in 0..=positions.last().copied().unwrap_or(0) {
            // `state` becomes the state before chunk `position`.
            if position > 0 {
                let chunk = position - 1;
                let x = input.read(chunk, &window(&tile.input, chunk, self.input_chunk), None);
                state = self.chain.advance(x, &state)?.1;
            }
            if positions.contains(&position) {
                self.push_checkpoint(&mut checkpoints, position, &state)?;
            }
        }
        Ok(checkpoints)
    }

    /// Appends `state`, the state before chunk `position`, to the checkpoints.
    fn push_checkpoint(&self, checkpoints: &mut Checkpoints, position: usize, state: &ChainState) -> Result<()> {
        // At most one state may be in flight to the host, because the device has memory for only one.
        if let Some((_, previous)) = checkpoints.last_mut() {
            previous.settle()?;
        }
        checkpoints.push((position, self.checkpoint_of(state)?));
        Ok(())
    }

    /// Keeps a state on the device, or starts its copy to host memory.
    fn checkpoint_of(&self, state: &ChainState) -> Result<CheckpointedState> {
        if self.offloads_checkpoints {
            CheckpointedState::offload(state)
        } else {
            Ok(CheckpointedState::OnDevice(state.clone()))
        }
    }

    /// A reader of `values`, in chunks of `frames` frames.
    fn reader<'a>(&'a self, volume: &'a Volume, values: &'a [f32], frames: usize) -> ChunkReader<'a> {
        let device = self.chain.store.device();
        ChunkReader::new(volume, values, frames, chunks_per_copy(volume, frames, device), device)
    }

    /// An accumulator of chunks of `frames` frames.
    fn accumulator<'a>(&self, volume: &'a Volume, frames: usize) -> ChunkAccumulator<'a> {
        ChunkAccumulator::new(volume, chunks_per_copy(volume, frames, self.chain.store.device()))
    }
}

/// The pullback of one tile, last chunk first. A step is a chunk.
struct TilePull<'a, 'v> {
    pass: &'a Pass,
    tile: &'a Tile,
    /// The input of the pass.
    input: &'a mut ChunkReader<'v>,
    /// The cotangent of the output.
    cotangent: &'a mut ChunkReader<'v>,
    /// The cotangent of the input, to which the tile's part is added.
    gradient: &'a mut ChunkAccumulator<'v>,
    /// Cotangent of the state after the chunk that is pulled back next.
    after: ChainStateCotangent,
}

impl TilePull<'_, '_> {
    /// The input of a chunk, on the device.
    fn input_of(&mut self, step: usize) -> Burn<4> {
        self.input.read(step, &window(&self.tile.input, step, self.pass.input_chunk), None)
    }
}

impl Reversible for TilePull<'_, '_> {
    type State = ChainState;
    type Checkpoint = CheckpointedState;

    fn prefetch(&mut self, checkpoint: &mut CheckpointedState) -> Result<()> {
        checkpoint.prefetch()
    }

    fn hold(&mut self, state: ChainState) -> Result<CheckpointedState> {
        let mut checkpoint = self.pass.checkpoint_of(&state)?;
        // Another owner would keep the state's memory on the device after `settle`.
        drop(state);
        checkpoint.settle()?;
        Ok(checkpoint)
    }

    fn restore(&mut self, checkpoint: CheckpointedState) -> Result<ChainState> {
        checkpoint.restore()
    }

    fn advance(&mut self, step: usize, state: &ChainState) -> Result<ChainState> {
        let x = self.input_of(step);
        Ok(self.pass.chain.advance(x, state)?.1)
    }

    fn pull(&mut self, step: usize, state: &ChainState) -> Result<()> {
        let x = self.input_of(step);
        let Self { pass, tile, .. } = self;
        let output_window = window(&tile.output, step, pass.output_chunk);
        let cotangent = self.cotangent.read(step, &output_window, tile.blend.as_deref());
        let (gradient, before) = pass.chain.pull(x, state, cotangent, std::mem::take(&mut self.after))?;
        // The state before this chunk is the state after the chunk that is pulled back next.
        self.after = before;
        self.gradient.add(window(&tile.input, step, pass.input_chunk), gradient, None)
    }
}

/// The window of chunk number `chunk` in a tile with these rows and columns, if chunks have `frames` frames.
fn window(plane: &[Range<usize>; 2], chunk: usize, frames: usize) -> Window {
    let [rows, columns] = plane.clone();
    Window { frames: chunk_frames(chunk, frames), rows, columns }
}
