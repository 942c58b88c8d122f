//! [`RewardScorer`] across the boundary.

use std::collections::BTreeMap;
use std::ffi::c_void;

use super::abi::{
    OK, RollError, RollNamedNumber, RollNamedTensor, RollObject, RollOwned, RollPullback, RollStr, RollTensor,
};
use super::call::{Foreign, Served, Source, serve, serve_shared};
use super::data::{Lent, keep_named, lend_named, own_numbers, own_tensors, slice, take_numbers, take_tensors};
use super::layout::boundary;
use super::pullback;
use crate::{Error, Grad, OnMissing, Pullback, Result, RewardScorer, Score, Target, Video};

boundary! {
    /// Facts of a scorer that do not change.
    #[derive(Default)]
    pub struct RollRewardFacts {
        pub name: RollOwned<u8>,
        /// 1 when `score` can give a pullback.
        pub differentiable: u32,
        /// What to do when there is nothing to score: 0 skip the sample, 1 stop, 2 score it as `missing_value`.
        pub on_missing: u32,
        pub missing_value: f64,
    }
}

boundary! {
    /// Frames, f32 `[T, 3, H, W]` in [-1, 1].
    #[derive(Clone, Copy)]
    pub struct RollVideo {
        pub frames: *const RollTensor,
        pub fps: f64,
    }
}

boundary! {
    /// Arguments of `score`.
    #[derive(Clone, Copy)]
    pub struct RollScoreInput {
        pub video: RollVideo,
        pub prompt: RollStr,
        /// What `prepare` gave.
        pub target: *const RollNamedTensor,
        pub target_count: usize,
        /// 1: a pullback is wanted.
        pub record: u32,
    }
}

boundary! {
    /// Result of `score`.
    #[derive(Default)]
    pub struct RollScore {
        /// 1: there was nothing to score, and `reason` says why.
        pub missing: u32,
        pub value: f64,
        pub details: RollOwned<RollNamedNumber>,
        pub reason: RollOwned<u8>,
        /// From the cotangent of the score (scalar) to that of the frames.
        pub pullback: RollPullback,
    }
}

boundary! {
    /// The functions of a reward.
    #[derive(Clone, Copy)]
    pub struct RollRewardTable {
        pub facts: unsafe extern "C" fn(state: *mut c_void, out: *mut RollRewardFacts, error: *mut RollError) -> u32,
        pub prepare: unsafe extern "C" fn(
            state: *mut c_void,
            reference: *const RollVideo,
            out: *mut RollOwned<RollNamedTensor>,
            error: *mut RollError,
        ) -> u32,
        pub score: unsafe extern "C" fn(
            state: *mut c_void,
            input: *const RollScoreInput,
            out: *mut RollScore,
            error: *mut RollError,
        ) -> u32,
        /// Of what `prepare` gives; empty when the scorer cannot tell, null when it never can.
        pub target_key: Option<unsafe extern "C" fn(*mut c_void, *mut RollOwned<u8>, *mut RollError) -> u32>,
    }
}

type Scorer = dyn RewardScorer;

static TABLE: RollRewardTable = RollRewardTable { facts, prepare, score, target_key: Some(target_key) };

/// Gives a scorer away.
pub(super) fn give(scorer: Box<dyn RewardScorer>) -> RollObject {
    Served::give(scorer, &TABLE)
}

/// Lends a scorer to the other side for a call.
pub(super) struct LentReward(Served<Scorer>);

impl LentReward {
    pub(super) fn new<'a>(scorer: &'a mut (dyn RewardScorer + 'a)) -> Self {
        // SAFETY: whoever makes this drops it before the borrow ends.
        unsafe { Self::at(scorer) }
    }

    /// Only its facts may be asked for.
    pub(super) fn shared<'a>(scorer: &'a (dyn RewardScorer + 'a)) -> Self {
        // SAFETY: as above; facts are served as shared.
        unsafe { Self::at(std::ptr::from_ref(scorer).cast_mut()) }
    }

    /// # Safety
    /// The scorer outlives the result.
    unsafe fn at<'a>(scorer: *mut (dyn RewardScorer + 'a)) -> Self {
        // SAFETY: only the lifetime changes, and the caller sees to it.
        Self(Served::lend(unsafe { std::mem::transmute::<*mut (dyn RewardScorer + 'a), *mut Scorer>(scorer) }))
    }

    pub(super) fn object(&self) -> RollObject {
        self.0.object(&TABLE)
    }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollRewardFacts, error: *mut RollError) -> u32 {
    let body = |scorer: &Scorer| {
        let (on_missing, missing_value) = match scorer.on_missing() {
            OnMissing::Skip => (0, 0.0),
            OnMissing::Error => (1, 0.0),
            OnMissing::Value(value) => (2, value),
        };
        let differentiable = scorer.differentiable().into();
        Ok(RollRewardFacts { name: RollOwned::text(scorer.name().into()), differentiable, on_missing, missing_value })
    };
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, out, error, body) }
}

unsafe extern "C" fn prepare(
    state: *mut c_void,
    reference: *const RollVideo,
    out: *mut RollOwned<RollNamedTensor>,
    error: *mut RollError,
) -> u32 {
    let body = |scorer: &mut Scorer| {
        // SAFETY: lent for this call.
        let reference = unsafe { keep_video(&*reference) }?;
        Ok(own_tensors(scorer.prepare(&reference)?.tensors.iter()))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn score(
    state: *mut c_void,
    input: *const RollScoreInput,
    out: *mut RollScore,
    error: *mut RollError,
) -> u32 {
    let body = |scorer: &mut Scorer| {
        // SAFETY: lent for this call.
        let (video, prompt, target, grad) = unsafe {
            let input = &*input;
            let tensors = keep_named(slice(input.target, input.target_count)?)?;
            let grad = if input.record == 1 { Grad::Record } else { Grad::Skip };
            (keep_video(&input.video)?, input.prompt.get()?, Target { tensors }, grad)
        };
        let (score, pullback) = scorer.score(&video, prompt, &target, grad)?;
        Ok(match score {
            Score::Value { value, details } => RollScore {
                value,
                details: own_numbers(details.iter()),
                pullback: pullback::give(pullback),
                ..Default::default()
            },
            Score::Missing { reason } => {
                RollScore { missing: 1, reason: RollOwned::text(reason), ..Default::default() }
            }
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn target_key(state: *mut c_void, out: *mut RollOwned<u8>, error: *mut RollError) -> u32 {
    let body = |scorer: &Scorer| Ok(RollOwned::text(scorer.target_key()?.unwrap_or_default()));
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, out, error, body) }
}

/// # Safety
/// The video is lent for this call.
pub(super) unsafe fn keep_video(video: &RollVideo) -> Result<Video> {
    // SAFETY: as the caller promises.
    Video::new(unsafe { (*video.frames).keep() }?, video.fps)
}

/// A scorer of the other side.
pub(super) struct ForeignReward {
    object: Foreign<RollRewardTable>,
    name: String,
    differentiable: bool,
    on_missing: OnMissing,
}

impl ForeignReward {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let object = unsafe { Foreign::<RollRewardTable>::new(object, source) }?;
        // SAFETY: the arguments live during the call.
        let facts = object.call("name", |t, state, out, error| unsafe { (t.facts)(state, out, error) })?;
        // SAFETY: ours, taken once.
        let name = object.blame("name", unsafe { facts.name.take_text() })?;
        let on_missing = match facts.on_missing {
            0 => OnMissing::Skip,
            1 => OnMissing::Error,
            2 => OnMissing::Value(facts.missing_value),
            other => {
                let problem = Error::Misuse(format!("`on_missing` is {other}, expected 0, 1 or 2"));
                return object.blame("name", Err(problem));
            }
        };
        Ok(Self { object, name, differentiable: facts.differentiable == 1, on_missing })
    }

    /// What the score must be: finite, where the frames are, and with a pullback exactly when one was promised.
    fn check(&self, video: &Video, value: f64, grad: Grad, pullback: &Option<Pullback>) -> Result<()> {
        if !value.is_finite() && video.frames().f32s()?.iter().all(|v| v.is_finite()) {
            return Err(Error::NonFinite { what: "the score of frames that are finite".into(), value });
        }
        match grad.is_on() && self.differentiable && pullback.is_none() {
            true => Err(Error::Misuse("it calls itself differentiable but gave no pullback".into())),
            false => Ok(()),
        }
    }
}

impl RewardScorer for ForeignReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn differentiable(&self) -> bool {
        self.differentiable
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let frames = Lent::new(reference.frames());
        let video = RollVideo { frames: frames.get(), fps: reference.fps() };
        let call = self.object.call("prepare", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.prepare)(state, &video, out, error) }
        });
        // SAFETY: ours, taken once.
        let tensors = self.object.blame("prepare", unsafe { take_tensors(call?) })?;
        Ok(Target { tensors })
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let frames = Lent::new(video.frames());
        let named: Vec<(String, Lent)> = target.tensors.iter().map(|(k, t)| (k.clone(), Lent::new(t))).collect();
        let target = lend_named(&named);
        let input = RollScoreInput {
            video: RollVideo { frames: frames.get(), fps: video.fps() },
            prompt: RollStr::lend(prompt),
            target: target.as_ptr(),
            target_count: target.len(),
            record: grad.is_on().into(),
        };
        let given: RollScore = self.object.call("score", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.score)(state, &input, out, error) }
        })?;
        let shape = Some(video.frames().shape().to_vec());
        // SAFETY: all of it is ours, and each part is taken once.
        let (details, reason, pullback) = unsafe {
            let details = take_numbers::<BTreeMap<_, _>>(given.details);
            (details, given.reason.take_text(), pullback::take(given.pullback, self.object.source.clone(), shape))
        };
        let (details, reason) = (self.object.blame("score", details)?, self.object.blame("score", reason)?);
        if given.missing != 0 {
            return Ok((Score::Missing { reason }, None));
        }
        self.object.blame("score", self.check(video, given.value, grad, &pullback))?;
        Ok((Score::Value { value: given.value, details }, pullback.filter(|_| grad.is_on())))
    }

    fn target_key(&self) -> Result<Option<String>> {
        let told = self.object.call("target_key", |t, state, out, error| match t.target_key {
            // SAFETY: the arguments live during the call.
            Some(target_key) => unsafe { target_key(state, out, error) },
            None => OK,
        });
        // SAFETY: ours, taken once.
        unsafe { self.object.source.key("target_key", told?) }
    }

    fn on_missing(&self) -> OnMissing {
        self.on_missing
    }
}
