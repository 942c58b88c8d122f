//! Checks that all ranks hold the same parameters: each rank sends checksums, and differing ones are an error.

use roll_core::{Communicator, Model, ParameterSpec, Result};

use super::parameter_access::ParameterAccess;
use super::partition::Partition;
use crate::BackendError;

const CHECKSUM_BYTES: usize = size_of::<u64>();

/// Fails unless every rank trains the same parameters, by name and shape.
pub(super) fn check_same_parameters(specs: &[ParameterSpec], ranks: &dyn Communicator) -> Result<()> {
    let names_and_shapes: String = specs.iter().map(|s| format!("{} {:?}\n", s.name, s.shape)).collect();
    let own_message = [specs.len() as u64, checksum(names_and_shapes.bytes().map(u32::from))];
    let messages = ranks.all_gather_bytes(&own_message.map(u64::to_le_bytes).concat())?;
    let count = |message: &[u8]| message.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    match messages.iter().position(|message| message != &messages[0]) {
        None => Ok(()),
        Some(rank) => {
            let (found, expected) = (count(&messages[rank]), count(&messages[0]));
            Err(BackendError::OtherParameters { rank, found, expected }.into())
        }
    }
}

/// Fails unless the parameters of all ranks are bit-identical, after `updates` updates.
pub(super) fn check_same_values(
    model: &mut dyn Model,
    specs: &[ParameterSpec],
    partition: &Partition,
    ranks: &dyn Communicator,
    updates: u64,
) -> Result<()> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let mut parameters = ParameterAccess::open(model)?;
    // One checksum per tensor.
    let mut own_checksums = Vec::with_capacity(CHECKSUM_BYTES * specs.len());
    for bucket in partition.buckets() {
        let values = parameters.read(bucket)?;
        let mut rest = values.as_slice();
        for spec in &specs[bucket.specs.clone()] {
            let (tensor, tail) = rest.split_at(spec.len());
            rest = tail;
            own_checksums.extend(checksum(tensor.iter().map(|v| v.to_bits())).to_le_bytes());
        }
    }
    let checksums_by_rank = ranks.all_gather_bytes(&own_checksums)?;
    let first_differing_rank = |spec: usize| {
        let of_tensor = CHECKSUM_BYTES * spec..CHECKSUM_BYTES * (spec + 1);
        let of_rank_0 = &checksums_by_rank[0][of_tensor.clone()];
        checksums_by_rank.iter().position(|checksums| &checksums[of_tensor.clone()] != of_rank_0)
    };
    let differing: Vec<(usize, usize)> =
        (0..specs.len()).filter_map(|spec| Some((spec, first_differing_rank(spec)?))).collect();
    match differing.first() {
        None => Ok(()),
        Some((spec, rank)) => {
            let (name, count) = (specs[*spec].name.clone(), differing.len());
            Err(BackendError::Drift { updates, rank: *rank, name, count, of: specs.len() }.into())
        }
    }
}

/// A checksum that differs whenever a single word differs: each word is multiplied by its own odd number, which is
/// invertible.
fn checksum(words: impl Iterator<Item = u32>) -> u64 {
    // 2^64 over the golden ratio, whose multiples are spread evenly.
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let term = |(i, word): (usize, u32)| u64::from(word).wrapping_mul((i as u64).wrapping_mul(SPREAD) | 1);
    words.enumerate().map(term).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_depend_on_every_bit_and_position() {
        let words = [1u32, 2, 3, 0x8000_0000];
        let sum = |words: &[u32]| checksum(words.iter().copied());
        for i in 0..4 {
            for bit in 0..32 {
                let mut other = words;
                other[i] ^= 1 << bit;
                assert_ne!(sum(&other), sum(&words));
            }
        }
        assert_ne!(sum(&[1, 2]), sum(&[2, 1]));
    }
}
