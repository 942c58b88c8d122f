//! The warnings of the report: problems that a person should know before trusting the curves.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::run_files::RunFiles;

/// Largest share of pixels that the decoder may clamp to the limits of its range without a warning.
const MAX_CLAMPED_SHARE: f64 = 0.1;

/// The warnings about a run.
pub fn warnings(run: &RunFiles) -> Vec<String> {
    let mut warnings = Vec::new();
    warnings.extend(run.record.suspicion.iter().map(|suspicion| suspicion.text.clone()));
    warnings.extend(skipped_samples(run));
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
    let clamped_share = clamped.iter().sum::<f64>() / clamped.len().max(1) as f64;
    if clamped_share > MAX_CLAMPED_SHARE {
        warnings.push(format!(
            "{:.0} % of the pixels are black or white at the end of the range, where no gradient passes",
            100.0 * clamped_share
        ));
    }
    warnings
}

/// The warning about samples that were left out, if there are any: how many, and how often for which reason.
fn skipped_samples(run: &RunFiles) -> Option<String> {
    let logged = run.values("actor/skipped").iter().sum::<f64>() as u64;
    // Both counts may lack steps: the log has every `logging_steps`-th one, the record those before its last writing.
    let skipped = logged.max(run.record.skipped_samples);
    let mut text = match skipped {
        0 => return None,
        1 => "1 sample was left out".to_string(),
        n => format!("{n} samples were left out"),
    };
    for (reason, (count, first_sample)) in run.record.skip_reasons(0) {
        let _ = write!(text, "; {count} times: {reason} (first {first_sample})");
    }
    Some(text)
}

/// The number of steps whose gradient was clipped, the number of steps with a gradient, and the limit of the norm;
/// `None` if gradients are not clipped.
pub fn clipped(run: &RunFiles) -> Option<(usize, usize, f64)> {
    let limit = run.number("training.max_grad_norm").filter(|limit| *limit > 0.0)?;
    let norms = run.values("actor/grad_norm");
    Some((norms.iter().filter(|norm| **norm > limit).count(), norms.len(), limit))
}

/// Metrics that were not finite at some step. The log has `null` for such a value.
pub fn nonfinite(run: &RunFiles) -> BTreeSet<&str> {
    let values = run.rows.iter().flatten();
    values.filter(|(_, value)| value.is_null()).map(|(name, _)| name.as_str()).collect()
}
