//! Elementwise functions of one tensor, and of two tensors with broadcasting.

use burn_tensor::{Tensor, activation};
use roll_backends::NdTensor;
use roll_backends::ops::{self, Epilogue};

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{Value, elements, host_floats, plain_device, upload};
use super::broadcast::source;
use super::{Arithmetic, BatchInput, Built, Operator, Role, Run, broadcast, input, integers, only_first_batched};

/// The functions of one tensor without attributes.
const FUNCTIONS: [(&str, fn(Tensor<1>) -> Tensor<1>); 17] = [
    ("Relu", activation::relu),
    ("Sigmoid", activation::sigmoid),
    ("Tanh", Tensor::tanh),
    ("Exp", Tensor::exp),
    ("Log", Tensor::log),
    ("Sqrt", Tensor::sqrt),
    ("Neg", Tensor::neg),
    ("Abs", Tensor::abs),
    ("Sign", Tensor::sign),
    ("Sin", Tensor::sin),
    ("Cos", Tensor::cos),
    ("Erf", Tensor::erf),
    ("Floor", Tensor::floor),
    ("Ceil", Tensor::ceil),
    ("Reciprocal", Tensor::recip),
    ("Softplus", |x| activation::softplus(x, 1.0)),
    ("HardSwish", |x| x.clone() * clamp((x / 6.0) + 0.5, Some(0.0), Some(1.0))),
];

/// An elementwise function of one tensor.
#[derive(Clone, Copy, Debug)]
enum Unary {
    /// One of [`FUNCTIONS`].
    Function(&'static str, fn(Tensor<1>) -> Tensor<1>),
    /// Leaky ReLU with this slope of negative numbers.
    LeakyRelu(f32),
    /// `clamp(alpha * x + beta, 0, 1)` with alpha and beta.
    HardSigmoid(f32, f32),
    /// ELU with this alpha.
    Elu(f32),
    Gelu {
        /// Whether the function is the approximation by tanh instead of the exact GELU.
        is_approximate: bool,
    },
    /// Clamps to the least and the greatest result, where they are bounded.
    Clip(Option<f32>, Option<f32>),
}

pub(super) fn unary(spec: &mut OperatorSpec) -> Built {
    let max_inputs = if spec.operator == "Clip" { 3 } else { 1 };
    spec.check_arity(1..=max_inputs, 1)?;
    let attributes = &mut spec.attributes;
    // Defaults are those of the ONNX specification.
    let unary = match spec.operator {
        "LeakyRelu" => Unary::LeakyRelu(attributes.float("alpha")?.unwrap_or(0.01)),
        "HardSigmoid" => {
            Unary::HardSigmoid(attributes.float("alpha")?.unwrap_or(0.2), attributes.float("beta")?.unwrap_or(0.5))
        }
        "Elu" => Unary::Elu(attributes.float("alpha")?.unwrap_or(1.0)),
        "Gelu" => match attributes.text("approximate", "none")?.as_str() {
            "none" => Unary::Gelu { is_approximate: false },
            "tanh" => Unary::Gelu { is_approximate: true },
            other => return Err(format!("`approximate` should be none or tanh, found {other}").into()),
        },
        "Clip" => clip(spec)?,
        other => match FUNCTIONS.into_iter().find(|(name, _)| *name == other) {
            Some((name, function)) => Unary::Function(name, function),
            None => return Err(format!("{other} is not a function of one element").into()),
        },
    };
    Ok(Box::new(unary))
}

/// Reads the limits of Clip: attributes in older operator sets, inputs 1 and 2 in newer operator sets.
fn clip(spec: &mut OperatorSpec) -> Result<Unary, Problem> {
    let scalar = |floats: Option<&[f32]>| match floats {
        None => Ok(None),
        Some([limit]) => Ok(Some(*limit)),
        Some(_) => Err(Problem::from("`min` and `max` should be one number each")),
    };
    let low = match spec.attributes.float("min")? {
        Some(low) => Some(low),
        None => scalar(spec.constant_floats(1, "min")?)?,
    };
    let high = match spec.attributes.float("max")? {
        Some(high) => Some(high),
        None => scalar(spec.constant_floats(2, "max")?)?,
    };
    Ok(Unary::Clip(low, high))
}

impl Operator for Unary {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = match (self, input(inputs, 0)?) {
            // The functions that are also defined for integers.
            (Self::Function(name @ ("Neg" | "Abs" | "Sign"), _), Value::Int { values, shape }) => {
                let function: fn(i64) -> i64 = match *name {
                    "Neg" => i64::wrapping_neg,
                    "Abs" => i64::wrapping_abs,
                    _ => i64::signum,
                };
                let values = values.iter().copied().map(function).collect();
                return Ok(vec![Value::Int { values, shape: shape.clone() }]);
            }
            (_, value) => value.float()?,
        };
        let shape = x.shape().to_vec();
        let x = x.flat().clone();
        let y = match *self {
            Self::Function(_, function) => function(x),
            Self::LeakyRelu(alpha) => activation::leaky_relu(x, alpha.into()),
            Self::HardSigmoid(alpha, beta) => clamp(x.mul_scalar(alpha).add_scalar(beta), Some(0.0), Some(1.0)),
            Self::Elu(alpha) => activation::elu(x, alpha.into()),
            Self::Gelu { is_approximate: true } => ops::gelu_tanh(x),
            Self::Gelu { is_approximate: false } => ops::gelu(x),
            Self::Clip(low, high) => clamp(x, low, high),
        };
        Ok(vec![Value::Float(NdTensor::from_flat(y, shape))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }

    fn role(&self) -> Role<'_> {
        match *self {
            Self::Function("Relu", _) => Role::Epilogue(Epilogue::Relu),
            Self::Function("Sigmoid", _) => Role::Epilogue(Epilogue::Sigmoid),
            Self::Function("HardSwish", _) => Role::Epilogue(Epilogue::HardSwish),
            Self::Function("Erf", _) => Role::Erf,
            Self::Function("Sqrt", _) => Role::Sqrt,
            Self::LeakyRelu(slope) => Role::LeakyRelu(slope),
            Self::Clip(low, high) => {
                Role::Epilogue(Epilogue::Clip(low.unwrap_or(f32::NEG_INFINITY), high.unwrap_or(f32::INFINITY)))
            }
            _ => Role::Other,
        }
    }
}

/// Exact GELU (with the error function).
pub(in super::super) fn exact_gelu() -> Box<dyn Operator> {
    Box::new(Unary::Gelu { is_approximate: false })
}

/// Applies the function that was fused after a convolution to its result `z`.
pub(super) fn apply_epilogue(epilogue: Epilogue, slopes: Option<&NdTensor>, z: &NdTensor) -> Result<NdTensor, Problem> {
    let flat = z.flat().clone();
    let y = match (epilogue, slopes) {
        (Epilogue::Nothing, _) => flat,
        (Epilogue::Relu, _) => activation::relu(flat),
        (Epilogue::Clip(low, high), _) => clamp(flat, Some(low), Some(high)),
        (Epilogue::Sigmoid, _) => activation::sigmoid(flat),
        (Epilogue::Silu, _) => flat.clone() * activation::sigmoid(flat),
        (Epilogue::HardSwish, _) => flat.clone() * clamp((flat / 6.0) + 0.5, Some(0.0), Some(1.0)),
        (Epilogue::Slopes, Some(slopes)) => return prelu(z, slopes),
        (Epilogue::Slopes, None) => return Err("the slopes are missing".into()),
    };
    Ok(NdTensor::from_flat(y, z.shape()))
}

/// Clamps `x` to the limits that are not `None`.
fn clamp(x: Tensor<1>, low: Option<f32>, high: Option<f32>) -> Tensor<1> {
    let x = match low {
        Some(low) => x.clamp_min(low),
        None => x,
    };
    match high {
        Some(high) => x.clamp_max(high),
        None => x,
    }
}

/// An elementwise function of two tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// The remainder with the sign of the divisor, for integers only.
    Mod,
    /// The remainder with the sign of the dividend, for integers and floats.
    Fmod,
    Pow,
    Max,
    Min,
    PRelu,
}

/// Greatest number of inputs of Sum, Max and Min.
const MAX_OPERANDS: usize = 64;

/// Applies a function of two tensors to inputs 0 and 1, then to the result and input 2, and so on.
#[derive(Debug)]
struct Fold {
    binary: Binary,
    /// The exponent of Pow, if it is a constant of the file with one element.
    exponent: Option<f32>,
}

pub(super) fn binary(spec: &mut OperatorSpec) -> Built {
    let (binary, input_counts) = match spec.operator {
        "Add" => (Binary::Add, 2..=2),
        "Sub" => (Binary::Sub, 2..=2),
        "Mul" => (Binary::Mul, 2..=2),
        "Div" => (Binary::Div, 2..=2),
        "Mod" if spec.attributes.flag("fmod")? => (Binary::Fmod, 2..=2),
        "Mod" => (Binary::Mod, 2..=2),
        "Pow" => (Binary::Pow, 2..=2),
        "PRelu" => (Binary::PRelu, 2..=2),
        "Sum" => (Binary::Add, 1..=MAX_OPERANDS),
        "Max" => (Binary::Max, 1..=MAX_OPERANDS),
        "Min" => (Binary::Min, 1..=MAX_OPERANDS),
        other => return Err(format!("{other} is not a function of two elements").into()),
    };
    spec.check_arity(input_counts, 1)?;
    let second_constant = spec.constant_if_not_computed(1);
    let exponent = match (binary, second_constant) {
        (Binary::Pow, Some(constant)) => match (&constant.value, constant.floats.as_deref()) {
            (_, Some([exponent])) => Some(*exponent),
            (Value::Int { values, .. }, _) if values.len() == 1 => Some(values[0] as f32),
            _ => None,
        },
        _ => None,
    };
    Ok(Box::new(Fold { binary, exponent }))
}

impl Operator for Fold {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let first = input(inputs, 0)?;
        if let (Some(exponent), Value::Float(x)) = (self.exponent, first) {
            return Ok(vec![Value::Float(pow_scalar(x, exponent))]);
        }
        let mut result = first.clone();
        for index in 1..inputs.len() {
            result = match (&result, input(inputs, index)?) {
                (Value::Float(a), Value::Float(b)) => Value::Float(self.floats(a, b)?),
                // Pow accepts two types; the result has the type of the base.
                (Value::Float(a), Value::Int { values, shape }) if self.binary == Binary::Pow && !values.is_empty() => {
                    let exponents = values.iter().map(|v| *v as f32).collect();
                    Value::Float(self.floats(a, &upload(exponents, shape.clone(), &plain_device(a)))?)
                }
                (a @ Value::Int { .. }, Value::Float(b)) if self.binary == Binary::Pow => int_power(a, b)?,
                (Value::Int { .. }, Value::Int { .. }) => self.ints(&result, input(inputs, index)?)?,
                (a, b) => {
                    let kind = |value: &Value| if matches!(value, Value::Float(_)) { "floats" } else { "integers" };
                    return Err(format!(
                        "input 0 holds {}, input {index} {}; both should have one type",
                        kind(a),
                        kind(b)
                    )
                    .into());
                }
            };
        }
        Ok(vec![result])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = inputs.iter().filter_map(|i| i.batched()).max()?;
        let is_elementwise_per_item = |i: &BatchInput| match i {
            BatchInput::Batched(r) => *r == rank,
            // A constant must be the same for all items: it has no batch axis, or one of length 1.
            BatchInput::Constant(c) => c.shape().len() < rank || c.shape().len() == rank && c.shape()[0] == 1,
            BatchInput::Absent => false,
        };
        inputs.iter().all(is_elementwise_per_item).then_some(rank)
    }

    fn role(&self) -> Role<'_> {
        match self.binary {
            Binary::Pow if self.exponent == Some(2.0) => Role::Square,
            Binary::Add => Role::Arithmetic(Arithmetic::Add),
            Binary::Sub => Role::Arithmetic(Arithmetic::Sub),
            Binary::Mul => Role::Arithmetic(Arithmetic::Mul),
            Binary::Div => Role::Arithmetic(Arithmetic::Div),
            Binary::PRelu => Role::PRelu,
            Binary::Mod | Binary::Fmod | Binary::Pow | Binary::Max | Binary::Min => Role::Other,
        }
    }
}

impl Fold {
    fn floats(&self, a: &NdTensor, b: &NdTensor) -> Result<NdTensor, Problem> {
        let shape = broadcast::shape(a.shape(), b.shape())?;
        match self.binary {
            Binary::PRelu => prelu(a, b),
            Binary::Add => broadcast::apply(a, b, |a, b| a + b),
            Binary::Sub => broadcast::apply(a, b, |a, b| a - b),
            Binary::Mul => broadcast::apply(a, b, |a, b| a * b),
            Binary::Div => broadcast::apply(a, b, |a, b| a / b),
            Binary::Mod => Err("the remainder of floats needs `fmod` 1".into()),
            Binary::Fmod => remainder(a, b, &shape),
            Binary::Pow => broadcast::apply(a, b, |a, b| a.powf(b)),
            // `b + relu(a - b)` is not used, because it loses `a` if `b` is the least float, as in masks.
            Binary::Max => {
                broadcast::apply(&broadcast::expand(a, &shape)?, &broadcast::expand(b, &shape)?, Tensor::max_pair)
            }
            Binary::Min => {
                broadcast::apply(&broadcast::expand(a, &shape)?, &broadcast::expand(b, &shape)?, Tensor::min_pair)
            }
        }
    }

    fn ints(&self, a: &Value, b: &Value) -> Result<Value, Problem> {
        let shape = broadcast::shape(a.shape(), b.shape())?;
        let values = (0..integers::count(&shape)?).map(|i| {
            let (a, b) = (a.ints()?[source(i, &shape, a.shape())], b.ints()?[source(i, &shape, b.shape())]);
            let result = match self.binary {
                Binary::Add => a.checked_add(b),
                Binary::Sub => a.checked_sub(b),
                Binary::Mul => a.checked_mul(b),
                Binary::Div => a.checked_div(b),
                // The remainder has the sign of the divisor.
                Binary::Mod => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
                Binary::Fmod => a.checked_rem(b),
                Binary::Pow => match (a, u32::try_from(b)) {
                    (_, Ok(b)) => a.checked_pow(b),
                    (1, _) => Some(1),
                    (-1, _) => Some(if b % 2 == 0 { 1 } else { -1 }),
                    (0, _) => None,
                    // A negative exponent: a fraction below 1, rounded to 0.
                    _ if b < 0 => Some(0),
                    // An exponent above 2^32: a result beyond 64 bits.
                    _ => None,
                },
                Binary::Max => Some(a.max(b)),
                Binary::Min => Some(a.min(b)),
                Binary::PRelu => None,
            };
            result.ok_or_else(|| format!("{:?} of the integers {a} and {b} has no value", self.binary).into())
        });
        Ok(Value::Int { values: values.collect::<Result<_, Problem>>()?, shape })
    }
}

/// Integers to the power of floats, as integers.
fn int_power(a: &Value, b: &NdTensor) -> Result<Value, Problem> {
    let (values, exponents) = (a.ints()?, host_floats(b)?);
    let shape = broadcast::shape(a.shape(), b.shape())?;
    let power = |i: usize| {
        let (base, exponent) = (values[source(i, &shape, a.shape())], exponents[source(i, &shape, b.shape())]);
        let power = (base as f64).powf(f64::from(exponent));
        let is_integer = power.abs() < i64::MAX as f64; // false for NaN
        is_integer.then_some(power as i64).ok_or_else(|| format!("{base} to the power of {exponent} is no integer"))
    };
    let values = (0..integers::count(&shape)?).map(power).collect::<Result<_, _>>()?;
    Ok(Value::Int { values, shape })
}

/// `a - b * q`, where q is the quotient `a / b` without its fraction. The quotient is computed in f64, because in f32
/// it could round up to the next integer.
fn remainder(a: &NdTensor, b: &NdTensor, shape: &[usize]) -> Result<NdTensor, Problem> {
    let (a_host, b_host) = (host_floats(a)?, host_floats(b)?);
    let quotient = |i: usize| {
        let (a_at, b_at) = (a_host[source(i, shape, a.shape())], b_host[source(i, shape, b.shape())]);
        (f64::from(a_at) / f64::from(b_at)).trunc() as f32
    };
    let quotients = upload((0..integers::count(shape)?).map(quotient).collect(), shape.to_vec(), &plain_device(a));
    let product = broadcast::apply(&quotients, b, |q, b| q * b)?;
    broadcast::apply(a, &product, |a, product| a - product)
}

/// Raises `x` to a power. Frequent exponents have operators that are faster and more exact.
fn pow_scalar(x: &NdTensor, exponent: f32) -> NdTensor {
    let flat = x.flat().clone();
    let y = match exponent {
        1.0 => flat,
        2.0 => flat.clone() * flat,
        0.5 => flat.sqrt(),
        _ => flat.powf_scalar(exponent),
    };
    NdTensor::from_flat(y, x.shape())
}

/// PRelu. One slope for all elements or per channel uses the tensor library's operator; all other slopes are computed
/// as relu(x) - slope * relu(-x).
fn prelu(x: &NdTensor, slope: &NdTensor) -> Result<NdTensor, Problem> {
    if broadcast::shape(x.shape(), slope.shape())? != x.shape() {
        let (x, slope) = (x.shape(), slope.shape());
        return Err(format!("a slope of shape {slope:?} does not broadcast to {x:?}").into());
    }
    let (rank, count) = (x.shape().len(), elements(slope.shape())?);
    // The first axis of x along which slopes differ.
    let axis = slope.shape().iter().position(|&d| d != 1).map(|i| i + rank - slope.shape().len());
    let is_one_slope = axis.is_none();
    if rank >= 2 && (is_one_slope || axis == Some(1) && count == x.shape()[1]) {
        let inner: usize = x.shape()[2..].iter().product();
        let x_ncl = x.flat().clone().reshape([x.shape()[0], x.shape()[1], inner]);
        let y = activation::prelu(x_ncl, slope.flat().clone());
        return Ok(NdTensor::from_flat(y.reshape([elements(x.shape())?]), x.shape()));
    }
    broadcast::apply(x, slope, |x, slope| activation::relu(x.clone()) - slope * activation::relu(x.neg()))
}
