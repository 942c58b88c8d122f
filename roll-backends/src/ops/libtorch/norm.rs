//! Layer norm, RMS norm and the RMS norm of the Wan VAE on libtorch.

use burn_tensor::DType;
use tch::{Kind, Tensor};

use super::elementwise::sum_if_shared;
use super::{fresh, fused, pull_through};
use crate::backend::{LibTorch, libtorch::TchTensor};
use crate::ops::channel_norm::{MIN_NORM, composed_pull};
use crate::ops::expression::Expression;
use crate::ops::rms_rope::{self, Rotation, SavedRmsRope};
use crate::ops::{ChannelNormKernel, Cotangents, NormKernel, RmsRopeKernel, SavedNorm, SharedShift};

impl NormKernel for LibTorch {
    fn norm_forward(x: TchTensor, gain: TchTensor, shift: Option<TchTensor>, eps: f64) -> (TchTensor, TchTensor) {
        let (x, gain) = (&x.tensor, &gain.tensor);
        let Some(shift) = shift else {
            let inverse = (mean_square(x) + eps).rsqrt();
            let mut y = x * &inverse;
            let _ = y.g_mul_(gain);
            return (fresh(y), fresh(inverse));
        };
        let width = x.size()[1];
        let shift = &shift.tensor;
        let are_shared = gain.size()[0] == 1 && shift.size()[0] == 1;
        // ATen's layer norm takes gain and shift only if all rows share them; otherwise they are applied afterwards.
        let row = |operand: &Tensor| are_shared.then(|| operand.reshape([width]));
        let (y, mean, inverse) = x.native_layer_norm([width], row(gain), row(shift), eps);
        let y = if are_shared { y } else { shift.addcmul(&y, gain) };
        (fresh(y), fresh(Tensor::cat(&[mean, inverse], 1)))
    }

    fn norm_backward(saved: SavedNorm<TchTensor>, d_y: TchTensor, wanted: [bool; 3]) -> Cotangents<Self, 3> {
        let [x_wanted, gain_wanted, shift_wanted] = wanted;
        let (x, gain, moments, d_y) = (&saved.x.tensor, &saved.gain.tensor, &saved.moments.tensor, &d_y.tensor);
        let Some(SharedShift(is_shift_shared)) = saved.shift else {
            let d_gain = gain_wanted.then(|| sum_if_shared(d_y * (x * moments), gain));
            let d_x = x_wanted.then(|| rms_pull(x, gain, moments, d_y));
            return [d_x.map(fresh), d_gain.map(fresh), None];
        };
        let (mean, inverse) = (moments.narrow(1, 0, 1), moments.narrow(1, 1, 1));
        let d_gain = gain_wanted.then(|| sum_if_shared((x - mean) * &inverse * d_y, gain));
        let d_shift = shift_wanted.then(|| {
            if is_shift_shared { d_y.sum_dim_intlist([0i64].as_slice(), true, None::<Kind>) } else { d_y.copy() }
        });
        let d_x = if x_wanted { layer_pull(x, gain, saved.eps, d_y) } else { None };
        [d_x, d_gain, d_shift].map(|d| d.map(fresh))
    }

    fn layer_norm_forward(
        x: TchTensor,
        gain: TchTensor,
        shift: TchTensor,
        eps: f64,
        dtype: DType,
    ) -> (TchTensor, TchTensor) {
        if dtype == DType::BF16
            && let Some((y, moments)) =
                fused::ops(&x.tensor).and_then(|ops| ops.layer_norm(&x.tensor, &gain.tensor, &shift.tensor, eps))
        {
            return (fresh(y), fresh(moments));
        }
        let (y, moments) = Self::norm_forward(x, gain, Some(shift), eps);
        (Expression::<Self>(y).cast(dtype).0, moments)
    }

    fn layer_norm_backward(
        saved: SavedNorm<TchTensor>,
        d_y: TchTensor,
        [x_wanted, gain_wanted, shift_wanted]: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let (x, gain, moments) = (&saved.x.tensor, &saved.gain.tensor, &saved.moments.tensor);
        let pull = || fused::ops_in_bf16(&d_y.tensor)?.layer_norm_pull(x, gain, moments, &d_y.tensor.contiguous());
        let d_x = if x_wanted { pull().map(fresh) } else { None };
        // The gradients that the fused kernel has not computed.
        let wanted = [x_wanted && d_x.is_none(), gain_wanted, shift_wanted];
        if wanted == [false; 3] {
            return [d_x, None, None];
        }
        let [aten_d_x, d_gain, d_shift] =
            Self::norm_backward(saved, Expression::<Self>(d_y).cast(DType::F32).0, wanted);
        [d_x.or(aten_d_x), d_gain, d_shift]
    }
}

impl RmsRopeKernel for LibTorch {
    fn rms_rope_forward(
        x: TchTensor,
        gain: TchTensor,
        rotation: Option<Rotation<TchTensor>>,
        eps: f64,
    ) -> (TchTensor, TchTensor) {
        let (angles, heads) = angles_of(&rotation);
        let ops = fused::ops_in_bf16(&x.tensor);
        match ops.and_then(|ops| ops.rms_rope(&x.tensor, &gain.tensor, eps, angles, heads)) {
            Some((y, inverse)) => (fresh(y), fresh(inverse)),
            None => rms_rope::composed_forward::<Self>(x, gain, rotation, eps),
        }
    }

    fn rms_rope_backward(
        saved: SavedRmsRope<TchTensor>,
        d_y: TchTensor,
        [x_wanted, gain_wanted]: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (x, gain, inverse) = (&saved.x.tensor, &saved.gain.tensor, &saved.moments.tensor);
        let (angles, heads) = angles_of(&saved.rotation);
        let pull = || fused::ops_in_bf16(x)?.rms_rope_pull(x, gain, inverse, angles, heads, &d_y.tensor.contiguous());
        let d_x = if x_wanted { pull().map(fresh) } else { None };
        // The gradients that the fused kernel has not computed.
        let wanted = [x_wanted && d_x.is_none(), gain_wanted];
        if wanted == [false; 2] {
            return [d_x, None];
        }
        let [composed_d_x, d_gain] = rms_rope::composed_backward::<Self>(saved, d_y, wanted);
        [d_x.or(composed_d_x), d_gain]
    }
}

/// Cosine and sine of a rotation, and its number of heads.
fn angles_of(rotation: &Option<Rotation<TchTensor>>) -> (Option<[&Tensor; 2]>, i64) {
    match rotation {
        Some(Rotation { angles: [cos, sin], heads }) => (Some([&cos.tensor, &sin.tensor]), *heads as i64),
        None => (None, 1),
    }
}

/// Mean of the squares of each row, `[L, 1]`.
fn mean_square(x: &Tensor) -> Tensor {
    let norm = x.norm_scalaropt_dim(2.0, [1i64].as_slice(), true);
    norm.square() / x.size()[1] as f64
}

/// The gradient of x through an RMS norm: `d * inverse - x * inverse^3 * mean(d x)` with `d = d_y * gain`.
fn rms_pull(x: &Tensor, gain: &Tensor, inverse: &Tensor, d_y: &Tensor) -> Tensor {
    let mut d_x = d_y * gain;
    let along = (&d_x * x).sum_dim_intlist([1i64].as_slice(), true, None::<Kind>);
    let factor = along * inverse.pow_tensor_scalar(3) / -(x.size()[1] as f64);
    let _ = d_x.g_mul_(inverse);
    let _ = d_x.addcmul_(x, &factor);
    d_x
}

/// The gradient of x through a layer norm by ATen's fused backward pass, which recomputes the norm.
fn layer_pull(x: &Tensor, gain: &Tensor, eps: f64, d_y: &Tensor) -> Option<Tensor> {
    let width = x.size()[1];
    // ATen takes a gain that all rows share. Any other gain multiplies the cotangent.
    let row = (gain.size()[0] == 1).then(|| gain.reshape([width]));
    let scaled_d_y = row.is_none().then(|| d_y * gain);
    let d_y = scaled_d_y.as_ref().unwrap_or(d_y);
    let [d_x] = pull_through([x], [true], d_y, |[x]| x.layer_norm([width], row, None, eps, false));
    d_x
}

impl ChannelNormKernel for LibTorch {
    fn channel_norm_forward(x: TchTensor, gain: TchTensor, has_silu: bool) -> (TchTensor, TchTensor) {
        let x = &x.tensor;
        let factors = factors_of(x);
        let mut y = scaled(x, &factors);
        let _ = y.g_mul_(&by_channel(&gain.tensor));
        if has_silu {
            let _ = y.silu_();
        }
        (fresh(y), fresh(factors))
    }

    fn channel_norm_backward(
        [x, gain, factors]: [TchTensor; 3],
        has_silu: bool,
        d_y: TchTensor,
        [x_wanted, gain_wanted]: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (factors, gain) = (&factors.tensor, by_channel(&gain.tensor));
        let normed = scaled(&x.tensor, factors);
        // The cotangent of `normed * gain`, the input of SiLU.
        let mut d = if has_silu { scaled(&normed, &gain).silu_backward(&d_y.tensor) } else { d_y.tensor.copy() };
        let d_gain =
            gain_wanted.then(|| fresh((&normed * &d).sum_dim_intlist([1i64, 2, 3].as_slice(), false, None::<Kind>)));
        let d_x = x_wanted.then(|| {
            // In place, the cotangent becomes that of `normed`, and then that of x.
            let _ = d.g_mul_(&gain);
            let along = (&normed * &d).mean_dim([0i64].as_slice(), true, Kind::Float);
            let _ = d.addcmul_(&normed, &(-along).to_kind(d.kind()));
            let _ = d.g_mul_(factors);
            fresh(d)
        });
        [d_x, d_gain]
    }

    /// Writes the norm directly behind `past` in the concatenated tensor, which is channels-last.
    fn channel_norm_silu_after(past: TchTensor, x: TchTensor, gain: TchTensor) -> TchTensor {
        let (past, x) = (&past.tensor, &x.tensor);
        let (past_frames, size) = (past.size()[1], x.size());
        let [c, t, h, w] = [size[0], size[1], size[2], size[3]];
        let joined = Tensor::empty([past_frames + t, h, w, c], (x.kind(), x.device())).permute([3, 0, 1, 2]);
        joined.narrow(1, 0, past_frames).copy_(past);
        let rows = positions(&joined.narrow(1, past_frames, t));
        let (x_rows, gain_row) = (positions(x), one_row(&gain.tensor));
        let ops = fused::ops_of_matrix(&x_rows);
        if ops.and_then(|ops| ops.channel_norm_silu(&x_rows, &gain_row, MIN_NORM as f32, &rows)).is_some() {
            return fresh(joined);
        }
        let mut y = x.mul_out(&joined.narrow(1, past_frames, t), &factors_of(x));
        let _ = y.g_mul_(&by_channel(&gain.tensor));
        let _ = y.silu_();
        fresh(joined)
    }

    fn channel_norm_silu_pull(x: TchTensor, gain: TchTensor, d_y: TchTensor) -> TchTensor {
        let ([x_rows, d_rows], gain_row) = ([&x, &d_y].map(|x| positions(&x.tensor)), one_row(&gain.tensor));
        let ops = fused::ops_of_matrix(&x_rows);
        match ops.and_then(|ops| ops.channel_norm_silu_pull(&x_rows, &gain_row, MIN_NORM as f32, &d_rows)) {
            Some(d_x) => fresh(volume(&d_x, &x.tensor)),
            None => composed_pull::<Self>(x, gain, d_y),
        }
    }

    fn channel_norm_factors(x: TchTensor, _: TchTensor) -> TchTensor {
        fresh(factors_of(&x.tensor))
    }
}

/// `sqrt(C) / max(|x|, MIN_NORM)` of each position, f32.
fn factors_of(x: &Tensor) -> Tensor {
    let root = (x.size()[0] as f64).sqrt();
    let norms = match x.kind() {
        Kind::Float => x.norm_scalaropt_dim(2.0, [0i64].as_slice(), true),
        _ => x.norm_scalaropt_dim_dtype(2.0, [0i64].as_slice(), true, Kind::Float),
    };
    norms.clamp_min(MIN_NORM).reciprocal() * root
}

/// `x * by` in the dtype of x, rounded once; `by` is broadcast.
fn scaled(x: &Tensor, by: &Tensor) -> Tensor {
    if x.kind() == by.kind() { x * by } else { x.mul_out(&x.empty_like(), by) }
}

/// `[C, T, H, W]` as `[T * H * W, C]`: a view if x is channels-last. Otherwise returns a permuted volume, which the
/// fused kernels do not accept.
fn positions(x: &Tensor) -> Tensor {
    let channels = x.size()[0];
    let x_thwc = x.permute([1, 2, 3, 0]);
    if x_thwc.is_contiguous() { x_thwc.view([-1, channels]) } else { x_thwc }
}

/// Undoes [`positions`], for a result of the shape of `like`.
fn volume(rows: &Tensor, like: &Tensor) -> Tensor {
    let size = like.size();
    rows.view([size[1], size[2], size[3], size[0]]).permute([3, 0, 1, 2])
}

/// A gain `[C]` as `[1, C]`, which the fused kernels take.
fn one_row(gain: &Tensor) -> Tensor {
    gain.reshape([1, -1])
}

/// Reshapes one gain per channel for broadcasting over `[C, T, H, W]`.
fn by_channel(gain: &Tensor) -> Tensor {
    gain.reshape([-1, 1, 1, 1])
}
