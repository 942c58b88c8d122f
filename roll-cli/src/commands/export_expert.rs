//! `roll export-expert`: from a full training's checkpoint to a base.

use roll_core::{DType, Result};
use roll_models::wan2_2::export;

use crate::args::{ExportExpert, StoredDType};

/// Writes the weight file and says where.
pub fn export_expert(args: ExportExpert) -> Result<()> {
    let dtype = match args.dtype {
        StoredDType::F32 => DType::F32,
        StoredDType::Bf16 => DType::Bf16,
    };
    let file = export::export_expert(&args.checkpoint, &args.base, &args.out, dtype)?;
    println!("{}", file.display());
    Ok(())
}
