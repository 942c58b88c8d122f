//! `roll init-experts`: untrained transformers of a chosen size.

use roll_core::Result;
use roll_wan::init::{self, Sizes};

use super::init_tiny::kind;
use crate::args::InitExperts;

/// Writes the files and prints their names.
pub fn init_experts(args: InitExperts) -> Result<()> {
    let InitExperts { dir, kind: kind_argument, dim, heads, ffn_dim, layers, text_dim, text_len, seed, force } = args;
    if !force {
        init::require_empty(&dir)?;
    }
    let sizes = Sizes { dim, heads, ffn_dim, layers, text_dim, text_len, ..Sizes::default() };
    let paths = init::init_experts(&dir, kind(kind_argument), &sizes, seed)?;
    println!("model.model_paths     {}", paths.display());
    println!("Put the text encoder (models_t5_*), its tokenizer and the VAE beside it, as the list in that file says.");
    Ok(())
}
