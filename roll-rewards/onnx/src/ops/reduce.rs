//! Sums, means, norms and extremes over axes, and softmax along one.

use burn_tensor::{Bool, Tensor, activation};
use roll_backends::NdTensor;

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{Value, axis, elements, merge_axes, reshaped, split_around_axis};
use super::{BatchInput, Built, Operator, Role, Run, input, integers, only_first_batched};

/// The function that maps the elements along an axis to one number.
#[derive(Clone, Copy, Debug)]
enum Reduction {
    Mean,
    Sum,
    /// The Euclidean norm.
    Norm,
    Max,
    Min,
    Product,
}

/// Reduces a tensor over axes.
#[derive(Debug)]
struct Reduce {
    reduction: Reduction,
    /// `None` reduces every axis.
    axes: Option<Vec<i64>>,
    /// Whether the reduced axes are kept, with length 1.
    keeps_axes: bool,
}

pub(super) fn reduce(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=2, 1)?;
    let reduction = match spec.operator {
        "ReduceMean" => Reduction::Mean,
        "ReduceSum" => Reduction::Sum,
        "ReduceMax" => Reduction::Max,
        "ReduceMin" => Reduction::Min,
        "ReduceProd" => Reduction::Product,
        _ => Reduction::Norm,
    };
    let axes = spec.ints_or_input("axes", 1)?.filter(|axes| !axes.is_empty());
    let keeps_axes = spec.attributes.int("keepdims")?.unwrap_or(1) != 0;
    if spec.attributes.flag("noop_with_empty_axes")? && axes.is_none() {
        return Err("`noop_with_empty_axes` without axes is not run here".into());
    }
    Ok(Box::new(Reduce { reduction, axes, keeps_axes }))
}

impl Reduce {
    /// The reduced axes of a tensor of rank `rank`.
    fn axes(&self, rank: usize) -> Result<Vec<usize>, Problem> {
        match &self.axes {
            None => Ok((0..rank).collect()),
            Some(axes) => axes.iter().map(|&a| axis(a, rank)).collect(),
        }
    }
}

impl Operator for Reduce {
    fn role(&self) -> Role<'_> {
        match (self.reduction, self.axes.as_deref(), self.keeps_axes) {
            (Reduction::Mean, Some([-1]), true) => Role::RowMean,
            _ => Role::Other,
        }
    }

    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let value = input(inputs, 0)?;
        let axes = self.axes(value.shape().len())?;
        let x = match value {
            Value::Float(x) => x,
            Value::Int { values, shape } => return Ok(vec![self.integers(values, shape, &axes)?]),
        };
        let mut y = x.clone();
        if let Reduction::Norm = self.reduction {
            y = squared(&y);
        }
        for &a in &axes {
            let around_axis = split_around_axis(&y, a);
            let reduced = match self.reduction {
                Reduction::Mean => long_mean(around_axis),
                Reduction::Sum | Reduction::Norm => long_sum(around_axis),
                Reduction::Max => around_axis.max_dim(1),
                Reduction::Min => around_axis.min_dim(1),
                Reduction::Product => product(around_axis),
            };
            y = merge_axes(reduced, &y, a);
        }
        if let Reduction::Norm = self.reduction {
            y = NdTensor::from_flat(root(y.flat().clone()).value, y.shape());
        }
        if !self.keeps_axes {
            let kept = without_axes(y.shape(), &axes);
            y = reshaped(&y, kept)?;
        }
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        let axes = self.axes(rank).ok()?;
        let result_rank = if self.keeps_axes { rank } else { rank.checked_sub(axes.len())? };
        let keeps_batch = !axes.contains(&0);
        keeps_batch.then_some(result_rank)
    }
}

impl Reduce {
    /// Reduces an integer tensor. Fails if a result exceeds 64 bits, and for norms.
    fn integers(&self, values: &[i64], shape: &[usize], axes: &[usize]) -> Result<Value, Problem> {
        let overflow = || Problem(format!("{:?} of integers of shape {shape:?} has no value", self.reduction));
        let (mut values, mut shape) = (values.to_vec(), shape.to_vec());
        for &a in axes {
            let reduce_column = |column: Vec<i64>| -> Option<i64> {
                let sum = |column: &[i64]| column.iter().try_fold(0i64, |sum, v| sum.checked_add(*v));
                match self.reduction {
                    Reduction::Sum => sum(&column),
                    Reduction::Mean => sum(&column)?.checked_div(column.len() as i64),
                    Reduction::Product => column.iter().try_fold(1i64, |product, v| product.checked_mul(*v)),
                    Reduction::Max => column.into_iter().max(),
                    Reduction::Min => column.into_iter().min(),
                    Reduction::Norm => None,
                }
            };
            let reduced: Option<_> = integers::columns(&values, &shape, a).map(reduce_column).collect();
            values = reduced.ok_or_else(overflow)?;
            shape[a] = 1;
        }
        Ok(Value::Int { values, shape: if self.keeps_axes { shape } else { without_axes(&shape, axes) } })
    }
}

/// Removes `axes` from `shape`.
fn without_axes(shape: &[usize], axes: &[usize]) -> Vec<usize> {
    (0..shape.len()).filter(|a| !axes.contains(a)).map(|a| shape[a]).collect()
}

/// The squares of all elements.
fn squared(x: &NdTensor) -> NdTensor {
    NdTensor::from_flat(x.flat().clone() * x.flat().clone(), x.shape())
}

/// Greatest length of an axis that is summed sequentially in f32. Longer axes are summed by halves, so that the error
/// grows with the logarithm of the length.
const MAX_SEQUENTIAL: usize = 1024;

/// The sum over axis 1, which is kept.
pub(super) fn long_sum(x: Tensor<3>) -> Tensor<3> {
    if x.dims()[1] <= MAX_SEQUENTIAL { x.sum_dim(1) } else { by_halves(x, |first, second| first + second) }
}

/// Combines the first half of axis 1 with the second half, again and again, until axis 1 has length 1.
fn by_halves(mut x: Tensor<3>, combine: impl Fn(Tensor<3>, Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    while let length @ 2.. = x.dims()[1] {
        let half = length / 2;
        let pairs = combine(x.clone().narrow(1, 0, half), x.clone().narrow(1, half, half));
        x = match length % 2 {
            0 => pairs,
            // The last entry has no partner.
            _ => Tensor::cat(vec![pairs, x.narrow(1, 2 * half, 1)], 1),
        };
    }
    x
}

/// The mean over axis 1, which is kept.
pub(super) fn long_mean(x: Tensor<3>) -> Tensor<3> {
    match x.dims()[1] {
        ..=MAX_SEQUENTIAL => x.mean_dim(1),
        length => long_sum(x) / length as f64,
    }
}

/// The product over axis 1, which is kept. Halves are multiplied, so that the gradient has no division, which
/// would fail at elements that are 0.
fn product(x: Tensor<3>) -> Tensor<3> {
    by_halves(x, |first, second| first * second)
}

/// Square roots, with a gradient of 0 where they are 0.
struct Root<const D: usize> {
    value: Tensor<D>,
    is_zero: Tensor<D, Bool>,
}

/// The square roots of sums of squares. The masks replace the gradient at 0, which would be infinite.
fn root<const D: usize>(squares: Tensor<D>) -> Root<D> {
    let is_zero = squares.clone().equal_elem(0.0);
    let root = squares.mask_fill(is_zero.clone(), 1.0).sqrt();
    Root { value: root.mask_fill(is_zero.clone(), 0.0), is_zero }
}

/// Softmax or LogSoftmax.
#[derive(Debug)]
struct Softmax {
    is_log: bool,
    axis: i64,
    /// Whether the axes from `axis` on count as one axis (before operator set 13).
    merges_last_axes: bool,
}

pub(super) fn softmax(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let merges_last_axes = spec.opset < 13;
    let axis = spec.attributes.int("axis")?.unwrap_or(if merges_last_axes { 1 } else { -1 });
    Ok(Box::new(Softmax { is_log: spec.operator == "LogSoftmax", axis, merges_last_axes }))
}

impl Operator for Softmax {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let a = axis(self.axis, x.shape().len())?;
        let mut around_axis = split_around_axis(x, a);
        if self.merges_last_axes {
            let [outer, length, inner] = around_axis.dims();
            around_axis = around_axis.reshape([outer, length * inner, 1]);
        }
        // The tensor library's functions sum sequentially.
        let y = if around_axis.dims()[1] > MAX_SEQUENTIAL {
            let shifted = around_axis.clone() - around_axis.max_dim(1).detach();
            let exponentials = shifted.clone().exp();
            let sum = long_sum(exponentials.clone());
            if self.is_log { shifted - sum.log() } else { exponentials / sum }
        } else if self.is_log {
            activation::log_softmax(around_axis, 1)
        } else {
            activation::softmax(around_axis, 1)
        };
        let count = x.shape().iter().product::<usize>();
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([count]), x.shape()))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        axis(self.axis, rank).is_ok_and(|a| a != 0).then_some(rank)
    }
}

/// Division by the norm along an axis. A vector of norm 0 stays 0, with a gradient of 0.
#[derive(Debug)]
struct LpNormalization {
    axis: i64,
    /// Whether the norm is the sum of absolute values instead of the Euclidean norm.
    sums_absolute_values: bool,
}

pub(super) fn lp_normalization(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let sums_absolute_values = match spec.attributes.int("p")?.unwrap_or(2) {
        1 => true,
        2 => false,
        p => return Err(format!("`p` should be 1 or 2, found {p}").into()),
    };
    Ok(Box::new(LpNormalization { axis: spec.attributes.int("axis")?.unwrap_or(-1), sums_absolute_values }))
}

impl Operator for LpNormalization {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let a = axis(self.axis, x.shape().len())?;
        let around_axis = split_around_axis(x, a);
        let (norm, is_zero) = if self.sums_absolute_values {
            let sum = long_sum(around_axis.clone().abs());
            let is_zero = sum.clone().equal_elem(0.0);
            (sum, is_zero)
        } else {
            let Root { value, is_zero } = root(long_sum(around_axis.clone() * around_axis.clone()));
            (value, is_zero)
        };
        let quotient = around_axis.clone() / norm.mask_fill(is_zero.clone(), 1.0);
        let y = quotient.mask_fill(is_zero.expand(around_axis.dims()), 0.0);
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([elements(x.shape())?]), x.shape()))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        axis(self.axis, rank).is_ok_and(|a| a != 0).then_some(rank)
    }
}
