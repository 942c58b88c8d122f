//! Operators on the shape of a value: Shape, Size, Reshape, Flatten, Squeeze, Unsqueeze.

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{Value, axis, elements};
use super::{BatchInput, Built, Operator, Run, input, only_first_batched};

/// The shape, or its part from `start` to `end`.
#[derive(Debug)]
struct Shape {
    start: i64,
    end: Option<i64>,
}

pub(super) fn shape(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let attributes = &mut spec.attributes;
    Ok(Box::new(Shape { start: attributes.int("start")?.unwrap_or(0), end: attributes.int("end")? }))
}

impl Operator for Shape {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let shape = input(inputs, 0)?.shape();
        let start = clamped_position(self.start, shape.len());
        let end = clamped_position(self.end.unwrap_or(i64::MAX), shape.len());
        Ok(vec![Value::list(shape.get(start..end).unwrap_or_default().iter().map(|&d| d as i64).collect())])
    }
}

/// The number of elements.
#[derive(Debug)]
struct Size;

pub(super) fn size(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    Ok(Box::new(Size))
}

impl Operator for Size {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let count = elements(input(inputs, 0)?.shape())?;
        Ok(vec![Value::Int { values: vec![count as i64], shape: vec![] }])
    }
}

/// A position on an axis, clamped. Negative positions count from the end.
fn clamped_position(position: i64, length: usize) -> usize {
    let from_start = if position < 0 { position.saturating_add(length as i64) } else { position };
    from_start.clamp(0, length as i64) as usize
}

/// Reshapes input 0 to the shape in input 1. A length of -1 follows from the other lengths.
#[derive(Debug)]
struct Reshape {
    /// Whether a length of 0 means 0 (`allowzero`) instead of the input's length of this axis.
    keeps_zero: bool,
}

pub(super) fn reshape(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(Reshape { keeps_zero: spec.attributes.flag("allowzero")? }))
}

impl Operator for Reshape {
    fn run(&self, inputs: &[Option<&Value>], run: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let wanted = input(inputs, 1)?.ints()?;
        let impossible = || Problem(format!("{:?} cannot become {wanted:?}", x.shape()));
        let mut shape = vec![];
        let mut free_axis = None;
        for (i, &d) in wanted.iter().enumerate() {
            shape.push(match d {
                -1 if free_axis.is_none() => {
                    free_axis = Some(i);
                    1
                }
                0 if !self.keeps_zero => *x.shape().get(i).ok_or_else(impossible)?,
                _ => usize::try_from(d).map_err(|_| impossible())?,
            });
        }
        if let (Some(items), Some(first)) = (run.items, shape.first_mut()) {
            *first = items;
        }
        if let Some(free_axis) = free_axis {
            let known = elements(&shape)?;
            let count = elements(x.shape())?;
            shape[free_axis] = count.checked_div(known).filter(|d| d * known == count).ok_or_else(impossible)?;
        }
        Ok(vec![x.reshaped(shape)?])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let [BatchInput::Batched(_), BatchInput::Constant(Value::Int { values, .. })] = inputs else { return None };
        // The first length must be the number of items: a 1, which a run replaces, or a 0, which copies the length of
        // the input. A -1 would follow from the other lengths, so it need not be the number of items.
        let keeps_items = match values.first() {
            Some(1) => true,
            Some(0) => !self.keeps_zero,
            _ => false,
        };
        keeps_items.then_some(values.len())
    }
}

/// Reshapes to a matrix: the axes before `axis` become the rows, the others the columns.
#[derive(Debug)]
struct Flatten {
    axis: i64,
}

pub(super) fn flatten(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    Ok(Box::new(Flatten { axis: spec.attributes.int("axis")?.unwrap_or(1) }))
}

impl Operator for Flatten {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let rank = x.shape().len();
        let cut = if self.axis == rank as i64 { rank } else { axis(self.axis, rank)? };
        let (outer, inner) = x.shape().split_at(cut);
        Ok(vec![x.reshaped(vec![elements(outer)?, elements(inner)?])?])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        // The rows of the result must be the items.
        let cuts_after_batch = axis(self.axis, rank) == Ok(1);
        cuts_after_batch.then_some(2)
    }
}

/// Greatest number of axes that Squeeze removes or Unsqueeze inserts.
const MAX_NAMED_AXES: usize = 16;

/// Squeeze, which removes axes of length 1, or Unsqueeze, which inserts them.
#[derive(Debug)]
struct Squeeze {
    /// Whether axes are removed instead of inserted.
    removes: bool,
    /// `None` removes all axes of length 1.
    axes: Option<Vec<i64>>,
}

pub(super) fn squeeze(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=2, 1)?;
    let removes = spec.operator == "Squeeze";
    let axes = spec.ints_or_input("axes", 1)?;
    if axes.is_none() && !removes {
        return Err("`axes` is missing".into());
    }
    if axes.as_ref().is_some_and(|a| a.len() > MAX_NAMED_AXES) {
        return Err(format!("`axes` names more than {MAX_NAMED_AXES} axes").into());
    }
    Ok(Box::new(Squeeze { removes, axes }))
}

impl Operator for Squeeze {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let shape = x.shape();
        let named = self.axes.as_deref().unwrap_or_default();
        if !self.removes {
            let rank = shape.len() + named.len();
            let mut axes: Vec<usize> = named.iter().map(|&a| axis(a, rank)).collect::<Result<_, _>>()?;
            axes.sort_unstable();
            let mut shape = shape.to_vec();
            for a in axes {
                shape.insert(a.min(shape.len()), 1);
            }
            return Ok(vec![x.reshaped(shape)?]);
        }
        let axes: Vec<usize> = match &self.axes {
            None => (0..shape.len()).filter(|&a| shape[a] == 1).collect(),
            Some(named) => named.iter().map(|&a| axis(a, shape.len())).collect::<Result<_, _>>()?,
        };
        if let Some(&a) = axes.iter().find(|&&a| shape[a] != 1) {
            return Err(format!("axis {a} of {shape:?} is not of length 1").into());
        }
        let kept = (0..shape.len()).filter(|a| !axes.contains(a)).map(|a| shape[a]).collect();
        Ok(vec![x.reshaped(kept)?])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        let axes = self.axes.as_ref()?;
        // The axes are those of the input if they are removed, of the output if they are inserted.
        let (named_rank, output_rank) =
            if self.removes { (rank, rank.checked_sub(axes.len())?) } else { (rank + axes.len(), rank + axes.len()) };
        let named: Vec<usize> = axes.iter().map(|&a| axis(a, named_rank).ok()).collect::<Option<_>>()?;
        (!named.contains(&0)).then_some(output_rank)
    }
}
