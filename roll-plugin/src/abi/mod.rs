//! The types that cross the boundary between `roll` and its plugins, and the contract that both sides keep.
//!
//! A call is data: the name of a method, its arguments as JSON, and next to the JSON the tensors and objects that it
//! refers to by number. Five types carry a call, all `#[repr(C)]` and made of numbers, pointers and `extern "C"`
//! functions, so that a plugin may be written in any language; `roll-plugin/include/roll_plugin.h` declares the same
//! types in C. An author of a Rust plugin does not see this module: `boundary` turns calls into traits and traits into
//! calls.
//!
//! A plugin is a shared library with up to three symbols: `roll_plugin_abi` ([`RollAbi`]), `roll_plugin_call`
//! ([`CallFn`]), and `roll_plugin_types` of Rust plugins (`StableTypes`, feature `abi_stable`). The loader looks at the
//! file, then at the version, then at the types, and only then calls anything. The library is itself an object: it
//! answers `describe`, `make` and `plan`.
//!
//! A text crosses as a pointer and a length, which are lent for the call (P1, P9):
//!
//! ```
//! use roll_plugin::abi::RollStr;
//!
//! let name = String::from("sharpness");
//! let lent = RollStr { data: name.as_ptr(), len: name.len() };
//!
//! // SAFETY: `name` lives longer than `lent`.
//! let bytes = unsafe { std::slice::from_raw_parts(lent.data, lent.len) };
//! assert_eq!(bytes, name.as_bytes());
//! ```
//!
//! # The contract
//!
//! Comments about safety refer to its items by number.
//!
//! - **P1, lent.** Arguments are lent for the call: the method's name, the message, its tensors, and its objects
//!   without `release`. To keep a tensor, call its `retain`, or copy it if that is null. A method that fills a list in
//!   gets it as a tensor and writes to its `data`; nothing else refers to these bytes during the call.
//! - **P2, owned.** An answer belongs to the caller. The caller calls `release` of each tensor and object of the answer
//!   once, and then `release` of the answer itself, which frees the text and the two lists. An object with `release` in
//!   the arguments belongs to the callee, whatever the call returns. A null `release` means that there is nothing to
//!   free. `release` may be called on any thread.
//! - **P3, permanent.** The library is never unloaded. The object `host` of `describe` lives as long as the process.
//! - **P4, threads.** An object is called by one thread at a time, not always the same one. The library itself, the
//!   host, communicators, gradient sinks and progress may be called by several threads at once.
//! - **P5, panics.** No panic, exception or `longjmp` crosses. If the code of an object panics, its side answers that
//!   call and every later call of the object with an error. A gradient sink counts as a part of the object that gave
//!   it away: if the sink panics, that object has panicked, too.
//! - **P6, growth.** Types keep their layout as long as the major version is the same. Minor versions add methods, and
//!   fields of arguments and answers: a missing field has its default, an unknown field is ignored, and an unknown
//!   method is answered with [`NO_METHOD`]. The caller then takes the default of the trait, or fails if the trait has
//!   none. A new argument of a method is an `Option`, so that it may be missing.
//! - **P7, answers.** A call that returns [`OK`] has filled in `answer`. One that returns [`NO_METHOD`] has left
//!   `answer` as it was. Any other number means that `answer` is filled in with an error: `{"fault": "user",
//!   "messages": ["...", "..."]}`, the outermost message first. The fault is `user`, `failure`, `interrupt` or
//!   `nothing`. The fault `nothing` means that there is nothing to score, which concerns one sample and not the run.
//! - **P8, kinds.** The field of a message that refers to an object determines the methods that the object answers: a
//!   `model` answers those of a model.
//! - **P9, values.** Texts are UTF-8 without a final zero, and bodies are JSON. A number in JSON that is not finite is
//!   the text `NaN`, `inf` or `-inf`. A tensor or object is written as its number in the list of the message, or as
//!   `null` if it is missing. A list of length 0 may have any pointer; others are aligned and hold the stated number of
//!   items.
#![allow(missing_docs)] // the header documents each field

#[cfg(feature = "abi_stable")]
mod stable;

use std::ffi::c_void;

#[cfg(feature = "abi_stable")]
pub use stable::StableTypes;

/// The data symbol `roll_plugin_abi`: read before any code of the plugin is called.
#[repr(C)]
#[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
#[derive(Clone, Copy)]
pub struct RollAbi {
    pub magic: [u8; 8],
    pub major: u32,
    pub minor: u32,
}

/// UTF-8 text without a final zero.
#[repr(C)]
#[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
#[derive(Clone, Copy)]
pub struct RollStr {
    pub data: *const u8,
    pub len: usize,
}

/// A dense, row-major array.
#[repr(C)]
#[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
#[derive(Clone, Copy)]
pub struct RollTensor {
    pub data: *mut u8,
    pub bytes: usize,
    pub shape: *const usize,
    pub rank: usize,
    /// 0 f32, 1 bf16, 2 f16, 3 i64, 4 i32, 5 u8, 6 bool.
    pub dtype: u32,
    pub owner: *mut c_void,
    /// Adds an owner. Null: the bytes can only be copied.
    // No type alias for these functions, because `abi_stable` understands only function pointers that are written out.
    pub retain: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
}

/// An object of either side: its state, the function that answers its methods, and how to release it. A null `release`
/// means that it is lent for the call.
#[repr(C)]
#[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
#[derive(Clone, Copy)]
pub struct RollObject {
    pub state: *mut c_void,
    // `abi_stable` gets `*const c_void` for messages: a message holds objects, and descriptions of types must not be
    // circular.
    #[cfg_attr(feature = "abi_stable", sabi(unsafe_change_type = Option<
        unsafe extern "C" fn(
            state: *mut c_void,
            method: RollStr,
            arguments: *const c_void,
            answer: *mut c_void,
        ) -> u32,
    >))]
    pub call: Option<
        unsafe extern "C" fn(
            state: *mut c_void,
            method: RollStr,
            arguments: *const RollMessage,
            answer: *mut RollMessage,
        ) -> u32,
    >,
    pub release: Option<unsafe extern "C" fn(state: *mut c_void)>,
}

/// Arguments or an answer.
#[repr(C)]
#[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
#[derive(Clone, Copy)]
pub struct RollMessage {
    /// JSON: an object with the arguments by name, or the answer.
    pub body: RollStr,
    pub tensors: *const RollTensor,
    pub tensor_count: usize,
    pub objects: *const RollObject,
    pub object_count: usize,
    pub owner: *mut c_void,
    /// Frees the text and the lists, but not the tensors and objects in them.
    pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
}

/// The symbol `roll_plugin_call`, which answers the methods of the library as [`RollObject::call`] those of an object.
/// `state` is null.
pub type CallFn = unsafe extern "C" fn(
    state: *mut c_void,
    method: RollStr,
    arguments: *const RollMessage,
    answer: *mut RollMessage,
) -> u32;

/// Major and minor version of the boundary, the same as those of this crate.
pub const ABI_VERSION: [u32; 2] = [number(env!("CARGO_PKG_VERSION_MAJOR")), number(env!("CARGO_PKG_VERSION_MINOR"))];

/// The beginning of the symbol `roll_plugin_abi`.
pub const MAGIC: [u8; 8] = *b"ROLLPLUG";

/// Success of a call.
pub const OK: u32 = 0;
/// The answer is an error: any number other than [`OK`] and [`NO_METHOD`] means the same.
pub const FAILED: u32 = 1;
/// The object has no such method.
pub const NO_METHOD: u32 = 2;

impl RollAbi {
    pub const CURRENT: Self = Self { magic: MAGIC, major: ABI_VERSION[0], minor: ABI_VERSION[1] };
}

impl RollStr {
    pub const fn lend(text: &str) -> Self {
        Self { data: text.as_ptr(), len: text.len() }
    }
}

impl RollMessage {
    /// A message without contents, which a caller passes for the answer to be filled in.
    pub const fn empty() -> Self {
        Self {
            body: RollStr { data: std::ptr::null(), len: 0 },
            tensors: std::ptr::null(),
            tensor_count: 0,
            objects: std::ptr::null(),
            object_count: 0,
            owner: std::ptr::null_mut(),
            release: None,
        }
    }
}

/// Parses a number, which `str::parse` cannot do in a constant.
const fn number(digits: &str) -> u32 {
    let (digits, mut at, mut number) = (digits.as_bytes(), 0, 0);
    while at < digits.len() {
        number = 10 * number + (digits[at] - b'0') as u32;
        at += 1;
    }
    number
}
