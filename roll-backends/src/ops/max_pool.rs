//! 2-d max pooling.

use burn_tensor::Tensor;
use burn_tensor::ops::PadMode;

use super::Kernels;
use super::conv2d::has_own_kernel;
use super::operator::{Operator, Pullback, call};
use crate::backend::tensor::{FloatTensor as Floats, IntTensor};
use crate::backend::{Backend, TensorMetadata, get_or_init_device_settings};

/// The window of a max pooling. Axes are rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPoolWindow {
    /// Rows and columns of the window.
    pub kernel: [usize; 2],
    /// Stride.
    pub stride: [usize; 2],
    /// Dilation.
    pub dilation: [usize; 2],
    /// Padding (before, after) of each axis, with negative infinity.
    pub padding: [(usize, usize); 2],
}

impl MaxPoolWindow {
    /// Rows and columns of the output for an input of `size`; `None` if the window does not fit.
    pub fn output(&self, size: [usize; 2]) -> Option<[usize; 2]> {
        let output_along = |axis: usize| {
            let (before, after) = self.padding[axis];
            let dilated_kernel = self.kernel[axis].checked_sub(1)? * self.dilation[axis] + 1;
            Some((size[axis] + before + after).checked_sub(dilated_kernel)? / self.stride[axis] + 1)
        };
        Some([output_along(0)?, output_along(1)?])
    }
}

/// Max-pools x `[N, C, H, W]`, f32, to `[N, C, H', W']`. The gradient flows to the first maximum of a window. Panics if
/// the window does not fit or a stride is 0.
pub fn max_pool(x: Tensor<4>, window: MaxPoolWindow) -> Tensor<4> {
    let [_, _, rows, columns] = x.dims();
    assert!(
        !window.stride.contains(&0) && window.output([rows, columns]).is_some(),
        "{window:?} over {rows} rows and {columns} columns"
    );
    if has_own_kernel(&x) {
        return call(window, [x.into_dispatch()]);
    }
    const NO_PADDING: [(usize, usize); 2] = [(0, 0); 2];
    let x = if window.padding == NO_PADDING { x } else { x.pad(window.padding, PadMode::Constant(f32::NEG_INFINITY)) };
    call(MaxPoolWindow { padding: NO_PADDING, ..window }, [x.into_dispatch()])
}

impl Operator<1> for MaxPoolWindow {
    fn record<B: Kernels>(self, [x]: [Floats<B>; 1], [wanted]: [bool; 1]) -> (Floats<B>, impl Pullback<B, 1>) {
        let (y, indices) = B::max_pool_forward(x.clone(), self, wanted);
        (y.clone(), move |d_y| [Some(B::max_pool_backward(x, y, indices, self, d_y))])
    }
}

/// Burn's argument `padding`: none on either axis.
const UNPADDED: [usize; 2] = [0; 2];
/// Burn's argument `ceil_mode`: sizes of outputs are rounded down.
const CEIL_MODE: bool = false;

/// The operator and its gradient on one backend. The default methods require windows without padding.
pub trait MaxPoolKernel: Backend {
    /// Returns the result and, if `is_recorded` is true and the backend's backward pass uses them, the indices of the
    /// maxima.
    fn max_pool_forward(
        x: Floats<Self>,
        window: MaxPoolWindow,
        is_recorded: bool,
    ) -> (Floats<Self>, Option<IntTensor<Self>>) {
        let MaxPoolWindow { kernel, stride, dilation, .. } = window;
        if !is_recorded {
            return (Self::max_pool2d(x, kernel, stride, UNPADDED, dilation, CEIL_MODE), None);
        }
        let dtype = get_or_init_device_settings::<Self>(&x.device()).int_dtype;
        let found = Self::max_pool2d_with_indices(x, kernel, stride, UNPADDED, dilation, CEIL_MODE, dtype);
        (found.output, Some(found.indices))
    }

    /// Returns the gradient of x, given the results of the forward pass and the cotangent of its output.
    fn max_pool_backward(
        x: Floats<Self>,
        _y: Floats<Self>,
        indices: Option<IntTensor<Self>>,
        window: MaxPoolWindow,
        d_y: Floats<Self>,
    ) -> Floats<Self> {
        let MaxPoolWindow { kernel, stride, dilation, .. } = window;
        let dtype = get_or_init_device_settings::<Self>(&x.device()).int_dtype;
        let indices = indices.unwrap_or_else(|| {
            Self::max_pool2d_with_indices(x.clone(), kernel, stride, UNPADDED, dilation, CEIL_MODE, dtype).indices
        });
        Self::max_pool2d_with_indices_backward(x, kernel, stride, UNPADDED, dilation, CEIL_MODE, d_y, indices).x_grad
    }
}
