//! The reward `clip`: CLIP, SigLIP and scorers derived from them, read directly from a Hugging Face model directory. It
//! compares frames of a video with a text or with the reference, or rates them by an aesthetic head.
//!
//! `tower.rs` and `attention_pool.rs` are the image tower, which is differentiable in the pixels. `text.rs` is the text
//! tower, without gradient. `config.rs` and `files.rs` read the directory.

mod attention_pool;
mod config;
mod files;
#[cfg(test)]
mod tests;
mod text;
mod tower;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_tensor::Device;
use roll_backends::host::{to_device_nd, to_host_nd};
use roll_backends::{Chain, Memory, Segment};
use roll_core::{
    BuildContext, Error, Grad, Measure, OnMissing, Pullback, Result, ResultExt, RewardScorer, Score, Target, Tensor,
    Video, keys::check_ranges,
};
use roll_external::Fingerprint;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RewardError;
use crate::onnx_reward::row_score;
use crate::picture::{Fit, FrameScorer, Frames, Input, OverFrames, RowNetwork, RowsPull, check_on_missing};
use attention_pool::AttentionPool;
use config::{Family, ModelConfig};
use files::Tensors;
use text::TextTower;
use tower::{Embed, Head, Layer, Pool, TowerDims};

const NAME: &str = "clip";
/// Name of the target's tensor: the mean direction of the reference's embeddings.
const DIRECTION: &str = "direction";
/// Number of text embeddings that are cached, because prompts recur every epoch.
const MAX_CACHED_TEXTS: usize = 1024;

/// Options of the reward `clip`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClipRewardConfig {
    /// Directory of a CLIP or SigLIP model: config.json, model.safetensors, tokenizer.json and
    /// preprocessor_config.json (or processor_config.json, as transformers 5 saves it).
    #[schemars(extend("x-required" = true))]
    pub path: String,
    /// A weight file in place of the directory's own: safetensors or a torch checkpoint, with the names of
    /// `transformers` or of open_clip, as HPS_v2.1_compressed.pt.
    pub weights: Option<String>,
    /// What frames are compared with: `prompt`, `reference` or `{text: ...}`.
    pub against: Against,
    /// How the similarity becomes the score: `cosine`, `logit` or `probability`.
    pub score: Scale,
    /// A safetensors file or torch checkpoint with the layers of an aesthetic predictor. The predictor's output is then
    /// the score, and frames are not compared.
    pub head: Option<String>,
    /// How a frame of another aspect ratio is fitted into the model's square. If absent, as preprocessor_config.json
    /// says. HPSv2 is computed with `letterbox`.
    pub fit: Option<Fit>,
    /// Which frames are scored.
    pub frames: Frames,
    /// How the scores of the frames are reduced to one.
    pub over_frames: OverFrames,
    /// Number of frames per batch of the image tower.
    #[schemars(range(min = 1))]
    pub frames_per_batch: usize,
    /// Name of the measured quantity, for labels and pages.
    pub label: String,
    /// Handling of a video that has no frame to score.
    pub on_missing: OnMissing,
}

impl Default for ClipRewardConfig {
    fn default() -> Self {
        Self {
            path: String::new(),
            weights: None,
            against: Against::Prompt,
            score: Scale::Cosine,
            head: None,
            fit: None,
            frames: Frames::Uniform(8),
            over_frames: OverFrames::Mean,
            frames_per_batch: 8,
            label: "clip".into(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// What frames are compared with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Against {
    /// The sample's prompt.
    #[default]
    Prompt,
    /// The mean embedding of the reference video's frames that `frames` selects. Each frame of the generated video is
    /// compared with this one embedding, not with the reference's frame at the same time.
    Reference,
    /// A fixed text.
    Text(String),
}

/// How the similarity becomes the score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The cosine similarity: CLIP score, HPSv2.
    #[default]
    Cosine,
    /// The cosine times the model's factor exp(`logit_scale`), plus SigLIP's `logit_bias`: PickScore.
    Logit,
    /// The sigmoid of `logit`: SigLIP's probability that picture and text belong together.
    Probability,
}

/// The image tower up to the embedding or to the output of a head.
struct VisionTower {
    chain: Chain,
    device: Device,
}

impl VisionTower {
    /// Loads the layers in their order: embedding of patches, transformer layers, pooling with the head.
    fn load(tensors: &Tensors, config: &ModelConfig, head: Option<Head>, device: &Device) -> Result<Self> {
        let (v, family) = (&config.vision_config, config.family);
        let (width, eps) = (v.hidden_size, v.layer_norm_eps);
        let embed = Embed::load(tensors, family, v, device)?;
        let tokens = embed.tokens();
        let dims = TowerDims {
            width,
            hidden: v.intermediate_size,
            heads: v.num_attention_heads,
            activation: v.hidden_act,
            eps,
            is_causal: false,
        };
        let mut segments: Vec<Arc<dyn Segment>> = vec![Arc::new(embed)];
        for i in 0..v.num_hidden_layers {
            let name = format!("vision_model.encoder.layers.{i}");
            segments.push(Arc::new(Layer::load(tensors, name, dims, tokens, device)?));
        }
        segments.push(match family {
            Family::Clip => Arc::new(Pool::load(tensors, [width, config.projection_dim], tokens, eps, head, device)?),
            Family::Siglip => Arc::new(AttentionPool::load(tensors, dims, tokens, head, device)?),
        });
        Ok(Self { chain: Chain::new(segments), device: device.clone() })
    }
}

impl RowNetwork for VisionTower {
    fn rows(&self, input: Tensor) -> Result<Tensor> {
        let input = to_device_nd(&input, &self.device)?;
        let (shared, tracks_shared, parameters) = (vec![], false, None);
        let (rows, _) = self.chain.forward(input, shared, Grad::Skip, Memory::Recompute, tracks_shared, parameters)?;
        to_host_nd(&rows)
    }

    fn rows_vjp(&self, input: Tensor) -> Result<(Tensor, RowsPull)> {
        let device = self.device.clone();
        let input = to_device_nd(&input, &device)?;
        let (shared, tracks_shared, parameters) = (vec![], false, None);
        let (rows, record) =
            self.chain.forward(input, shared, Grad::Record, Memory::Recompute, tracks_shared, parameters)?;
        let record = record.ok_or_else(|| Error::Misuse("a recorded chain gave no record".into()))?;
        let pull = move |cotangent: Tensor| to_host_nd(&record.pull(to_device_nd(&cotangent, &device)?)?.0);
        Ok((to_host_nd(&rows)?, Box::new(pull)))
    }
}

/// Similarity of frames to a text or to the reference, or their rating by an aesthetic head. Differentiable in the
/// frames.
pub struct ClipReward {
    config: ClipRewardConfig,
    vision: VisionTower,
    /// Encodes the texts that frames are compared with; `None` if frames are compared with no text.
    text: Option<TextTower>,
    /// Cached directions of texts.
    text_directions: HashMap<String, Vec<f32>>,
    /// How a cosine becomes a logit; `None` if the score is the cosine.
    logit: Option<LogitScale>,
    input: Input,
    /// The files that the target depends on.
    files: Vec<PathBuf>,
    /// Whether an empty prompt was logged already.
    has_logged_empty_prompt: bool,
}

/// The map from a cosine to a logit: `factor * cosine + bias`.
struct LogitScale {
    /// exp(`logit_scale`).
    factor: f64,
    /// `logit_bias`; 0 for CLIP, which has none.
    bias: f64,
}

impl LogitScale {
    /// Reads the map that `score` needs from a model's tensors; `None` if the score is the cosine. Fails if the family
    /// has no such score.
    fn read(score: Scale, family: Family, tensors: &Tensors) -> Result<Option<Self>> {
        match (score, family) {
            (Scale::Cosine, _) => Ok(None),
            (Scale::Probability, Family::Clip) => {
                let problem = "`probability` is SigLIP's: a CLIP gives `cosine` or `logit`";
                Err(Error::config("reward.score", problem))
            }
            (Scale::Logit, Family::Clip) => {
                Ok(Some(Self { factor: single_value(tensors, "logit_scale")?.exp(), bias: 0.0 }))
            }
            (Scale::Logit | Scale::Probability, Family::Siglip) => {
                let factor = single_value(tensors, "logit_scale")?.exp();
                Ok(Some(Self { factor, bias: single_value(tensors, "logit_bias")? }))
            }
        }
    }
}

impl ClipReward {
    /// Loads the directory of `config`, and the head if there is one. Relative paths start from the base directory of
    /// `context`.
    pub fn load(config: ClipRewardConfig, context: &BuildContext) -> Result<Self> {
        if config.path.is_empty() {
            return Err(Error::config("reward.path", "missing: the model's directory"));
        }
        config.frames.check()?;
        check_ranges("reward", &config)?;
        check_on_missing(config.on_missing)?;
        if config.head.is_some() && (&config.against, config.score) != (&Against::Prompt, Scale::Cosine) {
            return Err(Error::config("reward.head", "rates frames by themselves: leave out `against` and `score`"));
        }
        let directory = context.resolve(&config.path);
        let device = roll_backends::device(&context.backend)?;
        Self::open(config, &directory, context, &device)
            .while_doing(|| format!("loading CLIP from {}", directory.display()))
    }

    /// Opens the model in `directory`, with weights on `device`.
    fn open(config: ClipRewardConfig, directory: &Path, context: &BuildContext, device: &Device) -> Result<Self> {
        let model = ModelConfig::read(directory)?;
        let tensors = match &config.weights {
            Some(file) => Tensors::open(&context.resolve(file))?,
            None => Tensors::in_directory(directory)?,
        };
        let mut input = config::read_input(directory, model.family, model.vision_config.image_size)?;
        if let Some(fit) = config.fit {
            let shorter_side = if fit == Fit::Crop { input.shorter_side } else { None };
            input = Input { fit, shorter_side, ..input };
        }
        let mut files = vec![directory.join("config.json")];
        files.extend(config::preprocessing_file(directory));
        files.extend(tensors.paths().map(PathBuf::from));
        let head = match &config.head {
            Some(head) => {
                let path = context.resolve(head);
                files.push(path.clone());
                Some(Head::load(&Tensors::open(&path)?, model.projection_dim, device)?)
            }
            None => None,
        };
        let text = match (&config.head, &config.against) {
            (Some(_), _) | (None, Against::Reference) => None,
            (None, Against::Prompt | Against::Text(_)) => Some(TextTower::load(directory, &tensors, &model, device)?),
        };
        let logit = LogitScale::read(config.score, model.family, &tensors)?;
        Ok(Self {
            vision: VisionTower::load(&tensors, &model, head, device)?,
            input,
            text,
            text_directions: HashMap::new(),
            logit,
            config,
            files,
            has_logged_empty_prompt: false,
        })
    }

    /// The pass of a video's frames through the image tower.
    fn scorer(&self) -> FrameScorer<'_> {
        FrameScorer {
            network: &self.vision,
            input: &self.input,
            frames: self.config.frames,
            over: self.config.over_frames,
            batch: self.config.frames_per_batch,
        }
    }

    /// The score for a cosine, and the derivative of the score with respect to the cosine.
    fn scaled_score(&self, cosine: f64) -> (f64, f64) {
        let Some(LogitScale { factor, bias }) = self.logit else { return (cosine, 1.0) };
        let logit = factor * cosine + bias;
        if self.config.score != Scale::Probability {
            return (logit, factor);
        }
        let probability = 1.0 / (1.0 + (-logit).exp());
        (probability, factor * probability * (1.0 - probability))
    }

    /// The normalised embedding of a text.
    fn text_direction(&mut self, text: &str) -> Result<Vec<f32>> {
        if let Some(known) = self.text_directions.get(text) {
            return Ok(known.clone());
        }
        let tower = self.text.as_ref().ok_or_else(|| Error::Misuse("this CLIP reward reads no text".into()))?;
        let direction = row_score::mean_direction(&[tower.embed(text)?]);
        if self.text_directions.len() >= MAX_CACHED_TEXTS {
            self.text_directions.clear();
        }
        self.text_directions.insert(text.into(), direction.clone());
        Ok(direction)
    }
}

/// Reads a parameter with one value. Its shape is `[]` in CLIP and `[1]` in SigLIP.
fn single_value(tensors: &Tensors, name: &str) -> Result<f64> {
    let shape = tensors.shape(name).unwrap_or_default().to_vec();
    Ok(f64::from(tensors.tensor(name, &shape)?.item()?))
}

impl RewardScorer for ClipReward {
    fn name(&self) -> &str {
        NAME
    }

    fn measures(&self) -> Measure {
        Measure::new(self.config.label.clone())
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        self.config.against == Against::Reference
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        if !self.reads_reference() {
            return Ok(Target::default());
        }
        let rows = self.scorer().rows(reference)?;
        if rows.is_empty() {
            return Err(Error::nothing_to_score("the reference has no frames"));
        }
        let direction = row_score::mean_direction(&rows);
        let width = direction.len();
        Ok(Target::of([(DIRECTION.to_string(), Tensor::new(direction, [width])?)].into()))
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        if self.config.head.is_some() {
            let only_output = 0;
            return self.scorer().score(video, &|row: &[f32]| Ok(row_score::value(row, only_output)), grad);
        }
        let direction = match self.config.against.clone() {
            Against::Prompt => {
                if prompt.trim().is_empty() && !std::mem::replace(&mut self.has_logged_empty_prompt, true) {
                    tracing::warn!("`clip` compares frames with an empty prompt (`reward.against: prompt`)");
                }
                self.text_direction(prompt)?
            }
            Against::Text(text) => self.text_direction(&text)?,
            Against::Reference => {
                let bad_target = || RewardError::InvalidTarget { reward: NAME.into(), tensor: DIRECTION.into() };
                target.tensors.get(DIRECTION).ok_or_else(bad_target)?.to_f32_vec()
            }
        };
        let score_of_row = |row: &[f32]| {
            if row.len() != direction.len() {
                return Err(Error::shape(
                    "the direction to compare with",
                    format!("[{}]", row.len()),
                    &[direction.len()],
                ));
            }
            let (cosine, gradient) = row_score::cosine(row, &direction);
            let (value, slope) = self.scaled_score(cosine);
            Ok((value, gradient.into_iter().map(|g| slope as f32 * g).collect()))
        };
        self.scorer().score(video, &score_of_row, grad)
    }

    fn target_key(&self) -> Result<Option<String>> {
        // Only `against: reference` has a target. The target depends on the tower and on the choice of frames.
        let mut key = Fingerprint::new(NAME).text("against", format_args!("{:?}", self.config.against));
        key = key.text("frames", format_args!("{:?} {:?}", self.config.frames, self.config.fit));
        for file in &self.files {
            key = key.file(file)?;
        }
        Ok(Some(key.finish()))
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

roll_core::register! {
    Reward, NAME, ClipRewardConfig,
    "CLIP, SigLIP, PickScore, HPSv2, aesthetic heads: likeness of frames to a text or the reference",
    ClipReward::load,
}
