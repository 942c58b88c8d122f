//! Elementwise functions of one tensor, and of two tensors with broadcasting.

use burn::tensor::{Tensor, activation};
use roll_backends::NdTensor;
use roll_backends::ops::{self, Epilogue};

use super::super::attributes::Build;
use super::super::error::Problem;
use super::super::value::{MAX_INTS, Value, elements};
use super::broadcast::source;
use super::{Arithmetic, Built, Carried, Operator, Role, Run, broadcast, first_only, input};

/// An elementwise function of one tensor.
#[derive(Clone, Copy, Debug)]
enum One {
    Relu,
    Sigmoid,
    Tanh,
    Exp,
    Log,
    Sqrt,
    Neg,
    Abs,
    Sign,
    Sin,
    Cos,
    Erf,
    Floor,
    Ceil,
    Reciprocal,
    Softplus,
    HardSwish,
    LeakyRelu(f32),
    HardSigmoid(f32, f32),
    Elu(f32),
    Gelu { tanh: bool },
    Clip(Option<f32>, Option<f32>),
}

pub(super) fn one(build: &mut Build) -> Built {
    build.arity(1..=if build.operator == "Clip" { 3 } else { 1 }, 1)?;
    let attributes = &mut build.attributes;
    let one = match build.operator {
        "Relu" => One::Relu,
        "Sigmoid" => One::Sigmoid,
        "Tanh" => One::Tanh,
        "Exp" => One::Exp,
        "Log" => One::Log,
        "Sqrt" => One::Sqrt,
        "Neg" => One::Neg,
        "Abs" => One::Abs,
        "Sign" => One::Sign,
        "Sin" => One::Sin,
        "Cos" => One::Cos,
        "Erf" => One::Erf,
        "Floor" => One::Floor,
        "Ceil" => One::Ceil,
        "Reciprocal" => One::Reciprocal,
        "Softplus" => One::Softplus,
        "HardSwish" => One::HardSwish,
        "LeakyRelu" => One::LeakyRelu(attributes.float("alpha")?.unwrap_or(0.01)),
        "HardSigmoid" => {
            One::HardSigmoid(attributes.float("alpha")?.unwrap_or(0.2), attributes.float("beta")?.unwrap_or(0.5))
        }
        "Elu" => One::Elu(attributes.float("alpha")?.unwrap_or(1.0)),
        "Gelu" => match attributes.text("approximate", "none")?.as_str() {
            "none" => One::Gelu { tanh: false },
            "tanh" => One::Gelu { tanh: true },
            other => return Err(format!("`approximate` should be none or tanh, found {other}").into()),
        },
        "Clip" => clip(build)?,
        other => return Err(format!("{other} is not a function of one element").into()),
    };
    Ok(Box::new(one))
}

fn clip(build: &mut Build) -> Result<One, Problem> {
    let scalar = |floats: Option<&[f32]>| match floats {
        None => Ok(None),
        Some([limit]) => Ok(Some(*limit)),
        Some(_) => Err(Problem::from("`min` and `max` should be one number each")),
    };
    let low = match build.attributes.float("min")? {
        Some(low) => Some(low),
        None => scalar(build.constant_floats(1, "min")?)?,
    };
    let high = match build.attributes.float("max")? {
        Some(high) => Some(high),
        None => scalar(build.constant_floats(2, "max")?)?,
    };
    Ok(One::Clip(low, high))
}

impl Operator for One {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = match (self, input(inputs, 0)?) {
            (Self::Neg | Self::Abs | Self::Sign, Value::Int { values, shape }) => {
                let one = |v: &i64| match self {
                    Self::Neg => v.wrapping_neg(),
                    Self::Abs => v.wrapping_abs(),
                    _ => v.signum(),
                };
                let values = values.iter().map(one).collect();
                return Ok(vec![Value::Int { values, shape: shape.clone() }]);
            }
            (_, value) => value.float()?,
        };
        let shape = x.shape().to_vec();
        let x = x.flat().clone();
        let y = match *self {
            Self::Relu => activation::relu(x),
            Self::Sigmoid => activation::sigmoid(x),
            Self::Tanh => x.tanh(),
            Self::Exp => x.exp(),
            Self::Log => x.log(),
            Self::Sqrt => x.sqrt(),
            Self::Neg => x.neg(),
            Self::Abs => x.abs(),
            Self::Sign => x.sign(),
            Self::Sin => x.sin(),
            Self::Cos => x.cos(),
            Self::Erf => x.erf(),
            Self::Floor => x.floor(),
            Self::Ceil => x.ceil(),
            Self::Reciprocal => x.recip(),
            Self::Softplus => activation::softplus(x, 1.0),
            Self::HardSwish => x.clone() * clamp((x / 6.0) + 0.5, Some(0.0), Some(1.0)),
            Self::LeakyRelu(alpha) => activation::leaky_relu(x, alpha.into()),
            Self::HardSigmoid(alpha, beta) => clamp(x.mul_scalar(alpha).add_scalar(beta), Some(0.0), Some(1.0)),
            Self::Elu(alpha) => activation::elu(x, alpha.into()),
            Self::Gelu { tanh: true } => ops::gelu_tanh(x),
            Self::Gelu { tanh: false } => ops::gelu(x),
            Self::Clip(low, high) => clamp(x, low, high),
        };
        Ok(vec![Value::Float(NdTensor::from_flat(y, shape))])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs)
    }

    fn role(&self) -> Role<'_> {
        match *self {
            Self::Relu => Role::Epilogue(Epilogue::Relu),
            Self::Sigmoid => Role::Epilogue(Epilogue::Sigmoid),
            Self::HardSwish => Role::Epilogue(Epilogue::HardSwish),
            Self::Erf => Role::Erf,
            Self::Sqrt => Role::Sqrt,
            Self::LeakyRelu(slope) => Role::Leaky(slope),
            Self::Clip(low, high) => {
                Role::Epilogue(Epilogue::Clip(low.unwrap_or(f32::NEG_INFINITY), high.unwrap_or(f32::INFINITY)))
            }
            _ => Role::Other,
        }
    }
}

/// Exact GELU (with the error function).
pub(in super::super) fn exact_gelu() -> Box<dyn Operator> {
    Box::new(One::Gelu { tanh: false })
}

/// Applies the function that was fused after a convolution.
pub(super) fn after(then: Epilogue, slopes: Option<&NdTensor>, z: &NdTensor) -> Result<NdTensor, Problem> {
    let flat = z.flat().clone();
    let y = match (then, slopes) {
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

fn clamp(x: Tensor<1>, low: Option<f32>, high: Option<f32>) -> Tensor<1> {
    let x = low.map_or(x.clone(), |low| x.clamp_min(low));
    high.map_or(x.clone(), |high| x.clamp_max(high))
}

/// An elementwise function of two tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Two {
    Add,
    Sub,
    Mul,
    Div,
    Mod,
    Pow,
    Max,
    Min,
    PRelu,
}

/// Folds the inputs with `two`. `power` is Pow's exponent if it is a constant of the file.
#[derive(Debug)]
struct Fold {
    two: Two,
    power: Option<f32>,
}

pub(super) fn two(build: &mut Build) -> Built {
    let (two, inputs) = match build.operator {
        "Add" => (Two::Add, 2..=2),
        "Sub" => (Two::Sub, 2..=2),
        "Mul" => (Two::Mul, 2..=2),
        "Div" => (Two::Div, 2..=2),
        "Mod" if !build.attributes.flag("fmod")? => (Two::Mod, 2..=2),
        "Mod" => return Err("`fmod` is not run here".into()),
        "Pow" => (Two::Pow, 2..=2),
        "PRelu" => (Two::PRelu, 2..=2),
        "Sum" => (Two::Add, 1..=64),
        "Max" => (Two::Max, 1..=64),
        "Min" => (Two::Min, 1..=64),
        other => return Err(format!("{other} is not a function of two elements").into()),
    };
    build.arity(inputs, 1)?;
    let power = match (two, build.inputs[1..].first()) {
        (Two::Pow, Some(Some(Some(exponent)))) => match (&exponent.value, exponent.floats.as_deref()) {
            (_, Some([power])) => Some(*power),
            (Value::Int { values, .. }, _) if values.len() == 1 => Some(values[0] as f32),
            _ => None,
        },
        _ => None,
    };
    Ok(Box::new(Fold { two, power }))
}

impl Operator for Fold {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let first = input(inputs, 0)?;
        if let (Some(power), Value::Float(x)) = (self.power, first) {
            return Ok(vec![Value::Float(powered(x, power))]);
        }
        let mut result = first.clone();
        for index in 1..inputs.len() {
            result = match (&result, input(inputs, index)?) {
                (Value::Float(a), Value::Float(b)) => Value::Float(self.floats(a, b)?),
                (a, b) => self.ints(a, b)?,
            };
        }
        Ok(vec![result])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        let rank = inputs.iter().filter_map(|i| i.items()).max()?;
        let alike = |i: &Carried| match i {
            Carried::Items(r) => *r == rank,
            // Next to items, a constant must not have a batch axis.
            Carried::Constant(c) => c.shape().len() < rank || c.shape().len() == rank && c.shape()[0] == 1,
            Carried::Absent => false,
        };
        inputs.iter().all(alike).then_some(rank)
    }

    fn role(&self) -> Role<'_> {
        match self.two {
            Two::Pow if self.power == Some(2.0) => Role::Square,
            Two::Add => Role::Two(Arithmetic::Add),
            Two::Sub => Role::Two(Arithmetic::Sub),
            Two::Mul => Role::Two(Arithmetic::Mul),
            Two::Div => Role::Two(Arithmetic::Div),
            Two::PRelu => Role::PRelu,
            Two::Mod | Two::Pow | Two::Max | Two::Min => Role::Other,
        }
    }
}

impl Fold {
    fn floats(&self, a: &NdTensor, b: &NdTensor) -> Result<NdTensor, Problem> {
        let shape = broadcast::shape(a.shape(), b.shape())?;
        match self.two {
            Two::PRelu => prelu(a, b),
            Two::Add => broadcast::apply(a, b, |a, b| a + b),
            Two::Sub => broadcast::apply(a, b, |a, b| a - b),
            Two::Mul => broadcast::apply(a, b, |a, b| a * b),
            Two::Div => broadcast::apply(a, b, |a, b| a / b),
            Two::Mod => Err("only integers are divided with remainder here".into()),
            Two::Pow => broadcast::apply(a, b, |a, b| a.powf(b)),
            // `b + relu(a - b)` is not used, because it loses `a` if `b` is the least float, as in masks.
            Two::Max => {
                broadcast::apply(&broadcast::expand(a, &shape)?, &broadcast::expand(b, &shape)?, Tensor::max_pair)
            }
            Two::Min => {
                broadcast::apply(&broadcast::expand(a, &shape)?, &broadcast::expand(b, &shape)?, Tensor::min_pair)
            }
        }
    }

    fn ints(&self, a: &Value, b: &Value) -> Result<Value, Problem> {
        let shape = broadcast::shape(a.shape(), b.shape())?;
        let count = elements(&shape)?;
        if count > MAX_INTS {
            return Err(format!("integers of shape {shape:?} are more than {MAX_INTS}").into());
        }
        let values = (0..count).map(|i| {
            let (a, b) = (a.ints()?[source(i, &shape, a.shape())], b.ints()?[source(i, &shape, b.shape())]);
            let result = match self.two {
                Two::Add => a.checked_add(b),
                Two::Sub => a.checked_sub(b),
                Two::Mul => a.checked_mul(b),
                Two::Div => a.checked_div(b),
                // The remainder has the sign of the divisor.
                Two::Mod => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
                Two::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
                Two::Max => Some(a.max(b)),
                Two::Min => Some(a.min(b)),
                Two::PRelu => None,
            };
            result.ok_or_else(|| format!("{:?} of the integers {a} and {b} has no value", self.two).into())
        });
        Ok(Value::Int { values: values.collect::<Result<_, Problem>>()?, shape })
    }
}

fn powered(x: &NdTensor, power: f32) -> NdTensor {
    let flat = x.flat().clone();
    let y = match power {
        1.0 => flat,
        2.0 => flat.clone() * flat,
        0.5 => flat.sqrt(),
        _ => flat.powf_scalar(power),
    };
    NdTensor::from_flat(y, x.shape())
}

/// One slope per channel uses the fused operator; all other slopes use relu(x) - slope * relu(-x).
fn prelu(x: &NdTensor, slope: &NdTensor) -> Result<NdTensor, Problem> {
    if broadcast::shape(x.shape(), slope.shape())? != x.shape() {
        let (x, slope) = (x.shape(), slope.shape());
        return Err(format!("a slope of shape {slope:?} does not broadcast to {x:?}").into());
    }
    let (rank, count) = (x.shape().len(), elements(slope.shape())?);
    let axis = slope.shape().iter().position(|&d| d != 1).map(|i| i + rank - slope.shape().len());
    if rank >= 2 && (axis == Some(1) && count == x.shape()[1] || axis.is_none()) {
        let inner: usize = x.shape()[2..].iter().product();
        let x_ncl = x.flat().clone().reshape([x.shape()[0], x.shape()[1], inner]);
        let y = activation::prelu(x_ncl, slope.flat().clone());
        return Ok(NdTensor::from_flat(y.reshape([elements(x.shape())?]), x.shape()));
    }
    broadcast::apply(x, slope, |x, slope| activation::relu(x.clone()) - slope * activation::relu(x.neg()))
}
