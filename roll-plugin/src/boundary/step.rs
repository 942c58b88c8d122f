//! The inputs and reports of steps and evaluations of an algorithm, across the boundary.

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{
    RollEvaluated, RollEvaluation, RollList, RollMaybe, RollNamedVideo, RollNoise, RollOwned, RollProgress, RollSample,
    RollSkipped, RollStepReport, RollStr, RollTensor, RollValidation, RollVideo,
};

use super::data::{json, own_numbers, take_numbers};
use super::memory::{list, own, own_text, take, take_text, text};
use super::panics::quietly;
use super::source::Source;
use super::tensor::{LentTensor, receive, receive_option, receive_video};
use super::wire::{Answer, Argument, Lend};
use crate::{
    Columns, DType, Error, Evaluated, Noise, Progress, Result, Sample, SampleVideo, StepReport, Tensor, Validation,
    Video,
};

/// Samples lent for a call.
pub(super) struct LentSamples {
    list: Vec<RollSample>,
    _paths: Vec<Option<String>>,
    _tensors: Vec<(LentTensor, [Option<LentTensor>; 3])>,
}

impl LentSamples {
    /// Points into `samples`, which live during the call.
    pub(super) fn new(samples: &[Sample]) -> Result<Self> {
        let (mut list, mut paths, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
        for sample in samples {
            let (frames, fps) = match &sample.video {
                SampleVideo::Clip(clip) => (LentTensor::new(clip.frames()), clip.fps()),
                SampleVideo::Shape(dims) => {
                    let dims = dims.map(|side| side as i64).to_vec();
                    (LentTensor::new(&Tensor::new(dims, [3])?), 0.0)
                }
            };
            let pictures = [&sample.image, &sample.end_image, &sample.mask].map(LentTensor::option);
            let [image, end_image, mask] = pictures.each_ref().map(LentTensor::get_option);
            let path = sample.path.as_ref().map(|p| p.to_string_lossy().into_owned());
            list.push(RollSample {
                index: sample.index,
                origin: RollStr::lend(&sample.origin),
                prompt: RollStr::lend(&sample.prompt),
                video: RollVideo { frames: frames.get(), fps },
                image,
                end_image,
                has_path: path.is_some().into(),
                path: path.as_deref().map_or(RollStr::EMPTY, RollStr::lend),
                weight: sample.weight,
                mask,
            });
            paths.push(path);
            tensors.push((frames, pictures));
        }
        Ok(Self { list, _paths: paths, _tensors: tensors })
    }

    pub(super) fn list(&self) -> RollList<RollSample> {
        RollList::lend(&self.list)
    }
}

/// # Safety
/// P1 and P9.
pub(super) unsafe fn receive_samples(samples: RollList<RollSample>) -> Result<Vec<Sample>> {
    // SAFETY: as the caller promises.
    unsafe {
        let sample = |s: &RollSample| {
            Ok(Sample {
                index: s.index,
                origin: text(s.origin)?.into(),
                prompt: text(s.prompt)?.into(),
                video: receive_sample_video(&s.video)?,
                image: receive_option(&s.image)?,
                end_image: receive_option(&s.end_image)?,
                path: (s.has_path == 1).then(|| text(s.path)).transpose()?.map(Into::into),
                weight: s.weight,
                mask: receive_option(&s.mask)?,
                columns: Columns::default(),
            })
        };
        list(samples)?.iter().map(sample).collect()
    }
}

/// # Safety
/// P1 and P9.
unsafe fn receive_sample_video(video: &RollVideo) -> Result<SampleVideo> {
    // SAFETY: as the caller promises.
    let frames = unsafe { receive(&video.frames) }?;
    match (frames.shape(), frames.dtype()) {
        ([3], DType::I64) => {
            let sides = frames.as_slice::<i64>()?.iter().map(|side| usize::try_from(*side));
            let sides = sides.collect::<Result<Vec<_>, _>>().ok().and_then(|sides| sides.try_into().ok());
            sides.map(SampleVideo::Shape).ok_or_else(|| Error::Misuse("a row has a video of negative size".into()))
        }
        _ => Ok(SampleVideo::Clip(Arc::new(Video::new(frames, video.fps)?))),
    }
}

impl Lend for Noise {
    type Wire = RollNoise;
    type Lent = RollNoise;
    type Received = Noise;
    fn lend(&self) -> RollNoise {
        let (seed, fixed) = self.keys();
        RollNoise { seed, has_fixed: fixed.is_some().into(), fixed: fixed.unwrap_or_default() }
    }
    fn wire(lent: &mut RollNoise) -> RollNoise {
        *lent
    }
    unsafe fn receive(wire: RollNoise) -> Result<Noise> {
        Ok(own_noise(wire))
    }
}

pub(super) fn own_noise(noise: RollNoise) -> Noise {
    let own = Noise::new(noise.seed);
    if noise.has_fixed == 1 { own.with_fixed_latents(noise.fixed) } else { own }
}

/// Lends `progress`; the reference to the reference makes the pointer thin.
pub(super) fn lend_progress(progress: &&dyn Progress) -> RollProgress {
    RollProgress { state: std::ptr::from_ref(progress).cast(), phase, interrupted }
}

unsafe extern "C" fn phase(state: *const c_void, phase: RollStr) {
    // SAFETY: P1: lent for the call that this is part of.
    quietly(|| unsafe { (*state.cast::<&dyn Progress>()).phase(text(phase).unwrap_or("")) });
}

unsafe extern "C" fn interrupted(state: *const c_void) -> u32 {
    let mut interrupted = false;
    // SAFETY: as above.
    quietly(|| interrupted = unsafe { (*state.cast::<&dyn Progress>()).interrupted() });
    interrupted.into()
}

/// The other side's progress.
pub(super) struct ForeignProgress(pub(super) RollProgress);

// SAFETY: P4.
unsafe impl Sync for ForeignProgress {}

impl Progress for ForeignProgress {
    fn phase(&self, phase: &str) {
        // SAFETY: P1: lent for the call that this is part of.
        unsafe { (self.0.phase)(self.0.state, RollStr::lend(phase)) };
    }

    fn interrupted(&self) -> bool {
        // SAFETY: as above.
        unsafe { (self.0.interrupted)(self.0.state) == 1 }
    }
}

impl<'a> Argument for &'a (dyn Progress + 'a) {
    type Wire = RollProgress;
    type Lent = &'a (dyn Progress + 'a);
    type Received = ForeignProgress;
    type Borrowed<'k> = &'k dyn Progress;
    fn lend(self) -> Self::Lent {
        self
    }
    fn wire(lent: &mut Self::Lent) -> RollProgress {
        RollProgress { state: (&raw const *lent).cast(), phase, interrupted }
    }
    unsafe fn receive(wire: RollProgress) -> Result<ForeignProgress> {
        Ok(ForeignProgress(wire))
    }
    fn borrow(received: &mut ForeignProgress) -> &dyn Progress {
        received
    }
}

fn named_video(name: &str, video: Option<(&LentTensor, f64)>) -> RollNamedVideo {
    let (frames, fps) = video.map_or((RollTensor::none(), 0.0), |(frames, fps)| (frames.get(), fps));
    RollNamedVideo { name: RollStr::lend(name), video: RollVideo { frames, fps } }
}

/// Records as a JSON list; an empty text if there is no record.
fn own_records(records: Vec<serde_json::Value>) -> RollOwned<u8> {
    match records.is_empty() {
        true => RollOwned::default(),
        false => own_text(serde_json::Value::Array(records).to_string()),
    }
}

/// # Safety
/// P2 and P9.
unsafe fn take_records(records: RollOwned<u8>) -> Result<Vec<serde_json::Value>> {
    // SAFETY: as the caller promises.
    let text = unsafe { take_text(records) }?;
    if text.is_empty() { Ok(Vec::new()) } else { json(&text, "its records are") }
}

impl Answer for Option<Validation> {
    type Wire = RollValidation;
    fn give(self) -> RollValidation {
        let Some(Validation { metrics, records, .. }) = self else { return RollValidation::default() };
        RollValidation { supported: 1, metrics: own_numbers(metrics), records: own_records(records) }
    }
    unsafe fn take(wire: RollValidation, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; each is taken once, whatever happens to the other.
        let (metrics, records) = unsafe { (take_numbers(wire.metrics), take_records(wire.records)) };
        let (metrics, records) = (metrics?, records?);
        Ok((wire.supported == 1).then_some(Validation { metrics, records, losses: Vec::new() }))
    }
}

impl Answer for StepReport {
    type Wire = RollStepReport;
    fn give(self) -> RollStepReport {
        let skipped = self.skipped.iter();
        let skipped = skipped.map(|(s, r)| RollSkipped { sample: RollStr::lend(s), reason: RollStr::lend(r) });
        let lent: Vec<LentTensor> = self.videos.iter().map(|(_, video)| LentTensor::new(video.frames())).collect();
        let videos = self.videos.iter().zip(&lent).map(|((n, v), lent)| named_video(n, Some((lent, v.fps()))));
        let (skipped, videos) = (skipped.collect(), videos.collect());
        RollStepReport {
            metrics: own_numbers(self.metrics),
            skipped: own(skipped, self.skipped),
            videos: own(videos, (self.videos, lent)),
            records: own_records(self.records),
            applied: self.applied.into(),
        }
    }
    unsafe fn take(wire: RollStepReport, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; each is taken once, whatever happens to the others.
        let (metrics, skipped, videos, records) = unsafe {
            let skipped = |s: &RollSkipped| Ok((text(s.sample)?.to_string(), text(s.reason)?.to_string()));
            let video = |v: &RollNamedVideo| Ok((text(v.name)?.to_string(), receive_video(&v.video)?));
            (
                take_numbers(wire.metrics),
                take(wire.skipped, |items| items.iter().map(skipped).collect()),
                take(wire.videos, |items| items.iter().map(video).collect()),
                take_records(wire.records),
            )
        };
        let (metrics, skipped, videos, records) = (metrics?, skipped?, videos?, records?);
        Ok(Self { metrics, skipped, videos, records, applied: wire.applied != 0 })
    }
}

impl Answer for Option<Vec<Evaluated>> {
    type Wire = RollEvaluation;
    fn give(self) -> RollEvaluation {
        let Some(evaluated) = self else { return RollEvaluation::default() };
        let maybe = |s: &Option<f64>| RollMaybe { present: s.is_some().into(), value: s.unwrap_or_default() };
        let scores: Vec<Vec<_>> = evaluated.iter().map(|e| e.scores.iter().map(maybe).collect()).collect();
        let lent: Vec<_> = evaluated.iter().map(|e| e.video.as_ref().map(|v| LentTensor::new(v.frames()))).collect();
        let items = evaluated.iter().zip(&scores).zip(&lent).map(|((e, scores), lent)| RollEvaluated {
            scores: RollList::lend(scores),
            kl: e.kl,
            video: named_video(&e.origin, lent.as_ref().zip(e.video.as_ref().map(Video::fps))),
        });
        let items = items.collect();
        RollEvaluation { supported: 1, items: own(items, (evaluated, scores, lent)) }
    }
    unsafe fn take(wire: RollEvaluation, _: &Source) -> Result<Self> {
        let item = |e: &RollEvaluated| {
            // SAFETY: as the caller promises; the items live until the list is released.
            let (origin, scores, frames) =
                unsafe { (text(e.video.name)?, list(e.scores)?, receive_option(&e.video.video.frames)?) };
            Ok(Evaluated {
                origin: origin.into(),
                scores: scores.iter().map(|s| (s.present == 1).then_some(s.value)).collect(),
                kl: e.kl,
                video: frames.map(|frames| Video::new(frames, e.video.video.fps)).transpose()?,
            })
        };
        // SAFETY: as the caller promises.
        let items = unsafe { take(wire.items, |items| items.iter().map(item).collect()) };
        items.map(|items| (wire.supported == 1).then_some(items))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_without_a_clip_crosses_as_the_shape_of_its_video() {
        let (prompt, origin) = ("a dog".to_string(), "prompts.txt line 1".to_string());
        let video = SampleVideo::Shape([5, 16, 32]);
        let sample = Sample {
            index: 3,
            origin,
            prompt,
            video,
            image: None,
            end_image: None,
            path: None,
            weight: 2.0,
            mask: None,
            columns: Columns::default(),
        };
        let lent = LentSamples::new(std::slice::from_ref(&sample)).unwrap();
        // SAFETY: lent by this side; `lent` lives until the end.
        let received = unsafe { receive_samples(lent.list()) }.unwrap();
        assert_eq!((received[0].index, received[0].prompt.as_str(), received[0].weight), (3, "a dog", 2.0));
        assert!(matches!(received[0].video, SampleVideo::Shape([5, 16, 32])), "{:?}", received[0].video);
    }
}
