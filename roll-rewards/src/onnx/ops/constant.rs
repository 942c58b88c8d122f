//! Constants, and operators that hand a value on as it is or in another type.

use burn::tensor::{Device, Tensor};
use roll_backends::NdTensor;
use roll_backends::host::to_host_nd;

use super::super::attributes::{Build, int_value, sizes};
use super::super::batch::Carried;
use super::super::error::Problem;
use super::super::value::{Constant, MAX_INTS, Value, elements, upload};
use super::{Built, Operator, Run, first_only, input};

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
    device: Device,
}

pub(super) fn cast(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    build.attributes.int("saturate")?;
    let to_int = match build.attributes.int("to")? {
        Some(1 | 10 | 11 | 16) => false,
        Some(2..=7) => true,
        other => return Err(format!("`to` is {other:?}: only floats and integers are cast to here").into()),
    };
    Ok(Box::new(Cast { to_int, device: build.device.clone() }))
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
            (Value::Int { values, shape }, false) if !values.is_empty() => {
                let values = values.iter().map(|&v| v as f32).collect();
                Value::Float(upload(values, shape.clone(), &self.device))
            }
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
    device: Device,
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
