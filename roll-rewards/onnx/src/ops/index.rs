//! Operators that look up elements by index, and find the index of the largest element.

use burn_tensor::{Int, Tensor, TensorData};
use roll_backends::NdTensor;

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{MAX_INTS, Value, axis, elements, host_floats, merge_axes, split_around_axis};
use super::{BatchInput, Built, Operator, Run, input, integers, only_first_batched};

/// Selects slices along axis 1. `picks` must be indices of the axis.
pub(super) fn select(x: Tensor<3>, picks: &[usize]) -> Tensor<3> {
    let ints: Vec<i64> = picks.iter().map(|&i| i as i64).collect();
    let indices = Tensor::<1, Int>::from_data(TensorData::new(ints, [picks.len()]), &x.device());
    x.select(1, indices)
}

/// Selects slices along the axis `a`. `picks` must be indices of the axis.
pub(super) fn pick(x: &NdTensor, a: usize, picks: &[usize]) -> NdTensor {
    merge_axes(select(split_around_axis(x, a), picks), x, a)
}

/// Selects slices like [`pick`], from either type of value.
fn pick_value(x: &Value, a: usize, picks: &[usize]) -> Value {
    match x {
        Value::Float(x) => Value::Float(pick(x, a, picks)),
        Value::Int { values, shape } => integers::picked(values, shape, a, picks),
    }
}

/// Selects slices along one axis. The shape of the indices takes the place of the axis.
#[derive(Debug)]
struct Gather {
    axis: i64,
}

pub(super) fn gather(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(Gather { axis: spec.attributes.int("axis")?.unwrap_or(0) }))
}

impl Operator for Gather {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, indices) = (input(inputs, 0)?, input(inputs, 1)?);
        let a = axis(self.axis, x.shape().len())?;
        let length = x.shape()[a];
        let picks: Vec<usize> = indices
            .ints()?
            .iter()
            .map(|&i| axis(i, length))
            .collect::<Result<_, _>>()
            .map_err(|_| Problem(format!("the indices reach beyond axis {a} of {:?}", x.shape())))?;
        if picks.is_empty() {
            return Err("there are no indices".into());
        }
        let (before, after) = (&x.shape()[..a], &x.shape()[a + 1..]);
        let shape: Vec<usize> = before.iter().chain(indices.shape()).chain(after).copied().collect();
        elements(&shape)?;
        Ok(vec![pick_value(x, a, &picks).reshaped(shape)?])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        let BatchInput::Constant(indices) = inputs.get(1)? else { return None };
        let a = axis(self.axis, rank).ok()?;
        (a != 0).then_some(rank - 1 + indices.shape().len())
    }
}

/// One element per index: y[i][j] = x[index[i][j]][j] for axis 0.
#[derive(Debug)]
struct GatherElements {
    axis: i64,
}

pub(super) fn gather_elements(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(GatherElements { axis: spec.attributes.int("axis")?.unwrap_or(0) }))
}

impl Operator for GatherElements {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, indices) = (input(inputs, 0)?, input(inputs, 1)?);
        // The output has the shape of the indices.
        let (from, to) = (x.shape(), indices.shape());
        let a = axis(self.axis, from.len())?;
        let is_within = to.len() == from.len() && (0..to.len()).all(|i| i == a || to[i] <= from[i]);
        if !is_within || to.contains(&0) {
            return Err(format!("indices of shape {to:?} do not fit {from:?}").into());
        }
        let strides = integers::strides(from);
        let mut flat_sources = Vec::with_capacity(indices.ints()?.len());
        for (output, &index) in indices.ints()?.iter().enumerate() {
            let mut rest = output;
            let mut flat_source = 0;
            for k in (0..to.len()).rev() {
                let position = rest % to[k];
                rest /= to[k];
                let source_position =
                    if k == a { axis(index, from[a]).map_err(|_| out_of_range(from))? } else { position };
                flat_source += strides[k] * source_position;
            }
            flat_sources.push(flat_source);
        }
        elements(to)?;
        let flat_x = x.reshaped(vec![elements(from)?])?;
        Ok(vec![pick_value(&flat_x, 0, &flat_sources).reshaped(to.to_vec())?])
    }
}

/// The problem of an index outside a tensor of `shape`.
fn out_of_range(shape: &[usize]) -> Problem {
    Problem(format!("the indices reach beyond {shape:?}"))
}

/// The flat number of a slice: `batch` is its flat number on the batch axes, `index` its position on the axes after
/// them, whose lengths are `indexed`. Fails if a position is out of range.
fn slice_number(batch: usize, index: &[i64], indexed: &[usize]) -> Result<usize, Problem> {
    index.iter().zip(indexed).try_fold(batch, |number, (&i, &length)| Ok(number * length + axis(i, length)?))
}

/// Selects slices. Each row along the last axis of the indices is the position of one slice, on the axes of x after the
/// batch axes.
#[derive(Debug)]
struct GatherNd {
    /// Number of leading axes that x and the indices share.
    batch_axes: usize,
}

pub(super) fn gather_nd(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    let batch = spec.attributes.int("batch_dims")?.unwrap_or(0);
    Ok(Box::new(GatherNd { batch_axes: usize::try_from(batch).map_err(|_| "`batch_dims` is negative")? }))
}

impl Operator for GatherNd {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, indices) = (input(inputs, 0)?, input(inputs, 1)?);
        let (from, to) = (x.shape(), indices.shape());
        let misfit = || Problem(format!("indices of shape {to:?} do not fit {from:?}"));
        let batch_axes = self.batch_axes;
        // The indices are `rows` lists of `width` numbers; each number is a position on one of the axes `indexed` of x.
        let (&width, rows) = to.split_last().ok_or_else(misfit)?;
        let indexed = from.get(batch_axes..batch_axes.saturating_add(width)).ok_or_else(misfit)?;
        let slice_shape = &from[batch_axes + width..];
        let has_same_batch = rows.get(..batch_axes) == Some(&from[..batch_axes]);
        if width == 0 || rows.contains(&0) || from.contains(&0) || !has_same_batch {
            return Err(misfit());
        }
        let rows_per_batch: usize = rows[batch_axes..].iter().product();
        let mut picks = vec![];
        for (row, index) in indices.ints()?.chunks_exact(width).enumerate() {
            picks.push(slice_number(row / rows_per_batch, index, indexed).map_err(|_| out_of_range(from))?);
        }
        let shape: Vec<usize> = rows.iter().chain(slice_shape).copied().collect();
        elements(&shape)?;
        let x_by_slice = vec![elements(from)? / elements(slice_shape)?, elements(slice_shape)?];
        Ok(vec![pick_value(&x.reshaped(x_by_slice)?, 0, &picks).reshaped(shape)?])
    }
}

/// Replaces slices of the data (input 0) by the slices of the updates (input 2). Each row along the last axis of the
/// indices (input 1) is the position of one slice.
///
/// Each slice of the output is selected from the slices of data and updates together, so that both have a gradient.
#[derive(Debug)]
struct ScatterNd;

pub(super) fn scatter_nd(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(3..=3, 1)?;
    let reduction = spec.attributes.text("reduction", "none")?;
    if reduction != "none" {
        return Err(format!("`reduction` {reduction} is not run here: none is").into());
    }
    Ok(Box::new(ScatterNd))
}

impl Operator for ScatterNd {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, indices, updates) = (input(inputs, 0)?, input(inputs, 1)?, input(inputs, 2)?);
        let (shape, to) = (x.shape(), indices.shape());
        let misfit =
            || Problem(format!("indices of shape {to:?} and updates {:?} do not fit {shape:?}", updates.shape()));
        let (&width, rows) = to.split_last().filter(|(width, _)| **width > 0).ok_or_else(misfit)?;
        let (indexed, slice_shape) = shape.split_at_checked(width).ok_or_else(misfit)?;
        if to.contains(&0) || shape.contains(&0) || updates.shape() != [rows, slice_shape].concat() {
            return Err(misfit());
        }
        let (slices, slice_length) = (elements(indexed)?, elements(slice_shape)?);
        // The source of each output slice: the number of a slice of the data or, after these, of the updates.
        let mut picks: Vec<usize> = (0..slices).collect();
        // ONNX leaves the result of equal indices open; here the last one applies.
        for (row, index) in indices.ints()?.chunks_exact(width).enumerate() {
            picks[slice_number(0, index, indexed).map_err(|_| out_of_range(shape))?] = slices + row;
        }
        let joined_shape = vec![slices + elements(rows)?, slice_length];
        elements(&joined_shape)?;
        let joined = match x {
            Value::Float(x) => {
                let flat = Tensor::cat(vec![x.flat().clone(), updates.float()?.flat().clone()], 0);
                Value::Float(NdTensor::from_flat(flat, joined_shape))
            }
            Value::Int { values, .. } => Value::Int { values: [values, updates.ints()?].concat(), shape: joined_shape },
        };
        Ok(vec![pick_value(&joined, 0, &picks).reshaped(shape.to_vec())?])
    }
}

/// The index of the largest (or least) element along an axis. It has no gradient.
#[derive(Debug)]
struct ArgExtremum {
    /// Whether the least element is looked for instead of the largest.
    finds_least: bool,
    axis: i64,
    /// Whether the axis is kept, with length 1.
    keeps_axis: bool,
    /// Whether the last of several equal elements is returned instead of the first.
    prefers_last: bool,
}

pub(super) fn arg_extremum(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let attributes = &mut spec.attributes;
    Ok(Box::new(ArgExtremum {
        finds_least: spec.operator == "ArgMin",
        axis: attributes.int("axis")?.unwrap_or(0),
        keeps_axis: attributes.int("keepdims")?.unwrap_or(1) != 0,
        prefers_last: attributes.flag("select_last_index")?,
    }))
}

impl ArgExtremum {
    /// The index of the extremum in `column`.
    fn index_in<T: PartialOrd + Copy>(&self, column: &[T]) -> i64 {
        let mut best = 0;
        for (i, value) in column.iter().enumerate().skip(1) {
            let is_better = if self.finds_least { *value < column[best] } else { *value > column[best] };
            if is_better || self.prefers_last && *value == column[best] {
                best = i;
            }
        }
        best as i64
    }
}

impl Operator for ArgExtremum {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let a = axis(self.axis, x.shape().len())?;
        let mut shape = x.shape().to_vec();
        let count = elements(&shape)?;
        if count == 0 || count > MAX_INTS {
            return Err(format!("the largest of {shape:?} numbers is not looked for here").into());
        }
        let values = match x {
            Value::Float(t) => integers::columns(&host_floats(t)?, &shape, a).map(|c| self.index_in(&c)).collect(),
            Value::Int { values, .. } => integers::columns(values, &shape, a).map(|c| self.index_in(&c)).collect(),
        };
        if self.keeps_axis {
            shape[a] = 1;
        } else {
            shape.remove(a);
        }
        Ok(vec![Value::Int { values, shape }])
    }
}
