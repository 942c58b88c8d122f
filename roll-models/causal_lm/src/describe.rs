//! Describes the weights of language models for `roll inspect`.

use roll_network::known::{KnownNetworks, NetworkFacts};
use roll_network::weights::Checkpoint;

roll_core::inventory::submit! {
    KnownNetworks { describe: language_model }
}

/// The embeddings of tokens, by the names of Hugging Face.
const EMBEDDINGS: &str = "model.embed_tokens.weight";

fn language_model(weights: &Checkpoint) -> Option<NetworkFacts> {
    let is_block = |i: usize| weights.contains(&format!("model.layers.{i}.input_layernorm.weight"));
    let &[vocabulary, width] = weights.info(EMBEDDINGS)?.shape.as_slice() else { return None };
    let blocks = (0..).take_while(|i| is_block(*i)).count();
    let kind = weights.config_json().and_then(|config| Some(config.get("model_type")?.as_str()?.to_string()));
    let kind = kind.unwrap_or_else(|| "unknown: no config.json beside it".into());
    let sizes = format!("{blocks} of width {width}, {vocabulary} tokens");
    (blocks > 0).then(|| NetworkFacts::new("language model", [("kind", kind), ("blocks", sizes)]))
}
