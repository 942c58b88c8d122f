//! The case's networks, and a model whose conditioning is given.

use std::collections::BTreeMap;

use roll_core::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Grad, Model, ParameterSpec, Pullback, Result,
    ScheduleFacts, StateDict, Tensor, Timestep,
};
use roll_wan::dit::Dit;
use roll_wan::vae::{Chunking, Tiling, Vae};
use roll_wan::{Parts, Settings, Wan};

use crate::case::{Case, Outcome};
use crate::dit::{Lora, Model as Shape, attach_lora, network};

/// Hard-coded in the reference.
const BOUNDARY: f64 = 0.9;

/// The networks; the high-noise expert is frozen unless it has an adapter, `high_lora`.
pub fn load(case: &Case, shape: &Shape, lora: &Lora, high_lora: Option<&StateDict>) -> Outcome<Box<dyn Model>> {
    let dit = |file: &str| -> Outcome<Dit> { network(&case.tensors(file)?, shape, case) };
    let mut high = dit("dit_high.safetensors")?;
    high_lora.map(|weights| attach_lora(&mut high, weights, lora)).transpose()?;
    let mut low = dit("dit_low.safetensors")?;
    attach_lora(&mut low, &case.tensors("lora.safetensors")?, lora)?;
    let vae = Vae::load(&case.tensors("vae.safetensors")?, case.device())?;
    let settings = Settings {
        shift: None,
        boundary: Some(BOUNDARY),
        uses_end_image: false,
        // The tiles of the reference's decode, in latent pixels.
        chunking: Chunking { tiling: Some(Tiling { size: [34, 34], stride: [18, 16] }), ..Chunking::default() },
    };
    Ok(Box::new(Wan::new(Parts { dit: high, dit2: Some(low), vae, text: None, clip: None }, settings)))
}

/// A model with one conditioning, whatever the sample.
pub struct Conditioned {
    model: Box<dyn Model>,
    facts: ScheduleFacts,
    pub conditioning: Conditioning,
}

impl Conditioned {
    pub fn new(mut model: Box<dyn Model>, conditioning: Conditioning) -> Outcome<Self> {
        let facts = model.as_diffusion().ok_or("not a diffusion model")?.schedule();
        Ok(Self { model, facts, conditioning })
    }

    pub fn diffusion(&mut self) -> Result<&mut dyn DiffusionModel> {
        self.model.as_diffusion().ok_or_else(|| Error::Misuse("the case's model is a diffusion model".into()))
    }
}

impl Model for Conditioned {
    fn parameters(&self) -> &[ParameterSpec] {
        self.model.parameters()
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.model.read_parameters(out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.model.write_parameters(values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.model.take_gradients(add_into)
    }
    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.model.export_adapter()
    }
    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.model.import_adapter(files)
    }
}

impl DiffusionModel for Conditioned {
    fn schedule(&self) -> ScheduleFacts {
        self.facts
    }
    fn encode(&mut self, _input: &ConditionInput) -> Result<Conditioning> {
        Ok(self.conditioning.clone())
    }
    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.diffusion()?.velocity(latents, timestep, conditioning, adapter, grad)
    }
    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.diffusion()?.decode(latents, grad)
    }
    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        self.diffusion()?.encode_video(frames)
    }
}
