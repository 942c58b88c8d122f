//! Writes untrained transformers of any size, initialised like the official model, to train them from scratch.

use std::path::{Path, PathBuf};

use roll_core::{Error, Noise, Purpose, Result, StateDict, Tensor};
use roll_network::new_checkpoint::{make_directory, save, write};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::adapter_io::EXPERT_FILE;
use super::dit::DitConfig;
use super::kind::WanKind;

/// Width of the tokens of the published CLIP image encoder.
const CLIP_DIM: usize = 1280;

/// Standard deviation of the initial weights of the text and time embeddings.
const EMBEDDING_DEVIATION: f32 = 0.02;

/// Sizes of a transformer. Channels follow from its kind; patches are `[1, 2, 2]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sizes {
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of attention heads; they divide the width into parts of an even size.
    pub heads: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Width of the text embedding.
    pub text_dim: usize,
    /// Number of rows of the text embedding, to which prompts are padded or cut.
    pub text_len: usize,
    /// Width of the sinusoidal timestep embedding.
    pub freq_dim: usize,
}

impl Default for Sizes {
    /// Sizes that can be trained on a laptop.
    fn default() -> Self {
        Self { dim: 128, heads: 4, ffn_dim: 512, layers: 6, text_dim: 64, text_len: 32, freq_dim: 256 }
    }
}

impl Sizes {
    /// The configuration of a transformer of these sizes. Fails if the sizes contradict each other.
    pub fn config(&self, kind: WanKind) -> Result<DitConfig> {
        let Self { dim, heads, ffn_dim, layers, text_dim, text_len, freq_dim } = *self;
        for (name, value) in [
            ("heads", heads),
            ("ffn_dim", ffn_dim),
            ("layers", layers),
            ("text_dim", text_dim),
            ("text_len", text_len),
            // Half of the timestep embedding are cosines, the other half sines.
            ("freq_dim", freq_dim / 2),
        ] {
            if value == 0 {
                return Err(Error::config(name, "must be above 0"));
            }
        }
        if dim == 0 || !dim.is_multiple_of(2 * heads) {
            return Err(Error::config("heads", format!("{heads} heads do not divide the width {dim} into pairs")));
        }
        let (in_channels, out_channels) = kind.channels();
        let patch = [1, 2, 2];
        Ok(DitConfig {
            dim,
            in_channels,
            out_channels,
            patch,
            text_dim,
            freq_dim,
            ffn_dim,
            layers,
            heads,
            image_dim: kind.has_clip().then_some(CLIP_DIM),
        })
    }
}

/// Writes the untrained transformers of a checkpoint into `directory`, which is created if it is missing: the folders
/// of the experts with their `config.json`, and `wan22_paths.json`, whose path is returned. That file also lists the
/// text encoder (`models_t5_*`), the VAE (`Wan2.1_VAE.*` or `Wan2.2_VAE.*`) and, for a kind with CLIP, its encoder
/// (`models_clip_*`), which the caller must put next to it.
pub fn init_experts(directory: impl AsRef<Path>, kind: WanKind, sizes: &Sizes, seed: u64) -> Result<PathBuf> {
    let directory = directory.as_ref();
    let config = sizes.config(kind)?;
    let weights = |expert| initial_weights(&config, &Noise::new(seed), expert);
    let mut listed = write_experts(directory, kind, &config, sizes.text_len, weights)?;
    listed.extend(["models_t5_*".into(), format!("{}.*", kind.vae_file())]);
    listed.extend(kind.has_clip().then(|| "models_clip_*".into()));
    write_paths(directory, &listed)
}

/// Writes the folders of the experts, each with its weights and `config.json`. `weights` returns the weights of the
/// expert with a number, from 0. Returns the paths of the weights relative to `directory`.
pub(super) fn write_experts(
    directory: &Path,
    kind: WanKind,
    config: &DitConfig,
    text_len: usize,
    weights: impl Fn(u64) -> Result<StateDict>,
) -> Result<Vec<String>> {
    let mut written = Vec::new();
    for (number, folder) in kind.folders().iter().enumerate() {
        let path = directory.join(folder);
        make_directory(&path)?;
        let file = format!("{EXPERT_FILE}.safetensors");
        save(&path.join(&file), &weights(number as u64)?)?;
        write(&path.join("config.json"), &config_json(config, kind, text_len))?;
        written.push(Path::new(folder).join(file).to_string_lossy().trim_start_matches("./").to_string());
    }
    Ok(written)
}

/// Writes `wan22_paths.json` with these entries and returns its path.
pub(super) fn write_paths(directory: &Path, entries: &[String]) -> Result<PathBuf> {
    let paths = directory.join("wan22_paths.json");
    write(&paths, &format!("{:#}\n", json!(entries)))?;
    Ok(paths)
}

/// Draws initial weights by the official model's rules. Linear layers are Xavier-uniform with zero bias; the linear
/// layers of the text and time embeddings are normal with deviation `EMBEDDING_DEVIATION`; modulations are normal
/// with deviation 1 / sqrt(dim); norms are one. The last layer is zero, so the first velocity is zero. `network`
/// selects the random numbers and differs between experts.
pub fn initial_weights(config: &DitConfig, noise: &Noise, network: u64) -> Result<StateDict> {
    let initial_weight = |(i, (key, shape)): (usize, (String, Vec<usize>))| {
        let n: usize = shape.iter().product();
        let normal = |deviation: f32| -> Result<Vec<f32>> {
            let drawn = noise.normal(Purpose::Parameters, network, i as u64, &[n])?;
            Ok(drawn.f32s()?.iter().map(|v| deviation * v).collect())
        };
        let uniform = |bound: f32| -> Vec<f32> {
            let mut draw = noise.uniform(Purpose::Parameters, network, i as u64);
            (0..n).map(|_| bound * draw()).collect()
        };
        let fan_in: usize = shape[1..].iter().product();
        let values = match key.as_str() {
            "head.head.weight" => vec![0.0; n],
            // PyTorch initialises the bias of a convolution at random.
            "patch_embedding.bias" => uniform(1.0 / (config.patch_in() as f32).sqrt()),
            k if k.ends_with("modulation") => normal(1.0 / (config.dim as f32).sqrt())?,
            k if k.ends_with("bias") => vec![0.0; n],
            // The gain of a norm.
            _ if shape.len() == 1 => vec![1.0; n],
            k if k.starts_with("text_embedding") || k.starts_with("time_embedding") => normal(EMBEDDING_DEVIATION)?,
            // Xavier-uniform.
            _ => uniform((6.0 / (fan_in + shape[0]) as f32).sqrt()),
        };
        Ok((key, Tensor::new(values, shape)?))
    };
    config.weights().into_iter().enumerate().map(initial_weight).collect()
}

/// The text of a `config.json` as in the official repositories. It contains the number of heads and the length of
/// prompts, which the weights do not.
fn config_json(config: &DitConfig, kind: WanKind, text_len: usize) -> String {
    let value = json!({
        "_class_name": "WanModel",
        "dim": config.dim,
        "eps": 1e-6,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "model_type": kind.model_type(),
        "num_heads": config.heads,
        "num_layers": config.layers,
        "out_dim": config.out_channels,
        "text_len": text_len,
    });
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::components::{heads, text_len};
    use super::*;
    use roll_network::weights::Checkpoint;

    #[test]
    fn experts_differ_and_have_all_weights_and_a_config() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = Sizes { dim: 24, layers: 2, heads: 3, ..Sizes::default() };
        let paths = init_experts(dir.path(), WanKind::I2v, &sizes, 1).unwrap();
        let listed: Vec<String> = serde_json::from_slice(&std::fs::read(paths).unwrap()).unwrap();
        assert_eq!(listed[2..], ["models_t5_*", "Wan2.1_VAE.*"]);
        let experts: Vec<Checkpoint> =
            listed[..2].iter().map(|p| Checkpoint::open(dir.path().join(p)).unwrap()).collect();
        for expert in &experts {
            let read = DitConfig::from_shapes(&expert.shapes(), heads(expert)).unwrap();
            assert_eq!(read, sizes.config(WanKind::I2v).unwrap());
            assert_eq!(text_len(expert), Some(32));
        }
        let first = |i: usize| experts[i].tensor("blocks.0.ffn.0.weight").unwrap().to_f32_vec();
        assert_ne!(first(0), first(1));
    }

    #[test]
    fn weights_have_the_deviations_of_the_official_initialisation() {
        let config = Sizes::default().config(WanKind::I2v).unwrap();
        let state = initial_weights(&config, &Noise::new(3), 0).unwrap();
        let deviation = |key: &str| {
            let values = state[key].f32s().unwrap();
            (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
        };
        let xavier = |fans: usize| (2.0 / fans as f64).sqrt();
        for (key, expected) in [
            ("blocks.0.self_attn.q.weight", xavier(128 + 128)),
            ("blocks.5.ffn.0.weight", xavier(128 + 512)),
            ("time_projection.1.weight", xavier(128 + 768)),
            ("patch_embedding.weight", xavier(36 * 4 + 128)),
            ("text_embedding.0.weight", 0.02),
            ("time_embedding.2.weight", 0.02),
            ("blocks.2.modulation", 1.0 / 128f64.sqrt()),
            ("blocks.2.norm3.weight", 1.0),
        ] {
            assert!((deviation(key) / expected - 1.0).abs() < 0.06, "{key}: {} instead of {expected}", deviation(key));
        }
        for key in ["head.head.weight", "head.head.bias", "blocks.0.ffn.2.bias", "blocks.0.norm3.bias"] {
            assert_eq!(deviation(key), 0.0, "{key}");
        }
    }

    #[test]
    fn errors_name_invalid_sizes() {
        let message = |sizes: Sizes| sizes.config(WanKind::T2v).unwrap_err().to_string();
        assert!(message(Sizes { heads: 5, ..Sizes::default() }).contains("heads"));
        assert!(message(Sizes { layers: 0, ..Sizes::default() }).contains("layers"));
    }
}
