//! Sums, means and norms over axes, and softmax along one.

use burn::tensor::activation;
use roll_backends::NdTensor;

use super::super::attributes::Build;
use super::super::batch::Carried;
use super::super::error::Problem;
use super::super::value::{Value, around, axis, back, reshaped};
use super::{Built, Operator, Run, broadcast, first_only, input};

#[derive(Clone, Copy, Debug)]
enum Of {
    Mean,
    Sum,
    Norm,
}

#[derive(Debug)]
struct Reduce {
    of: Of,
    /// None reduces every axis.
    axes: Option<Vec<i64>>,
    keep: bool,
}

pub(super) fn reduce(build: &mut Build) -> Built {
    build.arity(1..=2, 1)?;
    let of = match build.operator {
        "ReduceMean" => Of::Mean,
        "ReduceSum" => Of::Sum,
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
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let axes = self.axes(x.shape().len())?;
        let mut y = x.clone();
        if let Of::Norm = self.of {
            y = squared(&y);
        }
        for &a in &axes {
            let whole = around(&y, a);
            y = back(if let Of::Mean = self.of { whole.mean_dim(1) } else { whole.sum_dim(1) }, &y, a);
        }
        if let Of::Norm = self.of {
            y = NdTensor::from_flat(y.flat().clone().sqrt(), y.shape());
        }
        if !self.keep {
            let kept = (0..y.shape().len()).filter(|a| !axes.contains(a)).map(|a| y.shape()[a]).collect();
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

fn squared(x: &NdTensor) -> NdTensor {
    NdTensor::from_flat(x.flat().clone() * x.flat().clone(), x.shape())
}

#[derive(Debug)]
struct Softmax {
    log: bool,
    axis: i64,
    /// Before operator set 13 the axes from `axis` on are one.
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
