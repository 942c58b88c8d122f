//! An algorithm's own validation, whose result on disk a process that continues the run does not compute again.

use std::collections::BTreeMap;

use roll_core::{Algorithm, Result, Validation, communicator};
use serde::{Deserialize, Serialize};

use super::TaskContext;
use super::partial::{PartialResults, key};
use crate::results::record::{self, ValidationMetrics};

/// Name of its result.
const NAME: &str = "validation";

/// Contents of its file: bits of metrics and losses, as JSON has no NaN.
#[derive(Serialize, Deserialize)]
struct ValidationResult {
    metrics: Vec<(String, u64)>,
    records: Vec<serde_json::Value>,
    losses: Vec<u64>,
}

/// Validates, unless the record has the result of this step already; returns the metrics. `is_kept`: an interrupted
/// process leaves its result to the next one.
pub fn validate(
    algorithm: &mut dyn Algorithm,
    is_kept: bool,
    context: &mut TaskContext<'_>,
) -> Result<BTreeMap<String, f64>> {
    if context.record.validations.iter().any(|validation| validation.step == context.step) {
        return Ok(BTreeMap::new());
    }
    let validation = match is_kept {
        true => kept(algorithm, context)?,
        false => algorithm.validate(context.step, context.model, context.noise, context.bar)?,
    };
    let Some(Validation { metrics, records, losses }) = validation else { return Ok(BTreeMap::new()) };
    context.journal.write_episodes(records)?;
    context.record.validations.push(ValidationMetrics {
        step: context.step,
        metrics: record::stored(&metrics),
        // JSON has no NaN, and the interval of one would say nothing.
        losses: if losses.iter().all(|loss| loss.is_finite()) { losses } else { Vec::new() },
    });
    Ok(metrics)
}

/// The result that an earlier process wrote, or that of the algorithm.
fn kept(algorithm: &mut dyn Algorithm, context: &mut TaskContext<'_>) -> Result<Option<Validation>> {
    let key = key(context.config, &[], context.model)?;
    let dir = context.journal.dir.clone();
    let partial = dir.as_ref().map(|dir| PartialResults::new(dir, context.step, key));
    let written = partial.as_ref().and_then(read);
    // Only rank 0 has files.
    let bits = |(name, value): (&String, &f64)| (name.clone(), value.to_bits());
    let own: Option<Vec<_>> = written.as_ref().map(|validation| validation.metrics.iter().map(bits).collect());
    if let Some(metrics) = communicator::join(context.ranks, &own)?.swap_remove(0) {
        let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
        let (records, losses) = written.map(|v| (v.records, v.losses)).unwrap_or_default();
        return Ok(Some(Validation { metrics, records, losses }));
    }
    let validation = algorithm.validate(context.step, context.model, context.noise, context.bar)?;
    if let (Some(partial), Some(validation)) = (&partial, &validation) {
        write(partial, validation)?;
    }
    Ok(validation)
}

fn read(partial: &PartialResults<'_>) -> Option<Validation> {
    let ValidationResult { metrics, records, losses } = partial.read(NAME, partial.key())?;
    let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
    Some(Validation { metrics, records, losses: losses.into_iter().map(f64::from_bits).collect() })
}

fn write(partial: &PartialResults<'_>, validation: &Validation) -> Result<()> {
    let metrics = validation.metrics.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
    let losses = validation.losses.iter().map(|loss| loss.to_bits()).collect();
    let result = ValidationResult { metrics, records: validation.records.clone(), losses };
    partial.write(NAME, partial.key().to_string(), result)
}
