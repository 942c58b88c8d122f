//! torch checkpoints (`torch.save`), which are parsed and never executed.

use std::collections::BTreeMap;
use std::path::Path;

use pytorch_reader::{PickleValue, PytorchError, PytorchReader};

use crate::error::WeightsError;
use crate::safetensors::dtype_named;
use crate::tensor_info::TensorInfo;

/// Python objects in plain state dictionaries that carry no code.
const HARMLESS: &[&str] = &[
    "torch.Tensor",
    "torch.TypedStorage",
    "torch.UntypedStorage",
    "torch.Size",
    "torch.device",
    "torch.dtype",
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
    "torch.float64",
    "torch.int64",
    "int",
];

/// Greatest number of tensor bytes per byte of the file. Tensors may share storage, but strides of 0 or compression
/// must not let a file of a few kilobytes request gigabytes.
const MAX_GROWTH: u64 = 4;
/// Number of tensor bytes that every file may have, however short it is.
const FREE_BYTES: u64 = 64 << 20;

/// Opens a torch checkpoint. Nested dictionaries are flattened and their keys joined by dots.
pub(crate) fn open(path: &Path) -> Result<(PytorchReader, BTreeMap<String, TensorInfo>), WeightsError> {
    let values = PytorchReader::read_pickle_data(path, None).map_err(|e| broken(path, e))?;
    refuse_objects(path, &values, &mut Vec::new())?;
    let reader = PytorchReader::new(path).map_err(|e| broken(path, e))?;
    let tensors: BTreeMap<_, _> = reader.tensors().iter().map(|(name, t)| (name.clone(), info(t))).collect();
    // `None` if the number overflows.
    let bytes = reader.tensors().values().try_fold(0u64, |sum, tensor| {
        let elements = tensor.shape().iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64))?;
        sum.checked_add(elements.checked_mul(tensor.dtype().size() as u64)?)
    });
    let length = std::fs::metadata(path).map_err(WeightsError::io("read", path))?.len();
    let limit = length.saturating_mul(MAX_GROWTH).saturating_add(FREE_BYTES);
    if bytes.is_none_or(|bytes| bytes > limit) {
        let found = bytes.map_or("more than any machine has".into(), |bytes| format!("{bytes} bytes"));
        let problem = format!(
            "expected tensors of at most {limit} bytes in a file of {length}, found {found}: views of few numbers, or \
             compressed; save the tensors as they are, with torch.save({{k: v.contiguous() for k, v in ...}}, ...)"
        );
        return Err(WeightsError::pickle(path, problem));
    }
    Ok((reader, tensors))
}

/// Reads the bytes of a tensor.
pub(crate) fn read(reader: &PytorchReader, path: &Path, name: &str) -> Result<Vec<u8>, WeightsError> {
    let tensor = reader.get(name).ok_or_else(|| WeightsError::missing(path, name))?;
    tensor.read().map_err(|e| WeightsError::pickle(path, e))
}

/// The entry of a tensor. Its bytes have no range, because they may be compressed.
fn info(tensor: &pytorch_reader::Tensor) -> TensorInfo {
    let stored = format!("{:?}", tensor.dtype());
    TensorInfo {
        dtype: dtype_named(&stored.to_uppercase()),
        stored: stored.to_lowercase(),
        shape: tensor.shape().to_vec(),
        range: 0..0,
    }
}

/// The error of a checkpoint that cannot be opened. A file that ends early is a broken checkpoint, and not an error of
/// the disk.
fn broken(path: &Path, e: PytorchError) -> WeightsError {
    match e {
        PytorchError::Io(source) if source.kind() != std::io::ErrorKind::UnexpectedEof => {
            WeightsError::Io { action: "read", path: path.into(), source }
        }
        e => WeightsError::pickle(path, e),
    }
}

/// Fails on the first Python object that plain state dictionaries do not contain. `keys` are the keys that lead to
/// `value`. The parser skips such objects silently, but a checkpoint that refers to `os.system` is not trustworthy.
fn refuse_objects(path: &Path, value: &PickleValue, keys: &mut Vec<String>) -> Result<(), WeightsError> {
    match value {
        PickleValue::Dict(entries) => {
            for (key, value) in entries {
                keys.push(key.clone());
                refuse_objects(path, value, keys)?;
                keys.pop();
            }
        }
        PickleValue::List(items) => {
            for (i, value) in items.iter().enumerate() {
                keys.push(i.to_string());
                refuse_objects(path, value, keys)?;
                keys.pop();
            }
        }
        PickleValue::Unsupported(name) if !HARMLESS.contains(&name.as_str()) => {
            let key = if keys.is_empty() { "(root)".into() } else { keys.join(".") };
            let problem = format!(
                "`{key}`: expected tensors and plain values, found the Python object `{name}` (not executed); save a \
                 plain state dictionary, or convert it to safetensors"
            );
            return Err(WeightsError::invalid(path, problem));
        }
        _ => {}
    }
    Ok(())
}
