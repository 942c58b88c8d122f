//! Operators that rearrange elements along axes: Transpose, Concat, Slice, Split, Pad.

use burn_tensor::Tensor;
use roll_backends::NdTensor;

use super::super::attributes::{OperatorSpec, sizes};
use super::super::error::Problem;
use super::super::value::{MAX_ELEMENTS, Value, axis, elements, merge_axes, plain_device, split_around_axis};
use super::index::pick;
use super::{BatchInput, Built, Operator, Run, input, integers, only_first_batched};

/// Greatest number of inputs of Concat, and of outputs of Split.
const MAX_PARTS: usize = 1024;

/// Permutes the axes.
#[derive(Debug)]
struct Transpose {
    /// The axis of the input that becomes each axis of the output; `None` reverses the axes.
    order: Option<Vec<usize>>,
}

pub(super) fn transpose(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let order = match spec.attributes.ints("perm")? {
        None => None,
        Some(perm) => {
            let order = sizes("perm", &perm, 0)?;
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..order.len()) {
                return Err(format!("`perm` {perm:?} is not a permutation").into());
            }
            Some(order)
        }
    };
    Ok(Box::new(Transpose { order }))
}

impl Operator for Transpose {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let rank = x.shape().len();
        let order = self.order.clone().unwrap_or_else(|| (0..rank).rev().collect());
        if order.len() != rank {
            return Err(format!("`perm` {order:?} does not fit the shape {:?}", x.shape()).into());
        }
        Ok(vec![match x {
            Value::Float(x) => Value::Float(permuted(x, &order)?),
            Value::Int { values, shape } => integers::permuted(values, shape, &order),
        }])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        let order = self.order.as_ref()?;
        (order.len() == rank && order[0] == 0).then_some(rank)
    }
}

fn permuted(x: &NdTensor, order: &[usize]) -> Result<NdTensor, Problem> {
    // The tensor library needs the rank at compile time.
    fn permuted_rank<const D: usize>(x: &NdTensor, order: &[usize]) -> Result<NdTensor, Problem> {
        let axes: [isize; D] = std::array::from_fn(|i| order[i] as isize);
        Ok(x.rank::<D>()?.permute(axes).into())
    }
    match order.len() {
        0 | 1 => Ok(x.clone()),
        2 => permuted_rank::<2>(x, order),
        3 => permuted_rank::<3>(x, order),
        4 => permuted_rank::<4>(x, order),
        5 => permuted_rank::<5>(x, order),
        6 => permuted_rank::<6>(x, order),
        rank => Err(format!("tensors of rank {rank} are not transposed here").into()),
    }
}

/// Concatenates the inputs along an axis.
#[derive(Debug)]
struct Concat {
    axis: i64,
}

pub(super) fn concat(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=MAX_PARTS, 1)?;
    let axis = spec.attributes.int("axis")?.ok_or("`axis` is missing")?;
    Ok(Box::new(Concat { axis }))
}

impl Operator for Concat {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let first = input(inputs, 0)?;
        let a = axis(self.axis, first.shape().len())?;
        let values: Vec<&Value> = (0..inputs.len()).map(|i| input(inputs, i)).collect::<Result<_, _>>()?;
        let mut shape = first.shape().to_vec();
        shape[a] = 0;
        for value in &values {
            let found = value.shape();
            let fits_along = |i: usize| i == a || found[i] == shape[i];
            if found.len() != shape.len() || !(0..shape.len()).all(fits_along) {
                return Err(format!("{:?} and {found:?} differ beyond axis {a}", first.shape()).into());
            }
            shape[a] += found[a];
        }
        elements(&shape)?;
        if let Value::Int { .. } = first {
            let parts: Vec<_> = values.iter().map(|v| Ok((v.ints()?, v.shape()[a]))).collect::<Result<_, Problem>>()?;
            return Ok(vec![integers::concatenated(&parts, shape, a)?]);
        }
        let parts = values.iter().map(|v| Ok(split_around_axis(v.float()?, a))).collect::<Result<_, Problem>>()?;
        Ok(vec![Value::Float(merge_axes(Tensor::cat(parts, 1), first.float()?, a))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = inputs.first()?.batched()?;
        let have_same_rank = inputs.iter().all(|i| i.batched() == Some(rank));
        (have_same_rank && axis(self.axis, rank).is_ok_and(|a| a != 0)).then_some(rank)
    }
}

/// Selects a range of each of several axes.
#[derive(Debug)]
struct Slice {
    /// Starts, ends and axes, if they are attributes (operator sets before 10). Otherwise they are inputs 1 to 3, and
    /// the steps input 4.
    attributes: Option<[Option<Vec<i64>>; 3]>,
}

pub(super) fn slice(spec: &mut OperatorSpec) -> Built {
    if spec.opset >= 10 {
        spec.check_arity(3..=5, 1)?;
        return Ok(Box::new(Slice { attributes: None }));
    }
    spec.check_arity(1..=1, 1)?;
    let attributes = &mut spec.attributes;
    let lists = [attributes.ints("starts")?, attributes.ints("ends")?, attributes.ints("axes")?];
    Ok(Box::new(Slice { attributes: Some(lists) }))
}

/// The part of one axis that a slice selects.
struct SliceRange {
    axis: i64,
    start: i64,
    end: i64,
    step: i64,
}

impl Slice {
    /// The selected range of each axis, from the lists of [`Slice::lists`].
    fn ranges(&self, lists: [Option<&[i64]>; 4]) -> Result<Vec<SliceRange>, Problem> {
        let [Some(starts), Some(ends), axes, steps] = lists else { return Err("`starts` or `ends` is missing".into()) };
        let count = starts.len();
        let fits = |list: Option<&[i64]>| list.is_none_or(|l| l.len() == count);
        if ends.len() != count || !fits(axes) || !fits(steps) {
            return Err("`starts`, `ends`, `axes` and `steps` differ in length".into());
        }
        Ok((0..count)
            .map(|i| SliceRange {
                axis: axes.map_or(i as i64, |a| a[i]),
                start: starts[i],
                end: ends[i],
                step: steps.map_or(1, |s| s[i]),
            })
            .collect())
    }

    /// Starts, ends, axes and steps: attributes, or the integers that `input` returns for the index of an input.
    fn lists<'v>(&'v self, input: impl Fn(usize) -> Option<&'v [i64]>) -> [Option<&'v [i64]>; 4] {
        match &self.attributes {
            Some([starts, ends, axes]) => [starts.as_deref(), ends.as_deref(), axes.as_deref(), None],
            None => [input(1), input(2), input(3), input(4)],
        }
    }
}

impl SliceRange {
    /// The selected indices of an axis of `length`.
    fn picks(&self, length: usize) -> Result<Vec<usize>, Problem> {
        let n = length as i64;
        let from_start = |p: i64| if p < 0 { p.saturating_add(n) } else { p };
        let (start, end) = (from_start(self.start), from_start(self.end));
        let picks: Vec<usize> = match self.step {
            1.. => (start.clamp(0, n)..end.clamp(0, n)).step_by(self.step as usize).map(|i| i as usize).collect(),
            // Downwards from `start` to `end`, exclusive. An end before the axis selects everything down to index 0.
            ..=-1 => {
                let first = start.clamp(-1, n - 1);
                let end = if self.end < -n { -1 } else { end.clamp(-1, n - 1) };
                (end + 1..=first).rev().step_by(self.step.unsigned_abs() as usize).map(|i| i as usize).collect()
            }
            0 => return Err("`steps` should not be 0".into()),
        };
        Ok(picks)
    }
}

impl Operator for Slice {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let ints = |i: usize| inputs.get(i).copied().flatten().and_then(|v| v.ints().ok());
        let mut value = input(inputs, 0)?.clone();
        for range in self.ranges(self.lists(ints))? {
            let a = axis(range.axis, value.shape().len())?;
            let picks = range.picks(value.shape()[a])?;
            value = match &value {
                Value::Int { values, shape } => integers::picked(values, shape, a, &picks),
                Value::Float(_) if picks.is_empty() => return Err(format!("it leaves nothing of axis {a}").into()),
                Value::Float(x) if range.step == 1 => {
                    Value::Float(merge_axes(split_around_axis(x, a).narrow(1, picks[0], picks.len()), x, a))
                }
                Value::Float(x) => Value::Float(pick(x, a, &picks)),
            };
        }
        Ok(vec![value])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        let constant_ints = |i: usize| match inputs.get(i) {
            Some(BatchInput::Constant(value)) => value.ints().ok(),
            _ => None,
        };
        let ranges = self.ranges(self.lists(constant_ints)).ok()?;
        ranges.iter().all(|range| axis(range.axis, rank).is_ok_and(|a| a != 0)).then_some(rank)
    }
}

/// Splits a tensor along an axis.
#[derive(Debug)]
struct Split {
    axis: i64,
    /// `None` means equal parts.
    lengths: Option<Vec<usize>>,
    /// Number of parts.
    outputs: usize,
}

pub(super) fn split(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=2, MAX_PARTS)?;
    let lengths = match spec.ints_or_input("split", 1)? {
        Some(lengths) => Some(sizes("split", &lengths, 0)?),
        None => None,
    };
    let outputs = match spec.attributes.int("num_outputs")? {
        None => lengths.as_ref().map_or(spec.outputs, Vec::len),
        Some(count) => sizes("num_outputs", &[count], 1)?[0],
    };
    if outputs > MAX_PARTS {
        return Err(format!("it has {outputs} outputs; at most {MAX_PARTS} are given").into());
    }
    Ok(Box::new(Split { axis: spec.attributes.int("axis")?.unwrap_or(0), lengths, outputs }))
}

impl Operator for Split {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let a = axis(self.axis, x.shape().len())?;
        let length = x.shape()[a];
        // Equal parts; the last part is smaller if the length is not divisible.
        let part_length = length.div_ceil(self.outputs.max(1));
        let equal_lengths =
            || (0..self.outputs).map(|i| length.saturating_sub(i * part_length).min(part_length)).collect();
        let lengths: Vec<usize> = self.lengths.clone().unwrap_or_else(equal_lengths);
        if lengths.iter().sum::<usize>() != length || lengths.contains(&0) {
            return Err(format!("axis {a} of {:?} is not cut into {lengths:?}", x.shape()).into());
        }
        let mut start = 0;
        let piece = |&length: &usize| {
            let offset = start;
            start += length;
            match x {
                Value::Float(x) => Value::Float(merge_axes(split_around_axis(x, a).narrow(1, offset, length), x, a)),
                Value::Int { values, shape } => {
                    integers::picked(values, shape, a, &(offset..offset + length).collect::<Vec<_>>())
                }
            }
        };
        Ok(lengths.iter().map(piece).collect())
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        axis(self.axis, rank).is_ok_and(|a| a != 0).then_some(rank)
    }
}

/// Constant padding, before and after each axis.
#[derive(Debug)]
struct Pad {
    /// The padding before each of the axes, then the padding after each.
    pads: Vec<usize>,
    /// `None` pads every axis.
    axes: Option<Vec<i64>>,
    /// The value of the padding.
    number: f32,
}

pub(super) fn pad(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=4, 1)?;
    let mode = spec.attributes.text("mode", "constant")?;
    if mode != "constant" {
        return Err(format!("`mode` is {mode}; only constant padding is run here").into());
    }
    let pads = spec.ints_or_input("pads", 1)?.ok_or("`pads` is missing")?;
    let number = match spec.attributes.float("value")? {
        Some(number) => number,
        None => match spec.constant_floats(2, "constant_value")? {
            None | Some([]) => 0.0,
            Some([number, ..]) => *number,
        },
    };
    let axes = spec.constant_ints(3, "axes")?.map(<[i64]>::to_vec);
    Ok(Box::new(Pad { pads: sizes("pads", &pads, 0)?, axes, number }))
}

impl Operator for Pad {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let mut x = input(inputs, 0)?.float()?.clone();
        let rank = x.shape().len();
        let axes: Vec<usize> = match &self.axes {
            None => (0..rank).collect(),
            Some(axes) => axes.iter().map(|&a| axis(a, rank)).collect::<Result<_, _>>()?,
        };
        if self.pads.len() != 2 * axes.len() {
            return Err(format!("expected {} pads, found {:?}", 2 * axes.len(), self.pads).into());
        }
        let device = plain_device(&x);
        for (i, &a) in axes.iter().enumerate() {
            let (before, after) = (self.pads[i], self.pads[axes.len() + i]);
            if (before, after) == (0, 0) {
                continue;
            }
            let mut shape = x.shape().to_vec();
            // A length above the limit is refused by `elements`.
            shape[a] = shape[a].saturating_add(before).saturating_add(after).min(MAX_ELEMENTS + 1);
            elements(&shape)?;
            let [outer, _, inner] = split_around_axis(&x, a).dims();
            let filled = |length| Tensor::<3>::full([outer, length, inner], self.number, &device);
            let mut parts = vec![split_around_axis(&x, a)];
            if before > 0 {
                parts.insert(0, filled(before));
            }
            if after > 0 {
                parts.push(filled(after));
            }
            x = merge_axes(Tensor::cat(parts, 1), &x, a);
        }
        Ok(vec![Value::Float(x)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        let keeps_axis_0 =
            self.axes.is_none() && self.pads.len() == 2 * rank && self.pads[0] == 0 && self.pads[rank] == 0;
        keeps_axis_0.then_some(rank)
    }
}
