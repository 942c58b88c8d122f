//! Operations on the axes of integer tensors in host memory, for operators whose float tensors use the tensor library.

use super::super::error::Problem;
use super::super::value::{MAX_INTS, Value, elements};

/// The number of elements of an integer tensor of `shape`. Fails above the limit.
pub(super) fn count(shape: &[usize]) -> Result<usize, Problem> {
    match elements(shape)? {
        count @ ..=MAX_INTS => Ok(count),
        _ => Err(format!("integers of shape {shape:?} are more than {MAX_INTS}").into()),
    }
}

/// Strides of a contiguous tensor, in elements.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|a| shape[a + 1..].iter().product()).collect()
}

/// The elements along `axis`, for each position on the other axes.
pub(super) fn columns<'v, T: Copy>(values: &'v [T], shape: &[usize], axis: usize) -> impl Iterator<Item = Vec<T>> + 'v {
    let (length, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let outer: usize = shape[..axis].iter().product();
    let column = move |o: usize, i: usize| (0..length).map(|k| values[(o * length + k) * inner + i]).collect();
    (0..outer).flat_map(move |o| (0..inner).map(move |i| column(o, i)))
}

/// Transposes: axis `k` of the result is axis `order[k]` of the tensor.
pub(super) fn permuted(values: &[i64], shape: &[usize], order: &[usize]) -> Value {
    let strides = strides(shape);
    let to: Vec<usize> = order.iter().map(|&a| shape[a]).collect();
    // The flat index of the element that moves to the flat index `index`.
    let source = |mut index: usize| {
        let mut flat = 0;
        for k in (0..to.len()).rev() {
            flat += index % to[k] * strides[order[k]];
            index /= to[k];
        }
        flat
    };
    Value::Int { values: (0..values.len()).map(|i| values[source(i)]).collect(), shape: to }
}

/// Selects slices along `axis`. `picks` must be indices of the axis.
pub(super) fn picked(values: &[i64], shape: &[usize], axis: usize, picks: &[usize]) -> Value {
    let (length, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let outer: usize = shape[..axis].iter().product();
    let mut out = Vec::with_capacity(outer * picks.len() * inner);
    for o in 0..outer {
        for &k in picks {
            out.extend_from_slice(&values[(o * length + k) * inner..][..inner]);
        }
    }
    let mut shape = shape.to_vec();
    shape[axis] = picks.len();
    Value::Int { values: out, shape }
}

/// Concatenates `parts` along `axis`; the result has the shape `shape`. A part is a pair of its elements and its length
/// along `axis`.
pub(super) fn concatenated(parts: &[(&[i64], usize)], shape: Vec<usize>, axis: usize) -> Result<Value, Problem> {
    count(&shape)?;
    let (outer, inner) = (shape[..axis].iter().product::<usize>(), shape[axis + 1..].iter().product::<usize>());
    let row =
        |o: usize| parts.iter().flat_map(move |(v, length)| v[o * length * inner..][..length * inner].iter().copied());
    Ok(Value::Int { values: (0..outer).flat_map(row).collect(), shape })
}
