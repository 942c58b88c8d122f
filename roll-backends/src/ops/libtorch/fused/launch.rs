//! Kernel names, launch configurations and arguments of the fused kernels.

use std::ffi::{CStr, c_void};

use tch::Tensor;

/// A kernel of the `.cu` files in this folder, by its symbol. `..._PULL` are the kernels of pullbacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kernel(pub(super) &'static CStr);

impl Kernel {
    pub(super) const LAYER_NORM: Self = Self(c"layer_norm");
    pub(super) const LAYER_NORM_PULL: Self = Self(c"layer_norm_pull");
    pub(super) const RMS_ROPE: Self = Self(c"rms_rope");
    pub(super) const RMS_ROPE_PULL: Self = Self(c"rms_rope_pull");
    pub(super) const GATED_ADD: Self = Self(c"gated_add");
    pub(super) const GATE_PULL: Self = Self(c"gate_pull");
    pub(super) const CHANNEL_NORM_F32: Self = Self(c"channel_norm_f32");
    pub(super) const CHANNEL_NORM_BF16: Self = Self(c"channel_norm_bf16");
    pub(super) const CHANNEL_NORM_PULL_F32: Self = Self(c"channel_norm_pull_f32");
    pub(super) const CHANNEL_NORM_PULL_BF16: Self = Self(c"channel_norm_pull_bf16");
    pub(super) const ADAM: Self = Self(c"adam");

    pub(super) const ALL: [Self; 11] = [
        Self::LAYER_NORM,
        Self::LAYER_NORM_PULL,
        Self::RMS_ROPE,
        Self::RMS_ROPE_PULL,
        Self::GATED_ADD,
        Self::GATE_PULL,
        Self::CHANNEL_NORM_F32,
        Self::CHANNEL_NORM_BF16,
        Self::CHANNEL_NORM_PULL_F32,
        Self::CHANNEL_NORM_PULL_BF16,
        Self::ADAM,
    ];
}

/// A device that runs kernels: a GPU, or the CPU emulation in tests.
pub trait Launcher {
    /// Queues a launch behind earlier work of the device. Fails, with the reason, if nothing was queued.
    fn launch(&self, launch: &mut Launch) -> Result<(), String>;
}

/// A kernel with its arguments and the shape in which it runs.
pub struct Launch {
    pub(super) kernel: Kernel,
    pub(super) shape: LaunchShape,
    pub(super) arguments: Vec<Argument>,
}

impl Launch {
    /// Pointers to the arguments, as the driver takes them. Valid until `self` is moved or dropped.
    pub(super) fn parameters(&mut self) -> Vec<*mut c_void> {
        self.arguments.iter_mut().map(|argument| std::ptr::from_mut(&mut argument.0).cast()).collect()
    }
}

/// A kernel argument of four or eight bytes, stored in the leading bytes.
#[derive(Clone, Copy)]
pub(super) struct Argument(u64);

impl Argument {
    fn of_four(bytes: [u8; 4]) -> Self {
        let [a, b, c, d] = bytes;
        Self(u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]))
    }
}

/// Passes the address of the tensor's memory, or a null pointer.
impl From<Option<&Tensor>> for Argument {
    fn from(tensor: Option<&Tensor>) -> Self {
        Self(tensor.map_or(0, |tensor| tensor.data_ptr() as u64))
    }
}

impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Self::of_four(value.to_ne_bytes())
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::of_four(value.to_ne_bytes())
    }
}

/// Maximum width of kernels that reduce each row and hold it in registers: 512 threads with 32 numbers each.
pub(super) const MAX_WIDTH: i32 = 16_384;
/// Maximum number of rows: more would overflow the kernels' indices.
pub(super) const MAX_ROWS: i32 = 1 << 30;

/// Rows per thread; must equal `ROWS` of `kernels.cu`.
const ROWS_PER_THREAD: u32 = 4;
/// Adjacent numbers per thread of elementwise kernels, which read four f32 at a time.
const COLUMNS_PER_THREAD: u32 = 4;
/// Numbers of a row per thread; must equal `4 * FOURS` and `8 * EIGHTS` of `kernels.cu`, where a thread reads
/// f32 in groups of four and bf16 in groups of eight.
const NUMBERS_PER_THREAD: u32 = 32;
/// Threads of a warp.
const WARP: u32 = 32;
/// Numbers per lane; must equal `4 * PARTS` of `channel_norm.cu`.
const NUMBERS_PER_LANE: i32 = 16;
/// Threads per block of `channel_norm.cu`.
const CHANNEL_NORM_BLOCK: u32 = 128;
/// Threads per block of elementwise kernels.
const ELEMENTWISE_BLOCK: u32 = 256;
/// Minimum number of threads per block of row reductions: a narrower row shares its block with others.
const MIN_ROW_REDUCTION_BLOCK: u32 = 128;

/// Grid and block of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchShape {
    /// Number of blocks.
    pub(super) grid: u32,
    /// Threads per block in x and y.
    pub(super) block: [u32; 2],
}

impl LaunchShape {
    /// Shape of row reductions. A row gets the number of warps that hold it in registers; narrow rows share a block.
    ///
    /// 32 numbers per thread keep the memory of an H200 busy at width 5,120, where a row has 160 threads. To hide a
    /// latency of 800 ns at 4.3 TB/s, each of its 132 multiprocessors needs 26 KB in flight. Registers limit a
    /// multiprocessor to six blocks of kernels that read one row in bf16 (10 KB), and to three of kernels that read
    /// several operands (20 to 30 KB): at least 60 KB are in flight, enough even while half of the blocks reduce or
    /// write. With 16 numbers per thread, no more bytes would be in flight, and a tenth more instructions would be
    /// issued.
    pub(super) fn row_reduction(rows: i32, width: i32) -> Self {
        let (rows, width) = (rows.unsigned_abs(), width.unsigned_abs());
        // Threads per row, and rows per block.
        let across = width.div_ceil(NUMBERS_PER_THREAD).next_multiple_of(WARP);
        let down = (MIN_ROW_REDUCTION_BLOCK / across).max(1);
        Self { grid: rows.div_ceil(down), block: [across, down] }
    }

    /// Shape of the kernels of `channel_norm.cu`, where a row is the channels of one position, and the number of lanes
    /// of a warp that take a row: 8, 16 or 32, so that narrow rows share a warp. `None` if a row exceeds what a warp
    /// holds, or the number of rows exceeds the kernels' indices.
    ///
    /// At 96 channels a thread has 48 bytes of f32, or 24 of bf16, of each operand in flight.
    pub(super) fn channel_norm(rows: i32, width: i32) -> Option<(Self, i32)> {
        let lanes = [8, 16, 32].into_iter().find(|lanes| width <= lanes * NUMBERS_PER_LANE)?;
        let threads = rows.checked_mul(lanes)?;
        // The last block may be partly idle: the indices of its threads must fit, too.
        threads.checked_add(CHANNEL_NORM_BLOCK as i32)?;
        Some((
            Self { grid: threads.unsigned_abs().div_ceil(CHANNEL_NORM_BLOCK), block: [CHANNEL_NORM_BLOCK, 1] },
            lanes,
        ))
    }

    /// Shape of one-dimensional kernels over `count` numbers (at least one): four numbers per thread.
    pub(super) fn elementwise_1d(count: i32) -> Self {
        Self {
            grid: count.unsigned_abs().div_ceil(COLUMNS_PER_THREAD * ELEMENTWISE_BLOCK),
            block: [ELEMENTWISE_BLOCK, 1],
        }
    }

    /// Shape of elementwise kernels over a matrix: a thread takes four columns of four rows. A gate that all rows
    /// share is read once for the four rows; 64 to 96 bytes are in flight.
    pub(super) fn elementwise_2d(rows: i32, width: i32) -> Self {
        // A row has `fours` groups of four columns.
        let (rows, fours) = (rows.unsigned_abs(), width.unsigned_abs() / COLUMNS_PER_THREAD);
        // Rows wider than a block are divided into parts of nearly equal width, one block each.
        let parts = fours.div_ceil(ELEMENTWISE_BLOCK);
        let across = match fours {
            0..WARP => fours.max(1).next_power_of_two(),
            _ => fours.div_ceil(parts).next_multiple_of(WARP),
        };
        let down = ELEMENTWISE_BLOCK / across;
        // A grid beyond the driver's limit is reported as a launch error.
        Self { grid: rows.div_ceil(down * ROWS_PER_THREAD).saturating_mul(parts), block: [across, down] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_launches_cover_every_row_and_column() {
        for width in (8..=MAX_WIDTH).step_by(8) {
            for rows in [1, 3, 37, 18_900] {
                let [across, down] = LaunchShape::row_reduction(rows, width).block;
                assert!(across % 32 == 0 && across * down <= 512, "{width}: {across} x {down}");
                assert!(across * NUMBERS_PER_THREAD >= width.unsigned_abs());
                assert!(LaunchShape::row_reduction(rows, width).grid * down >= rows.unsigned_abs());

                let LaunchShape { grid, block: [across, down] } = LaunchShape::elementwise_2d(rows, width);
                let parts = (width.unsigned_abs() / 4).div_ceil(across);
                assert!(across * down <= 256 && grid % parts == 0, "{width}: {across} x {down}");
                assert!(grid / parts * down * ROWS_PER_THREAD >= rows.unsigned_abs());
            }
        }
        for (width, expected) in [(8, 8), (96, 8), (128, 8), (192, 16), (384, 32), (512, 32)] {
            for rows in [1, 37, 921_600] {
                let (LaunchShape { grid, block: [across, down] }, lanes) =
                    LaunchShape::channel_norm(rows, width).unwrap();
                assert_eq!((lanes, across % 32, down), (expected, 0, 1));
                let held = u64::from(grid) * u64::from(across) / lanes as u64;
                assert!((rows as u64..rows as u64 + 16).contains(&held), "{rows} of {width}: {held}");
            }
        }
        assert!(LaunchShape::channel_norm(1, 520).is_none() && LaunchShape::channel_norm(i32::MAX / 8, 96).is_none());
        assert_eq!(LaunchShape::row_reduction(18_900, 5120), LaunchShape { grid: 18_900, block: [160, 1] });
        assert_eq!(LaunchShape::elementwise_2d(18_900, 5120), LaunchShape { grid: 4725 * 5, block: [256, 1] });
    }
}
