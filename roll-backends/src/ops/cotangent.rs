//! Starts backward passes from a given cotangent.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{FloatDType, Shape, Tensor};

use super::record::record;

/// A scalar whose gradient with respect to `y` is `cotangent`. Its value is 0 and meaningless.
///
/// `seed(y, g).backward()` computes the same gradients as `(y * g).sum().backward()`, without its four passes over
/// memory. The scalar must be differentiated directly or added to other seeds: a factor on it would have no effect.
pub fn seed<const D: usize>(y: Tensor<D>, cotangent: Tensor<D>) -> Tensor<1> {
    assert_eq!(y.dims(), cotangent.dims(), "a value and its cotangent");
    Tensor::from_dispatch(<Dispatch as SeedOps>::seed_cotangent(y.into_dispatch(), cotangent.into_dispatch()))
}

/// Backend dispatch of [`seed`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait SeedOps: Backend {
    /// See [`seed`].
    fn seed_cotangent(y: FloatTensor<Self>, cotangent: FloatTensor<Self>) -> FloatTensor<Self> {
        let _ = cotangent;
        Self::float_zeros(Shape::new([1]), &y.device(), FloatDType::from(y.dtype()))
    }
}

#[cfg(feature = "flex")]
impl SeedOps for burn::backend::Flex {}

#[cfg(feature = "libtorch")]
impl SeedOps for burn::backend::LibTorch {}

#[cfg(feature = "cube")]
impl SeedOps for burn::backend::Cube {}

impl<B: SeedOps, C: CheckpointStrategy> SeedOps for Autodiff<B, C> {
    fn seed_cotangent(y: FloatTensor<Self>, cotangent: FloatTensor<Self>) -> FloatTensor<Self> {
        let cotangent = cotangent.into_primitive();
        record::<B, C, _, 1>([y], |[y]| {
            let zero = B::seed_cotangent(y, cotangent.clone());
            (zero, move |_, _| [Some(cotangent)])
        })
    }
}
