//! [`crossing!`] generates both directions of the methods of a trait across the boundary.
//!
//! Each operand of a method is an [`Argument`](super::wire::Argument), and its result an
//! [`Answer`](super::wire::Answer): these traits convert a type to its C form and back. A method without special
//! conversions is one line.

/// Logs the error of a method that cannot return one.
pub(super) fn log(error: &crate::Error) {
    tracing::error!("{}", crate::one_line(error));
}

/// Generates both directions of a trait: the static table whose functions call the trait (for own objects, which the
/// other side calls), and the implementation of the trait by calling such a table (for objects of the other side).
///
/// ```ignore
/// crossing! {
///     RewardScorer for ForeignReward, table RollRewardTable of Scorer {
///         mut fn prepare(reference: &Video) -> Target;
///         mut fn score(video: &Video, prompt: &str, target: &Target, grad: Grad)
///             -> (Score, Option<Pullback>), then check;
///         ref fn target_key() -> Option<String>, absent None, then key;
///         ref fn measures() -> Measure, or Measure::default(), absent Measure::default();
///     }
///     by hand [facts] {
///         fn name(&self) -> &str { &self.name }
///     }
/// }
/// ```
///
/// - `mut fn`, `ref fn`: by `&mut self` or `&self`; functions by `&self` may be called by several threads at once (P4).
/// - `-> T`: the method returns `Result<T>`; without it, `Result<()>`.
/// - `, or E`: the method returns `T` and cannot fail; if the call fails, the failure is logged and the method returns
///   `E`.
/// - `, absent E`: the method's value when the other side has no such function. Without it, a missing function is an
///   error.
/// - `, then f`: `self.f(answer, arguments...)` checks or converts the answer of the other side.
/// - `, through f` after the target: `f` converts the target to the object that has the methods (a model to a diffusion
///   model); its functions are always called by one thread at a time.
/// - `by hand [f, g] { ... }`: the functions of the table that the file defines itself, and the methods of the trait
///   that are written out.
///
/// The table literal and the trait implementation are complete: a missing function does not compile, nor does one whose
/// types differ from those of `abi`.
macro_rules! crossing {
    ($trait:ident for $foreign:ident, table $table:ident of $target:ident { $($methods:tt)* } $($hand:tt)*) => {
        crossing! { @whole $trait for $foreign, table $table of $target, [] { $($methods)* } $($hand)* }
    };
    (
        $trait:ident for $foreign:ident, table $table:ident of $target:ident, through $access:path { $($methods:tt)* }
        $($hand:tt)*
    ) => {
        crossing! { @whole $trait for $foreign, table $table of $target, [$access] { $($methods)* } $($hand)* }
    };
    (
        @whole $trait:ident for $foreign:ident, table $table:ident of $target:ident, $access:tt {
            $( $how:tt fn $name:ident($( $arg:ident: $ty:ty ),* $(,)?)
                $(-> $ret:ty)? $(, or $or:expr)? $(, absent $absent:expr)? $(, then $then:ident)?; )*
        }
        by hand [$($also:ident),*] { $($hand:tt)* }
    ) => {
        /// The functions of own objects, which the other side calls.
        pub(super) static TABLE: crate::abi::$table = {
            $(
                unsafe extern "C" fn $name(
                    state: *mut std::ffi::c_void,
                    $( $arg: <$ty as $crate::boundary::wire::Argument>::Wire, )*
                    $( out: *mut <$ret as $crate::boundary::wire::Answer>::Wire, )?
                    error: *mut crate::abi::RollError,
                ) -> u32 {
                    let out = crossing!(@or_unit $( out as $ret )?);
                    // SAFETY: P4, P7 and P8.
                    unsafe {
                        crossing!(@serve $how $access $target, state, out, error, |target| {
                            // SAFETY: P1 and P9.
                            $( let mut $arg = <$ty as $crate::boundary::wire::Argument>::receive($arg)?; )*
                            let answer = target.$name($( <$ty as $crate::boundary::wire::Argument>::borrow(&mut $arg) ),*);
                            let answer = crossing!(@fallible [$($or)?] answer);
                            Ok($crate::boundary::wire::Answer::give(answer))
                        })
                    }
                }
            )*
            crate::abi::$table {
                size: size_of::<crate::abi::$table>(),
                $( $name: Some($name), )*
                $( $also: Some($also), )*
            }
        };

        impl $trait for $foreign {
            $( crossing! { @method $how $table $name ($($arg: $ty),*) [$($ret)?] [$($or)?] [$($absent)?] [$($then)?] } )*
            $($hand)*
        }
    };

    // The methods. Hygiene requires `self` to be passed to the inner rules.
    (@method mut $table:ident $name:ident ($($arg:ident: $ty:ty),*) [$($ret:ty)?] [$($or:expr)?] $absent:tt $then:tt) => {
        fn $name(&mut self, $($arg: $ty),*) -> crossing!(@result [$($ret)?] [$($or)?]) {
            crossing!(@call self $table $name ($($arg: $ty),*) [$($ret)?] [$($or)?] $absent $then)
        }
    };
    (@method ref $table:ident $name:ident ($($arg:ident: $ty:ty),*) [$($ret:ty)?] [$($or:expr)?] $absent:tt $then:tt) => {
        fn $name(&self, $($arg: $ty),*) -> crossing!(@result [$($ret)?] [$($or)?]) {
            crossing!(@call self $table $name ($($arg: $ty),*) [$($ret)?] [$($or)?] $absent $then)
        }
    };
    (@call $self:ident $table:ident $name:ident ($($arg:ident: $ty:ty),*) [$($ret:ty)?] [$($or:expr)?] [$($absent:expr)?]
        [$($then:ident)?]) => {{
        let (object, table) = $crate::boundary::foreign::Calls::<crate::abi::$table>::callee(&*$self);
        let called = object.call(stringify!($name), table.and_then(|table| table.$name), |function, state, _out: *mut _, error| {
            $( let mut $arg = <$ty as $crate::boundary::wire::Argument>::lend($arg); )*
            // SAFETY: P1: loans live during the call; the rest was promised to `Foreign::new`.
            unsafe {
                function(
                    state,
                    $( <$ty as $crate::boundary::wire::Argument>::wire(&mut $arg), )*
                    $( _out as *mut <$ret as $crate::boundary::wire::Answer>::Wire, )?
                    error,
                )
            }
        });
        let answer: $crate::Result<crossing!(@type [$($ret)?])> =
            called.and_then(|answer| crossing!(@absent [$($absent)?] object, stringify!($name), answer));
        let answer = crossing!(@then [$($then)?] $self, object, stringify!($name), answer, $($arg),*);
        crossing!(@outcome [$($or)?] answer)
    }};

    (@or_unit) => { &raw mut *&mut () };
    (@or_unit $out:ident as $ret:ty) => { $out };
    (@type []) => { () };
    (@type [$ret:ty]) => { $ret };
    (@result [] []) => { $crate::Result<()> };
    (@result [$ret:ty] []) => { $crate::Result<$ret> };
    (@result [] [$or:expr]) => { () };
    (@result [$ret:ty] [$or:expr]) => { $ret };
    (@fallible [] $answer:ident) => { $answer? };
    (@fallible [$or:expr] $answer:ident) => { $answer };
    (@absent [] $object:ident, $name:expr, $answer:ident) => { $object.must($name, $answer) };
    (@absent [$absent:expr] $object:ident, $name:expr, $answer:ident) => { Ok($answer.unwrap_or_else(|| $absent)) };
    (@then [] $self:ident, $object:ident, $name:expr, $answer:ident, $($arg:ident),*) => { $answer };
    (@then [$then:ident] $self:ident, $object:ident, $name:expr, $answer:ident, $($arg:ident),*) => {
        $answer.and_then(|answer| $object.blame($name, $self.$then(answer, $($arg),*)))
    };
    (@outcome [] $answer:ident) => { $answer };
    (@outcome [$or:expr] $answer:ident) => {
        $answer.unwrap_or_else(|error| {
            $crate::boundary::crossing::log(&error);
            $or
        })
    };
    (@serve mut [] $target:ty, $state:ident, $out:ident, $error:ident, |$object:ident| $body:block) => {
        $crate::boundary::served::serve($state, $out, $error, |$object: &mut $target| $body)
    };
    (@serve ref [] $target:ty, $state:ident, $out:ident, $error:ident, |$object:ident| $body:block) => {
        $crate::boundary::served::serve_shared($state, $out, $error, |$object: &$target| $body)
    };
    (@serve $how:tt [$access:path] $target:ty, $state:ident, $out:ident, $error:ident, |$object:ident| $body:block) => {
        $crate::boundary::served::serve($state, $out, $error, |$object: &mut $target| {
            let $object = $access($object)?;
            $body
        })
    };
}
pub(super) use crossing;
