//! Linear combinations of host tensors.

use roll_core::{Error, Result, Tensor};

/// `x + a y`.
pub(crate) fn axpy(x: &Tensor, a: f32, y: &Tensor) -> Result<Tensor> {
    if x.shape() != y.shape() {
        return Err(Error::shape("second operand of a sum", format!("{:?}", x.shape()), y.shape()));
    }
    let values = x.f32s()?.iter().zip(y.f32s()?).map(|(x, y)| x + a * y).collect::<Vec<f32>>();
    Tensor::new(values, x.shape())
}

/// `a x`.
pub(crate) fn scaled(x: &Tensor, a: f32) -> Result<Tensor> {
    Tensor::new(x.f32s()?.iter().map(|x| x * a).collect::<Vec<f32>>(), x.shape())
}
