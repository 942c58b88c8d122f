//! Rotary position embedding.

use burn_tensor::Tensor;

use super::Kernels;
use super::expression::Expression;
use super::operator::{Operator, Pullback, call};
use crate::backend::{Backend, tensor::FloatTensor as Floats};

/// Rotates adjacent pairs of each head of `x` `[L, heads * d]` by angles with the given cosines and sines,
/// `[L, d / 2]`. The angles are constants: no gradient reaches them. Panics if the shapes do not match.
pub fn rope(x: Tensor<2>, cos: Tensor<2>, sin: Tensor<2>, heads: usize) -> Tensor<2> {
    assert_angles(&x, &cos, &sin, heads);
    call(Rope { angles: [cos, sin], heads }, [x.into_dispatch()])
}

/// Panics unless cosine and sine match `heads` heads in each row of `x`.
pub(super) fn assert_angles(x: &Tensor<2>, cos: &Tensor<2>, sin: &Tensor<2>, heads: usize) {
    let [rows, channels] = x.dims();
    let half = channels / heads.max(1) / 2;
    assert!(
        half * heads * 2 == channels && cos.dims() == [rows, half] && sin.dims() == [rows, half],
        "rotation of {heads} heads of {:?} by angles {:?} and {:?}",
        x.dims(),
        cos.dims(),
        sin.dims()
    );
}

/// See [`rope`]; the operand is x.
struct Rope {
    angles: [Tensor<2>; 2],
    heads: usize,
}

impl Operator<1> for Rope {
    fn record<B: Kernels>(self, [x]: [Floats<B>; 1], _: [bool; 1]) -> (Floats<B>, impl Pullback<B, 1>) {
        let (angles, heads) = (self.angles.map(|angle| B::constant(angle.into_dispatch())), self.heads);
        let y = B::rotate(x, angles.clone(), heads, Direction::Forward);
        (y, move |d_y| [Some(B::rotate(d_y, angles, heads, Direction::Back))])
    }
}

/// Direction of a rotation. The gradient of a rotation is the inverse rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Rotates by the given angles.
    Forward,
    /// Rotates by minus the given angles.
    Back,
}

/// The rotation on one backend.
pub trait RopeKernel: Backend {
    /// Rotates by angles given as cosine and sine, in `direction`.
    fn rotate(x: Floats<Self>, angles: [Floats<Self>; 2], heads: usize, direction: Direction) -> Floats<Self> {
        let x = Expression::<Self>(x);
        let [rows, channels] = x.dims();
        let half = channels / heads / 2;
        if x.is_empty() {
            return x.0;
        }
        let pairs = x.reshape([rows, heads, half, 2]);
        let (even, odd) = (pairs.clone().narrow(3, 0..1), pairs.narrow(3, 1..2));
        let [cos, sin] = angles.map(|angle| Expression::<Self>(angle).reshape([rows, 1, half, 1]));
        let sign = match direction {
            Direction::Forward => 1.0,
            Direction::Back => -1.0,
        };
        let sin = sin * sign;
        let rotated_even = even.clone() * cos.clone() - odd.clone() * sin.clone();
        let rotated_odd = even * sin + odd * cos;
        Expression::cat(vec![rotated_even, rotated_odd], 3).reshape([rows, channels]).0
    }
}
