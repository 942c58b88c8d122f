//! An algorithm's own validation. Its result is kept on disk, so that a process that continues the run does not compute
//! it again.

use std::collections::BTreeMap;

use roll_core::{Algorithm, Result, Validation, communicator};
use serde::{Deserialize, Serialize};

use super::TaskContext;
use super::partial::{PartialResults, key};
use crate::results::record::{self, ValidationMetrics};

/// The name of the result, see [`PartialResults`].
const NAME: &str = "validation";

/// A validation as JSON. Metrics and losses are the bits of their `f64`, because JSON has no NaN.
#[derive(Serialize, Deserialize)]
struct ValidationResult {
    metrics: Vec<(String, u64)>,
    records: Vec<serde_json::Value>,
    losses: Vec<u64>,
}

/// Validates, unless the record has the result of this step already, and returns the metrics. With `is_kept`, the
/// result is kept on disk for a process that continues the run.
pub fn validate(
    algorithm: &mut dyn Algorithm,
    is_kept: bool,
    context: &mut TaskContext<'_>,
) -> Result<BTreeMap<String, f64>> {
    if context.record.validations.iter().any(|validation| validation.step == context.step) {
        return Ok(BTreeMap::new());
    }
    let validation = match is_kept {
        true => validate_or_read(algorithm, context)?,
        false => algorithm.validate(context.step, context.model, context.noise, context.bar)?,
    };
    let Some(Validation { metrics, records, losses }) = validation else { return Ok(BTreeMap::new()) };
    context.journal.write_episodes(records)?;
    context.record.validations.push(ValidationMetrics {
        step: context.step,
        metrics: record::stored(&metrics),
        // JSON has no NaN, and a confidence interval over losses with a NaN would say nothing.
        losses: if losses.iter().all(|loss| loss.is_finite()) { losses } else { Vec::new() },
    });
    Ok(metrics)
}

/// Reads the result that an earlier process wrote. Without such a result, validates and writes it.
fn validate_or_read(algorithm: &mut dyn Algorithm, context: &mut TaskContext<'_>) -> Result<Option<Validation>> {
    let key = key(context.config, &[], context.model)?;
    let dir = context.journal.dir.clone();
    let partial = dir.as_ref().map(|dir| PartialResults::new(dir, context.step, key));
    let earlier = partial.as_ref().and_then(read);
    // Only rank 0 has files, and sends the metrics to the other ranks.
    let bits = |(name, value): (&String, &f64)| (name.clone(), value.to_bits());
    let own_metrics: Option<Vec<_>> = earlier.as_ref().map(|earlier| earlier.metrics.iter().map(bits).collect());
    let metrics_of_rank_0 = communicator::join(context.ranks, &own_metrics)?.swap_remove(0);
    if let Some(metrics) = metrics_of_rank_0 {
        let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
        let (records, losses) = earlier.map(|earlier| (earlier.records, earlier.losses)).unwrap_or_default();
        return Ok(Some(Validation { metrics, records, losses }));
    }
    let validation = algorithm.validate(context.step, context.model, context.noise, context.bar)?;
    if let (Some(partial), Some(validation)) = (&partial, &validation) {
        write(partial, validation)?;
    }
    Ok(validation)
}

/// Reads the result of an earlier process, if there is one for the same parameters and settings.
fn read(partial: &PartialResults<'_>) -> Option<Validation> {
    let ValidationResult { metrics, records, losses } = partial.read(NAME, partial.key())?;
    let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
    Some(Validation { metrics, records, losses: losses.into_iter().map(f64::from_bits).collect() })
}

/// Writes the result for a process that continues the run.
fn write(partial: &PartialResults<'_>, validation: &Validation) -> Result<()> {
    let metrics = validation.metrics.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
    let losses = validation.losses.iter().map(|loss| loss.to_bits()).collect();
    let result = ValidationResult { metrics, records: validation.records.clone(), losses };
    partial.write(NAME, partial.key().to_string(), result)
}
