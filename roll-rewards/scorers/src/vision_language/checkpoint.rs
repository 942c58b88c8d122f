//! What the heads' checkpoints hold besides the network: `model_config.json` of VideoAlign, reward tokens, `rm_head`.

use std::collections::BTreeMap;

use roll_core::{BuildContext, Error, Result, Tensor, VisionLanguageModel};
use roll_external::files;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sampling::{MAX_FRAMES, Sampling};

/// Longest `model_config.json` in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// A dimension that VideoReward rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Dimension {
    /// Visual quality.
    VQ,
    /// Motion quality.
    MQ,
    /// Text alignment.
    TA,
}

impl Dimension {
    /// All, in the order of the head's outputs and of the tokens in the text.
    pub const ALL: [Self; 3] = [Self::VQ, Self::MQ, Self::TA];

    /// The name in configurations and details.
    pub fn name(self) -> &'static str {
        ["VQ", "MQ", "TA"][self as usize]
    }

    /// The reward token.
    pub fn token(self) -> &'static str {
        ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"][self as usize]
    }

    /// Mean and standard deviation of the published head's output.
    fn published_normalisation(self) -> [f64; 2] {
        [[3.6757, 2.2476], [1.1646, 1.3811], [2.8105, 2.5121]][self as usize]
    }
}

/// The parts of `model_config.json` that scoring depends on.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ModelConfig {
    data_config: DataConfig,
    /// `VQ_mean`, `VQ_std`, ...
    inference_config: BTreeMap<String, f64>,
}

/// `data_config` of `model_config.json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct DataConfig {
    max_frame_pixels: Option<usize>,
    num_frames: Option<usize>,
    fps: Option<f64>,
}

impl ModelConfig {
    /// Reads the file, if there is one. Fails if it cannot be read, or lacks one of a mean and a deviation.
    pub fn read(file: Option<&str>, context: &BuildContext) -> Result<Self> {
        let Some(file) = file else { return Ok(Self::default()) };
        let path = context.resolve(file);
        let text = files::read_text(&path, MAX_BYTES).map_err(Error::file("read `reward.model_config`", &path))?;
        let read: Self = serde_json::from_str(&text).map_err(|e| Error::bad_file(&path, e.to_string()))?;
        if let Some(count) = read.data_config.num_frames.filter(|count| !(2..=MAX_FRAMES).contains(count)) {
            let problem = format!("expected 2 to {MAX_FRAMES} in `data_config.num_frames`, found {count}");
            return Err(Error::bad_file(&path, problem));
        }
        for dimension in Dimension::ALL.map(Dimension::name) {
            let has = |part: &str| read.inference_config.contains_key(&format!("{dimension}_{part}"));
            if has("mean") != has("std") {
                let problem = format!("expected {dimension}_mean and {dimension}_std in `inference_config`, found one");
                return Err(Error::bad_file(&path, problem));
            }
        }
        Ok(read)
    }

    /// Mean and standard deviation of a dimension.
    pub fn normalisation(&self, dimension: Dimension) -> [f64; 2] {
        let value = |part: &str| self.inference_config.get(&format!("{}_{part}", dimension.name())).copied();
        value("mean").zip(value("std")).map_or(dimension.published_normalisation(), |(mean, std)| [mean, std])
    }

    /// How clips are sampled.
    pub fn sampling(&self) -> Sampling {
        match self.data_config.num_frames {
            Some(count) => Sampling::Count(count),
            None => Sampling::Rate(self.data_config.fps.filter(|fps| *fps > 0.0).unwrap_or(2.0)),
        }
    }

    /// Greatest number of pixels of a frame.
    pub fn max_pixels(&self) -> usize {
        self.data_config.max_frame_pixels.unwrap_or(256 * 28 * 28)
    }
}

/// The id of a reward token. Fails if the tokenizer of the network at `key` lacks it.
pub fn require_token(network: &dyn VisionLanguageModel, token: &str, key: &str) -> Result<u32> {
    network.token_id(token).ok_or_else(|| {
        let problem = format!(
            "expected a tokenizer with the token `{token}`, found none: use the checkpoint of the reward and the \
             tokenizer beside it, not the base model's"
        );
        Error::config(key, problem)
    })
}

/// A tensor of the head as f32. Fails if the checkpoint at `key` lacks it.
pub fn head_tensor(network: &dyn VisionLanguageModel, name: &str, key: &str) -> Result<Tensor> {
    let others = network.other_tensors();
    let tensor = others.get(name).ok_or_else(|| {
        let found: Vec<&str> = others.keys().map(String::as_str).collect();
        let found = if found.is_empty() { "no tensors besides the network's".into() } else { found.join(", ") };
        Error::config(key, format!("expected the head's tensor `{name}` in the checkpoint, found {found}"))
    })?;
    Tensor::new(tensor.to_f32_vec(), tensor.shape())
}

/// VideoReward's head, `[1, width]` or `[3, width]`, without bias.
pub fn head_weight(network: &dyn VisionLanguageModel, key: &str) -> Result<Tensor> {
    let (head, width) = (head_tensor(network, "rm_head.weight", key)?, network.facts().width);
    match *head.shape() {
        [1 | 3, found] if found == width => Ok(head),
        ref found => Err(Error::shape("rm_head.weight", format!("[1, {width}] or [3, {width}]"), found)),
    }
}
