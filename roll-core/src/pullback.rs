//! Value and pullback: how everything differentiable is written here.

use std::fmt;

use crate::{Result, Tensor};

/// Whether a call records for a pullback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grad {
    /// Return a pullback.
    Record,
    /// Return the value only and keep nothing.
    Skip,
}

impl Grad {
    /// Whether a pullback is requested.
    pub fn is_on(self) -> bool {
        self == Self::Record
    }
}

/// The linear map from the cotangent of a value to the cotangent of its differentiable input.
///
/// It corresponds to the second result of `jax.vjp`. A pullback is consumed by its use, so nothing can be
/// back-propagated twice by mistake. Gradients of the parameters involved are added to the accumulators of the model
/// that owns them ([`crate::Model::take_gradients`]).
///
/// A chain of values is pulled back from its end:
///
/// ```
/// use roll_core::{Pullback, Result, Tensor};
///
/// /// x^2, elementwise.
/// fn square(x: &Tensor) -> Result<(Tensor, Pullback)> {
///     let (x, shape) = (x.f32s()?.to_vec(), x.shape().to_vec());
///     let value = Tensor::new(x.iter().map(|x| x * x).collect(), shape.clone())?;
///     let pull = move |d: &Tensor| Tensor::new(d.f32s()?.iter().zip(&x).map(|(d, x)| 2.0 * x * d).collect(), shape);
///     Ok((value, Pullback::new(pull)))
/// }
///
/// /// The sum of all elements, a scalar.
/// fn sum(x: &Tensor) -> Result<(Tensor, Pullback)> {
///     let shape = x.shape().to_vec();
///     let value = Tensor::scalar(x.f32s()?.iter().sum());
///     Ok((value, Pullback::new(move |d: &Tensor| Ok(Tensor::full(shape, d.item()?)))))
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::new(vec![1.0f32, -2.0, 3.0], [3])?;
/// let (squares, pull_square) = square(&x)?;
/// let (total, pull_sum) = sum(&squares)?;
/// assert_eq!(total.item()?, 14.0);
///
/// let d_squares = pull_sum.pull(&Tensor::scalar(1.0))?;
/// let d_x = pull_square.pull(&d_squares)?;
/// assert_eq!(d_x.f32s()?, [2.0, -4.0, 6.0]);
/// # Ok(())
/// # }
/// ```
pub struct Pullback(Box<PullFn>);

type PullFn = dyn FnOnce(&Tensor) -> Result<Tensor> + Send;

impl Pullback {
    /// Wraps a function from the cotangent of the value, in the shape of the value, to the cotangent of the input, in
    /// the shape of the input.
    pub fn new(pull: impl FnOnce(&Tensor) -> Result<Tensor> + Send + 'static) -> Self {
        Self(Box::new(pull))
    }

    /// Returns the cotangent of the input for a cotangent of the value.
    pub fn pull(self, cotangent: &Tensor) -> Result<Tensor> {
        (self.0)(cotangent)
    }
}

impl fmt::Debug for Pullback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pullback")
    }
}
