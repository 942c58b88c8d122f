//! Every random choice of a run, drawn on the host and keyed by its purpose.
//!
//! A draw depends on (seed, step, sample, purpose) alone: not on the backend, the number of ranks, the order of work,
//! or whether the run was resumed. The methods that draw need the cargo feature `noise`.

#[cfg(feature = "noise")]
mod draws;

/// Purpose of a draw; its number is part of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
#[non_exhaustive]
pub enum Purpose {
    /// The latents a trajectory starts from.
    Latents = 1,
    /// Initial values of parameters.
    Parameters = 2,
    /// The order of the data.
    Shuffle = 3,
    /// Timesteps of flow matching.
    Timesteps = 4,
    /// Tests and synthetic data.
    Synthetic = 5,
    /// The latents that an evaluation starts from.
    Evaluation = 6,
    /// Tokens of a language model.
    Tokens = 7,
    /// Initial states of environments.
    Environments = 8,
    /// Noise of stochastic denoising steps.
    Steps = 9,
    /// Noise that generated samples are mixed with, to train on them.
    Noising = 10,
    /// The noise levels and denoising steps that policy gradients and Reward-FL train at.
    Levels = 11,
    /// Noise that clips are mixed with, to train on them besides generated samples.
    Clips = 12,
}

/// The source of all randomness of a run.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Noise {
    seed: u64,
    /// The torch seed of [`Noise::with_fixed_latents`].
    #[serde(rename = "fixed")]
    fixed_latents_seed: Option<u32>,
}

impl Noise {
    /// Creates a source whose draws are keyed by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed, fixed_latents_seed: None }
    }

    /// Makes every sample of every step start from the same latents, as in the reference implementation: those of
    /// `torch.randn(..., generator=manual_seed(torch_seed))` on the CPU.
    pub fn with_fixed_latents(mut self, torch_seed: u32) -> Self {
        self.fixed_latents_seed = Some(torch_seed);
        self
    }

    /// The seed, and the torch seed of the latents if they are fixed. An equal source can be made from the two.
    pub fn keys(&self) -> (u64, Option<u32>) {
        (self.seed, self.fixed_latents_seed)
    }
}
