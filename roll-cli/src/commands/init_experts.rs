//! `roll init-experts`: untrained transformers of a chosen size.

use roll_core::Result;
use roll_network::new_checkpoint::require_empty;
use roll_wan::init::{self, Sizes};
use roll_wan::init_tiny::WanKind;

use crate::args::{self, InitExperts};

/// Writes the files and prints their names.
pub fn init_experts(args: InitExperts) -> Result<()> {
    let InitExperts { dir, kind: kind_argument, dim, heads, ffn_dim, layers, text_dim, text_len, seed, force } = args;
    if !force {
        require_empty(&dir)?;
    }
    let sizes = Sizes { dim, heads, ffn_dim, layers, text_dim, text_len, ..Sizes::default() };
    let paths = init::init_experts(&dir, kind(kind_argument), &sizes, seed)?;
    println!("model.model_paths     {}", paths.display());
    println!("Put the text encoder (models_t5_*), its tokenizer and the VAE beside it, as the list in that file says.");
    Ok(())
}

/// The kind of the library for a kind of the arguments.
fn kind(kind: args::WanKind) -> WanKind {
    match kind {
        args::WanKind::I2v => WanKind::I2v,
        args::WanKind::T2v => WanKind::T2v,
        args::WanKind::Ti2v => WanKind::Ti2v,
        args::WanKind::I2v21 => WanKind::I2v21,
    }
}
