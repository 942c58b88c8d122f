//! Values between nodes: float tensors on the device, integer tensors on the host.

use std::cell::Cell;

use burn_tensor::{DType, Device, Tensor, TensorData};
use roll_backends::NdTensor;
use roll_backends::host::{to_device_nd, to_host_nd};

use super::error::Problem;

/// Greatest number of elements of a tensor (4 GiB of f32), because a few bytes of a file can request any size.
pub(super) const MAX_ELEMENTS: usize = 1 << 30;
/// Greatest number of elements of an integer tensor on the host: shapes, axes, indices, tokens and masks (2048 x 2048).
pub(super) const MAX_INTS: usize = 1 << 22;
/// Greatest number of elements of a constant float tensor that is also kept on the host ([`Constant::floats`]).
pub(super) const MAX_HOST_FLOATS: usize = 64;

thread_local! {
    /// Greatest number of elements of a tensor in the current operation of this thread.
    static ELEMENT_LIMIT: Cell<usize> = const { Cell::new(MAX_ELEMENTS) };
}

/// Limits the number of elements of tensors on this thread while the guard lives. Operators call [`elements`] before
/// they create a tensor.
pub(super) struct ElementLimit {
    /// The limit that the guard restores.
    previous: usize,
}

impl ElementLimit {
    /// Sets the limit to the smaller of `max_elements` and [`MAX_ELEMENTS`].
    pub fn new(max_elements: usize) -> Self {
        Self { previous: ELEMENT_LIMIT.replace(max_elements.min(MAX_ELEMENTS)) }
    }
}

impl Drop for ElementLimit {
    fn drop(&mut self) {
        ELEMENT_LIMIT.set(self.previous);
    }
}

/// A tensor in the graph.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// f32 on the device.
    Float(NdTensor),
    /// Integers and booleans, as i64 on the host: shapes, indices, tokens and masks.
    Int { values: Vec<i64>, shape: Vec<usize> },
}

/// A value that is known when the file is opened.
#[derive(Clone, Debug)]
pub(super) struct Constant {
    pub value: Value,
    /// The elements of a small float tensor (scales, limits), which operators read when they are built.
    pub floats: Option<Vec<f32>>,
}

impl Value {
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Float(tensor) => tensor.shape(),
            Self::Int { shape, .. } => shape,
        }
    }

    /// Returns the float tensor. Fails for integers.
    pub fn float(&self) -> Result<&NdTensor, Problem> {
        match self {
            Self::Float(tensor) => Ok(tensor),
            Self::Int { shape, .. } => {
                Err(format!("expected a float tensor, found integers of shape {shape:?}").into())
            }
        }
    }

    /// Returns the integers. Fails for floats.
    pub fn ints(&self) -> Result<&[i64], Problem> {
        match self {
            Self::Int { values, .. } => Ok(values),
            Self::Float(t) => Err(format!("expected an integer tensor, found floats of shape {:?}", t.shape()).into()),
        }
    }

    /// Creates an integer tensor with one axis.
    pub fn list(values: Vec<i64>) -> Self {
        let shape = vec![values.len()];
        Self::Int { values, shape }
    }

    /// Converts a tensor of any type; floats are uploaded to `device`. Fails if there are more than [`MAX_INTS`]
    /// integers.
    pub fn from_host(tensor: &roll_core::Tensor, device: &Device) -> roll_core::Result<Self> {
        use roll_core::DType::{Bool, I32, I64, U8};
        let values: Vec<i64> = match tensor.dtype() {
            I64 => tensor.as_slice::<i64>()?.to_vec(),
            I32 => tensor.as_slice::<i32>()?.iter().map(|&v| v.into()).collect(),
            Bool | U8 => tensor.as_bytes().iter().map(|&v| v.into()).collect(),
            _ => return Ok(Self::Float(to_device_nd(tensor, device)?)),
        };
        if values.len() > MAX_INTS {
            let expected = format!("at most {MAX_INTS} integers");
            return Err(roll_core::Error::shape("an input of an ONNX graph", expected, tensor.shape()));
        }
        Ok(Self::Int { values, shape: tensor.shape().to_vec() })
    }

    /// Copies to the host, as f32 or i64.
    pub fn to_host(&self) -> roll_core::Result<roll_core::Tensor> {
        match self {
            Self::Float(tensor) => to_host_nd(tensor),
            Self::Int { values, shape } => roll_core::Tensor::new(values.clone(), shape.clone()),
        }
    }

    /// Reshapes. Fails if the number of elements differs.
    pub fn reshaped(&self, shape: Vec<usize>) -> Result<Self, Problem> {
        Ok(match self {
            Self::Float(tensor) => Self::Float(reshaped(tensor, shape)?),
            Self::Int { values, .. } if elements(&shape)? == values.len() => {
                Self::Int { values: values.clone(), shape }
            }
            Self::Int { shape: found, .. } => return Err(format!("{found:?} cannot become {shape:?}").into()),
        })
    }

    /// Splits along axis 0 into parts of the given lengths.
    pub fn split(&self, lengths: &[usize]) -> Vec<Self> {
        let inner: usize = self.shape()[1..].iter().product();
        let mut start = 0;
        let piece = |&length: &usize| {
            let shape: Vec<usize> = [length].iter().chain(&self.shape()[1..]).copied().collect();
            let (offset, count) = (start * inner, length * inner);
            start += length;
            match self {
                Self::Float(x) => Self::Float(NdTensor::from_flat(x.flat().clone().narrow(0, offset, count), shape)),
                Self::Int { values, .. } => Self::Int { values: values[offset..][..count].to_vec(), shape },
            }
        };
        lengths.iter().map(piece).collect()
    }

    /// Concatenates along axis 0. Fails without parts, or if types or other axes differ.
    pub fn concatenate(mut parts: Vec<Self>) -> Result<Self, Problem> {
        if let [_] = parts.as_slice() {
            return parts.pop().ok_or_else(|| "nothing was computed".into());
        }
        let first_shape = parts.first().map(|p| p.shape().to_vec()).unwrap_or_default();
        let fits = |p: &Self| p.shape().len() == first_shape.len() && p.shape().get(1..) == first_shape.get(1..);
        if first_shape.is_empty() || !parts.iter().all(fits) {
            return Err("their shapes differ from item to item, or are scalars".into());
        }
        let rows = parts.iter().map(|p| p.shape()[0]).sum();
        let shape: Vec<usize> = [rows].iter().chain(&first_shape[1..]).copied().collect();
        if let Self::Int { .. } = parts[0] {
            let lists: Vec<&[i64]> = parts.iter().map(Self::ints).collect::<Result<_, _>>()?;
            return Ok(Self::Int { values: lists.concat(), shape });
        }
        let flats: Vec<_> = parts.iter().map(|p| Ok(p.float()?.flat().clone())).collect::<Result<_, Problem>>()?;
        Ok(Self::Float(NdTensor::from_flat(Tensor::cat(flats, 0), shape)))
    }
}

impl Constant {
    /// Creates a constant and keeps the elements of a small float tensor on the host, too.
    pub fn new(value: Value) -> Result<Self, Problem> {
        let floats = match &value {
            Value::Float(tensor) if elements(tensor.shape())? <= MAX_HOST_FLOATS => {
                Some(to_host_nd(tensor)?.to_f32_vec())
            }
            _ => None,
        };
        Ok(Self { value, floats })
    }
}

/// The number of elements of `shape`. Fails above the limit of this thread.
pub(super) fn elements(shape: &[usize]) -> Result<usize, Problem> {
    let max_elements = ELEMENT_LIMIT.get();
    shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .filter(|n| *n <= max_elements)
        .ok_or_else(|| format!("a tensor of shape {shape:?} is larger than {max_elements} elements").into())
}

/// The index of `axis` in a tensor of rank `rank`. Negative axes count from the end.
pub(super) fn axis(axis: i64, rank: usize) -> Result<usize, Problem> {
    let index = if axis < 0 { axis.checked_add(rank as i64).unwrap_or(-1) } else { axis };
    usize::try_from(index)
        .ok()
        .filter(|i| *i < rank)
        .ok_or_else(|| format!("axis {axis} does not exist in a tensor of rank {rank}").into())
}

/// Reshapes to `[axes before, axis, axes after]`, so that one implementation serves every rank.
pub(super) fn split_around_axis(tensor: &NdTensor, axis: usize) -> Tensor<3> {
    let shape = tensor.shape();
    let outer = shape[..axis].iter().product::<usize>();
    let inner = shape[axis + 1..].iter().product::<usize>();
    tensor.flat().clone().reshape([outer, shape[axis], inner])
}

/// Reverts [`split_around_axis`]. The result has the shape of `like`, except for the length of `axis`.
pub(super) fn merge_axes(tensor: Tensor<3>, like: &NdTensor, axis: usize) -> NdTensor {
    let mut shape = like.shape().to_vec();
    shape[axis] = tensor.dims()[1];
    NdTensor::from_flat(tensor.reshape([shape.iter().product::<usize>()]), shape)
}

/// Reshapes the tensor. Fails if the number of elements differs.
pub(super) fn reshaped(tensor: &NdTensor, shape: Vec<usize>) -> Result<NdTensor, Problem> {
    if elements(&shape)? != elements(tensor.shape())? {
        return Err(format!("a tensor of shape {:?} cannot become {shape:?}", tensor.shape()).into());
    }
    Ok(NdTensor::from_flat(tensor.flat().clone(), shape))
}

/// Copies floats to the host, where integers are computed. Fails if there are more than [`MAX_INTS`].
pub(super) fn host_floats(tensor: &NdTensor) -> Result<Vec<f32>, Problem> {
    if elements(tensor.shape())? > MAX_INTS {
        return Err(format!("{:?} floats are too many to compute integers from", tensor.shape()).into());
    }
    Ok(to_host_nd(&tensor.clone().untracked())?.to_f32_vec())
}

/// Uploads host values to the device.
pub(super) fn upload(values: Vec<f32>, shape: Vec<usize>, device: &Device) -> NdTensor {
    let data = TensorData::new(values, [shape.iter().product::<usize>()]);
    NdTensor::from_flat(Tensor::from_data(data, (device, DType::F32)), shape)
}

/// The device of `tensor` without autodiff, for constants.
pub(super) fn plain_device(tensor: &NdTensor) -> Device {
    let device = tensor.device();
    if device.is_autodiff() { device.inner() } else { device }
}
