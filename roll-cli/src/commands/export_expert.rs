//! `roll export-expert`: from a full training's checkpoint to a base.

use roll_core::Result;
use roll_models::wan2_2::{export, init};

use crate::args::ExportExpert;

/// Writes the weight file and prints its path.
pub fn export_expert(args: ExportExpert) -> Result<()> {
    if !args.force {
        init::refuse_full(&args.out)?;
    }
    let file = export::export_expert(&args.checkpoint, &args.base, &args.out, args.dtype.dtype())?;
    println!("{}", file.display());
    Ok(())
}
