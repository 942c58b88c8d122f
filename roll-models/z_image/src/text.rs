//! Text features: the states of a Qwen3 language model before its last block.

use std::path::Path;
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::WeightStore;
use roll_causal_lm::{LmConfig, Network, Tokenizer};
use roll_core::{Adapter, Error, Result, Tensor};
use roll_external::files;
use roll_network::headers::check_tensors;
use roll_network::weights::{Checkpoint, Streamed};

/// Number of tokens to which a templated prompt is cut.
pub const MAX_TOKENS: usize = 512;

/// Returns the text that is encoded for a prompt: one user turn and an opened assistant turn, without system turn and
/// without think block.
pub fn templated(prompt: &str) -> String {
    format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
}

/// The language model that encodes prompts. Its last block is neither loaded nor run.
pub struct TextEncoder {
    network: Network,
    /// Number of blocks that run: all but the last.
    blocks: usize,
}

/// The encoder with its tokenizer.
pub struct PromptEncoder {
    /// Converts text into ids.
    pub tokenizer: Tokenizer,
    /// Converts ids into features.
    pub encoder: TextEncoder,
    /// Number of tokens to which a templated prompt is cut, usually [`MAX_TOKENS`].
    pub max_tokens: usize,
}

/// Reads the sizes of a language model from the `config.json` of its directory.
pub fn read_config(file: &Path) -> Result<LmConfig> {
    let json = files::read_filled(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
    LmConfig::parse(&json).map_err(|problem| Error::bad_file(file, problem))
}

impl TextEncoder {
    /// Creates an encoder that streams the weights of `checkpoint` block by block whenever it encodes; names are
    /// Hugging Face's. Fails if a needed weight is missing or has another shape. `products` is the dtype of matrix
    /// products: f32, or bf16 accumulated in f32.
    pub fn streamed(config: LmConfig, checkpoint: &Checkpoint, products: DType, device: &Device) -> Result<Self> {
        let config = without_last_block(config)?;
        check_tensors(checkpoint, &needed(&config))?;
        let blocks = (0..config.layers).map(|i| format!("model.layers.{i}."));
        let order = ["model.embed_tokens.".to_string()].into_iter().chain(blocks).collect();
        let store = Streamed::new(checkpoint.clone(), device).with_prefetch_order(order);
        Self::with_store(config, Arc::new(store), products)
    }

    /// Creates an encoder whose weights lie in `store`. `config` is without the last block.
    fn with_store(config: LmConfig, store: Arc<dyn WeightStore>, products: DType) -> Result<Self> {
        let blocks = config.layers;
        Ok(Self { network: Network::with_store(config, store).with_products(products), blocks })
    }

    /// Sizes of the language model, without its last block.
    pub fn config(&self) -> &LmConfig {
        self.network.config()
    }

    /// Returns the features of each token sequence, f32 `[L, dim]`. The weights are read once for all sequences. Fails
    /// on an empty sequence, an id outside the vocabulary and a sequence longer than the model's context.
    pub fn encode(&self, sequences: &[Vec<u32>]) -> Result<Vec<Tensor>> {
        let (rows, columns) = (sequences.len(), sequences.iter().map(Vec::len).max().unwrap_or(0));
        if sequences.iter().any(Vec::is_empty) {
            return Err(Error::Misuse("a prompt to encode has no tokens; a templated prompt has some".into()));
        }
        let padded = sequences.iter().flat_map(|ids| padded(ids.iter().map(|id| i64::from(*id)), columns));
        let mask = sequences.iter().flat_map(|ids| padded_mask(ids.len(), columns));
        let (tokens, mask) = (
            Tensor::new(padded.collect::<Vec<i64>>(), [rows, columns])?,
            Tensor::new(mask.collect(), [rows, columns])?,
        );
        let states = self.network.states_after(self.blocks, &tokens, &mask, Adapter::Off)?;
        let (values, dim) = (states.f32s()?, self.config().dim);
        let features = sequences.iter().enumerate().map(|(row, ids)| {
            let start = row * columns * dim;
            Tensor::new(values[start..start + ids.len() * dim].to_vec(), [ids.len(), dim])
        });
        features.collect()
    }
}

/// Fills `ids` up to `columns` with zeros, which are masked.
fn padded(ids: impl Iterator<Item = i64>, columns: usize) -> impl Iterator<Item = i64> {
    ids.chain(std::iter::repeat(0)).take(columns)
}

/// 1 for each of `len` tokens, then 0 up to `columns`.
fn padded_mask(len: usize, columns: usize) -> impl Iterator<Item = f32> {
    (0..columns).map(move |i| if i < len { 1.0 } else { 0.0 })
}

/// The sizes of the model without its last block and without an output layer of its own, which features do not need.
fn without_last_block(config: LmConfig) -> Result<LmConfig> {
    let Some(layers) = config.layers.checked_sub(1).filter(|layers| *layers > 0) else {
        let problem = format!("the text encoder has {} blocks: expected two or more", config.layers);
        return Err(Error::Unsupported(problem));
    };
    let windows = config.windows[..layers].to_vec();
    Ok(LmConfig { layers, windows, tied: true, ..config })
}

/// Names and shapes of the weights that features need.
fn needed(config: &LmConfig) -> Vec<(String, Vec<usize>)> {
    let mut weights = config.weights();
    weights.retain(|(name, _)| name != "model.norm.weight");
    weights
}

impl PromptEncoder {
    /// Returns the ids of the templated prompt, cut at the end.
    pub fn ids(&self, prompt: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(&templated(prompt))?;
        if ids.len() > self.max_tokens {
            let (found, limit) = (ids.len(), self.max_tokens);
            tracing::warn!("a prompt has {found} tokens with its template and is cut to {limit}: {prompt:?}");
            ids.truncate(limit);
        }
        Ok(ids)
    }

    /// Returns the features of each prompt, f32 `[L, dim]`; L is the number of the prompt's tokens, template included.
    pub fn encode(&self, prompts: &[String]) -> Result<Vec<Tensor>> {
        let sequences: Vec<_> = prompts.iter().map(|prompt| self.ids(prompt)).collect::<Result<_>>()?;
        self.encoder.encode(&sequences)
    }
}
