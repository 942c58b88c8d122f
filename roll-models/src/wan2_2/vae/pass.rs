//! A pass of encoder or decoder over a whole video: tile by tile, chunk by chunk, and the same way back.

use std::sync::Arc;

use burn::tensor::{DType, Tensor as Burn, TensorData};
use roll_backends::to_host;
use roll_core::{Error, Grad, Pullback, Result, Tensor};

use super::chain::{CausalChain, Probe, State, StateCotangent};
use super::schedule::{Reversible, Schedule};
use super::tiling::Tile;
use super::volume::{Volume, Window};

/// Geometry of a pass. The first chunk is one frame on either side; the others are `chunk` frames.
pub(super) struct Pass {
    pub chain: Arc<CausalChain>,
    pub input: Volume,
    pub output: Volume,
    /// Frames of a chunk that is not the first, of the input and of the output.
    pub chunk: [usize; 2],
    pub chunks: usize,
    /// Tiles with their input and output windows: latent and result, or the other way round.
    pub tiles: Vec<PassTile>,
    /// States kept for the pull, besides the first.
    pub checkpoints: usize,
}

/// A tile as this pass sees it.
pub(super) struct PassTile {
    pub input: [std::ops::Range<usize>; 2],
    pub output: [std::ops::Range<usize>; 2],
    pub share: Option<Vec<f32>>,
}

impl PassTile {
    /// From a tile of the latent plane, whose input is `scale` times as large as its latents.
    pub fn new(tile: Tile, scale: usize) -> Self {
        let input = tile.latent.map(|r| r.start * scale..r.end * scale);
        Self { input, output: tile.result, share: tile.share }
    }
}

impl Pass {
    /// The value, and with [`Grad::Record`] the pullback to the input.
    ///
    /// With one tile the states that the pull starts from are kept on the way; with several, each tile runs once more
    /// when its turn comes, so that the states of one tile exist at a time.
    pub fn run(self, input: &Tensor, grad: Grad, mut probe: Option<Probe<'_>>) -> Result<(Tensor, Option<Pullback>)> {
        let values = input.f32s()?;
        let schedule = Schedule::new(self.chunks, self.checkpoints);
        let positions = schedule.kept_on_the_way();
        let keep = grad.is_on() && self.tiles.len() == 1;
        let mut kept = Vec::new();
        let mut output = vec![0f32; self.output.len()];
        for tile in &self.tiles {
            let mut state = self.chain.start();
            for k in 0..self.chunks {
                if keep && positions.contains(&k) {
                    kept.push((k, state.clone()));
                }
                let x = self.upload(values, k, tile);
                // An explicit reborrow: `as_deref_mut` cannot shorten the life of a boxed closure's captures.
                let shown: Option<Probe<'_>> = match &mut probe {
                    Some(probe) => Some(&mut **probe),
                    None => None,
                };
                let (y, next) = self.chain.advance(x, &state, shown)?;
                state = next;
                let window = window(&tile.output, k, self.chunk[1]);
                let y = to_host(y)?;
                if y.shape() != self.output.window_shape(&window) {
                    let expected = format!("{:?}", self.output.window_shape(&window));
                    return Err(Error::shape(format!("chunk {k} of the VAE's result"), expected, y.shape()));
                }
                self.output.add(&mut output, &window, y.f32s()?, tile.share.as_deref());
            }
        }
        let output = Tensor::new(output, self.output.shape())?;
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
        kept: Vec<(usize, State)>,
    ) -> Result<Tensor> {
        if cotangent.shape() != self.output.shape() {
            let expected = format!("{:?}", self.output.shape());
            return Err(Error::shape("cotangent of the VAE's result", expected, cotangent.shape()));
        }
        let mut kept = kept;
        let mut gradient = vec![0f32; self.input.len()];
        for tile in &self.tiles {
            let after = self.chain.no_cotangent();
            let (input, cotangent) = (input.f32s()?, cotangent.f32s()?);
            let start = match kept.is_empty() {
                true => vec![(0, self.chain.start())],
                false => std::mem::take(&mut kept),
            };
            let mut work = TilePull { pass: self, tile, input, cotangent, gradient: &mut gradient, after };
            schedule.reverse(&mut work, start)?;
        }
        Tensor::new(gradient, self.input.shape())
    }

    fn upload(&self, values: &[f32], k: usize, tile: &PassTile) -> Burn<4> {
        self.to_device(&self.input, values, &window(&tile.input, k, self.chunk[0]), None)
    }

    fn to_device(&self, volume: &Volume, values: &[f32], window: &Window, share: Option<&[f32]>) -> Burn<4> {
        let data = TensorData::new(volume.read(values, window, share), volume.window_shape(window));
        Burn::from_data(data, (self.chain.store.device(), DType::F32))
    }
}

/// The pull of one tile, last chunk first.
struct TilePull<'a> {
    pass: &'a Pass,
    tile: &'a PassTile,
    input: &'a [f32],
    cotangent: &'a [f32],
    gradient: &'a mut [f32],
    after: StateCotangent,
}

impl Reversible for TilePull<'_> {
    type State = State;

    fn advance(&mut self, step: usize, state: &State) -> Result<State> {
        let x = self.pass.upload(self.input, step, self.tile);
        Ok(self.pass.chain.advance(x, state, None)?.1)
    }

    fn pull(&mut self, step: usize, state: &State) -> Result<()> {
        let Self { pass, tile, .. } = self;
        let x = pass.upload(self.input, step, tile);
        let result = window(&tile.output, step, pass.chunk[1]);
        let cotangent = pass.to_device(&pass.output, self.cotangent, &result, tile.share.as_deref());
        let (x, before) = pass.chain.pull(x, state, cotangent, std::mem::take(&mut self.after))?;
        self.after = before;
        let source = window(&tile.input, step, pass.chunk[0]);
        pass.input.add(self.gradient, &source, to_host(x)?.f32s()?, None);
        Ok(())
    }
}

fn window(plane: &[std::ops::Range<usize>; 2], chunk: usize, frames: usize) -> Window {
    let frames = match chunk {
        0 => 0..1,
        k => 1 + (k - 1) * frames..1 + k * frames,
    };
    Window { frames, rows: plane[0].clone(), columns: plane[1].clone() }
}
