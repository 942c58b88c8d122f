//! A pass of the encoder or decoder over a whole video, tile by tile and chunk by chunk, and its pullback in reverse
//! order.

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

/// Geometry of a pass. The first chunk is one frame of input and output; every other chunk is `chunk` frames.
pub(super) struct Pass {
    pub chain: Arc<CausalChain>,
    pub input: Volume,
    pub output: Volume,
    /// Frames per chunk of the input and of the output, except in the first chunk.
    pub chunk: [usize; 2],
    pub chunks: usize,
    /// Tiles with their windows in the input and in the output.
    pub tiles: Vec<Tile>,
    /// Number of checkpoints for the pullback, besides the first state.
    pub checkpoints: usize,
    /// Whether checkpoints are kept in host memory.
    pub offload: bool,
}

impl Pass {
    /// Computes the output and, with [`Grad::Record`], the pullback to the input.
    ///
    /// A pass with one tile stores the checkpoints for the pullback. If there are several tiles, the pullback runs each
    /// tile again, so that only one tile's states are in memory at a time.
    pub fn run(self, input: &Tensor, grad: Grad, probe: Option<Probe<'_>>) -> Result<(Tensor, Option<Pullback>)> {
        let shape = self.output.shape();
        let (values, pullback) = self.values(input, grad, probe)?;
        Ok((Tensor::new(values, shape)?, pullback))
    }

    /// Like [`Pass::run`], with an output clamped to [-1, 1]. Values that the clamp changed receive no gradient.
    pub fn run_clamped(self, input: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let shape = self.output.shape();
        let (mut values, pullback) = self.values(input, grad, None)?;
        let clamp = clamp(&mut values, &shape);
        let pullback = pullback.map(|pullback| Pullback::new(move |cotangent| pullback.pull(&clamp.pull(cotangent)?)));
        Ok((Tensor::new(values, shape)?, pullback))
    }

    fn values(self, input: &Tensor, grad: Grad, mut probe: Option<Probe<'_>>) -> Result<(Vec<f32>, Option<Pullback>)> {
        let schedule = Schedule::new(self.chunks, self.checkpoints);
        let positions = schedule.checkpoint_positions();
        let store_checkpoints = grad.is_on() && self.tiles.len() == 1;
        let mut checkpoints = Vec::new();
        let mut reader = self.reader(&self.input, input.f32s()?, self.chunk[0]);
        let mut output = self.accumulator(&self.output, self.chunk[1]);
        for tile in &self.tiles {
            let mut state = self.chain.start();
            for k in 0..self.chunks {
                if store_checkpoints && positions.contains(&k) {
                    self.checkpoint(&mut checkpoints, k, &state)?;
                }
                let x = reader.read(k, &window(&tile.input, k, self.chunk[0]), None);
                // An explicit reborrow: `as_deref_mut` cannot shorten the lifetime of a boxed closure's captures.
                let probe: Option<Probe<'_>> = match &mut probe {
                    Some(probe) => Some(&mut **probe),
                    None => None,
                };
                let (y, next) = self.chain.advance(x, &state, probe)?;
                state = next;
                output.add(window(&tile.output, k, self.chunk[1]), y, tile.blend.as_deref())?;
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

    fn pull(
        &self,
        input: &Tensor,
        cotangent: &Tensor,
        schedule: &Schedule,
        mut checkpoints: Vec<(usize, CheckpointedState)>,
    ) -> Result<Tensor> {
        if cotangent.shape() != self.output.shape() {
            let expected = format!("{:?}", self.output.shape());
            return Err(Error::shape("cotangent of the VAE's result", expected, cotangent.shape()));
        }
        let mut input = self.reader(&self.input, input.f32s()?, self.chunk[0]);
        let mut cotangent = self.reader(&self.output, cotangent.f32s()?, self.chunk[1]);
        let mut gradient = self.accumulator(&self.input, self.chunk[0]);
        for tile in &self.tiles {
            let after = self.chain.no_cotangent();
            let checkpoints = match std::mem::take(&mut checkpoints) {
                stored if !stored.is_empty() => stored,
                _ if self.offload => self.recompute_checkpoints(tile, &mut input, schedule)?,
                _ => vec![(0, CheckpointedState::OnDevice(self.chain.start()))],
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
    ) -> Result<Vec<(usize, CheckpointedState)>> {
        let positions = schedule.checkpoint_positions();
        let (mut state, mut checkpoints) = (self.chain.start(), Vec::new());
        for k in 0..=positions.last().copied().unwrap_or(0) {
            if k > 0 {
                let x = input.read(k - 1, &window(&tile.input, k - 1, self.chunk[0]), None);
                state = self.chain.advance(x, &state, None)?.1;
            }
            if positions.contains(&k) {
                self.checkpoint(&mut checkpoints, k, &state)?;
            }
        }
        Ok(checkpoints)
    }

    /// Appends `state` to the checkpoints.
    fn checkpoint(
        &self,
        checkpoints: &mut Vec<(usize, CheckpointedState)>,
        position: usize,
        state: &ChainState,
    ) -> Result<()> {
        // At most one state may be in flight to the host, because the device has memory for only one.
        if let Some((_, previous)) = checkpoints.last_mut() {
            previous.settle()?;
        }
        checkpoints.push((position, self.checkpointed(state)?));
        Ok(())
    }

    fn checkpointed(&self, state: &ChainState) -> Result<CheckpointedState> {
        match self.offload {
            true => CheckpointedState::offload(state),
            false => Ok(CheckpointedState::OnDevice(state.clone())),
        }
    }

    fn reader<'a>(&'a self, volume: &'a Volume, values: &'a [f32], frames: usize) -> ChunkReader<'a> {
        let device = self.chain.store.device();
        ChunkReader::new(volume, values, frames, chunks_per_copy(volume, frames, device), device)
    }

    fn accumulator<'a>(&self, volume: &'a Volume, frames: usize) -> ChunkAccumulator<'a> {
        ChunkAccumulator::new(volume, chunks_per_copy(volume, frames, self.chain.store.device()))
    }
}

/// The pullback of one tile, last chunk first.
struct TilePull<'a, 'v> {
    pass: &'a Pass,
    tile: &'a Tile,
    input: &'a mut ChunkReader<'v>,
    cotangent: &'a mut ChunkReader<'v>,
    gradient: &'a mut ChunkAccumulator<'v>,
    /// Cotangent of the state after the chunk that is pulled back next.
    after: ChainStateCotangent,
}

impl TilePull<'_, '_> {
    /// Copies the input of a chunk to the device.
    fn upload(&mut self, step: usize) -> Burn<4> {
        self.input.read(step, &window(&self.tile.input, step, self.pass.chunk[0]), None)
    }
}

impl Reversible for TilePull<'_, '_> {
    type State = ChainState;
    type Checkpoint = CheckpointedState;

    fn prefetch(&mut self, checkpoint: &mut CheckpointedState) -> Result<()> {
        checkpoint.prefetch()
    }

    fn hold(&mut self, state: ChainState) -> Result<CheckpointedState> {
        let mut checkpoint = self.pass.checkpointed(&state)?;
        drop(state);
        checkpoint.settle()?;
        Ok(checkpoint)
    }

    fn restore(&mut self, checkpoint: CheckpointedState) -> Result<ChainState> {
        checkpoint.restore()
    }

    fn advance(&mut self, step: usize, state: &ChainState) -> Result<ChainState> {
        let x = self.upload(step);
        Ok(self.pass.chain.advance(x, state, None)?.1)
    }

    fn pull(&mut self, step: usize, state: &ChainState) -> Result<()> {
        let x = self.upload(step);
        let Self { pass, tile, .. } = self;
        let output = window(&tile.output, step, pass.chunk[1]);
        let cotangent = self.cotangent.read(step, &output, tile.blend.as_deref());
        let (x, before) = pass.chain.pull(x, state, cotangent, std::mem::take(&mut self.after))?;
        self.after = before;
        self.gradient.add(window(&tile.input, step, pass.chunk[0]), x, None)
    }
}

fn window(plane: &[Range<usize>; 2], chunk: usize, frames: usize) -> Window {
    Window { frames: chunk_frames(chunk, frames), rows: plane[0].clone(), columns: plane[1].clone() }
}
