//! A cache of values that were computed from samples: encodings, prepared targets.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use roll_core::{Conditioning, Result, Sample, Tensor};

/// A value whose size in memory is known.
pub(crate) trait Bytes {
    /// Number of bytes of its tensors.
    fn bytes(&self) -> usize;
}

impl Bytes for Conditioning {
    fn bytes(&self) -> usize {
        let Self { context, channels, image_tokens, first_frame, .. } = self;
        let tensors = [Some(context), channels.as_ref(), image_tokens.as_ref(), first_frame.as_ref()];
        tensors.into_iter().flatten().map(|t: &Tensor| t.as_bytes().len()).sum()
    }
}

/// One value per sample, up to a number of bytes in total. The least recently used values are removed first.
pub(crate) struct SampleCache<T> {
    /// The most bytes that all values may have together.
    limit: usize,
    /// Bytes of all values.
    bytes: usize,
    /// Values, each with the number of its last use.
    values: HashMap<Key, (u64, Arc<T>)>,
    /// Number of uses so far.
    uses: u64,
}

/// Row, origin and file of a sample. The row alone would not do, because two data sets may be mixed.
type Key = (u64, String, Option<PathBuf>);

fn key(sample: &Sample) -> Key {
    (sample.index, sample.origin.clone(), sample.path.clone())
}

impl<T: Bytes> SampleCache<T> {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, bytes: 0, values: HashMap::new(), uses: 0 }
    }

    /// Returns the value of a sample, computed by `make` unless it is cached.
    pub(crate) fn get_or_insert(&mut self, sample: &Sample, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        match self.get(sample) {
            Some(value) => Ok(value),
            None => Ok(self.insert(sample, make()?)),
        }
    }

    fn get(&mut self, sample: &Sample) -> Option<Arc<T>> {
        self.uses += 1;
        let (used, value) = self.values.get_mut(&key(sample))?;
        *used = self.uses;
        Some(value.clone())
    }

    fn insert(&mut self, sample: &Sample, value: T) -> Arc<T> {
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
    fn evicts_the_least_recently_used() {
        let mut cache = SampleCache::new(8);
        for index in 0..2 {
            assert_eq!(*cache.insert(&sample(index, ""), index as u32), index as u32);
        }
        assert_eq!(cache.get(&sample(0, "")).as_deref(), Some(&0));
        cache.insert(&sample(2, ""), 2);
        assert!(cache.get(&sample(1, "")).is_none());
        assert_eq!(cache.get(&sample(0, "")).as_deref(), Some(&0));
        // Inserting a sample again replaces its value.
        cache.insert(&sample(2, ""), 3);
        assert_eq!(cache.get(&sample(2, "")).as_deref(), Some(&3));
        assert_eq!((cache.bytes, cache.values.len()), (8, 2));
        let mut renamed = sample(0, "");
        renamed.origin = "another file".into();
        assert!(cache.get(&renamed).is_none());
    }

    #[test]
    fn a_value_above_the_limit_evicts_nothing() {
        let mut cache = SampleCache::new(3);
        assert_eq!(*cache.insert(&sample(0, ""), 7), 7);
        assert!(cache.get(&sample(0, "")).is_none() && cache.bytes == 0);
    }
}
