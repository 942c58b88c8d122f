//! The reward `judge`: questions about a video's frames, answered by a model behind an OpenAI-compatible API that takes
//! pictures (vLLM, SGLang, llama.cpp, hosted services).
//!
//! `client` sends requests, `answer` turns answers into scores, `cache` keeps these. Answers are found again by model,
//! question and pixels, so a run that is killed and resumed has the same scores, even if the service would answer
//! otherwise the second time.
//!
//! Safeguards: a request including its answer ends within `timeout`, at most 1 MiB of an answer is read, and redirects
//! are not followed, so pictures and token are sent to `url` only.

mod answer;
mod cache;
mod client;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_core::keys::check_ranges;
use roll_core::{
    BuildContext, Error, Fault, Grad, Measure, OnMissing, Pullback, Result, ResultExt, RewardScorer, Score, Target,
    Tensor, Video,
};
use roll_external::{Fingerprint, files};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

pub use answer::AnswerKind;
use cache::AnswerCache;
use client::Client;

use crate::picture::{Frames, check_common};

/// Greatest number of questions, which are all asked at the same time.
const MAX_QUESTIONS: usize = 64;
/// Longest file of questions in bytes.
const MAX_QUESTION_FILE: u64 = 1 << 20;
/// Longest answer in tokens.
const MAX_TOKENS: u32 = 16;
/// The number of log-probabilities that are requested: the most that services send by default.
const TOP_LOG_PROBABILITIES: u32 = 20;

/// Options of the reward `judge`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JudgeConfig {
    /// Base address of the service, such as `http://127.0.0.1:8000/v1`, or a list of addresses that serve the same
    /// model. Requests go to `/chat/completions` below it, to one address after the other; an address that is busy or
    /// fails is passed over.
    pub url: Texts,
    /// Name of the model, as the service knows it.
    pub model: String,
    /// Environment variable with the service's token, which is sent as `Authorization: Bearer`. Default: no token. The
    /// token itself is not part of the configuration, because runs store their configuration.
    pub token_env: Option<String>,
    /// The questions: a list, or a text file with one per line; at most 64. `{prompt}` is replaced by the prompt of the
    /// video. The score is the mean over the questions.
    pub questions: Texts,
    /// Number of frames that are shown, evenly spaced from the first to the last; with 1, the middle frame.
    #[schemars(range(min = 1, max = 64))]
    pub frames: usize,
    /// How an answer becomes a score in [0, 1].
    pub answer: AnswerKind,
    /// Time limit of a request in seconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Time limit in seconds for a service to start listening.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub start_timeout: f64,
    /// How often a question is asked again after a failed connection, a 5xx answer or an invalid answer.
    pub retries: u32,
    /// Time in seconds after which a question to busy addresses (429 or 503) fails.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub busy_timeout: f64,
    /// Directory in which scores of answers are kept, for this run and later ones; several runs and ranks may share it.
    /// `none` or `null`: every question is asked anew, also after a resume. `auto`: the directory in the environment
    /// variable `ROLL_CACHE` (or `none`), else `roll` in `XDG_CACHE_HOME` or `~/.cache`.
    pub cache_dir: Option<String>,
    /// Name of the measured quantity, for labels, file names and metrics.
    pub label: String,
    /// What happens with a video without frames, or with a question that has an invalid answer only.
    pub on_missing: OnMissing,
}

impl Default for JudgeConfig {
    fn default() -> Self {
        Self {
            url: Texts::One(String::new()),
            model: String::new(),
            token_env: None,
            questions: Texts::Several(Vec::new()),
            frames: 4,
            answer: AnswerKind::Yes,
            timeout: 60.0,
            start_timeout: 30.0,
            retries: 2,
            busy_timeout: 600.0,
            cache_dir: Some("auto".into()),
            label: Measure::SCORE.into(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// A text or a list of texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub enum Texts {
    /// A text.
    One(String),
    /// A list of texts.
    Several(Vec<String>),
}

impl Texts {
    fn all(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Several(texts) => texts,
        }
    }
}

/// The scorer.
pub struct Judge {
    config: JudgeConfig,
    questions: Vec<String>,
    client: Client,
    cache: Option<AnswerCache>,
    /// Until the service rejects a request for them.
    requests_log_probabilities: AtomicBool,
}

impl Judge {
    /// Reads the questions; sends nothing and writes nothing. Fails, and names the key, if a value is outside its range.
    pub fn new(config: JudgeConfig, context: &BuildContext) -> Result<Self> {
        check_ranges("reward", &config)?;
        check_common(1, config.on_missing)?;
        config.answer.check()?;
        if config.model.is_empty() {
            return Err(Error::config("reward.model", "missing: the name of the model, as the service knows it"));
        }
        let client = Client::new(&config)?;
        Ok(Self {
            questions: questions(&config.questions, context)?,
            cache: AnswerCache::open(config.cache_dir.as_deref(), context)?,
            client,
            config,
            requests_log_probabilities: AtomicBool::new(true),
        })
    }

    /// The text of a question about `frames` pictures.
    fn text(&self, question: &str, prompt: &str, frames: usize) -> String {
        let question = question.replace("{prompt}", prompt);
        let form = self.config.answer.form();
        match frames {
            1 => format!("{question} Answer with {form}."),
            n => format!("These are {n} frames of one video, in their order. {question} Answer with {form}."),
        }
    }

    /// The body of a request.
    fn request(&self, text: &str, pictures: &[Json], log_probabilities: bool) -> Vec<u8> {
        let content: Vec<Json> = pictures.iter().cloned().chain([json!({ "type": "text", "text": text })]).collect();
        let mut request = json!({
            "model": self.config.model,
            "messages": [{ "role": "user", "content": content }],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        });
        if log_probabilities {
            request["logprobs"] = true.into();
            request["top_logprobs"] = TOP_LOG_PROBABILITIES.into();
        }
        request.to_string().into_bytes()
    }

    /// The score of an answer, or the reason why the last one was invalid. Fails if the service does not answer.
    fn ask(&self, text: &str, pictures: &[Json]) -> Result<std::result::Result<f64, String>> {
        let mut invalid = 0;
        loop {
            let with = self.config.answer == AnswerKind::Yes && self.requests_log_probabilities.load(Ordering::Relaxed);
            let answer = match self.client.ask(&self.request(text, pictures, with)) {
                Ok(answer) => answer,
                Err(error) if with && error.rejected => {
                    if self.requests_log_probabilities.swap(false, Ordering::Relaxed) {
                        tracing::warn!("{error}; asking without log-probabilities from now on");
                    }
                    continue;
                }
                Err(error) => return Err(Error::component(Fault::Failure, error)),
            };
            match self.config.answer.score(&answer) {
                Err(problem) if invalid < self.config.retries => {
                    invalid += 1;
                    tracing::warn!("an invalid answer of the judge: {problem}; asking again");
                }
                outcome => return Ok(outcome),
            }
        }
    }
}

impl RewardScorer for Judge {
    fn name(&self) -> &str {
        "judge"
    }

    fn measures(&self) -> Measure {
        Measure::new(self.config.label.as_str())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn score(&mut self, video: &Video, prompt: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
        if video.frames().is_empty() {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        let pixels = pixels(video, self.config.frames)?;
        let key = Fingerprint::new("judge").text("model", &self.config.model).tensor("pixels", &pixels);
        let key = key.text("answer", self.config.answer.form());
        let asked = self.questions.iter().map(|question| self.text(question, prompt, pixels.shape()[0]));
        let asked: Vec<(String, String)> =
            asked.map(|text| (key.clone().text("question", &text).finish(), text)).collect();
        let cached = |(key, _): &(String, String)| self.cache.as_ref()?.get(key);
        let cached: Vec<Option<f64>> = asked.iter().map(cached).collect();
        let found = cached.iter().flatten().count();
        let pictures = if found < asked.len() { pictures(&pixels)? } else { Vec::new() };
        let ask = |(key, text): &(String, String)| {
            let outcome = self.ask(text, &pictures)?;
            if let (Ok(score), Some(cache)) = (&outcome, &self.cache) {
                cache.put(key, *score);
            }
            Ok(outcome)
        };
        let outcomes: Vec<Result<_>> = std::thread::scope(|threads| {
            let ask = &ask;
            let start = |(asked, cached): (_, &Option<f64>)| match *cached {
                Some(score) => threads.spawn(move || Ok(Ok(score))),
                None => threads.spawn(move || ask(asked)),
            };
            let asking: Vec<_> = asked.iter().zip(&cached).map(start).collect();
            asking.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
        });
        let (mut details, count) = (BTreeMap::new(), asked.len() as f64);
        for (i, outcome) in outcomes.into_iter().enumerate() {
            match outcome? {
                Ok(score) => drop(details.insert(format!("question_{}", i + 1), score)),
                Err(problem) => {
                    let reason = format!("an invalid answer to question {}: {problem}", i + 1);
                    return Ok((Score::Missing { reason }, None));
                }
            }
        }
        let value = details.values().sum::<f64>() / count;
        details.insert("answered_from_cache".into(), found as f64 / count);
        Ok((Score::Value { value, details }, None))
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

/// The questions of the option. Fails if a file cannot be read, and unless there are 1 to [`MAX_QUESTIONS`].
fn questions(option: &Texts, context: &BuildContext) -> Result<Vec<String>> {
    let questions = match option {
        Texts::Several(questions) => questions.clone(),
        Texts::One(file) if file.is_empty() => Vec::new(),
        Texts::One(file) => {
            let path = context.resolve(file);
            let text = files::read_text(&path, MAX_QUESTION_FILE).map_err(Error::file("read the questions in", &path));
            let text = text.while_doing(|| "reward.questions, the name of a file unless it is a list".into())?;
            text.lines().map(str::trim).filter(|line| !line.is_empty()).map(Into::into).collect()
        }
    };
    match questions.len() {
        1..=MAX_QUESTIONS if questions.iter().all(|question| !question.trim().is_empty()) => Ok(questions),
        found => {
            let problem = format!("expected 1 to {MAX_QUESTIONS} questions, each with a text; found {found}");
            Err(Error::config("reward.questions", problem))
        }
    }
}

/// At most `count` frames of the video in 8 bits, `[N, H, W, 3]`.
fn pixels(video: &Video, count: usize) -> Result<Tensor> {
    let [frames, height, width] = video.dims();
    let chosen = Frames::Uniform(count.min(frames)).of(frames);
    let plane = height * width;
    let mut bytes = Vec::with_capacity(chosen.len() * plane * 3);
    for frame in chosen.iter().map(|&t| video.frame(t)) {
        let pixel = |i: usize| [0, plane, 2 * plane].map(|channel| ((frame[channel + i] + 1.0) * 127.5).round() as u8);
        bytes.extend((0..plane).flat_map(pixel));
    }
    Tensor::new(bytes, [chosen.len(), height, width, 3])
}

/// The frames `[N, H, W, 3]` as parts of a message, each a PNG in a data URL.
fn pictures(pixels: &Tensor) -> Result<Vec<Json>> {
    let [height, width] = [pixels.shape()[1], pixels.shape()[2]];
    let part = |rgb: &[u8]| {
        let mut png = Vec::new();
        let mut encoder = png::Encoder::new(&mut png, width as u32, height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let written = encoder.write_header().and_then(|mut writer| {
            writer.write_image_data(rgb)?;
            writer.finish()
        });
        written.map_err(Error::failed("a frame cannot be encoded as PNG"))?;
        let url = format!("data:image/png;base64,{}", STANDARD.encode(&png));
        Ok(json!({ "type": "image_url", "image_url": { "url": url } }))
    };
    pixels.as_bytes().chunks_exact(height * width * 3).map(part).collect()
}

roll_core::register! {
    Reward, "judge", JudgeConfig,
    "Answers of a model that sees pictures to questions about the video, over an OpenAI-compatible API",
    |config, context| Judge::new(config, context),
}
