//! `roll init-tiny`: a small model in official file layout.

use roll_core::Result;
use roll_wan::{init, init_tiny};

use crate::args::{InitTiny, TinyModel, WanKind};

/// Writes the files and prints their names.
pub fn init_tiny(args: InitTiny) -> Result<()> {
    if !args.force {
        init::require_empty(&args.dir)?;
    }
    let wan_kind = match args.kind {
        TinyModel::I2v => WanKind::I2v,
        TinyModel::T2v => WanKind::T2v,
        TinyModel::Ti2v => WanKind::Ti2v,
        TinyModel::I2v21 => WanKind::I2v21,
        TinyModel::Lm => {
            roll_causal_lm::write_built_in(&args.dir)?;
            println!("model.model_path      {}", args.dir.display());
            println!("It plays FrozenLake and knows nothing else.");
            return Ok(());
        }
    };
    let files = init_tiny::init_tiny(&args.dir, kind(wan_kind), args.seed)?;
    println!("model.model_paths     {}", files.model_paths.display());
    println!("model.tokenizer_path  {}", files.tokenizer.display());
    println!("The weights are random: this checkpoint is for trying things, not for pictures.");
    Ok(())
}

/// The kind of the library for a kind of the arguments.
pub(super) fn kind(kind: WanKind) -> init_tiny::WanKind {
    match kind {
        WanKind::I2v => init_tiny::WanKind::I2v,
        WanKind::T2v => init_tiny::WanKind::T2v,
        WanKind::Ti2v => init_tiny::WanKind::Ti2v,
        WanKind::I2v21 => init_tiny::WanKind::I2v21,
    }
}
