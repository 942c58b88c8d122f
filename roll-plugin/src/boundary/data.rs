//! Numbers, texts and lists across the boundary: [`Argument`]s and [`Answer`]s.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::abi::{
    RollList, RollListMut, RollModelFacts, RollNamedNumber, RollObject, RollOwned, RollParts, RollRange, RollRanks,
    RollStr,
};

use super::memory::{list, own, own_text, slice, take, take_text, text};
use super::source::Source;
use super::wire::{Answer, Argument};
use crate::{
    Adapter, Distribution, Error, Grad, Headline, Observation, Rank, Result, Split, Timestep, WeightPlacement,
};

/// Types whose C form is a plain value, with the conversions in both directions.
macro_rules! plain {
    ($( $ty:ty = $wire:ty: |$value:ident| $to:expr, |$number:ident| $from:expr; )*) => {$(
        impl Argument for $ty {
            type Wire = $wire;
            type Lent = $wire;
            type Received = $wire;
            type Borrowed<'k> = $ty;
            fn lend(self) -> $wire {
                let $value = self;
                $to
            }
            fn wire(lent: &mut $wire) -> $wire {
                *lent
            }
            unsafe fn receive(wire: $wire) -> Result<$wire> {
                Ok(wire)
            }
            fn borrow($number: &mut $wire) -> $ty {
                let $number = *$number;
                $from
            }
        }
        impl Answer for $ty {
            type Wire = $wire;
            fn give(self) -> $wire {
                let $value = self;
                $to
            }
            unsafe fn take($number: $wire, _: &Source) -> Result<$ty> {
                Ok($from)
            }
        }
    )*};
}

plain! {
    f64 = f64: |v| v, |n| n;
    u64 = u64: |v| v, |n| n;
    usize = usize: |v| v, |n| n;
    bool = u32: |v| v.into(), |n| n == 1;
    Grad = u32: |v| v.is_on().into(), |n| if n == 1 { Grad::Record } else { Grad::Skip };
    Adapter = u32: |v| ADAPTERS.iter().position(|a| *a == v).unwrap_or_default() as u32,
        |n| ADAPTERS.get(n as usize).copied().unwrap_or(Adapter::Off);
    Split = u32: |v| (v == Split::Validation).into(), |n| if n == 1 { Split::Validation } else { Split::Train };
    Timestep = f64: |v| v.0, |n| Timestep(n);
    Rank = usize: |v| v.0, |n| Rank(n);
    Range<usize> = RollRange: |v| RollRange { start: v.start, end: v.end }, |n| n.start..n.end;
    Duration = f64: |v| v.as_secs_f64(), |n| Duration::try_from_secs_f64(n).unwrap_or(Duration::MAX);
    Option<bool> = u32: |v| v.map_or(2, u32::from), |n| [Some(false), Some(true)].get(n as usize).copied().flatten();
    Option<WeightPlacement> = usize: |v| placement_number(v), |n| placement(n);
}

/// Ranks that shard tokens do not cross: a plugin has no ranks for its model.
impl Answer for Distribution {
    type Wire = usize;
    fn give(self) -> usize {
        placement_number(self.weights)
    }
    unsafe fn take(wire: usize, _: &Source) -> Result<Self> {
        Ok(Self { weights: placement(wire), ..Self::default() })
    }
}

impl Answer for () {
    type Wire = ();
    fn give(self) {}
    unsafe fn take((): (), _: &Source) -> Result<()> {
        Ok(())
    }
}

const PLACEMENTS: [WeightPlacement; 3] =
    [WeightPlacement::Resident, WeightPlacement::Streamed, WeightPlacement::Sharded];

/// Adapters by number. A plugin that does not know 2 treats it as 0.
const ADAPTERS: [Adapter; 3] = [Adapter::Off, Adapter::On, Adapter::Start];

/// 0: the other side decides.
pub(super) fn placement_number(placement: Option<WeightPlacement>) -> usize {
    placement.and_then(|own| PLACEMENTS.iter().position(|p| *p == own)).map_or(0, |at| at + 1)
}

/// An unknown placement counts as no placement: it is a preference.
pub(super) fn placement(number: usize) -> Option<WeightPlacement> {
    PLACEMENTS.get(number.wrapping_sub(1)).copied()
}

/// An empty text represents `None`.
impl<'a> Argument for Option<&'a str> {
    type Wire = RollStr;
    type Lent = &'a str;
    type Received = &'static str;
    type Borrowed<'k> = Option<&'k str>;
    fn lend(self) -> &'a str {
        self.unwrap_or_default()
    }
    fn wire(lent: &mut &'a str) -> RollStr {
        RollStr::lend(lent)
    }
    unsafe fn receive(wire: RollStr) -> Result<&'static str> {
        // SAFETY: as the caller promises; `borrow` shortens the life to that of the call.
        unsafe { text(wire) }
    }
    fn borrow<'k>(received: &'k mut &'static str) -> Option<&'k str> {
        Some(&**received).filter(|text| !text.is_empty())
    }
}

/// References whose C form points into the caller's memory.
macro_rules! borrowed {
    ($($of:ty = $wire:ty: $lend:expr, $receive:expr;)*) => {$(
        impl<'a> Argument for &'a $of {
            type Wire = $wire;
            type Lent = &'a $of;
            type Received = &'static $of;
            type Borrowed<'k> = &'k $of;
            fn lend(self) -> &'a $of {
                self
            }
            fn wire(lent: &mut &'a $of) -> $wire {
                $lend(lent)
            }
            unsafe fn receive(wire: $wire) -> Result<&'static $of> {
                // SAFETY: as the caller promises; `borrow` shortens the life to that of the call.
                unsafe { $receive(wire) }
            }
            fn borrow<'k>(received: &'k mut &'static $of) -> &'k $of {
                received
            }
        }
    )*};
}

borrowed! {
    str = RollStr: RollStr::lend, text;
    [f32] = RollList<f32>: RollList::lend, list;
    [u32] = RollList<u32>: RollList::lend, list;
}

impl<'a> Argument for &'a mut [f32] {
    type Wire = RollListMut<f32>;
    type Lent = &'a mut [f32];
    type Received = &'static mut [f32];
    type Borrowed<'k> = &'k mut [f32];
    fn lend(self) -> &'a mut [f32] {
        self
    }
    fn wire(lent: &mut &'a mut [f32]) -> RollListMut<f32> {
        RollListMut::lend(lent)
    }
    unsafe fn receive(wire: RollListMut<f32>) -> Result<&'static mut [f32]> {
        // SAFETY: P1: no other reference exists to memory that is lent for writing; the check is that of reading.
        unsafe {
            match slice(wire.items.cast_const(), wire.len)?.len() {
                0 => Ok(&mut []),
                len => Ok(std::slice::from_raw_parts_mut(wire.items, len)),
            }
        }
    }
    fn borrow<'k>(received: &'k mut &'static mut [f32]) -> &'k mut [f32] {
        received
    }
}

/// Answers whose C form is a text, with the conversions in both directions.
macro_rules! as_text {
    ($($ty:ty: |$value:ident| $into:expr, |$text:ident| $from:expr;)*) => {$(
        impl Answer for $ty {
            type Wire = RollOwned<u8>;
            fn give(self) -> RollOwned<u8> {
                let $value = self;
                own_text($into)
            }
            unsafe fn take(wire: RollOwned<u8>, _: &Source) -> Result<$ty> {
                // SAFETY: as the caller promises.
                let $text = unsafe { take_text(wire) }?;
                Ok($from)
            }
        }
    )*};
}

as_text! {
    String: |v| v, |text| text;
    Observation: |v| v.text, |text| Observation { text };
    // An empty text represents `None`.
    Option<String>: |v| v.unwrap_or_default(), |text| Some(text).filter(|text| !text.is_empty());
}

impl Answer for Vec<u32> {
    type Wire = RollOwned<u32>;
    fn give(self) -> RollOwned<u32> {
        own(self, ())
    }
    unsafe fn take(wire: RollOwned<u32>, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { take(wire, |items| Ok(items.to_vec())) }
    }
}

/// JSON.
pub(super) fn own_json<T: serde::Serialize>(value: &T) -> RollOwned<u8> {
    // All values of these types have a JSON form; an invalid text is an error where it is read.
    own_text(serde_json::to_string(value).unwrap_or_default())
}

/// # Safety
/// As [`take`].
pub(super) unsafe fn take_json<T: serde::de::DeserializeOwned>(text: RollOwned<u8>, what: &str) -> Result<T> {
    // SAFETY: as the caller promises.
    json(&unsafe { take_text(text) }?, what)
}

/// `what` with its verb, for the message: "the state of an algorithm is".
pub(super) fn json<T: serde::de::DeserializeOwned>(text: &str, what: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::Misuse(format!("{what} not JSON of the expected kind: {e}")))
}

/// Answers that cross as JSON, with their names for messages.
macro_rules! as_json {
    ($($ty:ty: $what:expr;)*) => {$(
        impl Answer for $ty {
            type Wire = RollOwned<u8>;
            fn give(self) -> RollOwned<u8> {
                own_json(&self)
            }
            unsafe fn take(wire: RollOwned<u8>, _: &Source) -> Result<$ty> {
                // SAFETY: as the caller promises.
                unsafe { take_json(wire, $what) }
            }
        }
    )*};
}

pub(super) const STATE: &str = "the state of an algorithm is";

as_json! {
    serde_json::Value: STATE;
    Vec<Headline>: "the headlines of an algorithm are";
    Vec<String>: "the kinds of an environment are";
}

impl Answer for Vec<(String, f64)> {
    type Wire = RollOwned<RollNamedNumber>;
    fn give(self) -> RollOwned<RollNamedNumber> {
        let item = |(name, value): &(String, f64)| RollNamedNumber { name: RollStr::lend(name), value: *value };
        let items = self.iter().map(item).collect();
        own(items, self)
    }
    unsafe fn take(wire: RollOwned<RollNamedNumber>, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { take_numbers(wire) }
    }
}

/// Named numbers as an owned list.
pub(super) fn own_numbers(named: BTreeMap<String, f64>) -> RollOwned<RollNamedNumber> {
    named.into_iter().collect::<Vec<_>>().give()
}

/// Reads named numbers and releases the list.
///
/// # Safety
/// As [`take`].
pub(super) unsafe fn take_numbers<T: FromIterator<(String, f64)>>(list: RollOwned<RollNamedNumber>) -> Result<T> {
    // SAFETY: as the caller promises; the names live until the list is released.
    unsafe { take(list, |items| items.iter().map(|n| Ok((text(n.name)?.to_string(), n.value))).collect()) }
}

/// Answers that need no conversion.
macro_rules! as_it_is {
    ($($ty:ty),*) => {$(
        impl Answer for $ty {
            type Wire = $ty;
            fn give(self) -> $ty {
                self
            }
            unsafe fn take(wire: $ty, _: &Source) -> Result<$ty> {
                Ok(wire)
            }
        }
    )*};
}
as_it_is!(RollObject, RollRanks, RollModelFacts, RollParts);
