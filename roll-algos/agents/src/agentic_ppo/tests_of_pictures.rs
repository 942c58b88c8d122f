//! Agents that see: a model that reads pictures by a table, as large models do, and worlds that show some.

#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::{
    Adapter, Algorithm, Environment, Error, FIRST_PICTURE_ID, Generation, Grad, LanguageModel, Message, Model, Noise,
    Observation, OptimizerConfig, OwnDataAlgorithm, PICTURE_MARK, ParameterSpec, Picture, Pullback, Result, Sampling,
    Silent, StateDict, StepContext, StepReport, Strategy, Tensor, ThreadRanks, TokenStats, Transition,
};
use roll_testing::Bigram;

use super::config::Estimator;
use super::episode::Episode;
use super::rollout::{EpisodePlan, Writer, play};
use super::test_support::{short_config, step};
use super::{AgenticPpo, AgenticPpoConfig};

/// The bigram model with eyes. A picture is two tokens, and the first letter of an answer follows the letter of the
/// latest picture instead of the colon of the chat template.
struct Seeing {
    letters: Bigram,
    table: Arc<Mutex<Table>>,
}

/// Known pictures.
#[derive(Default)]
struct Table {
    /// The letter of each picture, and whether it was shown since the latest call of `forget_pictures`.
    known: BTreeMap<u32, (u32, bool)>,
    /// Most pictures that were known at the same time.
    most: usize,
}

impl Seeing {
    fn new() -> Self {
        Self { letters: Bigram::of("xyz"), table: Arc::default() }
    }

    /// The tokens that the bigram model reads. Fails for a picture that was forgotten or never shown.
    fn read(&self, tokens: &[u32]) -> Result<Vec<u32>> {
        let table = self.table.lock().unwrap();
        let mut latest = None;
        let read = tokens.iter().map(|token| -> Result<u32> {
            match (*token, latest) {
                (FIRST_PICTURE_ID.., _) => {
                    let (letter, _) = table
                        .known
                        .get(&(token & !1))
                        .ok_or_else(|| Error::Misuse("tokens of a picture that the model does not know".into()))?;
                    latest = Some(*letter);
                    Ok(*letter)
                }
                (token, Some(letter)) if token == ':' as u32 => Ok(letter),
                (token, _) => Ok(token),
            }
        });
        read.collect()
    }
}

impl LanguageModel for Seeing {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.letters.tokenize(text)
    }

    fn tokenize_with_pictures(&self, text: &str, pictures: &[Picture]) -> Result<Vec<u32>> {
        let mut pieces = text.split(PICTURE_MARK);
        let mut tokens = self.letters.tokenize(pieces.next().unwrap_or_default())?;
        assert_eq!(pieces.clone().count(), pictures.len(), "{text}");
        let mut table = self.table.lock().unwrap();
        for (picture, piece) in pictures.iter().zip(pieces) {
            let bytes = picture.pixels().as_bytes();
            let hash = bytes.iter().fold(17u32, |hash, byte| hash.wrapping_mul(257).wrapping_add(u32::from(*byte)));
            let id = FIRST_PICTURE_ID | (hash << 1);
            table.known.insert(id, ('A' as u32 + u32::from(bytes[0]), true));
            tokens.extend([id, id | 1]);
            tokens.extend(self.letters.tokenize(piece)?);
        }
        table.most = table.most.max(table.known.len());
        Ok(tokens)
    }

    fn forget_pictures(&self) {
        let known = &mut self.table.lock().unwrap().known;
        known.retain(|_, (_, is_new)| std::mem::take(is_new));
    }

    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        let text = |token: &u32| match *token {
            FIRST_PICTURE_ID.. if token & 1 == 1 => Ok(String::new()),
            FIRST_PICTURE_ID.. => Ok(PICTURE_MARK.into()),
            token => self.letters.detokenize(&[token]),
        };
        tokens.iter().map(text).collect()
    }

    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        self.letters.render_chat(messages, continue_as_assistant)
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.letters.end_tokens()
    }

    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>> {
        let prompts = prompts.iter().map(|prompt| self.read(prompt)).collect::<Result<Vec<_>>>()?;
        self.letters.generate(&prompts, sampling)
    }

    fn snapshot(&self) -> Result<Box<dyn LanguageModel + Send>> {
        let mut letters = Bigram::new();
        letters.logits.clone_from(&self.letters.logits);
        Ok(Box::new(Self { letters, table: self.table.clone() }))
    }

    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        wanted: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        let columns = tokens.shape()[1];
        let ids: Vec<u32> = tokens.as_slice::<i64>()?.iter().map(|id| *id as u32).collect();
        let rows = ids.chunks(columns).map(|row| self.read(row)).collect::<Result<Vec<_>>>()?.concat();
        let read = Tensor::new(rows.into_iter().map(i64::from).collect::<Vec<_>>(), tokens.shape().to_vec())?;
        self.letters.evaluate(&read, mask, wanted, adapter, grad)
    }
}

impl Model for Seeing {
    fn parameters(&self) -> &[ParameterSpec] {
        self.letters.parameters()
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.letters.read_parameters(out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.letters.write_parameters(values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.letters.take_gradients(add_into)
    }
    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        Some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.letters.export_adapter()
    }
    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.letters.import_adapter(files)
    }
}

/// A picture of the `shade`, and of a `number` that tells it apart.
fn picture(shade: u8, number: u8) -> Picture {
    Picture::new(Tensor::new(vec![shade, number, 0], [1, 1, 3]).unwrap()).unwrap()
}

/// Shows two pictures of three shades, one after another, and rewards the letter of a shade.
#[derive(Default)]
struct Shades {
    seed: u64,
    turn: u64,
    is_black: bool,
}

impl Shades {
    fn shade(&self) -> u8 {
        ((self.seed >> 8).wrapping_add(self.turn * 2) % 3) as u8
    }

    fn observation(&self) -> Observation {
        let shown = if self.is_black { picture(7, 0) } else { picture(self.shade(), (self.seed % 251) as u8) };
        Observation::with_pictures(format!("look {PICTURE_MARK}."), vec![shown])
    }
}

impl Environment for Shades {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        (self.seed, self.turn) = (seed, 0);
        Ok(self.observation())
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let is_right = action.starts_with(['x', 'y', 'z'][usize::from(self.shade())]);
        self.turn += 1;
        let reward = f64::from(u8::from(is_right));
        let observation = self.observation();
        Ok(Transition { observation, reward, terminated: self.turn == 2, truncated: false, valid: true })
    }

    fn instructions(&self) -> String {
        format!("No picture: {PICTURE_MARK}")
    }
}

fn config() -> AgenticPpoConfig {
    AgenticPpoConfig { max_actions_per_traj: 2, ..short_config() }
}

fn ahead() -> AgenticPpoConfig {
    AgenticPpoConfig { async_generation_ratio: 1, ..config() }
}

fn algorithm(config: AgenticPpoConfig) -> AgenticPpo {
    algorithm_of(config, false)
}

fn algorithm_of(config: AgenticPpoConfig, is_black: bool) -> AgenticPpo {
    let mut algorithm = AgenticPpo::new(config).unwrap();
    algorithm.open_environments(&mut || Ok(Box::new(Shades { is_black, ..Shades::default() }))).unwrap();
    algorithm
}

fn played(config: &AgenticPpoConfig, model: &mut dyn LanguageModel) -> Result<Vec<Episode>> {
    let plan = EpisodePlan { groups: 2, all_groups: 2, group_size: 1, temperature: 1.0, ..EpisodePlan::default() };
    let mut worlds: Vec<Box<dyn Environment>> = (0..2).map(|_| Box::new(Shades::default()) as _).collect();
    play(config, plan, &mut Writer::of_model(model), &mut worlds, &Noise::new(3), &Silent)
}

#[test]
fn an_agent_learns_by_sight_alone() {
    for (estimator, asynchronous) in [(Estimator::Grpo, 0), (Estimator::Gigpo, 0), (Estimator::Grpo, 1)] {
        let success = |is_black: bool| {
            let config =
                AgenticPpoConfig { adv_estimator: estimator, async_generation_ratio: asynchronous, ..config() };
            let (mut algorithm, mut model) = (algorithm_of(config, is_black), Seeing::new());
            algorithm.check(&mut model, None).unwrap();
            let reports: Vec<StepReport> = (0..40).map(|i| step(&mut algorithm, &mut model, i, 5.0).unwrap()).collect();
            let last = reports.iter().rev().take(5).map(|report| report.metrics["score/mean"] / 2.0).sum::<f64>() / 5.0;
            let first = &reports[0];
            assert!(first.metrics["actor/train_infer_abs_diff"] < 1e-6, "{:?}", first.metrics);
            let turn = &first.records[0]["turns"][0];
            assert_eq!(turn["observation"], "look [picture 1x1].");
            assert!(turn["pictures"][0].as_str().unwrap().starts_with("data:image/png;base64,"), "{turn}");
            assert!(first.records[0]["text"].to_string().contains("look [picture]."), "{}", first.records[0]["text"]);
            // Two pictures in each of four groups, of this step and of the one before, and of the next step in advance;
            // and that of the check.
            assert!(model.table.lock().unwrap().most <= 1 + 2 * 8 + 8 * asynchronous, "forgets old pictures");
            last
        };
        let (seeing, blind) = (success(false), success(true));
        assert!(seeing > 0.9 && blind < 0.6, "{estimator:?}: {seeing}, {blind}");
    }
}

#[test]
fn marks_without_a_picture_are_not_counted() {
    let mut model = Seeing::new();
    let config = AgenticPpoConfig {
        agent_system_template: format!("system {PICTURE_MARK}"),
        agent_template: format!("{PICTURE_MARK}{{observation}}"),
        ..config()
    };
    for episode in played(&config, &mut model).unwrap() {
        let pictures = episode.tokens.iter().filter(|id| **id >= FIRST_PICTURE_ID).count();
        assert_eq!((pictures, episode.pictures.len()), (4, 2));
        assert_eq!((&episode.steps[0].pictures[..], &episode.steps[1].pictures[..]), (&[0][..], &[1][..]));
    }
}

#[test]
fn pictures_are_dropped_with_the_turns_of_the_history() {
    let shown = |history_length: usize, template: &str| {
        let config =
            AgenticPpoConfig { history_length: Some(history_length), agent_template: template.into(), ..config() };
        let mut model = Seeing::new();
        let episode = played(&config, &mut model).unwrap().remove(0);
        let begins: Vec<usize> = episode.steps.iter().map(|step| step.begins).collect();
        let second = &episode.tokens[begins[1]..];
        model.detokenize(second).unwrap().matches(PICTURE_MARK).count()
    };
    assert_eq!(shown(2, "{history} {observation}"), 2);
    assert_eq!(shown(1, "{history} {observation}"), 1);
    assert_eq!(shown(2, "{observation} {observation}"), 2);
}

#[test]
fn episodes_with_pictures_pass_between_ranks_and_through_checkpoints() {
    let mut model = Seeing::new();
    for episode in played(&config(), &mut model).unwrap() {
        let text = serde_json::to_string(&episode).unwrap();
        let read: Episode = serde_json::from_str(&text).unwrap();
        assert_eq!((&read.pictures, &read.steps), (&episode.pictures, &episode.steps));
    }
}

#[test]
fn ranks_train_on_each_others_pictures() {
    let train = |ranks: usize, config: &AgenticPpoConfig| -> Vec<f32> {
        let results = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
            let mut strategy = Zero::new(ZeroOptions::default(), ranks.clone())?;
            let mut algorithm = AgenticPpo::new(config.clone())?.on(ranks);
            algorithm.open_environments(&mut || Ok(Box::new(Shades::default())))?;
            let mut model = Seeing::new();
            strategy.attach(&mut model, &OptimizerConfig::default())?;
            for step in 0..3 {
                algorithm.step(&mut StepContext {
                    step,
                    samples: &[],
                    model: &mut model,
                    reward: None,
                    strategy: &mut strategy,
                    learning_rate: 0.1,
                    noise: &Noise::new(1),
                    progress: &Silent,
                    want_videos: false,
                })?;
            }
            Ok(model.letters.logits)
        });
        let mut results = results.into_iter().map(Result::unwrap);
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "the ranks disagree");
        first
    };
    for config in [config(), ahead()] {
        let (one, two) = (train(1, &config), train(2, &config));
        assert!(one.iter().zip(&two).all(|(a, b)| (a - b).abs() <= 4e-5), "two ranks train as one does");
    }
}

#[test]
fn a_resume_knows_the_pictures_of_the_rollout_ahead() {
    let (mut whole, mut model) = (algorithm(ahead()), Seeing::new());
    step(&mut whole, &mut model, 0, 5.0).unwrap();
    // The state of a rollout that is done has its episodes.
    let mut state = whole.state();
    while state["ahead"].is_null() {
        std::thread::sleep(Duration::from_millis(5));
        state = whole.state();
    }
    let (mut resumed, mut copy) = (algorithm(ahead()), Seeing::new());
    resumed.load_state(&serde_json::from_str(&state.to_string()).unwrap()).unwrap();
    copy.letters.logits.clone_from(&model.letters.logits);
    for i in 1..3 {
        let [a, b] = [(&mut whole, &mut model), (&mut resumed, &mut copy)]
            .map(|(algorithm, model)| step(algorithm, model, i, 5.0).unwrap().records);
        assert_eq!(a, b);
        assert_eq!(model.letters.logits, copy.letters.logits);
    }
}

#[test]
fn a_model_without_eyes_is_refused_before_the_first_step() {
    let problem = algorithm(config()).check(&mut Bigram::of("xyz"), None).unwrap_err().chain();
    assert!(problem.contains("reads no pictures"), "{problem}");
    // Nor does an engine get pictures.
    let mut model = Seeing::new();
    let mut config = config();
    config.rollout.name = super::engine::config::EngineName::Vllm;
    let problem = super::rollout::check_beginning(&config, &model, &mut Shades::default()).unwrap_err().chain();
    assert!(problem.contains("`algo.rollout.name` to `model`"), "{problem}");
    let rejected = played(&AgenticPpoConfig::default(), &mut model);
    assert!(rejected.is_ok(), "the model itself sees");
}

/// A world whose second observation has other marks than pictures.
struct Torn;

impl Environment for Torn {
    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        Ok(Observation::text("o"))
    }

    fn step(&mut self, _action: &str) -> Result<Transition> {
        let observation = Observation::with_pictures("\u{fffc}\u{fffc}", vec![picture(0, 0)]);
        Ok(Transition { observation, reward: 0.0, terminated: false, truncated: false, valid: true })
    }
}

#[test]
fn an_observation_with_other_marks_than_pictures_fails_its_episode() {
    let plan = EpisodePlan { groups: 1, all_groups: 1, group_size: 1, ..EpisodePlan::default() };
    let mut worlds: Vec<Box<dyn Environment>> = vec![Box::new(Torn)];
    let mut model = Seeing::new();
    let mut writer = Writer::of_model(&mut model);
    let episodes = play(&config(), plan, &mut writer, &mut worlds, &Noise::new(3), &Silent).unwrap();
    let ending = format!("{:?}", episodes[0].ending);
    assert!(ending.contains("1 pictures and marks for 2"), "{ending}");
}
