//! Converts the tensors that an ONNX file stores (`TensorProto`) to constants of the graph.

use burn_tensor::Device;
use onnx_rs::ast::{DataLocation, DataType, TensorProto};

use super::error::Problem;
use super::value::{Constant, MAX_HOST_FLOATS, MAX_INTS, Value, elements, upload};

/// Reads a stored tensor: floats are uploaded to the device as f32, integers and booleans stay on the host as i64.
pub(super) fn constant(tensor: &TensorProto, device: &Device) -> Result<Constant, Problem> {
    if tensor.data_location() == DataLocation::External || !tensor.external_data().is_empty() {
        return Err("its numbers are in another file; merge them into one with onnx.save_model(onnx.load(f), g)".into());
    }
    if tensor.segment().is_some() {
        return Err("it is one segment of a tensor; segments are not read".into());
    }
    let shape: Vec<usize> = tensor
        .dims()
        .iter()
        .map(|&d| usize::try_from(d))
        .collect::<Result<_, _>>()
        .map_err(|_| format!("its shape is {:?}", tensor.dims()))?;
    let count = elements(&shape)?;
    let numbers = decode_numbers(tensor)?;
    if numbers.len() != count {
        let found = numbers.len();
        return Err(format!("its shape {shape:?} means {count} numbers, but the file holds {found}").into());
    }
    match numbers {
        Numbers::Float(values) => {
            if values.is_empty() {
                // Resize's empty `roi` and `scales`, which are not used in computations.
                return Ok(Constant { value: Value::list(vec![]), floats: Some(vec![]) });
            }
            let floats = (values.len() <= MAX_HOST_FLOATS).then(|| values.clone());
            Ok(Constant { value: Value::Float(upload(values, shape, device)), floats })
        }
        Numbers::Int(values) if values.len() > MAX_INTS => {
            Err(format!("it has {} integers; at most {MAX_INTS} are read", values.len()).into())
        }
        Numbers::Int(values) => Ok(Constant { value: Value::Int { values, shape }, floats: None }),
    }
}

/// The elements of a stored tensor, in one of the two types in which graphs compute.
enum Numbers {
    Float(Vec<f32>),
    Int(Vec<i64>),
}

impl Numbers {
    fn len(&self) -> usize {
        match self {
            Self::Float(values) => values.len(),
            Self::Int(values) => values.len(),
        }
    }
}

/// Decodes the elements: from raw little-endian bytes, or from the list for their type.
fn decode_numbers(tensor: &TensorProto) -> Result<Numbers, Problem> {
    let data_type = tensor.data_type();
    if let Some(raw) = tensor.as_raw() {
        return Ok(match data_type {
            DataType::Float => Numbers::Float(decode_each(raw, f32::from_le_bytes)?),
            DataType::Double => Numbers::Float(decode_each(raw, |b| f64::from_le_bytes(b) as f32)?),
            DataType::Float16 => Numbers::Float(decode_each(raw, |b| half::f16::from_le_bytes(b).to_f32())?),
            DataType::Bfloat16 => Numbers::Float(decode_each(raw, |b| half::bf16::from_le_bytes(b).to_f32())?),
            DataType::Int64 => Numbers::Int(decode_each(raw, i64::from_le_bytes)?),
            DataType::Int32 => Numbers::Int(decode_each(raw, |b| i32::from_le_bytes(b).into())?),
            DataType::Int16 => Numbers::Int(decode_each(raw, |b| i16::from_le_bytes(b).into())?),
            DataType::Uint16 => Numbers::Int(decode_each(raw, |b| u16::from_le_bytes(b).into())?),
            DataType::Uint32 => Numbers::Int(decode_each(raw, |b| u32::from_le_bytes(b).into())?),
            DataType::Int8 => Numbers::Int(decode_each(raw, |b| i8::from_le_bytes(b).into())?),
            DataType::Uint8 | DataType::Bool => Numbers::Int(raw.iter().map(|&b| b.into()).collect()),
            other => return Err(format!("numbers of type {other:?} are not read").into()),
        });
    }
    // In lists, a 16-bit float is stored as the low half of an int32.
    let low_halves = |decode: fn(u16) -> f32| {
        let ints = tensor.as_i32().unwrap_or_default();
        Numbers::Float(ints.iter().map(|&i| decode(i as u16)).collect())
    };
    Ok(match data_type {
        DataType::Float => Numbers::Float(tensor.as_f32().unwrap_or_default().into_owned()),
        DataType::Double => Numbers::Float(tensor.as_f64().unwrap_or_default().iter().map(|&v| v as f32).collect()),
        DataType::Float16 => low_halves(|bits| half::f16::from_bits(bits).to_f32()),
        DataType::Bfloat16 => low_halves(|bits| half::bf16::from_bits(bits).to_f32()),
        DataType::Int64 => Numbers::Int(tensor.as_i64().unwrap_or_default().into_owned()),
        DataType::Int32 | DataType::Int16 | DataType::Int8 | DataType::Uint16 | DataType::Uint8 | DataType::Bool => {
            Numbers::Int(tensor.as_i32().unwrap_or_default().iter().map(|&v| v.into()).collect())
        }
        other => return Err(format!("numbers of type {other:?} are not read").into()),
    })
}

/// Decodes elements of `W` bytes each. Fails if `raw` is not a whole number of elements.
fn decode_each<const W: usize, T>(raw: &[u8], read: fn([u8; W]) -> T) -> Result<Vec<T>, Problem> {
    let (words, rest) = raw.as_chunks::<W>();
    if !rest.is_empty() {
        return Err(format!("its {} bytes are no multiple of {W}", raw.len()).into());
    }
    Ok(words.iter().map(|w| read(*w)).collect())
}
