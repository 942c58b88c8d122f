//! The weights of the network before and after its training.

use std::collections::BTreeMap;
use std::path::Path;

use rand_distr::{Distribution, StandardNormal};
use roll_core::{DType, Error, Noise, Purpose, Result, StateDict, Tensor};
use roll_causal_lm::LmConfig;
use roll_network::weights::{Checkpoint, save_safetensors};
use serde_json::{Value, json};

use crate::World;
use crate::tokenizer::{END, vocabulary};

/// Standard deviation of the initial embedding, which is also the output layer.
const EMBEDDING: f64 = 0.1;

/// Returns the contents of `config.json`.
pub fn config(world: World) -> Value {
    json!({
        "model_type": "llama", "vocab_size": vocabulary(world), "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "max_position_embeddings": 2048,
        "eos_token_id": END,
    })
}

/// Writes initial weights: normal with variance 1 / inputs, and 1 / (2 * layers * inputs) for the layers that add to
/// the residual stream. Norms are 1.
pub fn untrained(path: &Path, world: World, noise: &Noise) -> Result<()> {
    let config =
        LmConfig::parse(config(world).to_string().as_bytes()).map_err(|problem| Error::bad_file(path, problem))?;
    let mut state = StateDict::new();
    for (i, (name, shape)) in config.weights().into_iter().enumerate() {
        let mut rng = noise.generator(Purpose::Parameters, 0, i as u64);
        let scale = match name.as_str() {
            _ if shape.len() == 1 => None,
            "model.embed_tokens.weight" => Some(EMBEDDING),
            _ => {
                let adds = name.contains("o_proj") || name.contains("down_proj");
                let depth = if adds { (2 * config.layers) as f64 } else { 1.0 };
                Some((shape[1] as f64 * depth).sqrt().recip())
            }
        };
        let mut draw = || scale.map_or(1.0, |s| s as f32 * Distribution::<f32>::sample(&StandardNormal, &mut rng));
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw()).collect();
        state.insert(name, Tensor::new(values, shape)?);
    }
    Ok(save_safetensors(path, &state, &BTreeMap::new())?)
}

/// Writes the weights in `from` to `to`, rounded to bf16.
pub fn rounded(from: &Path, to: &Path) -> Result<()> {
    let state = Checkpoint::open(from)?.all()?;
    let rounded: Result<StateDict> =
        state.into_iter().map(|(name, tensor)| Ok((name, tensor.to_float(DType::Bf16)?))).collect();
    Ok(save_safetensors(to, &rounded?, &BTreeMap::new())?)
}
