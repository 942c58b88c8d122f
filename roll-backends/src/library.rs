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

/// Declares a struct of function pointers with the signatures of a library's header, and its constructor `find`, which
/// looks them up. The library is never unloaded, because the pointers are kept and the library may have threads of its
/// own.
///
/// `Table { field: "symbol" (argument types) -> result type, ... }`
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

/// Loads a library. Fails with a sentence that contains the reason.
pub(crate) fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the initialisers of NVIDIA's libraries have no effect outside of the libraries.
    unsafe { Library::new(path) }.map_err(|e| {
        // The loader's message is the source of the error.
        let reason = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        format!("{} cannot be loaded: {reason}", path.display())
    })
}

/// Loads the first of these libraries that can be loaded, and returns it with its name. If none can, the error has the
/// reason for each.
pub(crate) fn open_first<'a>(names: &[&'a str]) -> Result<(Library, &'a str), String> {
    let mut reasons = Vec::new();
    for name in names {
        match open(Path::new(name)) {
            Ok(library) => return Ok((library, *name)),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}

/// Copies a C string of a library; null becomes an empty text.
///
/// # Safety
/// `at` must be null or a valid C string for the duration of the call.
pub(crate) unsafe fn text(at: *const std::ffi::c_char) -> String {
    // SAFETY: as the caller promises.
    if at.is_null() { String::new() } else { unsafe { std::ffi::CStr::from_ptr(at) }.to_string_lossy().into_owned() }
}
