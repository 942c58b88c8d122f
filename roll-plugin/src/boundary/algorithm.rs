//! [`Algorithm`] across the boundary. Its arguments are objects of the host.

use std::ffi::c_void;

use crate::abi::{
    RollAlgorithmTable, RollDataSource, RollEnvironmentMaker, RollError, RollEvaluation, RollEvaluationContext,
    RollList, RollObject, RollStepContext, RollStepReport, RollStr,
};

use super::crossing::crossing;
use super::data::{STATE, json};
use super::environment::{self, ForeignEnvironment};
use super::foreign::ForeignObject;
use super::foreign_model::ForeignModel;
use super::memory::{list, text};
use super::model::LentModel;
use super::reward::{ForeignReward, LentReward, lent_reward};
use super::served::{Served, answer, serve};
use super::source::Source;
use super::step::{ForeignProgress, LentSamples, lend_progress, own_noise, receive_samples};
use super::strategy::{ForeignStrategy, LentStrategy};
use super::wire::{Answer, Argument, Lend};
use crate::{
    Algorithm, DataSource, Environment, Evaluated, EvaluationContext, Headline, Model, Noise, Progress, Result,
    RewardScorer, StateDict, StepContext, StepReport, Validation,
};

type Target = dyn Algorithm;

/// The reason of an algorithm that does not say whether it needs clips.
const NO_ANSWER: &str = "it does not say that it can do without";

crossing! {
    Algorithm for ForeignAlgorithm, table RollAlgorithmTable of Target {
        mut fn check(model: &mut dyn Model, reward: Option<&dyn RewardScorer>);
        ref fn data_source() -> DataSource, or DataSource::Clips;
        ref fn needs_clip(has_image: bool, reference_reader: Option<&str>) -> Option<String>,
            or Some(NO_ANSWER.into()), absent Some(NO_ANSWER.into());
        mut fn open_environments(make: Make<'_>);
        mut fn validate(step: u64, model: &mut dyn Model, noise: &Noise, progress: &dyn Progress) -> Option<Validation>;
        ref fn state() -> serde_json::Value, or serde_json::Value::Null;
        mut fn load_state(state: &serde_json::Value);
        ref fn headlines() -> Vec<Headline>, or Vec::new(), absent Vec::new();
        ref fn tensors() -> StateDict, absent StateDict::new();
        mut fn load_tensors(tensors: &StateDict);
    }
    by hand [step, evaluate] {
        fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
            let samples = LentSamples::new(context.samples)?;
            let (model, strategy) = (LentModel::new(context.model), LentStrategy::new(context.strategy));
            let reward = context.reward.as_deref_mut().map(|reward| LentReward::new(&mut *reward));
            let arguments = RollStepContext {
                step: context.step,
                samples: samples.list(),
                model: model.object(),
                reward: reward.as_ref().map(LentReward::object).unwrap_or_default(),
                strategy: strategy.object(),
                learning_rate: context.learning_rate,
                noise: Lend::lend(context.noise),
                progress: lend_progress(&context.progress),
                want_videos: context.want_videos.into(),
            };
            let report = self.object.call("step", self.table.step, |step, state, out, error| {
                // SAFETY: P1 and P7.
                unsafe { step(state, &arguments, out, error) }
            })?;
            self.object.must("step", report)
        }

        fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
            let (samples, model) = (LentSamples::new(context.samples)?, LentModel::new(context.model));
            let rewards: Vec<LentReward> = context.rewards.iter_mut().map(|r| LentReward::new(&mut **r)).collect();
            let objects: Vec<RollObject> = rewards.iter().map(LentReward::object).collect();
            let arguments = RollEvaluationContext {
                samples: samples.list(),
                model: model.object(),
                rewards: RollList::lend(&objects),
                noise: Lend::lend(context.noise),
                progress: lend_progress(&context.progress),
            };
            let evaluated = self.object.call("evaluate", self.table.evaluate, |evaluate, state, out, error| {
                // SAFETY: P1 and P7.
                unsafe { evaluate(state, &arguments, out, error) }
            })?;
            self.object.must("evaluate", evaluated)
        }
    }
}

unsafe extern "C" fn step(
    state: *mut c_void,
    context: *const RollStepContext,
    out: *mut RollStepReport,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: P1, P8 and P9.
        let (arguments, samples, mut model, mut reward, mut strategy) = unsafe {
            let c = &*context;
            (
                c,
                receive_samples(c.samples)?,
                ForeignModel::new(c.model, Source::Host)?,
                lent_reward(c.reward)?,
                ForeignStrategy::new(c.strategy, Source::Host)?,
            )
        };
        let mut own = StepContext {
            step: arguments.step,
            samples: &samples,
            model: &mut model,
            reward: reward.as_mut().map(|r| r as &mut dyn RewardScorer),
            strategy: &mut strategy,
            learning_rate: arguments.learning_rate,
            noise: &own_noise(arguments.noise),
            progress: &ForeignProgress(arguments.progress),
            want_videos: arguments.want_videos == 1,
        };
        algorithm.step(&mut own).map(Answer::give)
    };
    // SAFETY: P4, P7 and P8.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn evaluate(
    state: *mut c_void,
    context: *const RollEvaluationContext,
    out: *mut RollEvaluation,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: P1, P8 and P9.
        let (arguments, samples, mut model, mut rewards) = unsafe {
            let c = &*context;
            let rewards = list(c.rewards)?.iter().map(|r| ForeignReward::new(*r, Source::Host));
            let rewards = rewards.collect::<Result<Vec<_>>>()?;
            (c, receive_samples(c.samples)?, ForeignModel::new(c.model, Source::Host)?, rewards)
        };
        let mut own = EvaluationContext {
            samples: &samples,
            upcoming: &[],
            model: &mut model,
            rewards: rewards.iter_mut().map(|r| r as &mut dyn RewardScorer).collect(),
            noise: &own_noise(arguments.noise),
            progress: &ForeignProgress(arguments.progress),
        };
        algorithm.evaluate(&mut own).map(Answer::give)
    };
    // SAFETY: P4, P7 and P8.
    unsafe { serve(state, out, error, body) }
}

pub(super) fn give(algorithm: Box<dyn Algorithm>) -> RollObject {
    Served::give(algorithm, &TABLE)
}

pub(super) type ForeignAlgorithm = ForeignObject<RollAlgorithmTable>;

impl Answer for DataSource {
    type Wire = RollDataSource;
    fn give(self) -> RollDataSource {
        match self {
            Self::Clips => RollDataSource::default(),
            Self::Own { steps_per_epoch: steps } => RollDataSource {
                own_data: 1,
                has_steps: steps.is_some().into(),
                steps_per_epoch: steps.unwrap_or_default(),
            },
        }
    }
    unsafe fn take(wire: RollDataSource, _: &Source) -> Result<Self> {
        Ok(match wire.own_data {
            0 => Self::Clips,
            _ => Self::Own { steps_per_epoch: (wire.has_steps == 1).then_some(wire.steps_per_epoch) },
        })
    }
}

impl Lend for serde_json::Value {
    type Wire = RollStr;
    type Lent = String;
    type Received = serde_json::Value;
    fn lend(&self) -> String {
        self.to_string()
    }
    fn wire(lent: &mut String) -> RollStr {
        RollStr::lend(lent)
    }
    unsafe fn receive(wire: RollStr) -> Result<serde_json::Value> {
        // SAFETY: as the caller promises.
        json(unsafe { text(wire) }?, STATE)
    }
}

type Make<'a> = &'a mut dyn FnMut() -> Result<Box<dyn Environment>>;
type Made = dyn FnMut() -> Result<Box<dyn Environment>>;

/// Calls a [`Make`] behind a thin pointer.
unsafe extern "C" fn make_environment(state: *mut c_void, out: *mut RollObject, error: *mut RollError) -> u32 {
    // SAFETY: P1: lent for the enclosing call, and called by one thread at a time (P4).
    let body = || unsafe { (*state.cast::<Make<'_>>())().map(environment::give) };
    // SAFETY: P7.
    unsafe { answer(out, error, body) }
}

impl<'a> Argument for Make<'a> {
    type Wire = RollEnvironmentMaker;
    type Lent = Make<'a>;
    type Received = Box<Made>;
    type Borrowed<'k> = Make<'k>;
    fn lend(self) -> Make<'a> {
        self
    }
    fn wire(lent: &mut Make<'a>) -> RollEnvironmentMaker {
        RollEnvironmentMaker { state: (&raw mut *lent).cast(), make: make_environment }
    }
    unsafe fn receive(wire: RollEnvironmentMaker) -> Result<Box<Made>> {
        Ok(Box::new(move || {
            let (mut object, mut error) = (RollObject::default(), RollError::default());
            // SAFETY: P1 and P7.
            let status = unsafe { (wire.make)(wire.state, &mut object, &mut error) };
            let object = Source::Host.outcome("make", status, object, error)?;
            // SAFETY: P2 and P8.
            Ok(Box::new(unsafe { ForeignEnvironment::new(object, Source::Host) }?))
        }))
    }
    fn borrow(received: &mut Box<Made>) -> Make<'_> {
        received
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;

    struct WithTensors(StateDict);

    impl Algorithm for WithTensors {
        fn check(&mut self, _: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
            Ok(())
        }
        fn step(&mut self, _: &mut StepContext<'_>) -> Result<StepReport> {
            Ok(StepReport::default())
        }
        fn tensors(&self) -> Result<StateDict> {
            Ok(self.0.clone())
        }
        fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
            self.0 = tensors.clone();
            Ok(())
        }
    }

    #[test]
    fn the_need_of_a_clip_crosses_with_its_reason() {
        struct WithoutClips;
        impl Algorithm for WithoutClips {
            fn check(&mut self, _: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
                Ok(())
            }
            fn step(&mut self, _: &mut StepContext<'_>) -> Result<StepReport> {
                Ok(StepReport::default())
            }
            fn needs_clip(&self, has_image: bool, reference_reader: Option<&str>) -> Option<String> {
                reference_reader.filter(|_| !has_image).map(|reward| format!("`{reward}` reads it"))
            }
        }
        let object = give(Box::new(WithoutClips));
        let shorter = RollAlgorithmTable { needs_clip: None, ..TABLE };
        let older = RollObject { table: (&raw const shorter).cast(), ..give(Box::new(WithoutClips)) };
        // SAFETY: own objects of this kind; the table outlives the second.
        let [theirs, older] =
            [object, older].map(|object| unsafe { ForeignAlgorithm::new(object, Source::Host) }.unwrap());
        assert_eq!(theirs.needs_clip(false, Some("faces")).as_deref(), Some("`faces` reads it"));
        assert_eq!([theirs.needs_clip(true, Some("faces")), theirs.needs_clip(false, None)], [None, None]);
        assert_eq!(older.needs_clip(true, None).as_deref(), Some(NO_ANSWER));
    }

    fn algorithm() -> RollObject {
        give(Box::new(WithTensors([("old".to_string(), Tensor::full([2, 3], 0.5))].into())))
    }

    #[test]
    fn tensors_cross_both_ways() {
        // SAFETY: an own object of this kind.
        let mut theirs = unsafe { ForeignAlgorithm::new(algorithm(), Source::Host) }.unwrap();
        let tensors = theirs.tensors().unwrap();
        assert_eq!((tensors.len(), tensors["old"].shape()), (1, &[2, 3][..]));
        theirs.load_tensors(&[("old".to_string(), Tensor::full([2, 3], 0.25))].into()).unwrap();
        assert_eq!(theirs.tensors().unwrap()["old"].f32s().unwrap(), [0.25; 6]);
    }

    #[test]
    fn an_algorithm_without_the_function_has_no_tensors() {
        let shorter = RollAlgorithmTable { tensors: None, load_tensors: None, ..TABLE };
        let object = RollObject { table: (&raw const shorter).cast(), ..algorithm() };
        // SAFETY: as above; the table outlives the object.
        let mut theirs = unsafe { ForeignAlgorithm::new(object, Source::Host) }.unwrap();
        assert!(theirs.tensors().unwrap().is_empty());
        let message = theirs.load_tensors(&StateDict::new()).unwrap_err().to_string();
        assert!(message.contains("load_tensors"), "{message}");
    }
}
