//! Weights in eight bits, as ComfyUI and others publish them: `X.weight` in fp8 (or int8), and beside it the factor of
//! the whole matrix or of each row, `X.scale_weight` or, in newer files, `X.weight_scale`.

use roll_backends::{EightBits, ScaledRows};
use roll_core::Tensor;

use crate::checkpoint::Checkpoint;
use crate::error::WeightsError;
use crate::file::WeightFile;

/// Ends of the names of scales, for `weight`.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// Last parts of the names of what stands beside weights and is none: their scales, those of activations (which are not
/// rounded here), marks of the format, and the tokenizer that such files of UMT5 hold.
const BESIDE: [&str; 7] =
    ["scale_weight", "weight_scale", "scale_input", "input_scale", "comfy_quant", "scaled_fp8", "spiece_model"];

/// Whether the tensor `key` is no weight but stands beside one in eight bits.
pub fn is_beside(key: &str) -> bool {
    BESIDE.contains(&key.rsplit('.').next().unwrap_or(key))
}

/// Tensors in a file of a weight in eight bits.
struct Codes {
    kind: EightBits,
    codes: Vec<u8>,
    /// One, or one for each row.
    scales: Vec<f32>,
    shape: Vec<usize>,
}

impl Checkpoint {
    /// The matrix `key` in eight bits; `None` where its file has it in another dtype.
    pub fn scaled(&self, key: &str) -> Result<Option<ScaledRows>, WeightsError> {
        let Some(Codes { kind, codes, scales, shape }) = self.codes(key)? else { return Ok(None) };
        let Ok(matrix) = <[usize; 2]>::try_from(shape) else { return Ok(None) };
        let rows = ScaledRows::new(kind, codes, scales, matrix);
        let problem = |e| WeightsError::Header { path: self.path().into(), problem: format!("tensor `{key}`: {e}") };
        rows.map(Some).map_err(problem)
    }

    /// Whether the file has the weight `key` in eight bits that can be read.
    pub fn is_scaled(&self, key: &str) -> bool {
        self.place(key).is_some_and(|(file, stored)| {
            kind(file, stored).is_some_and(|kind| kind != EightBits::Int8 || self.scale_of(stored).is_some())
        })
    }

    /// The weight `key` in f32, if its file has it in eight bits.
    pub(crate) fn widened(&self, key: &str) -> Result<Option<Tensor>, WeightsError> {
        let Some(Codes { kind, codes, scales, shape }) = self.codes(key)? else { return Ok(None) };
        let (table, row) = (kind.table(), codes.len() / scales.len().max(1));
        let mut values = Vec::with_capacity(codes.len());
        for (row, scale) in codes.chunks(row.max(1)).zip(&scales) {
            values.extend(row.iter().map(|code| table[usize::from(*code)] * scale));
        }
        let problem = |e| WeightsError::Header { path: self.path().into(), problem: format!("tensor `{key}`: {e}") };
        Tensor::new(values, shape).map(Some).map_err(problem)
    }

    fn codes(&self, key: &str) -> Result<Option<Codes>, WeightsError> {
        let Some((file, stored)) = self.place(key).filter(|_| self.is_scaled(key)) else { return Ok(None) };
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
            return Err(WeightsError::Header {
                path: file.path().into(),
                problem: format!(
                    "tensor `{stored}`: expected one scale, or one for each of its {rows} rows, found {}",
                    scales.len()
                ),
            });
        }
        let mut codes = vec![0; bytes];
        file.read_part(stored, 0, &mut codes)?;
        Ok(Some(Codes { kind, codes, scales, shape }))
    }

    /// The file and the name of the scale of the weight that is called `stored` in its file.
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
    // Of a torch checkpoint the bytes cannot be read by themselves.
    file.stored_bytes(stored)?;
    match file.info(stored)?.stored.as_str() {
        "f8_e4m3" => Some(EightBits::E4m3),
        "f8_e5m2" => Some(EightBits::E5m2),
        "i8" => Some(EightBits::Int8),
        _ => None,
    }
}
