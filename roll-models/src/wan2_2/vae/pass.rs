//! A pass of the encoder or decoder over a whole video, tile by tile and chunk by chunk, and its pullback in reverse
//! order.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor as Burn;
use roll_core::{Error, Grad, Pullback, Result, Tensor};

use super::chain::{CausalChain, Probe, State, StateCotangent};
use super::frames::{Source, Sum, chunk_frames, chunks_together};
use super::kept::Kept;
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
    pub tiles: Vec<PassTile>,
    /// Number of checkpoints for the pullback, besides the first state.
    pub checkpoints: usize,
    /// Whether checkpoints are kept in host memory.
    pub offload: bool,
}

/// The windows of a tile in the input and in the output.
pub(super) struct PassTile {
    pub input: [Range<usize>; 2],
    pub output: [Range<usize>; 2],
    pub share: Option<Vec<f32>>,
}

impl PassTile {
    /// Derives the windows from a tile of the latent plane. The input is `scale` times as large as the latents.
    pub fn new(tile: Tile, scale: usize) -> Self {
        let input = tile.latent.map(|r| r.start * scale..r.end * scale);
        Self { input, output: tile.result, share: tile.share }
    }
}

impl Pass {
    /// Computes the output and, with [`Grad::Record`], the pullback to the input.
    ///
    /// A pass with one tile stores the checkpoints for the pullback. If there are several tiles, the pullback runs each
    /// tile again, so that only one tile's states are in memory at a time.
    pub fn run(self, input: &Tensor, grad: Grad, mut probe: Option<Probe<'_>>) -> Result<(Tensor, Option<Pullback>)> {
        let schedule = Schedule::new(self.chunks, self.checkpoints);
        let positions = schedule.kept_on_the_way();
        let keep = grad.is_on() && self.tiles.len() == 1;
        let mut kept = Vec::new();
        let mut source = self.source(&self.input, input.f32s()?, self.chunk[0]);
        let mut output = self.sum(&self.output, self.chunk[1]);
        for tile in &self.tiles {
            let mut state = self.chain.start();
            for k in 0..self.chunks {
                if keep && positions.contains(&k) {
                    self.keep(&mut kept, k, &state)?;
                }
                let x = source.read(k, &window(&tile.input, k, self.chunk[0]), None);
                // An explicit reborrow: `as_deref_mut` cannot shorten the lifetime of a boxed closure's captures.
                let shown: Option<Probe<'_>> = match &mut probe {
                    Some(probe) => Some(&mut **probe),
                    None => None,
                };
                let (y, next) = self.chain.advance(x, &state, shown)?;
                state = next;
                output.add(window(&tile.output, k, self.chunk[1]), y, tile.share.as_deref())?;
            }
        }
        let output = output.finish()?;
        drop(source);
        let pullback = grad.is_on().then(|| {
            let input = input.clone();
            Pullback::new(move |cotangent| self.pull(&input, cotangent, &schedule, kept))
        });
        Ok((output, pullback))
    }

    fn pull(
        &self,
        input: &Tensor,
        cotangent: &Tensor,
        schedule: &Schedule,
        mut kept: Vec<(usize, Kept)>,
    ) -> Result<Tensor> {
        if cotangent.shape() != self.output.shape() {
            let expected = format!("{:?}", self.output.shape());
            return Err(Error::shape("cotangent of the VAE's result", expected, cotangent.shape()));
        }
        let mut input = self.source(&self.input, input.f32s()?, self.chunk[0]);
        let mut cotangent = self.source(&self.output, cotangent.f32s()?, self.chunk[1]);
        let mut gradient = self.sum(&self.input, self.chunk[0]);
        for tile in &self.tiles {
            let after = self.chain.no_cotangent();
            let start = match std::mem::take(&mut kept) {
                kept if !kept.is_empty() => kept,
                _ if self.offload => self.sweep(tile, &mut input, schedule)?,
                _ => vec![(0, Kept::Here(self.chain.start()))],
            };
            let (input, cotangent, gradient) = (&mut input, &mut cotangent, &mut gradient);
            schedule.reverse(&mut TilePull { pass: self, tile, input, cotangent, gradient, after }, start)?;
        }
        gradient.finish()
    }

    /// Runs a tile only to store its checkpoints.
    fn sweep(&self, tile: &PassTile, input: &mut Source<'_>, schedule: &Schedule) -> Result<Vec<(usize, Kept)>> {
        let positions = schedule.kept_on_the_way();
        let (mut state, mut kept) = (self.chain.start(), Vec::new());
        for k in 0..=positions.last().copied().unwrap_or(0) {
            if k > 0 {
                let x = input.read(k - 1, &window(&tile.input, k - 1, self.chunk[0]), None);
                state = self.chain.advance(x, &state, None)?.1;
            }
            if positions.contains(&k) {
                self.keep(&mut kept, k, &state)?;
            }
        }
        Ok(kept)
    }

    fn keep(&self, kept: &mut Vec<(usize, Kept)>, position: usize, state: &State) -> Result<()> {
        // At most one state may be in flight to the host, because the device has memory for only one.
        if let Some((_, before)) = kept.last_mut() {
            before.settle()?;
        }
        kept.push((position, if self.offload { Kept::away(state)? } else { Kept::Here(state.clone()) }));
        Ok(())
    }

    fn source<'a>(&'a self, volume: &'a Volume, values: &'a [f32], frames: usize) -> Source<'a> {
        let device = self.chain.store.device();
        Source::new(volume, values, frames, chunks_together(volume, frames, device), device)
    }

    fn sum<'a>(&self, volume: &'a Volume, frames: usize) -> Sum<'a> {
        Sum::new(volume, chunks_together(volume, frames, self.chain.store.device()))
    }
}

/// The pullback of one tile, last chunk first.
struct TilePull<'a, 'v> {
    pass: &'a Pass,
    tile: &'a PassTile,
    input: &'a mut Source<'v>,
    cotangent: &'a mut Source<'v>,
    gradient: &'a mut Sum<'v>,
    after: StateCotangent,
}

impl TilePull<'_, '_> {
    fn upload(&mut self, step: usize) -> Burn<4> {
        self.input.read(step, &window(&self.tile.input, step, self.pass.chunk[0]), None)
    }
}

impl Reversible for TilePull<'_, '_> {
    type State = State;
    type Kept = Kept;

    fn expect(&mut self, kept: &mut Kept) -> Result<()> {
        kept.begin_return()
    }

    fn bring(&mut self, kept: Kept) -> Result<State> {
        kept.back()
    }

    fn advance(&mut self, step: usize, state: &State) -> Result<State> {
        let x = self.upload(step);
        Ok(self.pass.chain.advance(x, state, None)?.1)
    }

    fn pull(&mut self, step: usize, state: &State) -> Result<()> {
        let x = self.upload(step);
        let Self { pass, tile, .. } = self;
        let result = window(&tile.output, step, pass.chunk[1]);
        let cotangent = self.cotangent.read(step, &result, tile.share.as_deref());
        let (x, before) = pass.chain.pull(x, state, cotangent, std::mem::take(&mut self.after))?;
        self.after = before;
        self.gradient.add(window(&tile.input, step, pass.chunk[0]), x, None)
    }
}

fn window(plane: &[Range<usize>; 2], chunk: usize, frames: usize) -> Window {
    Window { frames: chunk_frames(chunk, frames), rows: plane[0].clone(), columns: plane[1].clone() }
}
