//! The parts of arguments and answers.

// `abi_stable` understands pointers to functions only where they are written out: no alias for `release`.
use std::ffi::c_void;

data! {
    /// UTF-8 text without a final zero.
    #[derive(Clone, Copy)]
    pub struct RollStr {
        pub data: *const u8,
        pub len: usize,
    }

    /// A list that is lent (P1).
    pub struct RollList<T> {
        pub items: *const T,
        pub len: usize,
    }

    /// A writable list that is lent (P1).
    pub struct RollListMut<T> {
        pub items: *mut T,
        pub len: usize,
    }

    /// A list that its receiver releases (P2).
    pub struct RollOwned<T> {
        pub items: *const T,
        pub len: usize,
        pub owner: *mut c_void,
        pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }

    /// A dense, row-major array.
    #[derive(Clone, Copy, Default)]
    pub struct RollTensor {
        pub data: *const u8,
        pub bytes: usize,
        pub shape: *const usize,
        pub rank: usize,
        /// 0 f32, 1 bf16, 2 f16, 3 i64, 4 i32, 5 u8, 6 bool.
        pub dtype: u32,
        pub owner: *mut c_void,
        /// Adds an owner. Null: the bytes can only be copied.
        pub retain: Option<unsafe extern "C" fn(owner: *mut c_void)>,
        pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }

    #[derive(Clone, Copy)]
    pub struct RollNamedTensor {
        pub name: RollStr,
        pub tensor: RollTensor,
    }

    #[derive(Clone, Copy)]
    pub struct RollNamedNumber {
        pub name: RollStr,
        pub value: f64,
    }

    /// A number that may be missing.
    #[derive(Clone, Copy)]
    pub struct RollMaybe {
        pub present: u32,
        pub value: f64,
    }

    /// Positions from `start` to before `end`.
    #[derive(Clone, Copy, Default)]
    pub struct RollRange {
        pub start: usize,
        pub end: usize,
    }

    /// Frames, f32 `[T, 3, H, W]` in [-1, 1].
    #[derive(Clone, Copy)]
    pub struct RollVideo {
        pub frames: RollTensor,
        pub fps: f64,
    }

    pub struct RollError {
        pub fault: u32,
        /// Messages, outermost first, with [`CHAIN`](crate::abi::CHAIN) between them.
        pub text: RollOwned<u8>,
    }

    /// An object of either side: its state, its functions, and how to release it. A null `release` means that it is
    /// lent for the call.
    #[derive(Clone, Copy, Default)]
    pub struct RollObject {
        pub state: *mut c_void,
        /// The table of its kind.
        pub table: *const c_void,
        pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }

    /// A pullback: called at most once, then released. A null `pull` means none.
    #[derive(Clone, Copy, Default)]
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
        pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }

    /// A value and its pullback.
    #[derive(Default)]
    pub struct RollValue {
        pub value: RollTensor,
        pub pullback: RollPullback,
    }
}

impl RollStr {
    pub const EMPTY: Self = Self { data: std::ptr::null(), len: 0 };

    pub const fn lend(text: &str) -> Self {
        Self { data: text.as_ptr(), len: text.len() }
    }
}

impl<T> RollList<T> {
    pub const fn lend(items: &[T]) -> Self {
        Self { items: items.as_ptr(), len: items.len() }
    }
}

impl<T> RollListMut<T> {
    pub const fn lend(items: &mut [T]) -> Self {
        Self { items: items.as_mut_ptr(), len: items.len() }
    }
}

// Derived implementations would require the traits of the items.
impl<T> Clone for RollList<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RollList<T> {}
impl<T> Clone for RollListMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RollListMut<T> {}

impl<T> Default for RollOwned<T> {
    fn default() -> Self {
        Self { items: std::ptr::null(), len: 0, owner: std::ptr::null_mut(), release: None }
    }
}

impl RollTensor {
    pub fn none() -> Self {
        Self { dtype: crate::abi::NO_TENSOR, ..Self::default() }
    }
}

impl Default for RollError {
    fn default() -> Self {
        Self { fault: crate::abi::FAULT_FAILURE, text: RollOwned::default() }
    }
}
