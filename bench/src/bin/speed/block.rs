//! One transformer block with LoRA on all its layers.

use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::{NdTensor, Parameters, Resident, Segment, Tape, to_device, vjp};
use roll_core::{Noise, StateDict};
use roll_wan::dit::{Block, DitConfig, Grid, Pass, Trainable, lora_parameters, rotary_tables};

use super::{Failure, normal};

/// Shapes of Wan2.1-1.3B at 1024 tokens.
const CONFIG: DitConfig = DitConfig {
    dim: 1536,
    in_channels: 16,
    out_channels: 16,
    patch: [1, 2, 2],
    text_dim: 4096,
    freq_dim: 256,
    ffn_dim: 8960,
    layers: 1,
    heads: 12,
    image_dim: None,
};
const TEXT_ROWS: usize = 512;

pub struct Fixture {
    block: Block,
    parameters: Parameters,
    input: NdTensor,
    /// Embedded timestep, modulations, text.
    shared: Vec<NdTensor>,
    cotangent: NdTensor,
}

impl Fixture {
    /// Creates the block with random weights, the frozen ones in `dtype`.
    pub fn new(dtype: DType, device: &Device) -> Result<Self, Failure> {
        let mut weights = StateDict::new();
        for (i, (name, shape)) in CONFIG.weights().into_iter().enumerate() {
            if name.starts_with("blocks.") {
                let scale = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.1 };
                weights.insert(name, normal(i as u64, &shape, scale)?);
            }
        }
        let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
        let (specs, values) =
            lora_parameters(&CONFIG, &Trainable::Lora { rank: 32, alpha: 32.0, targets }, &Noise::new(0))?;
        let parameters = Parameters::new(specs, values, device);
        let grid = Grid::new(&[16, 1, 64, 64], CONFIG.patch)?;
        let (cos, sin) = rotary_tables(&grid, CONFIG.head_dim())?;
        let pass = Pass {
            config: CONFIG,
            store: Arc::new(Resident::new(&weights, dtype, device)),
            trainable: Some(parameters.snapshot()),
            trains_all_weights: false,
            lora_scale: 1.0,
            products: DType::F32,
            fp8: false,
            activations: DType::F32,
            rope: (to_device(&cos, device)?, to_device(&sin, device)?),
            samples: 1,
            groups: vec![grid.tokens()],
            trains_modulation: false,
            image_rows: 0,
            token_ranks: None,
            probe: None,
        };
        let nd = |index: u64, rows: usize, width: usize| -> Result<NdTensor, Failure> {
            Ok(to_device::<2>(&normal(1000 + index, &[rows, width], 1.0)?, device)?.into())
        };
        Ok(Self {
            block: Block { index: 0, pass: Arc::new(pass), kept: None },
            parameters,
            input: nd(0, grid.tokens(), CONFIG.dim)?,
            shared: vec![nd(1, 1, CONFIG.dim)?, nd(2, 1, 6 * CONFIG.dim)?, nd(3, TEXT_ROWS, CONFIG.dim)?],
            cotangent: nd(4, grid.tokens(), CONFIG.dim)?,
        })
    }

    pub fn forward(&self) -> Result<(), Failure> {
        self.block.forward(&self.input, &self.shared, &Tape::off())?;
        Ok(())
    }

    pub fn pull(&self) -> Result<(), Failure> {
        let inputs = [self.input.clone()];
        let (_, recorded) =
            vjp(&inputs, Tape::on(), |x, tape| Ok(vec![self.block.forward(&x[0], &self.shared, tape)?]))?;
        recorded.pull(vec![Some(self.cotangent.clone())], Some(&self.parameters));
        self.parameters.clear_gradients();
        Ok(())
    }
}
