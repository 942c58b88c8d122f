//! Sums, means, norms and extremes over axes, and softmax along one.

use burn::tensor::activation;
use roll_backends::NdTensor;

use super::super::attributes::Build;
use super::super::error::Problem;
use super::super::value::{Value, around, axis, back, reshaped};
use super::{Built, Carried, Operator, Role, Run, broadcast, first_only, input, integers};

#[derive(Clone, Copy, Debug)]
enum Of {
    Mean,
    Sum,
    Norm,
    Max,
    Min,
    Product,
}

#[derive(Debug)]
struct Reduce {
    of: Of,
    /// `None` reduces every axis.
    axes: Option<Vec<i64>>,
    keep: bool,
}

pub(super) fn reduce(build: &mut Build) -> Built {
    build.arity(1..=2, 1)?;
    let of = match build.operator {
        "ReduceMean" => Of::Mean,
        "ReduceSum" => Of::Sum,
        "ReduceMax" => Of::Max,
        "ReduceMin" => Of::Min,
        "ReduceProd" => Of::Product,
        _ => Of::Norm,
    };
    let axes = build.ints_or_input("axes", 1)?.filter(|axes| !axes.is_empty());
    let keep = build.attributes.int("keepdims")?.unwrap_or(1) != 0;
    if build.attributes.flag("noop_with_empty_axes")? && axes.is_none() {
        return Err("`noop_with_empty_axes` without axes is not run here".into());
    }
    Ok(Box::new(Reduce { of, axes, keep }))
}

impl Reduce {
    fn axes(&self, rank: usize) -> Result<Vec<usize>, Problem> {
        match &self.axes {
            None => Ok((0..rank).collect()),
            Some(axes) => axes.iter().map(|&a| axis(a, rank)).collect(),
        }
    }
}

impl Operator for Reduce {
    fn role(&self) -> Role<'_> {
        match (self.of, self.axes.as_deref(), self.keep) {
            (Of::Mean, Some([-1]), true) => Role::RowMean,
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
        if let Of::Norm = self.of {
            y = squared(&y);
        }
        for &a in &axes {
            let whole = around(&y, a);
            let reduced = match self.of {
                Of::Mean => whole.mean_dim(1),
                Of::Sum | Of::Norm => whole.sum_dim(1),
                Of::Max => whole.max_dim(1),
                Of::Min => whole.min_dim(1),
                Of::Product => return Err("only integers are multiplied along axes here".into()),
            };
            y = back(reduced, &y, a);
        }
        if let Of::Norm = self.of {
            y = NdTensor::from_flat(y.flat().clone().sqrt(), y.shape());
        }
        if !self.keep {
            let kept = without(y.shape(), &axes);
            y = reshaped(&y, kept)?;
        }
        Ok(vec![Value::Float(y)])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        let axes = self.axes(rank).ok()?;
        (!axes.contains(&0)).then_some(if self.keep { rank } else { rank.checked_sub(axes.len())? })
    }
}

impl Reduce {
    fn integers(&self, values: &[i64], shape: &[usize], axes: &[usize]) -> Result<Value, Problem> {
        let overflow = || Problem(format!("{:?} of integers of shape {shape:?} has no value", self.of));
        let (mut values, mut shape) = (values.to_vec(), shape.to_vec());
        for &a in axes {
            let one = |column: Vec<i64>| -> Option<i64> {
                let add = |column: &[i64]| column.iter().try_fold(0i64, |sum, v| sum.checked_add(*v));
                match self.of {
                    Of::Sum => add(&column),
                    Of::Mean => add(&column)?.checked_div(column.len() as i64),
                    Of::Product => column.iter().try_fold(1i64, |product, v| product.checked_mul(*v)),
                    Of::Max => column.into_iter().max(),
                    Of::Min => column.into_iter().min(),
                    Of::Norm => None,
                }
            };
            values = integers::columns(&values, &shape, a).map(one).collect::<Option<_>>().ok_or_else(overflow)?;
            shape[a] = 1;
        }
        Ok(Value::Int { values, shape: if self.keep { shape } else { without(&shape, axes) } })
    }
}

/// Removes `axes` from `shape`.
fn without(shape: &[usize], axes: &[usize]) -> Vec<usize> {
    (0..shape.len()).filter(|a| !axes.contains(a)).map(|a| shape[a]).collect()
}

fn squared(x: &NdTensor) -> NdTensor {
    NdTensor::from_flat(x.flat().clone() * x.flat().clone(), x.shape())
}

#[derive(Debug)]
struct Softmax {
    log: bool,
    axis: i64,
    /// Whether the axes from `axis` on count as one (before operator set 13).
    rest: bool,
}

pub(super) fn softmax(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    let rest = build.opset < 13;
    let axis = build.attributes.int("axis")?.unwrap_or(if rest { 1 } else { -1 });
    Ok(Box::new(Softmax { log: build.operator == "LogSoftmax", axis, rest }))
}

impl Operator for Softmax {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let a = axis(self.axis, x.shape().len())?;
        let mut whole = around(x, a);
        if self.rest {
            let [outer, length, inner] = whole.dims();
            whole = whole.reshape([outer, length * inner, 1]);
        }
        let y = if self.log { activation::log_softmax(whole, 1) } else { activation::softmax(whole, 1) };
        let count = x.shape().iter().product::<usize>();
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([count]), x.shape()))])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        axis(self.axis, rank).is_ok_and(|a| a != 0).then_some(rank)
    }
}

/// Division by the Euclidean norm along an axis.
#[derive(Debug)]
struct LpNormalization {
    axis: i64,
}

pub(super) fn lp_normalization(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    if build.attributes.int("p")?.unwrap_or(2) != 2 {
        return Err("only `p` 2 is run here".into());
    }
    Ok(Box::new(LpNormalization { axis: build.attributes.int("axis")?.unwrap_or(-1) }))
}

impl Operator for LpNormalization {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let a = axis(self.axis, x.shape().len())?;
        let norm = back(around(&squared(x), a).sum_dim(1).sqrt(), x, a);
        Ok(vec![Value::Float(broadcast::apply(x, &norm, |x, norm| x / norm)?)])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        axis(self.axis, rank).is_ok_and(|a| a != 0).then_some(rank)
    }
}
