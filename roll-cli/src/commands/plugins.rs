//! `roll plugins`: what can be named in the configuration.

use roll_core::{Registry, Result};

/// Lists every registered implementation.
pub fn list() -> Result<()> {
    let registry = Registry::linked()?;
    println!("{:<12} {:<14} {:<24} summary", "kind", "name", "origin");
    for entry in registry.entries() {
        let origin = format!("{} {}", entry.origin, entry.version);
        println!("{:<12} {:<14} {:<24} {}", entry.factory.kind(), entry.name, origin, entry.summary);
    }
    Ok(())
}
