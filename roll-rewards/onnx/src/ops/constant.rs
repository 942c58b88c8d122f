//! Constants, and operators that return their input unchanged or in another type.

use burn_tensor::{Device, Tensor};
use roll_backends::NdTensor;

use super::super::attributes::{OperatorSpec, sizes};
use super::super::error::Problem;
use super::super::value::{Constant, MAX_INTS, Value, elements, host_floats, upload};
use super::{BatchInput, Built, Operator, Run, input, only_first_batched};

/// Identity, and Dropout, which changes nothing outside training.
#[derive(Debug)]
struct Identity;

pub(super) fn identity(spec: &mut OperatorSpec) -> Built {
    if spec.operator == "Dropout" {
        spec.check_arity(1..=3, 1)?;
        spec.attributes.float("ratio")?;
        spec.attributes.int("seed")?;
        if spec.constant_ints(2, "training_mode")?.is_some_and(|mode| mode != [0]) {
            return Err("`training_mode` is not run here".into());
        }
    } else {
        spec.check_arity(1..=1, 1)?;
    }
    Ok(Box::new(Identity))
}

impl Operator for Identity {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        Ok(vec![input(inputs, 0)?.clone()])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

/// Casts. All float types are f32 here, all integer types i64, and booleans are the integers 0 and 1.
#[derive(Debug)]
struct Cast {
    to: CastTarget,
    device: Device,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum CastTarget {
    Float,
    Int,
    Bool,
}

pub(super) fn cast(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    spec.attributes.int("saturate")?;
    // Numbers of TensorProto.DataType in onnx.proto.
    let to = match spec.attributes.int("to")? {
        Some(1 | 10 | 11 | 16) => CastTarget::Float, // float, float16, double, bfloat16
        Some(2..=7) => CastTarget::Int,              // uint8, int8, uint16, int16, int32, int64
        Some(9) => CastTarget::Bool,
        other => return Err(format!("`to` is {other:?}: only floats, integers and booleans are cast to here").into()),
    };
    Ok(Box::new(Cast { to, device: spec.device.clone() }))
}

impl Operator for Cast {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        Ok(vec![match (input(inputs, 0)?, self.to) {
            (Value::Float(x), CastTarget::Int | CastTarget::Bool) => {
                let to_int = |v: f32| if self.to == CastTarget::Bool { i64::from(v != 0.0) } else { v as i64 };
                Value::Int { values: host_floats(x)?.into_iter().map(to_int).collect(), shape: x.shape().to_vec() }
            }
            (Value::Int { values, shape }, CastTarget::Float) if !values.is_empty() => {
                let values = values.iter().map(|&v| v as f32).collect();
                Value::Float(upload(values, shape.clone(), &self.device))
            }
            (Value::Int { values, shape }, CastTarget::Bool) => {
                Value::Int { values: values.iter().map(|&v| i64::from(v != 0)).collect(), shape: shape.clone() }
            }
            // Already of the type, or an empty list.
            (unchanged, _) => unchanged.clone(),
        }])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        (self.to == CastTarget::Float).then_some(rank)
    }
}

/// A node without inputs: its value is an attribute.
#[derive(Debug)]
struct ConstantOperator(Value);

pub(super) fn constant(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(0..=0, 1)?;
    let device = spec.device;
    let attributes = &mut spec.attributes;
    let floats = |values: Vec<f32>, shape| Constant::new(Value::Float(upload(values, shape, device)));
    let constant = if let Some(tensor) = attributes.tensor("value", device)? {
        tensor
    } else if let Some(value) = attributes.float("value_float")? {
        floats(vec![value], vec![])?
    } else if let Some(values) = attributes.floats("value_floats")?.filter(|v| !v.is_empty()) {
        let shape = vec![values.len()];
        floats(values, shape)?
    } else if let Some(value) = attributes.int("value_int")? {
        Constant::new(Value::Int { values: vec![value], shape: vec![] })?
    } else if let Some(values) = attributes.ints("value_ints")? {
        Constant::new(Value::list(values))?
    } else {
        return Err("it has no value, or one that is neither float nor integer".into());
    };
    Ok(Box::new(ConstantOperator(constant.value)))
}

impl Operator for ConstantOperator {
    fn run(&self, _: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        Ok(vec![self.0.clone()])
    }
}

/// A tensor of the shape in input 0, filled with one number.
#[derive(Debug)]
struct ConstantOfShape {
    number: Constant,
    device: Device,
}

pub(super) fn constant_of_shape(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let number = match spec.attributes.tensor("value", spec.device)? {
        Some(number) => number,
        None => Constant::new(Value::Float(upload(vec![0.0], vec![1], spec.device)))?,
    };
    if elements(number.value.shape())? != 1 {
        return Err("`value` should be one number".into());
    }
    Ok(Box::new(ConstantOfShape { number, device: spec.device.clone() }))
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
