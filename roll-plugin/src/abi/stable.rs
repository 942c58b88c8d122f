//! The types of the boundary as `abi_stable` describes them: compared before a Rust plugin is called.
//!
//! `abi_stable` defines nothing on the wire. It checks the promise of equal major versions: types have the same layout
//! (P6).

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

/// Maximum length of a difference in characters, if only `abi_stable` describes it.
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

/// All types.
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

    /// Fails with the first difference between `self`, a plugin's types, and ours: in a few lines.
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
            // New for each check: plugins may be built differently.
            check_layout_compatibility_with_globals(expected, found, &CheckingGlobals::new())
                .map_err(|errors| first(name, &errors))?;
        }
        Ok(())
    }
}

/// The first of many differences: its path and its kind. `abi_stable` itself describes one in tens of kilobytes.
fn first(name: &str, errors: &AbiInstabilityErrors) -> String {
    let Some(error) = errors.errors.iter().find(|e| !e.errs.is_empty()) else { return format!("`{name}` differs") };
    let mut path = format!("`{name}`");
    // The outermost step refers to the structure itself.
    for step in error.stack_trace.iter().skip(1) {
        if let TLFieldOrFunction::Field(member) = &step.expected
            && !member.name().is_empty()
            && !member.name().starts_with(|c: char| c.is_ascii_digit())
        {
            path += &format!(" > `{}`", self::member(member));
        }
    }
    // Both directions have the difference; the first is enough.
    path + ": " + &error.errs.first().map_or_else(String::new, what)
}

fn what(difference: &AbiInstability) -> String {
    let [expected, found] = match difference {
        AbiInstability::Name(x) => [x.expected.to_string(), x.found.to_string()],
        AbiInstability::Package(x) => [x.expected.to_string(), x.found.to_string()],
        AbiInstability::PackageVersion(x) => [x.expected.to_string(), x.found.to_string()],
        AbiInstability::Size(x) => [x.expected, x.found].map(|n| format!("{n} bytes")),
        AbiInstability::Alignment(x) => [x.expected, x.found].map(|n| format!("an alignment of {n}")),
        AbiInstability::FieldCountMismatch(x) => [x.expected, x.found].map(|n| format!("{n} members")),
        AbiInstability::UnexpectedField(x) => [&x.expected, &x.found].map(|m| format!("`{}`", member(m))),
        other => return format!("{other:?}").chars().take(MAX_DIFFERENCE).collect(),
    };
    format!("expected {expected}, found {found}")
}

fn member(member: &TLField) -> String {
    let (name, of) = (member.name(), member.full_type().to_string());
    // A function is described by its name; the next step of the path has the difference.
    if of.contains("FunctionPointer") { name.into() } else { format!("{name}: {}", of.trim_end()) }
}
