//! Broadcasting between tensors of any rank.

use burn_tensor::Tensor;
use roll_backends::NdTensor;

use super::super::error::Problem;
use super::super::value::elements;

/// The shape to which `a` and `b` broadcast. Fails if they do not.
pub(super) fn shape(a: &[usize], b: &[usize]) -> Result<Vec<usize>, Problem> {
    let rank = a.len().max(b.len());
    let shape: Option<Vec<usize>> = (0..rank)
        .map(|axis| match (length_at(a, axis, rank), length_at(b, axis, rank)) {
            (m, n) if m == n => Some(m),
            (1, n) | (n, 1) => Some(n),
            _ => None,
        })
        .collect();
    let shape = shape.ok_or_else(|| format!("the shapes {a:?} and {b:?} do not broadcast"))?;
    elements(&shape)?;
    Ok(shape)
}

/// The length of `axis` of a tensor of shape `s` that broadcasts to `rank` axes: 1 for the axes that it lacks in front.
fn length_at(s: &[usize], axis: usize, rank: usize) -> usize {
    (axis + s.len()).checked_sub(rank).map_or(1, |i| s[i])
}

/// Applies `f` to two tensors that broadcast.
///
/// Neighbouring axes that broadcast in the same way are merged into one, so four axes suffice for all real cases. The
/// common cases (equal shapes, a scalar, one number per channel) need one to three.
pub(super) fn apply(
    a: &NdTensor,
    b: &NdTensor,
    f: impl FnOnce(Tensor<4>, Tensor<4>) -> Tensor<4>,
) -> Result<NdTensor, Problem> {
    let shape = shape(a.shape(), b.shape())?;
    let (a_4, b_4) = collapse(a.shape(), b.shape())?;
    let y = f(a.flat().clone().reshape(a_4), b.flat().clone().reshape(b_4));
    let flat = y.reshape([shape.iter().product::<usize>()]);
    Ok(NdTensor::from_flat(flat, shape))
}

/// Repeats `x` to the shape `to`. Fails unless `x` broadcasts to it.
pub(super) fn expand(x: &NdTensor, to: &[usize]) -> Result<NdTensor, Problem> {
    if shape(x.shape(), to)? != to {
        return Err(format!("{:?} does not broadcast to {to:?}", x.shape()).into());
    }
    let (from_4, to_4) = collapse(x.shape(), to)?;
    let y = x.flat().clone().reshape(from_4).expand(to_4);
    Ok(NdTensor::from_flat(y.reshape([to.iter().product::<usize>()]), to))
}

/// The flat index in a tensor of shape `from` that corresponds to element `index` of the broadcast shape `to`.
pub(super) fn source(mut index: usize, to: &[usize], from: &[usize]) -> usize {
    let (mut flat, mut stride) = (0, 1);
    for axis in (0..to.len()).rev() {
        let position = index % to[axis];
        index /= to[axis];
        let Some(from_axis) = (axis + from.len()).checked_sub(to.len()) else { continue };
        if from[from_axis] != 1 {
            flat += position * stride;
        }
        stride *= from[from_axis];
    }
    flat
}

/// Shapes with four axes that broadcast to each other as `a` and `b` do, with the elements in the same order. Fails if
/// `a` and `b` need more axes.
fn collapse(a: &[usize], b: &[usize]) -> Result<([usize; 4], [usize; 4]), Problem> {
    let rank = a.len().max(b.len());
    // Pairs of lengths (in a, in b). Neighbouring axes are merged if both are equal in a and b, or if both broadcast in
    // the same one of a and b, where their length is 1.
    let mut runs: Vec<(usize, usize)> = vec![];
    let broadcast_side = |(m, n): (usize, usize)| m.cmp(&n);
    for axis in 0..rank {
        let pair = (length_at(a, axis, rank), length_at(b, axis, rank));
        if pair == (1, 1) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if broadcast_side(*last) == broadcast_side(pair) => *last = (last.0 * pair.0, last.1 * pair.1),
            _ => runs.push(pair),
        }
    }
    if runs.len() > 4 {
        return Err(format!("the shapes {a:?} and {b:?} broadcast in more than four alternating groups").into());
    }
    let (mut a_4, mut b_4) = ([1; 4], [1; 4]);
    let start = 4 - runs.len();
    for (i, (m, n)) in runs.into_iter().enumerate() {
        (a_4[start + i], b_4[start + i]) = (m, n);
    }
    Ok((a_4, b_4))
}
