//! Eight-bit weights as published by ComfyUI and others: `X.weight` in fp8 or int8, and next to it the scale of the
//! whole matrix or of each row as `X.scale_weight` or, in newer files, `X.weight_scale`.

use roll_backends::{EightBits, ScaledRows};
use roll_core::Tensor;

use crate::checkpoint::Checkpoint;
use crate::error::WeightsError;
use crate::file::WeightFile;

/// Endings that replace `weight` in the names of scales.
const SCALES: [&str; 2] = ["scale_weight", "weight_scale"];
/// Last parts of the names of tensors that are not weights: scales of weights, scales of activations (which have no
/// effect, because activations are not quantised here), marks of the format, and the tokenizer in files of UMT5.
const AUXILIARY: [&str; 7] =
    ["scale_weight", "weight_scale", "scale_input", "input_scale", "comfy_quant", MARK, "spiece_model"];

/// Last part of the name of the tensor that marks a file as scaled fp8.
const MARK: &str = "scaled_fp8";

/// The part of a name after the last dot.
fn last_part(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

/// Whether the tensor `key` is not a weight but belongs to an eight-bit weight or its format.
pub fn is_auxiliary(key: &str) -> bool {
    AUXILIARY.contains(&last_part(key))
}

/// An eight-bit weight as stored in a file.
struct StoredWeight {
    kind: EightBits,
    codes: Vec<u8>,
    /// One scale, or one per row.
    scales: Vec<f32>,
    shape: Vec<usize>,
}

impl Checkpoint {
    /// Reads the matrix `key` as eight-bit codes with scales. Returns `None` if the file has it in another dtype.
    pub fn scaled(&self, key: &str) -> Result<Option<ScaledRows>, WeightsError> {
        let Some(StoredWeight { kind, codes, scales, shape }) = self.read_eight_bits(key)? else { return Ok(None) };
        let Ok(matrix) = <[usize; 2]>::try_from(shape) else { return Ok(None) };
        let rows = ScaledRows::new(kind, codes, scales, matrix);
        rows.map(Some).map_err(|e| WeightsError::tensor(self.path(), key, e))
    }

    /// Whether the file has the weight `key` in a supported eight-bit format.
    pub fn is_in_eight_bits(&self, key: &str) -> bool {
        self.eight_bits(key).is_some()
    }

    /// The eight-bit format of the weight `key`; `None` if the file has it in another dtype.
    pub fn eight_bits(&self, key: &str) -> Option<EightBits> {
        let (file, name_in_file) = self.locate(key)?;
        let kind = eight_bit_dtype(file, name_in_file)?;
        // int8 without a scale is a tensor of whole numbers. fp8 without one has the scale 1.
        let is_weight = kind != EightBits::Int8 || self.scale_of(name_in_file).is_some();
        is_weight.then_some(kind)
    }

    /// Reads the weight `key` as f32 if its file has it in eight bits; returns `None` otherwise.
    pub(crate) fn dequantised(&self, key: &str) -> Result<Option<Tensor>, WeightsError> {
        let Some(StoredWeight { kind, codes, scales, shape }) = self.read_eight_bits(key)? else { return Ok(None) };
        let rows = shape.first().copied().unwrap_or(1);
        let columns = codes.len() / rows.max(1);
        let tensor = ScaledRows::new(kind, codes, scales, [rows, columns])
            .and_then(|matrix| Tensor::new(matrix.decode(), shape));
        tensor.map(Some).map_err(|e| WeightsError::tensor(self.path(), key, e))
    }

    /// Reads the codes and scales of the weight `key`; `None` if the file has it in another dtype.
    fn read_eight_bits(&self, key: &str) -> Result<Option<StoredWeight>, WeightsError> {
        let Some(kind) = self.eight_bits(key) else { return Ok(None) };
        let Some((file, name_in_file)) = self.locate(key) else { return Ok(None) };
        let (Some(info), Some(bytes)) = (file.info(name_in_file), file.stored_bytes(name_in_file)) else {
            return Ok(None);
        };
        let shape = info.shape.clone();
        let scale = self.scale_of(name_in_file);
        if let Some(problem) = self.unknown_scaling(name_in_file, scale.is_some()) {
            return Err(WeightsError::tensor(file.path(), name_in_file, problem));
        }
        let scales = match scale {
            Some((scale_file, scale_name)) => scale_file.tensor(&scale_name)?.to_f32_vec(),
            None => vec![1.0],
        };
        let rows = shape.first().copied().unwrap_or(1);
        if scales.len() != 1 && scales.len() != rows {
            let problem = format!("expected one scale, or one for each of its {rows} rows, found {}", scales.len());
            return Err(WeightsError::tensor(file.path(), name_in_file, problem));
        }
        let mut codes = vec![0; bytes];
        file.read_part(name_in_file, 0, &mut codes)?;
        Ok(Some(StoredWeight { kind, codes, scales, shape }))
    }

    /// The reason why the scaling of the weight `name_in_file` is unknown, or `None` if it is known. `has_scale` says
    /// whether the weight has a scale of a known name.
    ///
    /// The scaling is unknown if the weight has a scale or a zero point of another name. It is also unknown if the file
    /// is marked as scaled fp8, but no weight of it has a scale of a known name. If other weights have one, a weight
    /// without a scale has the scale 1, as in ComfyUI.
    fn unknown_scaling(&self, name_in_file: &str, has_scale: bool) -> Option<String> {
        let layer = name_in_file.strip_suffix("weight")?;
        let is_unknown_scale =
            |end: &str| (end.contains("scale") || end.contains("zero")) && !end.contains('.') && !is_auxiliary(end);
        let keys = || self.files().flat_map(WeightFile::keys);
        let unknown_scale = keys().find(|key| key.strip_prefix(layer).is_some_and(is_unknown_scale));
        let any_weight_has_scale = || keys().any(|key| SCALES.contains(&last_part(key)));
        let found = if let Some(other) = unknown_scale {
            format!("found `{other}`, whose meaning is not known")
        } else if has_scale || any_weight_has_scale() {
            return None;
        } else {
            // Without a mark, the scale is known: it is 1.
            let mark = keys().find(|key| last_part(key) == MARK)?;
            format!("found `{mark}`, which marks scaled fp8")
        };
        let known = SCALES.map(|end| format!("`{layer}{end}`")).join(" or ");
        Some(format!("expected its scale {known} alone, which multiplies the matrix or each row; {found}"))
    }

    /// The scale of the weight `name_in_file`: the file that has it, which may be another shard, and its name there.
    fn scale_of(&self, name_in_file: &str) -> Option<(&WeightFile, String)> {
        let layer = name_in_file.strip_suffix("weight")?;
        SCALES.iter().find_map(|end| {
            let name = format!("{layer}{end}");
            let file = self.files().find(|file| file.info(&name).is_some())?;
            Some((file, name))
        })
    }
}

/// The eight-bit format that the dtype of a tensor means; `None` for other dtypes, and for torch checkpoints.
fn eight_bit_dtype(file: &WeightFile, name_in_file: &str) -> Option<EightBits> {
    // The bytes of a tensor in a torch checkpoint cannot be read on their own.
    file.stored_bytes(name_in_file)?;
    match file.info(name_in_file)?.stored.as_str() {
        "f8_e4m3" => Some(EightBits::E4m3),
        "f8_e5m2" => Some(EightBits::E5m2),
        "i8" => Some(EightBits::Int8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{SafetensorsWriter, TensorEntry};

    /// A checkpoint with `a.weight`, a matrix of 2 x 4 bytes of `dtype`, and other tensors of four bytes.
    fn with(dtype: &str, others: &[(&str, &str)]) -> (tempfile::TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let entry = |(name, dtype): (&str, &str), shape: &[usize], bytes| TensorEntry {
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.into(),
            bytes,
            alignment: 1,
        };
        let matrix = entry(("a.weight", dtype), &[2, 4], 8);
        let entries = others.iter().map(|other| entry(*other, if other.1 == "F32" { &[1] } else { &[4] }, 4));
        let mut writer = SafetensorsWriter::create(&path, entries.chain([matrix]).collect(), &BTreeMap::new()).unwrap();
        for entry in writer.order().to_vec() {
            let bytes = if entry.shape.len() == 2 { vec![0x38; 8] } else { 2f32.to_le_bytes().to_vec() };
            writer.write(&entry.name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        let checkpoint = Checkpoint::open(path).unwrap();
        (dir, checkpoint)
    }

    #[test]
    fn fp8_without_a_known_scale_is_refused_unless_it_is_plain() {
        let mark = ("scaled_fp8", "F8_E4M3");
        for (others, value) in [
            (vec![], 1.0),
            (vec![("a.scale_weight", "F32"), mark], 2.0),
            (vec![("a.weight_scale", "F32"), ("a.input_scale", "F32")], 2.0),
            (vec![("a.scale_input", "F32")], 1.0),
            (vec![("b.scale_weight", "F32"), mark], 1.0),
        ] {
            let (_dir, file) = with("F8_E4M3", &others);
            assert_eq!(file.tensor("a.weight").unwrap().to_f32_vec(), [value; 8], "{others:?}");
        }
        for (others, named) in [
            (vec![("a.weight_scale_inv", "F32")], "a.weight_scale_inv"),
            (vec![("a.scale", "F32"), mark], "a.scale"),
            (vec![("model.scaled_fp8", "F8_E4M3")], "model.scaled_fp8"),
            (vec![("a.weight_scale", "F32"), ("a.weight_zero_point", "F32")], "a.weight_zero_point"),
        ] {
            let (_dir, file) = with("F8_E4M3", &others);
            for problem in [file.tensor("a.weight").err(), file.scaled("a.weight").err()] {
                let problem = problem.unwrap().to_string();
                assert!(problem.contains("`a.weight`") && problem.contains(&format!("found `{named}`")), "{problem}");
            }
        }
    }

    #[test]
    fn matrices_of_packed_bytes_are_not_weights() {
        let (_dir, file) = with("U8", &[]);
        let problem = file.tensor("a.weight").unwrap_err().to_string();
        assert!(problem.contains("`a.weight`") && problem.contains("found u8"), "{problem}");
    }
}
