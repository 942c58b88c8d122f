//! The published Wan models whose architectures this crate can write as new checkpoints (`init_tiny.rs`, `init.rs`).

use roll_core::{Error, Result};

/// Architecture of a new checkpoint, named after the published model with the same architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WanKind {
    /// I2V-A14B: two experts, 36 input channels (16 of latents, 20 of conditioning) and 16 output channels.
    #[default]
    I2v,
    /// T2V-A14B: two experts, 16 channels.
    T2v,
    /// TI2V-5B: one transformer, 48 channels.
    Ti2v,
    /// Wan2.1 I2V: one transformer, 36 input and 16 output channels, and the tokens of a CLIP image encoder.
    I2v21,
}

impl WanKind {
    /// Input and output channels of the transformer.
    pub(super) fn channels(self) -> (usize, usize) {
        match self {
            Self::I2v | Self::I2v21 => (36, 16),
            Self::T2v => (16, 16),
            Self::Ti2v => (48, 48),
        }
    }

    /// Folders of the transformers in a checkpoint, the high-noise expert first. `.` is the checkpoint's own folder.
    pub(super) fn folders(self) -> &'static [&'static str] {
        match self {
            Self::I2v | Self::T2v => &["high_noise_model", "low_noise_model"],
            Self::Ti2v | Self::I2v21 => &["."],
        }
    }

    /// File name of the VAE, without extension.
    pub(super) fn vae_file(self) -> &'static str {
        match self {
            Self::I2v | Self::T2v | Self::I2v21 => "Wan2.1_VAE",
            Self::Ti2v => "Wan2.2_VAE",
        }
    }

    /// The value of `model_type` in `config.json`.
    pub(super) fn model_type(self) -> &'static str {
        match self {
            Self::I2v | Self::I2v21 => "i2v",
            Self::T2v => "t2v",
            Self::Ti2v => "ti2v",
        }
    }

    /// Whether the model reads the tokens of the CLIP image encoder.
    pub(super) fn has_clip(self) -> bool {
        self == Self::I2v21
    }
}

impl std::str::FromStr for WanKind {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        serde_json::from_value(name.into())
            .map_err(|_| Error::config("kind", format!("expected i2v, t2v, ti2v or i2v21, found `{name}`")))
    }
}
