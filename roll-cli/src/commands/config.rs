//! `roll config`: the resolved configuration, and where each value came from.

use roll_core::Result;

use crate::args::ConfigArgs;
use crate::configuration::Configuration;

/// Prints one line per value, which together are a configuration that `--config` takes.
pub fn print(args: ConfigArgs) -> Result<()> {
    let configuration = Configuration::read(&args, &[])?;
    let registry = configuration.registry()?;
    for entry in configuration.or_demo()?.load(&registry)?.listing()? {
        println!("{:<44} {:<32} # {}", entry.key + ":", entry.value, entry.origin);
    }
    Ok(())
}
