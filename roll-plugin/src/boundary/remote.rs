//! The macro [`remote!`], the one declaration of a trait at the boundary, from which both sides follow; and the types
//! that may be arguments and results of its methods ([`Argument`], [`Answer`]). P1 to P9 are the numbers of the
//! contract in [`crate::abi`].

use std::ops::Range;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use super::message::{Answer, Incoming, put_list, take_lent_list};
use super::tensor;
use crate::{
    Adapter, ClipUse, ConditionInput, Conditioning, Distribution, Evaluated, Generation, Grad, Headline, Message,
    Noise, Observation, OptimizerConfig, Picture, Rank, Result, Sample, Sampling, ScheduleFacts, Score, Split,
    StepReport, StrategyReport, Target, Tensor, Timestep, TokenStats, Transition, Validation, Video, VideoUnit,
    WeightPlacement, number,
};

/// Logs the error of a method that cannot return one.
pub(super) fn log(error: &crate::Error) {
    tracing::error!("{}", crate::one_line(error));
}

/// Declares the methods of a trait that cross the boundary, with the signatures of the trait. Generates both sides:
///
/// - the called side, for an object of this side: the function `answer(target, method, message)`, and `answer_shared`
///   for the methods by `&self`;
/// - the calling side, for an object of the other side: the trait, implemented for the type after `for`, whose field
///   `remote` is called.
///
/// ```ignore
/// remote! {
///     trait Environment for RemoteEnvironment {
///         fn reset(&mut self, seed: u64) -> Result<Observation>;
///         fn enter(&mut self, split: Split, number: u64) -> Result<()> { Ok(()) }
///         fn instructions(&self) -> String { String::new() }
///         fn encode(&mut self, text: &str) -> Result<Tensor>, then shaped(text);
///         fn schedule(&self) -> ScheduleFacts else { NO_SCHEDULE };
///     }
///     by hand others {
///         fn name(&self) -> &str { &self.name }
///     }
/// }
/// ```
///
/// A method that returns [`Result`]:
///
/// - with `{ E }`: if the other side has no such method, the result is E, the default of the trait.
/// - without `{ E }`: a missing method is an error, which names the method and the plugin.
///
/// A method that returns no [`Result`] has one of two forms:
///
/// - `{ E }`: the result is E if the other side has no such method, or if the call fails. Only the failure is logged.
/// - `else { E }`: the other side must have the method. The result is E if it is missing or the call fails; both are
///   logged.
///
/// Further forms:
///
/// - `, then f(arguments)`: `self.f(answer, arguments)` checks the answer of the other side.
/// - `by hand f { ... }`: methods of the trait that are written by hand. On the called side, `f(target, method,
///   message)` answers them. The braces have the methods of the calling side.
///
/// Arguments are [`Argument`]s and results are [`Answer`]s: facts as JSON, tensors by pointer, objects to call back.
macro_rules! remote {
    (
        trait $trait:ident for $remote:ident {
            $(
                fn $name:ident(& $($me:ident)+ $(, $arg:ident: $ty:ty)* $(,)?)
                    $(-> $outer:ident $(<$inner:ty>)?)?
                    $(, then $then:ident($($with:ident),*))?
                    $({ $default:expr })?
                    $(else { $fallback:expr })?
                    $(;)?
            )*
        }
        $(by hand $($others:ident)? { $($hand:tt)* })?
    ) => {
        /// Answers a call of the other side.
        // Unused for communicators and sinks, which are shared. `Named` has type parameters with the names of
        // arguments.
        #[allow(dead_code, non_camel_case_types)]
        pub(super) fn answer(
            target: &mut (dyn $trait + '_),
            method: &str,
            message: &$crate::boundary::message::Incoming,
        ) -> $crate::boundary::object::Answered {
            $( remote! { @exclusive [$($me)+] target, method, message, $name($($arg: $ty),*)
                [$($outer $(<$inner>)?)?] } )*
            match answer_shared(target, method, message)? {
                Some(answer) => Ok(Some(answer)),
                None => remote!(@others [$($($others)?)?] target, method, message),
            }
        }

        /// Answers a call of a method by `&self`. Several threads may call it at once.
        #[allow(non_camel_case_types)]
        pub(super) fn answer_shared(
            target: &(dyn $trait + '_),
            method: &str,
            message: &$crate::boundary::message::Incoming,
        ) -> $crate::boundary::object::Answered {
            $( remote! { @shared [$($me)+] target, method, message, $name($($arg: $ty),*)
                [$($outer $(<$inner>)?)?] } )*
            let _ = (target, method, message);
            Ok(None)
        }

        impl $trait for $remote {
            $( remote! { @method [$($me)+] $name($($arg: $ty),*) [$($outer $(<$inner>)?)?] [$($then($($with),*))?]
                [$($default)?] [$($fallback)?] } )*
            $($($hand)*)?
        }
    };

    (@others [] $target:ident, $method:ident, $message:ident) => { Ok(None) };
    (@others [$others:ident] $target:ident, $method:ident, $message:ident) => { $others($target, $method, $message) };

    // The called side. `answer` has the methods by `&mut self`, and `answer_shared` those by `&self`.
    (@exclusive [$self:ident] $($rest:tt)*) => {};
    (@exclusive [mut $self:ident] $($rest:tt)*) => { remote! { @answer $($rest)* } };
    (@shared [mut $self:ident] $($rest:tt)*) => {};
    (@shared [$self:ident] $($rest:tt)*) => { remote! { @answer $($rest)* } };
    (@answer $target:ident, $method:ident, $message:ident, $name:ident($($arg:ident: $ty:ty),*) $ret:tt) => {
        if $method == stringify!($name) {
            /// The arguments by name, each of a type of its own.
            #[derive(serde::Deserialize)]
            struct Named<$($arg),*> {
                $($arg: $arg),*
            }
            let named = $message.read::<Named<$(<$ty as $crate::boundary::remote::Argument>::Received),*>>();
            let Named { $($arg),* } = named?;
            $( #[allow(unused_mut)] let mut $arg = <$ty as $crate::boundary::remote::Argument>::open($arg)?; )*
            let result = $target.$name($( <$ty as $crate::boundary::remote::Argument>::borrow(&mut $arg) ),*);
            let result = remote!(@fallible $ret result);
            let result = $crate::boundary::message::Answer::give(result);
            return $crate::boundary::message::Outgoing::of(&result).map(Some);
        }
    };
    // The result of the method: an error leaves the generated function.
    (@fallible [Result<$inner:ty>] $result:ident) => { $result? };
    (@fallible $ret:tt $result:ident) => { $result };

    // The calling side. Hygiene requires `self` to be passed to the inner rules.
    (@method [mut $self:ident] $name:ident($($arg:ident: $ty:ty),*) $ret:tt $($rest:tt)*) => {
        fn $name(&mut $self, $($arg: $ty),*) -> remote!(@type $ret) {
            remote!(@call $self, $name($($arg),*) $ret $($rest)*)
        }
    };
    (@method [$self:ident] $name:ident($($arg:ident: $ty:ty),*) $ret:tt $($rest:tt)*) => {
        fn $name(&$self, $($arg: $ty),*) -> remote!(@type $ret) {
            remote!(@call $self, $name($($arg),*) $ret $($rest)*)
        }
    };
    // A method that returns `Result`.
    (@call $self:ident, $name:ident($($arg:ident),*) [Result<$inner:ty>] $then:tt [$($default:expr)?] []) => {
        match remote!(@ask $self, $name($($arg),*) $inner) {
            Ok(Some(answer)) => remote!(@then $then $self, $name, answer),
            Ok(None) => remote!(@absent $self, $name, [$($default)?]),
            Err(error) => Err(error),
        }
    };
    // A method that returns no `Result`, with `{ E }`.
    (@call $self:ident, $name:ident($($arg:ident),*) $ret:tt $then:tt [$default:expr] []) => {{
        let asked = remote!(@ask $self, $name($($arg),*) remote!(@type $ret));
        let answer: $crate::Result<remote!(@type $ret)> = match asked {
            Ok(Some(answer)) => remote!(@then $then $self, $name, answer),
            Ok(None) => Ok($default),
            Err(error) => Err(error),
        };
        remote!(@logged answer, $default)
    }};
    // A method that returns no `Result`, with `else { E }`.
    (@call $self:ident, $name:ident($($arg:ident),*) $ret:tt $then:tt [] [$fallback:expr]) => {{
        let asked = remote!(@ask $self, $name($($arg),*) remote!(@type $ret));
        let answer: $crate::Result<remote!(@type $ret)> = match asked {
            Ok(Some(answer)) => remote!(@then $then $self, $name, answer),
            Ok(None) => Err($self.remote.lacks(stringify!($name))),
            Err(error) => Err(error),
        };
        remote!(@logged answer, $fallback)
    }};
    (@ask $self:ident, $name:ident($($arg:ident),*) $answer:ty) => {{
        // Loans live to the end of the call.
        $( let $arg = $crate::boundary::remote::Argument::lend($arg); )*
        $self.remote.ask::<$answer>(
            stringify!($name),
            &[$( (stringify!($arg), &$arg as &dyn $crate::boundary::message::Write) ),*],
        )
    }};
    (@then [] $self:ident, $name:ident, $answer:ident) => { Ok($answer) };
    (@then [$then:ident($($with:ident),*)] $self:ident, $name:ident, $answer:ident) => {
        $self.remote.blame(stringify!($name), $self.$then($answer $(, $with)*))
    };
    (@absent $self:ident, $name:ident, []) => { Err($self.remote.lacks(stringify!($name))) };
    (@absent $self:ident, $name:ident, [$default:expr]) => { $default };
    (@logged $answer:ident, $default:expr) => {
        $answer.unwrap_or_else(|error| {
            $crate::boundary::remote::log(&error);
            $default
        })
    };
    (@type []) => { () };
    (@type [Result<$inner:ty>]) => { $crate::Result<$inner> };
    (@type [$outer:ident $(<$inner:ty>)?]) => { $outer $(<$inner>)? };
}
pub(super) use remote;

/// A value that crosses as JSON, with its tensors next to the JSON.
pub(super) trait Fact: Serialize + DeserializeOwned + 'static {}

macro_rules! facts {
    ($($ty:ty),* $(,)?) => { $( impl Fact for $ty {} )* };
}

facts! {
    (), bool, u32, u64, usize, f64, String, (String, f64), serde_json::Value,
    ClipUse, ConditionInput, Conditioning, Distribution, Evaluated, Generation, Headline, Message, Noise,
    Observation, OptimizerConfig, Picture, Sample, Sampling, ScheduleFacts, Score, StepReport, StrategyReport, Target,
    Tensor, TokenStats, Transition, Validation, Video, VideoUnit, WeightPlacement,
}
impl<T: Fact> Fact for Option<T> {}
impl<T: Fact> Fact for Vec<T> {}
impl<T: Fact> Fact for std::collections::BTreeMap<String, T> {}

/// An argument of a method, of the type that the trait writes (`&Video`, `Grad`). It is lent for the call (P1).
pub(super) trait Argument: Sized {
    /// Calling side: the value that is written. It lives until the call is over.
    type Lent: Serialize;
    /// Called side: the value that is read.
    type Received: DeserializeOwned;
    /// Called side: the owner of what the method's argument refers to.
    type Opened;
    /// Called side: the method's argument.
    type Borrowed<'k>;

    /// Calling side: makes the value that is written.
    fn lend(self) -> Self::Lent;

    /// Called side: makes the owner from the value that is read. This may call the other side, because an object is
    /// asked for its facts.
    fn open(received: Self::Received) -> Result<Self::Opened>;

    /// Called side: makes the argument.
    fn borrow(opened: &mut Self::Opened) -> Self::Borrowed<'_>;
}

/// Arguments that are references to facts.
macro_rules! by_reference {
    ($( [$($of:tt)*] $ty:ty = $received:ty; )*) => {$(
        impl<'a, $($of)*> Argument for &'a $ty {
            type Lent = Self;
            type Received = $received;
            type Opened = $received;
            type Borrowed<'k> = &'k $ty;
            fn lend(self) -> Self {
                self
            }
            fn open(received: $received) -> Result<$received> {
                Ok(received)
            }
            fn borrow(opened: &mut $received) -> &$ty {
                opened
            }
        }
    )*};
}

by_reference! {
    [T: Fact] T = T;
    [T: Fact] [T] = Vec<T>;
    [] str = String;
}

/// Arguments that are values.
macro_rules! by_value {
    ($($ty:ty),*) => {$(
        impl Argument for $ty {
            type Lent = Self;
            type Received = Self;
            type Opened = Self;
            type Borrowed<'k> = Self;
            fn lend(self) -> Self {
                self
            }
            fn open(received: Self) -> Result<Self> {
                Ok(received)
            }
            fn borrow(opened: &mut Self) -> Self {
                opened.clone()
            }
        }
    )*};
}

by_value!(bool, u64, usize, Adapter, Duration, Grad, Range<usize>, Rank, Split, Timestep);

/// A number that may be NaN or infinite, which JSON has no form for.
#[derive(Serialize, Deserialize)]
pub(super) struct Number(#[serde(with = "number")] pub(super) f64);

impl Argument for f64 {
    type Lent = Number;
    type Received = Number;
    type Opened = f64;
    type Borrowed<'k> = f64;
    fn lend(self) -> Number {
        Number(self)
    }
    fn open(received: Number) -> Result<f64> {
        Ok(received.0)
    }
    fn borrow(opened: &mut f64) -> f64 {
        *opened
    }
}

impl Argument for Option<&str> {
    type Lent = Self;
    type Received = Option<String>;
    type Opened = Option<String>;
    type Borrowed<'k> = Option<&'k str>;
    fn lend(self) -> Self {
        self
    }
    fn open(received: Option<String>) -> Result<Option<String>> {
        Ok(received)
    }
    fn borrow(opened: &mut Option<String>) -> Option<&str> {
        opened.as_deref()
    }
}

/// A list of the calling side, which the callee reads or fills in.
pub(super) struct LentList {
    data: *mut f32,
    /// `[length]`. The message points to this shape.
    shape: [usize; 1],
}

impl Serialize for LentList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let number = put_list(tensor::lent_list(self.data, &self.shape)).map_err(ser::Error::custom)?;
        serializer.serialize_u64(number as u64)
    }
}

/// A list that the calling side lends to this one.
pub(super) struct ReceivedList {
    data: *mut f32,
    len: usize,
}

impl<'de> Deserialize<'de> for ReceivedList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (data, len) = take_lent_list(usize::deserialize(deserializer)?).map_err(de::Error::custom)?;
        Ok(Self { data, len })
    }
}

impl Argument for &[f32] {
    type Lent = LentList;
    type Received = ReceivedList;
    type Opened = ReceivedList;
    type Borrowed<'k> = &'k [f32];
    fn lend(self) -> LentList {
        LentList { data: self.as_ptr().cast_mut(), shape: [self.len()] }
    }
    fn open(received: ReceivedList) -> Result<ReceivedList> {
        Ok(received)
    }
    fn borrow(opened: &mut ReceivedList) -> &[f32] {
        // SAFETY: P1 and P9: checked when it was read, and alive during the call.
        unsafe { std::slice::from_raw_parts(opened.data, opened.len) }
    }
}

impl Argument for &mut [f32] {
    type Lent = LentList;
    type Received = ReceivedList;
    type Opened = ReceivedList;
    type Borrowed<'k> = &'k mut [f32];
    fn lend(self) -> LentList {
        LentList { data: self.as_mut_ptr(), shape: [self.len()] }
    }
    fn open(received: ReceivedList) -> Result<ReceivedList> {
        Ok(received)
    }
    fn borrow(opened: &mut ReceivedList) -> &mut [f32] {
        // SAFETY: P1 and P9: checked when it was read. `take_lent_list` took it out of the message, so that there is
        // no other reference to it.
        unsafe { std::slice::from_raw_parts_mut(opened.data, opened.len) }
    }
}

impl<T: Fact> Answer for T {
    fn give(self) -> impl Serialize {
        self
    }
    fn take(message: &Incoming) -> Result<Self> {
        message.read()
    }
}
