//! `roll init-tiny`: a small model in official file layout.

use roll_core::Result;
use roll_network::new_checkpoint::require_empty;

use crate::args::InitTiny;

/// Writes the files and prints which option names which of them.
pub fn init_tiny(args: InitTiny) -> Result<()> {
    if !args.force {
        require_empty(&args.dir)?;
    }
    for line in (args.kind.write)(&args.dir, args.seed)? {
        println!("{line}");
    }
    Ok(())
}
