//! The text tower, without gradient.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor as Burn, TensorData};
use roll_backends::{Tape, Weights, to_host};
use roll_core::contain::contain;
use roll_core::tokenizer_json::{Growth, LIMIT};
use roll_core::{Error, Result, files};
use tokenizers::{Tokenizer, TruncationParams};

use super::config::{ModelConfig, TextConfig};
use super::files::Tensors;
use super::tower::{Layer, Shape, norm, pair, scope};

/// Turns texts into embeddings.
pub struct TextTower {
    tokenizer: Arc<Tokenizer>,
    growth: Growth,
    weights: Weights,
    layers: Vec<Layer>,
    config: TextConfig,
    device: Device,
}

impl TextTower {
    /// That of a directory.
    pub fn load(directory: &Path, tensors: &Tensors, config: &ModelConfig, device: &Device) -> Result<Self> {
        let (projection, config) = (config.projection_dim, config.text_config.clone());
        let width = config.hidden_size;
        let mut wanted = vec![
            ("text_model.embeddings.token_embedding.weight".to_string(), vec![config.vocab_size, width]),
            (
                "text_model.embeddings.position_embedding.weight".to_string(),
                vec![config.max_position_embeddings, width],
            ),
            ("text_projection.weight".to_string(), vec![projection, width]),
        ];
        wanted.extend(pair("text_model.final_layer_norm", &[width]));
        let shape = Shape {
            width,
            hidden: config.intermediate_size,
            heads: config.num_attention_heads,
            activation: config.hidden_act,
            eps: config.layer_norm_eps,
            causal: true,
        };
        let layer = |i| Layer::load(tensors, format!("text_model.encoder.layers.{i}"), shape, 1, device);
        let (tokenizer, growth) = tokenizer(&directory.join("tokenizer.json"), config.max_position_embeddings)?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            growth,
            weights: tensors.weights(&wanted, device)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            config,
            device: device.clone(),
        })
    }

    /// The ids of a text, begun and ended as the model was trained; cut to its positions.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let failed = |problem: String| Error::Unsupported(format!("cannot tokenize a text: {problem}"));
        self.growth.check(text).map_err(failed)?;
        let (tokenizer, text) = (Arc::clone(&self.tokenizer), text.to_string());
        let encoding = contain(LIMIT, move || tokenizer.encode(text, true)).map_err(failed)?;
        Ok(encoding.map_err(|e| failed(e.to_string()))?.get_ids().to_vec())
    }

    /// The embedding of a text, as long as the projection is wide, of any length.
    pub fn embed(&self, text: &str) -> Result<Vec<f32>> {
        let mut ids = self.tokens(text)?;
        if let Some(odd) = ids.iter().find(|id| **id as usize >= self.config.vocab_size) {
            let problem = format!("its tokenizer gave {odd}, but the vocabulary has {} tokens", self.config.vocab_size);
            return Err(Error::Unsupported(format!("CLIP's text tower: {problem}")));
        }
        // Later tokens change nothing at the end of the text, which is the embedding.
        ids.truncate(self.end(&ids)? + 1);
        let (tokens, tape) = (ids.len(), Tape::off());
        let scope = scope(&self.weights, &tape);
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
        Ok(to_host(scope.linear(last, "text_projection")?)?.to_f32_vec())
    }

    /// Where the text ends: at the first end token. Files of before 2023 call it 2, and mean the largest id.
    fn end(&self, ids: &[u32]) -> Result<usize> {
        let end = match self.config.eos_token_id {
            Some(2) | None => {
                ids.iter().enumerate().max_by_key(|(i, id)| (**id, std::cmp::Reverse(*i))).map(|(i, _)| i)
            }
            Some(end) => ids.iter().position(|id| *id == end),
        };
        end.ok_or_else(|| {
            let end = self.config.eos_token_id;
            Error::Unsupported(format!("CLIP's text tower: its tokenizer gives {ids:?}, without the end token {end:?}"))
        })
    }
}

fn tokenizer(path: &Path, positions: usize) -> Result<(Tokenizer, Growth)> {
    let bytes = files::read(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
    let wrong = |problem: String| Error::bad_file(path, format!("no tokenizer.json: {problem}"));
    let growth = Growth::of(&bytes).map_err(wrong)?;
    let tokenizer = contain(LIMIT, move || Tokenizer::from_bytes(bytes)).map_err(wrong)?;
    let mut tokenizer = tokenizer.map_err(|e| wrong(e.to_string()))?;
    let cut = TruncationParams { max_length: positions, ..Default::default() };
    tokenizer.with_padding(None);
    tokenizer.with_truncation(Some(cut)).map_err(|e| wrong(format!("cannot cut texts to {positions} tokens: {e}")))?;
    Ok((tokenizer, growth))
}
