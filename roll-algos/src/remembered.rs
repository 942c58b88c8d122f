//! Results for a sample, kept for its next turn.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use roll_core::{Conditioning, Sample, Tensor};

/// Something whose size in memory is known.
pub(crate) trait Bytes {
    fn bytes(&self) -> usize;
}

impl Bytes for Conditioning {
    fn bytes(&self) -> usize {
        let Self { context, channels, image_tokens, first_frame, .. } = self;
        let tensors = [Some(context), channels.as_ref(), image_tokens.as_ref(), first_frame.as_ref()];
        tensors.into_iter().flatten().map(|t: &Tensor| t.as_bytes().len()).sum()
    }
}

/// Values by sample, up to a bound; the least recently used leave first. Two data sets may be mixed: a
/// sample is known by its row, where it comes from, and its file.
pub(crate) struct Remembered<T> {
    limit: usize,
    bytes: usize,
    /// Values with the time of their last use, counted in uses.
    values: HashMap<Key, (u64, Arc<T>)>,
    uses: u64,
}

type Key = (u64, String, Option<PathBuf>);

fn key(sample: &Sample) -> Key {
    (sample.index, sample.origin.clone(), sample.path.clone())
}

impl<T: Bytes> Remembered<T> {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, bytes: 0, values: HashMap::new(), uses: 0 }
    }

    pub(crate) fn get(&mut self, sample: &Sample) -> Option<Arc<T>> {
        self.uses += 1;
        let (used, value) = self.values.get_mut(&key(sample))?;
        *used = self.uses;
        Some(value.clone())
    }

    pub(crate) fn insert(&mut self, sample: &Sample, value: T) -> Arc<T> {
        let (key, value) = (key(sample), Arc::new(value));
        self.remove(&key);
        if value.bytes() > self.limit {
            return value;
        }
        while self.bytes + value.bytes() > self.limit {
            let oldest = self.values.iter().min_by_key(|(_, (used, _))| *used).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { break };
            self.remove(&oldest);
        }
        self.uses += 1;
        self.bytes += value.bytes();
        self.values.insert(key, (self.uses, value.clone()));
        value
    }

    fn remove(&mut self, key: &Key) {
        if let Some((_, value)) = self.values.remove(key) {
            self.bytes -= value.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_testing::sample;

    use super::*;

    impl Bytes for u32 {
        fn bytes(&self) -> usize {
            4
        }
    }

    #[test]
    fn what_was_not_used_for_longest_makes_room() {
        let mut remembered = Remembered::new(8);
        for index in 0..2 {
            assert_eq!(*remembered.insert(&sample(index, ""), index as u32), index as u32);
        }
        assert_eq!(remembered.get(&sample(0, "")).as_deref(), Some(&0));
        remembered.insert(&sample(2, ""), 2);
        assert!(remembered.get(&sample(1, "")).is_none());
        assert_eq!(remembered.get(&sample(0, "")).as_deref(), Some(&0));
        // The same sample again takes the place that it has.
        remembered.insert(&sample(2, ""), 3);
        assert_eq!(remembered.get(&sample(2, "")).as_deref(), Some(&3));
        assert_eq!((remembered.bytes, remembered.values.len()), (8, 2));
        let mut renamed = sample(0, "");
        renamed.origin = "another file".into();
        assert!(remembered.get(&renamed).is_none());
    }

    #[test]
    fn what_is_larger_than_the_limit_throws_nothing_out() {
        let mut remembered = Remembered::new(3);
        assert_eq!(*remembered.insert(&sample(0, ""), 7), 7);
        assert!(remembered.get(&sample(0, "")).is_none() && remembered.bytes == 0);
    }
}
