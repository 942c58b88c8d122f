//! Operators that move numbers and compute none.

use burn::tensor::{Int, Tensor, TensorData};
use roll_backends::NdTensor;
use roll_backends::host::to_host_nd;

use super::super::attributes::{Build, int_value, sizes};
use super::super::batch::Carried;
use super::super::error::Problem;
use super::super::value::{
    Constant, MAX_ELEMENTS, MAX_INTS, Value, around, axis, back, elements, plain_device, reshaped, upload,
};
use super::{Built, Operator, Run, first_only, input};

/// The value under another shape of as many elements.
fn with_shape(value: &Value, shape: Vec<usize>) -> Result<Value, Problem> {
    Ok(match value {
        Value::Float(tensor) => Value::Float(reshaped(tensor, shape)?),
        Value::Int { values, .. } if elements(&shape)? == values.len() => Value::Int { values: values.clone(), shape },
        Value::Int { shape: found, .. } => return Err(format!("{found:?} cannot become {shape:?}").into()),
    })
}

#[derive(Debug)]
struct Identity;

pub(super) fn identity(build: &mut Build) -> Built {
    if build.operator == "Dropout" {
        build.arity(1..=3, 1)?;
        build.attributes.float("ratio")?;
        build.attributes.int("seed")?;
        if build.constant_ints(2, "training_mode")?.is_some_and(|mode| mode != [0]) {
            return Err("`training_mode` is not run here".into());
        }
    } else {
        build.arity(1..=1, 1)?;
    }
    Ok(Box::new(Identity))
}

impl Operator for Identity {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        Ok(vec![input(inputs, 0)?.clone()])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs)
    }
}

/// Every float type is f32 here, every integer type i64.
#[derive(Debug)]
struct Cast {
    to_int: bool,
}

pub(super) fn cast(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    build.attributes.int("saturate")?;
    let to_int = match build.attributes.int("to")? {
        Some(1 | 10 | 11 | 16) => false,
        Some(2..=7) => true,
        other => return Err(format!("`to` is {other:?}: only floats and integers are cast to here").into()),
    };
    Ok(Box::new(Cast { to_int }))
}

impl Operator for Cast {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        Ok(vec![match (input(inputs, 0)?, self.to_int) {
            (Value::Float(x), true) => {
                if elements(x.shape())? > MAX_INTS {
                    return Err(format!("{:?} floats are too many to cast to integers here", x.shape()).into());
                }
                let values = to_host_nd(&x.clone().untracked())?.to_f32_vec().iter().map(|&v| v as i64).collect();
                Value::Int { values, shape: x.shape().to_vec() }
            }
            (Value::Int { .. }, false) => return Err("integers are cast to floats only at open".into()),
            (same, _) => same.clone(),
        }])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs).filter(|_| !self.to_int)
    }
}

#[derive(Debug)]
struct Fixed(Value);

pub(super) fn constant(build: &mut Build) -> Built {
    build.arity(0..=0, 1)?;
    let device = build.device;
    let attributes = &mut build.attributes;
    let floats = |values: Vec<f32>, shape| Constant::new(Value::Float(upload(values, shape, device)));
    let constant = if let Some(tensor) = attributes.tensor("value", device)? {
        tensor
    } else if let Some(value) = attributes.float("value_float")? {
        floats(vec![value], vec![])?
    } else if let Some(values) = attributes.floats("value_floats")?.filter(|v| !v.is_empty()) {
        let shape = vec![values.len()];
        floats(values, shape)?
    } else if let Some(value) = attributes.int("value_int")? {
        Constant::new(int_value(vec![value], true))?
    } else if let Some(values) = attributes.ints("value_ints")? {
        Constant::new(int_value(values, false))?
    } else {
        return Err("it has no value, or one that is neither float nor integer".into());
    };
    Ok(Box::new(Fixed(constant.value)))
}

impl Operator for Fixed {
    fn run(&self, _: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        Ok(vec![self.0.clone()])
    }
}

#[derive(Debug)]
struct ConstantOfShape {
    number: Constant,
    device: burn::tensor::Device,
}

pub(super) fn constant_of_shape(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    let zero = || Constant::new(Value::Float(upload(vec![0.0], vec![1], build.device)));
    let number = match build.attributes.tensor("value", build.device)? {
        Some(number) => number,
        None => zero()?,
    };
    if elements(number.value.shape())? != 1 {
        return Err("`value` should be one number".into());
    }
    Ok(Box::new(ConstantOfShape { number, device: build.device.clone() }))
}

impl Operator for ConstantOfShape {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let shape = sizes("shape", input(inputs, 0)?.ints()?, 0)?;
        let count = elements(&shape)?;
        Ok(vec![match (&self.number.value, self.number.floats.as_deref()) {
            (_, Some([number])) => {
                let flat = Tensor::full([count], *number, &self.device);
                Value::Float(NdTensor::from_flat(flat, shape))
            }
            (Value::Int { values, .. }, _) if count <= MAX_INTS => Value::Int { values: vec![values[0]; count], shape },
            _ => return Err(format!("integers of shape {shape:?} are more than {MAX_INTS}").into()),
        }])
    }
}

/// The shape, or the part of it from `start` to `end`.
#[derive(Debug)]
struct Shape {
    start: i64,
    end: Option<i64>,
}

pub(super) fn shape(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    let attributes = &mut build.attributes;
    Ok(Box::new(Shape { start: attributes.int("start")?.unwrap_or(0), end: attributes.int("end")? }))
}

impl Operator for Shape {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let shape = input(inputs, 0)?.shape();
        let (start, end) = (edge(self.start, shape.len()), edge(self.end.unwrap_or(i64::MAX), shape.len()));
        Ok(vec![Value::list(shape.get(start..end).unwrap_or_default().iter().map(|&d| d as i64).collect())])
    }
}

/// A position on an axis, from the end when negative, clamped.
fn edge(position: i64, length: usize) -> usize {
    let from_start = if position < 0 { position.saturating_add(length as i64) } else { position };
    from_start.clamp(0, length as i64) as usize
}

#[derive(Debug)]
struct Reshape {
    keep_zero: bool,
}

pub(super) fn reshape(build: &mut Build) -> Built {
    build.arity(2..=2, 1)?;
    Ok(Box::new(Reshape { keep_zero: build.attributes.flag("allowzero")? }))
}

impl Operator for Reshape {
    fn run(&self, inputs: &[Option<&Value>], run: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let wanted = input(inputs, 1)?.ints()?;
        let impossible = || Problem(format!("{:?} cannot become {wanted:?}", x.shape()));
        let mut shape = vec![];
        let mut free = None;
        for (i, &d) in wanted.iter().enumerate() {
            shape.push(match d {
                -1 if free.is_none() => {
                    free = Some(i);
                    1
                }
                0 if !self.keep_zero => *x.shape().get(i).ok_or_else(impossible)?,
                _ => usize::try_from(d).map_err(|_| impossible())?,
            });
        }
        if let (Some(items), Some(first)) = (run.items, shape.first_mut()) {
            *first = items;
        }
        if let Some(free) = free {
            let known = elements(&shape)?;
            let count = elements(x.shape())?;
            shape[free] = count.checked_div(known).filter(|d| d * known == count).ok_or_else(impossible)?;
        }
        Ok(vec![with_shape(x, shape)?])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let [Carried::Items(_), Carried::Constant(Value::Int { values, .. })] = inputs else { return None };
        // With -1 first, one item's leading length would be known only from its other axes.
        matches!(values.as_slice(), [0 | 1, ..]).then_some(values.len()).filter(|_| !self.keep_zero || values[0] == 1)
    }
}

#[derive(Debug)]
struct Flatten {
    axis: i64,
}

pub(super) fn flatten(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    Ok(Box::new(Flatten { axis: build.attributes.int("axis")?.unwrap_or(1) }))
}

impl Operator for Flatten {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let rank = x.shape().len();
        let cut = if self.axis == rank as i64 { rank } else { axis(self.axis, rank)? };
        let (outer, inner) = x.shape().split_at(cut);
        Ok(vec![with_shape(x, vec![elements(outer)?, elements(inner)?])?])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs).filter(|&rank| axis(self.axis, rank) == Ok(1)).map(|_| 2)
    }
}

/// Squeeze or Unsqueeze.
#[derive(Debug)]
struct Squeeze {
    remove: bool,
    axes: Option<Vec<i64>>,
}

pub(super) fn squeeze(build: &mut Build) -> Built {
    build.arity(1..=2, 1)?;
    let remove = build.operator == "Squeeze";
    let axes = build.ints_or_input("axes", 1)?;
    if axes.is_none() && !remove {
        return Err("`axes` is missing".into());
    }
    if axes.as_ref().is_some_and(|a| a.len() > 16) {
        return Err("`axes` names more than 16 axes".into());
    }
    Ok(Box::new(Squeeze { remove, axes }))
}

impl Operator for Squeeze {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let shape = x.shape();
        let named = self.axes.as_deref().unwrap_or_default();
        if !self.remove {
            let rank = shape.len() + named.len();
            let mut axes: Vec<usize> = named.iter().map(|&a| axis(a, rank)).collect::<Result<_, _>>()?;
            axes.sort_unstable();
            let mut shape = shape.to_vec();
            for a in axes {
                shape.insert(a.min(shape.len()), 1);
            }
            return Ok(vec![with_shape(x, shape)?]);
        }
        let axes: Vec<usize> = match &self.axes {
            None => (0..shape.len()).filter(|&a| shape[a] == 1).collect(),
            Some(named) => named.iter().map(|&a| axis(a, shape.len())).collect::<Result<_, _>>()?,
        };
        if let Some(&a) = axes.iter().find(|&&a| shape[a] != 1) {
            return Err(format!("axis {a} of {shape:?} is not of length 1").into());
        }
        let kept = (0..shape.len()).filter(|a| !axes.contains(a)).map(|a| shape[a]).collect();
        Ok(vec![with_shape(x, kept)?])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        let axes = self.axes.as_ref()?;
        let full = if self.remove { rank } else { rank + axes.len() };
        let named: Vec<usize> = axes.iter().map(|&a| axis(a, full).ok()).collect::<Option<_>>()?;
        let result = if self.remove { rank.checked_sub(axes.len())? } else { full };
        (!named.contains(&0)).then_some(result)
    }
}

#[derive(Debug)]
struct Transpose {
    order: Option<Vec<usize>>,
}

pub(super) fn transpose(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    let order = match build.attributes.ints("perm")? {
        None => None,
        Some(perm) => {
            let order = sizes("perm", &perm, 0)?;
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..order.len()) {
                return Err(format!("`perm` {perm:?} is no permutation").into());
            }
            Some(order)
        }
    };
    Ok(Box::new(Transpose { order }))
}

impl Operator for Transpose {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let rank = x.shape().len();
        let order = self.order.clone().unwrap_or_else(|| (0..rank).rev().collect());
        if order.len() != rank {
            return Err(format!("`perm` {order:?} does not fit the shape {:?}", x.shape()).into());
        }
        Ok(vec![Value::Float(permuted(x, &order)?)])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        let order = self.order.as_ref()?;
        (order.len() == rank && order[0] == 0).then_some(rank)
    }
}

/// The axes of `x` in another order.
pub(super) fn permuted(x: &NdTensor, order: &[usize]) -> Result<NdTensor, Problem> {
    fn fixed<const D: usize>(x: &NdTensor, order: &[usize]) -> Result<NdTensor, Problem> {
        let axes: [isize; D] = std::array::from_fn(|i| order[i] as isize);
        Ok(x.rank::<D>()?.permute(axes).into())
    }
    match order.len() {
        0 | 1 => Ok(x.clone()),
        2 => fixed::<2>(x, order),
        3 => fixed::<3>(x, order),
        4 => fixed::<4>(x, order),
        5 => fixed::<5>(x, order),
        6 => fixed::<6>(x, order),
        rank => Err(format!("tensors of rank {rank} are not transposed here").into()),
    }
}

#[derive(Debug)]
struct Concat {
    axis: i64,
}

pub(super) fn concat(build: &mut Build) -> Built {
    build.arity(1..=1024, 1)?;
    let axis = build.attributes.int("axis")?.ok_or("`axis` is missing")?;
    Ok(Box::new(Concat { axis }))
}

impl Operator for Concat {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let first = input(inputs, 0)?;
        let a = axis(self.axis, first.shape().len())?;
        let values: Vec<&Value> = (0..inputs.len()).map(|i| input(inputs, i)).collect::<Result<_, _>>()?;
        if let Value::Int { .. } = first {
            if values.iter().any(|v| v.shape().len() != 1) {
                return Err("integers are concatenated as lists only".into());
            }
            let lists: Vec<&[i64]> = values.iter().map(|v| v.ints()).collect::<Result<_, _>>()?;
            return Ok(vec![Value::list(lists.concat())]);
        }
        let mut parts = vec![];
        let mut shape = first.shape().to_vec();
        shape[a] = 0;
        for value in values {
            let x = value.float()?;
            let same = |i: usize| i == a || x.shape()[i] == shape[i];
            if x.shape().len() != shape.len() || !(0..shape.len()).all(same) {
                let (first, found) = (first.shape(), x.shape());
                return Err(format!("{first:?} and {found:?} differ beyond axis {a}").into());
            }
            shape[a] += x.shape()[a];
            parts.push(around(x, a));
        }
        elements(&shape)?;
        Ok(vec![Value::Float(back(Tensor::cat(parts, 1), first.float()?, a))])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = inputs.first()?.items()?;
        let alike = inputs.iter().all(|i| i.items() == Some(rank));
        (alike && axis(self.axis, rank).is_ok_and(|a| a != 0)).then_some(rank)
    }
}

/// Picks whole slices along an axis; `picks` lie on the axis.
fn pick(x: &NdTensor, a: usize, picks: &[usize]) -> NdTensor {
    let ints: Vec<i64> = picks.iter().map(|&i| i as i64).collect();
    let data = TensorData::new(ints, [picks.len()]);
    let indices = Tensor::<1, Int>::from_data(data, &x.device());
    back(around(x, a).select(1, indices), x, a)
}

#[derive(Debug)]
struct Gather {
    axis: i64,
}

pub(super) fn gather(build: &mut Build) -> Built {
    build.arity(2..=2, 1)?;
    Ok(Box::new(Gather { axis: build.attributes.int("axis")?.unwrap_or(0) }))
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
        Ok(vec![match x {
            Value::Float(x) => Value::Float(reshaped(&pick(x, a, &picks), shape)?),
            Value::Int { values, shape: own } if own.len() == 1 => {
                Value::Int { values: picks.iter().map(|&i| values[i]).collect(), shape }
            }
            Value::Int { shape, .. } => return Err(format!("integers of shape {shape:?} are not gathered").into()),
        }])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        let Carried::Constant(indices) = inputs.get(1)? else { return None };
        let a = axis(self.axis, rank).ok()?;
        (a != 0).then_some(rank - 1 + indices.shape().len())
    }
}

#[derive(Debug)]
struct Slice {
    /// Starts, ends, axes when the file is old enough to have them as attributes.
    fixed: Option<[Option<Vec<i64>>; 3]>,
}

pub(super) fn slice(build: &mut Build) -> Built {
    if build.opset >= 10 {
        build.arity(3..=5, 1)?;
        return Ok(Box::new(Slice { fixed: None }));
    }
    build.arity(1..=1, 1)?;
    let attributes = &mut build.attributes;
    let fixed = [attributes.ints("starts")?, attributes.ints("ends")?, attributes.ints("axes")?];
    Ok(Box::new(Slice { fixed: Some(fixed) }))
}

/// What a slice takes of one axis.
struct Cut {
    axis: i64,
    start: i64,
    end: i64,
    step: i64,
}

impl Slice {
    fn cuts(&self, lists: [Option<&[i64]>; 4]) -> Result<Vec<Cut>, Problem> {
        let [Some(starts), Some(ends), axes, steps] = lists else { return Err("`starts` or `ends` is missing".into()) };
        let count = starts.len();
        let fits = |list: Option<&[i64]>| list.is_none_or(|l| l.len() == count);
        if ends.len() != count || !fits(axes) || !fits(steps) {
            return Err("`starts`, `ends`, `axes` and `steps` differ in length".into());
        }
        Ok((0..count)
            .map(|i| Cut {
                axis: axes.map_or(i as i64, |a| a[i]),
                start: starts[i],
                end: ends[i],
                step: steps.map_or(1, |s| s[i]),
            })
            .collect())
    }

    fn lists<'v>(&'v self, constants: impl Fn(usize) -> Option<&'v [i64]>) -> [Option<&'v [i64]>; 4] {
        match &self.fixed {
            Some([starts, ends, axes]) => [starts.as_deref(), ends.as_deref(), axes.as_deref(), None],
            None => [constants(1), constants(2), constants(3), constants(4)],
        }
    }
}

impl Cut {
    /// The positions taken of an axis of `length`.
    fn picks(&self, length: usize) -> Result<Vec<usize>, Problem> {
        let n = length as i64;
        let from_start = |p: i64| if p < 0 { p.saturating_add(n) } else { p };
        let (start, end) = (from_start(self.start), from_start(self.end));
        let picks: Vec<usize> = match self.step {
            1.. => (start.clamp(0, n)..end.clamp(0, n)).step_by(self.step as usize).map(|i| i as usize).collect(),
            // Down to, but not including, `end`; an end before the axis takes all of it.
            ..=-1 => {
                let (start, end) = (start.clamp(-1, n - 1), if self.end < -n { -1 } else { end.clamp(-1, n - 1) });
                (end + 1..=start).rev().step_by(self.step.unsigned_abs() as usize).map(|i| i as usize).collect()
            }
            0 => return Err("`steps` should not be 0".into()),
        };
        Ok(picks)
    }
}

impl Operator for Slice {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let constants = |i: usize| inputs.get(i).copied().flatten().and_then(|v| v.ints().ok());
        let mut value = input(inputs, 0)?.clone();
        for cut in self.cuts(self.lists(constants))? {
            let a = axis(cut.axis, value.shape().len())?;
            let picks = cut.picks(value.shape()[a])?;
            value = match &value {
                Value::Int { values, shape } if shape.len() == 1 => {
                    Value::list(picks.iter().map(|&i| values[i]).collect())
                }
                Value::Int { shape, .. } => return Err(format!("integers of shape {shape:?} are not sliced").into()),
                Value::Float(_) if picks.is_empty() => return Err(format!("it leaves nothing of axis {a}").into()),
                Value::Float(x) if cut.step == 1 => {
                    Value::Float(back(around(x, a).narrow(1, picks[0], picks.len()), x, a))
                }
                Value::Float(x) => Value::Float(pick(x, a, &picks)),
            };
        }
        Ok(vec![value])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        let constants = |i: usize| match inputs.get(i) {
            Some(Carried::Constant(value)) => value.ints().ok(),
            _ => None,
        };
        let cuts = self.cuts(self.lists(constants)).ok()?;
        cuts.iter().all(|cut| axis(cut.axis, rank).is_ok_and(|a| a != 0)).then_some(rank)
    }
}

/// Constant padding, before and after per axis.
#[derive(Debug)]
struct Pad {
    pads: Vec<usize>,
    axes: Option<Vec<i64>>,
    number: f32,
}

pub(super) fn pad(build: &mut Build) -> Built {
    build.arity(1..=4, 1)?;
    let mode = build.attributes.text("mode", "constant")?;
    if mode != "constant" {
        return Err(format!("`mode` is {mode}; only constant padding is run here").into());
    }
    let pads = build.ints_or_input("pads", 1)?.ok_or("`pads` is missing")?;
    let number = match build.attributes.float("value")? {
        Some(number) => number,
        None => match build.constant_floats(2, "constant_value")? {
            None | Some([]) => 0.0,
            Some([number, ..]) => *number,
        },
    };
    let axes = build.constant_ints(3, "axes")?.map(<[i64]>::to_vec);
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
            shape[a] = shape[a].saturating_add(before).saturating_add(after).min(MAX_ELEMENTS + 1);
            elements(&shape)?;
            let [outer, _, inner] = around(&x, a).dims();
            let filled = |length| Tensor::<3>::full([outer, length, inner], self.number, &device);
            let mut parts = vec![around(&x, a)];
            if before > 0 {
                parts.insert(0, filled(before));
            }
            if after > 0 {
                parts.push(filled(after));
            }
            x = back(Tensor::cat(parts, 1), &x, a);
        }
        Ok(vec![Value::Float(x)])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = first_only(inputs)?;
        let untouched = self.axes.is_none() && self.pads.len() == 2 * rank && self.pads[0] == 0 && self.pads[rank] == 0;
        untouched.then_some(rank)
    }
}
