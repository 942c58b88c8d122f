//! [`Algorithm`] across the boundary. Model, reward, strategy and progress, its arguments, are objects of the host.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::environment::{self, RemoteEnvironment};
use super::message::{Incoming, Outgoing};
use super::model;
use super::object::{Answered, Gift, Loan, Remote};
use super::progress::RemoteProgress;
use super::remote::{Argument, Fact, log, remote};
use super::remote_model::RemoteModel;
use super::reward::{self, RemoteReward};
use super::strategy::{self, RemoteStrategy};
use crate::{
    Algorithm, ClipAlgorithm, ClipUse, Environment, Evaluated, EvaluationContext, Headline, Model, Noise,
    OwnDataAlgorithm, Progress, Result, RewardScorer, Sample, Samples, StateDict, StepContext, StepReport, Validation,
    acts_in_no_environment,
};

/// The reason in [`ClipUse::why_needed`] of an algorithm without the method `clip_use`. It ends a sentence "... needs a
/// clip: ".
const NO_ANSWER: &str = "it does not say that it can do without";

// Generates `answer`, and the trait for `RemoteAlgorithm`. If the other side lacks a method, `{ E }` returns E in its
// place. `by hand others { ... }`: `others` answers the methods in braces if this side has the algorithm. The braces
// call these methods if the other side has the algorithm. See `remote!`.
remote! {
    trait Algorithm for RemoteAlgorithm {
        fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()>;
        fn headlines(&self) -> Vec<Headline> { Vec::new() }
        fn validate(&mut self, step: u64, model: &mut dyn Model, noise: &Noise, progress: &dyn Progress)
            -> Result<Option<Validation>> { Ok(None) }
        fn state(&self) -> Json { Json::Null }
        fn load_state(&mut self, state: &Json) -> Result<()> {
            // Without a state there is nothing to lose.
            if state.is_null() { Ok(()) } else { Err(self.remote.lacks("load_state")) }
        }
        fn tensors(&self) -> Result<StateDict> { Ok(StateDict::new()) }
        fn load_tensors(&mut self, tensors: &StateDict) -> Result<()>;
    }
    by hand others {
        fn samples(self: Box<Self>) -> Samples {
            let source = self.remote.ask("data_source", &[]).unwrap_or_else(|error| {
                log(&error);
                None
            });
            match source {
                Some(DataSource::Own) => Samples::Own(self),
                // Also without the method `data_source`, and after an error.
                Some(DataSource::Clips) | None => Samples::Clips(self),
            }
        }

        fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
            let reward = context.reward.as_deref_mut().map(|scorer| reward::lend(scorer));
            self.remote.call_required("step", &[
                ("step", &context.step),
                ("samples", &context.samples),
                ("model", &model::lend(context.model)),
                ("reward", &reward),
                ("strategy", &strategy::lend(context.strategy)),
                ("learning_rate", &Argument::lend(context.learning_rate)),
                ("noise", &context.noise),
                ("progress", &Argument::lend(context.progress)),
                ("want_videos", &context.want_videos),
            ])
        }
    }
}

/// The methods of algorithms on clips.
mod clips {
    use super::*;

    remote! {
        trait ClipAlgorithm for RemoteAlgorithm {
            fn clip_use(&self) -> ClipUse {
                ClipUse { why_needed: Some(NO_ANSWER.into()), ..ClipUse::default() }
            }
            fn hold_out(&mut self, clips: &[Sample]) -> bool { false }
        }
        by hand others {
            fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
                let rewards = context.rewards.iter_mut().map(|scorer| reward::lend(&mut **scorer));
                let rewards: Vec<Loan<'_>> = rewards.collect();
                let evaluated = self.remote.ask("evaluate", &[
                    ("samples", &context.samples),
                    ("upcoming", &context.upcoming),
                    ("model", &model::lend(context.model)),
                    ("rewards", &rewards),
                    ("noise", &context.noise),
                    ("progress", &Argument::lend(context.progress)),
                ]);
                Ok(evaluated?.flatten())
            }
        }
    }

    /// Answers `evaluate`, `data_source`, and the methods of [`Algorithm`].
    fn others(algorithm: &mut (dyn ClipAlgorithm + '_), method: &str, message: &Incoming) -> Answered {
        match method {
            "data_source" => Outgoing::of(&DataSource::Clips).map(Some),
            "evaluate" => evaluate(algorithm, message).map(Some),
            _ => super::answer(algorithm, method, message),
        }
    }
}

/// The methods of algorithms that bring their own data.
mod own_data {
    use super::*;

    remote! {
        trait OwnDataAlgorithm for RemoteAlgorithm {
            fn steps_per_epoch(&self) -> Option<u64> { None }
            fn open_environments(&mut self, make: MakeEnvironment<'_>) -> Result<()> { Err(acts_in_no_environment()) }
        }
        by hand others {}
    }

    /// Answers `data_source`, and the methods of [`Algorithm`].
    fn others(algorithm: &mut (dyn OwnDataAlgorithm + '_), method: &str, message: &Incoming) -> Answered {
        match method {
            "data_source" => Outgoing::of(&DataSource::Own).map(Some),
            _ => super::answer(algorithm, method, message),
        }
    }
}

/// An algorithm of the other side.
pub(super) struct RemoteAlgorithm {
    pub(super) remote: Remote,
}

/// The source of an algorithm's samples: [`Samples`] in the form in which it crosses the boundary.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DataSource {
    Clips,
    Own,
}

impl Fact for DataSource {}

/// Answers the methods that the declaration leaves to be written by hand.
fn others(algorithm: &mut (dyn Algorithm + '_), method: &str, message: &Incoming) -> Answered {
    match method {
        "step" => step(algorithm, message).map(Some),
        _ => Ok(None),
    }
}

/// Arguments of `step`.
#[derive(Deserialize)]
struct Step {
    step: u64,
    samples: Vec<Sample>,
    model: Remote,
    reward: Option<Remote>,
    strategy: Remote,
    #[serde(with = "crate::number")]
    learning_rate: f64,
    noise: Noise,
    progress: Remote,
    #[serde(default)]
    want_videos: bool,
}

fn step(algorithm: &mut (dyn Algorithm + '_), message: &Incoming) -> Result<Outgoing> {
    let arguments: Step = message.read()?;
    let mut reward = arguments.reward.map(RemoteReward::new).transpose()?;
    let report = algorithm.step(&mut StepContext {
        step: arguments.step,
        samples: &arguments.samples,
        model: &mut RemoteModel::new(arguments.model)?,
        reward: reward.as_mut().map(|reward| reward as &mut dyn RewardScorer),
        strategy: &mut RemoteStrategy::new(arguments.strategy)?,
        learning_rate: arguments.learning_rate,
        noise: &arguments.noise,
        progress: &RemoteProgress { remote: arguments.progress },
        want_videos: arguments.want_videos,
    })?;
    Outgoing::of(&report)
}

/// Arguments of `evaluate`.
#[derive(Deserialize)]
struct Evaluate {
    samples: Vec<Sample>,
    #[serde(default)]
    upcoming: Vec<Sample>,
    model: Remote,
    rewards: Vec<Remote>,
    noise: Noise,
    progress: Remote,
}

fn evaluate(algorithm: &mut (dyn ClipAlgorithm + '_), message: &Incoming) -> Result<Outgoing> {
    let arguments: Evaluate = message.read()?;
    let mut rewards = arguments.rewards.into_iter().map(RemoteReward::new).collect::<Result<Vec<_>>>()?;
    let evaluated = algorithm.evaluate(&mut EvaluationContext {
        samples: &arguments.samples,
        upcoming: &arguments.upcoming,
        model: &mut RemoteModel::new(arguments.model)?,
        rewards: rewards.iter_mut().map(|reward| reward as &mut dyn RewardScorer).collect(),
        noise: &arguments.noise,
        progress: &RemoteProgress { remote: arguments.progress },
    })?;
    Outgoing::of(&evaluated)
}

/// Hands over an algorithm; calls reach it by the generated `answer` of its kind.
pub(super) fn give(algorithm: Box<dyn Algorithm>) -> Gift {
    match algorithm.samples() {
        Samples::Clips(mut algorithm) => {
            Gift::exclusive(move |method, message| clips::answer(algorithm.as_mut(), method, message))
        }
        Samples::Own(mut algorithm) => {
            Gift::exclusive(move |method, message| own_data::answer(algorithm.as_mut(), method, message))
        }
    }
}

type MakeEnvironment<'a> = &'a mut dyn FnMut() -> Result<Box<dyn Environment>>;

/// A maker of environments, as an object with the method `make`. The caller of `make` owns the environment.
impl<'a> Argument for MakeEnvironment<'a> {
    type Lent = Loan<'a>;
    type Received = Remote;
    type Opened = Box<dyn FnMut() -> Result<Box<dyn Environment>>>;
    type Borrowed<'k> = MakeEnvironment<'k>;
    fn lend(self) -> Loan<'a> {
        Loan::exclusive(move |method, _| match method {
            "make" => Outgoing::of(&environment::give(self()?)).map(Some),
            _ => Ok(None),
        })
    }
    fn open(received: Remote) -> Result<Self::Opened> {
        Ok(Box::new(move || {
            let made = received.call("make", &[])?.ok_or_else(|| received.lacks("make"))?;
            Ok(Box::new(RemoteEnvironment { remote: received.blame("make", made.read())? }))
        }))
    }
    fn borrow(opened: &mut Self::Opened) -> MakeEnvironment<'_> {
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::super::object::tests::{across, without};
    use super::*;
    use serde_json::json;

    use crate::{Columns, ConditionInput, Generation, Reference, SampleVideo, Tensor};

    /// Keeps what it is given.
    #[derive(Default)]
    struct Keeper {
        tensors: StateDict,
        seen: String,
    }

    impl Algorithm for Keeper {
        fn samples(self: Box<Self>) -> Samples {
            Samples::Clips(self)
        }
        fn check(&mut self, _: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
            Ok(())
        }
        fn step(&mut self, _: &mut StepContext<'_>) -> Result<StepReport> {
            Ok(StepReport::default())
        }
        fn state(&self) -> Json {
            self.seen.clone().into()
        }
        fn tensors(&self) -> Result<StateDict> {
            Ok(self.tensors.clone())
        }
        fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
            self.tensors = tensors.clone();
            Ok(())
        }
    }

    impl ClipAlgorithm for Keeper {
        fn clip_use(&self) -> ClipUse {
            ClipUse { why_needed: None, reference: Reference::Image }
        }
        fn hold_out(&mut self, clips: &[Sample]) -> bool {
            self.seen = format!("{clips:?}");
            true
        }
    }

    /// Plays.
    struct Player;

    impl Algorithm for Player {
        fn samples(self: Box<Self>) -> Samples {
            Samples::Own(self)
        }
        fn check(&mut self, _: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
            Ok(())
        }
        fn step(&mut self, _: &mut StepContext<'_>) -> Result<StepReport> {
            Ok(StepReport::default())
        }
    }

    impl OwnDataAlgorithm for Player {
        fn steps_per_epoch(&self) -> Option<u64> {
            Some(3)
        }
    }

    fn keeper() -> Gift {
        give(Box::new(Keeper { tensors: [("old".to_string(), Tensor::full([2, 3], 0.5))].into(), ..Keeper::default() }))
    }

    fn remote(gift: Gift) -> Box<RemoteAlgorithm> {
        Box::new(RemoteAlgorithm { remote: across(gift) })
    }

    fn theirs() -> RemoteAlgorithm {
        RemoteAlgorithm { remote: across(keeper()) }
    }

    #[test]
    fn the_use_of_clips_crosses() {
        let uses =
            |why_needed: Option<&str>, reference| ClipUse { why_needed: why_needed.map(str::to_string), reference };
        assert_eq!(theirs().clip_use(), uses(None, Reference::Image));
        let older = RemoteAlgorithm { remote: without("clip_use", keeper()) };
        assert_eq!(older.clip_use(), uses(Some(NO_ANSWER), Reference::Clip));
        // A fact that is left out is not "no".
        let empty: ClipUse = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, ClipUse::default());
    }

    #[test]
    fn the_source_of_samples_crosses_with_its_methods() {
        assert!(matches!(remote(keeper()).samples(), Samples::Clips(_)));
        let older = Box::new(RemoteAlgorithm { remote: without("data_source", keeper()) });
        assert!(matches!(older.samples(), Samples::Clips(_)));
        let Samples::Own(mut player) = remote(give(Box::new(Player))).samples() else {
            panic!("expected its own data")
        };
        assert_eq!(player.steps_per_epoch(), Some(3));
        let message = player.open_environments(&mut || Err(acts_in_no_environment())).unwrap_err().to_string();
        assert!(message.contains("acts in no environment"), "{message}");
        // Methods of the other kind are not there.
        assert!(!remote(give(Box::new(Player))).hold_out(&[]));
    }

    /// What an answer says by leaving it out would be something else than nothing: no update, no token, no frame.
    #[test]
    fn facts_without_a_meaningful_default_must_be_there() {
        fn problem<T: serde::de::DeserializeOwned>(answer: Json) -> String {
            serde_json::from_value::<T>(answer).err().map(|e| e.to_string()).unwrap_or_default()
        }
        let missing = |field: &str| format!("missing field `{field}`");
        assert_eq!(problem::<StepReport>(json!({ "metrics": {} })), missing("applied"));
        assert_eq!(problem::<Generation>(json!({ "tokens": [1] })), missing("log_probs"));
        assert_eq!(problem::<Generation>(json!({})), missing("tokens"));
        assert_eq!(problem::<Validation>(json!({ "records": [] })), missing("metrics"));
        let whole = json!({ "prompt": "a", "frames": 5, "size": [16, 16] });
        for field in ["prompt", "frames", "size"] {
            let mut input = whole.clone();
            input.as_object_mut().unwrap().remove(field);
            assert_eq!(problem::<ConditionInput>(input), missing(field));
        }
        assert_eq!(problem::<ConditionInput>(whole), "");
        assert_eq!(problem::<StepReport>(json!({ "applied": true })), "");
    }

    #[test]
    fn tensors_cross_both_ways() {
        let mut theirs = theirs();
        let tensors = theirs.tensors().unwrap();
        assert_eq!((tensors.len(), tensors["old"].shape()), (1, &[2, 3][..]));
        theirs.load_tensors(&[("old".to_string(), Tensor::full([2, 3], 0.25))].into()).unwrap();
        assert_eq!(theirs.tensors().unwrap()["old"].f32s().unwrap(), [0.25; 6]);
    }

    #[test]
    fn an_algorithm_without_the_methods_has_no_tensors() {
        let older = RemoteAlgorithm { remote: without("tensors", keeper()) };
        assert!(older.tensors().unwrap().is_empty());
        let mut older = RemoteAlgorithm { remote: without("load_tensors", keeper()) };
        let message = older.load_tensors(&StateDict::new()).unwrap_err().to_string();
        assert_eq!(message, "it has no method `load_tensors`");
    }

    #[test]
    fn a_state_that_nothing_loads_is_an_error() {
        let mut older = RemoteAlgorithm { remote: without("load_state", keeper()) };
        older.load_state(&Json::Null).unwrap();
        let message = older.load_state(&serde_json::json!({ "seen": 3 })).unwrap_err().to_string();
        assert_eq!(message, "it has no method `load_state`");
    }

    #[test]
    fn a_row_without_a_clip_crosses_with_all_that_it_has() {
        let columns = Columns::new([("answer".to_string(), serde_json::json!({ "b": 1, "a": [0.1, null] }))].into());
        let shape = SampleVideo::Shape([5, 16, 32]);
        let sample = Sample {
            end_image: Some(Tensor::full([3, 4, 4], 0.5)),
            path: Some("clips/a.mp4".into()),
            weight: 2.0,
            mask: Some(Tensor::zeros([1, 4, 4])),
            columns,
            ..Sample::new(u64::MAX, "prompts.txt line 1", "a \"dog\"\n\u{1f436}", shape)
        };
        let mut theirs = theirs();
        assert!(theirs.hold_out(std::slice::from_ref(&sample)));
        assert_eq!(theirs.state(), Json::from(format!("{:?}", [sample])));
    }
}
