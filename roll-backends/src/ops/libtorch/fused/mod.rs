//! Fused CUDA kernels for libtorch's GPUs: one pass over memory where ATen needs several.
//!
//! Between the products of a transformer block, activations are bf16; the residual stream, gains, shifts, gates and
//! moments are f32. ATen has no operator with such mixed operands: it casts, normalises, scales and adds in separate
//! passes over all tokens.
//!
//! The `.cu` files are compiled by NVRTC, which torch ships, for the GPU at hand when its first tensor arrives.
//! `driver` launches them, `launch` chooses grids and blocks. Launches go to the default stream, which `tch` always
//! uses: operands have been queued before, and torch may reuse an operand's memory as soon as the call returns.
//!
//! Every function returns `None` if it does not support a call: tensors on the CPU, a GPU without NVRTC or driver
//! (which is logged once), or operands of another dtype, width or layout. The caller then uses ATen. `ROLL_FUSED=0`
//! disables the kernels, for comparisons.

mod driver;
mod launch;
mod nvrtc;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::sync::Arc;

use roll_core::AdamUpdate;
use tch::{Device, Kind, Tensor};

use launch::{Argument, Kernel, Launch, MOST_ROWS, Machine, Shape, WIDEST};

/// Layer norm: `(x - mean) / sqrt(variance + eps) * gain + shift`. Operands: x `[L, D]` f32, gain and shift `[1, D]` or
/// `[L, D]` f32. Returns `[L, D]` bf16, and mean and `1 / sqrt(variance + eps)` of each row, `[L, 2]` f32.
pub(super) fn layer_norm(x: &Tensor, gain: &Tensor, shift: &Tensor, eps: f64) -> Option<(Tensor, Tensor)> {
    On(&*machine(x)?).layer_norm(x, gain, shift, eps)
}

/// The gradient of x, `[L, D]` f32, given the gradient of the result, `[L, D]` bf16, and the moments that
/// [`layer_norm`] returned.
pub(super) fn layer_norm_pull(x: &Tensor, gain: &Tensor, moments: &Tensor, d_y: &Tensor) -> Option<Tensor> {
    On(&*machine_of_narrow(d_y)?).layer_norm_pull(x, gain, moments, d_y)
}

/// RMS norm over whole rows, `x / sqrt(mean of x^2 + eps) * gain`, followed by rotary embedding of the adjacent pairs
/// of each head if angles are given. Operands: x `[L, H * d]` bf16, gain `[1, H * d]` f32, cosine and sine `[L, d / 2]`
/// f32. Returns `[L, H * d]` bf16, and the inverse root mean square of each row, `[L, 1]` f32.
pub(super) fn rms_rope(
    x: &Tensor,
    gain: &Tensor,
    eps: f64,
    rotation: Option<[&Tensor; 2]>,
    heads: i64,
) -> Option<(Tensor, Tensor)> {
    On(&*machine_of_narrow(x)?).rms_rope(x, gain, eps, rotation, heads)
}

/// The gradient of x, `[L, H * d]` bf16, given the gradient of the result (same shape and dtype) and the `inverse` that
/// [`rms_rope`] returned.
pub(super) fn rms_rope_pull(
    x: &Tensor,
    gain: &Tensor,
    inverse: &Tensor,
    rotation: Option<[&Tensor; 2]>,
    heads: i64,
    d_y: &Tensor,
) -> Option<Tensor> {
    On(&*machine_of_narrow(x)?).rms_rope_pull(x, gain, inverse, rotation, heads, d_y)
}

/// Returns `x + gate * y` as f32; x `[L, D]` f32, y `[L, D]` bf16, gate `[1, D]` or `[L, D]` f32 (ones by default).
pub(super) fn gated_add(x: &Tensor, y: &Tensor, gate: Option<&Tensor>) -> Option<Tensor> {
    On(&*machine_of_narrow(y)?).gated_add(x, y, gate)
}

/// The gradient of y of [`gated_add`], `d_z * gate` as bf16, given the gradient of the result, `[L, D]` f32.
pub(super) fn gate_pull(d_z: &Tensor, gate: Option<&Tensor>) -> Option<Tensor> {
    On(&*machine(d_z)?).gate_pull(d_z, gate)
}

/// SiLU of a row-wise RMS norm: `z / (1 + e^-z)` with `z = x * sqrt(C) / max(|x|, least) * gain`, where `|x|` is the
/// norm of a row. Operands: x `[L, C]` f32 or bf16, gain `[1, C]` f32. Writes to `y`, which has the shape and dtype of
/// x.
pub(super) fn channel_norm_silu(x: &Tensor, gain: &Tensor, least: f32, y: &Tensor) -> Option<()> {
    On(&*machine_of_rows(x)?).channel_norm_silu(x, gain, least, y)
}

/// The gradient of x, given the gradient of [`channel_norm_silu`]'s result; both have the shape and dtype of x.
pub(super) fn channel_norm_silu_pull(x: &Tensor, gain: &Tensor, least: f32, d_y: &Tensor) -> Option<Tensor> {
    On(&*machine_of_rows(x)?).channel_norm_silu_pull(x, gain, least, d_y)
}

/// One AdamW update. Operands: parameters, gradient, first and second moment, all f32, one-dimensional, of one length.
/// Returns the new parameters, first and second moments.
pub(super) fn adam(operands: [&Tensor; 4], update: &AdamUpdate) -> Option<[Tensor; 3]> {
    On(&*machine(operands[0])?).adam(operands, update)
}

/// The GPU of a tensor; `None` if it is on the CPU or its GPU cannot run the kernels.
fn machine(tensor: &Tensor) -> Option<Arc<driver::Gpu>> {
    match tensor.device() {
        Device::Cuda(number) => driver::gpu(number),
        _ => None,
    }
}

/// Returns [`machine`] for bf16 operands only. In pure f32 runs the kernels are neither compiled nor is their absence
/// logged.
fn machine_of_narrow(tensor: &Tensor) -> Option<Arc<driver::Gpu>> {
    (tensor.kind() == Kind::BFloat16).then(|| machine(tensor)).flatten()
}

/// Returns [`machine`] for matrices only: nothing is compiled for volumes in another layout.
fn machine_of_rows(tensor: &Tensor) -> Option<Arc<driver::Gpu>> {
    (tensor.dim() == 2).then(|| machine(tensor)).flatten()
}

/// The functions above, on one machine.
struct On<'a, M: Machine + ?Sized>(&'a M);

impl<M: Machine + ?Sized> On<'_, M> {
    fn layer_norm(&self, x: &Tensor, gain: &Tensor, shift: &Tensor, eps: f64) -> Option<(Tensor, Tensor)> {
        let rows = Rows::of(x, Kind::Float)?.with_sums()?;
        let (gain_stride, shift_stride) = (rows.stride(gain)?, rows.stride(shift)?);
        let (y, moments) = (rows.empty(Kind::BFloat16), rows.column(2));
        let arguments = [
            x.into(),
            gain.into(),
            shift.into(),
            (&y).into(),
            (&moments).into(),
            rows.rows.into(),
            rows.width.into(),
            rows.per_width(),
            gain_stride.into(),
            shift_stride.into(),
            Argument::from(eps as f32),
        ];
        self.run(Kernel::LayerNorm, rows.along(), arguments)?;
        Some((y, moments))
    }

    fn layer_norm_pull(&self, x: &Tensor, gain: &Tensor, moments: &Tensor, d_y: &Tensor) -> Option<Tensor> {
        let rows = Rows::of(x, Kind::Float)?.with_sums()?;
        rows.expect_same(d_y, Kind::BFloat16)?;
        rows.expect_columns(moments, 2)?;
        let gain_stride = rows.stride(gain)?;
        let d_x = rows.empty(Kind::Float);
        let arguments = [
            x.into(),
            gain.into(),
            moments.into(),
            d_y.into(),
            (&d_x).into(),
            rows.rows.into(),
            rows.width.into(),
            rows.per_width(),
            Argument::from(gain_stride),
        ];
        self.run(Kernel::LayerNormPull, rows.along(), arguments)?;
        Some(d_x)
    }

    fn rms_rope(
        &self,
        x: &Tensor,
        gain: &Tensor,
        eps: f64,
        rotation: Option<[&Tensor; 2]>,
        heads: i64,
    ) -> Option<(Tensor, Tensor)> {
        let rows = Rows::of(x, Kind::BFloat16)?.with_sums()?;
        rows.expect_one_row(gain)?;
        let ([cosines, sines], half) = rows.angles(rotation, heads)?;
        let (y, inverses) = (rows.empty(Kind::BFloat16), rows.column(1));
        let arguments = [
            x.into(),
            gain.into(),
            cosines,
            sines,
            (&y).into(),
            (&inverses).into(),
            rows.rows.into(),
            rows.width.into(),
            rows.per_width(),
            half.into(),
            Argument::from(eps as f32),
        ];
        self.run(Kernel::RmsRope, rows.along(), arguments)?;
        Some((y, inverses))
    }

    fn rms_rope_pull(
        &self,
        x: &Tensor,
        gain: &Tensor,
        inverse: &Tensor,
        rotation: Option<[&Tensor; 2]>,
        heads: i64,
        d_y: &Tensor,
    ) -> Option<Tensor> {
        let rows = Rows::of(x, Kind::BFloat16)?.with_sums()?;
        rows.expect_same(d_y, Kind::BFloat16)?;
        rows.expect_one_row(gain)?;
        rows.expect_columns(inverse, 1)?;
        let ([cosines, sines], half) = rows.angles(rotation, heads)?;
        let d_x = rows.empty(Kind::BFloat16);
        let arguments = [
            x.into(),
            gain.into(),
            inverse.into(),
            cosines,
            sines,
            d_y.into(),
            (&d_x).into(),
            rows.rows.into(),
            rows.width.into(),
            rows.per_width(),
            Argument::from(half),
        ];
        self.run(Kernel::RmsRopePull, rows.along(), arguments)?;
        Some(d_x)
    }

    fn gated_add(&self, x: &Tensor, y: &Tensor, gate: Option<&Tensor>) -> Option<Tensor> {
        let rows = Rows::of(x, Kind::Float)?;
        rows.expect_same(y, Kind::BFloat16)?;
        let stride = rows.gate_stride(gate)?;
        let z = rows.empty(Kind::Float);
        let arguments =
            [x.into(), y.into(), gate.into(), (&z).into(), rows.rows.into(), rows.width.into(), Argument::from(stride)];
        self.run(Kernel::GatedAdd, rows.by_number(), arguments)?;
        Some(z)
    }

    fn gate_pull(&self, d_z: &Tensor, gate: Option<&Tensor>) -> Option<Tensor> {
        let rows = Rows::of(d_z, Kind::Float)?;
        let stride = rows.gate_stride(gate)?;
        let d_y = rows.empty(Kind::BFloat16);
        let arguments =
            [d_z.into(), gate.into(), (&d_y).into(), rows.rows.into(), rows.width.into(), Argument::from(stride)];
        self.run(Kernel::GatePull, rows.by_number(), arguments)?;
        Some(d_y)
    }

    fn channel_norm_silu(&self, x: &Tensor, gain: &Tensor, least: f32, y: &Tensor) -> Option<()> {
        let rows = Rows::of(x, x.kind())?;
        rows.expect_same(y, x.kind())?;
        rows.expect_one_row(gain)?;
        let kernel = match x.kind() {
            Kind::Float => Kernel::ChannelNormF32,
            Kind::BFloat16 => Kernel::ChannelNormBf16,
            _ => return None,
        };
        let (shape, lanes) = Shape::along_short_rows(rows.rows, rows.width)?;
        let root = (rows.width as f32).sqrt();
        let arguments = [
            x.into(),
            gain.into(),
            y.into(),
            rows.rows.into(),
            rows.width.into(),
            lanes.into(),
            root.into(),
            Argument::from(least),
        ];
        self.run(kernel, shape, arguments)
    }

    fn channel_norm_silu_pull(&self, x: &Tensor, gain: &Tensor, least: f32, d_y: &Tensor) -> Option<Tensor> {
        let rows = Rows::of(x, x.kind())?;
        rows.expect_same(d_y, x.kind())?;
        rows.expect_one_row(gain)?;
        let kernel = match x.kind() {
            Kind::Float => Kernel::ChannelNormPullF32,
            Kind::BFloat16 => Kernel::ChannelNormPullBf16,
            _ => return None,
        };
        let (shape, lanes) = Shape::along_short_rows(rows.rows, rows.width)?;
        let (d_x, root) = (rows.empty(x.kind()), (rows.width as f32).sqrt());
        let arguments = [
            x.into(),
            gain.into(),
            d_y.into(),
            (&d_x).into(),
            rows.rows.into(),
            rows.width.into(),
            rows.per_width(),
            lanes.into(),
            root.into(),
            Argument::from(least),
        ];
        self.run(kernel, shape, arguments)?;
        Some(d_x)
    }

    fn adam(&self, operands: [&Tensor; 4], update: &AdamUpdate) -> Option<[Tensor; 3]> {
        let (device, size) = (operands[0].device(), operands[0].size());
        let [length] = size.as_slice() else { return None };
        let count = i32::try_from(*length).ok().filter(|count| (1..=MOST_ROWS).contains(count))?;
        let served = |x: &&Tensor| x.size() == size && can_be_read(x, Kind::Float, device);
        if !operands.iter().all(served) {
            return None;
        }
        let new: [Tensor; 3] = std::array::from_fn(|_| Tensor::empty([*length], (Kind::Float, device)));
        let AdamUpdate { scale, beta_2, rest, eps, step_size, root_correction, keep } = *update;
        let mut arguments: Vec<Argument> = operands.map(Argument::from).into();
        arguments.extend(new.each_ref().map(Argument::from));
        arguments.push(count.into());
        let numbers = [scale[0], scale[1], beta_2, rest[0], rest[1], eps, step_size, root_correction, keep];
        arguments.extend(numbers.map(Argument::from));
        self.run(Kernel::Adam, Shape::in_a_line(count), arguments)?;
        Some(new)
    }

    /// Launches a kernel. `None` if the launch failed; nothing is written then, and the machine has logged why.
    fn run(&self, kernel: Kernel, shape: Shape, arguments: impl Into<Vec<Argument>>) -> Option<()> {
        self.0.launch(&mut Launch::new(kernel, shape, arguments)).ok()
    }
}

/// Whether the tensor has this dtype and device, is contiguous, and is aligned to 16 bytes.
fn can_be_read(tensor: &Tensor, kind: Kind, device: Device) -> bool {
    tensor.kind() == kind
        && tensor.device() == device
        && tensor.is_contiguous()
        && (tensor.data_ptr() as usize).is_multiple_of(16)
}

/// The shape and device of the operands of one call. Its methods return `None` for operands that the kernels do not
/// support.
struct Rows {
    rows: i32,
    width: i32,
    device: Device,
}

impl Rows {
    fn of(x: &Tensor, kind: Kind) -> Option<Self> {
        let size = x.size();
        let [rows, width] = size.as_slice() else { return None };
        let (rows, width) = (i32::try_from(*rows).ok()?, i32::try_from(*width).ok()?);
        let known = (1..=MOST_ROWS).contains(&rows) && width > 0 && width % 8 == 0;
        let found = Self { rows, width, device: x.device() };
        (known && found.is_served(x, kind)).then_some(found)
    }

    /// Checks the width for kernels that hold a row in registers.
    fn with_sums(self) -> Option<Self> {
        (self.width <= WIDEST).then_some(self)
    }

    fn is_served(&self, tensor: &Tensor, kind: Kind) -> bool {
        can_be_read(tensor, kind, self.device)
    }

    fn expect(&self, tensor: &Tensor, size: [i64; 2], kind: Kind) -> Option<()> {
        (tensor.size() == size && self.is_served(tensor, kind)).then_some(())
    }

    fn expect_same(&self, tensor: &Tensor, kind: Kind) -> Option<()> {
        self.expect(tensor, [self.rows.into(), self.width.into()], kind)
    }

    fn expect_columns(&self, tensor: &Tensor, columns: i64) -> Option<()> {
        self.expect(tensor, [self.rows.into(), columns], Kind::Float)
    }

    fn expect_one_row(&self, tensor: &Tensor) -> Option<()> {
        self.expect(tensor, [1, self.width.into()], Kind::Float)
    }

    /// The row stride of `operand`: 0 if all tokens share one row.
    fn stride(&self, operand: &Tensor) -> Option<i32> {
        match self.expect_one_row(operand) {
            Some(()) => Some(0),
            None => self.expect_same(operand, Kind::Float).map(|()| self.width),
        }
    }

    fn gate_stride(&self, gate: Option<&Tensor>) -> Option<i32> {
        gate.map_or(Some(0), |gate| self.stride(gate))
    }

    /// Cosines and sines, and their number per token. A thread rotates four pairs, which must belong to one head; the
    /// number per head must be a power of two, because the kernel masks indices instead of dividing (a division takes
    /// as long as the rotation).
    fn angles(&self, rotation: Option<[&Tensor; 2]>, heads: i64) -> Option<([Argument; 2], i32)> {
        let Some(rotation) = rotation else { return Some(([Argument::NONE; 2], 0)) };
        let heads = i32::try_from(heads).ok().filter(|heads| (1..=self.width / 8).contains(heads))?;
        let half = self.width / heads / 2;
        if half * heads * 2 != self.width || half < 4 || !half.unsigned_abs().is_power_of_two() {
            return None;
        }
        for angles in rotation {
            self.expect_columns(angles, half.into())?;
        }
        Some((rotation.map(Argument::from), half))
    }

    fn per_width(&self) -> Argument {
        Argument::from(1.0 / self.width as f32)
    }

    fn empty(&self, kind: Kind) -> Tensor {
        Tensor::empty([i64::from(self.rows), i64::from(self.width)], (kind, self.device))
    }

    fn column(&self, columns: i64) -> Tensor {
        Tensor::empty([i64::from(self.rows), columns], (Kind::Float, self.device))
    }

    fn along(&self) -> Shape {
        Shape::along_rows(self.rows, self.width)
    }

    fn by_number(&self) -> Shape {
        Shape::by_number(self.rows, self.width)
    }
}
