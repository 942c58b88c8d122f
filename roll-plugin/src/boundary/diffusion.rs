//! [`DiffusionModel`] across the boundary.

use crate::abi::{RollConditionInput, RollConditioning, RollDiffusionTable, RollSchedule, RollStr, RollVideoUnit};

use super::crossing::crossing;
use super::foreign::{Calls, Foreign};
use super::foreign_model::{ForeignModel, Target};
use super::memory::text;
use super::pullback::shaped;
use super::source::Source;
use super::tensor::{LentTensor, receive, receive_option, share, share_option, take, take_option};
use super::wire::{Answer, Lend};
use crate::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Grad, Pullback, Result, ScheduleFacts, Sigma,
    SigmaRange, Tensor, Timestep, VideoUnit,
};

crossing! {
    DiffusionModel for ForeignModel, table RollDiffusionTable of Target, through as_diffusion {
        // No schedule accepts this shift: the next call fails.
        ref fn schedule() -> ScheduleFacts, or ScheduleFacts { shift: f64::NAN, boundary: None, trained: SigmaRange::ALL };
        ref fn video_unit() -> VideoUnit, or VideoUnit::default(), absent VideoUnit::default();
        mut fn encode(input: &ConditionInput) -> Conditioning;
        mut fn velocity(latents: &Tensor, timestep: Timestep, conditioning: &Conditioning, adapter: Adapter, grad: Grad)
            -> (Tensor, Option<Pullback>), then velocity_shaped;
        mut fn decode(latents: &Tensor, grad: Grad) -> (Tensor, Option<Pullback>), then decoded_shaped;
        mut fn encode_video(frames: &Tensor) -> Tensor;
        ref fn encoding_key() -> Option<String>, absent None, then key;
        ref fn frame_rate() -> Option<f64>, or None, absent None;
    }
    by hand [] {}
}

fn as_diffusion(model: &mut Target) -> Result<&mut dyn DiffusionModel> {
    model.as_diffusion().ok_or_else(|| Error::Misuse("this is not a diffusion model".into()))
}

impl Calls<RollDiffusionTable> for ForeignModel {
    fn callee(&self) -> (&Foreign, Option<&RollDiffusionTable>) {
        (&self.object, self.diffusion.as_ref())
    }
}

impl ForeignModel {
    fn velocity_shaped(
        &self,
        answer: (Tensor, Option<Pullback>),
        latents: &Tensor,
        _: Timestep,
        _: &Conditioning,
        _: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.decoded_shaped(answer, latents, grad)
    }

    /// The gradient must have the shape of the latents.
    fn decoded_shaped(
        &self,
        (value, pullback): (Tensor, Option<Pullback>),
        latents: &Tensor,
        _: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        Ok((value, shaped(pullback, latents, &self.object.source)))
    }

    fn key(&self, own: Option<String>) -> Result<Option<String>> {
        self.object.source.key(own)
    }
}

impl Answer for ScheduleFacts {
    type Wire = RollSchedule;
    fn give(self) -> RollSchedule {
        RollSchedule {
            shift: self.shift,
            has_boundary: self.boundary.is_some().into(),
            boundary: self.boundary.unwrap_or_default(),
            trained_low: self.trained.low.0,
            trained_high: self.trained.high.0,
        }
    }
    unsafe fn take(wire: RollSchedule, _: &Source) -> Result<Self> {
        let boundary = (wire.has_boundary == 1).then_some(wire.boundary);
        let trained = SigmaRange { low: Sigma(wire.trained_low), high: Sigma(wire.trained_high) };
        Ok(Self { shift: wire.shift, boundary, trained })
    }
}

impl Answer for VideoUnit {
    type Wire = RollVideoUnit;
    fn give(self) -> RollVideoUnit {
        RollVideoUnit { height: self.height, width: self.width, frames: self.frames }
    }
    unsafe fn take(wire: RollVideoUnit, _: &Source) -> Result<Self> {
        let RollVideoUnit { height, width, frames } = wire;
        match height.min(width).min(frames) {
            0 => Err(Error::Misuse(format!(
                "the unit of videos must be at least 1 in each dimension, found {height} x {width} pixels and {frames} \
                 frames"
            ))),
            _ => Ok(Self { height, width, frames }),
        }
    }
}

impl Answer for Option<f64> {
    type Wire = f64;
    fn give(self) -> f64 {
        self.unwrap_or_default()
    }
    unsafe fn take(wire: f64, _: &Source) -> Result<Self> {
        Ok((wire.is_finite() && wire > 0.0).then_some(wire))
    }
}

impl Lend for ConditionInput {
    type Wire = *const RollConditionInput;
    type Lent = (RollConditionInput, [Option<LentTensor>; 2]);
    type Received = ConditionInput;
    fn lend(&self) -> Self::Lent {
        let pictures = [&self.image, &self.end_image].map(LentTensor::option);
        let [image, end_image] = pictures.each_ref().map(LentTensor::get_option);
        let [height, width] = self.size;
        let prompt = RollStr::lend(&self.prompt);
        (RollConditionInput { prompt, image, end_image, frames: self.frames, height, width }, pictures)
    }
    fn wire((input, _): &mut Self::Lent) -> *const RollConditionInput {
        input
    }
    unsafe fn receive(wire: *const RollConditionInput) -> Result<ConditionInput> {
        // SAFETY: as the caller promises.
        unsafe {
            let input = &*wire;
            Ok(ConditionInput {
                prompt: text(input.prompt)?.into(),
                image: receive_option(&input.image)?,
                end_image: receive_option(&input.end_image)?,
                frames: input.frames,
                size: [input.height, input.width],
            })
        }
    }
}

impl Lend for Conditioning {
    type Wire = *const RollConditioning;
    type Lent = (RollConditioning, LentTensor, [Option<LentTensor>; 3]);
    type Received = Conditioning;
    fn lend(&self) -> Self::Lent {
        let context = LentTensor::new(&self.context);
        let rest = [&self.channels, &self.image_tokens, &self.first_frame].map(LentTensor::option);
        let [channels, image_tokens, first_frame] = rest.each_ref().map(LentTensor::get_option);
        let latent_shape = self.latent_shape;
        let wire = RollConditioning { context: context.get(), channels, image_tokens, first_frame, latent_shape };
        (wire, context, rest)
    }
    fn wire((conditioning, ..): &mut Self::Lent) -> *const RollConditioning {
        conditioning
    }
    unsafe fn receive(wire: *const RollConditioning) -> Result<Conditioning> {
        // SAFETY: as the caller promises.
        unsafe {
            let c = &*wire;
            Ok(Conditioning {
                context: receive(&c.context)?,
                channels: receive_option(&c.channels)?,
                image_tokens: receive_option(&c.image_tokens)?,
                first_frame: receive_option(&c.first_frame)?,
                latent_shape: c.latent_shape,
            })
        }
    }
}

impl Answer for Conditioning {
    type Wire = RollConditioning;
    fn give(self) -> RollConditioning {
        RollConditioning {
            context: share(&self.context),
            channels: share_option(self.channels.as_ref()),
            image_tokens: share_option(self.image_tokens.as_ref()),
            first_frame: share_option(self.first_frame.as_ref()),
            latent_shape: self.latent_shape,
        }
    }
    unsafe fn take(wire: RollConditioning, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; each is taken once, whatever happens to the others.
        let (context, [channels, image_tokens, first_frame]) = unsafe {
            let rest = [wire.channels, wire.image_tokens, wire.first_frame];
            (take(wire.context), rest.map(|t| take_option(t)))
        };
        Ok(Self {
            context: context?,
            channels: channels?,
            image_tokens: image_tokens?,
            first_frame: first_frame?,
            latent_shape: wire.latent_shape,
        })
    }
}
