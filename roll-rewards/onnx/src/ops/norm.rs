//! Normalisations per channel, and over the last axes.

use burn_tensor::{Device, Tensor};
use roll_backends::NdTensor;
use roll_backends::ops::{self, Conv2d, Conv2dOptions, Epilogue};

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{Value, axis, elements, upload};
use super::reduce::long_mean;
use super::{BatchInput, Built, Operator, Role, Run, broadcast, input, only_first_batched};

/// Default of `epsilon` in the ONNX specification.
const DEFAULT_EPSILON: f32 = 1e-5;

/// Normalisation by constant statistics: y = (x - mean) / sqrt(variance + epsilon) * scale + bias.
#[derive(Debug)]
struct BatchNorm {
    epsilon: f32,
}

pub(super) fn batch_norm(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(5..=5, 1)?;
    let attributes = &mut spec.attributes;
    // Used in training only.
    attributes.float("momentum")?;
    if attributes.flag("training_mode")? || attributes.int("spatial")?.unwrap_or(1) != 1 {
        return Err("`training_mode` and `spatial` 0 are not run here".into());
    }
    Ok(Box::new(BatchNorm { epsilon: attributes.float("epsilon")?.unwrap_or(DEFAULT_EPSILON) }))
}

/// Returns input 0 as it is and as `[N, C, L]`, and the `P` inputs after it, which have one number per channel, as
/// `[1, C, 1]`.
fn per_channel<const P: usize>(inputs: &[Option<&Value>]) -> Result<(NdTensor, Tensor<3>, [Tensor<3>; P]), Problem> {
    let x = input(inputs, 0)?.float()?;
    let [n, c, ref rest @ ..] = *x.shape() else {
        return Err(format!("expected [N, C, ...], found {:?}", x.shape()).into());
    };
    let x_ncl = x.flat().clone().reshape([n, c, elements(rest)?]);
    let mut parameters = vec![];
    for index in 1..=P {
        let parameter = input(inputs, index)?.float()?;
        if parameter.shape() != [c] {
            return Err(format!(
                "input {index} should be one number per channel, [{c}], found {:?}",
                parameter.shape()
            )
            .into());
        }
        parameters.push(parameter.flat().clone().reshape([1, c, 1]));
    }
    let parameters = parameters.try_into().map_err(|_| Problem::from("a parameter is missing"))?;
    Ok((x.clone(), x_ncl, parameters))
}

/// Returns `y` in the shape of `x`, as the only output.
fn output_like(x: &NdTensor, y: Tensor<3>) -> Vec<Value> {
    vec![Value::Float(NdTensor::from_flat(y.reshape([x.shape().iter().product::<usize>()]), x.shape()))]
}

impl Operator for BatchNorm {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, x_ncl, [scale, bias, mean, variance]) = per_channel::<4>(inputs)?;
        let gain = scale / variance.add_scalar(self.epsilon).sqrt();
        let offset = bias - mean * gain.clone();
        Ok(output_like(&x, x_ncl * gain + offset))
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }

    fn role(&self) -> Role<'_> {
        Role::BatchNorm(self.epsilon)
    }
}

/// A factor and an offset per channel, then a function; created by [`super::super::fuse`].
#[derive(Debug)]
pub(in super::super) struct ChannelAffine {
    channels: usize,
    /// A depthwise 1x1 convolution, whose weights are the factors and whose bias the offsets.
    conv2d: Conv2d,
}

impl ChannelAffine {
    /// Creates the operator from `[factor, offset]` per channel. `slope` belongs to [`Epilogue::Slopes`]. `None` if
    /// there are no channels or a number exceeds the range of f32.
    pub fn new(affine: &[[f64; 2]], epilogue: Epilogue, slope: Option<f32>, device: &Device) -> Option<Self> {
        let channels = affine.len();
        let factors: Vec<f32> = affine.iter().map(|[factor, _]| *factor as f32).collect();
        let offsets: Vec<f32> = affine.iter().map(|[_, offset]| *offset as f32).collect();
        if channels == 0 || !factors.iter().chain(&offsets).all(|v| v.is_finite()) {
            return None;
        }
        let row = |values: Vec<f32>| upload(values, vec![channels], device).flat().clone();
        let weight = row(factors).reshape([channels, 1, 1, 1]);
        let options = Conv2dOptions { stride: [1; 2], dilation: [1; 2], groups: channels };
        let slopes = slope.map(|slope| row(vec![slope; channels]));
        Some(Self { channels, conv2d: Conv2d::new(weight, Some(row(offsets)), options, epilogue, slopes) })
    }
}

impl Operator for ChannelAffine {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let [n, c, ref rest @ ..] = *x.shape() else {
            return Err(format!("expected [N, C, ...], found {:?}", x.shape()).into());
        };
        if c != self.channels {
            return Err(format!("expected {} channels, found {:?}", self.channels, x.shape()).into());
        }
        let x_nchw = x.flat().clone().reshape([n, c, 1, elements(rest)?]);
        let y = self.conv2d.apply(x_nchw, None, [(0, 0); 2]);
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([elements(x.shape())?]), x.shape()))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

/// Normalisation by the statistics of each item and channel.
#[derive(Debug)]
struct InstanceNorm {
    epsilon: f32,
}

pub(super) fn instance_norm(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(3..=3, 1)?;
    Ok(Box::new(InstanceNorm { epsilon: spec.attributes.float("epsilon")?.unwrap_or(DEFAULT_EPSILON) }))
}

impl Operator for InstanceNorm {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, x_ncl, [scale, bias]) = per_channel::<2>(inputs)?;
        let [n, c, length] = x_ncl.dims();
        let mean = |x: Tensor<3>| long_mean(x.reshape([n * c, length, 1])).reshape([n, c, 1]);
        let centred = x_ncl.clone() - mean(x_ncl);
        let variance = mean(centred.clone() * centred.clone());
        Ok(output_like(&x, centred / variance.add_scalar(self.epsilon).sqrt() * scale + bias))
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

/// Normalisation by the mean and variance over the axes from `axis` on, then an optional scale (input 1) and bias
/// (input 2).
#[derive(Debug)]
struct LayerNorm {
    axis: i64,
    epsilon: f32,
}

pub(super) fn layer_norm(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=3, 1)?;
    let attributes = &mut spec.attributes;
    // The precision of the mean's computation; everything is f32 here.
    attributes.int("stash_type")?;
    Ok(Box::new(LayerNorm {
        axis: attributes.int("axis")?.unwrap_or(-1),
        epsilon: attributes.float("epsilon")?.unwrap_or(DEFAULT_EPSILON),
    }))
}

/// Layer norm over the last axis.
pub(in super::super) fn layer_norm_of_rows(epsilon: f32) -> Box<dyn Operator> {
    Box::new(LayerNorm { axis: -1, epsilon })
}

impl Operator for LayerNorm {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let (outer, inner) = x.shape().split_at(axis(self.axis, x.shape().len())?);
        let rows = x.flat().clone().reshape([elements(outer)?, elements(inner)?]);
        // The usual case, a scale and a bias per element of a row, has an operator of its own.
        if let [_, Some(Value::Float(scale)), Some(Value::Float(bias))] = *inputs
            && [scale.shape(), bias.shape()] == [inner; 2]
        {
            let [scale, bias] = [scale, bias].map(|p| p.flat().clone().reshape([1, rows.dims()[1]]));
            let y = ops::layer_norm(rows, scale, bias, self.epsilon.into());
            return Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([elements(x.shape())?]), x.shape()))]);
        }
        let [count, width] = rows.dims();
        let mean = |rows: Tensor<2>| long_mean(rows.reshape([count, width, 1])).reshape([count, 1]);
        let centred = rows.clone() - mean(rows);
        let variance = mean(centred.clone() * centred.clone());
        let y = centred / variance.add_scalar(self.epsilon).sqrt();
        let mut y = NdTensor::from_flat(y.reshape([elements(x.shape())?]), x.shape());
        const SCALE: usize = 1;
        const BIAS: usize = 2;
        for index in [SCALE, BIAS] {
            let Some(parameter) = inputs.get(index).copied().flatten() else { continue };
            let parameter = parameter.float()?;
            if broadcast::shape(inner, parameter.shape())? != inner {
                return Err(
                    format!("input {index} of shape {:?} does not broadcast to {inner:?}", parameter.shape()).into()
                );
            }
            y = broadcast::apply(&y, parameter, |y, p| if index == SCALE { y * p } else { y + p })?;
        }
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = only_first_batched(inputs)?;
        axis(self.axis, rank).is_ok_and(|a| a != 0).then_some(rank)
    }
}
