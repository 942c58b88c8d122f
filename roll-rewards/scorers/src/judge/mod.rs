//! The reward `judge`: questions about a video's frames, answered by a model behind an OpenAI-compatible API that takes
//! pictures (vLLM, SGLang, llama.cpp, hosted services).
//!
//! `client` sends requests, `answer` turns answers into scores, and `caption` turns them into prompts. Scores and
//! prompts are cached on disk under a hash of the request, which has model, question and pictures. So a run that is
//! killed and resumed has the same scores, even if the service would answer otherwise the second time. With the option
//! `local`, a network in this process answers instead (`local.rs`).
//!
//! Safeguards: a request including its answer ends within `timeout`, at most 1 MiB of an answer is read, and redirects
//! are not followed, so pictures and token are sent to `url` only.

#[cfg(test)]
mod agreement;
mod answer;
mod answering;
mod caption;
mod client;
mod local;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_backends::cache_directory;
use roll_core::keys::check_ranges;
use roll_core::{
    BuildContext, Columns, Component, Error, Fault, Grad, Measure, OnMissing, Pullback, Result, ResultExt,
    RewardScorer, Score, Target, Video, threads,
};
use roll_external::{Fingerprint, files};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

pub use answer::AnswerKind;
pub use caption::CAPTION_QUESTION;
use client::Client;
pub use local::LocalJudge;

use crate::picture::{Frames, check_on_missing};

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
    /// Left out with `local`. Base address of the service, such as `http://127.0.0.1:8000/v1`, or a list of addresses that serve the same
    /// model. Requests go to `/chat/completions` below the address. With several addresses they take turns, and an
    /// address that is busy or fails is passed over.
    #[schemars(extend("x-required" = true))]
    pub url: Texts,
    /// Name of the model, as the service knows it; left out with `local`.
    #[schemars(extend("x-required" = true))]
    pub model: String,
    /// A vision-language network in this process that answers instead of a service, with a gradient:
    /// `{name: qwen_vl, model_path: DIRECTORY}`. Only for questions with yes or no.
    pub local: Option<Component>,
    /// With `local`: the score of a question. `probability` is the score of a service.
    pub score: AnswerScore,
    /// With `local`: frames with more pixels are reduced.
    #[schemars(range(min = 1))]
    pub max_pixels: usize,
    /// Environment variable with the service's token, which is sent as `Authorization: Bearer`. If absent, no token is
    /// sent. The token itself is not part of the configuration, because runs store their configuration.
    pub token_env: Option<String>,
    /// The questions: a list, or the name of a text file with one question per line; at most 64. `{prompt}` is replaced
    /// by the prompt of the video, `{NAME}` by the column NAME of the video's row in the metadata. The score is the
    /// mean over the questions.
    #[schemars(extend("x-required" = true))]
    pub questions: Texts,
    /// Number of frames that are shown, evenly spaced from the first to the last; with 1, the middle frame.
    #[schemars(range(min = 1, max = 64))]
    pub frames: usize,
    /// How an answer becomes a score in [0, 1]: `yes` or `{number: [lowest, highest]}`.
    pub answer: AnswerKind,
    /// Time limit of a request in seconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Time limit in seconds for a service to start listening.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub start_timeout: f64,
    /// How often a question is asked again after a failed connection, a 5xx answer or an invalid answer.
    pub retries: u32,
    /// Time in seconds after which a question fails if all addresses stay busy (429 or 503).
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub busy_timeout: f64,
    /// Directory in which scores of answers are cached for this run and later ones. Several runs and ranks may share
    /// it. `none` or `null`: every question is asked anew, also after a resume. `auto`: the directory in the
    /// environment variable `ROLL_CACHE` (or `none`); without the variable, `roll` in `XDG_CACHE_HOME` or `~/.cache`.
    pub cache_dir: Option<String>,
    /// Name of the measured quantity, for labels, file names and metrics.
    pub label: String,
    /// What happens with a video that has no frames, or one of whose questions got only invalid answers.
    pub on_missing: OnMissing,
}

impl Default for JudgeConfig {
    fn default() -> Self {
        Self {
            url: Texts::One(String::new()),
            model: String::new(),
            local: None,
            score: AnswerScore::Probability,
            max_pixels: 512 * 28 * 28,
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

/// How the logits of an answer become the score of a question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnswerScore {
    /// P(yes) / (P(yes) + P(no)).
    #[default]
    Probability,
    /// The logarithm of that probability, whose gradient does not vanish while the answer is no.
    LogProbability,
}

impl JudgeConfig {
    /// Fails, and names the key, if a value is outside its range.
    fn check(&self) -> Result<()> {
        check_ranges("reward", self)?;
        check_on_missing(self.on_missing)?;
        self.answer.check()
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
    /// The text or texts as a list.
    fn all(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Several(texts) => texts,
        }
    }
}

/// The reward `judge`. [`Judge::caption`] describes videos instead of scoring them.
pub struct Judge {
    config: JudgeConfig,
    questions: Vec<String>,
    client: Client,
    /// Directory of cached answers.
    cache: Option<PathBuf>,
    /// Whether the service returns log-probabilities. True until it rejects a request for them.
    service_has_log_probabilities: AtomicBool,
    /// Number of tokens of all requests and answers so far.
    tokens: AtomicU64,
}

/// The value of an answer, or the reason why the answer is invalid.
type Answered<T> = std::result::Result<T, String>;

impl Judge {
    /// Reads the questions; sends and writes nothing. Fails, and names the key, if a value is outside its range.
    pub fn new(config: JudgeConfig, context: &BuildContext) -> Result<Self> {
        config.check()?;
        let default = JudgeConfig::default();
        if config.score != default.score || config.max_pixels != default.max_pixels {
            let problem = "missing: a network in this process, without which `score` and `max_pixels` have no effect";
            return Err(Error::config("reward.local", problem));
        }
        if config.model.is_empty() {
            return Err(Error::config("reward.model", "missing: the name of the model, as the service knows it"));
        }
        Ok(Self {
            questions: read_questions(&config.questions, context)?,
            client: Client::new(&config)?,
            cache: answers_directory(config.cache_dir.as_deref(), context)?,
            config,
            service_has_log_probabilities: AtomicBool::new(true),
            tokens: AtomicU64::new(0),
        })
    }

    /// The frames that the model sees, as parts of a message.
    fn pictures(&self, video: &Video) -> Result<Vec<Json>> {
        let frames = video.dims()[0];
        Frames::Uniform(self.config.frames.min(frames)).of(frames).into_iter().map(|t| message_part(video, t)).collect()
    }

    /// The request for a question about pictures, without log-probabilities.
    fn request(&self, question: String, pictures: &[Json], max_tokens: u32) -> Json {
        let text = json!({ "type": "text", "text": introduction(pictures.len()) + &question });
        let content: Vec<Json> = pictures.iter().cloned().chain([text]).collect();
        json!({
            "model": self.config.model,
            "messages": [{ "role": "user", "content": content }],
            "temperature": 0,
            "max_tokens": max_tokens,
        })
    }

    /// The score of a question, and whether it was cached. Fails if the service does not answer.
    fn judge(&self, request: &Json) -> Result<(Answered<f64>, bool)> {
        let is_valid = |score: &f64| (0.0..=1.0).contains(score);
        self.cached_or("judge", request, is_valid, || self.until_valid(|| self.ask(request)))
    }

    /// The value of a request's answer, and whether it was cached. Calls `ask` if no valid value is cached, and adds a
    /// valid value to the cache. `kind` separates values of different types.
    fn cached_or<T: FromStr + ToString>(
        &self,
        kind: &str,
        request: &Json,
        is_valid: impl Fn(&T) -> bool,
        ask: impl FnOnce() -> Result<Answered<T>>,
    ) -> Result<(Answered<T>, bool)> {
        let Some(cache) = &self.cache else { return Ok((ask()?, false)) };
        let key = Fingerprint::new(kind).text("request", request).finish();
        // Folders by the first two digits of the key, because a folder with very many files is slow.
        let folder = cache.join(&key[..2]);
        let path = folder.join(&key);
        let cached = files::read_text(&path, caption::MAX_CAPTION as u64).ok().and_then(|text| text.parse().ok());
        if let Some(value) = cached.filter(is_valid) {
            return Ok((Ok(value), true));
        }
        let answered = ask()?;
        if let Ok(value) = &answered {
            let created = std::fs::create_dir_all(&folder).map_err(Error::file("create the directory", folder));
            if let Err(error) = created.and_then(|()| files::write_atomically(&path, value.to_string().as_bytes())) {
                tracing::warn!("an answer is not kept (`reward.cache_dir`): {}", error.chain());
            }
        }
        Ok((answered, false))
    }

    /// Calls `ask` until an answer is valid, at most `retries` + 1 times.
    fn until_valid<T>(&self, ask: impl Fn() -> Result<Answered<T>>) -> Result<Answered<T>> {
        for _ in 0..self.config.retries {
            match ask()? {
                Err(problem) => tracing::warn!("an invalid answer of the service: {problem}; asking again"),
                valid => return Ok(valid),
            }
        }
        ask()
    }

    /// Asks the service for a score, and once more without log-probabilities if the service rejects them.
    fn ask(&self, request: &Json) -> Result<Answered<f64>> {
        loop {
            let has_log_probabilities = self.service_has_log_probabilities.load(Ordering::Relaxed);
            let with_log_probabilities = self.config.answer == AnswerKind::Yes && has_log_probabilities;
            let mut request = request.clone();
            if with_log_probabilities {
                request["logprobs"] = true.into();
                request["top_logprobs"] = TOP_LOG_PROBABILITIES.into();
            }
            match self.client.ask(request.to_string().as_bytes()) {
                Ok(answer) => {
                    self.tokens.fetch_add(answer::token_count(&answer), Ordering::Relaxed);
                    return Ok(self.config.answer.score(&answer));
                }
                // The next turn asks without log-probabilities.
                Err(error) if with_log_probabilities && error.was_rejected => {
                    let was_first_rejection = self.service_has_log_probabilities.swap(false, Ordering::Relaxed);
                    if was_first_rejection {
                        tracing::warn!("{error}; asking without log-probabilities from now on");
                    }
                }
                Err(error) => return Err(Error::component(Fault::Failure, error)),
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

    fn reads_reference(&self) -> bool {
        false
    }

    fn computes_on_device(&self) -> bool {
        false
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
        if video.frames().is_empty() {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        // A shared reference for the threads that ask the questions.
        let (this, pictures) = (&*self, self.pictures(video)?);
        let filled_in = self.questions.iter().map(|question| fill_in(question, prompt, &target.columns));
        let questions = filled_in.collect::<Result<Vec<String>>>()?;
        let (sent_before, tokens_before) = (this.client.sent_count(), this.tokens.load(Ordering::Relaxed));
        let mut asked: Vec<(&String, Option<Result<_>>)> = questions.iter().map(|question| (question, None)).collect();
        threads::in_parallel(&mut asked, questions.len(), |(question, outcome)| {
            let question = format!("{question} Answer with {}.", this.config.answer.form());
            *outcome = Some(this.judge(&this.request(question, &pictures, MAX_TOKENS)));
        });
        let (mut sum, mut cached_count, mut details) = (0.0, 0.0, BTreeMap::new());
        for (i, outcome) in (1..).zip(asked.into_iter().filter_map(|(_, outcome)| outcome)) {
            let (answered, was_cached) = outcome?;
            match answered {
                Ok(score) => {
                    sum += score;
                    cached_count += f64::from(u8::from(was_cached));
                    details.insert(format!("question_{i}"), score);
                }
                Err(problem) => {
                    let reason = format!("an invalid answer to question {i}: {problem}");
                    return Ok((Score::Missing { reason }, None));
                }
            }
        }
        let count = self.questions.len() as f64;
        details.insert("answered_from_cache".into(), cached_count / count);
        details.insert("requests".into(), (this.client.sent_count() - sent_before) as f64);
        let tokens = (this.tokens.load(Ordering::Relaxed) - tokens_before) as f64;
        if tokens > 0.0 {
            details.insert("tokens".into(), tokens);
        }
        Ok((Score::Value { value: sum / count, details }, None))
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

/// The beginning of a question about `frames` pictures.
fn introduction(frames: usize) -> String {
    match frames {
        1 => String::new(),
        n => format!("These are {n} frames of one video, in their order. "),
    }
}

/// The questions of the option `reward.questions`. Fails if the file cannot be read, and unless there are 1 to
/// [`MAX_QUESTIONS`] questions with a text.
fn read_questions(option: &Texts, context: &BuildContext) -> Result<Vec<String>> {
    let questions: Vec<String> = match option {
        Texts::One(file) if !file.is_empty() => {
            let path = context.resolve(file);
            let text = files::read_text(&path, MAX_QUESTION_FILE).map_err(Error::file("read the questions in", path));
            let text = text.while_doing(|| "reward.questions, the name of a file unless it is a list".into())?;
            text.lines().map(str::trim).filter(|line| !line.is_empty()).map(Into::into).collect()
        }
        listed => listed.all().to_vec(),
    };
    match questions.len() {
        1..=MAX_QUESTIONS if questions.iter().all(|question| !question.trim().is_empty()) => Ok(questions),
        found => {
            let problem = format!("expected 1 to {MAX_QUESTIONS} questions, each with a text; found {found}");
            Err(Error::config("reward.questions", problem))
        }
    }
}

/// Fills in a question about a video: `{prompt}` is replaced by the video's prompt, and other names in braces by
/// columns of the video's row. Fails on a name that is no column. A brace without a name stays as it is.
fn fill_in(question: &str, prompt: &str, columns: &Columns) -> Result<String> {
    let (mut filled, mut rest) = (String::new(), question);
    while let Some((before, after)) = rest.split_once('{') {
        let (name, end) = after.split_once('}').unwrap_or_default();
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
        filled += before;
        rest = if is_name { end } else { after };
        filled += &match (is_name, name, columns.get(name)) {
            // A brace that encloses no name.
            (false, ..) => "{".into(),
            (true, "prompt", _) => prompt.into(),
            // A column: a text without quotes, other values as JSON.
            (true, _, Some(Json::String(text))) => text.clone(),
            (true, _, Some(value)) => value.to_string(),
            (true, _, None) => {
                let found: Vec<_> = columns.keys().map(|name| format!("`{name}`")).collect();
                let found = if found.is_empty() { "none".into() } else { found.join(", ") };
                let problem = format!("`{{{name}}}` names no column of the video's row, which has {found}: {question}");
                return Err(Error::config("reward.questions", problem));
            }
        };
    }
    Ok(filled + rest)
}

/// The directory of cached answers. Fails if a file takes the place of the directory or of a parent.
fn answers_directory(option: Option<&str>, context: &BuildContext) -> Result<Option<PathBuf>> {
    let parent = match option {
        None | Some("none" | "") => None,
        Some("auto") => cache_directory::of(|name| std::env::var_os(name)),
        Some(path) => Some(context.resolve(path)),
    };
    let directory = parent.map(|parent| parent.join("judge"));
    match directory.iter().flat_map(|path| path.ancestors()).find(|path| path.is_file()) {
        Some(file) => {
            let problem = format!("expected a directory, found the file {}", file.display());
            Err(Error::config("reward.cache_dir", problem))
        }
        None => Ok(directory),
    }
}

/// Frame `t` as a part of a message: a PNG in a data URL.
fn message_part(video: &Video, t: usize) -> Result<Json> {
    let ([_, height, width], frame) = (video.dims(), video.frame(t));
    let plane = height * width;
    // From planes in [-1, 1] to interleaved bytes.
    let byte = |i: usize| ((frame[i % 3 * plane + i / 3] + 1.0) * 127.5).round() as u8;
    let rgb: Vec<u8> = (0..3 * plane).map(byte).collect();
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&rgb));
    written.map_err(Error::failed("a frame cannot be encoded as PNG"))?;
    let url = format!("data:image/png;base64,{}", STANDARD.encode(&png));
    Ok(json!({ "type": "image_url", "image_url": { "url": url } }))
}
