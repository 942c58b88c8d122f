//! The networks of a preset with random weights, made on the device, and the inputs of a step.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Device, Distribution, Tensor as Burn};
use roll_backends::device::is_gpu;
use roll_backends::host::to_host_nd;
use roll_backends::strategy::{SingleOptions, Zero, single};
use roll_backends::weights::HostStore;
use roll_backends::{
    EightBits, Memory, NdTensor, Resident, ScaledMatrix, ScaledRows, Weight, WeightStore, product_dtype,
};
use roll_core::{Conditioning, Error, Noise, OptimizerConfig, Purpose, Result, StateDict, Strategy, Tensor, Timestep};
use roll_network::weights::{Checkpoint, Streamed, save_safetensors};
use roll_wan::dit::{Dit, PassMemory, PassSettings};
use roll_wan::vae::{Chunking, LatentStatistics, Vae};
use roll_wan::{Parts, Placement, Settings, Wan};

use super::preset::{Preset, trainable};
use super::scorer::Scorer;

/// The timestep of every pass. The value does not change the time of a pass.
const TIMESTEP: Timestep = Timestep(500.0);

/// The model, reward, strategy and inputs of a measured step.
pub struct Fixture {
    /// One transformer with a LoRA, and the VAE.
    pub model: Wan,
    pub scorer: Scorer,
    pub strategy: Zero,
    /// The latents that are denoised and decoded, `[C, T, H, W]`.
    pub latents: Tensor,
    pub conditioning: Conditioning,
    /// The video that is encoded, `[T, 3, H, W]` in [-1, 1].
    pub video: Tensor,
    pub timestep: Timestep,
}

impl Fixture {
    /// Makes the networks of the preset on `device`. All inputs are random.
    pub fn new(preset: &Preset<'_>, device: &Device) -> Result<Self> {
        let dit = &preset.networks.dit;
        let noise = Noise::new(0);
        let mut model = random_model(preset, device, &noise)?;
        // Each `index` has a draw of its own.
        let normal = |index: u64, shape: &[usize]| noise.normal(Purpose::Synthetic, 0, index, shape);
        let latent_shape = preset.latent_shape();
        let [_, t, h, w] = latent_shape;
        // Channels that an image-to-video transformer takes besides those of the latents.
        let channels = match dit.in_channels - dit.out_channels {
            0 => None,
            extra => Some(normal(1, &[extra, t, h, w])?),
        };
        let [height, width] = preset.size;
        let pixels = normal(2, &[preset.frames, 3, height, width])?;
        let video =
            Tensor::new(pixels.f32s()?.iter().map(|v| v.clamp(-1.0, 1.0)).collect::<Vec<f32>>(), pixels.shape())?;
        let mut strategy = single(SingleOptions::default());
        strategy.attach(&mut model, &OptimizerConfig::default())?;
        Ok(Self {
            model,
            scorer: Scorer::new(device),
            strategy,
            latents: normal(3, &latent_shape)?,
            conditioning: Conditioning {
                context: normal(4, &[preset.text_len, dit.text_dim])?,
                channels,
                image_tokens: None,
                first_frame: None,
                latent_shape,
            },
            video,
            timestep: TIMESTEP,
        })
    }
}

/// The transformer with a LoRA, and the VAE, with random weights. `noise` draws the weights of the LoRA.
fn random_model(preset: &Preset<'_>, device: &Device, noise: &Noise) -> Result<Wan> {
    let (dit, vae) = (&preset.networks.dit, &preset.networks.vae);
    let codes = preset.args.weights_dtype.map(Codes::new).transpose()?;
    let dit_weights = || random_weights(dit.weights(), preset.dtype, codes, device);
    let store: Arc<dyn WeightStore> = match preset.args.weight_store {
        Placement::Host => Arc::new(HostStore::new(dit_weights(), device)?),
        Placement::Streamed => Arc::new(streamed(dit.weights(), preset.dtype, device)?),
        _ => Arc::new(Resident::from_weights(dit_weights().collect::<Result<_>>()?, device)),
    };
    let memory = if preset.args.offload { Memory::Offload } else { Memory::Recompute };
    let mut expert = Dit::with_store(dit.clone(), store).with_settings(PassSettings {
        products: product_dtype(device, preset.dtype),
        fp8_products: preset.args.fp8_products,
        activations: None,
        kept: PassMemory { memory, keeps_attention: preset.args.keep_attention },
    });
    expert.add_trainable(&trainable(), noise, &StateDict::new())?;
    let statistics = LatentStatistics::published(vae.z_dim)
        .ok_or_else(|| Error::Misuse(format!("no statistics for {} channels", vae.z_dim)))?;
    let no_codes = None;
    let vae_weights = random_weights(vae.weights(), DType::F32, no_codes, device).collect::<Result<_>>()?;
    let vae_store = Resident::from_weights(vae_weights, device);
    let vae = Vae::with_store(vae.clone(), &statistics, Arc::new(vae_store))?.with_decoder_dtype(preset.vae_dtype)?;
    let settings = Settings { shift: None, boundary: None, uses_end_image: false, chunking: chunking(preset, device) };
    Ok(Wan::new(Parts { dit: expert, dit2: None, vae, text: None, clip: None }, settings))
}

/// A store that streams random weights from a temporary file. The file is deleted once it is mapped into memory. Its
/// contents stay until the mapping ends, and no file is left behind if the process is killed.
fn streamed(shapes: Vec<(String, Vec<usize>)>, dtype: DType, device: &Device) -> Result<Streamed> {
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

/// Chunking of the VAE, without tiling. By default the decoder's pull keeps the caches of all chunks on a GPU, and the
/// usual number of caches on the CPU.
fn chunking(preset: &Preset<'_>, device: &Device) -> Chunking {
    let offload = preset.args.offload && is_gpu(device);
    let checkpoints = match (preset.args.vae_checkpoints, is_gpu(device)) {
        (Some(count), _) => count,
        (None, true) => usize::MAX,
        (None, false) => Chunking::default().checkpoints,
    };
    Chunking { tiling: None, checkpoints, offload }
}

/// Random weights under which activations neither grow nor shrink, see [`random_tensor`]. With `codes`, the matrices of
/// the transformer's blocks are in eight bits.
fn random_weights(
    shapes: Vec<(String, Vec<usize>)>,
    dtype: DType,
    codes: Option<Codes>,
    device: &Device,
) -> impl Iterator<Item = Result<(String, Weight)>> {
    device.seed(0);
    shapes.into_iter().map(move |(name, shape): (String, Vec<usize>)| {
        if let (Some(codes), &[rows, columns]) = (&codes, &*shape)
            && name.starts_with("blocks.")
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
        // A draw of its own, besides those of `Fixture::new`.
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
