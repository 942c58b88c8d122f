//! The reward `hpsv3`: HPSv3 (Ma et al. 2025), a Qwen2-VL with a head of three layers that predicts the mean and the
//! deviation of people's preference for a picture. The score of a clip is the mean over sampled frames.
//!
//! Each frame is read and pulled back by itself, so that one pass is recorded at a time.

use roll_core::keys::check_ranges;
use roll_core::plan::{Needs, PlanInput};
use roll_core::{
    BuildContext, Component, Error, Grad, Kind, Measure, OnMissing, Options, PlannedReads, Positions, Pullback, Result,
    ResultExt, RewardScorer, Score, Target, Tensor, Video, VisionLanguageModel, open_vision_language, parse_options,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checkpoint::head_tensor;
use super::prompt_file::{PromptText, Published};
use super::{
    DEFAULT_SYSTEM, Opened, PixelLimits, Pixels, Placeholder, chat_tokens, mean_pullback, network_needs,
    planned_medium, planned_prompt, refuse_reserved,
};
use crate::picture::{Frames, check_on_missing};

/// Key of the network.
const MODEL: &str = "reward.model";
/// The token whose state the head reads.
const TOKEN: &str = "<|Reward|>";
/// Names of the head's layers; a ReLU lies between two.
const LAYERS: [&str; 3] = ["rm_head.0", "rm_head.3", "rm_head.5"];

/// The text that the published head was trained with.
const PUBLISHED: Published = Published {
    file: "hpsv3/dataset/data_collator_qwen.py of MizzenAI/HPSv3, INSTRUCTION and prompt_with_special_token",
    constants: &["INSTRUCTION", "prompt_with_special_token"],
    sha256: "f6ee5747",
};

/// Options of the reward `hpsv3`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Hpsv3Config {
    /// The network with the head `rm_head`: `{name: qwen_vl, model_path: DIRECTORY}`.
    #[schemars(extend("x-required" = true))]
    pub model: Component,
    /// File with the text of the question, which holds the reward token and `{text_prompt}` (or `{prompt}`) for the
    /// video's prompt: a text file, or `data_collator_qwen.py` of MizzenAI/HPSv3.
    #[schemars(extend("x-required" = true))]
    pub prompt_file: String,
    /// The rated frames; the score is their mean. Absent: four at equal distances.
    pub frames: Option<Frames>,
    /// Frames with fewer pixels are enlarged.
    #[schemars(range(min = 1))]
    pub min_pixels: usize,
    /// Frames with more pixels are reduced.
    #[schemars(range(min = 1))]
    pub max_pixels: usize,
    /// The system turn of the chat.
    pub system: String,
    /// Name of the measured quantity, for labels, file names and metrics.
    pub label: String,
    /// What happens with a video without pixels.
    pub on_missing: OnMissing,
}

impl Hpsv3Config {
    /// Checks all options and returns the text of the question. Opens no network.
    fn checked(&self, context: &BuildContext) -> Result<PromptText> {
        check_ranges("reward", self)?;
        check_on_missing(self.on_missing)?;
        self.rated_frames().check()?;
        if self.min_pixels > self.max_pixels {
            let problem = format!("expected at most `max_pixels`, {}; found {}", self.max_pixels, self.min_pixels);
            return Err(Error::config("reward.min_pixels", problem));
        }
        let question = PromptText::read(&self.prompt_file, &PUBLISHED, context)?;
        question.check(&[TOKEN], true)?;
        Ok(question)
    }

    fn rated_frames(&self) -> Frames {
        self.frames.unwrap_or(Frames::Uniform(4))
    }
}

impl Default for Hpsv3Config {
    fn default() -> Self {
        Self {
            model: Component::named("qwen_vl"),
            prompt_file: String::new(),
            frames: None,
            min_pixels: 256 * 28 * 28,
            max_pixels: 256 * 28 * 28,
            system: DEFAULT_SYSTEM.into(),
            label: Measure::SCORE.into(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// A linear layer of the head, in f32.
struct Linear {
    /// `[out, in]`.
    weight: Vec<f32>,
    /// `[out]`.
    bias: Vec<f32>,
}

impl Linear {
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
        self.weight.chunks_exact(x.len()).zip(&self.bias).map(|(row, bias)| dot(row) + bias).collect()
    }

    fn pull(&self, d_out: &[f32]) -> Vec<f32> {
        let width = self.weight.len() / self.bias.len();
        let mut d_in = vec![0.0; width];
        for (row, d) in self.weight.chunks_exact(width).zip(d_out) {
            d_in.iter_mut().zip(row).for_each(|(sum, w)| *sum += d * w);
        }
        d_in
    }
}

/// The head: Linear, ReLU, Linear, ReLU, Linear.
struct Head([Linear; 3]);

impl Head {
    /// Reads the head's tensors. Fails if one is missing, or has a shape that does not follow from the layer before.
    fn read(network: &dyn VisionLanguageModel) -> Result<Self> {
        let mut width = network.facts().width;
        let layers = LAYERS.map(|name| {
            let weight = head_tensor(network, &format!("{name}.weight"), MODEL)?;
            let bias = head_tensor(network, &format!("{name}.bias"), MODEL)?;
            let outputs = bias.len();
            if weight.shape() != [outputs, width] || outputs == 0 {
                let expected = format!("[{outputs}, {width}]");
                return Err(Error::shape(format!("{name}.weight"), expected, weight.shape()));
            }
            width = outputs;
            Ok(Linear { weight: weight.f32s()?.to_vec(), bias: bias.f32s()?.to_vec() })
        });
        let [first, second, last] = layers;
        let head = Self([first?, second?, last?]);
        match width {
            2 => Ok(head),
            found => Err(Error::shape("rm_head.5.bias", "[2], a mean and a log deviation", &[found])),
        }
    }

    /// The mean and the logarithm of the deviation for a state, and the gradient of the mean.
    fn rate(&self, state: &[f32]) -> ([f64; 2], Vec<f32>) {
        let relu = |x: Vec<f32>| -> Vec<f32> { x.into_iter().map(|x| x.max(0.0)).collect() };
        let masked = |d: Vec<f32>, x: &[f32]| -> Vec<f32> {
            d.into_iter().zip(x).map(|(d, x)| if *x > 0.0 { d } else { 0.0 }).collect()
        };
        let [first, second, last] = &self.0;
        let a = relu(first.forward(state));
        let b = relu(second.forward(&a));
        let outputs = last.forward(&b);
        let d_b = masked(last.pull(&[1.0, 0.0]), &b);
        let d_a = masked(second.pull(&d_b), &a);
        ([f64::from(outputs[0]), f64::from(outputs[1])], first.pull(&d_a))
    }
}

/// The reward `hpsv3`.
pub struct Hpsv3 {
    network: Box<dyn VisionLanguageModel>,
    head: Head,
    question: PromptText,
    /// The reward token.
    token: u32,
    config: Hpsv3Config,
}

impl Hpsv3 {
    /// Opens the network of `config` and reads the text of the question. Fails, and names the key, file or tensor, if
    /// one does not fit.
    pub fn load(config: Hpsv3Config, context: &BuildContext) -> Result<Self> {
        let question = config.checked(context)?;
        let network = open_vision_language(MODEL, &config.model, context)?;
        Self::new(config, question, network)
    }

    /// Opens the reward; see [`Opened::with_network`].
    fn open(config: Hpsv3Config, context: &BuildContext) -> Result<Opened> {
        let about = (config.label.as_str(), config.on_missing);
        let check = || config.checked(context).map(drop);
        Opened::with_network("hpsv3", &config.model, about, context, check, || Self::load(config.clone(), context))
    }

    /// Memory and time of the network, for a plan.
    fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
        let config: Hpsv3Config = parse_options(Kind::Reward.section(), options)?;
        let (component, reward) = (config.model.clone(), Self::load(config, context)?);
        let facts = reward.network.facts();
        let medium = planned_medium(input, 1, reward.limits(), facts)?;
        let tokens = reward.text(facts.tokens_of(&medium)?, &planned_prompt())?.len();
        let mut frames = reward.config.rated_frames().of(input.frames);
        frames.dedup();
        let count = input.scored().map(|videos| videos * frames.len());
        network_needs(MODEL, &component, &PlannedReads { tokens, media: vec![medium], count }, input, context)
    }

    fn limits(&self) -> PixelLimits {
        PixelLimits { min: self.config.min_pixels, max: self.config.max_pixels }
    }

    /// As [`Hpsv3::load`], with a network that is open already.
    pub(super) fn new(
        config: Hpsv3Config,
        question: PromptText,
        mut network: Box<dyn VisionLanguageModel>,
    ) -> Result<Self> {
        // The original adds the token to the tokenizer of the base model when it runs.
        let token = match network.token_id(TOKEN) {
            Some(token) => token,
            None => network.add_special_token(TOKEN).while_doing(|| MODEL.into())?,
        };
        let head = Head::read(network.as_ref())?;
        Ok(Self { network, head, question, token, config })
    }

    /// The chat about a picture of `media_tokens`, up to the reward token.
    pub(super) fn text(&self, media_tokens: usize, prompt: &str) -> Result<Vec<u32>> {
        let network = self.network.as_ref();
        self.check_prompt(prompt)?;
        let question = self.question.with(prompt);
        let mut tokens = chat_tokens(network, &self.config.system, Placeholder::Image, &[media_tokens], &question)?;
        let place = tokens.iter().position(|token| *token == self.token);
        let place = place.ok_or_else(|| Error::Misuse(format!("{TOKEN} is not a token of its own")))?;
        tokens.truncate(place + 1);
        Ok(tokens)
    }
}

impl RewardScorer for Hpsv3 {
    fn name(&self) -> &str {
        "hpsv3"
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
        if video.frames().is_empty() {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        let mut frames = self.config.rated_frames().of(video.dims()[0]);
        frames.dedup();
        let (share, limits) = (1.0 / frames.len() as f64, self.limits());
        let (mut value, mut log_sigma) = (0.0, 0.0);
        let (mut pictures, mut d_pixels) = (Vec::new(), Vec::new());
        for frame in frames {
            let pixels = Pixels::new(video, vec![frame], limits, self.network.facts())?;
            let medium = pixels.medium(1.0)?;
            let tokens = self.text(self.network.facts().tokens_of(medium.pixels.shape())?, prompt)?;
            let place = tokens.len() - 1;
            let (state, pull) = self.network.read(&tokens, &[medium], Positions::Sequential, &[place], grad)?;
            let ([mu, log_sigma_of_frame], d_state) = self.head.rate(state.f32s()?);
            value += share * mu;
            log_sigma += share * log_sigma_of_frame;
            if let Some(pull) = pull {
                d_pixels.extend_from_slice(pull.pull(&Tensor::new(d_state, state.shape())?)?.f32s()?);
                pictures.push(pixels);
            }
        }
        let pullback = mean_pullback(pictures, d_pixels, share, video, grad);
        let details = [("mu".to_string(), value), ("log_sigma".to_string(), log_sigma)].into();
        Ok((Score::Value { value, details }, pullback))
    }

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        refuse_reserved(self.network.as_ref(), prompt, &[self.token])
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

roll_core::register! {
    Reward, "hpsv3", Hpsv3Config,
    "HPSv3: people's preference for pictures, as the mean over frames, by a Qwen2-VL",
    Hpsv3::open,
    plan: Hpsv3::needs,
}
