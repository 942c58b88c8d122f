//! Fetching the next segment while the network computes with the current one.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, MutexGuard, PoisonError};

use roll_core::{Error, Result};

/// A segment on its way: it arrives, or an error does.
pub type Coming<T> = Receiver<Result<T>>;

/// Fetches segments one ahead of their use. Two exist at a time: the one that is computed with and the one on its way.
///
/// The next segment is guessed: the one that followed the same two last time. A wrong guess costs one needless fetch.
/// Where the order is told, nothing is guessed, and nothing fetched behind its end.
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
    /// For a network that goes through these segments from the first to the last.
    pub fn through(order: Vec<String>) -> Self {
        Self { order: Some(order), ..Self::default() }
    }

    /// The segment `name`, which was on its way or is fetched now; `begin` starts a fetch. Then the fetch of the next
    /// segment is started, if `begins_next`.
    pub fn segment(&self, name: &str, begins_next: bool, begin: impl Fn(&str) -> Result<Coming<T>>) -> Result<T> {
        let mut state = self.lock();
        let segment = match state.coming.take() {
            Some((guess, coming)) if guess == name => arrived(name, coming)?,
            wrong => {
                // It must be gone before the right one comes. Its error, if any, does not matter: it was not asked for.
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

    /// A guess that was lost with a panic is only a guess.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn arrived<T>(name: &str, coming: Coming<T>) -> Result<T> {
    coming.recv().unwrap_or_else(|_| Err(Error::Misuse(format!("bringing the weights `{name}*` was given up"))))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use super::*;

    /// Counts how many of its kind exist.
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

    /// Passes over ten blocks, forth and back; gives the most blocks at once, and how many were brought.
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
