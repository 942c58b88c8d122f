//! Descriptions of the boundary's types by `abi_stable`. The host compares those of a Rust plugin with its own before
//! it calls the plugin.
//!
//! No type of `abi_stable` crosses the boundary. It only checks what equal major versions promise, that types have the
//! same layout (promise P6 of the contract in `abi/mod.rs`).

use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::{
    AbiInstability, AbiInstabilityErrors, CheckingGlobals, check_layout_compatibility_with_globals,
};
use abi_stable::type_layout::{TLField, TLFieldOrFunction, TypeLayout};

use super::{RollAbi, RollMessage, RollObject, RollStr, RollTensor};

/// Major and minor version of `abi_stable`; only equal versions can read each other's descriptions.
const DESCRIBED_BY: [u32; 2] = [0, 11];

/// Maximum number of types; a larger number is garbage.
const MAX_TYPES: usize = 64;

/// Maximum length in characters of a difference that is described in the words of `abi_stable`.
const MAX_DIFFERENCE: usize = 300;

/// The symbol `roll_plugin_types` of Rust plugins: data, so that finding it runs no code of the plugin.
#[repr(C)]
pub struct StableTypes {
    described_by: [u32; 2],
    types: *const &'static TypeLayout,
    len: usize,
}

// SAFETY: points to statics.
unsafe impl Sync for StableTypes {}

/// All types of the boundary.
static TYPES: &[&TypeLayout] = &[
    <RollAbi as StableAbi>::LAYOUT,
    <RollStr as StableAbi>::LAYOUT,
    <RollTensor as StableAbi>::LAYOUT,
    <RollObject as StableAbi>::LAYOUT,
    <RollMessage as StableAbi>::LAYOUT,
];

impl StableTypes {
    /// The types of this crate.
    pub const CURRENT: Self = Self { described_by: DESCRIBED_BY, types: TYPES.as_ptr(), len: TYPES.len() };

    /// Whether `self`, a plugin's, is described by an `abi_stable` that ours can read.
    pub fn is_readable(&self) -> bool {
        self.described_by == DESCRIBED_BY
    }

    /// Compares `self`, a plugin's types, with ours. Fails with a short description of the first difference.
    ///
    /// # Safety
    /// The types are those of a library that is never unloaded.
    pub unsafe fn check(&self) -> Result<(), String> {
        if self.types.is_null() || !self.types.is_aligned() || self.len > MAX_TYPES {
            return Err(format!("it describes {} types at {:p}", self.len, self.types));
        }
        // SAFETY: as the caller promises.
        let theirs = unsafe { std::slice::from_raw_parts(self.types, self.len) };
        for expected in TYPES {
            let name = expected.name();
            let found = theirs.iter().find(|found| found.name() == name);
            let found = found.ok_or_else(|| format!("it does not know `{name}`"))?;
            // A new cache for each check, because plugins may be built differently.
            check_layout_compatibility_with_globals(expected, found, &CheckingGlobals::new())
                .map_err(|errors| first_difference(name, &errors))?;
        }
        Ok(())
    }
}

/// The first of many differences, as its path and its kind. The description that `abi_stable` itself makes of a
/// difference has tens of kilobytes.
fn first_difference(name: &str, errors: &AbiInstabilityErrors) -> String {
    let Some(error) = errors.errors.iter().find(|e| !e.errs.is_empty()) else { return format!("`{name}` differs") };
    let mut path = format!("`{name}`");
    // The outermost step refers to the structure itself.
    for step in error.stack_trace.iter().skip(1) {
        if let TLFieldOrFunction::Field(member) = &step.expected
            && !member.name().is_empty()
            && !member.name().starts_with(|c: char| c.is_ascii_digit())
        {
            path += &format!(" > `{}`", name_and_type(member));
        }
    }
    // An error lists the difference in both directions; one is enough.
    path + ": " + &error.errs.first().map_or_else(String::new, expected_and_found)
}

fn expected_and_found(difference: &AbiInstability) -> String {
    let [expected, found] = match difference {
        AbiInstability::Name(x) => [x.expected.to_string(), x.found.to_string()],
        AbiInstability::Package(x) => [x.expected.to_string(), x.found.to_string()],
        AbiInstability::PackageVersion(x) => [x.expected.to_string(), x.found.to_string()],
        AbiInstability::Size(x) => [x.expected, x.found].map(|n| format!("{n} bytes")),
        AbiInstability::Alignment(x) => [x.expected, x.found].map(|n| format!("an alignment of {n}")),
        AbiInstability::FieldCountMismatch(x) => [x.expected, x.found].map(|n| format!("{n} members")),
        AbiInstability::UnexpectedField(x) => [&x.expected, &x.found].map(|m| format!("`{}`", name_and_type(m))),
        other => return format!("{other:?}").chars().take(MAX_DIFFERENCE).collect(),
    };
    format!("expected {expected}, found {found}")
}

/// The name of a member, with its type unless that is a function, whose parameters follow in the path.
fn name_and_type(member: &TLField) -> String {
    let (name, type_name) = (member.name(), member.full_type().to_string());
    if type_name.contains("FunctionPointer") { name.into() } else { format!("{name}: {}", type_name.trim_end()) }
}
