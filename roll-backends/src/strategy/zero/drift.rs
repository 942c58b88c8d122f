//! Checks that all ranks hold the same parameters.

use roll_core::{Communicator, Model, ParameterSpec, Result};

use super::parameter_access::ParameterAccess;
use super::partition::Partition;
use crate::BackendError;

/// Fails unless every rank trains the same parameters, by name and shape.
pub(super) fn same_parameters(specs: &[ParameterSpec], ranks: &dyn Communicator) -> Result<()> {
    let names: String = specs.iter().map(|s| format!("{} {:?}\n", s.name, s.shape)).collect();
    let own = [specs.len() as u64, checksum(names.bytes().map(u32::from))];
    let all = ranks.all_gather_bytes(&own.map(u64::to_le_bytes).concat())?;
    let count = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    match all.iter().position(|other| other != &all[0]) {
        None => Ok(()),
        Some(rank) => {
            Err(BackendError::OtherParameters { rank, found: count(&all[rank]), expected: count(&all[0]) }.into())
        }
    }
}

/// Fails unless the parameters of all ranks are bit-identical, after `updates` updates.
pub(super) fn same_values(
    model: &mut dyn Model,
    specs: &[ParameterSpec],
    partition: &Partition,
    ranks: &dyn Communicator,
    updates: u64,
) -> Result<()> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let mut values = ParameterAccess::open(model)?;
    let mut own = Vec::with_capacity(8 * specs.len());
    for bucket in partition.buckets() {
        let read = values.read(bucket)?;
        let mut rest = read.as_slice();
        for spec in &specs[bucket.specs.clone()] {
            let (head, tail) = rest.split_at(spec.len());
            rest = tail;
            own.extend(checksum(head.iter().map(|v| v.to_bits())).to_le_bytes());
        }
    }
    let all = ranks.all_gather_bytes(&own)?;
    let differs =
        |spec: usize| all.iter().position(|other| other[8 * spec..8 * spec + 8] != all[0][8 * spec..8 * spec + 8]);
    let differing: Vec<(usize, usize)> = (0..specs.len()).filter_map(|i| Some((i, differs(i)?))).collect();
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
    let term =
        |(i, word): (usize, u32)| u64::from(word).wrapping_mul((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
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
