//! Host maths in f64: compared with the reference in f64 as well as in f32.

use std::collections::BTreeMap;

use roll_core::{StateDict, Tensor};
use safetensors::Dtype;

use crate::case::{Case, Outcome, Report};

/// Tolerance of a value in f64, relative to the largest of its tensor: orders of sums.
const ALLOWED: f64 = 1e-10;

/// The expected tensors of a case, in both precisions.
pub struct Exact {
    /// Tolerances in f32; every tensor must be compared.
    pub report: Report,
    wide: BTreeMap<String, Vec<f64>>,
}

impl Exact {
    /// Tensors of `outputs.safetensors` and `outputs_f64.safetensors`.
    pub fn open(case: &Case) -> Outcome<Self> {
        let path = case.dir.join("outputs_f64.safetensors");
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut wide = BTreeMap::new();
        for (name, view) in safetensors::SafeTensors::deserialize(&bytes)?.tensors() {
            if view.dtype() == Dtype::F64 {
                let values = view.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap_or_default()));
                wide.insert(name, values.collect());
            }
        }
        Ok(Self { report: case.expected("outputs.safetensors")?, wide })
    }

    /// Whether the case has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.report.get(name).is_ok()
    }

    /// The expected tensor in f64.
    pub fn wide(&self, name: &str) -> Outcome<&[f64]> {
        Ok(self.wide.get(name).ok_or_else(|| format!("no `{name}` in f64"))?)
    }

    /// Compares `actual` with both.
    pub fn compare(&mut self, name: &str, actual: &[f64]) -> Outcome {
        let shape = self.report.get(name)?.shape().to_vec();
        self.report.compare(name, &Tensor::new(actual.iter().map(|v| *v as f32).collect::<Vec<f32>>(), shape)?);
        let expected = self.wide(name)?;
        let scale = expected.iter().fold(0.0f64, |most, v| most.max(v.abs())).max(f64::MIN_POSITIVE);
        let error = actual.iter().zip(expected).fold(0.0f64, |most, (a, b)| most.max((a - b).abs() / scale));
        let same = actual.len() == expected.len() && error <= ALLOWED;
        self.report.check(same, || format!("{name}: {error:.2e} from the reference in f64"));
        Ok(())
    }

    /// Compares a metric of `cases.json`, which has nine digits.
    pub fn metric(&mut self, metrics: &serde_json::Value, name: &str, actual: f64) {
        let expected = metrics[name].as_f64();
        let close = expected.is_some_and(|e| (e - actual).abs() <= 1e-8 * e.abs().max(1e-6));
        self.report.check(close, || format!("metric {name}: {actual}, expected {expected:?}"));
    }
}

/// The entries of `cases.json`.
pub fn entries<T: serde::de::DeserializeOwned>(case: &Case) -> Outcome<Vec<T>> {
    Ok(serde_json::from_slice(&std::fs::read(case.dir.join("cases.json"))?)?)
}

/// Row `i` of `rows` of a tensor, flat.
pub fn row<'a>(tensors: &'a StateDict, name: &str, i: usize, rows: usize) -> Outcome<&'a [f32]> {
    let tensor = tensors.get(name).ok_or_else(|| format!("the case holds no `{name}`"))?;
    let n = tensor.len() / rows;
    Ok(&tensor.f32s()?[i * n..(i + 1) * n])
}

/// The values of a tensor in f64.
pub fn wide(tensors: &StateDict, name: &str) -> Outcome<Vec<f64>> {
    let tensor = tensors.get(name).ok_or_else(|| format!("the case holds no `{name}`"))?;
    Ok(tensor.f32s()?.iter().map(|v| f64::from(*v)).collect())
}
