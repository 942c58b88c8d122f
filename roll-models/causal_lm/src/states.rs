//! The network over states instead of token ids: for networks that put other states between the embeddings of words,
//! such as pictures.

use std::collections::HashMap;
use std::sync::Arc;

use burn_tensor::{Device, Tensor as Burn};
use roll_backends::{Chain, ChainRecord, NdTensor, Resident, Segment, Tape, Weight, to_host, weights};
use roll_core::{Error, Grad, Result, Tensor};

use super::block::{Block, Embedding, FinalNorm};
use super::config::LmConfig;
use super::integers;
use super::network::Network;
use super::packed::Packed;

impl Network {
    /// Creates a network from weights that are on `device`, under their Hugging Face names. Fails if a weight is
    /// missing or has another shape. An output layer of its own may be missing: [`Network::head_rows`] then fails.
    pub fn from_weights(config: LmConfig, weights: HashMap<String, Weight>, device: &Device) -> Result<Self> {
        for (name, shape) in config.weights() {
            match weights.get(&name) {
                Some(weight) if weight.shape() == shape => {}
                Some(weight) => {
                    return Err(Error::shape(&name, format!("{shape:?}, as config.json has it"), weight.shape()));
                }
                None if name == config.head_weight() && !config.tied => {}
                None => return Err(Error::Misuse(format!("the weight `{name}` is missing"))),
            }
        }
        Ok(Self::with_store(config, Arc::new(Resident::from_weights(weights, device))))
    }

    /// Returns the embeddings of `ids`, f32 `[N, D]`. Fails on ids outside of the vocabulary.
    pub fn embedded(&self, ids: &[u32]) -> Result<Burn<2>> {
        let mut packed = Packed::default();
        packed.push(ids.iter().map(|id| i64::from(*id)), 0);
        self.check(&packed)?;
        let pass = self.pass(&packed, None, None)?;
        Embedding(pass).forward(&self.unused_state(), &[], &Tape::off())?.rank::<2>()
    }

    /// Runs the blocks and the final norm over the embeddings `x` (f32 `[N, D]`) of one sequence, with `rope` as cosine
    /// and sine of the rotary angles, `[N, head_dim / 2]` each. Returns the states, f32 `[N, D]`, and the record whose
    /// pullback returns the cotangent of `x`.
    pub fn read_embedded(
        &self,
        x: Burn<2>,
        rope: (Burn<2>, Burn<2>),
        grad: Grad,
    ) -> Result<(Burn<2>, Option<ChainRecord>)> {
        let tokens = x.dims()[0];
        // The blocks read spans and angles, not ids.
        let mut packed = Packed::default();
        packed.push(std::iter::repeat_n(0, tokens), 0);
        let pass = self.pass_with(&packed, None, None, rope, None)?;
        let mut segments: Vec<Arc<dyn Segment>> = Vec::new();
        for index in 0..self.config().layers {
            segments.push(Arc::new(Block { index, pass: pass.clone() }));
        }
        segments.push(Arc::new(FinalNorm(pass)));
        let tracks_shared = false;
        let (states, record) =
            Chain::new(segments).forward(NdTensor::from(x), Vec::new(), grad, self.memory(), tracks_shared, None)?;
        Ok((states.rank::<2>()?, record))
    }

    /// Rows of the output layer, f32 `[ids.len(), D]`. Fails on ids outside of the vocabulary, and if the checkpoint
    /// has no output layer.
    pub fn head_rows(&self, ids: &[u32]) -> Result<Tensor> {
        let config = self.config();
        if let Some(id) = ids.iter().find(|id| **id as usize >= config.vocab) {
            return Err(Error::Misuse(format!("the token id {id} is outside the vocabulary of {}", config.vocab)));
        }
        let name = config.head_weight();
        let segment = self.store().segment(&name[..name.len() - "weight".len()])?;
        let rows = integers(ids.iter().map(|id| i64::from(*id)).collect(), self.device());
        let rows = weights::get(&segment, name)?.select(rows)?;
        to_host(rows.cast(burn_tensor::DType::F32))
    }
}
