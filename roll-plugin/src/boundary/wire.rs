//! Operands and results of the traits' methods, and how they look on the wire.

use std::borrow::Borrow;

use super::source::Source;
use crate::Result;

/// An operand of a method, as the trait writes it (`&Video`, `Grad`), on its way across. It is lent for the call (P1).
pub(super) trait Argument: Sized {
    /// As `abi` writes it.
    type Wire: Copy;
    /// The calling side: owner of the memory that the wire form points into.
    type Lent;
    /// The called side: the form that the argument is made of.
    type Kept;
    /// The argument, for the time of the call.
    type Given<'k>;

    fn lend(self) -> Self::Lent;

    /// May point into `lent`, which then stays where it is until the call is over.
    fn wire(lent: &mut Self::Lent) -> Self::Wire;

    /// # Safety
    /// P1 and P9; the kept value ends with the call.
    unsafe fn keep(wire: Self::Wire) -> Result<Self::Kept>;

    fn given(kept: &mut Self::Kept) -> Self::Given<'_>;
}

/// An operand taken by reference: an [`Argument`] of which the called side makes one of its own.
pub(super) trait Lend: 'static {
    /// As [`Argument::Wire`].
    type Wire: Copy;
    /// As [`Argument::Lent`].
    type Lent;
    /// As [`Argument::Kept`].
    type Kept: Borrow<Self>;

    fn lend(&self) -> Self::Lent;

    /// As [`Argument::wire`].
    fn wire(lent: &mut Self::Lent) -> Self::Wire;

    /// # Safety
    /// As [`Argument::keep`].
    unsafe fn keep(wire: Self::Wire) -> Result<Self::Kept>;
}

impl<T: Lend + ?Sized> Argument for &T {
    type Wire = T::Wire;
    type Lent = T::Lent;
    type Kept = T::Kept;
    type Given<'k> = &'k T;
    fn lend(self) -> T::Lent {
        T::lend(self)
    }
    fn wire(lent: &mut T::Lent) -> T::Wire {
        T::wire(lent)
    }
    unsafe fn keep(wire: T::Wire) -> Result<T::Kept> {
        // SAFETY: as the caller promises.
        unsafe { T::keep(wire) }
    }
    fn given(kept: &mut T::Kept) -> &T {
        (*kept).borrow()
    }
}

/// The result of a method, on its way back: it belongs to the caller (P2).
pub(super) trait Answer: Sized {
    /// As `abi` writes it.
    type Wire: Default;

    fn give(self) -> Self::Wire;

    /// # Safety
    /// P2: it is ours, and taken once.
    unsafe fn take(wire: Self::Wire, source: &Source) -> Result<Self>;
}
