//! The Wan model as the algorithms see it: experts, VAE and encoders behind the traits of roll-core.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use roll_backends::Parameters;
use roll_core::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Fingerprint, Grad, GradientSink, Model,
    ParameterParts, ParameterSpec, Pullback, Result, ScheduleFacts, Sigma, SigmaRange, StateDict, Tensor, Timestep,
    VelocityInput, WeightPlacement, model::flat,
};

use crate::lora;

use super::adapter;
use super::clip::Clip;
use super::conditioning;
use super::dit::{Dit, Trainable};
use super::tokenizer::Tokenizer;
use super::umt5::Umt5;
use super::vae::{Chunking, Vae};

/// Noise level at which I2V models change experts.
const I2V_BOUNDARY: f64 = 0.9;
/// Likewise for T2V models.
const T2V_BOUNDARY: f64 = 0.875;
/// Channels that tell an I2V model which frames are known.
const MASK_CHANNELS: usize = 4;

/// Name, without extension, of a transformer's weight file in the official repositories.
pub(super) const EXPERT_FILE: &str = "diffusion_pytorch_model";

/// Prompts to embeddings.
pub struct TextEncoder {
    /// Text to ids.
    pub tokenizer: Tokenizer,
    /// Ids to embeddings.
    pub encoder: Umt5,
    /// Rows of an embedding: what a prompt is padded or cut to.
    pub length: usize,
}

impl TextEncoder {
    /// The embedding of `prompt`, `[length, dim]`, rows beyond its tokens zero.
    pub fn encode(&self, prompt: &str) -> Result<Tensor> {
        self.encoder.encode(&self.tokenizer.encode(prompt, self.length)?, self.length)
    }
}

/// The networks of a checkpoint.
pub struct Parts {
    /// The transformer, or the high-noise expert.
    pub dit: Dit,
    /// The low-noise expert.
    pub dit2: Option<Dit>,
    /// Decoder and encoder of the latents.
    pub vae: Vae,
    /// Prompts to embeddings; without it prompts cannot be encoded.
    pub text: Option<TextEncoder>,
    /// Image tokens of Wan2.1 I2V.
    pub clip: Option<Clip>,
}

/// How the networks are used.
#[derive(Clone, Debug)]
pub struct Settings {
    /// See [`ScheduleFacts`].
    pub shift: f64,
    /// Overrides the model's own boundary.
    pub boundary: Option<f64>,
    /// Whether the last frame is given too.
    pub end_image: bool,
    /// Tiling and memory of the VAE.
    pub chunking: Chunking,
}

/// A Wan model.
pub struct Wan {
    experts: Vec<Expert>,
    vae: Vae,
    text: Option<TextEncoder>,
    clip: Option<Clip>,
    schedule: ScheduleFacts,
    end_image: bool,
    chunking: Chunking,
    specs: Vec<ParameterSpec>,
    sources: Option<Sources>,
    placement: Option<WeightPlacement>,
}

/// What encodings are made with.
#[derive(Clone, Debug)]
pub struct Sources {
    /// Files of VAE, text encoder, tokenizer and image encoder.
    pub files: Vec<PathBuf>,
    /// What else they depend on.
    pub settings: String,
}

struct Expert {
    name: &'static str,
    dit: Dit,
    lora: bool,
}

impl Wan {
    /// Puts the networks together; the experts' trainable parameters are already chosen.
    pub fn new(parts: Parts, settings: Settings) -> Self {
        let config = parts.dit.config().clone();
        let own = match config.in_channels == config.out_channels {
            true => T2V_BOUNDARY,
            false => I2V_BOUNDARY,
        };
        let boundary = parts.dit2.as_ref().map(|_| settings.boundary.unwrap_or(own));
        let experts: Vec<_> = [("dit", Some(parts.dit)), ("dit2", parts.dit2)]
            .into_iter()
            .filter_map(|(name, dit)| Some((name, dit?)))
            .map(|(name, dit)| {
                let lora = dit.parameters().is_some_and(|p| p.specs().iter().all(|s| s.name.contains(".lora_")));
                Expert { name, dit, lora }
            })
            .collect();
        let specs = experts.iter().flat_map(Expert::specs).collect();
        let trained = trained_levels(&experts, boundary);
        Self {
            experts,
            vae: parts.vae,
            text: parts.text,
            clip: parts.clip,
            schedule: ScheduleFacts { shift: settings.shift, boundary, trained },
            end_image: settings.end_image,
            chunking: settings.chunking,
            specs,
            sources: None,
            placement: None,
        }
    }

    /// Says where the frozen weights of the experts are.
    pub fn placed(self, placement: WeightPlacement) -> Self {
        Self { placement: Some(placement), ..self }
    }

    /// Tells what encodings are made with, so that they can be kept.
    pub fn with_sources(self, sources: Sources) -> Self {
        Self { sources: Some(sources), ..self }
    }

    /// The number of the expert for `timestep`: at or above the boundary the first, below it the second.
    fn expert(&self, timestep: Timestep) -> usize {
        let low = |boundary| self.experts.len() > 1 && timestep.uses_low_noise(boundary);
        usize::from(self.schedule.boundary.is_some_and(low))
    }

    /// Shape of the latents of a video.
    fn latent_shape(&self, frames: usize, [height, width]: [usize; 2]) -> Result<[usize; 4]> {
        let facts = self.vae.facts();
        let frames = facts.latent_frames(frames)?;
        let [_, ph, pw] = self.experts[0].dit.config().patch;
        let unit = [facts.spatial_stride * ph, facts.spatial_stride * pw];
        if !height.is_multiple_of(unit[0]) || !width.is_multiple_of(unit[1]) {
            return Err(Error::Unsupported(format!(
                "a video of {width}x{height} pixels: this model needs multiples of {}x{}",
                unit[1], unit[0]
            )));
        }
        let [height, width] = facts.latent_size([height, width])?;
        Ok([facts.z_channels, frames, height, width])
    }

    /// Calls `f` with each trained expert and its part of a flat vector.
    fn each_part<T>(
        &self,
        mut flat: T,
        split: impl Fn(T, usize) -> (T, T),
        mut f: impl FnMut(&Expert, T) -> Result<()>,
    ) -> Result<()> {
        for expert in &self.experts {
            let n = expert.specs().map(|s| s.len()).sum();
            let (head, tail) = split(flat, n);
            f(expert, head)?;
            flat = tail;
        }
        Ok(())
    }

    /// Calls `f` with the parameters of each expert that `which` touches, the positions among them, and their part of
    /// the flat vector.
    fn each_of<T>(
        &self,
        which: Range<usize>,
        mut flat: T,
        split: impl Fn(T, usize) -> (T, T),
        f: impl Fn(&Parameters, Range<usize>, T) -> Result<()>,
    ) -> Result<()>
    where
        T: AsRef<[f32]>,
    {
        let expected: usize = self.specs.get(which.clone()).unwrap_or_default().iter().map(ParameterSpec::len).sum();
        if flat.as_ref().len() != expected {
            return Err(Error::shape("part of the parameters", format!("[{expected}]"), &[flat.as_ref().len()]));
        }
        let mut first = 0;
        for parameters in self.experts.iter().filter_map(|e| e.dit.parameters()) {
            let specs = parameters.specs();
            let own = which.start.max(first) - first..which.end.min(first + specs.len()).max(first) - first;
            first += specs.len();
            if own.start < own.end {
                let (head, tail) = split(flat, specs[own.clone()].iter().map(ParameterSpec::len).sum());
                f(parameters, own, head)?;
                flat = tail;
            }
        }
        Ok(())
    }

    fn check_len(&self, found: usize) -> Result<()> {
        let expected = self.parameter_count();
        match found == expected {
            true => Ok(()),
            false => Err(Error::shape("flat parameters", format!("[{expected}]"), &[found])),
        }
    }

    /// Bytes of the trainable parameters that this process keeps: its part, where they are divided among ranks.
    pub fn parameter_bytes(&self) -> usize {
        self.experts.iter().filter_map(|e| e.dit.parameters()).map(Parameters::bytes).sum()
    }

    /// Names of the files that [`Model::export_adapter`] gives.
    pub fn adapter_files(&self) -> Vec<String> {
        self.experts.iter().filter(|e| e.dit.parameters().is_some()).map(|e| self.file_name(e)).collect()
    }

    /// Name of the file that an expert's adapter, or all of its weights, are written to.
    fn file_name(&self, expert: &Expert) -> String {
        let trained = self.experts.iter().filter(|e| e.dit.parameters().is_some()).count();
        let stem = if expert.lora { "adapter" } else { EXPERT_FILE };
        match (trained, expert.name) {
            (1, _) => stem.into(),
            (_, "dit") => format!("{stem}_high_noise"),
            _ => format!("{stem}_low_noise"),
        }
    }
}

/// The noise levels of the experts that have trainable parameters.
fn trained_levels(experts: &[Expert], boundary: Option<f64>) -> SigmaRange {
    let trains = |i: usize| experts.get(i).is_some_and(|e: &Expert| e.dit.parameters().is_some());
    match (boundary.map(Sigma), trains(0), trains(1)) {
        (Some(boundary), true, false) => SigmaRange { low: boundary, ..SigmaRange::ALL },
        (Some(boundary), false, true) => SigmaRange { high: boundary, ..SigmaRange::ALL },
        _ => SigmaRange::ALL,
    }
}

impl Expert {
    fn which(&self) -> lora::Expert {
        if self.name == "dit" { lora::Expert::High } else { lora::Expert::Low }
    }

    fn specs(&self) -> impl Iterator<Item = ParameterSpec> {
        let specs = self.dit.parameters().map(|p| p.specs()).unwrap_or_default();
        specs.iter().map(|s| ParameterSpec { name: format!("{}.{}", self.name, s.name), shape: s.shape.clone() })
    }
}

impl Model for Wan {
    fn weight_placement(&self) -> Option<WeightPlacement> {
        self.placement
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.check_len(out.len())?;
        self.each_part(
            out,
            |flat, n| flat.split_at_mut(n),
            |e, part| e.dit.parameters().map_or(Ok(()), |p| p.read(part)),
        )
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.check_len(values.len())?;
        self.each_part(
            values,
            |flat, n| flat.split_at(n),
            |e, part| e.dit.parameters().map_or(Ok(()), |p| p.write(part)),
        )
    }

    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.check_len(add_into.len())?;
        self.each_part(
            add_into,
            |flat, n| flat.split_at_mut(n),
            |e, part| e.dit.parameters().map_or(Ok(()), |p| p.take_gradients(part)),
        )
    }

    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }

    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        let mut first = 0;
        for parameters in self.experts.iter().filter_map(|e| e.dit.parameters()) {
            parameters.deliver_gradients(sink.clone(), first);
            first += parameters.specs().len();
        }
        true
    }

    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        let mut files = BTreeMap::new();
        for expert in &self.experts {
            let Some(parameters) = expert.dit.parameters() else { continue };
            let mut values = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];
            parameters.read(&mut values)?;
            let state = flat::to_state(parameters.specs(), &values)?;
            let state = match expert.lora {
                true => adapter::to_file(state, expert.dit.lora_scale())?,
                false => state,
            };
            files.insert(self.file_name(expert), state);
        }
        Ok(files)
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        // Everything is read and checked before anything is written.
        let mut parts = Vec::new();
        for expert in &self.experts {
            let Some(parameters) = expert.dit.parameters() else { continue };
            let name = self.file_name(expert);
            // One file for one adapter is that adapter's, whatever it is called.
            let only = files.values().next().filter(|_| files.len() == 1 && self.adapter_files().len() == 1);
            let file = files.get(&name).or(only).ok_or_else(|| {
                let found = files.keys().cloned().collect::<Vec<_>>().join(", ");
                Error::Unsupported(format!(
                    "the adapter has no file `{name}` for expert `{}`; it has: {found}",
                    expert.name
                ))
            })?;
            let state = match expert.lora {
                true => adapter::from_file(&name, file, expert.which(), expert.dit.lora_scale())?,
                false => file.clone(),
            };
            parts.push((parameters.clone(), flat::from_state(parameters.specs(), &state)?));
        }
        for (parameters, values) in parts {
            parameters.write(&values)?;
        }
        Ok(())
    }
}

impl ParameterParts for Wan {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.each_of(which, out, |flat, n| flat.split_at_mut(n), Parameters::read_part)
    }

    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.each_of(which, values, |flat, n| flat.split_at(n), Parameters::write_part)
    }

    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.each_of(which, add_into, |flat, n| flat.split_at_mut(n), Parameters::take_gradients_part)
    }
}

impl DiffusionModel for Wan {
    fn encoding_key(&self) -> Result<Option<String>> {
        let Some(Sources { files, settings }) = &self.sources else { return Ok(None) };
        // Which channels a transformer takes says which conditioning it gets.
        let channels = self.experts[0].dit.config().in_channels;
        let key = Fingerprint::new("wan").text("settings", settings).text("channels", channels);
        files.iter().try_fold(key, |key, file| key.file(file)).map(|key| Some(key.finish()))
    }

    fn schedule(&self) -> ScheduleFacts {
        self.schedule
    }

    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        let latent_shape = self.latent_shape(input.frames, input.size)?;
        for (what, image) in [("image", &input.image), ("end image", &input.end_image)] {
            if let Some(image) = image
                && image.shape() != [3, input.size[0], input.size[1]]
            {
                let expected = format!("[3, {}, {}]", input.size[0], input.size[1]);
                return Err(Error::shape(what, expected, image.shape()));
            }
        }
        let text = self.text.as_ref().ok_or_else(|| {
            Error::Unsupported("prompts need a UMT5 encoder among `model_paths` and a `tokenizer_path`".into())
        })?;
        let config = self.experts[0].dit.config();
        let extra = config.in_channels - config.out_channels;
        let channels = match (extra, &input.image) {
            (0, _) => None,
            (n, Some(image)) if n == MASK_CHANNELS + latent_shape[0] => {
                let end = input.end_image.as_ref().filter(|_| self.end_image);
                Some(conditioning::image_channels(&self.vae, image, end, input.frames, &self.chunking)?)
            }
            (_, None) => {
                return Err(Error::Unsupported(
                    "this is an image-to-video model: it needs an image (`extra_inputs: input_image`)".into(),
                ));
            }
            (n, Some(_)) => {
                return Err(Error::Unsupported(format!("models with {n} conditioning channels are not known")));
            }
        };
        // A model without conditioning channels takes an image as its first latent frame, if its VAE is the 48-channel
        // one that was made for it; the 16-channel text-to-video models take none.
        let first_frame = match (extra, &input.image) {
            (0, Some(image)) if self.vae.facts().spatial_stride == 16 => {
                Some(conditioning::first_frame_latents(&self.vae, image, &self.chunking)?)
            }
            _ => None,
        };
        let image_tokens = match (&self.clip, config.image_dim, &input.image) {
            (Some(clip), Some(_), Some(image)) => Some(clip.encode(image)?),
            _ => None,
        };
        Ok(Conditioning { context: text.encode(&input.prompt)?, channels, image_tokens, first_frame, latent_shape })
    }

    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.experts[self.expert(timestep)].dit.velocity(latents, timestep, conditioning, adapter, grad)
    }

    fn velocities(
        &mut self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let experts: Vec<usize> = inputs.iter().map(|input| self.expert(input.timestep)).collect();
        let (mut values, mut pullbacks) = (vec![None; inputs.len()], Vec::new());
        for (number, expert) in self.experts.iter().enumerate() {
            let places: Vec<usize> = (0..inputs.len()).filter(|i| experts[*i] == number).collect();
            if places.is_empty() {
                continue;
            }
            let own: Vec<VelocityInput<'_>> = places.iter().map(|i| inputs[*i]).collect();
            let (value, pullback) = expert.dit.velocities(&own, adapter, grad)?;
            scatter(&mut values, &places, value)?;
            pullbacks.extend(pullback.map(|pullback| (places, pullback)));
        }
        let count = inputs.len();
        let pull = move |cotangents: &Tensor| {
            let (cotangents, mut pulled) = (cotangents.unstack()?, vec![None; count]);
            for (places, pullback) in pullbacks {
                let own: Vec<Tensor> = places.iter().map(|i| cotangents[*i].clone()).collect();
                scatter(&mut pulled, &places, pullback.pull(&Tensor::stack(&own)?)?)?;
            }
            gathered(pulled)
        };
        Ok((gathered(values)?, grad.is_on().then(|| Pullback::new(pull))))
    }

    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let decoded = self.vae.decode_clamped(latents, &self.chunking, grad)?;
        Ok((decoded.frames, decoded.pullback))
    }

    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        Ok(self.vae.encode_with(frames, &self.chunking, Grad::Skip)?.0)
    }
}

/// Puts the tensors of a stack where they belong.
fn scatter(slots: &mut [Option<Tensor>], places: &[usize], stack: Tensor) -> Result<()> {
    for (place, part) in places.iter().zip(stack.unstack()?) {
        slots[*place] = Some(part);
    }
    Ok(())
}

fn gathered(slots: Vec<Option<Tensor>>) -> Result<Tensor> {
    Tensor::stack(&slots.into_iter().flatten().collect::<Vec<_>>())
}

/// What is trained of the expert `name`.
pub fn trainable(options: &super::WanOptions, trained: &[String], name: &str) -> Trainable {
    match (trained.iter().any(|t| t == name), options.lora_rank) {
        (false, _) => Trainable::Frozen,
        (true, 0) => Trainable::Full,
        (true, rank) => {
            Trainable::Lora { rank, alpha: options.lora_alpha.unwrap_or(rank as f64), targets: options.lora_targets() }
        }
    }
}
