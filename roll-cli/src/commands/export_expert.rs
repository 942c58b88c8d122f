//! `roll export-expert`: writes the weights of a fully trained expert as a file that another run can start from.

use roll_core::Result;
use roll_network::new_checkpoint::require_empty;
use roll_wan::export;

use crate::args::ExportExpert;

/// Writes the weight file of the expert and prints its path.
pub fn export_expert(args: ExportExpert) -> Result<()> {
    if !args.force {
        require_empty(&args.out)?;
    }
    let file = export::export_expert(&args.checkpoint, &args.base, &args.out, args.dtype.dtype())?;
    println!("{}", file.display());
    Ok(())
}
