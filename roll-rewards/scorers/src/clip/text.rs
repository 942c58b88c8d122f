//! The text tower: encodes a text as an embedding, for inference only.

use std::path::Path;
use std::sync::Arc;

use burn_tensor::{Device, Int, Tensor as Burn, TensorData};
use roll_backends::{Tape, Weights, to_host};
use roll_core::{Error, Result};
use roll_external::contain::contain;
use roll_external::files;
use roll_external::tokenizer_json::{Growth, LIMIT};
use serde_json::Value as Json;
use tokenizers::{Tokenizer, TruncationParams};

use super::config::{Family, ModelConfig, TextConfig};
use super::files::{Tensors, read_json};
use super::tower::{Layer, TowerDims, frozen_scope, norm, weight_and_bias};

/// The end token that configurations from before 2023 declare, although the end token's id is the largest of the
/// vocabulary.
const WRONG_END_TOKEN: u32 = 2;

/// Encodes texts as embeddings.
pub struct TextTower {
    tokenizer: Arc<Tokenizer>,
    /// Bound on the length that the tokenizer's normalizer adds to a text.
    growth: Growth,
    weights: Weights,
    layers: Vec<Layer>,
    /// Name of the final projection.
    projection: &'static str,
    /// SigLIP's padding token; CLIP's texts are not padded.
    padding: Option<u32>,
    config: TextConfig,
    device: Device,
}

impl TextTower {
    /// Loads the text tower of a model directory.
    pub fn load(directory: &Path, tensors: &Tensors, config: &ModelConfig, device: &Device) -> Result<Self> {
        let (family, outputs, config) = (config.family, config.projection_dim, config.text_config.clone());
        let width = config.hidden_size;
        let mut wanted = vec![
            ("text_model.embeddings.token_embedding.weight".to_string(), vec![config.vocab_size, width]),
            (
                "text_model.embeddings.position_embedding.weight".to_string(),
                vec![config.max_position_embeddings, width],
            ),
        ];
        let projection = match family {
            Family::Clip => "text_projection",
            Family::Siglip => "text_model.head",
        };
        let [weight, bias] = weight_and_bias(projection, &[outputs, width]);
        wanted.push(weight);
        if family == Family::Siglip {
            wanted.push(bias);
        }
        wanted.extend(weight_and_bias("text_model.final_layer_norm", &[width]));
        let dims = TowerDims {
            width,
            hidden: config.intermediate_size,
            heads: config.num_attention_heads,
            activation: config.hidden_act,
            eps: config.layer_norm_eps,
            is_causal: family == Family::Clip,
        };
        // Texts differ in length: `Layer::run` receives the number of tokens of each.
        let tokens_per_item = 1;
        let layer = |i| Layer::load(tensors, format!("text_model.encoder.layers.{i}"), dims, tokens_per_item, device);
        let (tokenizer, growth) = open_tokenizer(&directory.join("tokenizer.json"), config.max_position_embeddings)?;
        let padding = match family {
            Family::Clip => None,
            Family::Siglip => Some(padding_token(&tokenizer, directory, &config)?),
        };
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            growth,
            projection,
            padding,
            weights: tensors.weights(&wanted, device)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            config,
            device: device.clone(),
        })
    }

    /// Converts a text into ids with the model's start and end tokens. The ids are cut to the model's number of
    /// positions, and padded to it for SigLIP.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let failed = |problem: String| Error::Unsupported(format!("cannot tokenize a text: {problem}"));
        self.growth.check(text).map_err(failed)?;
        let (tokenizer, text) = (Arc::clone(&self.tokenizer), text.to_string());
        let add_special_tokens = true;
        let encoding = contain(LIMIT, move || tokenizer.encode(text, add_special_tokens)).map_err(failed)?;
        let mut ids = encoding.map_err(|e| failed(e.to_string()))?.get_ids().to_vec();
        if let Some(padding) = self.padding {
            ids.resize(self.config.max_position_embeddings, padding);
        }
        Ok(ids)
    }

    /// Returns the embedding of a text, as wide as the projection and not normalised.
    pub fn embed(&self, text: &str) -> Result<Vec<f32>> {
        let mut ids = self.tokens(text)?;
        if let Some(invalid_id) = ids.iter().find(|id| **id as usize >= self.config.vocab_size) {
            let problem =
                format!("its tokenizer gave {invalid_id}, but the vocabulary has {} tokens", self.config.vocab_size);
            return Err(Error::Unsupported(format!("the text tower: {problem}")));
        }
        // CLIP's embedding is read at the end token. Attention is causal, so tokens after it are left out.
        if self.padding.is_none() {
            ids.truncate(self.end_position(&ids)? + 1);
        }
        let (tokens, tape) = (ids.len(), Tape::off());
        let scope = frozen_scope(&self.weights, &tape);
        let indices = TensorData::new(ids.iter().map(|id| *id as i32).collect::<Vec<_>>(), [tokens]);
        let indices = Burn::<1, Int>::from_data(indices, &self.device);
        let words = scope.weight::<2>("text_model.embeddings.token_embedding.weight")?.select(0, indices);
        let positions = scope.weight::<2>("text_model.embeddings.position_embedding.weight")?.narrow(0, 0, tokens);
        let mut x = words + positions;
        for layer in &self.layers {
            x = layer.run(x, tokens, &tape)?;
        }
        let last = x.narrow(0, tokens - 1, 1);
        let last = norm(&scope, last, "text_model.final_layer_norm", self.config.layer_norm_eps)?;
        Ok(to_host(scope.linear(last, self.projection)?)?.to_f32_vec())
    }

    /// Returns the position of the first end token.
    fn end_position(&self, ids: &[u32]) -> Result<usize> {
        let eos_token_id = self.config.eos_token_id;
        let position = match eos_token_id {
            // The first position of the largest id.
            Some(WRONG_END_TOKEN) | None => {
                ids.iter().enumerate().max_by_key(|(i, id)| (**id, std::cmp::Reverse(*i))).map(|(i, _)| i)
            }
            Some(eos) => ids.iter().position(|id| *id == eos),
        };
        position.ok_or_else(|| {
            Error::Unsupported(format!(
                "CLIP's text tower: its tokenizer gives {ids:?}, without the end token {eos_token_id:?}"
            ))
        })
    }
}

/// The padding token: `pad_token` of `tokenizer_config.json`, or `pad_token_id` of `config.json`.
fn padding_token(tokenizer: &Tokenizer, directory: &Path, config: &TextConfig) -> Result<u32> {
    let path = directory.join("tokenizer_config.json");
    let written: Json = if path.exists() { read_json(&path)? } else { Json::Null };
    let token = &written["pad_token"];
    match token["content"].as_str().or(token.as_str()) {
        Some(token) => tokenizer
            .token_to_id(token)
            .ok_or_else(|| Error::bad_file(&path, format!("`pad_token` is {token}, which tokenizer.json has not"))),
        None => config.pad_token_id.ok_or_else(|| Error::bad_file(directory, "no file names a `pad_token`")),
    }
}

/// Reads `tokenizer.json`. The tokenizer cuts texts to `positions` tokens and does not pad them.
fn open_tokenizer(path: &Path, positions: usize) -> Result<(Tokenizer, Growth)> {
    let bytes = files::read_filled(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
    let invalid = |problem: String| Error::bad_file(path, format!("no tokenizer.json: {problem}"));
    let growth = Growth::of(&bytes).map_err(invalid)?;
    let tokenizer = contain(LIMIT, move || Tokenizer::from_bytes(bytes)).map_err(invalid)?;
    let mut tokenizer = tokenizer.map_err(|e| invalid(e.to_string()))?;
    let truncation = TruncationParams { max_length: positions, ..Default::default() };
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(Some(truncation))
        .map_err(|e| invalid(format!("cannot cut texts to {positions} tokens: {e}")))?;
    Ok((tokenizer, growth))
}
