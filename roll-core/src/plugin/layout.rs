//! The layout of the boundary's types, compared before a Rust plugin is called. The only place that uses what
//! `abi_stable` knows: without it a plugin would still load, checked by its version alone, as one in C does.

use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::{AbiInstabilityErrors, check_layout_compatibility};
use abi_stable::library::AbiHeader;
use abi_stable::type_layout::TypeLayout;

use super::abi::{RollAbi, RollHost, RollPlugin};
use super::reward::RollRewardTable;

/// Most bytes of a message: `abi_stable`'s own run to 60 KB.
const MAX_MESSAGE: usize = 600;

/// Everything that crosses. Never made: it stands for the types that it leads to.
#[repr(C)]
#[derive(StableAbi)]
struct Boundary {
    abi: RollAbi,
    host: RollHost,
    plugin: RollPlugin,
    reward: RollRewardTable,
}

/// The symbol `roll_plugin_layout` of Rust plugins.
#[repr(C)]
pub struct LayoutTag {
    /// Which `abi_stable` describes the layout; `layout` may be read only when it is compatible.
    header: AbiHeader,
    layout: extern "C" fn() -> *const TypeLayout,
}

impl LayoutTag {
    /// The layout as this crate was compiled.
    pub const CURRENT: Self = Self { header: AbiHeader::VALUE, layout: current };

    /// Fails with the first difference between `self`, a plugin's, and the host's.
    pub(super) fn check(&'static self) -> Result<(), String> {
        if !self.header.is_valid() {
            let (ours, theirs) = (AbiHeader::VALUE, self.header);
            return Err(format!(
                "its layout is described by abi_stable {}.{}, expected {}.{}",
                theirs.abi_major, theirs.abi_minor, ours.abi_major, ours.abi_minor
            ));
        }
        // SAFETY: a static of the plugin, which is never unloaded.
        let theirs: &'static TypeLayout = unsafe { &*(self.layout)() };
        compare(Boundary::LAYOUT, theirs)
    }
}

extern "C" fn current() -> *const TypeLayout {
    Boundary::LAYOUT
}

fn compare(ours: &'static TypeLayout, theirs: &'static TypeLayout) -> Result<(), String> {
    check_layout_compatibility(ours, theirs).map_err(|errors| shorten(&errors))
}

/// Where the first difference is, and what it is.
fn shorten(errors: &AbiInstabilityErrors) -> String {
    let Some(first) = errors.errors.first() else { return "unknown".into() };
    let field = first.stack_trace.last().map(|t| t.found.to_string()).unwrap_or_default();
    let name = |line: &&str| line.starts_with("field_name:") || line.starts_with("type:");
    let place: Vec<&str> = field.lines().map(str::trim).filter(name).collect();
    let full = first.to_string();
    let differences: Vec<String> = full.split("\nError:").skip(1).map(words).collect();
    let mut message = format!("{} {}", place.join(" "), differences.join("; ")).trim().to_string();
    if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
        message.truncate(end);
    }
    message
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    mod ours {
        use abi_stable::StableAbi;
        #[repr(C)]
        #[derive(StableAbi)]
        pub struct Inner {
            pub a: u32,
            pub b: f64,
        }
        #[repr(C)]
        #[derive(StableAbi)]
        pub struct Table {
            pub call: unsafe extern "C" fn(input: *const Inner) -> u32,
        }
    }

    mod theirs {
        use abi_stable::StableAbi;
        #[repr(C)]
        #[derive(StableAbi)]
        pub struct Inner {
            pub b: f64,
            pub a: u32,
        }
        #[repr(C)]
        #[derive(StableAbi)]
        pub struct Table {
            pub call: unsafe extern "C" fn(input: *const Inner) -> u32,
        }
    }

    #[test]
    fn a_field_moved_behind_a_pointer_in_an_argument_is_found_and_told_shortly() {
        assert!(compare(ours::Table::LAYOUT, ours::Table::LAYOUT).is_ok());
        let told = compare(ours::Table::LAYOUT, theirs::Table::LAYOUT).unwrap_err();
        assert!(told.len() <= MAX_MESSAGE && told.contains('a'), "{told}");
    }

    #[test]
    fn the_layout_of_this_crate_agrees_with_itself() {
        static TAG: LayoutTag = LayoutTag::CURRENT;
        TAG.check().unwrap();
    }
}
