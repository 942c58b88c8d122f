//! Value and pullback: how everything differentiable is written here.

use std::fmt;

use crate::{Result, Tensor};

/// Whether a call keeps what its pullback needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grad {
    /// Return a pullback.
    Record,
    /// Return the value only and keep nothing.
    Skip,
}

impl Grad {
    /// Whether a pullback is wanted.
    pub fn is_on(self) -> bool {
        self == Self::Record
    }
}

/// The linear map from the cotangent of a value to the cotangent of its differentiable input.
///
/// As `jax.vjp`'s second result. It is consumed by use, so nothing can be back-propagated twice by mistake; gradients
/// of the parameters involved are added to the owner's accumulators ([`crate::Model::take_gradients`]).
pub struct Pullback(Box<PullFn>);

type PullFn = dyn FnOnce(&Tensor) -> Result<Tensor> + Send;

impl Pullback {
    /// A pullback from a function of the cotangent (shape of the value) to the cotangent of the input (its shape).
    pub fn new(pull: impl FnOnce(&Tensor) -> Result<Tensor> + Send + 'static) -> Self {
        Self(Box::new(pull))
    }

    /// Applies it.
    pub fn pull(self, cotangent: &Tensor) -> Result<Tensor> {
        (self.0)(cotangent)
    }
}

impl fmt::Debug for Pullback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pullback")
    }
}
