//! Linear layers in fp8 on libtorch: products on the tensor cores of GPUs that have fp8.

use std::collections::BTreeMap;
use std::sync::Mutex;

use burn_tensor::DType;
use tch::{Device, Kind, Tensor};

use super::linear::{in_f32, scaled};
use super::{fresh, wide_product};
use crate::backend::LibTorch;
use crate::backend::libtorch::TchTensor;
use crate::ops::fp8::{Fp8Weight, SavedFp8, SavedLora};
use crate::ops::{Cotangents, Fp8Kernel, Lora};
use crate::sync::lock;

/// ATen's name of the format.
const E4M3: Kind = Kind::Float8e4m3fn;
/// The largest number of e4m3.
const E4M3_MAX: f64 = 448.0;

impl Fp8Kernel for LibTorch {
    fn to_e4m3(x: TchTensor) -> TchTensor {
        fresh(x.tensor.clamp(-E4M3_MAX, E4M3_MAX).to_kind(E4M3).to_kind(Kind::Float))
    }

    fn fp8_forward(
        x: TchTensor,
        weight: Fp8Weight<Self>,
        bias: TchTensor,
        lora: Option<Lora<TchTensor>>,
        dtype: DType,
    ) -> (TchTensor, Option<TchTensor>) {
        let (x, kind) = (x.tensor, kind_of(dtype));
        let no_column_scales = None;
        let (numbers, row_scales) = rows_in_e4m3(&x, no_column_scales);
        let weight_scales = weight.scales.tensor.unsqueeze(0);
        let codes = weight.codes.tensor.view_dtype(E4M3);
        let mut y = product(&numbers, &codes.tr(), [&row_scales, &weight_scales], Some(&bias.tensor), kind);
        let inner = lora.map(|Lora { down, up, scale }| {
            let inner = x.matmul(&down.tensor.to_kind(x.kind()).tr());
            let _ = y.addmm_(&inner.to_kind(kind), &scaled(&up.tensor, scale).to_kind(kind).tr());
            fresh(inner)
        });
        (fresh(y), inner)
    }

    fn fp8_backward(
        saved: SavedFp8<Self>,
        d_y: TchTensor,
        [x_wanted, bias_wanted, down_wanted, up_wanted]: [bool; 4],
    ) -> Cotangents<Self, 4> {
        let SavedFp8 { weight, products, lora } = saved;
        let (d_y, kind) = (d_y.tensor, kind_of(products));
        let d_bias = bias_wanted.then(|| d_y.sum_dim_intlist([0i64].as_slice(), false, Kind::Float));
        let mut d_x = x_wanted.then(|| pull_x(&d_y, &weight, kind));
        let Some(SavedLora { x, lora: Lora { down, up, scale }, inner }) = lora else {
            return [d_x, d_bias, None, None].map(|d| d.map(fresh));
        };
        let d_y = d_y.to_kind(kind);
        // The cotangent of `x A^T`, which the gradients of x and A both need.
        let d_inner = (x_wanted || down_wanted).then(|| d_y.matmul(&scaled(&up.tensor, scale).to_kind(kind)));
        if let (Some(d_x), Some(d_inner)) = (&mut d_x, &d_inner) {
            let _ = d_x.addmm_(d_inner, &down.tensor.to_kind(kind));
        }
        let d_down = match &d_inner {
            Some(d_inner) if down_wanted => Some(in_f32(&d_inner.tr(), &x.tensor)),
            _ => None,
        };
        let d_up = up_wanted.then(|| scaled(&in_f32(&d_y.tr(), &inner.tensor), scale));
        [d_x, d_bias, d_down, d_up].map(|d| d.map(fresh))
    }
}

/// ATen's name of the dtype, f32 or bf16.
fn kind_of(dtype: DType) -> Kind {
    if dtype == DType::BF16 { Kind::BFloat16 } else { Kind::Float }
}

/// The cotangent of x through the weight (without LoRA), as `kind`.
fn pull_x(d_y: &Tensor, weight: &Fp8Weight<LibTorch>, kind: Kind) -> Tensor {
    let (codes, weight_scales) = (&weight.codes.tensor, &weight.scales.tensor);
    // The product sums over the weight's rows, so that their scales cannot be applied to its result: they scale d_y
    // first.
    let (numbers, row_scales) = rows_in_e4m3(d_y, Some(weight_scales));
    // Tensor cores need a second matrix whose columns are contiguous. Those of the codes `[out, in]` are not.
    let by_columns = codes.tr().contiguous().view_dtype(E4M3).tr();
    let ones = Tensor::ones([1, codes.size()[1]], (Kind::Float, codes.device()));
    let no_bias = None;
    product(&numbers, &by_columns, [&row_scales, &ones], no_bias, kind)
}

/// Numbers that are converted at a time: 64 MB in f32.
const CHUNK: i64 = 1 << 24;

/// Rounds the rows of `x` to e4m3: returns the rounded numbers and the scales of the rows, `[rows, 1]`. The columns of
/// `x` are first multiplied by `column_scales`, `[width]`, if these are given.
fn rows_in_e4m3(x: &Tensor, column_scales: Option<&Tensor>) -> (Tensor, Tensor) {
    let (rows, width) = (x.size()[0], x.size()[1]);
    let numbers = Tensor::empty([rows, width], (E4M3, x.device()));
    let scales = Tensor::empty([rows, 1], (Kind::Float, x.device()));
    let step = (CHUNK / width.max(1)).max(1);
    for start in (0..rows).step_by(step as usize) {
        let count = step.min(rows - start);
        let part = x.narrow(0, start, count).to_kind(Kind::Float);
        let part = match column_scales {
            Some(scales) => part * scales.unsqueeze(0),
            None => part,
        };
        let largest = part.norm_scalaropt_dim(f64::INFINITY, [1i64].as_slice(), true);
        // At least the smallest normal number, so that rows of zeros are not divided by zero.
        let scale = (largest / E4M3_MAX).clamp_min(f64::from(f32::MIN_POSITIVE));
        // Rounding may make a quotient slightly larger than 448. ATen's cast returns NaN only for numbers that are
        // nearer to 480, the next number of the series.
        numbers.narrow(0, start, count).copy_(&(part / &scale));
        scales.narrow(0, start, count).copy_(&scale);
    }
    (numbers, scales)
}

/// The product of matrices in e4m3, `[M, K]` by rows and `[K, N]` by columns, times the scales of its rows (`[M, 1]`)
/// and columns (`[1, N]`), plus `bias`, in `kind`. Sums are f32; tensor cores round the product to bf16.
fn product(a: &Tensor, b: &Tensor, [rows, columns]: [&Tensor; 2], bias: Option<&Tensor>, kind: Kind) -> Tensor {
    let [k, n] = [0, 1].map(|axis| b.size()[axis]);
    if a.device().is_cuda() && k % TILE == 0 && n % TILE == 0 && fp8_gpu(a.device()).is_ok() {
        // The product can add a bias in bf16. A bias in f32 is added to its result.
        let (fused_bias, later_bias) = match kind {
            Kind::BFloat16 => (bias.map(|bias| bias.to_kind(kind)), None),
            _ => (None, bias),
        };
        let (no_result_scale, fast_accumulation) = (None, false);
        let y = a
            .internal_scaled_mm(b, rows, columns, fused_bias, no_result_scale, Kind::BFloat16, fast_accumulation)
            .to_kind(kind);
        return match later_bias {
            Some(bias) => y + bias.to_kind(kind),
            None => y,
        };
    }
    // Emulation: bf16 represents every number of e4m3 exactly.
    let [a, b] = [a, b].map(|x| x.to_kind(Kind::BFloat16));
    let sums = wide_product(&a, &b).unwrap_or_else(|| a.to_kind(Kind::Float).matmul(&b.to_kind(Kind::Float)));
    let y = sums * rows * columns;
    match bias {
        Some(bias) => y + bias.to_kind(Kind::Float),
        None => y,
    }
    .to_kind(kind)
}

/// Tensor cores' matrices have multiples of this many rows and columns.
const TILE: i64 = 16;

/// Fails with ATen's reason unless GPU `number` has products in fp8 with a scale for each row and column.
pub fn check_gpu(number: usize) -> Result<(), String> {
    fp8_gpu(Device::Cuda(number))
}

/// [`check_gpu`] for a device. The result is found out once per GPU.
fn fp8_gpu(device: Device) -> Result<(), String> {
    static FOUND: Mutex<BTreeMap<usize, Result<(), String>>> = Mutex::new(BTreeMap::new());
    let Device::Cuda(number) = device else { return Err("the CPU has no tensor cores".into()) };
    lock(&FOUND).entry(number).or_insert_with(|| multiply_ones(device)).clone()
}

/// Multiplies matrices of ones with scales of 2 and 1/2, and fails unless every number of the product is [`TILE`].
fn multiply_ones(device: Device) -> Result<(), String> {
    let full = |shape: [i64; 2], value: f64| Tensor::full(shape, value, (Kind::Float, device));
    let ones = full([TILE, TILE], 1.0).to_kind(E4M3);
    let (rows, columns) = (full([TILE, 1], 2.0), full([1, TILE], 0.5));
    let (no_bias, no_result_scale, fast_accumulation) = (None::<Tensor>, None::<Tensor>, false);
    let found = ones
        .f_internal_scaled_mm(&ones.tr(), &rows, &columns, no_bias, no_result_scale, Kind::BFloat16, fast_accumulation)
        .and_then(|y| (y.f_to_kind(Kind::Float)? - TILE as f64).f_abs()?.f_max()?.f_double_value(&[]))
        .map_err(|error| error.to_string().lines().next().unwrap_or_default().to_string())?;
    match found {
        0.0 => Ok(()),
        found => Err(format!("a product of ones in fp8 is off by {found}")),
    }
}
