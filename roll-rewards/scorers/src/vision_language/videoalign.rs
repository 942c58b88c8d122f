//! The reward `videoalign`: VideoReward of VideoAlign (Liu et al. 2025, "Improving Video Generation with Human
//! Feedback"), a Qwen2-VL with a linear head that rates a clip's visual quality, motion quality and text alignment.
//!
//! The head reads the network's states at three tokens of its own. The positions of all tokens count up, as in the
//! original, which calls the language model without positions. Attention is causal, so the two tokens before the prompt
//! do not depend on it, and no text behind the last rated token is computed.

use std::collections::BTreeMap;

use roll_core::keys::check_ranges;
use roll_core::plan::{Needs, PlanInput};
use roll_core::{
    BuildContext, Component, Error, Grad, Kind, Measure, OnMissing, Options, PlannedReads, Positions, Pullback, Result,
    RewardScorer, Score, Target, Tensor, Video, VisionLanguageModel, open_vision_language, parse_options,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checkpoint::{Dimension, ModelConfig, head_weight, require_token};
use super::prompt_file::{PromptText, Published};
use super::sampling::Sampling;
use super::{
    DEFAULT_SYSTEM, Opened, PLANNED_FPS, PixelLimits, Pixels, Placeholder, chat_tokens, network_needs, planned_medium,
    planned_prompt, pull_all, refuse_reserved,
};
use crate::picture::check_on_missing;

/// Key of the network.
const MODEL: &str = "reward.model";

/// The text that the published head was trained with.
const PUBLISHED: Published = Published {
    file: "prompt_template.py of KwaiVGI/VideoAlign, DETAILED_PROMPT_WITH_SPECIAL_TOKEN",
    constants: &["DETAILED_PROMPT_WITH_SPECIAL_TOKEN"],
    sha256: "fdb6309b",
};

/// Options of the reward `videoalign`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VideoAlignConfig {
    /// The network with the head `rm_head`: `{name: qwen_vl, model_path: DIRECTORY}`.
    #[schemars(extend("x-required" = true))]
    pub model: Component,
    /// File with the text of the question, which holds the reward tokens and `{text_prompt}` (or `{prompt}`) for the
    /// video's prompt: a text file, or `prompt_template.py` of KwaiVGI/VideoAlign.
    #[schemars(extend("x-required" = true))]
    pub prompt_file: String,
    /// The rated dimensions and their weights in the score: VQ (visual quality), MQ (motion quality), TA (text
    /// alignment). Empty: all three, with weight 1. Without TA, the prompt has no influence and is not read.
    pub dimensions: BTreeMap<Dimension, f64>,
    /// `model_config.json` of the checkpoint, for the options below that are left out. If absent, they have the values
    /// of the published checkpoint.
    pub model_config: Option<String>,
    /// Mean and standard deviation of the head's output over the training data, per dimension. The score has the mean
    /// subtracted and is divided by the deviation.
    pub normalisation: BTreeMap<Dimension, [f64; 2]>,
    /// Sampled frames per second of the clip, at least 4 frames if the clip has them. Published: 2.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub fps: Option<f64>,
    /// Number of sampled frames, instead of `fps`. An odd number is rounded to an even one.
    #[schemars(range(min = 2, max = 768))]
    pub frames: Option<usize>,
    /// Frames with fewer pixels are enlarged.
    #[schemars(range(min = 1))]
    pub min_pixels: usize,
    /// Frames with more pixels are reduced. Published: 200704.
    #[schemars(range(min = 1))]
    pub max_pixels: Option<usize>,
    /// The system turn of the chat.
    pub system: String,
    /// Name of the measured quantity, for labels, file names and metrics.
    pub label: String,
    /// What happens with a clip of fewer than two frames, which has no motion to rate.
    pub on_missing: OnMissing,
}

impl Default for VideoAlignConfig {
    fn default() -> Self {
        Self {
            model: Component::named("qwen_vl"),
            prompt_file: String::new(),
            dimensions: BTreeMap::new(),
            model_config: None,
            normalisation: BTreeMap::new(),
            fps: None,
            frames: None,
            min_pixels: 128 * 28 * 28,
            max_pixels: None,
            system: DEFAULT_SYSTEM.into(),
            label: Measure::SCORE.into(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// A rated dimension.
struct Rated {
    dimension: Dimension,
    /// Its reward token; 0 until the network is open.
    token: u32,
    /// Factor of the normalised rating in the score.
    weight: f64,
    mean: f64,
    deviation: f64,
}

/// The reward `videoalign`.
pub struct VideoAlign {
    network: Box<dyn VisionLanguageModel>,
    /// `rm_head.weight`, `[1, width]` or `[3, width]`.
    head: Tensor,
    question: PromptText,
    /// The rated dimensions, in the order of their tokens.
    rated: Vec<Rated>,
    /// The reward tokens of all dimensions.
    tokens: Vec<u32>,
    sampling: Sampling,
    limits: PixelLimits,
    config: VideoAlignConfig,
}

/// Options of the reward that were checked.
pub(super) struct Checked {
    question: PromptText,
    /// The rated dimensions, whose tokens the network has.
    rated: Vec<Rated>,
    sampling: Sampling,
    limits: PixelLimits,
}

impl VideoAlignConfig {
    /// Checks all options and reads the small files. Opens no network.
    fn checked(&self, context: &BuildContext) -> Result<Checked> {
        check_ranges("reward", self)?;
        check_on_missing(self.on_missing)?;
        let question = PromptText::read(&self.prompt_file, &PUBLISHED, context)?;
        self.checked_with(question, context)
    }

    /// As [`VideoAlignConfig::checked`], with the text of the question.
    pub(super) fn checked_with(&self, question: PromptText, context: &BuildContext) -> Result<Checked> {
        let published = ModelConfig::read(self.model_config.as_deref(), context)?;
        let weights = match self.dimensions.is_empty() {
            true => Dimension::ALL.map(|dimension| (dimension, 1.0)).into(),
            false => self.dimensions.clone(),
        };
        if weights.values().any(|weight| !weight.is_finite()) {
            return Err(Error::config("reward.dimensions", format!("expected finite weights, found {weights:?}")));
        }
        let names: Vec<&str> = weights.keys().map(|dimension| dimension.token()).collect();
        question.check(&names, weights.contains_key(&Dimension::TA))?;
        let rate = |(&dimension, &weight): (&Dimension, &f64)| {
            let [mean, deviation] = match self.normalisation.get(&dimension) {
                Some(statistics) => *statistics,
                None => published.normalisation(dimension),
            };
            if !(mean.is_finite() && deviation.is_finite() && deviation > 0.0) {
                let problem = format!("expected a mean and a deviation above 0, found [{mean}, {deviation}]");
                return Err(Error::config(format!("reward.normalisation.{}", dimension.name()), problem));
            }
            Ok(Rated { dimension, token: 0, weight, mean, deviation })
        };
        let rated = weights.iter().map(rate).collect::<Result<Vec<Rated>>>()?;
        let sampling = match (self.frames, self.fps) {
            (Some(_), Some(_)) => return Err(Error::config("reward.frames", "give either `frames` or `fps`")),
            (Some(count), None) => Sampling::Count(count),
            (None, Some(rate)) => Sampling::Rate(rate),
            (None, None) => published.sampling(),
        };
        let max = self.max_pixels.unwrap_or_else(|| published.max_pixels());
        // As in the original, `model_config` may have less: its code reduces first, and enlarges what is still smaller.
        if self.max_pixels.is_some() && self.min_pixels > max {
            let problem = format!("expected at most `max_pixels`, {max}; found {}", self.min_pixels);
            return Err(Error::config("reward.min_pixels", problem));
        }
        Ok(Checked { question, rated, sampling, limits: PixelLimits { min: self.min_pixels, max } })
    }
}

impl VideoAlign {
    /// Opens the network of `config` and reads the other files. Fails, and names the key, file or tensor, if one does
    /// not fit.
    pub fn load(config: VideoAlignConfig, context: &BuildContext) -> Result<Self> {
        let checked = config.checked(context)?;
        let network = open_vision_language(MODEL, &config.model, context)?;
        Self::new(config, checked, network)
    }

    /// Opens the reward; see [`Opened::with_network`].
    fn open(config: VideoAlignConfig, context: &BuildContext) -> Result<Opened> {
        let about = (config.label.as_str(), config.on_missing);
        let check = || config.checked(context).map(drop);
        Opened::with_network("videoalign", &config.model, about, context, check, || Self::load(config.clone(), context))
    }

    /// Memory and time of the network, for a plan.
    fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
        let config: VideoAlignConfig = parse_options(Kind::Reward.section(), options)?;
        let (component, reward) = (config.model.clone(), Self::load(config, context)?);
        let facts = reward.network.facts();
        let frames = reward.sampling.indices(input.frames, PLANNED_FPS).map_or(2, |frames| frames.len());
        let medium = planned_medium(input, frames, reward.limits, facts)?;
        let tokens = reward.text(facts.tokens_of(&medium)?, &planned_prompt())?.0.len();
        let reads = PlannedReads { tokens, media: vec![medium], count: input.scored() };
        network_needs(MODEL, &component, &reads, input, context)
    }

    /// As [`VideoAlign::load`], with options that were checked and a network that is open already.
    pub(super) fn new(
        config: VideoAlignConfig,
        checked: Checked,
        network: Box<dyn VisionLanguageModel>,
    ) -> Result<Self> {
        let tokens = Dimension::ALL.map(|dimension| network.token_id(dimension.token()));
        let Checked { question, mut rated, sampling, limits } = checked;
        for rated in &mut rated {
            rated.token = require_token(network.as_ref(), rated.dimension.token(), MODEL)?;
        }
        let head = head_weight(network.as_ref(), MODEL)?;
        let tokens = tokens.into_iter().flatten().collect();
        Ok(Self { network, head, question, rated, tokens, sampling, limits, config })
    }

    /// The chat about a clip of `media_tokens`, up to the last rated token, and the places of the rated tokens.
    pub(super) fn text(&self, media_tokens: usize, prompt: &str) -> Result<(Vec<u32>, Vec<usize>)> {
        self.check_prompt(prompt)?;
        let question = self.question.with(if self.reads_prompt() { prompt } else { "" });
        let (network, system) = (self.network.as_ref(), &self.config.system);
        let mut tokens = chat_tokens(network, system, Placeholder::Video, &[media_tokens], &question)?;
        let place = |rated: &Rated| {
            let missing = || Error::Misuse(format!("{} is not a token of its own", rated.dimension.token()));
            tokens.iter().position(|token| *token == rated.token).ok_or_else(missing)
        };
        let places = self.rated.iter().map(place).collect::<Result<Vec<usize>>>()?;
        tokens.truncate(places.iter().max().map_or(0, |last| last + 1));
        Ok((tokens, places))
    }

    /// Whether the prompt has an influence: without text alignment, every rated token lies before it.
    fn reads_prompt(&self) -> bool {
        self.rated.iter().any(|rated| rated.dimension == Dimension::TA)
    }

    /// The row of the head for the token of a dimension.
    fn head_row(head: &Tensor, dimension: Dimension) -> Result<&[f32]> {
        let width = head.shape()[1];
        let row = if head.shape()[0] == 1 { 0 } else { dimension as usize };
        Ok(&head.f32s()?[row * width..][..width])
    }
}

impl RewardScorer for VideoAlign {
    fn name(&self) -> &str {
        "videoalign"
    }

    fn measures(&self) -> Measure {
        Measure::new(self.config.label.as_str())
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        false
    }

    fn score(&mut self, video: &Video, prompt: &str, _: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let [total, height, width] = video.dims();
        if total < 2 || height * width == 0 {
            let reason = format!("expected a clip of at least 2 frames, found {total} of {height} x {width}");
            return Ok((Score::Missing { reason }, None));
        }
        let head = self.head.clone();
        let frames = self.sampling.indices(total, video.fps()).ok_or_else(|| {
            Error::Unsupported(format!("{total} frames at {} per second cannot be sampled", video.fps()))
        })?;
        let sampled_fps = frames.len() as f64 / (total as f64 / video.fps());
        let pixels = Pixels::new(video, frames, self.limits, self.network.facts())?;
        let facts = self.network.facts();
        let medium = pixels.medium(facts.patch_frames as f64 / sampled_fps)?;
        let (tokens, places) = self.text(facts.tokens_of(medium.pixels.shape())?, prompt)?;
        let (states, pull) = self.network.read(&tokens, &[medium], Positions::Sequential, &places, grad)?;

        let (mut value, mut details, mut d_states) = (0.0, BTreeMap::new(), Vec::with_capacity(states.len()));
        for (rated, state) in self.rated.iter().zip(states.f32s()?.chunks_exact(head.shape()[1])) {
            let row = Self::head_row(&head, rated.dimension)?;
            let raw: f64 = row.iter().zip(state).map(|(w, s)| f64::from(*w) * f64::from(*s)).sum();
            let rating = (raw - rated.mean) / rated.deviation;
            value += rated.weight * rating;
            details.insert(rated.dimension.name().to_string(), rating);
            let slope = (rated.weight / rated.deviation) as f32;
            d_states.extend(row.iter().map(|w| slope * w));
        }
        let (d_states, shape) = (Tensor::new(d_states, states.shape())?, video.frames().shape().to_vec());
        let pullback = pull.map(|pull| {
            Pullback::new(move |cotangent| {
                let d_pixels = pull.pull(&d_states)?;
                pull_all(&[pixels], d_pixels.f32s()?, cotangent.item()?, &shape)
            })
        });
        Ok((Score::Value { value, details }, pullback))
    }

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        match self.reads_prompt() {
            true => refuse_reserved(self.network.as_ref(), prompt, &self.tokens),
            false => Ok(()),
        }
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

roll_core::register! {
    Reward, "videoalign", VideoAlignConfig,
    "VideoReward of VideoAlign: visual quality, motion quality and text alignment of a clip, by a Qwen2-VL",
    VideoAlign::open,
    plan: VideoAlign::needs,
}
