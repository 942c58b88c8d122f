//! The keys of a sample's draws, which do not depend on the number of ranks.

use roll_core::{Communicator, Result, Sample, communicator};

/// The number of earlier occurrences of each of this rank's samples in the step; the samples of all ranks are one
/// sequence, in the order of the ranks. Above 0 only if a step has more samples than there are clips.
pub(crate) fn repeats(ranks: &dyn Communicator, samples: &[Sample]) -> Result<Vec<u64>> {
    let own: Vec<u64> = samples.iter().map(|sample| sample.index).collect();
    let mut row = match ranks.world_size() {
        1 => Vec::new(),
        _ => {
            let mut before = communicator::join(ranks, &own)?;
            before.truncate(ranks.rank().0);
            before.concat()
        }
    };
    let mut repeats = Vec::new();
    for index in own {
        repeats.push(row.iter().filter(|before| **before == index).count() as u64);
        row.push(index);
    }
    Ok(repeats)
}

/// The key of a sample's draws. A clip that occurred `repeats` times in the step before gets other draws.
pub(crate) fn draw_key(sample: &Sample, repeats: u64) -> u64 {
    sample.index ^ (repeats << 40)
}

/// The key of the draws of video `k` of a sample with the key `key` of [`draw_key`]. That of video 0 is `key` itself.
pub(crate) fn rollout_key(key: u64, k: usize) -> u64 {
    key ^ ((k as u64) << 52)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use roll_core::ThreadRanks;
    use roll_step::ranks::share;
    use roll_testing::sample;

    use super::*;

    #[test]
    fn draw_keys_are_unique_and_independent_of_the_number_of_ranks() {
        let rows = [3, 0, 3, 3, 0, 1, 3, 1];
        let keys = |ranks: usize| -> Vec<u64> {
            let of_rank = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
                let own: Vec<Sample> = share(ranks.as_ref(), rows.len()).map(|i| sample(rows[i], "")).collect();
                let repeats = repeats(ranks.as_ref(), &own)?;
                Ok(own.iter().zip(repeats).map(|(sample, n)| draw_key(sample, n)).collect::<Vec<_>>())
            });
            of_rank.into_iter().flat_map(Result::unwrap).collect()
        };
        let alone = keys(1);
        assert_eq!((&alone[..2], alone[5]), (&[3, 0][..], 1));
        let mut different = alone.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), rows.len());
        assert!([2, 4, 8].into_iter().all(|ranks| keys(ranks) == alone));
    }
}
