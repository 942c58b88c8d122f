//! Random weights under which activations neither grow nor shrink, drawn on the device.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Device, Distribution, Tensor as Burn};
use roll_backends::host::to_host_nd;
use roll_backends::weights::HostStore;
use roll_backends::{EightBits, NdTensor, Resident, ScaledMatrix, ScaledRows, Weight, WeightStore};
use roll_core::{Error, Noise, Purpose, Result, StateDict};

use super::BenchRequest;
use crate::options::Placement;
use crate::weights::{Checkpoint, Streamed, save_safetensors};

/// Names and shapes of weights.
type Shapes = Vec<(String, Vec<usize>)>;

/// The weights of a transformer where the request wants them. `is_block` accepts the names of the blocks' weights, whose
/// matrices may be in eight bits.
///
/// # Errors
/// Fails if memory or the disk does not hold the weights.
pub fn transformer_store(
    request: &BenchRequest,
    shapes: Shapes,
    dtype: DType,
    is_block: fn(&str) -> bool,
    device: &Device,
) -> Result<Arc<dyn WeightStore>> {
    let codes = request.eight_bits.map(Codes::new).transpose()?;
    Ok(match request.weight_store {
        Placement::Host => Arc::new(HostStore::new(weights(shapes, dtype, codes, is_block, device), device)?),
        Placement::Streamed => Arc::new(streamed(shapes, dtype, device)?),
        _ => {
            let weights = weights(shapes, dtype, codes, is_block, device).collect::<Result<_>>()?;
            Arc::new(Resident::from_weights(weights, device))
        }
    })
}

/// Weights in f32 on the device.
///
/// # Errors
/// Fails if memory does not hold the weights.
pub fn resident(shapes: Shapes, device: &Device) -> Result<Arc<dyn WeightStore>> {
    let no_codes = None;
    let weights = weights(shapes, DType::F32, no_codes, |_| false, device).collect::<Result<_>>()?;
    Ok(Arc::new(Resident::from_weights(weights, device)))
}

/// A store that streams random weights from a temporary file. The file is deleted once it is mapped into memory. Its
/// contents stay until the mapping ends, and no file is left behind if the process is killed.
fn streamed(shapes: Shapes, dtype: DType, device: &Device) -> Result<Streamed> {
    device.seed(0);
    let tensors = shapes.into_iter().map(|(name, shape)| {
        let values = to_host_nd(&random_tensor(&name, shape, dtype, device))?;
        Ok((name, values))
    });
    let state: StateDict = tensors.collect::<Result<_>>()?;
    let path = std::env::temp_dir().join(format!("roll-bench-{}.safetensors", std::process::id()));
    let opened = save_safetensors(&path, &state, &BTreeMap::new()).and_then(|()| Checkpoint::open(&path));
    let removed = std::fs::remove_file(&path);
    let checkpoint = opened?;
    removed.map_err(Error::file("remove", &path))?;
    Ok(Streamed::new(checkpoint, device).stored_as(dtype.into()).with_prefetch())
}

/// Random weights, see [`random_tensor`]. With `codes`, the matrices of the blocks are in eight bits.
fn weights(
    shapes: Shapes,
    dtype: DType,
    codes: Option<Codes>,
    is_block: fn(&str) -> bool,
    device: &Device,
) -> impl Iterator<Item = Result<(String, Weight)>> {
    device.seed(0);
    shapes.into_iter().map(move |(name, shape): (String, Vec<usize>)| {
        if let (Some(codes), &[rows, columns]) = (&codes, &*shape)
            && is_block(&name)
        {
            let matrix = ScaledMatrix::new(codes.matrix([rows, columns])?, device);
            return Ok((name, Weight::from_scaled(matrix)));
        }
        let values = random_tensor(&name, shape, dtype, device);
        Ok((name, Weight::from_tensor(values)))
    })
}

/// A random weight: norms are 1, biases 0, and the deviation of matrices and kernels is 1 / sqrt(number of inputs).
fn random_tensor(name: &str, shape: Vec<usize>, dtype: DType, device: &Device) -> NdTensor {
    let count: usize = shape.iter().product();
    let inputs: usize = shape[1..].iter().product();
    let is_norm = name.contains("norm") && !name.ends_with("bias") || name.ends_with("gamma");
    let values: Burn<1> = match (is_norm, shape.len()) {
        (true, _) => Burn::ones([count], (device, DType::F32)),
        (false, 1) => Burn::zeros([count], (device, DType::F32)),
        (false, _) => {
            let deviation = 1.0 / (inputs as f64).sqrt();
            Burn::random([count], Distribution::Normal(0.0, deviation), (device, DType::F32))
        }
    };
    NdTensor::from_flat(values.cast(dtype), shape)
}

/// Random numbers in eight bits. Every matrix is a repetition of them, because rounding each matrix of a 14B
/// transformer takes minutes.
struct Codes(ScaledRows);

impl Codes {
    fn new(format: EightBits) -> Result<Self> {
        let values = Noise::new(0).normal(Purpose::Synthetic, 0, 5, &[1024, 1024])?;
        ScaledRows::quantised(&values, format).map(Self)
    }

    /// A matrix of `[rows, columns]`. Its deviation is 1 / sqrt(columns), which are the inputs of the product.
    fn matrix(&self, [rows, columns]: [usize; 2]) -> Result<ScaledRows> {
        let (codes, count) = (self.0.codes(), rows * columns);
        let mut repeated = codes.repeat(count.div_ceil(codes.len()));
        repeated.truncate(count);
        // The scale of the first row serves for all rows.
        let scale = self.0.scales()[0] / (columns as f32).sqrt();
        ScaledRows::new(self.0.kind(), repeated, vec![scale], [rows, columns])
    }
}
