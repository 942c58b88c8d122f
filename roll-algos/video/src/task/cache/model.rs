//! A diffusion model whose encodings are cached.

use std::collections::BTreeMap;

use roll_core::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Distribution, Error, Grad, LanguageModel, Model,
    ParameterParts, ParameterSpec, Pullback, Result, ScheduleFacts, StateDict, Tensor, Timestep, VelocityInput,
    VideoUnit,
};
use roll_external::Fingerprint;

use super::CacheStore;

/// Wraps a diffusion model. Calls of the encoders go through the cache; all other calls are passed on.
pub struct CachedModel {
    inner: Box<dyn Model>,
    /// Facts of the model, up to `takes_image`: they do not change while it lives.
    schedule: ScheduleFacts,
    unit: VideoUnit,
    frame_rate: Option<f64>,
    takes_image: bool,
    /// See [`DiffusionModel::encoding_key`].
    encoding_key: String,
    store: CacheStore,
}

impl CachedModel {
    /// Wraps `inner`. Returns it unchanged if it is not a diffusion model, or has no key for its encodings.
    pub fn wrap(mut inner: Box<dyn Model>, store: &CacheStore) -> Result<Box<dyn Model>> {
        let key_and_facts = match inner.as_diffusion() {
            Some(model) => {
                let facts = (model.schedule(), model.video_unit(), model.frame_rate(), model.takes_image());
                model.encoding_key()?.map(|key| (key, facts))
            }
            None => None,
        };
        match key_and_facts {
            Some((encoding_key, (schedule, unit, frame_rate, takes_image))) => {
                let store = store.clone();
                Ok(Box::new(Self { inner, schedule, unit, frame_rate, takes_image, encoding_key, store }))
            }
            None => {
                tracing::info!("`data.cache_dir`: the model cannot tell what its encodings depend on; none is kept");
                Ok(inner)
            }
        }
    }

    /// Begins the fingerprint of an encoding of this kind.
    fn fingerprint(&self, kind: &str) -> Fingerprint {
        Fingerprint::new(kind).text("version", env!("CARGO_PKG_VERSION")).text("model", &self.encoding_key)
    }
}

fn diffusion(model: &mut dyn Model) -> Result<&mut dyn DiffusionModel> {
    model.as_diffusion().ok_or_else(|| Error::Misuse("the wrapped model is no diffusion model any more".into()))
}

#[deny(clippy::missing_trait_methods)]
impl Model for CachedModel {
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.inner.take_gradients(add_into)
    }

    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        self.inner.parts()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.inner.parameters()
    }

    fn parameter_count(&self) -> usize {
        self.inner.parameter_count()
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.inner.read_parameters(out)
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.inner.write_parameters(values)
    }

    fn distribution(&self) -> Distribution {
        self.inner.distribution()
    }

    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        self.inner.as_language()
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.inner.export_adapter()
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.inner.import_adapter(files)
    }

    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }
}

#[deny(clippy::missing_trait_methods)]
impl DiffusionModel for CachedModel {
    fn takes_image(&self) -> bool {
        self.takes_image
    }

    fn check_input(&mut self, input: &ConditionInput) -> Result<()> {
        diffusion(self.inner.as_mut())?.check_input(input)
    }

    fn expect_prompts(&mut self, prompts: &[String]) {
        if let Some(inner) = self.inner.as_diffusion() {
            inner.expect_prompts(prompts);
        }
    }

    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        diffusion(self.inner.as_mut())?.velocity(latents, timestep, conditioning, adapter, grad)
    }

    fn velocities(
        &mut self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        diffusion(self.inner.as_mut())?.velocities(inputs, adapter, grad)
    }

    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        diffusion(self.inner.as_mut())?.decode(latents, grad)
    }

    fn encoding_key(&self) -> Result<Option<String>> {
        Ok(Some(self.encoding_key.clone()))
    }

    fn schedule(&self) -> ScheduleFacts {
        self.schedule
    }

    fn video_unit(&self) -> VideoUnit {
        self.unit
    }

    fn frame_rate(&self) -> Option<f64> {
        self.frame_rate
    }

    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        let mut key = self.fingerprint("conditioning").text("prompt", &input.prompt).text("frames", input.frames);
        key = key.text("size", format_args!("{:?}", input.size));
        for (name, image) in [("image", &input.image), ("end image", &input.end_image)] {
            key = match image {
                Some(image) => key.tensor(name, image),
                None => key.text(name, "none"),
            };
        }
        let inner = &mut self.inner;
        let state =
            self.store.get("encodings", &key.finish(), || to_state(diffusion(inner.as_mut())?.encode(input)?))?;
        from_state(state)
    }

    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        let key = self.fingerprint("latents").tensor("frames", frames);
        let inner = &mut self.inner;
        let mut state = self.store.get("latents", &key.finish(), || {
            Ok([(LATENTS.to_string(), diffusion(inner.as_mut())?.encode_video(frames)?)].into())
        })?;
        state.remove(LATENTS).ok_or_else(|| absent(LATENTS))
    }
}

/// Name of the tensor of a clip's latents.
const LATENTS: &str = "latents";
/// Name of the tensor with the shape of the latents to generate.
const SHAPE: &str = "latent_shape";

/// The error of a cached encoding without a tensor that it must have.
fn absent(name: &str) -> Error {
    Error::Misuse(format!("a kept encoding has no tensor `{name}`: empty `data.cache_dir`"))
}

/// The tensors of a conditioning, by name.
fn to_state(conditioning: Conditioning) -> Result<StateDict> {
    let Conditioning { context, channels, image_tokens, first_frame, latent_shape } = conditioning;
    let shape = Tensor::new(latent_shape.map(|n| n as i64).to_vec(), [4])?;
    let mut state = StateDict::from([("context".to_string(), context), (SHAPE.to_string(), shape)]);
    let optional = [("channels", channels), ("image_tokens", image_tokens), ("first_frame", first_frame)];
    state.extend(optional.into_iter().filter_map(|(name, tensor)| Some((name.to_string(), tensor?))));
    Ok(state)
}

/// Restores the result of [`to_state`].
fn from_state(mut state: StateDict) -> Result<Conditioning> {
    let shape = state.remove(SHAPE).ok_or_else(|| absent(SHAPE))?;
    let shape: Vec<usize> = shape.as_slice::<i64>()?.iter().map(|n| *n as usize).collect();
    Ok(Conditioning {
        context: state.remove("context").ok_or_else(|| absent("context"))?,
        channels: state.remove("channels"),
        image_tokens: state.remove("image_tokens"),
        first_frame: state.remove("first_frame"),
        latent_shape: shape.try_into().map_err(|_| absent(SHAPE))?,
    })
}
