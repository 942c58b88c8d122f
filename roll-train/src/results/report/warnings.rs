//! The warnings of the report: problems that a person should know before trusting the curves.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::run_files::RunFiles;

/// Largest share of pixels at the limits of the decoder's range without a warning.
const CLAMPED: f64 = 0.1;

/// The warnings about a run.
pub fn warnings(run: &RunFiles) -> Vec<String> {
    let mut warnings = Vec::new();
    warnings.extend(run.record.suspicion.iter().map(|suspicion| suspicion.text.clone()));
    let sum = |metric: &str| run.values(metric).iter().sum::<f64>() as u64;
    let skipped = sum("actor/skipped").max(run.record.skipped_samples);
    if skipped > 0 {
        let mut text = match skipped {
            1 => "1 sample was left out".to_string(),
            n => format!("{n} samples were left out"),
        };
        for (reason, (count, sample)) in run.record.skip_reasons(0) {
            let _ = write!(text, "; {count} times: {reason} (first {sample})");
        }
        warnings.push(text);
    }
    if run.record.skipped_updates > 0 {
        let n = run.record.skipped_updates;
        warnings.push(format!("{n} updates were left out because nothing was scored or a value was not finite"));
    }
    if let Some((clipped @ 1.., steps, limit)) = clipped(run) {
        warnings.push(format!(
            "gradients were clipped in {clipped} of {steps} steps: their norm is above training.max_grad_norm ({limit})"
        ));
    }
    let nonfinite = nonfinite(run);
    if !nonfinite.is_empty() {
        warnings.push(format!("not finite at some step: {}", nonfinite.into_iter().collect::<Vec<_>>().join(", ")));
    }
    let clamped = run.values("actor/clamped_fraction");
    let mean = clamped.iter().sum::<f64>() / clamped.len().max(1) as f64;
    if mean > CLAMPED {
        warnings.push(format!(
            "{:.0} % of the pixels are black or white at the end of the range, where no gradient passes",
            100.0 * mean
        ));
    }
    warnings
}

/// The number of steps whose gradient was clipped, the number of steps with a gradient, and the limit of the norm;
/// `None` if gradients are not clipped.
pub fn clipped(run: &RunFiles) -> Option<(usize, usize, f64)> {
    let limit = run.number("training.max_grad_norm").filter(|limit| *limit > 0.0)?;
    let norms = run.values("actor/grad_norm");
    Some((norms.iter().filter(|norm| **norm > limit).count(), norms.len(), limit))
}

/// Metrics that were not finite at some step.
pub fn nonfinite(run: &RunFiles) -> BTreeSet<&str> {
    let values = run.rows.iter().flatten();
    values.filter(|(_, value)| value.is_null()).map(|(name, _)| name.as_str()).collect()
}
