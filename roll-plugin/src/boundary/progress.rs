//! [`Progress`] across the boundary. P4 is a number of the contract in [`crate::abi`].

use super::object::{Loan, Remote};
use super::remote::{Argument, remote};
use crate::{Progress, Result};

remote! {
    trait Progress for RemoteProgress {
        fn phase(&self, phase: &str) else { () };
        fn interrupted(&self) -> bool { false }
    }
}

/// A [`Progress`] of the other side.
pub(super) struct RemoteProgress {
    pub(super) remote: Remote,
}

// SAFETY: P4: several threads may call it.
unsafe impl Sync for RemoteProgress {}

impl<'a> Argument for &'a (dyn Progress + 'a) {
    type Lent = Loan<'a>;
    type Received = Remote;
    type Opened = RemoteProgress;
    type Borrowed<'k> = &'k dyn Progress;
    fn lend(self) -> Loan<'a> {
        Loan::shared(move |method, message| answer_shared(self, method, message))
    }
    fn open(received: Remote) -> Result<RemoteProgress> {
        Ok(RemoteProgress { remote: received })
    }
    fn borrow(opened: &mut RemoteProgress) -> &dyn Progress {
        opened
    }
}
