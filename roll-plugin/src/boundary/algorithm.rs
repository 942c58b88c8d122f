//! [`Algorithm`] across the boundary. Model, reward, strategy and progress, its arguments, are objects of the host.

use serde::Deserialize;
use serde_json::Value as Json;

use super::environment::{self, RemoteEnvironment};
use super::message::{Incoming, Outgoing};
use super::model;
use super::object::{Answered, Gift, Loan, Remote};
use super::progress::RemoteProgress;
use super::remote::{Argument, remote};
use super::remote_model::RemoteModel;
use super::reward::{self, RemoteReward};
use super::strategy::{self, RemoteStrategy};
use crate::{
    Algorithm, DataSource, Environment, Error, Evaluated, EvaluationContext, Headline, Model, Noise, Progress, Result,
    RewardScorer, Sample, StateDict, StepContext, StepReport, Validation,
};

/// The answer of `needs_clip` in the place of an algorithm without that method. It ends a sentence "... needs a clip:
/// ".
const NO_ANSWER: &str = "it does not say that it can do without";

// Generates `answer`, and the trait for `RemoteAlgorithm`. If the other side lacks a method, `{ E }` returns E in its
// place. `by hand others { ... }`: `others` answers the methods in braces if this side has the algorithm; the braces
// call them if the other side has it. See `remote!`.
remote! {
    trait Algorithm for RemoteAlgorithm {
        fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()>;
        fn data_source(&self) -> DataSource { DataSource::Clips }
        fn needs_clip(&self, has_image: bool, reference_reader: Option<&str>) -> Option<String> {
            Some(NO_ANSWER.into())
        }
        fn open_environments(&mut self, make: Make<'_>) -> Result<()> {
            Err(Error::config("env", "this algorithm acts in no environment; leave the section out"))
        }
        fn headlines(&self) -> Vec<Headline> { Vec::new() }
        fn hold_out(&mut self, clips: &[Sample]) -> bool { false }
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
        fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
            let reward = context.reward.as_deref_mut().map(|scorer| reward::lend(scorer));
            self.remote.must("step", &[
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

        fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
            let rewards: Vec<Loan<'_>> = context.rewards.iter_mut().map(|scorer| reward::lend(&mut **scorer)).collect();
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

/// An algorithm of the other side.
pub(super) struct RemoteAlgorithm {
    pub(super) remote: Remote,
}

/// Answers the methods that the declaration leaves to be written by hand.
fn others(algorithm: &mut (dyn Algorithm + '_), method: &str, message: &Incoming) -> Answered {
    match method {
        "step" => step(algorithm, message).map(Some),
        "evaluate" => evaluate(algorithm, message).map(Some),
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

fn evaluate(algorithm: &mut (dyn Algorithm + '_), message: &Incoming) -> Result<Outgoing> {
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

/// Hands over an algorithm; calls reach it by the generated `answer`.
pub(super) fn give(mut algorithm: Box<dyn Algorithm>) -> Gift {
    Gift::exclusive(move |method, message| answer(algorithm.as_mut(), method, message))
}

type Make<'a> = &'a mut dyn FnMut() -> Result<Box<dyn Environment>>;

/// A maker of environments, as an object with the method `make`. The caller of `make` owns the environment.
impl<'a> Argument for Make<'a> {
    type Lent = Loan<'a>;
    type Received = Remote;
    type Opened = Box<dyn FnMut() -> Result<Box<dyn Environment>>>;
    type Borrowed<'k> = Make<'k>;
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
    fn borrow(opened: &mut Self::Opened) -> Make<'_> {
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::super::object::tests::{across, without};
    use super::*;
    use crate::{Columns, SampleVideo, Tensor};

    /// Keeps what it is given.
    #[derive(Default)]
    struct Keeper {
        tensors: StateDict,
        seen: String,
    }

    impl Algorithm for Keeper {
        fn check(&mut self, _: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
            Ok(())
        }
        fn step(&mut self, _: &mut StepContext<'_>) -> Result<StepReport> {
            Ok(StepReport::default())
        }
        fn needs_clip(&self, has_image: bool, reference_reader: Option<&str>) -> Option<String> {
            reference_reader.filter(|_| !has_image).map(|reward| format!("`{reward}` reads it"))
        }
        fn data_source(&self) -> DataSource {
            DataSource::Own { steps_per_epoch: Some(3) }
        }
        fn hold_out(&mut self, clips: &[Sample]) -> bool {
            self.seen = format!("{clips:?}");
            true
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

    fn keeper() -> Gift {
        give(Box::new(Keeper { tensors: [("old".to_string(), Tensor::full([2, 3], 0.5))].into(), ..Keeper::default() }))
    }

    fn theirs() -> RemoteAlgorithm {
        RemoteAlgorithm { remote: across(keeper()) }
    }

    #[test]
    fn the_need_of_a_clip_crosses_with_its_reason() {
        assert_eq!(theirs().needs_clip(false, Some("faces")).as_deref(), Some("`faces` reads it"));
        assert_eq!([theirs().needs_clip(true, Some("faces")), theirs().needs_clip(false, None)], [None, None]);
        let older = RemoteAlgorithm { remote: without("needs_clip", keeper()) };
        assert_eq!(older.needs_clip(true, None).as_deref(), Some(NO_ANSWER));
        assert_eq!(theirs().data_source(), DataSource::Own { steps_per_epoch: Some(3) });
        assert_eq!(RemoteAlgorithm { remote: without("data_source", keeper()) }.data_source(), DataSource::Clips);
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
        let sample = Sample {
            index: u64::MAX,
            origin: "prompts.txt line 1".into(),
            prompt: "a \"dog\"\n\u{1f436}".into(),
            video: SampleVideo::Shape([5, 16, 32]),
            image: None,
            end_image: Some(Tensor::full([3, 4, 4], 0.5)),
            path: Some("clips/a.mp4".into()),
            weight: 2.0,
            mask: Some(Tensor::zeros([1, 4, 4])),
            columns,
        };
        let mut theirs = theirs();
        assert!(theirs.hold_out(std::slice::from_ref(&sample)));
        assert_eq!(theirs.state(), Json::from(format!("{:?}", [sample])));
    }
}
