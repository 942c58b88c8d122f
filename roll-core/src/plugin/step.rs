//! What the steps and evaluations of an algorithm work with, and what they report, on the way across.

use std::ffi::c_void;
use std::sync::Arc;

use super::abi::{NO_TENSOR, RollNamedNumber, RollObject, RollOwned, RollStr, RollTensor};
use super::call::quietly;
use super::data::{Lent, own_numbers, slice, take_numbers};
use super::layout::boundary;
use super::reward::{RollVideo, keep_video};
use crate::{Error, Evaluated, Noise, Progress, Result, Sample, StepReport, Validation, Video};

boundary! {
    /// As [`Sample`]. A picture that is not there has the dtype `NO_TENSOR`.
    #[derive(Clone, Copy)]
    pub struct RollSample {
        pub index: u64,
        pub origin: RollStr,
        pub prompt: RollStr,
        pub video: RollVideo,
        pub image: RollTensor,
        pub end_image: RollTensor,
        pub has_path: u32,
        pub path: RollStr,
    }
}

boundary! {
    /// As [`Noise`]: the keys, not the draws.
    #[derive(Clone, Copy)]
    pub struct RollNoise {
        pub seed: u64,
        pub has_fixed: u32,
        pub fixed: u32,
    }
}

boundary! {
    /// Told what goes on; may be called on any thread during the call that lent it.
    #[derive(Clone, Copy)]
    pub struct RollProgress {
        pub state: *const c_void,
        pub phase: unsafe extern "C" fn(state: *const c_void, phase: RollStr),
        pub interrupted: unsafe extern "C" fn(state: *const c_void) -> u32,
    }
}

boundary! {
    /// As [`crate::StepContext`]. A reward without a table is none.
    #[derive(Clone, Copy)]
    pub struct RollStepContext {
        pub step: u64,
        pub samples: *const RollSample,
        pub sample_count: usize,
        pub model: RollObject,
        pub reward: RollObject,
        pub strategy: RollObject,
        pub learning_rate: f64,
        pub noise: RollNoise,
        pub progress: RollProgress,
        pub want_videos: u32,
    }
}

boundary! {
    /// As [`crate::EvaluationContext`].
    #[derive(Clone, Copy)]
    pub struct RollEvaluationContext {
        pub samples: *const RollSample,
        pub sample_count: usize,
        pub model: RollObject,
        pub rewards: *const RollObject,
        pub reward_count: usize,
        pub noise: RollNoise,
        pub progress: RollProgress,
    }
}

boundary! {
    /// A sample that was left out, and why.
    #[derive(Clone, Copy)]
    pub struct RollSkipped {
        pub sample: RollStr,
        pub reason: RollStr,
    }
}

boundary! {
    /// A video and its name. One that is not there has the dtype `NO_TENSOR`.
    #[derive(Clone, Copy)]
    pub struct RollNamedVideo {
        pub name: RollStr,
        pub frames: RollTensor,
        pub fps: f64,
    }
}

boundary! {
    /// As [`StepReport`].
    #[derive(Default)]
    pub struct RollStepReport {
        pub metrics: RollOwned<RollNamedNumber>,
        pub skipped: RollOwned<RollSkipped>,
        pub videos: RollOwned<RollNamedVideo>,
        /// A JSON list.
        pub records: RollOwned<u8>,
        pub applied: u32,
    }
}

boundary! {
    /// Arguments of `validate`.
    #[derive(Clone, Copy)]
    pub struct RollValidationContext {
        pub step: u64,
        pub model: RollObject,
        pub noise: RollNoise,
        pub progress: RollProgress,
    }
}

boundary! {
    /// As [`Validation`].
    #[derive(Default)]
    pub struct RollValidation {
        /// 0: the algorithm has no such notion.
        pub supported: u32,
        pub metrics: RollOwned<RollNamedNumber>,
        /// A JSON list.
        pub records: RollOwned<u8>,
    }
}

boundary! {
    /// A number that may be missing.
    #[derive(Clone, Copy)]
    pub struct RollMaybe {
        pub present: u32,
        pub value: f64,
    }
}

boundary! {
    /// As [`Evaluated`]; the video's name is the sample's origin.
    #[derive(Clone, Copy)]
    pub struct RollEvaluated {
        pub scores: *const RollMaybe,
        pub score_count: usize,
        pub kl: f64,
        pub video: RollNamedVideo,
    }
}

boundary! {
    /// Result of `evaluate`.
    #[derive(Default)]
    pub struct RollEvaluation {
        /// 0: the algorithm has no such notion.
        pub supported: u32,
        pub items: RollOwned<RollEvaluated>,
    }
}

/// Samples lent for a call.
pub(super) struct LentSamples {
    list: Vec<RollSample>,
    _paths: Vec<Option<String>>,
    _tensors: Vec<(Box<Lent>, Option<Lent>, Option<Lent>)>,
}

fn lent(tensor: &Option<Lent>) -> RollTensor {
    tensor.as_ref().map_or(RollTensor { dtype: NO_TENSOR, ..Default::default() }, |t| *t.get())
}

impl LentSamples {
    /// Points into `samples`, which live during the call.
    pub(super) fn new(samples: &[Sample]) -> Self {
        let (mut list, mut paths, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
        for sample in samples {
            // Boxed, so that its address stays when the list grows.
            let video = Box::new(Lent::new(sample.video.frames()));
            let (image, end_image) = (sample.image.as_ref().map(Lent::new), sample.end_image.as_ref().map(Lent::new));
            let path = sample.path.as_ref().map(|p| p.to_string_lossy().into_owned());
            list.push(RollSample {
                index: sample.index,
                origin: RollStr::lend(&sample.origin),
                prompt: RollStr::lend(&sample.prompt),
                video: RollVideo { frames: video.get(), fps: sample.video.fps() },
                image: lent(&image),
                end_image: lent(&end_image),
                has_path: path.is_some().into(),
                path: path.as_deref().map_or(RollStr::EMPTY, RollStr::lend),
            });
            paths.push(path);
            tensors.push((video, image, end_image));
        }
        Self { list, _paths: paths, _tensors: tensors }
    }

    pub(super) fn list(&self) -> &[RollSample] {
        &self.list
    }
}

/// # Safety
/// The samples are lent for this call.
pub(super) unsafe fn keep_samples(samples: *const RollSample, count: usize) -> Result<Vec<Sample>> {
    // SAFETY: as the caller promises.
    let samples = unsafe { slice(samples, count) }?;
    samples
        .iter()
        .map(|s| {
            // SAFETY: as the caller promises.
            unsafe {
                Ok(Sample {
                    index: s.index,
                    origin: s.origin.get()?.into(),
                    prompt: s.prompt.get()?.into(),
                    video: Arc::new(keep_video(&s.video)?),
                    image: s.image.keep_option()?,
                    end_image: s.end_image.keep_option()?,
                    path: (s.has_path == 1).then(|| s.path.get()).transpose()?.map(Into::into),
                })
            }
        })
        .collect()
}

impl RollNoise {
    pub(super) fn new(noise: &Noise) -> Self {
        let (seed, fixed) = noise.keys();
        Self { seed, has_fixed: fixed.is_some().into(), fixed: fixed.unwrap_or_default() }
    }

    pub(super) fn get(self) -> Noise {
        let noise = Noise::new(self.seed);
        if self.has_fixed == 1 { noise.with_fixed_latents(self.fixed) } else { noise }
    }
}

impl RollProgress {
    /// Lends `progress`; the reference to the reference makes the pointer thin.
    pub(super) fn lend(progress: &&dyn Progress) -> Self {
        Self { state: std::ptr::from_ref(progress).cast(), phase, interrupted }
    }
}

unsafe extern "C" fn phase(state: *const c_void, phase: RollStr) {
    // SAFETY: lent for the call that this is part of.
    quietly(|| unsafe { (*state.cast::<&dyn Progress>()).phase(phase.get().unwrap_or("")) });
}

unsafe extern "C" fn interrupted(state: *const c_void) -> u32 {
    let mut asked = false;
    // SAFETY: as above.
    quietly(|| asked = unsafe { (*state.cast::<&dyn Progress>()).interrupted() });
    asked.into()
}

/// The other side's progress.
pub(super) struct ForeignProgress(pub(super) RollProgress);

// SAFETY: the interface asks for functions that may be called on any thread.
unsafe impl Sync for ForeignProgress {}

impl Progress for ForeignProgress {
    fn phase(&self, phase: &str) {
        // SAFETY: lent for the call that this is part of.
        unsafe { (self.0.phase)(self.0.state, RollStr::lend(phase)) };
    }

    fn interrupted(&self) -> bool {
        // SAFETY: as above.
        unsafe { (self.0.interrupted)(self.0.state) == 1 }
    }
}

fn named_video(name: &str, video: Option<(&Lent, f64)>) -> RollNamedVideo {
    let (frames, fps) = match video {
        Some((frames, fps)) => (*frames.get(), fps),
        None => (RollTensor { dtype: NO_TENSOR, ..Default::default() }, 0.0),
    };
    RollNamedVideo { name: RollStr::lend(name), frames, fps }
}

/// Records as a JSON list; no text at all when there are none.
fn own_records(records: Vec<serde_json::Value>) -> RollOwned<u8> {
    match records.is_empty() {
        true => RollOwned::default(),
        false => RollOwned::text(serde_json::Value::Array(records).to_string()),
    }
}

/// # Safety
/// The other side made it for us.
unsafe fn take_records(records: RollOwned<u8>) -> Result<Vec<serde_json::Value>> {
    // SAFETY: as the caller promises.
    let text = unsafe { records.take_text() }?;
    if text.is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_str(&text).map_err(|e| Error::Misuse(format!("its records are no JSON list: {e}")))
}

impl RollValidation {
    pub(super) fn give(validation: Option<Validation>) -> Self {
        let Some(Validation { metrics, records }) = validation else { return Self::default() };
        Self { supported: 1, metrics: own_numbers(metrics.iter()), records: own_records(records) }
    }

    /// # Safety
    /// The other side made it for us.
    pub(super) unsafe fn take(self) -> Result<Option<Validation>> {
        // SAFETY: both are ours, and each is taken once, whatever happens to the other.
        let (metrics, records) = unsafe { (take_numbers(self.metrics), take_records(self.records)) };
        let (metrics, records) = (metrics?, records?);
        Ok((self.supported == 1).then_some(Validation { metrics, records }))
    }
}

impl RollStepReport {
    pub(super) fn give(report: StepReport) -> Self {
        let skipped = report.skipped.iter();
        let skipped = skipped.map(|(s, r)| RollSkipped { sample: RollStr::lend(s), reason: RollStr::lend(r) });
        let lent: Vec<Lent> = report.videos.iter().map(|(_, video)| Lent::new(video.frames())).collect();
        let videos = report.videos.iter().zip(&lent).map(|((n, v), lent)| named_video(n, Some((lent, v.fps()))));
        let (skipped, videos) = (skipped.collect(), videos.collect());
        Self {
            metrics: own_numbers(report.metrics.iter()),
            skipped: RollOwned::new(skipped, report.skipped),
            videos: RollOwned::new(videos, (report.videos, lent)),
            records: own_records(report.records),
            applied: report.applied.into(),
        }
    }

    /// # Safety
    /// The other side made it for us.
    pub(super) unsafe fn take(self) -> Result<StepReport> {
        // SAFETY: all four are ours, and each is taken once, whatever happens to the others.
        let (metrics, skipped, videos, records) = unsafe {
            let skipped = |s: &RollSkipped| Ok((s.sample.get()?.to_string(), s.reason.get()?.to_string()));
            let video = |v: &RollNamedVideo| Ok((v.name.get()?.to_string(), Video::new(v.frames.keep()?, v.fps)?));
            (
                take_numbers(self.metrics),
                self.skipped.take(|items| items.iter().map(skipped).collect()),
                self.videos.take(|items| items.iter().map(video).collect()),
                take_records(self.records),
            )
        };
        let (metrics, skipped, videos, records) = (metrics?, skipped?, videos?, records?);
        Ok(StepReport { metrics, skipped, videos, records, applied: self.applied != 0 })
    }
}

impl RollEvaluation {
    pub(super) fn give(evaluated: Option<Vec<Evaluated>>) -> Self {
        let Some(evaluated) = evaluated else { return Self::default() };
        let maybe = |s: &Option<f64>| RollMaybe { present: s.is_some().into(), value: s.unwrap_or_default() };
        let scores: Vec<Vec<_>> = evaluated.iter().map(|e| e.scores.iter().map(maybe).collect()).collect();
        let lent: Vec<_> = evaluated.iter().map(|e| e.video.as_ref().map(|v| Lent::new(v.frames()))).collect();
        let items = evaluated.iter().zip(&scores).zip(&lent).map(|((e, scores), lent)| RollEvaluated {
            scores: scores.as_ptr(),
            score_count: scores.len(),
            kl: e.kl,
            video: named_video(&e.origin, lent.as_ref().zip(e.video.as_ref().map(Video::fps))),
        });
        let items = items.collect();
        Self { supported: 1, items: RollOwned::new(items, (evaluated, scores, lent)) }
    }

    /// # Safety
    /// The other side made it for us.
    pub(super) unsafe fn take(self) -> Result<Option<Vec<Evaluated>>> {
        let item = |e: &RollEvaluated| {
            // SAFETY: the list is valid until it is released.
            let (origin, scores, frames) =
                unsafe { (e.video.name.get()?, slice(e.scores, e.score_count)?, e.video.frames.keep_option()?) };
            Ok(Evaluated {
                origin: origin.into(),
                scores: scores.iter().map(|s| (s.present == 1).then_some(s.value)).collect(),
                kl: e.kl,
                video: frames.map(|frames| Video::new(frames, e.video.fps)).transpose()?,
            })
        };
        // SAFETY: ours, taken once.
        let items = unsafe { self.items.take(|items| items.iter().map(item).collect()) };
        items.map(|items| (self.supported == 1).then_some(items))
    }
}
