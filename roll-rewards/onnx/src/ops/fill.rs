//! Operators that generate or repeat numbers: Expand, Tile, Range, Trilu, CumSum.

use burn_tensor::Tensor;
use roll_backends::NdTensor;

use super::super::attributes::{OperatorSpec, sizes};
use super::super::error::Problem;
use super::super::value::{
    MAX_INTS, Value, axis, elements, host_floats, merge_axes, plain_device, split_around_axis, upload,
};
use super::broadcast::source;
use super::logic::masked;
use super::{Built, Operator, Run, broadcast, input, integers};

/// Broadcasts the input and the shape in input 1 to each other.
#[derive(Debug)]
struct Expand;

pub(super) fn expand(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(Expand))
}

impl Operator for Expand {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let wanted = sizes("shape", input(inputs, 1)?.ints()?, 0)?;
        let shape = broadcast::shape(x.shape(), &wanted)?;
        Ok(vec![match x {
            Value::Float(x) => Value::Float(broadcast::expand(x, &shape)?),
            Value::Int { values, shape: x_shape } => {
                let values = (0..integers::count(&shape)?).map(|i| values[source(i, &shape, x_shape)]).collect();
                Value::Int { values, shape }
            }
        }])
    }
}

/// Repeats the tensor along each axis.
#[derive(Debug)]
struct Tile;

pub(super) fn tile(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(Tile))
}

impl Operator for Tile {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let mut value = input(inputs, 0)?.clone();
        let repeats = sizes("repeats", input(inputs, 1)?.ints()?, 1)?;
        if repeats.len() != value.shape().len() {
            return Err(format!("`repeats` {repeats:?} does not fit the shape {:?}", value.shape()).into());
        }
        for (a, times) in repeats.into_iter().enumerate().filter(|(_, times)| *times > 1) {
            let length = value.shape()[a];
            let mut shape = value.shape().to_vec();
            shape[a] = length.saturating_mul(times);
            elements(&shape)?;
            value = match &value {
                Value::Float(x) => {
                    let [outer, _, inner] = split_around_axis(x, a).dims();
                    let once = x.flat().clone().reshape([outer, 1, length * inner]);
                    let whole = once.expand([outer, times, length * inner]).reshape([outer, times * length, inner]);
                    Value::Float(merge_axes(whole, x, a))
                }
                Value::Int { values, shape: shape_before } => {
                    integers::count(&shape)?;
                    let picks: Vec<usize> = (0..shape[a]).map(|i| i % length).collect();
                    integers::picked(values, shape_before, a, &picks)
                }
            };
        }
        Ok(vec![value])
    }
}

/// The numbers from a start (input 0) to a limit (input 1, exclusive) by a step (input 2).
#[derive(Debug)]
struct Range {
    device: burn_tensor::Device,
}

pub(super) fn range(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(3..=3, 1)?;
    Ok(Box::new(Range { device: spec.device.clone() }))
}

impl Operator for Range {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let parts = [input(inputs, 0)?, input(inputs, 1)?, input(inputs, 2)?];
        if parts.iter().any(|p| p.shape().iter().any(|d| *d != 1)) {
            return Err("start, limit and step should be one number each".into());
        }
        if parts.iter().all(|p| matches!(p, Value::Float(_))) {
            let number = |i: usize| -> Result<f32, Problem> { Ok(host_floats(parts[i].float()?)?[0]) };
            let [start, limit, step] = [number(0)?, number(1)?, number(2)?];
            let count = range_length(f64::from(limit - start), f64::from(step))?;
            let values: Vec<f32> = (0..count).map(|i| start + i as f32 * step).collect();
            return Ok(vec![if count == 0 {
                Value::list(vec![])
            } else {
                Value::Float(upload(values, vec![count], &self.device))
            }]);
        }
        let [start, limit, step] = [parts[0].ints()?[0], parts[1].ints()?[0], parts[2].ints()?[0]].map(i128::from);
        let count = range_length((limit - start) as f64, step as f64)?;
        let values = (0..count as i128).map(|i| i64::try_from(start + i * step)).collect::<Result<_, _>>();
        Ok(vec![Value::list(values.map_err(|_| Problem("a range beyond 64-bit integers".into()))?)])
    }
}

/// The number of elements of a range over `distance`. Fails on a step of 0, on numbers that are not finite, and above
/// [`MAX_INTS`].
fn range_length(distance: f64, step: f64) -> Result<usize, Problem> {
    let length = (distance / step).ceil();
    if !length.is_finite() || length > MAX_INTS as f64 {
        return Err(Problem(format!(
            "a range over {distance} in steps of {step}: expected finite numbers, a step other than 0, and at most \
             {MAX_INTS} elements"
        )));
    }
    Ok(length.max(0.0) as usize)
}

/// Replaces the elements of matrices on one side of a diagonal by zeros. Input 1 is the number of the diagonal.
#[derive(Debug)]
struct Trilu {
    /// Whether the part above the diagonal is kept instead of the part below it.
    keeps_upper: bool,
}

pub(super) fn trilu(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=2, 1)?;
    Ok(Box::new(Trilu { keeps_upper: spec.attributes.int("upper")?.unwrap_or(1) != 0 }))
}

impl Operator for Trilu {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let diagonal = match inputs.get(1).copied().flatten() {
            None => 0,
            Some(k) => *k.ints()?.first().ok_or("`k` is empty")?,
        };
        let [.., rows, columns] = *x.shape() else {
            return Err(format!("expected matrices, found {:?}", x.shape()).into());
        };
        let kept = |i: usize| {
            let (row, column) = ((i / columns % rows) as i64, (i % columns) as i64);
            let distance = column - row;
            if self.keeps_upper { distance >= diagonal } else { distance <= diagonal }
        };
        Ok(vec![match x {
            Value::Int { values, shape } => {
                let values = values.iter().enumerate().map(|(i, v)| if kept(i) { *v } else { 0 }).collect();
                Value::Int { values, shape: shape.clone() }
            }
            Value::Float(t) => {
                let mask: Vec<bool> = (0..elements(t.shape())?).map(|i| !kept(i)).collect();
                let flat = t.flat().clone();
                let zeros = Tensor::zeros([mask.len()], &plain_device(t));
                Value::Float(NdTensor::from_flat(masked(flat, mask, zeros), t.shape()))
            }
        }])
    }
}

/// Cumulative sums along an axis. Exporters use such sums to compute position ids from a mask.
#[derive(Debug)]
struct CumulativeSum {
    axis: i64,
    /// Whether each sum is without the element at its own position.
    is_exclusive: bool,
    /// Whether the sums begin at the end of the axis.
    is_reversed: bool,
}

pub(super) fn cumulative_sum(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    let (is_exclusive, is_reversed) = (spec.attributes.flag("exclusive")?, spec.attributes.flag("reverse")?);
    let axis = spec.constant_ints(1, "axis")?.and_then(<[i64]>::first);
    Ok(Box::new(CumulativeSum { axis: *axis.ok_or("`axis` is missing")?, is_exclusive, is_reversed }))
}

impl Operator for CumulativeSum {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let a = axis(self.axis, x.shape().len())?;
        let (values, shape) = match x {
            Value::Float(x) => {
                let mut summands = split_around_axis(x, a);
                let [outer, length, inner] = summands.dims();
                if self.is_reversed {
                    summands = summands.flip([1]);
                }
                if self.is_exclusive {
                    let zeros = Tensor::zeros([outer, 1, inner], &plain_device(x));
                    summands = Tensor::cat(vec![zeros, summands], 1).narrow(1, 0, length);
                }
                let sums = summands.cumsum(1);
                let sums = if self.is_reversed { sums.flip([1]) } else { sums };
                return Ok(vec![Value::Float(merge_axes(sums, x, a))]);
            }
            Value::Int { values, shape } => (values, shape),
        };
        let (length, inner) = (shape[a], shape[a + 1..].iter().product::<usize>());
        let mut sums = vec![0; values.len()];
        for block in 0..values.len() / (length * inner).max(1) {
            for column in 0..inner {
                let mut sum = 0i64;
                for i in 0..length {
                    let position = if self.is_reversed { length - 1 - i } else { i };
                    let flat = (block * length + position) * inner + column;
                    let with_element = sum.checked_add(values[flat]).ok_or("the sum is beyond 64 bits")?;
                    sums[flat] = if self.is_exclusive { sum } else { with_element };
                    sum = with_element;
                }
            }
        }
        Ok(vec![Value::Int { values: sums, shape: shape.clone() }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_without_a_length_are_refused() {
        assert_eq!(range_length(5.0, 2.0).ok(), Some(3));
        assert_eq!(range_length(-5.0, 2.0).ok(), Some(0));
        for (distance, step) in [(5.0, 0.0), (-5.0, 0.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::NAN), (1e300, 1.0)] {
            assert!(range_length(distance, step).is_err(), "{distance} in steps of {step}");
        }
    }
}
