//! The judge inside: a vision-language network in this process answers the questions, with a gradient to the frames.
//!
//! The score of a question follows from the network's logits at the first token of the answer. With
//! gap = logsumexp(logits of yes) - logsumexp(logits of no), over the spellings of each word that are one token, the
//! probability of yes among the two is sigmoid(gap). That is the score of a service with log-probabilities, without
//! its limit to the twenty most likely tokens. Diffusion-DRF back-propagates the logarithm.

use std::collections::BTreeMap;

use roll_core::plan::{Needs, PlanInput};
use roll_core::{
    BuildContext, Component, Error, Grad, Kind, Measure, OnMissing, Options, PlannedReads, Positions, Pullback, Result,
    RewardScorer, Score, Target, Tensor, Video, VisionLanguageModel, open_vision_language, parse_options,
};

use super::{AnswerKind, AnswerScore, JudgeConfig, fill_in, introduction, read_questions};
use crate::picture::Frames;
use crate::vision_language::{
    DEFAULT_SYSTEM, Opened, PixelLimits, Pixels, Placeholder, chat_tokens, mean_pullback, network_needs,
    planned_medium, planned_prompt, refuse_reserved,
};

/// Key of the network.
const KEY: &str = "reward.local";

/// The rows of the output layer for the spellings of a word, f32 `[spellings, width]`.
struct Word(Tensor);

impl Word {
    /// Returns the ids of the spellings of `word` that are one token. Fails if no spelling is one token.
    fn find(network: &dyn VisionLanguageModel, word: &str) -> Result<Vec<u32>> {
        let mut capitalised = word.to_string();
        capitalised[..1].make_ascii_uppercase();
        let mut ids = Vec::new();
        for spelling in [word.to_string(), capitalised, word.to_ascii_uppercase()] {
            // The answer begins without a space; a service counts spellings with one too.
            for spelling in [format!(" {spelling}"), spelling] {
                match network.tokenize(&spelling)?[..] {
                    [id] if !ids.contains(&id) => ids.push(id),
                    _ => (),
                }
            }
        }
        if ids.is_empty() {
            let problem = format!("expected a tokenizer in which a spelling of `{word}` is one token, found none");
            return Err(Error::config(KEY, problem));
        }
        Ok(ids)
    }

    /// The logarithm of the sum of the exponentials of the logits for `state`, and its gradient.
    fn log_sum_exp(&self, state: &[f32]) -> Result<(f64, Vec<f64>)> {
        let rows = self.0.f32s()?;
        let dot = |row: &[f32]| row.iter().zip(state).map(|(w, s)| f64::from(*w) * f64::from(*s)).sum::<f64>();
        let logits: Vec<f64> = rows.chunks_exact(state.len()).map(dot).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        let mut gradient = vec![0.0; state.len()];
        for (row, logit) in rows.chunks_exact(state.len()).zip(&logits) {
            let share = (logit - largest).exp() / total;
            gradient.iter_mut().zip(row).for_each(|(g, w)| *g += share * f64::from(*w));
        }
        Ok((largest + total.ln(), gradient))
    }
}

/// The two words of an answer.
struct Words {
    yes: Word,
    no: Word,
}

impl Words {
    /// The score of an answer that begins at `state`, and the gradient of the score.
    fn score(&self, state: &[f32], score: AnswerScore) -> Result<(f64, Vec<f32>)> {
        let (yes, d_yes) = self.yes.log_sum_exp(state)?;
        let (no, d_no) = self.no.log_sum_exp(state)?;
        let gap = yes - no;
        let (probability, complement) = (sigmoid(gap), sigmoid(-gap));
        let (value, slope) = match score {
            AnswerScore::Probability => (probability, probability * complement),
            AnswerScore::LogProbability => (log_sigmoid(gap), complement),
        };
        Ok((value, d_yes.iter().zip(&d_no).map(|(yes, no)| (slope * (yes - no)) as f32).collect()))
    }
}

/// 1 / (1 + exp(-x)).
fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}

/// The logarithm of the sigmoid, without overflow.
fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// The reward `judge` with a network in this process.
pub struct LocalJudge {
    network: Box<dyn VisionLanguageModel>,
    words: Words,
    questions: Vec<String>,
    config: JudgeConfig,
}

impl LocalJudge {
    /// Opens the network that `reward.local` names. Fails, and names the key, on options of a service and on answers
    /// other than yes or no.
    pub fn load(config: JudgeConfig, context: &BuildContext) -> Result<Self> {
        let component = Self::checked(&config, context)?;
        let network = open_vision_language(KEY, &component, context)?;
        Self::new(config, network, context)
    }

    /// Opens the reward; see [`Opened::with_network`].
    pub(super) fn open(config: JudgeConfig, context: &BuildContext) -> Result<Opened> {
        let component = Self::checked(&config, context)?;
        let about = (config.label.as_str(), config.on_missing);
        Opened::with_network("judge", &component, about, context, || Ok(()), || Self::load(config.clone(), context))
    }

    /// Memory and time of the network, for a plan. A judge behind a service needs nothing here.
    pub(super) fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
        let config: JudgeConfig = parse_options(Kind::Reward.section(), options)?;
        let Some(component) = config.local.clone() else { return Ok(Needs::default()) };
        let reward = Self::load(config, context)?;
        let facts = reward.network.facts();
        let frames = Frames::Uniform(reward.config.frames.min(input.frames)).of(input.frames);
        let medium = planned_medium(input, 1, PixelLimits::of_processor(reward.config.max_pixels), facts)?;
        let counts = vec![facts.tokens_of(&medium)?; frames.len()];
        let longest = reward.questions.iter().map(String::as_str).max_by_key(|question| question.len());
        let question = longest.unwrap_or_default().to_string() + &planned_prompt();
        let tokens = reward.text(&counts, &question)?.len();
        let count = input.scored().map(|videos| videos * reward.questions.len());
        let reads = PlannedReads { tokens, media: vec![medium; frames.len()], count };
        network_needs(KEY, &component, &reads, input, context)
    }

    /// The chat with a question about pictures of `counts` tokens each.
    fn text(&self, counts: &[usize], question: &str) -> Result<Vec<u32>> {
        let question = format!("{}{question} Answer with {}.", introduction(counts.len()), self.config.answer.form());
        chat_tokens(self.network.as_ref(), DEFAULT_SYSTEM, Placeholder::Image, counts, &question)
    }

    /// Checks all options and the questions, and returns the network's component.
    fn checked(config: &JudgeConfig, context: &BuildContext) -> Result<Component> {
        let Some(component) = &config.local else { return Err(Error::config(KEY, "missing: the network")) };
        let unused = JudgeConfig {
            local: config.local.clone(),
            score: config.score,
            max_pixels: config.max_pixels,
            questions: config.questions.clone(),
            frames: config.frames,
            answer: config.answer,
            label: config.label.clone(),
            on_missing: config.on_missing,
            ..JudgeConfig::default()
        };
        if *config != unused {
            let problem = "a network in this process: leave out the options of a service, `url`, `model`, `token_env`, \
                           `timeout`, `start_timeout`, `retries`, `busy_timeout` and `cache_dir`";
            return Err(Error::config(KEY, problem));
        }
        Self::check(config)?;
        read_questions(&config.questions, context)?;
        Ok(component.clone())
    }

    /// Fails on a value outside its range, and on answers other than yes or no.
    fn check(config: &JudgeConfig) -> Result<()> {
        config.check()?;
        match config.answer {
            AnswerKind::Yes => Ok(()),
            _ => Err(Error::config("reward.answer", "expected `yes` with `reward.local`, found `number`")),
        }
    }

    /// As [`LocalJudge::load`], with a network that is open already.
    pub(super) fn new(
        config: JudgeConfig,
        network: Box<dyn VisionLanguageModel>,
        context: &BuildContext,
    ) -> Result<Self> {
        Self::check(&config)?;
        let (yes, no) = (Word::find(network.as_ref(), "yes")?, Word::find(network.as_ref(), "no")?);
        let width = network.facts().width;
        let rows = |ids: &[u32]| match context.headers_only {
            true => Ok(Tensor::zeros([ids.len(), width])),
            false => network.head_rows(ids),
        };
        let words = Words { yes: Word(rows(&yes)?), no: Word(rows(&no)?) };
        Ok(Self { network, words, questions: read_questions(&config.questions, context)?, config })
    }
}

impl RewardScorer for LocalJudge {
    fn name(&self) -> &str {
        "judge"
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

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let total = video.dims()[0];
        if video.frames().is_empty() {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        let words = &self.words;
        let facts = self.network.facts().clone();
        let limits = PixelLimits::of_processor(self.config.max_pixels);
        let frames = Frames::Uniform(self.config.frames.min(total)).of(total);
        let pictures = frames.into_iter().map(|frame| Pixels::new(video, vec![frame], limits, &facts));
        let pictures = pictures.collect::<Result<Vec<Pixels>>>()?;
        let media = pictures.iter().map(|picture| picture.medium(1.0)).collect::<Result<Vec<_>>>()?;
        let counts = media.iter().map(|medium| facts.tokens_of(medium.pixels.shape()));
        let counts = counts.collect::<Result<Vec<usize>>>()?;

        let share = 1.0 / self.questions.len() as f64;
        let (mut value, mut details) = (0.0, BTreeMap::new());
        let mut d_pixels = vec![0.0; media.iter().map(|medium| medium.pixels.len()).sum()];
        for (i, question) in (1..).zip(&self.questions) {
            let question = fill_in(question, prompt, &target.columns)?;
            refuse_reserved(self.network.as_ref(), &question, &[])?;
            let tokens = self.text(&counts, &question)?;
            let answer = tokens.len() - 1;
            let (state, pull) = self.network.read(&tokens, &media, Positions::Multimodal, &[answer], grad)?;
            let (score, d_state) = words.score(state.f32s()?, self.config.score)?;
            value += share * score;
            details.insert(format!("question_{i}"), score);
            // Pulled back at once, so that the pass of one question is recorded at a time.
            if let Some(pull) = pull {
                let d = pull.pull(&Tensor::new(d_state, state.shape())?)?;
                d_pixels.iter_mut().zip(d.f32s()?).for_each(|(sum, d)| *sum += d);
            }
        }
        let pullback = mean_pullback(pictures, d_pixels, share, video, grad);
        Ok((Score::Value { value, details }, pullback))
    }

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        refuse_reserved(self.network.as_ref(), prompt, &[])
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Texts;
    use crate::vision_language::mock::Mock;

    fn judge(score: AnswerScore) -> LocalJudge {
        let questions = Texts::Several(vec!["Is it {prompt}?".into(), "Is it sharp?".into()]);
        let config = JudgeConfig { questions, score, frames: 2, max_pixels: 128, ..Default::default() };
        LocalJudge::new(config, Box::new(Mock::new(BTreeMap::new())), &BuildContext::new("flex")).unwrap()
    }

    #[test]
    fn the_score_is_the_probability_of_yes_or_its_logarithm() {
        let words = Words {
            yes: Word(Tensor::new(vec![1.0f32, 0.0, 2.0, 0.0], [2, 2]).unwrap()),
            no: Word(Tensor::new(vec![0.0f32, 1.0], [1, 2]).unwrap()),
        };
        let state = [0.3f32, -0.2];
        let gap = ((0.3f64).exp() + (0.6f64).exp()).ln() + 0.2;
        let (probability, _) = words.score(&state, AnswerScore::Probability).unwrap();
        let (logarithm, slope) = words.score(&state, AnswerScore::LogProbability).unwrap();
        assert!((probability - 1.0 / (1.0 + (-gap).exp())).abs() < 1e-6, "{probability}");
        assert!((logarithm - probability.ln()).abs() < 1e-9);
        // The derivative with respect to the second coordinate is -(1 - sigmoid(gap)).
        assert!((f64::from(slope[1]) + 1.0 - probability).abs() < 1e-6, "{slope:?}");
        // A gap of a thousand neither overflows nor becomes NaN.
        assert_eq!(log_sigmoid(-1000.0), -1000.0);
        assert_eq!((log_sigmoid(1000.0), sigmoid(-1000.0)), (0.0, 0.0));
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        for score in [AnswerScore::Probability, AnswerScore::LogProbability] {
            let mut judge = judge(score);
            crate::vision_language::mock::check_gradient(&mut judge, 5);
        }
    }

    #[test]
    fn options_of_a_service_and_questions_with_tokens_of_the_chat_are_refused() {
        let local = Some(roll_core::Component::named("qwen_vl"));
        let service = JudgeConfig { local, model: "m".into(), ..Default::default() };
        let patient = JudgeConfig { retries: 9, model: String::new(), ..service.clone() };
        for config in [service, patient] {
            let message = LocalJudge::load(config, &BuildContext::new("flex")).err().unwrap().to_string();
            assert!(message.contains("reward.local") && message.contains("`url`"), "{message}");
        }
        let video = crate::vision_language::mock::clip(2, 3, 20, 20);
        let score = judge(AnswerScore::Probability).score(&video, "<|im_end|>", &Target::default(), Grad::Skip);
        assert!(score.err().unwrap().to_string().contains("`<|im_end|>`"));
    }
}
