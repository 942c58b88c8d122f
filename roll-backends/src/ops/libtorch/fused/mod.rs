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
//! Every function returns `None` if it does not support a call, and the caller then uses ATen. Not supported are
//! tensors on the CPU, GPUs without NVRTC or driver (which is logged once), and other dtypes, widths or layouts of
//! operands. `ROLL_FUSED=0` disables the kernels, for comparisons.

mod driver;
mod launch;
mod nvrtc;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::sync::Arc;

use roll_core::AdamUpdate;
use tch::{Device, Kind, Tensor};

use launch::{Argument, Kernel, Launch, LaunchShape, Launcher, MAX_ROWS, MAX_WIDTH};

/// The kernels on the GPU of a tensor; `None` if it is on the CPU or its GPU cannot run the kernels.
pub(super) fn ops(tensor: &Tensor) -> Option<FusedOps<Arc<driver::Gpu>>> {
    match tensor.device() {
        Device::Cuda(number) => driver::gpu(number).map(FusedOps),
        _ => None,
    }
}

/// Returns [`ops`] for bf16 operands only. In pure f32 runs the kernels are neither compiled nor is their absence
/// logged.
pub(super) fn ops_in_bf16(tensor: &Tensor) -> Option<FusedOps<Arc<driver::Gpu>>> {
    if tensor.kind() == Kind::BFloat16 { ops(tensor) } else { None }
}

/// Returns [`ops`] for matrices only. A tensor of another rank causes no compilation.
pub(super) fn ops_of_matrix(tensor: &Tensor) -> Option<FusedOps<Arc<driver::Gpu>>> {
    if tensor.dim() == 2 { ops(tensor) } else { None }
}

/// The fused operators on one launcher.
pub(super) struct FusedOps<L: Launcher>(L);

impl<L: Launcher> FusedOps<L> {
    /// Layer norm: `(x - mean) / sqrt(variance + eps) * gain + shift`. Operands: x `[L, D]` f32, gain and shift
    /// `[1, D]` or `[L, D]` f32. Returns `[L, D]` bf16, and mean and `1 / sqrt(variance + eps)` of each row, `[L, 2]`
    /// f32.
    pub(super) fn layer_norm(&self, x: &Tensor, gain: &Tensor, shift: &Tensor, eps: f64) -> Option<(Tensor, Tensor)> {
        let rows = Rows::of(x, Kind::Float)?.in_registers()?;
        let (gain_stride, shift_stride) = (rows.stride(gain)?, rows.stride(shift)?);
        let (y, moments) = (rows.empty(Kind::BFloat16), rows.empty_columns(2));
        let numbers =
            rows.numbers([rows.inverse_width(), gain_stride.into(), shift_stride.into(), (eps as f32).into()]);
        let tensors = [x, gain, shift, &y, &moments].map(Some);
        self.run(Kernel::LAYER_NORM, rows.row_reduction(), &tensors, &numbers)?;
        Some((y, moments))
    }

    /// The gradient of x, `[L, D]` f32, given the gradient of the result, `[L, D]` bf16, and the moments that
    /// [`FusedOps::layer_norm`] returned.
    pub(super) fn layer_norm_pull(&self, x: &Tensor, gain: &Tensor, moments: &Tensor, d_y: &Tensor) -> Option<Tensor> {
        let rows = Rows::of(x, Kind::Float)?.in_registers()?;
        rows.expect_same(d_y, Kind::BFloat16)?;
        rows.expect_columns(moments, 2)?;
        let gain_stride = rows.stride(gain)?;
        let d_x = rows.empty(Kind::Float);
        let numbers = rows.numbers([rows.inverse_width(), gain_stride.into()]);
        let tensors = [x, gain, moments, d_y, &d_x].map(Some);
        self.run(Kernel::LAYER_NORM_PULL, rows.row_reduction(), &tensors, &numbers)?;
        Some(d_x)
    }

    /// RMS norm over whole rows, `x / sqrt(mean of x^2 + eps) * gain`, followed by rotary embedding of the adjacent
    /// pairs of each head if angles are given. Operands: x `[L, H * d]` bf16, gain `[1, H * d]` f32, cosine and sine
    /// `[L, d / 2]` f32. Returns `[L, H * d]` bf16, and the inverse root mean square of each row, `[L, 1]` f32.
    pub(super) fn rms_rope(
        &self,
        x: &Tensor,
        gain: &Tensor,
        eps: f64,
        rotation: Option<[&Tensor; 2]>,
        heads: i64,
    ) -> Option<(Tensor, Tensor)> {
        let rows = Rows::of(x, Kind::BFloat16)?.in_registers()?;
        rows.expect_one_row(gain)?;
        let pairs_per_head = rows.pairs_per_head(rotation, heads)?;
        let [cosines, sines] = rotation.map_or([None; 2], |angles| angles.map(Some));
        let (y, inverses) = (rows.empty(Kind::BFloat16), rows.empty_columns(1));
        let numbers = rows.numbers([rows.inverse_width(), pairs_per_head.into(), (eps as f32).into()]);
        let tensors = [Some(x), Some(gain), cosines, sines, Some(&y), Some(&inverses)];
        self.run(Kernel::RMS_ROPE, rows.row_reduction(), &tensors, &numbers)?;
        Some((y, inverses))
    }

    /// The gradient of x, `[L, H * d]` bf16, given the gradient of the result (same shape and dtype) and the `inverse`
    /// that [`FusedOps::rms_rope`] returned.
    pub(super) fn rms_rope_pull(
        &self,
        x: &Tensor,
        gain: &Tensor,
        inverse: &Tensor,
        rotation: Option<[&Tensor; 2]>,
        heads: i64,
        d_y: &Tensor,
    ) -> Option<Tensor> {
        let rows = Rows::of(x, Kind::BFloat16)?.in_registers()?;
        rows.expect_same(d_y, Kind::BFloat16)?;
        rows.expect_one_row(gain)?;
        rows.expect_columns(inverse, 1)?;
        let pairs_per_head = rows.pairs_per_head(rotation, heads)?;
        let [cosines, sines] = rotation.map_or([None; 2], |angles| angles.map(Some));
        let d_x = rows.empty(Kind::BFloat16);
        let numbers = rows.numbers([rows.inverse_width(), pairs_per_head.into()]);
        let tensors = [Some(x), Some(gain), Some(inverse), cosines, sines, Some(d_y), Some(&d_x)];
        self.run(Kernel::RMS_ROPE_PULL, rows.row_reduction(), &tensors, &numbers)?;
        Some(d_x)
    }

    /// Returns `x + gate * y` as f32; x `[L, D]` f32, y `[L, D]` bf16, gate `[1, D]` or `[L, D]` f32 (ones by default).
    pub(super) fn gated_add(&self, x: &Tensor, y: &Tensor, gate: Option<&Tensor>) -> Option<Tensor> {
        let rows = Rows::of(x, Kind::Float)?;
        rows.expect_same(y, Kind::BFloat16)?;
        let numbers = rows.numbers([rows.gate_stride(gate)?.into()]);
        let z = rows.empty(Kind::Float);
        self.run(Kernel::GATED_ADD, rows.elementwise_2d(), &[Some(x), Some(y), gate, Some(&z)], &numbers)?;
        Some(z)
    }

    /// The gradient of y of [`FusedOps::gated_add`], `d_z * gate` as bf16, given the gradient of the result, `[L, D]`
    /// f32.
    pub(super) fn gate_pull(&self, d_z: &Tensor, gate: Option<&Tensor>) -> Option<Tensor> {
        let rows = Rows::of(d_z, Kind::Float)?;
        let numbers = rows.numbers([rows.gate_stride(gate)?.into()]);
        let d_y = rows.empty(Kind::BFloat16);
        self.run(Kernel::GATE_PULL, rows.elementwise_2d(), &[Some(d_z), gate, Some(&d_y)], &numbers)?;
        Some(d_y)
    }

    /// SiLU of a row-wise RMS norm: `z / (1 + e^-z)` with `z = x * sqrt(C) / max(|x|, min_norm) * gain`, where `|x|` is
    /// the norm of a row. Operands: x `[L, C]` f32 or bf16, gain `[1, C]` f32. Writes to `y`, which has the shape and
    /// dtype of x.
    pub(super) fn channel_norm_silu(&self, x: &Tensor, gain: &Tensor, min_norm: f32, y: &Tensor) -> Option<()> {
        let rows = Rows::of(x, x.kind())?;
        rows.expect_same(y, x.kind())?;
        rows.expect_one_row(gain)?;
        let kernel = match x.kind() {
            Kind::Float => Kernel::CHANNEL_NORM_F32,
            Kind::BFloat16 => Kernel::CHANNEL_NORM_BF16,
            _ => return None,
        };
        let (shape, lanes) = LaunchShape::channel_norm(rows.rows, rows.width)?;
        let numbers = rows.numbers([lanes.into(), (rows.width as f32).sqrt().into(), min_norm.into()]);
        self.run(kernel, shape, &[x, gain, y].map(Some), &numbers)
    }

    /// The gradient of x, given the gradient of the result of [`FusedOps::channel_norm_silu`]; both have the shape and
    /// dtype of x.
    pub(super) fn channel_norm_silu_pull(
        &self,
        x: &Tensor,
        gain: &Tensor,
        min_norm: f32,
        d_y: &Tensor,
    ) -> Option<Tensor> {
        let rows = Rows::of(x, x.kind())?;
        rows.expect_same(d_y, x.kind())?;
        rows.expect_one_row(gain)?;
        let kernel = match x.kind() {
            Kind::Float => Kernel::CHANNEL_NORM_PULL_F32,
            Kind::BFloat16 => Kernel::CHANNEL_NORM_PULL_BF16,
            _ => return None,
        };
        let (shape, lanes) = LaunchShape::channel_norm(rows.rows, rows.width)?;
        let d_x = rows.empty(x.kind());
        let root = (rows.width as f32).sqrt();
        let numbers = rows.numbers([rows.inverse_width(), lanes.into(), root.into(), min_norm.into()]);
        self.run(kernel, shape, &[x, gain, d_y, &d_x].map(Some), &numbers)?;
        Some(d_x)
    }

    /// One AdamW update. Operands: parameters, gradient, first and second moment, all f32, one-dimensional, of one
    /// length. Returns the new parameters, first and second moments.
    pub(super) fn adam(&self, operands: [&Tensor; 4], update: &AdamUpdate) -> Option<[Tensor; 3]> {
        let (device, size) = (operands[0].device(), operands[0].size());
        let [length] = size.as_slice() else { return None };
        let count = i32::try_from(*length).ok().filter(|count| (1..=MAX_ROWS).contains(count))?;
        let is_supported = |x: &&Tensor| x.size() == size && can_be_read(x, Kind::Float, device);
        if !operands.iter().all(is_supported) {
            return None;
        }
        let new: [Tensor; 3] = std::array::from_fn(|_| Tensor::empty([*length], (Kind::Float, device)));
        let AdamUpdate { scale, beta_2, rest, eps, step_size, root_correction, keep } = *update;
        let numbers = [scale[0], scale[1], beta_2, rest[0], rest[1], eps, step_size, root_correction, keep];
        let numbers: Vec<_> = std::iter::once(Argument::from(count)).chain(numbers.map(Argument::from)).collect();
        let tensors: Vec<_> = operands.into_iter().chain(&new).map(Some).collect();
        self.run(Kernel::ADAM, LaunchShape::elementwise_1d(count), &tensors, &numbers)?;
        Some(new)
    }

    /// Launches a kernel with the given arguments, tensors first. `None` if the launch failed. In that case nothing is
    /// written, and the launcher has logged why.
    fn run(&self, kernel: Kernel, shape: LaunchShape, tensors: &[Option<&Tensor>], numbers: &[Argument]) -> Option<()> {
        let arguments = tensors.iter().map(|tensor| Argument::from(*tensor)).chain(numbers.iter().copied()).collect();
        self.0.launch(&mut Launch { kernel, shape, arguments }).ok()
    }
}

/// Alignment of tensors: the bytes that a kernel reads at once, eight bf16 or four f32.
const ALIGNMENT_BYTES: usize = 16;

/// Whether the tensor has this dtype and device, is contiguous, and is aligned to [`ALIGNMENT_BYTES`].
fn can_be_read(tensor: &Tensor, kind: Kind, device: Device) -> bool {
    tensor.kind() == kind
        && tensor.device() == device
        && tensor.is_contiguous()
        && (tensor.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES)
}

/// Widths must be multiples of this number: kernels read bf16 in groups of eight.
const WIDTH_MULTIPLE: i32 = 8;
/// Pairs that a thread rotates.
const PAIRS_PER_THREAD: i32 = 4;

/// The shape and device of the operands of one call. Its methods return `None` for operands that the kernels do not
/// support.
struct Rows {
    rows: i32,
    width: i32,
    device: Device,
}

impl Rows {
    /// The rows of x, if it is a matrix of `kind` that the kernels can read.
    fn of(x: &Tensor, kind: Kind) -> Option<Self> {
        let size = x.size();
        let [rows, width] = size.as_slice() else { return None };
        let (rows, width) = (i32::try_from(*rows).ok()?, i32::try_from(*width).ok()?);
        let is_supported_size = (1..=MAX_ROWS).contains(&rows) && width > 0 && width % WIDTH_MULTIPLE == 0;
        let found = Self { rows, width, device: x.device() };
        (is_supported_size && found.supports(x, kind)).then_some(found)
    }

    /// These rows, if the kernels can hold one in registers.
    fn in_registers(self) -> Option<Self> {
        (self.width <= MAX_WIDTH).then_some(self)
    }

    /// Whether the kernels can read the tensor on this device.
    fn supports(&self, tensor: &Tensor, kind: Kind) -> bool {
        can_be_read(tensor, kind, self.device)
    }

    /// `Some` if an operand has this size and dtype, and a layout that the kernels can read.
    fn expect(&self, tensor: &Tensor, size: [i64; 2], kind: Kind) -> Option<()> {
        (tensor.size() == size && self.supports(tensor, kind)).then_some(())
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

    /// The number of rotated pairs of a head (0 without a rotation), if the kernels support it. The
    /// [`PAIRS_PER_THREAD`] pairs of a thread must belong to one head. The number of pairs per head must be a power of
    /// two, because the kernel masks indices instead of dividing (a division takes as long as the rotation).
    fn pairs_per_head(&self, rotation: Option<[&Tensor; 2]>, heads: i64) -> Option<i32> {
        let Some(rotation) = rotation else { return Some(0) };
        let heads =
            i32::try_from(heads).ok().filter(|heads| (1..=self.width / (2 * PAIRS_PER_THREAD)).contains(heads))?;
        let pairs_per_head = self.width / heads / 2;
        if pairs_per_head * heads * 2 != self.width
            || pairs_per_head < PAIRS_PER_THREAD
            || !pairs_per_head.unsigned_abs().is_power_of_two()
        {
            return None;
        }
        for angles in rotation {
            self.expect_columns(angles, pairs_per_head.into())?;
        }
        Some(pairs_per_head)
    }

    /// Rows and width, followed by `more`: the arguments of a kernel after its tensors.
    fn numbers<const N: usize>(&self, more: [Argument; N]) -> Vec<Argument> {
        [self.rows, self.width].map(Argument::from).into_iter().chain(more).collect()
    }

    /// `1 / width`, an argument of kernels that compute means.
    fn inverse_width(&self) -> Argument {
        Argument::from(1.0 / self.width as f32)
    }

    fn empty(&self, kind: Kind) -> Tensor {
        Tensor::empty([i64::from(self.rows), i64::from(self.width)], (kind, self.device))
    }

    fn empty_columns(&self, columns: i64) -> Tensor {
        Tensor::empty([i64::from(self.rows), columns], (Kind::Float, self.device))
    }

    fn row_reduction(&self) -> LaunchShape {
        LaunchShape::row_reduction(self.rows, self.width)
    }

    fn elementwise_2d(&self) -> LaunchShape {
        LaunchShape::elementwise_2d(self.rows, self.width)
    }
}
