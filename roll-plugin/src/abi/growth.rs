//! Structures that grow with minor versions (P6), and the macros that define the types of the boundary.

/// A structure that begins with its size in bytes.
///
/// # Safety
/// `#[repr(C)]`, the first member is `size: usize`, and all bytes zero are a value.
pub unsafe trait Grows: Copy {
    /// The name in messages.
    const NAME: &'static str;
    /// Size in bytes of the members that every version has.
    const MANDATORY: usize;

    /// A value in which only the size is set.
    fn absent() -> Self;
}

/// Maximum size in bytes; a larger one is garbage.
const MAX_SIZE: usize = 1 << 16;

/// Reads the members that the other side's structure and ours have in common; the rest is absent. Fails on invalid
/// sizes.
///
/// # Safety
/// `theirs` is null, or points to a `T` of the other side's version.
pub unsafe fn read<T: Grows>(theirs: *const T) -> Result<T, String> {
    let (name, word) = (T::NAME, align_of::<T>());
    if theirs.is_null() || !theirs.is_aligned() {
        return Err(format!("`{name}` is at {theirs:p}, which is null or misaligned"));
    }
    // SAFETY: as the caller promises, it begins with its size.
    let size = unsafe { theirs.cast::<usize>().read() };
    if size < T::MANDATORY {
        return Err(format!("`{name}` has {size} bytes, expected at least {}", T::MANDATORY));
    }
    if size > MAX_SIZE {
        return Err(format!("`{name}` has {size} bytes, more than {MAX_SIZE}"));
    }
    if !size.is_multiple_of(word) {
        return Err(format!("`{name}` has {size} bytes and ends in the middle of a member"));
    }
    let mut ours = T::absent();
    // SAFETY: P6: both sides have at least this number of bytes.
    unsafe { std::ptr::copy_nonoverlapping(theirs.cast::<u8>(), (&raw mut ours).cast(), size.min(size_of::<T>())) };
    // SAFETY: every structure that grows begins with its size: here that of ours.
    unsafe { (&raw mut ours).cast::<usize>().write(size_of::<T>()) };
    Ok(ours)
}

/// Defines structures that have the same layout as long as the major version is the same.
macro_rules! data {
    ($( $(#[$meta:meta])* pub struct $name:ident $(<$of:ident>)? { $($members:tt)* } )+) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
        pub struct $name $(<$of>)? { $($members)* }
    )+};
}

/// Defines a structure that grows: its size, the members of every version, and those of later minor versions.
///
/// `abi_stable` takes it for a "prefix type" of which only the size is certain; [`read`] knows what else is mandatory.
macro_rules! growing {
    (
        $(#[$meta:meta])*
        pub struct $name:ident { $( $(#[$about:meta])* pub $member:ident: $of:ty ),* $(,)? }
        $( since $version:literal { $( $(#[$more:meta])* pub $added:ident: $what:ty ),* $(,)? } )*
    ) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        #[cfg_attr(feature = "abi_stable", derive(abi_stable::StableAbi))]
        #[cfg_attr(feature = "abi_stable", sabi(kind(Prefix), missing_field(option)))]
        pub struct $name {
            /// Bytes of this structure.
            #[cfg_attr(feature = "abi_stable", sabi(last_prefix_field))]
            pub size: usize,
            $( $(#[$about])* pub $member: $of, )*
            $( $( #[doc = concat!("Since ", stringify!($version), ".")] $(#[$more])* pub $added: $what, )* )*
        }

        // SAFETY: as its members are declared above; numbers, pointers and optional functions may be zero.
        unsafe impl $crate::abi::Grows for $name {
            const NAME: &'static str = stringify!($name);
            const MANDATORY: usize = {
                #[repr(C)]
                struct Mandatory { _size: usize, $( $member: $of ),* }
                // A smaller member would begin in the padding of older versions.
                $( $( assert!(size_of::<$what>().is_multiple_of(size_of::<usize>())); )* )*
                size_of::<Mandatory>()
            };

            fn absent() -> Self {
                // SAFETY: as promised for the trait.
                Self { size: size_of::<Self>(), ..unsafe { std::mem::zeroed() } }
            }
        }
    };
}

/// Defines the table of a kind. Each function also takes the object's state first and the error last, and returns
/// [`OK`](crate::abi::OK) or not (P7):
///
/// ```ignore
/// table! {
///     /// The functions of a reward.
///     pub struct RollRewardTable {
///         /// ...
///         fn prepare(reference: *const RollVideo, out: *mut RollOwned<RollNamedTensor>);
///     }
///     since 1.1 {
///         fn measures(out: *mut RollMeasure);
///     }
/// }
/// ```
///
/// is [`growing!`] with `prepare: Option<unsafe extern "C" fn(state: *mut c_void, reference: *const RollVideo, out:
/// *mut RollOwned<RollNamedTensor>, error: *mut RollError) -> u32>`, and likewise `measures`. All are optional: the
/// implementation of the trait on the table defines the meaning of a missing function.
macro_rules! table {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$about:meta])* fn $function:ident($( $argument:ident: $of:ty ),* $(,)?); )*
        }
        $( since $version:literal {
            $( $(#[$more:meta])* fn $added:ident($( $with:ident: $what:ty ),* $(,)?); )*
        } )*
    ) => {
        growing! {
            $(#[$meta])*
            pub struct $name {$(
                $(#[$about])*
                pub $function: Option<unsafe extern "C" fn(
                    state: *mut std::ffi::c_void, $($argument: $of,)* error: *mut $crate::abi::RollError,
                ) -> u32>,
            )*}
            $( since $version {$(
                $(#[$more])*
                pub $added: Option<unsafe extern "C" fn(
                    state: *mut std::ffi::c_void, $($with: $what,)* error: *mut $crate::abi::RollError,
                ) -> u32>,
            )*} )*
        }
    };
}

#[allow(dead_code)] // `abi_stable` derives accessors that no test calls
#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::RollRewardTable;

    growing! {
        /// As version 1.1 might have it.
        pub struct Grown { pub first: usize }
        since 1.1 { pub second: usize }
    }

    #[test]
    fn reads_common_members_and_rejects_invalid_sizes() {
        let read_as = |size: usize| {
            let theirs = [size, 7, 8, 9];
            // SAFETY: numbers; `read` takes no more than `size` bytes, and all sizes below that it accepts are there.
            unsafe { read(theirs.as_ptr().cast::<Grown>()) }.map(|ours| (ours.size, ours.first, ours.second))
        };
        let ours = size_of::<Grown>();
        for (size, expected) in [(16, (ours, 7, 0)), (24, (ours, 7, 8)), (32, (ours, 7, 8))] {
            assert_eq!(read_as(size), Ok(expected), "{size} bytes");
        }
        for (size, part) in [(0, "at least"), (8, "at least"), (usize::MAX - 7, "more than"), (19, "in the middle")] {
            let message = read_as(size).unwrap_err();
            assert!(message.contains("`Grown`") && message.contains(part), "{message}");
        }
        let table = [0usize; 64];
        // SAFETY: refused before anything is read.
        assert!(unsafe { read(std::ptr::null::<RollRewardTable>()) }.is_err());
        // SAFETY: as above.
        assert!(unsafe { read(table.as_ptr().cast::<u8>().wrapping_add(1).cast::<RollRewardTable>()) }.is_err());
    }
}
