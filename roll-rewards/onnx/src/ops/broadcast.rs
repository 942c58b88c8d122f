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

/// The length of `axis` of a tensor of `shape` that broadcasts to `rank` axes: 1 for the axes that it lacks in front.
fn length_at(shape: &[usize], axis: usize, rank: usize) -> usize {
    (axis + shape.len()).checked_sub(rank).map_or(1, |i| shape[i])
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
    // Pairs of lengths (in a, in b). Two neighbouring axes are merged if a and b have equal lengths on both axes, or if
    // the same one of a and b has length 1 on both axes.
    let mut runs: Vec<(usize, usize)> = vec![];
    // Whether the lengths are equal, and otherwise which tensor has length 1.
    let broadcast_side = |(in_a, in_b): (usize, usize)| in_a.cmp(&in_b);
    for axis in 0..rank {
        let (in_a, in_b) = (length_at(a, axis, rank), length_at(b, axis, rank));
        if (in_a, in_b) == (1, 1) {
            continue;
        }
        match runs.last_mut() {
            Some((run_in_a, run_in_b)) if broadcast_side((*run_in_a, *run_in_b)) == broadcast_side((in_a, in_b)) => {
                *run_in_a *= in_a;
                *run_in_b *= in_b;
            }
            _ => runs.push((in_a, in_b)),
        }
    }
    if runs.len() > 4 {
        return Err(format!("the shapes {a:?} and {b:?} broadcast in more than four alternating groups").into());
    }
    let (mut a_4, mut b_4) = ([1; 4], [1; 4]);
    let start = 4 - runs.len();
    for (i, (run_in_a, run_in_b)) in runs.into_iter().enumerate() {
        (a_4[start + i], b_4[start + i]) = (run_in_a, run_in_b);
    }
    Ok((a_4, b_4))
}
