//! Prefetches the next segment while the network computes with the current one.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, MutexGuard, PoisonError};

use roll_core::{Error, Result};

/// A segment in flight; the receiver gets the segment or an error.
pub type Coming<T> = Receiver<Result<T>>;

/// Prefetches one segment. Two exist at a time: the one in use and the one in flight.
///
/// The next segment is predicted: it is the one that last followed the same two segments. A wrong prediction costs one
/// unnecessary fetch. If the order is given, nothing is predicted, and nothing is fetched beyond its end.
#[derive(Debug)]
pub struct Ahead<T> {
    state: Mutex<State<T>>,
    order: Option<Vec<String>>,
}

#[derive(Debug)]
struct State<T> {
    followers: HashMap<[String; 2], String>,
    last: [String; 2],
    coming: Option<(String, Coming<T>)>,
}

impl<T> Default for Ahead<T> {
    fn default() -> Self {
        let state = State { followers: HashMap::new(), last: Default::default(), coming: None };
        Self { state: Mutex::new(state), order: None }
    }
}

impl<T> Ahead<T> {
    /// Creates a prefetcher for a network that uses these segments in order, from the first to the last.
    pub fn through(order: Vec<String>) -> Self {
        Self { order: Some(order), ..Self::default() }
    }

    /// Returns the segment `name`, which is in flight or fetched now by `begin`. Then starts the fetch of the next
    /// segment, if `begins_next`.
    pub fn segment(&self, name: &str, begins_next: bool, begin: impl Fn(&str) -> Result<Coming<T>>) -> Result<T> {
        let mut state = self.lock();
        let segment = match state.coming.take() {
            Some((guess, coming)) if guess == name => arrived(name, coming)?,
            wrong => {
                // The wrong segment is dropped before the right one is fetched. Its error, if any, is ignored: it was
                // not requested.
                drop(wrong.map(|(_, coming)| coming.recv()));
                arrived(name, begin(name)?)?
            }
        };
        let State { followers, last, coming } = &mut *state;
        followers.insert(last.clone(), name.into());
        last.rotate_left(1);
        last[1] = name.into();
        let next = match &self.order {
            Some(order) => order.iter().position(|n| n == name).and_then(|at| order.get(at + 1)),
            None => followers.get(last),
        };
        if begins_next && let Some(next) = next.cloned() {
            *coming = Some((next.clone(), begin(&next)?));
        }
        Ok(segment)
    }

    /// Locks the state, even if it is poisoned: a panic can only lose a prediction.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn arrived<T>(name: &str, coming: Coming<T>) -> Result<T> {
    coming.recv().unwrap_or_else(|_| Err(Error::Misuse(format!("bringing the weights `{name}*` was given up"))))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use super::*;

    /// A block that counts the live instances.
    struct Block(String, Arc<[AtomicUsize; 3]>);

    const ALIVE: usize = 0;
    const MOST: usize = 1;
    const BROUGHT: usize = 2;

    impl Block {
        fn new(name: &str, counts: &Arc<[AtomicUsize; 3]>) -> Self {
            let alive = counts[ALIVE].fetch_add(1, Ordering::SeqCst) + 1;
            counts[MOST].fetch_max(alive, Ordering::SeqCst);
            counts[BROUGHT].fetch_add(1, Ordering::SeqCst);
            Self(name.into(), counts.clone())
        }
    }

    impl Drop for Block {
        fn drop(&mut self) {
            self.1[ALIVE].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Runs passes over ten blocks, forward and backward; returns the peak number of live blocks and the number
    /// fetched.
    fn passes(ahead: bool, count: usize) -> [usize; 2] {
        let counts: Arc<[AtomicUsize; 3]> = Arc::default();
        let store = Ahead::default();
        let begin = |name: &str| {
            let (send, coming) = mpsc::channel();
            send.send(Ok(Block::new(name, &counts))).unwrap();
            Ok(coming)
        };
        for _ in 0..count {
            for i in (0..10).chain((0..10).rev()) {
                let name = format!("blocks.{i}.");
                let block = store.segment(&name, ahead, begin).unwrap();
                assert_eq!(block.0, name);
            }
        }
        drop(store);
        [counts[MOST].load(Ordering::SeqCst), counts[BROUGHT].load(Ordering::SeqCst)]
    }

    #[test]
    fn two_blocks_exist_at_most_and_hardly_one_is_brought_in_vain() {
        assert_eq!(passes(false, 5), [1, 100]);
        let [most, brought] = passes(true, 5);
        assert!(most == 2 && (100..=102).contains(&brought), "{most} {brought}");
    }

    #[test]
    fn in_an_order_that_is_told_all_but_the_first_come_ahead_and_nothing_in_vain() {
        let (names, begun) = (["a", "b", "c"], std::cell::RefCell::new(Vec::new()));
        let store = Ahead::through(names.map(String::from).to_vec());
        let begin = |name: &str| {
            begun.borrow_mut().push(name.to_string());
            let (send, coming) = mpsc::channel();
            send.send(Ok(name.to_string())).unwrap();
            Ok(coming)
        };
        for pass in 0..2 {
            for (i, name) in names.into_iter().enumerate() {
                assert_eq!(store.segment(name, true, begin).unwrap(), name);
                assert_eq!(begun.borrow().len(), 3 * pass + (i + 2).min(3));
            }
        }
    }

    #[test]
    fn what_fails_on_its_way_fails_when_it_is_asked_for() {
        let store = Ahead::<u8>::default();
        let said = store.segment("a", true, |_| Ok(mpsc::channel().1)).unwrap_err().to_string();
        assert!(said.contains("`a*`"), "{said}");
        let refuse = |_: &str| {
            let (send, coming) = mpsc::channel();
            send.send(Err(Error::Misuse("no such file".into()))).unwrap();
            Ok(coming)
        };
        assert!(store.segment("a", true, refuse).unwrap_err().to_string().contains("no such file"));
    }
}
