//! Host tensors, which every trait of this crate takes and returns.

use std::fmt;
use std::sync::Arc;

use half::{bf16, f16};

use crate::{Error, Result};

/// Element type of a [`Tensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the variants are their own documentation
pub enum DType {
    F32,
    Bf16,
    F16,
    I64,
    I32,
    U8,
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I64 => 8,
            Self::U8 | Self::Bool => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U8 => "u8",
            Self::Bool => "bool",
        })
    }
}

/// A Rust type that is the element of a tensor.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its dtype.
    const DTYPE: DType;
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for i64 {
    const DTYPE: DType = DType::I64;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

/// Bytes with an owner that keeps them alive: a vector, a memory-mapped file, a plugin's buffer.
type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A vector of elements, as an owner of bytes.
struct Elements<T>(Vec<T>);
impl<T: Element> AsRef<[u8]> for Elements<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// A dense, row-major, immutable array in host memory. Cloning shares the bytes.
///
/// Invariants: `bytes.len() == shape.product() * dtype.size()`, and the bytes are aligned for the element type.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Bytes,
}

impl Tensor {
    /// Takes `values` without copying. Fails when their number is not the product of `shape`.
    pub fn new<T: Element>(values: Vec<T>, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        if shape.iter().product::<usize>() != values.len() {
            return Err(Error::shape(
                format!("tensor of {} values", values.len()),
                format!("{shape:?}"),
                &[values.len()],
            ));
        }
        Ok(Self { dtype: T::DTYPE, shape, bytes: Arc::new(Elements(values)) })
    }

    /// Shares `bytes` if they are aligned for `dtype`; otherwise copies them.
    /// Fails when their number does not fit the shape.
    pub fn from_bytes(
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        bytes: Arc<dyn AsRef<[u8]> + Send + Sync>,
    ) -> Result<Self> {
        let shape = shape.into();
        let raw: &[u8] = (*bytes).as_ref();
        let expected_bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d));
        if expected_bytes != Some(raw.len()) {
            return Err(Error::shape(
                format!("{} bytes of {dtype}", raw.len()),
                format!("{shape:?}"),
                &[raw.len() / dtype.size()],
            ));
        }
        if raw.as_ptr().align_offset(dtype.size()) != 0 {
            let mut words = vec![0u64; raw.len().div_ceil(size_of::<u64>())];
            bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..raw.len()].copy_from_slice(raw);
            let copy = AlignedCopy { words, len: raw.len() };
            return Ok(Self { dtype, shape, bytes: Arc::new(copy) });
        }
        Ok(Self { dtype, shape, bytes })
    }

    /// Joins f32 tensors of one shape along a new first axis. Fails if `parts` is empty or the shapes differ.
    pub fn stack(parts: &[Self]) -> Result<Self> {
        let first = parts.first().ok_or_else(|| Error::Misuse("there is nothing to stack".into()))?;
        let mut values = Vec::with_capacity(parts.len() * first.len());
        for part in parts {
            if part.shape != first.shape {
                return Err(Error::shape("tensors to stack", format!("{:?}", first.shape), &part.shape));
            }
            values.extend_from_slice(part.f32s()?);
        }
        Self::new(values, [&[parts.len()], first.shape.as_slice()].concat())
    }

    /// Splits an f32 tensor along its first axis; the inverse of [`Tensor::stack`].
    pub fn unstack(&self) -> Result<Vec<Self>> {
        let (count, shape) = self.shape.split_first().ok_or_else(|| Error::shape("stack", "at least one axis", &[]))?;
        let part_len = shape.iter().product::<usize>();
        let values = self.f32s()?;
        (0..*count).map(|i| Self::new(values[i * part_len..(i + 1) * part_len].to_vec(), shape)).collect()
    }

    /// An f32 tensor of zeros.
    pub fn zeros(shape: impl Into<Vec<usize>>) -> Self {
        Self::full(shape, 0.0)
    }

    /// An f32 tensor of one value.
    pub fn full(shape: impl Into<Vec<usize>>, value: f32) -> Self {
        let shape = shape.into();
        let values = vec![value; shape.iter().product()];
        Self { dtype: DType::F32, shape, bytes: Arc::new(Elements(values)) }
    }

    /// An f32 scalar (rank 0).
    pub fn scalar(value: f32) -> Self {
        Self::full([], value)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape, outermost axis first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The raw bytes, row-major, little-endian.
    pub fn as_bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }

    /// The elements. Fails when `T` is not the dtype.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        if T::DTYPE != self.dtype {
            return Err(Error::DType {
                what: format!("tensor {:?}", self.shape),
                expected: T::DTYPE.to_string(),
                found: self.dtype.to_string(),
            });
        }
        Ok(bytemuck::cast_slice(self.as_bytes()))
    }

    /// The f32 elements of a tensor that is f32. Fails otherwise.
    pub fn f32s(&self) -> Result<&[f32]> {
        self.as_slice()
    }

    /// The elements converted to f32, whatever the dtype.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        let bytes = self.as_bytes();
        fn converted<T: Element>(bytes: &[u8], convert: impl Fn(T) -> f32) -> Vec<f32> {
            bytemuck::cast_slice::<u8, T>(bytes).iter().map(|&x| convert(x)).collect()
        }
        match self.dtype {
            DType::F32 => converted::<f32>(bytes, |x| x),
            DType::Bf16 => converted::<bf16>(bytes, f32::from),
            DType::F16 => converted::<f16>(bytes, f32::from),
            DType::I64 => converted::<i64>(bytes, |x| x as f32),
            DType::I32 => converted::<i32>(bytes, |x| x as f32),
            DType::U8 | DType::Bool => converted::<u8>(bytes, f32::from),
        }
    }

    /// The values converted to `dtype`, which must be a float type. Shares the bytes if the tensor has this dtype.
    pub fn to_float(&self, dtype: DType) -> Result<Self> {
        if dtype == self.dtype {
            return Ok(self.clone());
        }
        let values = self.to_f32_vec();
        match dtype {
            DType::F32 => Self::new(values, self.shape.clone()),
            DType::Bf16 => Self::new(values.into_iter().map(bf16::from_f32).collect(), self.shape.clone()),
            DType::F16 => Self::new(values.into_iter().map(f16::from_f32).collect(), self.shape.clone()),
            other => Err(Error::Misuse(format!("{other} is not a float type"))),
        }
    }

    /// The same bytes under another shape. Fails when the number of elements differs.
    pub fn reshape(&self, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        if shape.iter().product::<usize>() != self.len() {
            return Err(Error::shape("reshape", format!("{} elements", self.len()), &shape));
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// The value of a tensor with one element, as f32.
    pub fn item(&self) -> Result<f32> {
        match self.to_f32_vec()[..] {
            [value] => Ok(value),
            _ => Err(Error::shape("item", "one element", &self.shape)),
        }
    }
}

/// A copy of `len` bytes that is aligned for every element type, because it is stored in words of eight bytes.
struct AlignedCopy {
    words: Vec<u64>,
    len: usize,
}
impl AsRef<[u8]> for AlignedCopy {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?})", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_does_not_copy() {
        let values = vec![1.0f32, 2.0, 3.0, 4.0];
        let at = values.as_ptr();
        let tensor = Tensor::new(values, [2, 2]).unwrap();
        assert_eq!(tensor.f32s().unwrap().as_ptr(), at);
        assert_eq!(tensor.clone().f32s().unwrap().as_ptr(), at);
    }

    #[test]
    fn rejects_wrong_lengths_and_dtypes() {
        assert!(Tensor::new(vec![0f32; 3], [2, 2]).is_err());
        assert!(Tensor::zeros([2]).as_slice::<i64>().is_err());
        assert!(Tensor::from_bytes(DType::F32, [usize::MAX, 8], Arc::new(vec![0u8; 8])).is_err());
    }

    #[test]
    fn misaligned_bytes_are_copied() {
        let tensor = (0..4)
            .map(|skip| {
                struct Tail(Vec<u8>, usize);
                impl AsRef<[u8]> for Tail {
                    fn as_ref(&self) -> &[u8] {
                        &self.0[self.1..self.1 + 8]
                    }
                }
                let mut bytes = vec![0u8; skip];
                bytes.extend(bytemuck::cast_slice::<f32, u8>(&[1.5, -2.0]));
                bytes.extend([0; 8]);
                Tensor::from_bytes(DType::F32, [2], Arc::new(Tail(bytes, skip))).unwrap()
            })
            .collect::<Vec<_>>();
        assert!(tensor.iter().all(|t| t.f32s().unwrap() == [1.5, -2.0]));
    }
}
