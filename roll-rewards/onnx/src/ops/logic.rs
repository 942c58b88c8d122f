//! Comparisons, logic, and Where. Booleans are the integers 0 and 1 on the host. Only [`Where`] has a gradient, with
//! respect to the two tensors from which it selects.

use burn_tensor::{Bool, Tensor, TensorData};
use roll_backends::NdTensor;

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{MAX_INTS, Value, elements, host_floats};
use super::broadcast::source;
use super::{Built, Operator, Run, broadcast, input};

/// A comparison of two numbers or a logical connective of two booleans.
#[derive(Clone, Copy, Debug)]
enum BinaryPredicate {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    And,
    Or,
    Xor,
}

pub(super) fn binary(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(match spec.operator {
        "Equal" => BinaryPredicate::Equal,
        "Less" => BinaryPredicate::Less,
        "LessOrEqual" => BinaryPredicate::LessOrEqual,
        "Greater" => BinaryPredicate::Greater,
        "GreaterOrEqual" => BinaryPredicate::GreaterOrEqual,
        "And" => BinaryPredicate::And,
        "Or" => BinaryPredicate::Or,
        "Xor" => BinaryPredicate::Xor,
        other => return Err(format!("{other} is not a comparison").into()),
    }))
}

impl BinaryPredicate {
    /// Whether the predicate is true for `a` and `b`. A boolean is false if it has the default value, 0.
    fn holds<T: PartialOrd + Copy + Default>(self, a: T, b: T) -> bool {
        let is_true = |v: T| v != T::default();
        match self {
            Self::Equal => a == b,
            Self::Less => a < b,
            Self::LessOrEqual => a <= b,
            Self::Greater => a > b,
            Self::GreaterOrEqual => a >= b,
            Self::And => is_true(a) && is_true(b),
            Self::Or => is_true(a) || is_true(b),
            Self::Xor => is_true(a) != is_true(b),
        }
    }
}

impl Operator for BinaryPredicate {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (a, b) = (input(inputs, 0)?, input(inputs, 1)?);
        let shape = host_shape(a.shape(), b.shape())?;
        let count = elements(&shape)?;
        let a_index = |i: usize| source(i, &shape, a.shape());
        let b_index = |i: usize| source(i, &shape, b.shape());
        let values = match (a, b) {
            (Value::Float(a), Value::Float(b)) => {
                let (a, b) = (host_floats(a)?, host_floats(b)?);
                (0..count).map(|i| i64::from(self.holds(a[a_index(i)], b[b_index(i)]))).collect()
            }
            (a, b) => {
                let (a, b) = (a.ints()?, b.ints()?);
                (0..count).map(|i| i64::from(self.holds(a[a_index(i)], b[b_index(i)]))).collect()
            }
        };
        Ok(vec![Value::Int { values, shape }])
    }
}

/// The shape to which two shapes broadcast. Fails if it is too large for the host.
fn host_shape(a: &[usize], b: &[usize]) -> Result<Vec<usize>, Problem> {
    let shape = broadcast::shape(a, b)?;
    if elements(&shape)? > MAX_INTS {
        return Err(format!("booleans of shape {shape:?} are more than {MAX_INTS}").into());
    }
    Ok(shape)
}

/// A predicate of one number.
#[derive(Clone, Copy, Debug)]
enum UnaryPredicate {
    Not,
    IsNan,
    /// Whether the number is one of the infinities that count.
    IsInfinite {
        counts_negative: bool,
        counts_positive: bool,
    },
}

pub(super) fn unary(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    Ok(Box::new(match spec.operator {
        "Not" => UnaryPredicate::Not,
        "IsNaN" => UnaryPredicate::IsNan,
        _ => {
            let mut detects = |name| -> Result<bool, Problem> { Ok(spec.attributes.int(name)?.unwrap_or(1) != 0) };
            UnaryPredicate::IsInfinite {
                counts_negative: detects("detect_negative")?,
                counts_positive: detects("detect_positive")?,
            }
        }
    }))
}

impl Operator for UnaryPredicate {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?;
        let values = match *self {
            Self::Not => x.ints()?.iter().map(|&v| i64::from(v == 0)).collect(),
            Self::IsNan => host_floats(x.float()?)?.iter().map(|v| i64::from(v.is_nan())).collect(),
            Self::IsInfinite { counts_negative, counts_positive } => {
                let is_infinite = |v: &f32| {
                    i64::from(*v == f32::INFINITY && counts_positive || *v == f32::NEG_INFINITY && counts_negative)
                };
                host_floats(x.float()?)?.iter().map(is_infinite).collect()
            }
        };
        Ok(vec![Value::Int { values, shape: x.shape().to_vec() }])
    }
}

/// Where: selects elements of input 1 where input 0 is true, and elements of input 2 elsewhere.
#[derive(Debug)]
struct Where;

pub(super) fn where_operator(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(3..=3, 1)?;
    Ok(Box::new(Where))
}

impl Operator for Where {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (condition, yes, no) = (input(inputs, 0)?, input(inputs, 1)?, input(inputs, 2)?);
        let shape = host_shape(&broadcast::shape(condition.shape(), yes.shape())?, no.shape())?;
        let count = elements(&shape)?;
        let condition_ints = condition.ints()?;
        let is_true = |i: usize| condition_ints[source(i, &shape, condition.shape())] != 0;
        Ok(vec![match (yes, no) {
            (Value::Float(yes), Value::Float(no)) => {
                let (yes, no) = (broadcast::expand(yes, &shape)?, broadcast::expand(no, &shape)?);
                let mask: Vec<bool> = (0..count).map(is_true).collect();
                let y = masked(no.flat().clone(), mask, yes.flat().clone());
                Value::Float(NdTensor::from_flat(y, shape))
            }
            (yes, no) => {
                let (yes_ints, no_ints) = (yes.ints()?, no.ints()?);
                let pick = |i: usize| {
                    if is_true(i) {
                        yes_ints[source(i, &shape, yes.shape())]
                    } else {
                        no_ints[source(i, &shape, no.shape())]
                    }
                };
                Value::Int { values: (0..count).map(pick).collect(), shape }
            }
        }])
    }
}

/// Returns `x` with the elements of `value` where `mask` is true. This is not a product with 0 and 1, because an
/// infinity that is masked would become NaN.
pub(super) fn masked(x: Tensor<1>, mask: Vec<bool>, value: Tensor<1>) -> Tensor<1> {
    let device = if x.device().is_autodiff() { x.device() } else { value.device() };
    let count = mask.len();
    x.mask_where(Tensor::<1, Bool>::from_data(TensorData::new(mask, [count]), &device), value)
}
