//! [`Algorithm`] across the boundary: the one kind whose arguments are objects of the host.

use std::ffi::c_void;

use super::abi::{RollError, RollObject, RollOwned, RollStr};
use super::call::{Foreign, Served, Source, answer, serve, serve_shared};
use super::data::slice;
use super::environment::{self, ForeignEnvironment};
use super::layout::boundary;
use super::model::{ForeignModel, LentModel};
use super::reward::{ForeignReward, LentReward};
use super::step::{
    ForeignProgress, LentSamples, RollEvaluation, RollEvaluationContext, RollNoise, RollProgress, RollStepContext,
    RollStepReport, RollValidation, RollValidationContext, keep_samples,
};
use super::strategy::{ForeignStrategy, LentStrategy};
use crate::{
    Algorithm, DataSource, Environment, Error, Evaluated, EvaluationContext, Model, Noise, Progress, Result,
    RewardScorer, StepContext, StepReport, Validation,
};

boundary! {
    /// Where an algorithm's samples come from, as [`DataSource`].
    #[derive(Default)]
    pub struct RollAlgorithmFacts {
        /// 0: the configuration's clips.
        pub own_data: u32,
        pub has_steps: u32,
        pub steps_per_epoch: u64,
    }
}

boundary! {
    /// Makes environments during the call that it is lent for; they belong to whoever asked.
    #[derive(Clone, Copy)]
    pub struct RollEnvironmentMaker {
        pub state: *mut c_void,
        pub make: unsafe extern "C" fn(state: *mut c_void, out: *mut RollObject, error: *mut RollError) -> u32,
    }
}

boundary! {
    /// The functions of an algorithm.
    #[derive(Clone, Copy)]
    pub struct RollAlgorithmTable {
        /// A reward without a table is none.
        pub check: unsafe extern "C" fn(
            state: *mut c_void,
            model: *const RollObject,
            reward: *const RollObject,
            error: *mut RollError,
        ) -> u32,
        pub step: unsafe extern "C" fn(
            state: *mut c_void,
            context: *const RollStepContext,
            out: *mut RollStepReport,
            error: *mut RollError,
        ) -> u32,
        pub evaluate: unsafe extern "C" fn(
            state: *mut c_void,
            context: *const RollEvaluationContext,
            out: *mut RollEvaluation,
            error: *mut RollError,
        ) -> u32,
        /// JSON.
        pub save: unsafe extern "C" fn(state: *mut c_void, out: *mut RollOwned<u8>, error: *mut RollError) -> u32,
        pub restore: unsafe extern "C" fn(state: *mut c_void, saved: RollStr, error: *mut RollError) -> u32,
        pub facts:
            unsafe extern "C" fn(state: *mut c_void, out: *mut RollAlgorithmFacts, error: *mut RollError) -> u32,
        pub open_environments: unsafe extern "C" fn(
            state: *mut c_void,
            maker: *const RollEnvironmentMaker,
            error: *mut RollError,
        ) -> u32,
        pub validate: unsafe extern "C" fn(
            state: *mut c_void,
            context: *const RollValidationContext,
            out: *mut RollValidation,
            error: *mut RollError,
        ) -> u32,
    }
}

type Target = dyn Algorithm;

static TABLE: RollAlgorithmTable =
    RollAlgorithmTable { check, step, evaluate, save, restore, facts, open_environments, validate };

pub(super) fn give(algorithm: Box<dyn Algorithm>) -> RollObject {
    Served::give(algorithm, &TABLE)
}

/// A reward that the host lends, if there is one.
///
/// # Safety
/// The object is lent for this call.
unsafe fn lent_reward(reward: RollObject) -> Result<Option<ForeignReward>> {
    match reward.table.is_null() {
        true => Ok(None),
        // SAFETY: as the caller promises.
        false => unsafe { ForeignReward::new(reward, Source::Host) }.map(Some),
    }
}

unsafe extern "C" fn check(
    state: *mut c_void,
    model: *const RollObject,
    reward: *const RollObject,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: lent for this call.
        let (mut model, reward) = unsafe { (ForeignModel::new(*model, Source::Host)?, lent_reward(*reward)?) };
        algorithm.check(&mut model, reward.as_ref().map(|r| r as &dyn RewardScorer))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn step(
    state: *mut c_void,
    context: *const RollStepContext,
    out: *mut RollStepReport,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: lent for this call.
        let (context, samples, mut model, mut reward, mut strategy) = unsafe {
            let c = &*context;
            (
                c,
                keep_samples(c.samples, c.sample_count)?,
                ForeignModel::new(c.model, Source::Host)?,
                lent_reward(c.reward)?,
                ForeignStrategy::new(c.strategy, Source::Host)?,
            )
        };
        let mut own = StepContext {
            step: context.step,
            samples: &samples,
            model: &mut model,
            reward: reward.as_mut().map(|r| r as &mut dyn RewardScorer),
            strategy: &mut strategy,
            learning_rate: context.learning_rate,
            noise: &context.noise.get(),
            progress: &ForeignProgress(context.progress),
            want_videos: context.want_videos == 1,
        };
        algorithm.step(&mut own).map(RollStepReport::give)
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn evaluate(
    state: *mut c_void,
    context: *const RollEvaluationContext,
    out: *mut RollEvaluation,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: lent for this call.
        let (context, samples, mut model, mut rewards) = unsafe {
            let c = &*context;
            let rewards = slice(c.rewards, c.reward_count)?.iter();
            let rewards = rewards.map(|r| ForeignReward::new(*r, Source::Host)).collect::<Result<Vec<_>>>()?;
            (c, keep_samples(c.samples, c.sample_count)?, ForeignModel::new(c.model, Source::Host)?, rewards)
        };
        let mut own = EvaluationContext {
            samples: &samples,
            model: &mut model,
            rewards: rewards.iter_mut().map(|r| r as &mut dyn RewardScorer).collect(),
            noise: &context.noise.get(),
            progress: &ForeignProgress(context.progress),
        };
        algorithm.evaluate(&mut own).map(RollEvaluation::give)
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn save(state: *mut c_void, out: *mut RollOwned<u8>, error: *mut RollError) -> u32 {
    let body = |algorithm: &Target| Ok(RollOwned::text(algorithm.state().to_string()));
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, out, error, body) }
}

unsafe extern "C" fn restore(state: *mut c_void, saved: RollStr, error: *mut RollError) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: lent for this call.
        algorithm.load_state(&json(unsafe { saved.get() }?)?)
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollAlgorithmFacts, error: *mut RollError) -> u32 {
    let body = |algorithm: &Target| {
        Ok(match algorithm.data_source() {
            DataSource::Clips => RollAlgorithmFacts::default(),
            DataSource::Own { steps_per_epoch } => RollAlgorithmFacts {
                own_data: 1,
                has_steps: steps_per_epoch.is_some().into(),
                steps_per_epoch: steps_per_epoch.unwrap_or_default(),
            },
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, out, error, body) }
}

unsafe extern "C" fn open_environments(
    state: *mut c_void,
    maker: *const RollEnvironmentMaker,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: lent for this call.
        let maker = unsafe { *maker };
        algorithm.open_environments(&mut || {
            let (mut object, mut error) = (RollObject::default(), RollError::default());
            // SAFETY: as the interface says.
            let status = unsafe { (maker.make)(maker.state, &mut object, &mut error) };
            let object = Source::Host.outcome("make", status, object, error)?;
            // SAFETY: the other side made it for us.
            Ok(Box::new(unsafe { ForeignEnvironment::new(object, Source::Host) }?))
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn validate(
    state: *mut c_void,
    context: *const RollValidationContext,
    out: *mut RollValidation,
    error: *mut RollError,
) -> u32 {
    let body = |algorithm: &mut Target| {
        // SAFETY: lent for this call.
        let (context, mut model) = unsafe { (&*context, ForeignModel::new((*context).model, Source::Host)?) };
        let progress = ForeignProgress(context.progress);
        algorithm.validate(context.step, &mut model, &context.noise.get(), &progress).map(RollValidation::give)
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

type Make<'a> = &'a mut dyn FnMut() -> Result<Box<dyn Environment>>;

/// Serves a [`Make`] behind a thin pointer.
unsafe extern "C" fn make_environment(state: *mut c_void, out: *mut RollObject, error: *mut RollError) -> u32 {
    // SAFETY: lent for the call that this is part of, and asked by one at a time.
    let body = || unsafe { (*state.cast::<Make<'_>>())().map(environment::give) };
    // SAFETY: as the interface says.
    unsafe { answer(out, error, body) }
}

fn json(text: &str) -> Result<serde_json::Value> {
    serde_json::from_str(text).map_err(|e| Error::Misuse(format!("the state of an algorithm is no JSON: {e}")))
}

/// An algorithm of the other side.
pub(super) struct ForeignAlgorithm(Foreign<RollAlgorithmTable>);

impl ForeignAlgorithm {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Foreign::new(object, source) }.map(Self)
    }
}

impl Algorithm for ForeignAlgorithm {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let (model, reward) = (LentModel::new(model), reward.map(LentReward::shared));
        let reward = reward.as_ref().map(LentReward::object).unwrap_or_default();
        self.0.run("check", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.check)(state, &model.object(), &reward, error) }
        })
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let samples = LentSamples::new(context.samples);
        let (model, strategy) = (LentModel::new(context.model), LentStrategy::new(context.strategy));
        let reward = context.reward.as_deref_mut().map(|reward| LentReward::new(&mut *reward));
        let given = RollStepContext {
            step: context.step,
            samples: samples.list().as_ptr(),
            sample_count: samples.list().len(),
            model: model.object(),
            reward: reward.as_ref().map(LentReward::object).unwrap_or_default(),
            strategy: strategy.object(),
            learning_rate: context.learning_rate,
            noise: RollNoise::new(context.noise),
            progress: RollProgress::lend(&context.progress),
            want_videos: context.want_videos.into(),
        };
        let report: RollStepReport = self.0.call("step", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.step)(state, &given, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.0.blame("step", unsafe { report.take() })
    }

    fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        let (samples, model) = (LentSamples::new(context.samples), LentModel::new(context.model));
        let rewards: Vec<LentReward> = context.rewards.iter_mut().map(|r| LentReward::new(&mut **r)).collect();
        let objects: Vec<RollObject> = rewards.iter().map(LentReward::object).collect();
        let given = RollEvaluationContext {
            samples: samples.list().as_ptr(),
            sample_count: samples.list().len(),
            model: model.object(),
            rewards: objects.as_ptr(),
            reward_count: objects.len(),
            noise: RollNoise::new(context.noise),
            progress: RollProgress::lend(&context.progress),
        };
        let evaluation: RollEvaluation = self.0.call("evaluate", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.evaluate)(state, &given, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.0.blame("evaluate", unsafe { evaluation.take() })
    }

    fn data_source(&self) -> DataSource {
        let facts: Result<RollAlgorithmFacts> = self.0.call("facts", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.facts)(state, out, error) }
        });
        let facts = facts.unwrap_or_else(|error| {
            tracing::error!("an algorithm does not tell where its data come from: {}", super::Chain::line(&error));
            RollAlgorithmFacts::default()
        });
        match facts.own_data {
            0 => DataSource::Clips,
            _ => DataSource::Own { steps_per_epoch: (facts.has_steps == 1).then_some(facts.steps_per_epoch) },
        }
    }

    fn open_environments(&mut self, make: Make<'_>) -> Result<()> {
        let mut make = make;
        let maker = RollEnvironmentMaker { state: std::ptr::from_mut(&mut make).cast(), make: make_environment };
        self.0.run("open_environments", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.open_environments)(state, &maker, error) }
        })
    }

    fn validate(
        &mut self,
        step: u64,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        let model = LentModel::new(model);
        let given = RollValidationContext {
            step,
            model: model.object(),
            noise: RollNoise::new(noise),
            progress: RollProgress::lend(&progress),
        };
        let validation: RollValidation = self.0.call("validate", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.validate)(state, &given, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.0.blame("validate", unsafe { validation.take() })
    }

    fn state(&self) -> serde_json::Value {
        let saved: Result<RollOwned<u8>> = self.0.call("state", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.save)(state, out, error) }
        });
        // SAFETY: ours, taken once.
        let saved = saved.and_then(|text| json(&unsafe { text.take_text() }?));
        saved.unwrap_or_else(|error| {
            tracing::error!("the algorithm's state is not saved: {}", super::Chain::line(&error));
            serde_json::Value::Null
        })
    }

    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        let saved = state.to_string();
        self.0.run("load_state", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.restore)(state, RollStr::lend(&saved), error) }
        })
    }
}
