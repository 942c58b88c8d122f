//! Prefetches the next segment while the network computes with the current one. A segment is the weights whose names
//! begin with a prefix, usually those of a block.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::mpsc::Receiver;

use roll_core::{Error, Result};

use crate::sync::lock;

/// A segment in flight; the receiver gets the segment or an error.
pub type Pending<T> = Receiver<Result<T>>;

/// Prefetches one segment. If the caller drops each segment before it requests the next, at most two exist: the one in
/// use and the one in flight.
///
/// The next segment is predicted: it is the one that followed the same two segments the last time. A wrong prediction
/// costs one unnecessary fetch. If the order of segments is given ([`Prefetcher::in_order`]), the next segment follows
/// from it, and nothing is prefetched after the last one.
#[derive(Debug)]
pub struct Prefetcher<T> {
    state: Mutex<PrefetchState<T>>,
    order: Option<Vec<String>>,
}

#[derive(Debug)]
struct PrefetchState<T> {
    /// The segment that last followed each pair of segments.
    followers: HashMap<[String; 2], String>,
    /// The last two segments that were requested, the latest last.
    last_two: [String; 2],
    /// The name of the segment in flight, and its receiver.
    pending: Option<(String, Pending<T>)>,
}

impl<T> Default for Prefetcher<T> {
    fn default() -> Self {
        let state = PrefetchState { followers: HashMap::new(), last_two: Default::default(), pending: None };
        Self { state: Mutex::new(state), order: None }
    }
}

impl<T> Prefetcher<T> {
    /// Creates a prefetcher for a network that uses these segments in this order in each pass.
    pub fn in_order(order: Vec<String>) -> Self {
        Self { order: Some(order), ..Self::default() }
    }

    /// Returns the segment `name`, which is in flight or fetched now by `fetch`. Then starts the fetch of the next
    /// segment, if `should_prefetch_next`.
    pub fn segment(
        &self,
        name: &str,
        should_prefetch_next: bool,
        fetch: impl Fn(&str) -> Result<Pending<T>>,
    ) -> Result<T> {
        let mut state = lock(&self.state);
        let segment = match state.pending.take() {
            // The prediction was right.
            Some((guess, pending)) if guess == name => receive(name, pending)?,
            Some((_, wrong_segment)) => {
                // The wrong segment is awaited and dropped before the right one is fetched. Its error, if any, is
                // ignored: it was not requested.
                drop(wrong_segment.recv());
                receive(name, fetch(name)?)?
            }
            // Nothing is in flight.
            None => receive(name, fetch(name)?)?,
        };
        let PrefetchState { followers, last_two, pending } = &mut *state;
        followers.insert(last_two.clone(), name.into());
        last_two.rotate_left(1);
        last_two[1] = name.into();
        let next = match &self.order {
            Some(order) => order.iter().position(|n| n == name).and_then(|position| order.get(position + 1)),
            None => followers.get(last_two),
        };
        if should_prefetch_next && let Some(next) = next.cloned() {
            *pending = Some((next.clone(), fetch(&next)?));
        }
        Ok(segment)
    }
}

fn receive<T>(name: &str, pending: Pending<T>) -> Result<T> {
    pending
        .recv()
        .unwrap_or_else(|_| Err(Error::Misuse(format!("the thread that fetches the weights `{name}*` panicked"))))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use super::*;

    /// A segment that counts the live instances.
    struct Segment(String, Arc<[AtomicUsize; 3]>);

    const ALIVE: usize = 0;
    const MOST: usize = 1;
    const FETCHED: usize = 2;

    impl Segment {
        fn new(name: &str, counts: &Arc<[AtomicUsize; 3]>) -> Self {
            let alive = counts[ALIVE].fetch_add(1, Ordering::SeqCst) + 1;
            counts[MOST].fetch_max(alive, Ordering::SeqCst);
            counts[FETCHED].fetch_add(1, Ordering::SeqCst);
            Self(name.into(), counts.clone())
        }
    }

    impl Drop for Segment {
        fn drop(&mut self) {
            self.1[ALIVE].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Runs passes over ten blocks, forward and backward; returns the peak number of live blocks and the number
    /// fetched.
    fn passes(prefetch: bool, count: usize) -> [usize; 2] {
        let counts: Arc<[AtomicUsize; 3]> = Arc::default();
        let store = Prefetcher::default();
        let begin = |name: &str| {
            let (send, pending) = mpsc::channel();
            send.send(Ok(Segment::new(name, &counts))).unwrap();
            Ok(pending)
        };
        for _ in 0..count {
            for i in (0..10).chain((0..10).rev()) {
                let name = format!("blocks.{i}.");
                let block = store.segment(&name, prefetch, begin).unwrap();
                assert_eq!(block.0, name);
            }
        }
        drop(store);
        [counts[MOST].load(Ordering::SeqCst), counts[FETCHED].load(Ordering::SeqCst)]
    }

    #[test]
    fn at_most_two_blocks_exist_and_few_fetches_are_wasted() {
        assert_eq!(passes(false, 5), [1, 100]);
        let [most, fetched] = passes(true, 5);
        assert!(most == 2 && (100..=102).contains(&fetched), "{most} {fetched}");
    }

    #[test]
    fn a_given_order_is_prefetched_without_waste() {
        let (names, begun) = (["a", "b", "c"], std::cell::RefCell::new(Vec::new()));
        let store = Prefetcher::in_order(names.map(String::from).to_vec());
        let begin = |name: &str| {
            begun.borrow_mut().push(name.to_string());
            let (send, pending) = mpsc::channel();
            send.send(Ok(name.to_string())).unwrap();
            Ok(pending)
        };
        for pass in 0..2 {
            for (i, name) in names.into_iter().enumerate() {
                assert_eq!(store.segment(name, true, begin).unwrap(), name);
                assert_eq!(begun.borrow().len(), 3 * pass + (i + 2).min(3));
            }
        }
    }

    #[test]
    fn a_failed_fetch_fails_the_request() {
        let store = Prefetcher::<u8>::default();
        let message = store.segment("a", true, |_| Ok(mpsc::channel().1)).unwrap_err().to_string();
        assert!(message.contains("`a*`"), "{message}");
        let refuse = |_: &str| {
            let (send, pending) = mpsc::channel();
            send.send(Err(Error::Misuse("no such file".into()))).unwrap();
            Ok(pending)
        };
        assert!(store.segment("a", true, refuse).unwrap_err().to_string().contains("no such file"));
    }
}
