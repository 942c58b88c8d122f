//! The types that cross the boundary. `include/roll_plugin.h` says the same in C; a test compares the two.
//!
//! Everything is `#[repr(C)]` and made of numbers, pointers and `extern "C"` functions, so that a plugin may be written
//! in any language. Rust plugins also carry the layout of these types ([`super::layout`]), which the loader compares
//! with the host's before it calls anything.
//!
//! Ownership: arguments are lent for the call; whoever wants to keep a tensor calls its `retain`. Results belong to the
//! caller, who calls their `release`. A null `release` means that there is nothing to free.
#![allow(missing_docs)] // the header documents each field for those who write against it

use std::ffi::c_void;

use super::layout::boundary;

/// Major and minor version of these types: whoever changes one of them raises the minor, or the major when older
/// plugins cannot be recompiled unchanged. The loader wants both to be equal.
pub const ABI_VERSION: [u32; 2] = [1, 2];

/// What the symbol `roll_plugin_abi` begins with.
pub const MAGIC: [u8; 8] = *b"ROLLPLUG";

/// Success of a call; anything else means that the error was filled in.
pub const OK: u32 = 0;

pub const FAULT_USER: u32 = 1;
pub const FAULT_FAILURE: u32 = 2;
pub const FAULT_INTERRUPT: u32 = 3;

/// The dtype of a tensor that is not there.
pub const NO_TENSOR: u32 = u32::MAX;

/// Between the messages of an error's chain, outermost first: ASCII's record separator.
pub const CHAIN: char = '\u{1e}';

boundary! {
    /// The data symbol `roll_plugin_abi`: read before any code of the plugin is called.
    #[derive(Clone, Copy)]
    pub struct RollAbi {
        pub magic: [u8; 8],
        pub major: u32,
        pub minor: u32,
    }
}

impl RollAbi {
    pub const CURRENT: Self = Self { magic: MAGIC, major: ABI_VERSION[0], minor: ABI_VERSION[1] };
}

boundary! {
    /// UTF-8 text without a final zero.
    #[derive(Clone, Copy)]
    pub struct RollStr {
        pub data: *const u8,
        pub len: usize,
    }
}

boundary! {
    /// A list that its receiver releases.
    pub struct RollOwned<T> {
        pub items: *const T,
        pub len: usize,
        pub owner: *mut c_void,
        pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }
}

boundary! {
    /// A dense, row-major array.
    #[derive(Clone, Copy)]
    pub struct RollTensor {
        pub data: *const u8,
        pub bytes: usize,
        pub shape: *const usize,
        pub rank: usize,
        /// 0 f32, 1 bf16, 2 f16, 3 i64, 4 i32, 5 u8, 6 bool.
        pub dtype: u32,
        pub owner: *mut c_void,
        /// Makes one more owner. Null: the bytes can only be copied.
        pub retain: Option<unsafe extern "C" fn(owner: *mut c_void)>,
        pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }
}

boundary! {
    #[derive(Clone, Copy)]
    pub struct RollNamedTensor {
        pub name: RollStr,
        pub tensor: RollTensor,
    }
}

boundary! {
    #[derive(Clone, Copy)]
    pub struct RollNamedNumber {
        pub name: RollStr,
        pub value: f64,
    }
}

boundary! {
    pub struct RollError {
        pub fault: u32,
        pub text: RollOwned<u8>,
    }
}

boundary! {
    /// An object of either side: its state, its functions, and how to give it back. A null `release` means that it is lent
    /// for the call.
    #[derive(Clone, Copy)]
    pub struct RollObject {
        pub state: *mut c_void,
        /// The table of its kind.
        pub table: *const c_void,
        pub release: Option<unsafe extern "C" fn(state: *mut c_void)>,
    }
}

boundary! {
    /// A pullback: called at most once, then released. A null `pull` means none.
    #[derive(Clone, Copy)]
    pub struct RollPullback {
        pub state: *mut c_void,
        pub pull: Option<
            unsafe extern "C" fn(
                state: *mut c_void,
                cotangent: *const RollTensor,
                out: *mut RollTensor,
                error: *mut RollError,
            ) -> u32,
        >,
        pub release: Option<unsafe extern "C" fn(state: *mut c_void)>,
    }
}

boundary! {
    /// What a component is made with.
    #[derive(Clone, Copy)]
    pub struct RollContext {
        pub backend: RollStr,
        pub base_dir: RollStr,
        pub seed: u64,
    }
}

boundary! {
    /// One option of a component.
    #[derive(Clone, Copy)]
    pub struct RollOption {
        pub name: RollStr,
        /// 0 anything, 1 true or false, 2 whole number, 3 number, 4 text, 5 list, 6 map.
        pub kind: u32,
        /// JSON.
        pub default_json: RollStr,
        pub about: RollStr,
    }
}

boundary! {
    /// Something with a name in the configuration.
    #[derive(Clone, Copy)]
    pub struct RollComponent {
        /// 1 reward, 2 model, 3 strategy, 4 algorithm, 5 environment.
        pub kind: u32,
        pub name: RollStr,
        pub summary: RollStr,
        pub options: *const RollOption,
        pub option_count: usize,
        /// Given to `make`.
        pub data: *const c_void,
        /// Makes one; the options are a JSON object with every option in it.
        pub make: unsafe extern "C" fn(
            data: *const c_void,
            options: RollStr,
            context: *const RollContext,
            out: *mut RollObject,
            error: *mut RollError,
        ) -> u32,
    }
}

boundary! {
    /// What a plugin says of itself. All of it lives as long as the library.
    #[derive(Clone, Copy)]
    pub struct RollPlugin {
        pub name: RollStr,
        pub version: RollStr,
        pub authors: RollStr,
        pub about: RollStr,
        pub components: *const RollComponent,
        pub component_count: usize,
    }
}

boundary! {
    /// What the host lends a plugin for as long as the process lives.
    #[derive(Clone, Copy)]
    pub struct RollHost {
        /// Given to `log`.
        pub state: *const c_void,
        /// Levels: 1 error, 2 warning, 3 notice, 4 debug, 5 trace.
        pub log: unsafe extern "C" fn(state: *const c_void, level: u32, target: RollStr, message: RollStr),
        /// Messages above this level go nowhere now.
        pub log_level: unsafe extern "C" fn(state: *const c_void) -> u32,
    }
}

/// The symbol `roll_plugin_init`: called once, after the checks.
pub type InitFn = unsafe extern "C" fn(host: *const RollHost, out: *mut RollPlugin, error: *mut RollError) -> u32;

impl RollStr {
    pub const EMPTY: Self = Self { data: std::ptr::null(), len: 0 };
}

impl<T> Default for RollOwned<T> {
    fn default() -> Self {
        Self { items: std::ptr::null(), len: 0, owner: std::ptr::null_mut(), release: None }
    }
}

impl Default for RollTensor {
    fn default() -> Self {
        Self {
            data: std::ptr::null(),
            bytes: 0,
            shape: std::ptr::null(),
            rank: 0,
            dtype: 0,
            owner: std::ptr::null_mut(),
            retain: None,
            release: None,
        }
    }
}

impl Default for RollError {
    fn default() -> Self {
        Self { fault: FAULT_FAILURE, text: RollOwned::default() }
    }
}

impl Default for RollObject {
    fn default() -> Self {
        Self { state: std::ptr::null_mut(), table: std::ptr::null(), release: None }
    }
}

impl Default for RollPullback {
    fn default() -> Self {
        Self { state: std::ptr::null_mut(), pull: None, release: None }
    }
}

impl Default for RollPlugin {
    fn default() -> Self {
        let [name, version, authors, about] = [RollStr::EMPTY; 4];
        Self { name, version, authors, about, components: std::ptr::null(), component_count: 0 }
    }
}
