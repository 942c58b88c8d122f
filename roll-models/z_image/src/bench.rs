//! The preset of `roll bench`: the published networks with random weights.

use burn_tensor::{DType, Device};
use roll_backends::product_dtype;
use roll_core::{Error, Model, Noise, Result, StateDict};
use roll_network::bench::{BenchFacts, BenchNetworks, BenchPreset, BenchRequest, LORA_RANK, random};
use roll_network::options::KeepAttention;
use roll_network::trainable::Trainable;

use crate::dit::{Dit, PassMemory, PassSettings};
use crate::layout::{Layout, Machine};
use crate::model::{Networks, ZImage, picture_unit};
use crate::options::ZImageOptions;
use crate::plan::{PROMPT_TOKENS, PUBLISHED, Plan, published};
use crate::transformer_file::is_block;
use crate::vae::Vae;

roll_core::inventory::submit! {
    BenchPreset { name: "z-image", model: "z_image", network: Some(PUBLISHED), make: measured }
}

/// Height and width of the picture.
const SIZE: [usize; 2] = [1024, 1024];
/// Shift of the schedule, which no pass depends on.
const SHIFT: f64 = 3.0;

/// The networks, and what is measured of them.
struct Measured {
    request: BenchRequest,
    layout: Layout,
    facts: BenchFacts,
}

fn measured(request: &BenchRequest) -> Result<Box<dyn BenchNetworks>> {
    let mut networks = published();
    let all_layers = networks.dit.layers;
    networks.dit.layers = request.layers_of(all_layers)?;
    let (dtype, size) = (request.dtype.unwrap_or(DType::BF16), request.size.unwrap_or(SIZE));
    networks.stored_dtype = dtype;
    if request.frames.is_some_and(|frames| frames != 1) {
        return Err(Error::config("--frames", "expected 1: the preset is a model of pictures"));
    }
    let unit = picture_unit(&networks.vae);
    if !unit.has_size(size) {
        let problem = format!("must be multiples of {} and {}, found {size:?}", unit.height, unit.width);
        return Err(Error::config("--size", problem));
    }
    let options = ZImageOptions {
        weight_store: request.weight_store,
        weights_dtype: request.weights_dtype(),
        keep_attention: KeepAttention::Of(request.keep_attention),
        ..ZImageOptions::default()
    };
    let input = request.plan_input(1, size);
    let layout = Layout::of(&options, networks, Machine::planned(&input))?;
    let plan = Plan::new(layout.clone(), &input, trainable())?;
    let (dit, vae) = (&layout.networks.dit, &layout.networks.vae);
    let [h, w] = size.map(|n| n / vae.spatial_stride());
    let facts = BenchFacts {
        dim: dit.dim,
        ffn_dim: dit.ffn_dim,
        layers: dit.layers,
        all_layers,
        parameters: dit.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum(),
        dtype,
        frames: 1,
        size,
        tokens: plan.tokens,
        latent_shape: [vae.latent_channels, 1, h, w],
        context: [PROMPT_TOKENS, dit.text_dim],
        more_channels: 0,
        time: plan.time(),
    };
    Ok(Box::new(Measured { request: request.clone(), layout, facts }))
}

/// The trained LoRA.
fn trainable() -> Trainable {
    let targets = ZImageOptions::default().lora_targets();
    Trainable::Lora { rank: LORA_RANK, alpha: LORA_RANK as f64, targets }
}

impl BenchNetworks for Measured {
    fn facts(&self) -> &BenchFacts {
        &self.facts
    }

    fn model(&self, device: &Device, vae_dtype: DType) -> Result<Box<dyn Model>> {
        let (request, dtype) = (&self.request, self.facts.dtype);
        let (config, vae) = (&self.layout.networks.dit, &self.layout.networks.vae);
        let store = random::transformer_store(request, config.weights(), dtype, is_block, device)?;
        let mut dit = Dit::with_store(config.clone(), store).with_settings(PassSettings {
            products: product_dtype(device, dtype),
            fp8_products: request.fp8_products,
            activations: None,
            kept: PassMemory { memory: request.memory(), keeps_attention: request.keep_attention },
        });
        dit.add_trainable(&trainable(), &Noise::new(0), &StateDict::new())?;
        let store = random::resident(vae.weights(), device)?;
        let vae = Vae::with_store(vae.clone(), store).with_decoder_dtype(vae_dtype)?;
        Ok(Box::new(ZImage::new(Networks { dit, vae, text: None }, SHIFT)))
    }
}
