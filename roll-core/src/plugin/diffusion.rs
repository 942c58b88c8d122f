//! [`DiffusionModel`] across the boundary.

use std::ffi::c_void;

use super::abi::{NO_TENSOR, OK, RollError, RollOwned, RollPullback, RollStr, RollTensor};
use super::call::serve;
use super::data::Lent;
use super::layout::boundary;
use super::model::{ForeignModel, Target};
use super::pullback;
use crate::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Grad, Pullback, Result, ScheduleFacts, Sigma,
    SigmaRange, Tensor, Timestep,
};

boundary! {
    /// Facts of the checkpoint.
    #[derive(Clone, Copy, Default)]
    pub struct RollSchedule {
        pub shift: f64,
        pub has_boundary: u32,
        pub boundary: f64,
        /// Noise levels at which trainable parameters act.
        pub trained_low: f64,
        pub trained_high: f64,
    }
}

boundary! {
    /// Arguments of `encode`. A tensor that is not there has the dtype `NO_TENSOR`.
    #[derive(Clone, Copy)]
    pub struct RollConditionInput {
        pub prompt: RollStr,
        pub image: RollTensor,
        pub end_image: RollTensor,
        pub frames: usize,
        pub height: usize,
        pub width: usize,
    }
}

boundary! {
    /// As [`Conditioning`].
    #[derive(Clone, Copy, Default)]
    pub struct RollConditioning {
        pub context: RollTensor,
        pub channels: RollTensor,
        pub image_tokens: RollTensor,
        pub first_frame: RollTensor,
        pub latent_shape: [usize; 4],
    }
}

boundary! {
    /// Arguments of `velocity`.
    #[derive(Clone, Copy)]
    pub struct RollVelocityInput {
        pub latents: *const RollTensor,
        pub timestep: f64,
        pub conditioning: *const RollConditioning,
        /// 1: with the adapter.
        pub adapter: u32,
        /// 1: a pullback is wanted.
        pub record: u32,
    }
}

boundary! {
    /// A value and its pullback.
    #[derive(Default)]
    pub struct RollValue {
        pub value: RollTensor,
        pub pullback: RollPullback,
    }
}

boundary! {
    /// The functions of a diffusion model.
    #[derive(Clone, Copy)]
    pub struct RollDiffusionTable {
        pub schedule: unsafe extern "C" fn(state: *mut c_void, out: *mut RollSchedule, error: *mut RollError) -> u32,
        pub encode: unsafe extern "C" fn(
            state: *mut c_void,
            input: *const RollConditionInput,
            out: *mut RollConditioning,
            error: *mut RollError,
        ) -> u32,
        pub velocity: unsafe extern "C" fn(
            state: *mut c_void,
            input: *const RollVelocityInput,
            out: *mut RollValue,
            error: *mut RollError,
        ) -> u32,
        pub decode: unsafe extern "C" fn(
            state: *mut c_void,
            latents: *const RollTensor,
            record: u32,
            out: *mut RollValue,
            error: *mut RollError,
        ) -> u32,
        pub encode_video: unsafe extern "C" fn(
            state: *mut c_void,
            frames: *const RollTensor,
            out: *mut RollTensor,
            error: *mut RollError,
        ) -> u32,
        /// Of what `encode` and `encode_video` give; empty when the model cannot tell, null when it never can.
        pub encoding_key: Option<unsafe extern "C" fn(*mut c_void, *mut RollOwned<u8>, *mut RollError) -> u32>,
    }
}

pub(super) const TABLE: RollDiffusionTable =
    RollDiffusionTable { schedule, encode, velocity, decode, encode_video, encoding_key: Some(encoding_key) };

fn of(model: &mut Target) -> Result<&mut dyn DiffusionModel> {
    model.as_diffusion().ok_or_else(|| Error::Misuse("this is no diffusion model".into()))
}

fn grad(record: u32) -> Grad {
    if record == 1 { Grad::Record } else { Grad::Skip }
}

impl RollValue {
    pub(super) fn give((value, pullback): (Tensor, Option<Pullback>)) -> Self {
        Self { value: RollTensor::share(&value), pullback: pullback::give(pullback) }
    }
}

unsafe extern "C" fn schedule(state: *mut c_void, out: *mut RollSchedule, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        let ScheduleFacts { shift, boundary, trained } = of(model)?.schedule();
        Ok(RollSchedule {
            shift,
            has_boundary: boundary.is_some().into(),
            boundary: boundary.unwrap_or_default(),
            trained_low: trained.low.0,
            trained_high: trained.high.0,
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn encode(
    state: *mut c_void,
    input: *const RollConditionInput,
    out: *mut RollConditioning,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let input = unsafe {
            let input = &*input;
            ConditionInput {
                prompt: input.prompt.get()?.into(),
                image: input.image.keep_option()?,
                end_image: input.end_image.keep_option()?,
                frames: input.frames,
                size: [input.height, input.width],
            }
        };
        let made = of(model)?.encode(&input)?;
        Ok(RollConditioning {
            context: RollTensor::share(&made.context),
            channels: RollTensor::share_option(made.channels.as_ref()),
            image_tokens: RollTensor::share_option(made.image_tokens.as_ref()),
            first_frame: RollTensor::share_option(made.first_frame.as_ref()),
            latent_shape: made.latent_shape,
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn velocity(
    state: *mut c_void,
    input: *const RollVelocityInput,
    out: *mut RollValue,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let (input, latents, conditioning) = unsafe {
            let (input, given) = (&*input, &*(*input).conditioning);
            let conditioning = Conditioning {
                context: given.context.keep()?,
                channels: given.channels.keep_option()?,
                image_tokens: given.image_tokens.keep_option()?,
                first_frame: given.first_frame.keep_option()?,
                latent_shape: given.latent_shape,
            };
            (input, (*input.latents).keep()?, conditioning)
        };
        let adapter = if input.adapter == 1 { Adapter::On } else { Adapter::Off };
        let timestep = Timestep(input.timestep);
        of(model)?.velocity(&latents, timestep, &conditioning, adapter, grad(input.record)).map(RollValue::give)
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn decode(
    state: *mut c_void,
    latents: *const RollTensor,
    record: u32,
    out: *mut RollValue,
    error: *mut RollError,
) -> u32 {
    // SAFETY: lent for this call.
    let body =
        |model: &mut Target| of(model)?.decode(&unsafe { (*latents).keep() }?, grad(record)).map(RollValue::give);
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn encode_video(
    state: *mut c_void,
    frames: *const RollTensor,
    out: *mut RollTensor,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let frames = unsafe { (*frames).keep() }?;
        Ok(RollTensor::share(&of(model)?.encode_video(&frames)?))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn encoding_key(state: *mut c_void, out: *mut RollOwned<u8>, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| Ok(RollOwned::text(of(model)?.encoding_key()?.unwrap_or_default()));
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

fn lent(tensor: &Option<Lent>) -> RollTensor {
    tensor.as_ref().map_or(RollTensor { dtype: NO_TENSOR, ..Default::default() }, |t| *t.get())
}

impl ForeignModel {
    /// Takes a value and its pullback, whose result must have the shape `wanted`.
    pub(super) fn value(
        &self,
        call: &'static str,
        given: RollValue,
        wanted: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let wanted = wanted.map(|t| t.shape().to_vec());
        // SAFETY: both are ours, and taken once; the pullback first, so that an error of the value releases it.
        let (pullback, value) =
            unsafe { (pullback::take(given.pullback, self.object.source.clone(), wanted), given.value.take()) };
        Ok((self.object.blame(call, value)?, pullback))
    }
}

impl DiffusionModel for ForeignModel {
    fn schedule(&self) -> ScheduleFacts {
        let facts: Result<RollSchedule> = self.object.call("schedule", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.diffusion.schedule)(state, out, error) }
        });
        match facts {
            Ok(f) => ScheduleFacts {
                shift: f.shift,
                boundary: (f.has_boundary == 1).then_some(f.boundary),
                trained: SigmaRange { low: Sigma(f.trained_low), high: Sigma(f.trained_high) },
            },
            Err(error) => {
                // No schedule works with this shift, which the next call says.
                tracing::error!("{}", super::Chain::line(&error));
                ScheduleFacts { shift: f64::NAN, boundary: None, trained: SigmaRange::ALL }
            }
        }
    }

    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        let (image, end_image) = (input.image.as_ref().map(Lent::new), input.end_image.as_ref().map(Lent::new));
        let given = RollConditionInput {
            prompt: RollStr::lend(&input.prompt),
            image: lent(&image),
            end_image: lent(&end_image),
            frames: input.frames,
            height: input.size[0],
            width: input.size[1],
        };
        let made: RollConditioning = self.object.call("encode", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.diffusion.encode)(state, &given, out, error) }
        })?;
        // SAFETY: all four are ours, and each is taken once, whatever happens to the others.
        let (context, [channels, image_tokens, first_frame]) = unsafe {
            let rest = [made.channels, made.image_tokens, made.first_frame];
            (made.context.take(), rest.map(|t| t.take_option()))
        };
        let blame = |tensor| self.object.blame("encode", tensor);
        Ok(Conditioning {
            context: self.object.blame("encode", context)?,
            channels: blame(channels)?,
            image_tokens: blame(image_tokens)?,
            first_frame: blame(first_frame)?,
            latent_shape: made.latent_shape,
        })
    }

    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let option = |t: &Option<Tensor>| t.as_ref().map(Lent::new);
        let (x, context) = (Lent::new(latents), Lent::new(&conditioning.context));
        let (channels, tokens) = (option(&conditioning.channels), option(&conditioning.image_tokens));
        let first = option(&conditioning.first_frame);
        let conditioning = RollConditioning {
            context: *context.get(),
            channels: lent(&channels),
            image_tokens: lent(&tokens),
            first_frame: lent(&first),
            latent_shape: conditioning.latent_shape,
        };
        let input = RollVelocityInput {
            latents: x.get(),
            timestep: timestep.0,
            conditioning: &conditioning,
            adapter: (adapter == Adapter::On).into(),
            record: grad.is_on().into(),
        };
        let given = self.object.call("velocity", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.diffusion.velocity)(state, &input, out, error) }
        })?;
        self.value("velocity", given, Some(latents))
    }

    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let x = Lent::new(latents);
        let given = self.object.call("decode", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.diffusion.decode)(state, x.get(), grad.is_on().into(), out, error) }
        })?;
        self.value("decode", given, Some(latents))
    }

    fn encoding_key(&self) -> Result<Option<String>> {
        let told = self.object.call("encoding_key", |t, state, out, error| match t.diffusion.encoding_key {
            // SAFETY: the arguments live during the call.
            Some(encoding_key) => unsafe { encoding_key(state, out, error) },
            None => OK,
        });
        // SAFETY: ours, taken once.
        unsafe { self.object.source.key("encoding_key", told?) }
    }

    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        let frames = Lent::new(frames);
        let given: RollTensor = self.object.call("encode_video", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.diffusion.encode_video)(state, frames.get(), out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.object.blame("encode_video", unsafe { given.take() })
    }
}
