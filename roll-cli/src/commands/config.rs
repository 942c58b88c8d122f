//! `roll config`: the resolved configuration, and where each value came from.

use roll_core::Result;

use crate::args::ConfigArgs;

/// Prints one line per value.
pub fn print(args: ConfigArgs) -> Result<()> {
    let registry = super::registry(&args)?;
    for entry in super::load_or_demo(&args, &registry, &[])?.listing()? {
        println!("{:<44} {:<32} # {}", entry.key, entry.value, entry.origin);
    }
    Ok(())
}
