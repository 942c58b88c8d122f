//! What the methods of the traits take and give, and how it looks on the wire.

use super::source::Source;
use crate::Result;

/// What a method takes, as the trait writes it (`&Video`, `Grad`), on its way across. It is lent for the call (P1).
pub(super) trait Argument: Sized {
    /// As `roll-abi` writes it.
    type Wire: Copy;
    /// The calling side: keeps alive what the wire form points into.
    type Lent;
    /// The called side: what the argument is made of.
    type Kept;
    /// The argument, for the time of the call.
    type Given<'k>;

    fn lend(self) -> Self::Lent;

    /// May point into `lent`, which then stays where it is until the call is over.
    fn wire(lent: &mut Self::Lent) -> Self::Wire;

    /// # Safety
    /// P1 and P9; what is kept ends with the call.
    unsafe fn keep(wire: Self::Wire) -> Result<Self::Kept>;

    fn given(kept: &mut Self::Kept) -> Self::Given<'_>;
}

/// What a method gives, on its way back: it belongs to the caller (P2).
pub(super) trait Answer: Sized {
    /// As `roll-abi` writes it.
    type Wire: Default;

    fn give(self) -> Self::Wire;

    /// # Safety
    /// P2: it is ours, and taken once.
    unsafe fn take(wire: Self::Wire, source: &Source) -> Result<Self>;
}
