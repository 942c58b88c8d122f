//! The keys of a sample's random draws, and the mapping of a draw to [0, 1). Keys do not depend on the number of ranks.
//!
//! A key has fields that do not overlap: the sample's index in the low bits, how often the sample occurred earlier in
//! the same step from bit 40, and the number of the video from bit 52. Policy gradients add the number of the update or
//! of the denoising step from bit 28, so an index is expected to be below 2^28.

use roll_core::{Communicator, Result, Sample, communicator};

/// The lowest bit of the number of the update, or of the denoising step.
pub(crate) const UPDATE_OR_STEP_BIT: u32 = 28;
/// The lowest bit of the number of earlier occurrences in the step.
const REPEATS_BIT: u32 = 40;
/// The lowest bit of the number of the video.
const VIDEO_BIT: u32 = 52;

/// Returns, for each sample of this rank, how often it already occurred in the same step. The samples of a step are one
/// sequence over all ranks, in the order of the ranks. A count is above 0 only if a step has more samples than there
/// are clips.
pub(crate) fn repeats(ranks: &dyn Communicator, samples: &[Sample]) -> Result<Vec<u64>> {
    let own_indices: Vec<u64> = samples.iter().map(|sample| sample.index).collect();
    let mut earlier_indices = match ranks.world_size() {
        1 => Vec::new(),
        _ => {
            let mut indices_by_rank = communicator::join(ranks, &own_indices)?;
            indices_by_rank.truncate(ranks.rank().0);
            indices_by_rank.concat()
        }
    };
    let mut repeats = Vec::new();
    for index in own_indices {
        repeats.push(earlier_indices.iter().filter(|earlier| **earlier == index).count() as u64);
        earlier_indices.push(index);
    }
    Ok(repeats)
}

/// The key of a sample's draws. A sample that already occurred `repeats` times in the same step gets other draws.
pub(crate) fn draw_key(sample: &Sample, repeats: u64) -> u64 {
    sample.index ^ (repeats << REPEATS_BIT)
}

/// Maps a uniform draw from [-1, 1), the range of [`Noise::uniform`](roll_core::Noise::uniform), to [0, 1).
pub(crate) fn in_unit_interval(draw: f32) -> f64 {
    0.5 * (f64::from(draw) + 1.0)
}

/// The key for video `k` of a sample whose own key (see [`draw_key`]) is `key`; video 0 keeps `key`.
pub(crate) fn rollout_key(key: u64, k: usize) -> u64 {
    key ^ ((k as u64) << VIDEO_BIT)
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
