//! Batches of equal work: samples of uneven length shared out among ranks.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

use roll_core::{Error, Result};

/// Work of a sequence of `tokens`: the products with weights are linear in it, attention is quadratic. The ratio of the
/// two is that of a 7B model.
pub fn workload(tokens: usize) -> u64 {
    let tokens = tokens as u64;
    24_576 * tokens + tokens * tokens
}

/// Shares `work` out into `parts` of nearly equal sum and exactly equal number, by the largest differencing method
/// (Karmarkar and Karp, 1982) on tuples. Each part lists indices in rising order.
pub fn equal_parts(work: &[u64], parts: usize) -> Result<Vec<Vec<usize>>> {
    if parts == 0 || work.is_empty() || work.len() % parts != 0 {
        return Err(Error::shape("samples to share out", format!("a multiple of {parts}"), &[work.len()]));
    }
    let mut order: Vec<usize> = (0..work.len()).collect();
    order.sort_by_key(|i| (work[*i], *i));
    let mut heap: BinaryHeap<Split> = order.chunks(parts).map(|chunk| Split::new(chunk, work)).collect();
    let mut split = heap.pop().ok_or_else(|| Error::Misuse("nothing to share out".into()))?;
    while let Some(next) = heap.pop() {
        split.merge(next);
        heap.push(split);
        split = heap.pop().ok_or_else(|| Error::Misuse("nothing to share out".into()))?;
    }
    let sorted = |part: Part| {
        let mut items = part.items;
        items.sort_unstable();
        items
    };
    Ok(split.parts.into_iter().map(sorted).collect())
}

/// A batch in its new order.
#[derive(Clone, Debug, PartialEq)]
pub struct Balanced {
    /// Indices into the old order; rank r takes the r-th of equal parts.
    pub order: Vec<usize>,
    /// `{prefix}/min`, `max`, `mean`, `minmax_diff`, `balanced_min`, `balanced_max`: tokens per rank before and after.
    pub metrics: BTreeMap<String, f64>,
}

/// Reorders samples of the given lengths so that each of `ranks` gets nearly the same work. With `mini_batch` each run
/// of that many samples is shared out by itself, so that mini-batches keep their samples.
pub fn balance(lengths: &[usize], ranks: usize, mini_batch: Option<usize>, prefix: &str) -> Result<Balanced> {
    let work: Vec<u64> = lengths.iter().map(|n| workload(*n)).collect();
    let size = mini_batch.unwrap_or(lengths.len()).max(1);
    let mut parts = vec![Vec::new(); ranks];
    for (start, chunk) in work.chunks(size).enumerate().map(|(i, chunk)| (i * size, chunk)) {
        for (part, found) in parts.iter_mut().zip(equal_parts(chunk, ranks)?) {
            part.extend(found.into_iter().map(|i| start + i));
        }
    }
    let sums: Vec<usize> = parts.iter().map(|part| part.iter().map(|i| lengths[*i]).sum()).collect();
    // Small at both ends: a pipeline fills and drains with its smallest micro-batches.
    for part in &mut parts {
        part.sort_by_key(|i| (work[*i], *i));
        let (rising, falling): (Vec<_>, Vec<_>) = part.iter().enumerate().partition(|(at, _)| at % 2 == 0);
        let falling = falling.into_iter().rev();
        *part = rising.into_iter().chain(falling).map(|(_, i)| *i).collect();
    }
    let before: Vec<usize> = lengths.chunks(lengths.len().div_ceil(ranks)).map(|chunk| chunk.iter().sum()).collect();
    let extreme = |sums: &[usize]| {
        let (min, max) = (sums.iter().min(), sums.iter().max());
        (min.copied().unwrap_or(0) as f64, max.copied().unwrap_or(0) as f64)
    };
    let ((min, max), (balanced_min, balanced_max)) = (extreme(&before), extreme(&sums));
    let mean = lengths.iter().sum::<usize>() as f64 / ranks as f64;
    let metrics = [
        ("min", min),
        ("max", max),
        ("minmax_diff", max - min),
        ("balanced_min", balanced_min),
        ("balanced_max", balanced_max),
        ("mean", mean),
    ];
    let metrics = metrics.into_iter().map(|(name, value)| (format!("{prefix}/{name}"), value)).collect();
    Ok(Balanced { order: parts.into_iter().flatten().collect(), metrics })
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    sum: u64,
    items: Vec<usize>,
}

/// A way to share out some of the samples; the heap gives the most uneven first.
#[derive(Debug, PartialEq, Eq)]
struct Split {
    /// Largest sum first.
    parts: Vec<Part>,
}

impl Split {
    fn new(chunk: &[usize], work: &[u64]) -> Self {
        let mut split = Self { parts: chunk.iter().map(|i| Part { sum: work[*i], items: vec![*i] }).collect() };
        split.sort();
        split
    }

    fn sort(&mut self) {
        self.parts.sort_by(|a, b| b.cmp(a));
    }

    fn spread(&self) -> u64 {
        let sum = |part: Option<&Part>| part.map_or(0, |p| p.sum);
        sum(self.parts.first()) - sum(self.parts.last())
    }

    /// The largest part takes the other's smallest, and so on.
    fn merge(&mut self, other: Split) {
        for (part, more) in self.parts.iter_mut().zip(other.parts.into_iter().rev()) {
            part.sum += more.sum;
            part.items.extend(more.items);
        }
        self.sort();
    }
}

impl Ord for Split {
    fn cmp(&self, other: &Self) -> Ordering {
        // Ties by content, so that the result does not depend on the heap's mood.
        (self.spread(), Reverse(&self.parts)).cmp(&(other.spread(), Reverse(&other.parts)))
    }
}

impl PartialOrd for Split {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parts_are_equal_in_number_and_nearly_in_sum() {
        let work: Vec<u64> = (0..64).map(|i| (i * i * 7919) % 1000 + 1).collect();
        let parts = equal_parts(&work, 4).unwrap();
        let mut all: Vec<usize> = parts.iter().flatten().copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..64).collect::<Vec<_>>());
        assert!(parts.iter().all(|p| p.len() == 16));
        let sums: Vec<u64> = parts.iter().map(|p| p.iter().map(|i| work[*i]).sum()).collect();
        let (min, max) = (*sums.iter().min().unwrap(), *sums.iter().max().unwrap());
        assert!(max - min <= 10, "{sums:?}");
    }

    #[test]
    fn balancing_narrows_the_gap_and_keeps_mini_batches() {
        let lengths = [100, 90, 80, 70, 5, 6, 7, 8];
        let balanced = balance(&lengths, 2, None, "global_seqlen").unwrap();
        assert_eq!(balanced.metrics["global_seqlen/minmax_diff"], 314.0);
        let gap = balanced.metrics["global_seqlen/balanced_max"] - balanced.metrics["global_seqlen/balanced_min"];
        assert!(gap <= 2.0, "{gap}");
        let kept = balance(&lengths, 2, Some(4), "x").unwrap();
        for rank in kept.order.chunks(4) {
            assert_eq!(rank.iter().filter(|i| **i < 4).count(), 2, "{:?}", kept.order);
        }
    }

    #[test]
    fn what_cannot_be_shared_out_equally_is_an_error() {
        assert!(equal_parts(&[1, 2, 3], 2).is_err());
        assert!(equal_parts(&[], 2).is_err());
        assert!(balance(&[1, 2], 0, None, "x").is_err());
    }
}
