//! Forwarding of the model traits, for types that wrap a model and change some of its methods.
//!
//! Most methods of [`Model`](crate::Model) and [`DiffusionModel`](crate::DiffusionModel) have defaults that mean "this
//! model cannot", so a wrapper that forgets one takes the capability away without a word. A wrapper therefore forwards
//! by exclusion: it names the methods that it writes itself, and gets all others.
//!
//! The lists below are the only ones. A test compares them with the traits, and `clippy::missing_trait_methods`, denied
//! on an `impl`, turns a default that a wrapper would inherit into an error.

/// Inside `impl Model for Wrapper`: forwards every method to `inner`, but those after `except`, which the wrapper
/// writes itself.
///
/// ```
/// use roll_core::{Model, Result, delegate_model};
///
/// /// A model whose parameters cannot be changed.
/// struct Frozen(Box<dyn Model>);
///
/// #[deny(clippy::missing_trait_methods)]
/// impl Model for Frozen {
///     delegate_model!(self => self.0; except write_parameters);
///
///     fn write_parameters(&mut self, _values: &[f32]) -> Result<()> {
///         Err(roll_core::Error::Unsupported("this model is frozen".into()))
///     }
/// }
/// ```
#[macro_export]
macro_rules! delegate_model {
    ($self:ident => $inner:expr) => { $crate::delegate_model!($self => $inner; except); };
    ($self:ident => $inner:expr; except $($own:ident),* $(,)?) => {
        $crate::delegate_model!(@parameters [$($own)*] $self, $inner);
        $crate::delegate_model!(@parameter_count [$($own)*] $self, $inner);
        $crate::delegate_model!(@read_parameters [$($own)*] $self, $inner);
        $crate::delegate_model!(@write_parameters [$($own)*] $self, $inner);
        $crate::delegate_model!(@take_gradients [$($own)*] $self, $inner);
        $crate::delegate_model!(@parts [$($own)*] $self, $inner);
        $crate::delegate_model!(@deliver_gradients [$($own)*] $self, $inner);
        $crate::delegate_model!(@device_updates [$($own)*] $self, $inner);
        $crate::delegate_model!(@weight_placement [$($own)*] $self, $inner);
        $crate::delegate_model!(@token_ranks [$($own)*] $self, $inner);
        $crate::delegate_model!(@as_diffusion [$($own)*] $self, $inner);
        $crate::delegate_model!(@as_language [$($own)*] $self, $inner);
        $crate::delegate_model!(@export_adapter [$($own)*] $self, $inner);
        $crate::delegate_model!(@import_adapter [$($own)*] $self, $inner);
    };

    // The wrapper writes it.
    (@parameters [parameters $($rest:ident)*] $($context:tt)*) => {};
    (@parameter_count [parameter_count $($rest:ident)*] $($context:tt)*) => {};
    (@read_parameters [read_parameters $($rest:ident)*] $($context:tt)*) => {};
    (@write_parameters [write_parameters $($rest:ident)*] $($context:tt)*) => {};
    (@take_gradients [take_gradients $($rest:ident)*] $($context:tt)*) => {};
    (@parts [parts $($rest:ident)*] $($context:tt)*) => {};
    (@deliver_gradients [deliver_gradients $($rest:ident)*] $($context:tt)*) => {};
    (@device_updates [device_updates $($rest:ident)*] $($context:tt)*) => {};
    (@weight_placement [weight_placement $($rest:ident)*] $($context:tt)*) => {};
    (@token_ranks [token_ranks $($rest:ident)*] $($context:tt)*) => {};
    (@as_diffusion [as_diffusion $($rest:ident)*] $($context:tt)*) => {};
    (@as_language [as_language $($rest:ident)*] $($context:tt)*) => {};
    (@export_adapter [export_adapter $($rest:ident)*] $($context:tt)*) => {};
    (@import_adapter [import_adapter $($rest:ident)*] $($context:tt)*) => {};
    // The first of the wrapper's own is another method.
    (@$method:ident [$other:ident $($rest:ident)*] $($context:tt)*) => {
        $crate::delegate_model!(@$method [$($rest)*] $($context)*);
    };

    (@parameters [] $self:ident, $inner:expr) => {
        fn parameters(&$self) -> &[$crate::ParameterSpec] {
            $inner.parameters()
        }
    };
    (@parameter_count [] $self:ident, $inner:expr) => {
        fn parameter_count(&$self) -> usize {
            $inner.parameter_count()
        }
    };
    (@read_parameters [] $self:ident, $inner:expr) => {
        fn read_parameters(&$self, out: &mut [f32]) -> $crate::Result<()> {
            $inner.read_parameters(out)
        }
    };
    (@write_parameters [] $self:ident, $inner:expr) => {
        fn write_parameters(&mut $self, values: &[f32]) -> $crate::Result<()> {
            $inner.write_parameters(values)
        }
    };
    (@take_gradients [] $self:ident, $inner:expr) => {
        fn take_gradients(&mut $self, add_into: &mut [f32]) -> $crate::Result<()> {
            $inner.take_gradients(add_into)
        }
    };
    (@parts [] $self:ident, $inner:expr) => {
        fn parts(&mut $self) -> ::std::option::Option<&mut dyn $crate::ParameterParts> {
            $inner.parts()
        }
    };
    (@deliver_gradients [] $self:ident, $inner:expr) => {
        fn deliver_gradients(
            &mut $self,
            sink: ::std::option::Option<::std::sync::Arc<dyn $crate::GradientSink>>,
        ) -> bool {
            $inner.deliver_gradients(sink)
        }
    };
    (@device_updates [] $self:ident, $inner:expr) => {
        fn device_updates(&$self) -> ::std::option::Option<::std::boxed::Box<dyn $crate::DeviceUpdates>> {
            $inner.device_updates()
        }
    };
    (@weight_placement [] $self:ident, $inner:expr) => {
        fn weight_placement(&$self) -> ::std::option::Option<$crate::WeightPlacement> {
            $inner.weight_placement()
        }
    };
    (@token_ranks [] $self:ident, $inner:expr) => {
        fn token_ranks(&$self) -> usize {
            $inner.token_ranks()
        }
    };
    (@as_diffusion [] $self:ident, $inner:expr) => {
        fn as_diffusion(&mut $self) -> ::std::option::Option<&mut dyn $crate::DiffusionModel> {
            $inner.as_diffusion()
        }
    };
    (@as_language [] $self:ident, $inner:expr) => {
        fn as_language(&mut $self) -> ::std::option::Option<&mut dyn $crate::LanguageModel> {
            $inner.as_language()
        }
    };
    (@export_adapter [] $self:ident, $inner:expr) => {
        fn export_adapter(
            &$self,
        ) -> $crate::Result<::std::collections::BTreeMap<::std::string::String, $crate::StateDict>> {
            $inner.export_adapter()
        }
    };
    (@import_adapter [] $self:ident, $inner:expr) => {
        fn import_adapter(
            &mut $self,
            files: &::std::collections::BTreeMap<::std::string::String, $crate::StateDict>,
        ) -> $crate::Result<()> {
            $inner.import_adapter(files)
        }
    };
}

/// Inside `impl DiffusionModel for Wrapper`: as [`delegate_model!`](crate::delegate_model). `inner` may end in `?` if
/// all methods that it forwards return a `Result`.
#[macro_export]
macro_rules! delegate_diffusion {
    ($self:ident => $inner:expr) => { $crate::delegate_diffusion!($self => $inner; except); };
    ($self:ident => $inner:expr; except $($own:ident),* $(,)?) => {
        $crate::delegate_diffusion!(@schedule [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@video_unit [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@expect_prompts [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@encode [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@velocity [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@velocities [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@decode [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@encoding_key [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@frame_rate [$($own)*] $self, $inner);
        $crate::delegate_diffusion!(@encode_video [$($own)*] $self, $inner);
    };

    (@schedule [schedule $($rest:ident)*] $($context:tt)*) => {};
    (@video_unit [video_unit $($rest:ident)*] $($context:tt)*) => {};
    (@expect_prompts [expect_prompts $($rest:ident)*] $($context:tt)*) => {};
    (@encode [encode $($rest:ident)*] $($context:tt)*) => {};
    (@velocity [velocity $($rest:ident)*] $($context:tt)*) => {};
    (@velocities [velocities $($rest:ident)*] $($context:tt)*) => {};
    (@decode [decode $($rest:ident)*] $($context:tt)*) => {};
    (@encoding_key [encoding_key $($rest:ident)*] $($context:tt)*) => {};
    (@frame_rate [frame_rate $($rest:ident)*] $($context:tt)*) => {};
    (@encode_video [encode_video $($rest:ident)*] $($context:tt)*) => {};
    (@$method:ident [$other:ident $($rest:ident)*] $($context:tt)*) => {
        $crate::delegate_diffusion!(@$method [$($rest)*] $($context)*);
    };

    (@schedule [] $self:ident, $inner:expr) => {
        fn schedule(&$self) -> $crate::ScheduleFacts {
            $inner.schedule()
        }
    };
    (@video_unit [] $self:ident, $inner:expr) => {
        fn video_unit(&$self) -> $crate::VideoUnit {
            $inner.video_unit()
        }
    };
    (@expect_prompts [] $self:ident, $inner:expr) => {
        fn expect_prompts(&mut $self, prompts: &[::std::string::String]) {
            // An `inner` that fails promises nothing.
            #[allow(clippy::redundant_closure_call)]
            let _ = (|| -> $crate::Result<()> {
                $inner.expect_prompts(prompts);
                Ok(())
            })();
        }
    };
    (@encode [] $self:ident, $inner:expr) => {
        fn encode(&mut $self, input: &$crate::ConditionInput) -> $crate::Result<$crate::Conditioning> {
            $inner.encode(input)
        }
    };
    (@velocity [] $self:ident, $inner:expr) => {
        fn velocity(
            &mut $self,
            latents: &$crate::Tensor,
            timestep: $crate::Timestep,
            conditioning: &$crate::Conditioning,
            adapter: $crate::Adapter,
            grad: $crate::Grad,
        ) -> $crate::Result<($crate::Tensor, ::std::option::Option<$crate::Pullback>)> {
            $inner.velocity(latents, timestep, conditioning, adapter, grad)
        }
    };
    (@velocities [] $self:ident, $inner:expr) => {
        fn velocities(
            &mut $self,
            inputs: &[$crate::VelocityInput<'_>],
            adapter: $crate::Adapter,
            grad: $crate::Grad,
        ) -> $crate::Result<($crate::Tensor, ::std::option::Option<$crate::Pullback>)> {
            $inner.velocities(inputs, adapter, grad)
        }
    };
    (@decode [] $self:ident, $inner:expr) => {
        fn decode(
            &mut $self,
            latents: &$crate::Tensor,
            grad: $crate::Grad,
        ) -> $crate::Result<($crate::Tensor, ::std::option::Option<$crate::Pullback>)> {
            $inner.decode(latents, grad)
        }
    };
    (@encoding_key [] $self:ident, $inner:expr) => {
        fn encoding_key(&$self) -> $crate::Result<::std::option::Option<::std::string::String>> {
            $inner.encoding_key()
        }
    };
    (@frame_rate [] $self:ident, $inner:expr) => {
        fn frame_rate(&$self) -> ::std::option::Option<f64> {
            $inner.frame_rate()
        }
    };
    (@encode_video [] $self:ident, $inner:expr) => {
        fn encode_video(&mut $self, frames: &$crate::Tensor) -> $crate::Result<$crate::Tensor> {
            $inner.encode_video(frames)
        }
    };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::sync::Arc;

    use crate::{
        AdamUpdate, Adapter, ConditionInput, Conditioning, DevicePart, DeviceUpdates, DiffusionModel, Error,
        Generation, Grad, GradientSink, LanguageModel, Model, ParameterParts, ParameterSpec, Pullback, Result,
        Sampling, ScheduleFacts, SigmaRange, StateDict, Tensor, Timestep, TokenStats, VelocityInput, VideoUnit,
        WeightPlacement,
    };

    /// Counts its calls, and has every capability that defaults deny.
    #[derive(Default)]
    struct Everything {
        specs: Vec<ParameterSpec>,
        calls: std::cell::Cell<usize>,
    }

    impl Everything {
        fn called<T>(&self, value: T) -> T {
            self.calls.set(self.calls.get() + 1);
            value
        }
    }

    #[deny(clippy::missing_trait_methods)]
    impl Model for Everything {
        fn parameters(&self) -> &[ParameterSpec] {
            self.called(&self.specs)
        }
        fn parameter_count(&self) -> usize {
            self.called(17)
        }
        fn read_parameters(&self, _out: &mut [f32]) -> Result<()> {
            self.called(Ok(()))
        }
        fn write_parameters(&mut self, _values: &[f32]) -> Result<()> {
            self.called(Ok(()))
        }
        fn take_gradients(&mut self, _add_into: &mut [f32]) -> Result<()> {
            self.called(Ok(()))
        }
        fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
            self.called(());
            Some(self)
        }
        fn deliver_gradients(&mut self, _sink: Option<Arc<dyn GradientSink>>) -> bool {
            self.called(true)
        }
        fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
            self.called(Some(Box::new(Nowhere)))
        }
        fn weight_placement(&self) -> Option<WeightPlacement> {
            self.called(Some(WeightPlacement::Sharded))
        }
        fn token_ranks(&self) -> usize {
            self.called(4)
        }
        fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
            self.called(());
            Some(self)
        }
        fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
            self.called(());
            Some(self)
        }
        fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
            self.called(Ok(BTreeMap::new()))
        }
        fn import_adapter(&mut self, _files: &BTreeMap<String, StateDict>) -> Result<()> {
            self.called(Ok(()))
        }
    }

    /// Updates of no parameters.
    struct Nowhere;

    impl DeviceUpdates for Nowhere {
        fn has_own_memory(&self) -> bool {
            false
        }
        fn accumulate(&mut self) -> Result<()> {
            Ok(())
        }
        fn add(&mut self, _gradients: &[f32]) -> Result<()> {
            Ok(())
        }
        fn discard(&mut self) {}
        fn sum_of_squares(&mut self) -> Result<f64> {
            Ok(0.0)
        }
        fn update(&mut self, _update: &AdamUpdate) -> Result<()> {
            Ok(())
        }
        fn read_moments(&self) -> Result<[Vec<f32>; 2]> {
            Ok([Vec::new(), Vec::new()])
        }
        fn write_moments(&mut self, _moments: [&[f32]; 2]) -> Result<()> {
            Ok(())
        }
        fn part(&self, which: Range<usize>) -> Result<Box<dyn DevicePart>> {
            Err(Error::shape("flat parameters", "[0]", &[which.end]))
        }
    }

    impl ParameterParts for Everything {
        fn read_part(&self, _which: Range<usize>, _out: &mut [f32]) -> Result<()> {
            Ok(())
        }
        fn write_part(&mut self, _which: Range<usize>, _values: &[f32]) -> Result<()> {
            Ok(())
        }
        fn take_gradients_part(&mut self, _which: Range<usize>, _add_into: &mut [f32]) -> Result<()> {
            Ok(())
        }
    }

    impl LanguageModel for Everything {
        fn tokenize(&self, _text: &str) -> Result<Vec<u32>> {
            Ok(Vec::new())
        }
        fn detokenize(&self, _tokens: &[u32]) -> Result<String> {
            Ok(String::new())
        }
        fn generate(&mut self, _prompts: &[Vec<u32>], _sampling: &Sampling) -> Result<Vec<Generation>> {
            Ok(Vec::new())
        }
        fn evaluate(
            &mut self,
            _tokens: &Tensor,
            _mask: &Tensor,
            _adapter: Adapter,
            _grad: Grad,
        ) -> Result<(TokenStats, Option<Pullback>)> {
            Ok((TokenStats { log_probs: Tensor::scalar(0.0), entropy: Tensor::scalar(0.0) }, None))
        }
    }

    #[deny(clippy::missing_trait_methods)]
    impl DiffusionModel for Everything {
        fn schedule(&self) -> ScheduleFacts {
            self.called(ScheduleFacts { shift: 3.0, boundary: None, trained: SigmaRange::ALL })
        }
        fn video_unit(&self) -> VideoUnit {
            self.called(VideoUnit { height: 32, width: 32, frames: 8 })
        }
        fn expect_prompts(&mut self, _prompts: &[String]) {
            self.called(());
        }
        fn encode(&mut self, _input: &ConditionInput) -> Result<Conditioning> {
            self.called(Ok(conditioning()))
        }
        fn velocity(
            &mut self,
            latents: &Tensor,
            _timestep: Timestep,
            _conditioning: &Conditioning,
            _adapter: Adapter,
            _grad: Grad,
        ) -> Result<(Tensor, Option<Pullback>)> {
            self.called(Ok((latents.clone(), None)))
        }
        fn velocities(
            &mut self,
            _inputs: &[VelocityInput<'_>],
            _adapter: Adapter,
            _grad: Grad,
        ) -> Result<(Tensor, Option<Pullback>)> {
            self.called(Ok((Tensor::scalar(0.0), None)))
        }
        fn decode(&mut self, latents: &Tensor, _grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
            self.called(Ok((latents.clone(), None)))
        }
        fn encoding_key(&self) -> Result<Option<String>> {
            self.called(Ok(Some("key".into())))
        }
        fn frame_rate(&self) -> Option<f64> {
            self.called(Some(24.0))
        }
        fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
            self.called(Ok(frames.clone()))
        }
    }

    fn conditioning() -> Conditioning {
        let context = Tensor::scalar(0.0);
        Conditioning { context, channels: None, image_tokens: None, first_frame: None, latent_shape: [1; 4] }
    }

    struct Wrapper(Everything);

    #[deny(clippy::missing_trait_methods)]
    impl Model for Wrapper {
        delegate_model!(self => self.0);
    }

    #[deny(clippy::missing_trait_methods)]
    impl DiffusionModel for Wrapper {
        delegate_diffusion!(self => self.0);
    }

    struct Counts(Everything);

    impl Model for Counts {
        delegate_model!(self => self.0; except as_diffusion, parameter_count);

        fn parameter_count(&self) -> usize {
            23
        }
        fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
            None
        }
    }

    #[test]
    fn a_wrapper_forwards_every_method() {
        let mut wrapper = Wrapper(Everything::default());
        assert!(wrapper.parameters().is_empty() && wrapper.parameter_count() == 17);
        wrapper.read_parameters(&mut []).unwrap();
        wrapper.write_parameters(&[]).unwrap();
        wrapper.take_gradients(&mut []).unwrap();
        assert!(wrapper.parts().is_some() && wrapper.deliver_gradients(None));
        assert!(wrapper.device_updates().is_some());
        assert_eq!(wrapper.weight_placement(), Some(WeightPlacement::Sharded));
        assert_eq!(wrapper.token_ranks(), 4);
        assert!(Model::as_diffusion(&mut wrapper).is_some() && wrapper.as_language().is_some());
        wrapper.import_adapter(&wrapper.export_adapter().unwrap()).unwrap();
        assert_eq!(wrapper.0.calls.take(), 14);

        let (x, conditioning) = (Tensor::scalar(1.0), conditioning());
        assert_eq!(wrapper.schedule().shift, 3.0);
        assert_eq!(wrapper.video_unit().frames, 8);
        wrapper.expect_prompts(&[]);
        wrapper.encode(&ConditionInput::default()).unwrap();
        wrapper.velocity(&x, Timestep(1.0), &conditioning, Adapter::On, Grad::Skip).unwrap();
        wrapper.velocities(&[], Adapter::On, Grad::Skip).unwrap();
        wrapper.decode(&x, Grad::Skip).unwrap();
        assert_eq!(wrapper.encoding_key().unwrap().as_deref(), Some("key"));
        assert_eq!(DiffusionModel::frame_rate(&wrapper), Some(24.0));
        wrapper.encode_video(&x).unwrap();
        assert_eq!(wrapper.0.calls.take(), 10);
    }

    #[test]
    fn a_wrapper_keeps_the_methods_that_it_writes_itself() {
        let mut wrapper = Counts(Everything::default());
        assert_eq!((wrapper.parameter_count(), wrapper.as_diffusion().is_none()), (23, true));
        assert!(wrapper.parts().is_some());
    }

    /// Names of the methods in the block that begins with `head`.
    fn methods(source: &str, head: &str) -> Vec<String> {
        let (_, block) = source.split_once(head).unwrap();
        let (block, _) = block.split_once("\n}").unwrap();
        let names = block.lines().filter_map(|line| line.strip_prefix("    fn ")).filter_map(|l| l.split('(').next());
        names.map(Into::into).collect()
    }

    /// Names that the macro `name` forwards.
    fn forwarded(name: &str) -> Vec<String> {
        let (_, block) = include_str!("delegate.rs").split_once(&format!("macro_rules! {name} {{")).unwrap();
        let (block, _) = block.split_once("\n}").unwrap();
        let call = format!("        $crate::{name}!(@");
        let names = block.lines().filter_map(|line| line.strip_prefix(&*call)).filter(|rest| !rest.starts_with('$'));
        names.filter_map(|rest| rest.split(' ').next()).map(Into::into).collect()
    }

    #[test]
    fn the_macros_forward_exactly_the_methods_of_the_traits() {
        let model = methods(include_str!("model.rs"), "pub trait Model: Send {");
        assert_eq!(forwarded("delegate_model"), model);
        let diffusion = methods(include_str!("diffusion.rs"), "pub trait DiffusionModel {");
        assert_eq!(forwarded("delegate_diffusion"), diffusion);
    }
}
