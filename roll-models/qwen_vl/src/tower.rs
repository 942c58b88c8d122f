//! The vision tower: patch embedding, blocks, merger.

use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{DType, Device, Tensor, TensorData};
use roll_backends::ops::{self, AttentionOptions};
use roll_backends::{Chain, ChainRecord, Memory, NdTensor, Scope, Segment, Tape, WeightStore};
use roll_causal_lm::{rotate_halves, split_rows};
use roll_core::{Grad, Result};

use super::config::{Family, VisionConfig};
use super::patches::PatchOrder;

/// Epsilon of the norms.
const NORM_EPS: f64 = 1e-6;
/// Base of the rotary frequencies.
const THETA: f64 = 1e4;
/// Factor inside the sigmoid of quick-GELU, `x sigmoid(1.702 x)`.
const QUICK_GELU: f64 = 1.702;

/// The inputs that all segments of one forward pass share.
struct TowerPass {
    config: VisionConfig,
    store: Arc<dyn WeightStore>,
    /// Dtype of products; see [`Scope::products`].
    products: DType,
    /// Cosine and sine of the rotary angles, `[N, head_dim / 2]`.
    rope: (Tensor<2>, Tensor<2>),
    steps: Vec<Range<usize>>,
    windows: Vec<Range<usize>>,
}

/// Runs the tower over `patches`, f32 `[N, values of a patch]` in `order`. Returns one row per square, f32 `[N / merge^2,
/// width of the language model]`, in the same order, and the record whose pullback returns the cotangent of the
/// patches.
pub fn run(
    config: &VisionConfig,
    store: &Arc<dyn WeightStore>,
    products: DType,
    memory: Memory,
    patches: Tensor<2>,
    order: &PatchOrder,
    grad: Grad,
) -> Result<(Tensor<2>, Option<ChainRecord>)> {
    let pass = Arc::new(TowerPass {
        config: config.clone(),
        store: store.clone(),
        products,
        rope: rotary_tables(config, order, store.device()),
        steps: order.steps.clone(),
        windows: order.windows.clone(),
    });
    let mut segments: Vec<Arc<dyn Segment>> = vec![Arc::new(PatchEmbedding(pass.clone()))];
    for index in 0..config.depth {
        segments.push(Arc::new(Block { index, pass: pass.clone() }));
    }
    segments.push(Arc::new(Merger(pass)));
    let tracks_shared = false;
    let (features, record) =
        Chain::new(segments).forward(patches.into(), Vec::new(), grad, memory, tracks_shared, None)?;
    Ok((features.rank::<2>()?, record))
}

/// Cosines and sines of the angles of every patch, computed in f64: half of them turn with the row, half with the
/// column.
fn rotary_tables(config: &VisionConfig, order: &PatchOrder, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let quarter = config.width / config.heads / 4;
    let frequencies: Vec<f64> = (0..quarter).map(|i| THETA.powf(-(i as f64) / quarter as f64)).collect();
    let table = |f: fn(f64) -> f64| {
        let angles = order.patches.iter().flat_map(|(_, [_, row, column])| {
            [*row, *column].into_iter().flat_map(|place| frequencies.iter().map(move |w| f(place as f64 * w) as f32))
        });
        let values: Vec<f32> = angles.collect();
        Tensor::from_data(TensorData::new(values, [order.patches.len(), 2 * quarter]), device)
    };
    (table(f64::cos), table(f64::sin))
}

impl TowerPass {
    /// Runs `f` with the weights under `prefix`.
    fn scoped(&self, prefix: &str, tape: &Tape, f: impl FnOnce(&Scope<'_>) -> Result<NdTensor>) -> Result<NdTensor> {
        let weights = self.store.segment(prefix)?;
        let (trainable, lora_scale, products) = (None, 1.0, self.products);
        f(&Scope { weights: &weights, trainable, lora_scale, tape, products, fp8: false })
    }

    fn norm(&self, scope: &Scope<'_>, x: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let gain = scope.weight::<1>(&format!("{name}.weight"))?;
        Ok(match self.config.family {
            Family::Qwen2Vl => {
                let shift = scope.weight::<1>(&format!("{name}.bias"))?;
                ops::layer_norm(x, gain.unsqueeze(), shift.unsqueeze(), NORM_EPS)
            }
            Family::Qwen25Vl => ops::rms_norm(x, gain, NORM_EPS),
        })
    }
}

/// The product with the convolution's weight, which covers each patch once.
struct PatchEmbedding(Arc<TowerPass>);

impl Segment for PatchEmbedding {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let name = "visual.patch_embed.proj";
        self.0.scoped("visual.patch_embed.", tape, |scope| Ok(scope.linear(state.rank::<2>()?, name)?.into()))
    }
}

struct Block {
    index: usize,
    pass: Arc<TowerPass>,
}

impl Segment for Block {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let name = format!("visual.blocks.{}", self.index);
        self.pass.scoped(&format!("{name}."), tape, |scope| {
            let x = state.rank::<2>()?;
            let h = self.pass.norm(scope, x.clone(), &format!("{name}.norm1"))?;
            let x = x + self.attention(scope, h, &format!("{name}.attn"))?;
            let h = self.pass.norm(scope, x.clone(), &format!("{name}.norm2"))?;
            Ok((x + self.feed_forward(scope, h, &format!("{name}.mlp"))?).into())
        })
    }
}

impl Block {
    fn attention(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let (config, pass) = (&self.pass.config, &self.pass);
        let qkv = scope.linear(h, &format!("{name}.qkv"))?;
        let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part * config.width, config.width));
        let [q, k] = [q, k].map(|x| rotate_halves(x, pass.rope.clone(), config.heads));
        let spans = match &config.windows {
            Some(windows) if !windows.full.contains(&self.index) => &pass.windows,
            _ => &pass.steps,
        };
        let [q, k, v] = [q, k, v].map(|x| split_rows(x, spans));
        let options = AttentionOptions { products: Some(pass.products), ..Default::default() };
        let attend = |((q, k), v)| ops::attention_with(q, k, v, config.heads, options.clone());
        let attended = Tensor::cat(q.into_iter().zip(k).zip(v).map(attend).collect(), 0);
        scope.linear(attended, &format!("{name}.proj"))
    }

    fn feed_forward(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        match self.pass.config.family {
            Family::Qwen2Vl => {
                let h = scope.linear(h, &format!("{name}.fc1"))?;
                scope.linear(ops::silu(h * QUICK_GELU) / QUICK_GELU, &format!("{name}.fc2"))
            }
            Family::Qwen25Vl => {
                let gate = scope.linear(h.clone(), &format!("{name}.gate_proj"))?;
                let up = scope.linear(h, &format!("{name}.up_proj"))?;
                scope.linear(ops::silu(gate) * up, &format!("{name}.down_proj"))
            }
        }
    }
}

/// Joins the patches of each square and projects them to the width of the language model.
struct Merger(Arc<TowerPass>);

impl Segment for Merger {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        self.0.scoped("visual.merger.", tape, |scope| {
            let x = self.0.norm(scope, state.rank::<2>()?, "visual.merger.ln_q")?;
            let [patches, width] = x.dims();
            let joined = self.0.config.merge * self.0.config.merge;
            let x = scope.linear(x.reshape([patches / joined, width * joined]), "visual.merger.mlp.0")?;
            Ok(scope.linear(ops::gelu(x), "visual.merger.mlp.2")?.into())
        })
    }
}
