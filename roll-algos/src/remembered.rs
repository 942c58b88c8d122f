//! What was computed for a sample, kept for its next turn.

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

/// Values by sample, as many as fit. Two data sets may be mixed: a sample is known by its row, where it comes from, and
/// its file.
///
/// The first to come stay: every pass over the data needs every sample once, and then replacing the oldest would throw
/// each one out just before its turn.
pub(crate) struct Remembered<T> {
    limit: usize,
    bytes: usize,
    values: HashMap<Key, Arc<T>>,
}

type Key = (u64, String, Option<PathBuf>);

fn key(sample: &Sample) -> Key {
    (sample.index, sample.origin.clone(), sample.path.clone())
}

impl<T: Bytes> Remembered<T> {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, bytes: 0, values: HashMap::new() }
    }

    pub(crate) fn get(&self, sample: &Sample) -> Option<Arc<T>> {
        self.values.get(&key(sample)).cloned()
    }

    pub(crate) fn insert(&mut self, sample: &Sample, value: T) -> Arc<T> {
        let value = Arc::new(value);
        if self.bytes + value.bytes() <= self.limit {
            self.bytes += value.bytes();
            let before = self.values.insert(key(sample), value.clone());
            self.bytes -= before.map_or(0, |value| value.bytes());
        }
        value
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
    fn what_fits_stays_and_the_rest_is_computed_again() {
        let mut remembered = Remembered::new(8);
        for index in 0..3 {
            assert_eq!(*remembered.insert(&sample(index, ""), index as u32), index as u32);
        }
        assert_eq!(remembered.get(&sample(1, "")).as_deref(), Some(&1));
        assert!(remembered.get(&sample(2, "")).is_none());
        let mut renamed = sample(1, "");
        renamed.origin = "another file".into();
        assert!(remembered.get(&renamed).is_none());
    }
}
