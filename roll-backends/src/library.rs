//! Functions of NVIDIA's libraries, looked up at run time.

use std::path::Path;

use libloading::Library;

/// A function that a library lacks.
pub(crate) struct Missing {
    pub symbol: &'static str,
    pub source: libloading::Error,
}

impl From<Missing> for String {
    fn from(missing: Missing) -> Self {
        format!("{} is missing: {}", missing.symbol, missing.source)
    }
}

/// A table of function pointers, with the signatures of the library's header. The library is never unloaded: the
/// pointers are kept, and it may have threads of its own.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$only:meta])* $field:ident: $symbol:literal ($($argument:ty),*) -> $result:ty,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            $($(#[$only])* pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            pub(crate) fn find(library: libloading::Library) -> Result<Self, crate::library::Missing> {
                $(
                    $(#[$only])*
                    // SAFETY: the signature is that of the library's header.
                    let $field = *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol) }
                        .map_err(|source| crate::library::Missing { symbol: $symbol, source })?;
                )*
                std::mem::forget(library);
                Ok(Self { $($(#[$only])* $field,)* })
            }
        }
    };
}

pub(crate) use functions;

/// Loads a library; the error is a sentence with the reason.
pub(crate) fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the initialisers of NVIDIA's libraries have no effect outside of the libraries.
    unsafe { Library::new(path) }.map_err(|e| {
        // The loader's message is the source of the error.
        let reason = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        format!("{} cannot be loaded: {reason}", path.display())
    })
}

/// The first of these libraries that can be loaded, with its name; else the reasons.
pub(crate) fn first<'a>(names: &[&'a str]) -> Result<(Library, &'a str), String> {
    let mut reasons = Vec::new();
    let found = names.iter().find_map(|name| match open(Path::new(name)) {
        Ok(library) => Some((library, *name)),
        Err(reason) => {
            reasons.push(reason);
            None
        }
    });
    found.ok_or_else(|| reasons.join("; "))
}

/// # Safety
/// `at` must be null or a valid C string for the duration of the call.
pub(crate) unsafe fn text(at: *const std::ffi::c_char) -> String {
    // SAFETY: as the caller promises.
    if at.is_null() { String::new() } else { unsafe { std::ffi::CStr::from_ptr(at) }.to_string_lossy().into_owned() }
}
