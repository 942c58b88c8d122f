//! The end of SigLIP's image tower: one learned query that attends to all patches of a picture.

use burn_tensor::{Device, Tensor as Burn};
use roll_backends::ops::{self, AttentionOptions};
use roll_backends::{NdTensor, Segment, Tape, Weights};
use roll_core::Result;

use super::files::Tensors;
use super::tower::{Head, TowerDims, activated, frozen_scope, norm, weight_and_bias};

/// Maps `[N * tokens, width]` to embeddings `[N, width]` or to the output of a head: attention, then a feed-forward
/// layer with a residual connection (`SiglipMultiheadAttentionPoolingHead` of `transformers`).
pub struct AttentionPool {
    weights: Weights,
    dims: TowerDims,
    /// Number of tokens per item.
    tokens: usize,
    head: Option<Head>,
}

/// Prefix of the weights of the layer.
const PREFIX: &str = "vision_model.head";
/// Name of the norm before the layer.
const POST_NORM: &str = "vision_model.post_layernorm";

impl AttentionPool {
    /// Loads the layer for items of `tokens` tokens.
    pub fn load(
        tensors: &Tensors,
        dims: TowerDims,
        tokens: usize,
        head: Option<Head>,
        device: &Device,
    ) -> Result<Self> {
        let TowerDims { width, hidden, .. } = dims;
        let mut wanted = vec![
            (format!("{PREFIX}.probe"), vec![1, 1, width]),
            (format!("{PREFIX}.attention.in_proj_weight"), vec![3 * width, width]),
            (format!("{PREFIX}.attention.in_proj_bias"), vec![3 * width]),
        ];
        wanted.extend(weight_and_bias(&format!("{PREFIX}.attention.out_proj"), &[width, width]));
        wanted.extend(weight_and_bias(&format!("{PREFIX}.mlp.fc1"), &[hidden, width]));
        wanted.extend(weight_and_bias(&format!("{PREFIX}.mlp.fc2"), &[width, hidden]));
        for layer_norm in [format!("{PREFIX}.layernorm"), POST_NORM.to_string()] {
            wanted.extend(weight_and_bias(&layer_norm, &[width]));
        }
        Ok(Self { weights: tensors.weights(&wanted, device)?, dims, tokens, head })
    }
}

impl Segment for AttentionPool {
    fn forward(&self, state: &NdTensor, _: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let TowerDims { width, heads, activation, eps, .. } = self.dims;
        let scope = frozen_scope(&self.weights, tape);
        let full_name = |name: &str| format!("{PREFIX}.{name}");
        let x = norm(&scope, state.rank::<2>()?, POST_NORM, eps)?;
        let items = x.dims()[0] / self.tokens;
        // The projections of queries, keys and values are the thirds of one matrix, in this order.
        let weight = scope.weight::<2>(&full_name("attention.in_proj_weight"))?;
        let bias = scope.weight::<1>(&full_name("attention.in_proj_bias"))?;
        let projected = |x: Burn<2>, third: usize| {
            let rows = third * width;
            ops::linear(x, weight.clone().narrow(0, rows, width), Some(bias.clone().narrow(0, rows, width)))
        };
        let q = projected(scope.weight::<3>(&full_name("probe"))?.reshape([1, width]), 0);
        let (k, v) = (projected(x.clone(), 1), projected(x, 2));
        let attended = (0..items).map(|i| {
            let rows_of_item = |x: &Burn<2>| x.clone().narrow(0, i * self.tokens, self.tokens);
            ops::attention_with(q.clone(), rows_of_item(&k), rows_of_item(&v), heads, AttentionOptions::default())
        });
        let attention = scope.linear(Burn::cat(attended.collect(), 0), &full_name("attention.out_proj"))?;
        let normed = norm(&scope, attention.clone(), &full_name("layernorm"), eps)?;
        let hidden = scope.linear(normed, &full_name("mlp.fc1"))?;
        let embedding = attention + scope.linear(activated(hidden, activation), &full_name("mlp.fc2"))?;
        match &self.head {
            Some(head) => Ok(head.run(embedding)?.into()),
            None => Ok(embedding.into()),
        }
    }
}
