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

/// As [`pick`], for either type of value.
fn picked(x: &Value, a: usize, picks: &[usize]) -> Value {
    match x {
        Value::Float(x) => Value::Float(pick(x, a, picks)),
        Value::Int { values, shape } => integers::picked(values, shape, a, picks),
    }
}

#[derive(Debug)]
struct Gather {
    axis: i64,
}

pub(super) fn gather(spec: &mut OperatorSpec) -> Built {
    spec.arity(2..=2, 1)?;
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
        Ok(vec![picked(x, a, &picks).reshaped(shape)?])
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
    spec.arity(2..=2, 1)?;
    Ok(Box::new(GatherElements { axis: spec.attributes.int("axis")?.unwrap_or(0) }))
}

impl Operator for GatherElements {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, indices) = (input(inputs, 0)?, input(inputs, 1)?);
        let (from, to) = (x.shape(), indices.shape());
        let a = axis(self.axis, from.len())?;
        let within = to.len() == from.len() && (0..to.len()).all(|i| i == a || to[i] <= from[i]);
        if !within || to.contains(&0) {
            return Err(format!("indices of shape {to:?} do not fit {from:?}").into());
        }
        let strides = integers::strides(from);
        let mut flat = Vec::with_capacity(indices.ints()?.len());
        for (i, &index) in indices.ints()?.iter().enumerate() {
            let mut rest = i;
            let mut at = 0;
            for k in (0..to.len()).rev() {
                let position = rest % to[k];
                rest /= to[k];
                at +=
                    strides[k] * if k == a { axis(index, from[a]).map_err(|_| out_of_range(from))? } else { position };
            }
            flat.push(at);
        }
        elements(to)?;
        let list = x.reshaped(vec![elements(from)?])?;
        Ok(vec![picked(&list, 0, &flat).reshaped(to.to_vec())?])
    }
}

fn out_of_range(shape: &[usize]) -> Problem {
    Problem(format!("the indices reach beyond {shape:?}"))
}

/// The number of the slice at `index` of the axes `named`, within the item `batch` of the axes before them.
fn slice_position(batch: usize, index: &[i64], named: &[usize]) -> Result<usize, Problem> {
    index.iter().zip(named).try_fold(batch, |position, (&i, &length)| Ok(position * length + axis(i, length)?))
}

/// Selects slices; the rows of the indices are their leading positions.
#[derive(Debug)]
struct GatherNd {
    batch: usize,
}

pub(super) fn gather_nd(spec: &mut OperatorSpec) -> Built {
    spec.arity(2..=2, 1)?;
    let batch = spec.attributes.int("batch_dims")?.unwrap_or(0);
    Ok(Box::new(GatherNd { batch: usize::try_from(batch).map_err(|_| "`batch_dims` is negative")? }))
}

impl Operator for GatherNd {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, indices) = (input(inputs, 0)?, input(inputs, 1)?);
        let (from, to) = (x.shape(), indices.shape());
        let misfit = || Problem(format!("indices of shape {to:?} do not fit {from:?}"));
        let (&width, rows) = to.split_last().ok_or_else(misfit)?;
        let named = from.get(self.batch..self.batch.saturating_add(width)).ok_or_else(misfit)?;
        let inner = &from[self.batch + width..];
        if width == 0 || rows.contains(&0) || from.contains(&0) || rows.get(..self.batch) != Some(&from[..self.batch]) {
            return Err(misfit());
        }
        let per_batch: usize = rows[self.batch..].iter().product();
        let mut at = vec![];
        for (row, index) in indices.ints()?.chunks_exact(width).enumerate() {
            at.push(slice_position(row / per_batch, index, named).map_err(|_| out_of_range(from))?);
        }
        let shape: Vec<usize> = rows.iter().chain(inner).copied().collect();
        elements(&shape)?;
        let slices = vec![elements(from)? / elements(inner)?, elements(inner)?];
        Ok(vec![picked(&x.reshaped(slices)?, 0, &at).reshaped(shape)?])
    }
}

/// Replaces slices by those of the updates; the rows of the indices are their leading positions.
///
/// Each slice of the output is selected from the slices of the data and of the updates, so that both have a gradient.
#[derive(Debug)]
struct ScatterNd;

pub(super) fn scatter_nd(spec: &mut OperatorSpec) -> Built {
    spec.arity(3..=3, 1)?;
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
        let (named, inner) = shape.split_at_checked(width).ok_or_else(misfit)?;
        if to.contains(&0) || shape.contains(&0) || updates.shape() != [rows, inner].concat() {
            return Err(misfit());
        }
        let (slices, length) = (elements(named)?, elements(inner)?);
        let mut picks: Vec<usize> = (0..slices).collect();
        // ONNX leaves the result of equal indices open; here the last one applies.
        for (row, index) in indices.ints()?.chunks_exact(width).enumerate() {
            picks[slice_position(0, index, named).map_err(|_| out_of_range(shape))?] = slices + row;
        }
        let joined = vec![slices + elements(rows)?, length];
        elements(&joined)?;
        let all = match x {
            Value::Float(x) => {
                let flat = Tensor::cat(vec![x.flat().clone(), updates.float()?.flat().clone()], 0);
                Value::Float(NdTensor::from_flat(flat, joined))
            }
            Value::Int { values, .. } => Value::Int { values: [values, updates.ints()?].concat(), shape: joined },
        };
        Ok(vec![picked(&all, 0, &picks).reshaped(shape.to_vec())?])
    }
}

/// The index of the largest (or least) element along an axis. It has no gradient.
#[derive(Debug)]
struct ArgExtremum {
    least: bool,
    axis: i64,
    keep: bool,
    last: bool,
}

pub(super) fn arg_extremum(spec: &mut OperatorSpec) -> Built {
    spec.arity(1..=1, 1)?;
    let attributes = &mut spec.attributes;
    Ok(Box::new(ArgExtremum {
        least: spec.operator == "ArgMin",
        axis: attributes.int("axis")?.unwrap_or(0),
        keep: attributes.int("keepdims")?.unwrap_or(1) != 0,
        last: attributes.flag("select_last_index")?,
    }))
}

impl ArgExtremum {
    fn of<T: PartialOrd + Copy>(&self, column: &[T]) -> i64 {
        let mut best = 0;
        for (i, value) in column.iter().enumerate().skip(1) {
            let better = if self.least { *value < column[best] } else { *value > column[best] };
            if better || self.last && *value == column[best] {
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
            Value::Float(t) => integers::columns(&host_floats(t)?, &shape, a).map(|c| self.of(&c)).collect(),
            Value::Int { values, .. } => integers::columns(values, &shape, a).map(|c| self.of(&c)).collect(),
        };
        if self.keep {
            shape[a] = 1;
        } else {
            shape.remove(a);
        }
        Ok(vec![Value::Int { values, shape }])
    }
}
