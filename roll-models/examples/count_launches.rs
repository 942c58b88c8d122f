//! Passes of a transformer with one block and with two, for what counts launches or operators beneath it: the
//! difference is one block. `scripts/count-launches` runs it, and says what it needs.
//!
//!     count_launches BACKEND [TxHxW] [--offload]
//!
//! Shapes are those of Wan2.2 T2V-A14B with a LoRA on the LoRA's usual layers; TxHxW is the size of the latents.
//! Weights are zero, and so is what comes out: nothing is checked.

use std::ffi::{CString, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor as Burn};
use roll_backends::{Memory, NdTensor, Resident, Weight};
use roll_core::{Adapter, Conditioning, Error, Grad, Noise, Result, StateDict, Tensor, Timestep};
use roll_models::wan2_2::dit::{Dit, DitConfig, Trainable};

/// Rows of a prompt.
const TEXT_ROWS: usize = 512;
/// Rounds that are counted.
const ROUNDS: usize = 4;
/// 81 frames of 480x480.
const LATENTS: [usize; 3] = [21, 60, 60];

fn main() -> Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let offload = arguments.iter().position(|a| a == "--offload").map(|at| arguments.remove(at)).is_some();
    let backend = arguments.first().map_or("cuda", String::as_str);
    let [t, h, w] = match arguments.get(1) {
        Some(size) => latents(size)?,
        None => LATENTS,
    };
    let mark = Mark::find()?;
    let device = roll_backends::device(backend)?;
    let shape = [16, t, h, w];
    let latents = Tensor::zeros(shape);
    for layers in [1, 2] {
        let dit = transformer(layers, backend, offload, &device)?;
        let conditioning = Conditioning {
            context: Tensor::zeros([TEXT_ROWS, dit.config().text_dim]),
            channels: None,
            image_tokens: None,
            first_frame: None,
            latent_shape: shape,
        };
        let pass = |grad| dit.velocity(&latents, Timestep(500.0), &conditioning, Adapter::On, grad);
        // The first round compiles, compares and allocates; the others take the same launches, and not the same time.
        for round in 0..=ROUNDS {
            let ends = |phase: &str| match round {
                0 => Ok(()),
                _ => mark.end(&device, &format!("{layers} {phase}")),
            };
            pass(Grad::Skip)?;
            ends("forward")?;
            let (_, pullback) = pass(Grad::Record)?;
            ends("forward, recorded")?;
            if let Some(pullback) = pullback {
                pullback.pull(&latents)?;
            }
            if let Some(parameters) = dit.parameters() {
                parameters.clear_gradients();
            }
            ends("pull")?;
            if round == 0 {
                mark.end(&device, &format!("{layers} first round"))?;
            }
        }
    }
    Ok(())
}

fn latents(size: &str) -> Result<[usize; 3]> {
    let parts: Vec<usize> = size.split('x').filter_map(|n| n.parse().ok()).collect();
    match *parts {
        [t, h, w] if t > 0 && h > 0 && w > 0 => Ok([t, h, w]),
        _ => Err(Error::config("TxHxW", format!("expected the size of latents, such as 21x60x60, found `{size}`"))),
    }
}

fn transformer(layers: usize, backend: &str, offload: bool, device: &Device) -> Result<Dit> {
    let config = DitConfig {
        dim: 5120,
        in_channels: 16,
        out_channels: 16,
        patch: [1, 2, 2],
        text_dim: 4096,
        freq_dim: 256,
        ffn_dim: 13824,
        layers,
        heads: 40,
        image_dim: None,
    };
    let zeros = |(name, shape): (String, Vec<usize>)| {
        let values = Burn::<1>::zeros([shape.iter().product::<usize>()], (device, DType::BF16));
        (name, Weight::from_tensor(NdTensor::from_flat(values, shape)))
    };
    let store = Resident::from_weights(config.weights().into_iter().map(zeros).collect(), device);
    let memory = if offload { Memory::Offload } else { Memory::Recompute };
    let mut dit = Dit::with_store(config, Arc::new(store)).with_memory(memory).with_products(DType::BF16);
    if backend.starts_with("libtorch") {
        // As on its GPUs.
        dit = dit.with_activations(DType::BF16);
    }
    let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    dit.train(&Trainable::Lora { rank: 32, alpha: 32.0, targets }, &Noise::new(0), &StateDict::new())?;
    Ok(dit)
}

/// `count_mark` of the library that counts.
struct Mark(unsafe extern "C" fn(*const c_char));

unsafe extern "C" {
    /// Of the C library, which the standard library is linked to.
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

impl Mark {
    /// Looks for it in what was loaded before this program.
    fn find() -> Result<Self> {
        // SAFETY: no library means all of them, and the name ends with a zero.
        let found = unsafe { dlsym(null_mut(), c"count_mark".as_ptr()) };
        if found.is_null() {
            let problem =
                "nothing counts: expected a library of bench/launches in LD_PRELOAD (`scripts/count-launches`)";
            return Err(Error::Unsupported(problem.into()));
        }
        // SAFETY: both libraries declare it so.
        Ok(Self(unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char)>(found) }))
    }

    /// What was counted since the last mark was `phase`.
    fn end(&self, device: &Device, phase: &str) -> Result<()> {
        let failed = |e: String| Error::Misuse(format!("after the phase `{phase}`: {e}"));
        device.sync().map_err(|e| failed(format!("{e:?}")))?;
        let name = CString::new(phase).map_err(|e| failed(e.to_string()))?;
        // SAFETY: it takes a name that ends with a zero, and keeps nothing of it.
        unsafe { (self.0)(name.as_ptr()) };
        Ok(())
    }
}
