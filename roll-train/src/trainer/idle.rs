//! A run that trains on nothing from its beginning on must not go on until its end.

use std::collections::BTreeMap;

use roll_core::{Error, Result};

use crate::results::record::Record;

/// Reasons that are told, the most frequent ones.
const TOLD: usize = 5;

/// Fails once the first `limit` steps are done and every sample of them was left out; `batch` samples are in a step,
/// over all ranks. It depends on the record alone, so that all ranks agree, and so does a run that was resumed.
pub(super) fn check(record: &Record, done: u64, batch: u64, limit: u64) -> Result<()> {
    let before_training = record.skipped.iter().filter(|skipped| skipped.step == 0).count() as u64;
    let skipped = record.skipped_samples.saturating_sub(before_training);
    let idle = record.skipped_updates >= done && skipped >= done * batch;
    if limit == 0 || batch == 0 || done < limit || !idle {
        return Ok(());
    }
    let mut reasons: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for left_out in record.skipped.iter().filter(|skipped| skipped.step > 0) {
        reasons.entry(left_out.reason.as_str()).or_insert((0, left_out.sample.as_str())).0 += 1;
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
    let more = reasons.len().saturating_sub(TOLD);
    let told = reasons.iter().take(TOLD).map(|(reason, (count, sample))| format!("{count} x {reason} (as {sample})"));
    let mut told = told.collect::<Vec<_>>().join("; ");
    if more > 0 {
        told.push_str(&format!("; and {more} other reasons"));
    }
    let problem = format!(
        "nothing was trained: all {skipped} samples of the first {done} steps were left out: {told}; set the key to 0 \
         to go on all the same"
    );
    Err(Error::config("training.max_skipped_steps", problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::record::Skipped;

    /// After `steps` steps of two samples, `skipped` of which were left out.
    fn record(steps: u64, skipped: u64) -> Record {
        let reason = |i: u64| if i % 3 == 2 { "no face in the reference" } else { "no face in any of 5 frames" };
        let skip = |i: u64| Skipped { step: 1 + i / 2, sample: format!("row {i}"), reason: reason(i).into() };
        let mut record = Record { skipped_samples: skipped + 1, skipped_updates: skipped / 2, ..Record::default() };
        record.skipped.push(Skipped { step: 0, sample: "row 9".into(), reason: "it cannot be read".into() });
        record.skipped.extend((0..skipped).map(skip));
        assert!(steps >= record.skipped_updates);
        record
    }

    #[test]
    fn a_run_whose_first_steps_left_everything_out_stops_and_counts_the_reasons() {
        let error = check(&record(5, 10), 5, 2, 5).map_err(|e| e.to_string());
        let told = error.err().unwrap_or_default();
        for part in [
            "`training.max_skipped_steps`",
            "all 10 samples of the first 5 steps",
            "7 x no face in any of 5 frames (as row 0); 3 x no face in the reference (as row 2)",
        ] {
            assert!(told.contains(part), "no {part}: {told}");
        }
        assert!(!told.contains("it cannot be read"), "{told}");
    }

    #[test]
    fn a_run_goes_on_before_that_where_a_sample_counted_or_where_it_was_told_to() {
        assert!(check(&record(4, 8), 4, 2, 5).is_ok());
        assert!(check(&record(5, 9), 5, 2, 5).is_ok());
        assert!(check(&record(5, 10), 5, 2, 0).is_ok());
        // An agent has no samples of a data set.
        assert!(check(&record(5, 10), 5, 0, 5).is_ok());
    }
}
