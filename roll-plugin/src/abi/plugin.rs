//! The description of a plugin, and the functions that it is lent.

use std::ffi::c_void;

use super::{RollError, RollList, RollObject, RollOwned, RollStr};

data! {
    /// The data symbol `roll_plugin_abi`: read before any code of the plugin is called.
    #[derive(Clone, Copy)]
    pub struct RollAbi {
        pub magic: [u8; 8],
        pub major: u32,
        pub minor: u32,
    }

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

impl RollAbi {
    pub const CURRENT: Self =
        Self { magic: crate::abi::MAGIC, major: crate::abi::ABI_VERSION[0], minor: crate::abi::ABI_VERSION[1] };
}

growing! {
    /// Functions that the host lends a plugin for as long as the process lives.
    pub struct RollHost {
        /// Passed to its functions.
        pub state: *const c_void,
        /// Levels: 1 error, 2 warning, 3 notice, 4 debug, 5 trace.
        pub log: Option<unsafe extern "C" fn(state: *const c_void, level: u32, target: RollStr, message: RollStr)>,
        /// The current level; messages above it are dropped.
        pub log_level: Option<unsafe extern "C" fn(state: *const c_void) -> u32>,
    }
}

growing! {
    /// The context in which a component is made.
    pub struct RollContext {
        pub backend: RollStr,
        pub base_dir: RollStr,
        pub seed: u64,
        /// Requested placement of frozen weights: 0 the model decides, 1 resident, 2 streamed, 3 sharded.
        pub placement: usize,
        /// The ranks of the job, a communicator that belongs to the component (P2); for strategies and algorithms.
        /// Without a table: one rank alone.
        pub ranks: RollObject,
    }
}

growing! {
    /// A named component.
    pub struct RollComponent {
        /// 1 reward, 2 model, 3 strategy, 4 algorithm, 5 environment.
        pub kind: usize,
        pub name: RollStr,
        pub summary: RollStr,
        pub options: RollList<RollOption>,
        /// Passed to its functions.
        pub data: *const c_void,
        /// Makes one; the options are a JSON object with every option in it.
        // The context may grow and is compared separately.
        #[cfg_attr(feature = "abi_stable", sabi(unsafe_change_type = Option<
            unsafe extern "C" fn(
                data: *const c_void,
                options: RollStr,
                context: *const c_void,
                out: *mut RollObject,
                error: *mut RollError,
            ) -> u32,
        >))]
        pub make: Option<
            unsafe extern "C" fn(
                data: *const c_void,
                options: RollStr,
                context: *const RollContext,
                out: *mut RollObject,
                error: *mut RollError,
            ) -> u32,
        >,
        /// Returns the needs of a run as JSON; null: unknown. `input` is JSON too: `[input, context]` for
        /// models, null for other kinds.
        pub plan: Option<
            unsafe extern "C" fn(
                data: *const c_void,
                options: RollStr,
                input: RollStr,
                out: *mut RollOwned<u8>,
                error: *mut RollError,
            ) -> u32,
        >,
    }
}

growing! {
    /// The description of a plugin. All its parts live as long as the library (P3).
    pub struct RollPlugin {
        pub name: RollStr,
        pub version: RollStr,
        pub authors: RollStr,
        pub about: RollStr,
        // Components may grow and are compared separately.
        #[cfg_attr(feature = "abi_stable", sabi(unsafe_change_type = RollList<*const c_void>))]
        pub components: RollList<*const RollComponent>,
    }
}

/// The symbol `roll_plugin_init`: called once, after the checks.
pub type InitFn =
    unsafe extern "C" fn(host: *const RollHost, out: *mut *const RollPlugin, error: *mut RollError) -> u32;
