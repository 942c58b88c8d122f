//! Attention: forward cubek's flash kernel on tensor cores, where the operands are bf16; blocks of plain products
//! ([`tiled`]) for f32, and backward, for which cubek has one unit per row and f32 alone.
//!
//! The flash kernel's tiles are f16, which is finer than bf16 and ends at 65504: a larger key or value makes the result
//! infinite, which the algorithms refuse.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use burn::backend::ops::{AttentionModuleOptions, FloatTensorOps};
use burn::backend::{Cube, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, TensorData};
use burn_cubecl::kernel::attention::flash_attention;
use burn_cubecl::tensor::CubeTensor;
use cubek::attention::forward::launch::{BlueprintStrategy, Strategy};
use cubek::attention::forward::routines::blackbox_accelerated::BlackboxAcceleratedStrategy;

use super::{host, unwritten};
use crate::ops::expression::Expression;
use crate::ops::{AttentionCall, AttentionKernel, tiled};

impl AttentionKernel for Cube {
    fn attention_forward(qkv: [FloatTensor<Self>; 3], call: AttentionCall) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if qkv[0].dtype == DType::BF16
            && suits(&qkv, call)
            && is_right(&qkv[0], call)
            && let Some(out) = flash(on_tensor_cores(), qkv.clone(), call)
        {
            let none = unwritten(&out, [0]);
            return (out, none);
        }
        tiled::forward::<Self>(qkv, call)
    }
}

/// Eight planes that share the keys of a stage, a tile of queries each.
fn on_tensor_cores() -> Strategy {
    let strategy = BlackboxAcceleratedStrategy { num_planes: 8, seq_q: 1, seq_kv: 1 };
    Strategy::BlackboxAccelerated(BlueprintStrategy::Inferred(strategy))
}

/// Whether cubek's kernels mean the same: they scale by `1 / sqrt(d)`, and of unequal lengths their causal mask is another.
fn suits([q, k, _]: &[CubeTensor; 3], call: AttentionCall) -> bool {
    let ([queries, channels], [keys, _]) = (q.shape().dims::<2>(), k.shape().dims::<2>());
    let own = 1.0 / ((channels / call.heads) as f32).sqrt();
    let plain = queries * keys * channels > 0 && call.is_plain();
    plain && (call.scale - own).abs() <= 1e-6 * own && (!call.causal || queries == keys)
}

/// The result, or `None` where the kernel does not take these sizes or this device.
fn flash(strategy: Strategy, qkv: [CubeTensor; 3], call: AttentionCall) -> Option<CubeTensor> {
    let [queries, channels] = qkv[0].shape().dims::<2>();
    let [q, k, v] = qkv.map(|x| {
        let x = Expression::<Cube>(x);
        let [rows, _] = x.dims::<2>();
        x.reshape([1, rows, call.heads, channels / call.heads]).swap(1, 2).0
    });
    let options = AttentionModuleOptions { is_causal: call.causal, ..Default::default() };
    let out = flash_attention(q, k, v, None, None, options, strategy).ok()?;
    Some(Expression::<Cube>(out).swap(1, 2).reshape([queries, channels]).0)
}

/// Whether the flash kernel agrees with plain products on the device of `like`, for heads of this width: compared once,
/// on a few rows. What it computes depends on the device's matrix units, and a kernel that is wrong would be wrong
/// silently.
fn is_right(like: &CubeTensor, call: AttentionCall) -> bool {
    static COMPARED: Mutex<BTreeMap<(String, usize, bool), bool>> = Mutex::new(BTreeMap::new());
    let width = like.shape().dims::<2>()[1] / call.heads;
    let key = (format!("{:?}", like.device), width, call.causal);
    if let Some(right) = COMPARED.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return *right;
    }
    let right = agrees(on_tensor_cores(), like, width, call.causal);
    if !right {
        tracing::warn!(
            "cubek's flash attention does not work on this device for heads of {width} channels: attention is computed in \
             blocks of plain products, which is slower"
        );
    }
    COMPARED.lock().unwrap_or_else(PoisonError::into_inner).insert(key, right);
    right
}

/// Compares `strategy` with [`tiled`], at lengths that are not multiples of a tile.
fn agrees(strategy: Strategy, like: &CubeTensor, width: usize, causal: bool) -> bool {
    const HEADS: usize = 2;
    let (queries, keys) = if causal { (150, 150) } else { (75, 150) };
    let scale = 1.0 / (width as f32).sqrt();
    let call = AttentionCall { heads: HEADS, scale, causal, window: None, softcap: None };
    let dtype = like.dtype;
    let made = |rows: usize, seed: usize| {
        let wave = |i: usize| (((i + seed) * 7919 % 1009) as f32 / 504.5 - 1.0) * 2.0;
        let values: Vec<f32> = (0..rows * HEADS * width).map(wave).collect();
        let x = Cube::float_from_data(TensorData::new(values, [rows, HEADS * width]), &like.device);
        Cube::float_cast(x, FloatDType::from(dtype))
    };
    let qkv = [made(queries, 1), made(keys, 400), made(keys, 90)];
    let (expected, _) = tiled::forward::<Cube>(qkv.clone(), call);
    let Some(found) = flash(strategy, qkv, call) else { return false };
    let (Some(found), Some(expected)) = (host(found), host(expected)) else { return false };
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let allowed = largest * if dtype == DType::BF16 { 3e-2 } else { 1e-5 };
    found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= allowed)
}

#[cfg(all(test, feature = "wgpu"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Of cubek's two flash kernels this is the one without tensor cores: the same layouts, scale and mask.
    #[test]
    fn the_flash_kernel_is_called_as_it_should_be() {
        let Some(device) = super::super::test_device() else { return };
        let like = Cube::float_zeros([1, 1].into(), &device, FloatDType::F32);
        for (width, causal) in [(64, true), (128, false)] {
            let strategy = Strategy::Unit(BlueprintStrategy::Inferred(()));
            assert!(agrees(strategy, &like, width, causal), "width {width}, causal {causal}");
        }
    }

    #[test]
    fn the_backward_finds_the_softmax_that_a_flash_kernel_does_not_keep() {
        let Some(device) = super::super::test_device() else { return };
        let call = AttentionCall { heads: 2, scale: 0.3, causal: true, window: None, softcap: None };
        let made = |seed: usize| {
            let values: Vec<f32> = (0..21 * 16).map(|i| ((i * 31 + seed) % 17) as f32 / 8.0 - 1.0).collect();
            Cube::float_from_data(TensorData::new(values, [21, 16]), &device)
        };
        let (qkv, d_out) = ([made(0), made(5), made(11)], made(3));
        let (out, softmax) = tiled::forward::<Cube>(qkv.clone(), call);
        let none = unwritten(&out, [0]);
        let pulled =
            |softmax| tiled::backward::<Cube>(qkv.clone(), out.clone(), softmax, d_out.clone(), call, [true; 3]);
        for (found, expected) in pulled(none).into_iter().zip(pulled(softmax)) {
            let (found, expected) = (host(found.unwrap()).unwrap(), host(expected.unwrap()).unwrap());
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
}
