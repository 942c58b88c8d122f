//! [`DiffusionModel`] across the boundary. Its methods are further methods of the object of a model.

use super::pullback::shaped;
use super::remote::remote;
use super::remote_model::RemoteModel;
use crate::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Grad, Pullback, Result, ScheduleFacts, SigmaRange,
    Tensor, Timestep, VideoUnit,
};

/// The schedule of a model that fails to return its own. No sampler accepts this shift, so that the run fails.
const NO_SCHEDULE: ScheduleFacts = ScheduleFacts { shift: f64::NAN, boundary: None, trained: SigmaRange::ALL };

remote! {
    trait DiffusionModel for RemoteModel {
        fn schedule(&self) -> ScheduleFacts else { NO_SCHEDULE };
        fn video_unit(&self) -> VideoUnit, then checked_unit() { VideoUnit::default() }
        fn expect_prompts(&mut self, prompts: &[String]) { () }
        fn takes_image(&self) -> bool { true }
        fn check_input(&mut self, input: &ConditionInput) -> Result<()> { Ok(()) }
        fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning>;
        fn velocity(
            &mut self,
            latents: &Tensor,
            timestep: Timestep,
            conditioning: &Conditioning,
            adapter: Adapter,
            grad: Grad,
        ) -> Result<(Tensor, Option<Pullback>)>, then with_checked_gradient(latents);
        fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)>,
            then with_checked_gradient(latents);
        fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor>;
        fn encoding_key(&self) -> Result<Option<String>>, then key() { Ok(None) }
        fn frame_rate(&self) -> Option<f64>, then valid_rate() { None }
    }
}

impl RemoteModel {
    /// Makes the pullback fail unless its gradient has the shape of the latents.
    fn with_checked_gradient(
        &self,
        (value, pullback): (Tensor, Option<Pullback>),
        latents: &Tensor,
    ) -> Result<(Tensor, Option<Pullback>)> {
        Ok((value, shaped(pullback, latents, &self.remote.source)))
    }

    /// Makes the key of a plugin depend on its library; see [`super::source::Source::key`].
    fn key(&self, returned: Option<String>) -> Result<Option<String>> {
        self.remote.source.key(returned)
    }

    /// Fails on a unit of 0 in any dimension, and on a model that makes no frame.
    fn checked_unit(&self, unit: VideoUnit) -> Result<VideoUnit> {
        let VideoUnit { height, width, frames, most_frames } = unit;
        if height.min(width).min(frames).min(most_frames.unwrap_or(usize::MAX)) == 0 {
            return Err(Error::Misuse(format!(
                "the unit of videos must be at least 1 in each dimension, found {height} x {width} pixels and {frames} \
                 frames, at most {most_frames:?}"
            )));
        }
        Ok(unit)
    }

    /// Ignores a rate that is not a positive number.
    fn valid_rate(&self, rate: Option<f64>) -> Result<Option<f64>> {
        Ok(rate.filter(|rate| rate.is_finite() && *rate > 0.0))
    }
}
