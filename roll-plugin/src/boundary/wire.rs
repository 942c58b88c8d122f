//! Conversions of the arguments and results of trait methods to their C forms and back. The table of verbs is in the
//! module above.

use std::borrow::Borrow;

use super::source::Source;
use crate::Result;

/// An argument of a method, with the type that the trait writes (`&Video`, `Grad`). It is lent for the call (P1).
pub(super) trait Argument: Sized {
    /// The C type in `abi`.
    type Wire: Copy;
    /// Caller: the owner of the memory that the C form points into.
    type Lent;
    /// Callee: the Rust value that the C form is converted to.
    type Received;
    /// Callee: the argument that the method receives, borrowed from `Received`.
    type Borrowed<'k>;

    fn lend(self) -> Self::Lent;

    /// Returns the C form. It may point into `lent`, which must not move until the call is over.
    fn wire(lent: &mut Self::Lent) -> Self::Wire;

    /// # Safety
    /// P1 and P9; the received value ends with the call.
    unsafe fn receive(wire: Self::Wire) -> Result<Self::Received>;

    fn borrow(received: &mut Self::Received) -> Self::Borrowed<'_>;
}

/// An [`Argument`] passed by reference, of which the callee makes a value of its own.
pub(super) trait Lend: 'static {
    type Wire: Copy;
    type Lent;
    type Received: Borrow<Self>;

    fn lend(&self) -> Self::Lent;

    fn wire(lent: &mut Self::Lent) -> Self::Wire;

    /// # Safety
    /// As [`Argument::receive`].
    unsafe fn receive(wire: Self::Wire) -> Result<Self::Received>;
}

impl<T: Lend + ?Sized> Argument for &T {
    type Wire = T::Wire;
    type Lent = T::Lent;
    type Received = T::Received;
    type Borrowed<'k> = &'k T;
    fn lend(self) -> T::Lent {
        T::lend(self)
    }
    fn wire(lent: &mut T::Lent) -> T::Wire {
        T::wire(lent)
    }
    unsafe fn receive(wire: T::Wire) -> Result<T::Received> {
        // SAFETY: as the caller promises.
        unsafe { T::receive(wire) }
    }
    fn borrow(received: &mut T::Received) -> &T {
        (*received).borrow()
    }
}

/// The result of a method. It belongs to the caller (P2).
pub(super) trait Answer: Sized {
    /// The C type in `abi`.
    type Wire: Default;

    fn give(self) -> Self::Wire;

    /// # Safety
    /// P2: the caller owns `wire` and takes it once.
    unsafe fn take(wire: Self::Wire, source: &Source) -> Result<Self>;
}
