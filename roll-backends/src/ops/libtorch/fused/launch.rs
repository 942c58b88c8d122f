//! Kernel names, launch configurations and arguments of the fused kernels.

use std::ffi::{CStr, c_void};

use tch::Tensor;

/// A kernel of the `.cu` files in this folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    LayerNorm,
    LayerNormPull,
    RmsRope,
    RmsRopePull,
    GatedAdd,
    GatePull,
    ChannelNormF32,
    ChannelNormBf16,
    ChannelNormPullF32,
    ChannelNormPullBf16,
    Adam,
}

impl Kernel {
    pub(super) const ALL: [Self; 11] = [
        Self::LayerNorm,
        Self::LayerNormPull,
        Self::RmsRope,
        Self::RmsRopePull,
        Self::GatedAdd,
        Self::GatePull,
        Self::ChannelNormF32,
        Self::ChannelNormBf16,
        Self::ChannelNormPullF32,
        Self::ChannelNormPullBf16,
        Self::Adam,
    ];

    /// The kernel's symbol.
    pub(super) fn name(self) -> &'static CStr {
        match self {
            Self::LayerNorm => c"layer_norm",
            Self::LayerNormPull => c"layer_norm_pull",
            Self::RmsRope => c"rms_rope",
            Self::RmsRopePull => c"rms_rope_pull",
            Self::GatedAdd => c"gated_add",
            Self::GatePull => c"gate_pull",
            Self::ChannelNormF32 => c"channel_norm_f32",
            Self::ChannelNormBf16 => c"channel_norm_bf16",
            Self::ChannelNormPullF32 => c"channel_norm_pull_f32",
            Self::ChannelNormPullBf16 => c"channel_norm_pull_bf16",
            Self::Adam => c"adam",
        }
    }
}

/// A device that runs kernels: a GPU, or the CPU emulation in tests.
pub(super) trait Machine {
    /// Queues a launch behind earlier work of the device. Fails, with the reason, if nothing was queued.
    fn launch(&self, launch: &mut Launch) -> Result<(), String>;
}

/// A kernel launch: kernel, grid, block and arguments.
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    /// Number of blocks.
    pub(super) grid: u32,
    /// Threads per block in x and y.
    pub(super) block: [u32; 2],
    arguments: Vec<Argument>,
}

impl Launch {
    pub(super) fn new(kernel: Kernel, shape: Shape, arguments: impl Into<Vec<Argument>>) -> Self {
        Self { kernel, grid: shape.grid, block: shape.block, arguments: arguments.into() }
    }

    /// Pointers to the arguments, as the driver takes them. Valid until `self` is moved or dropped.
    pub(super) fn parameters(&mut self) -> Vec<*mut c_void> {
        self.arguments.iter_mut().map(|argument| std::ptr::from_mut(&mut argument.0).cast()).collect()
    }
}

/// A kernel argument, stored in the leading bytes.
#[derive(Clone, Copy)]
pub(super) struct Argument(u64);

impl Argument {
    /// A null pointer: no tensor.
    pub(super) const NONE: Self = Self(0);

    fn of_four(bytes: [u8; 4]) -> Self {
        let [a, b, c, d] = bytes;
        Self(u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]))
    }
}

/// Passes the address of the tensor's memory.
impl From<&Tensor> for Argument {
    fn from(tensor: &Tensor) -> Self {
        Self(tensor.data_ptr() as u64)
    }
}

impl From<Option<&Tensor>> for Argument {
    fn from(tensor: Option<&Tensor>) -> Self {
        tensor.map_or(Self::NONE, Self::from)
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

/// Maximum width of kernels that reduce over rows and hold a row in registers: 512 threads with 32 numbers each.
pub(super) const WIDEST: i32 = 16_384;
/// Maximum number of rows: more would overflow the kernels' indices.
pub(super) const MOST_ROWS: i32 = 1 << 30;

/// Rows per thread, `ROWS` of `kernels.cu`.
const ROWS_OF_A_THREAD: u32 = 4;
/// Numbers of a row per thread, `4 * FOURS` and `8 * EIGHTS` of `kernels.cu`.
const NUMBERS_OF_A_THREAD: u32 = 32;
const WARP: u32 = 32;
/// Numbers per lane, `4 * PARTS` of `channel_norm.cu`.
const NUMBERS_OF_A_LANE: i32 = 16;
/// Threads per block of `channel_norm.cu`.
const SHORT_ROWS_BLOCK: u32 = 128;
/// Threads per block of one-dimensional kernels.
const LINE_BLOCK: u32 = 256;

/// Grid and block of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) grid: u32,
    pub(super) block: [u32; 2],
}

impl Shape {
    /// Launch configuration of row reductions. A row gets the number of warps that hold it in registers; narrow rows
    /// share a block.
    ///
    /// At width 5,120 a row has 160 threads. Three to six such blocks fit a multiprocessor (registers are the limit),
    /// each with 10 to 30 KB in flight: 60 KB or more. A latency of 800 ns at 4.3 TB/s over 132 multiprocessors needs
    /// 26 KB in flight, so there is enough while some blocks reduce and others write. Threads with half the numbers
    /// would have no more in flight and issue a tenth more instructions.
    pub(super) fn along_rows(rows: i32, width: i32) -> Self {
        let (rows, width) = (rows.unsigned_abs(), width.unsigned_abs());
        let across = width.div_ceil(NUMBERS_OF_A_THREAD).next_multiple_of(WARP);
        let down = (128 / across).max(1);
        Self { grid: rows.div_ceil(down), block: [across, down] }
    }

    /// Launch configuration of reductions over short rows: `lanes` threads of a warp share a row. Returns `None` if a
    /// row exceeds what they hold, or the number of rows exceeds the kernels' indices.
    ///
    /// At 96 channels a thread has 48 bytes of f32, or 24 of bf16, of each operand in flight.
    pub(super) fn along_short_rows(rows: i32, width: i32) -> Option<(Self, i32)> {
        let lanes = [8, 16, 32].into_iter().find(|lanes| width <= lanes * NUMBERS_OF_A_LANE)?;
        let threads = rows.checked_mul(lanes)?.checked_add(SHORT_ROWS_BLOCK as i32)?.unsigned_abs();
        Some((Self { grid: (threads - 1) / SHORT_ROWS_BLOCK, block: [SHORT_ROWS_BLOCK, 1] }, lanes))
    }

    /// Launch configuration of one-dimensional kernels over `count` numbers (at least one): four numbers per thread.
    pub(super) fn in_a_line(count: i32) -> Self {
        Self { grid: count.unsigned_abs().div_ceil(4 * LINE_BLOCK), block: [LINE_BLOCK, 1] }
    }

    /// Launch configuration of elementwise kernels over a matrix: a thread takes four columns of four rows, so that it
    /// reads a shared gate once, and has 64 to 96 bytes in flight.
    pub(super) fn by_number(rows: i32, width: i32) -> Self {
        let (rows, fours) = (rows.unsigned_abs(), width.unsigned_abs() / 4);
        let parts = fours.div_ceil(256);
        let across = match fours {
            0..WARP => fours.max(1).next_power_of_two(),
            _ => fours.div_ceil(parts).next_multiple_of(WARP),
        };
        let down = 256 / across;
        // A grid beyond the driver's limit is reported as a launch error.
        Self { grid: rows.div_ceil(down * ROWS_OF_A_THREAD).saturating_mul(parts), block: [across, down] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_shapes_cover_every_row_and_column() {
        for width in (8..=WIDEST).step_by(8) {
            for rows in [1, 3, 37, 18_900] {
                let [across, down] = Shape::along_rows(rows, width).block;
                assert!(across % 32 == 0 && across * down <= 512, "{width}: {across} x {down}");
                assert!(across * NUMBERS_OF_A_THREAD >= width.unsigned_abs());
                assert!(Shape::along_rows(rows, width).grid * down >= rows.unsigned_abs());

                let Shape { grid, block: [across, down] } = Shape::by_number(rows, width);
                let parts = (width.unsigned_abs() / 4).div_ceil(across);
                assert!(across * down <= 256 && grid % parts == 0, "{width}: {across} x {down}");
                assert!(grid / parts * down * ROWS_OF_A_THREAD >= rows.unsigned_abs());
            }
        }
        for (width, expected) in [(8, 8), (96, 8), (128, 8), (192, 16), (384, 32), (512, 32)] {
            for rows in [1, 37, 921_600] {
                let (Shape { grid, block: [across, down] }, lanes) = Shape::along_short_rows(rows, width).unwrap();
                assert_eq!((lanes, across % 32, down), (expected, 0, 1));
                let held = u64::from(grid) * u64::from(across) / lanes as u64;
                assert!((rows as u64..rows as u64 + 16).contains(&held), "{rows} of {width}: {held}");
            }
        }
        assert!(Shape::along_short_rows(1, 520).is_none() && Shape::along_short_rows(i32::MAX / 8, 96).is_none());
        assert_eq!(Shape::along_rows(18_900, 5120), Shape { grid: 18_900, block: [160, 1] });
        assert_eq!(Shape::by_number(18_900, 5120), Shape { grid: 4725 * 5, block: [256, 1] });
    }
}
