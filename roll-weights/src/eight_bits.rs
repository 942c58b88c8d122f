//! Eight-bit weights as published by ComfyUI and others: `X.weight` in fp8 or int8, and next to it the scale of the
//! whole matrix or of each row as `X.scale_weight` or, in newer files, `X.weight_scale`.

use roll_backends::{EightBits, ScaledRows};
use roll_core::Tensor;

use crate::checkpoint::Checkpoint;
use crate::error::WeightsError;
use crate::file::WeightFile;

/// Endings that replace `weight` in the names of scales.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// Last parts of the names of tensors that are not weights: scales of weights, scales of activations (activations are
/// not quantised here), marks of the format, and the tokenizer in such files of UMT5.
const AUXILIARY: [&str; 7] =
    ["scale_weight", "weight_scale", "scale_input", "input_scale", "comfy_quant", "scaled_fp8", "spiece_model"];

/// Whether the tensor `key` is not a weight but belongs to an eight-bit weight or its format.
pub fn is_auxiliary(key: &str) -> bool {
    AUXILIARY.contains(&key.rsplit('.').next().unwrap_or(key))
}

/// An eight-bit weight as stored in a file.
struct Codes {
    kind: EightBits,
    codes: Vec<u8>,
    /// One scale, or one per row.
    scales: Vec<f32>,
    shape: Vec<usize>,
}

impl Checkpoint {
    /// Reads the matrix `key` as eight-bit codes with scales. Returns `None` if the file has it in another dtype.
    pub fn scaled(&self, key: &str) -> Result<Option<ScaledRows>, WeightsError> {
        let Some(Codes { kind, codes, scales, shape }) = self.codes(key)? else { return Ok(None) };
        let Ok(matrix) = <[usize; 2]>::try_from(shape) else { return Ok(None) };
        let rows = ScaledRows::new(kind, codes, scales, matrix);
        rows.map(Some).map_err(|e| WeightsError::tensor(self.path(), key, e))
    }

    /// Whether the file has the weight `key` in a supported eight-bit format.
    pub fn is_scaled(&self, key: &str) -> bool {
        self.locate(key).is_some_and(|(file, stored)| {
            kind(file, stored).is_some_and(|kind| kind != EightBits::Int8 || self.scale_of(stored).is_some())
        })
    }

    /// Reads the weight `key` as f32 if its file has it in eight bits; returns `None` otherwise.
    pub(crate) fn dequantised(&self, key: &str) -> Result<Option<Tensor>, WeightsError> {
        let Some(Codes { kind, codes, scales, shape }) = self.codes(key)? else { return Ok(None) };
        let (table, row) = (kind.table(), codes.len() / scales.len().max(1));
        let mut values = Vec::with_capacity(codes.len());
        for (row, scale) in codes.chunks(row.max(1)).zip(&scales) {
            values.extend(row.iter().map(|code| table[usize::from(*code)] * scale));
        }
        Tensor::new(values, shape).map(Some).map_err(|e| WeightsError::tensor(self.path(), key, e))
    }

    fn codes(&self, key: &str) -> Result<Option<Codes>, WeightsError> {
        let Some((file, stored)) = self.locate(key).filter(|_| self.is_scaled(key)) else { return Ok(None) };
        let (Some(kind), Some(info), Some(bytes)) = (kind(file, stored), file.info(stored), file.stored_bytes(stored))
        else {
            return Ok(None);
        };
        let shape = info.shape.clone();
        let scales = match self.scale_of(stored) {
            Some((file, name)) => file.tensor(&name)?.to_f32_vec(),
            None => vec![1.0],
        };
        let rows = shape.first().copied().unwrap_or(1);
        if scales.len() != 1 && scales.len() != rows {
            let problem = format!("expected one scale, or one for each of its {rows} rows, found {}", scales.len());
            return Err(WeightsError::tensor(file.path(), stored, problem));
        }
        let mut codes = vec![0; bytes];
        file.read_part(stored, 0, &mut codes)?;
        Ok(Some(Codes { kind, codes, scales, shape }))
    }

    /// The file and the name of the scale of the weight that its own file calls `stored`.
    fn scale_of(&self, stored: &str) -> Option<(&WeightFile, String)> {
        let layer = stored.strip_suffix("weight")?;
        SCALES.iter().find_map(|end| {
            let name = format!("{layer}{end}");
            let file = self.files().find(|file| file.info(&name).is_some())?;
            Some((file, name))
        })
    }
}

fn kind(file: &WeightFile, stored: &str) -> Option<EightBits> {
    // The bytes of a tensor in a torch checkpoint cannot be read on their own.
    file.stored_bytes(stored)?;
    match file.info(stored)?.stored.as_str() {
        "f8_e4m3" => Some(EightBits::E4m3),
        "f8_e5m2" => Some(EightBits::E5m2),
        "i8" => Some(EightBits::Int8),
        _ => None,
    }
}
