//! `roll init-tiny`: a small checkpoint of random weights in official file layout.

use roll_core::Result;
use roll_models::wan2_2::{init, init_tiny};

use crate::args::{InitTiny, TinyKind};

/// Writes it and says what is there.
pub fn init_tiny(args: InitTiny) -> Result<()> {
    if !args.force {
        init::refuse_full(&args.dir)?;
    }
    let files = init_tiny::init_tiny(&args.dir, kind(args.kind), args.seed)?;
    println!("model.model_paths     {}", files.model_paths.display());
    println!("model.tokenizer_path  {}", files.tokenizer.display());
    println!("The weights are random: this checkpoint is for trying things, not for pictures.");
    Ok(())
}

pub(super) fn kind(kind: TinyKind) -> init_tiny::TinyKind {
    match kind {
        TinyKind::I2v => init_tiny::TinyKind::I2v,
        TinyKind::T2v => init_tiny::TinyKind::T2v,
        TinyKind::Ti2v => init_tiny::TinyKind::Ti2v,
        TinyKind::I2v21 => init_tiny::TinyKind::I2v21,
    }
}
