//! `roll merge-lora`: a base with a LoRA in it.

use roll_core::{Error, Result};
use roll_models::lora::{self, LoraFile, MergeOptions};
use roll_models::weights::Checkpoint;

use super::shards::megabytes;
use crate::args::{ExpertName, MergeLora};

impl ExpertName {
    /// As the library calls it.
    pub fn expert(self) -> lora::Expert {
        match self {
            Self::High => lora::Expert::High,
            Self::Low => lora::Expert::Low,
        }
    }
}

/// Merges and says what was changed.
pub fn merge_lora(args: MergeLora) -> Result<()> {
    if !args.alpha.is_finite() {
        return Err(Error::config("--alpha", format!("expected a finite number, found {}", args.alpha)));
    }
    let file = LoraFile::open(&args.lora)?;
    let convention = file.convention;
    let lora = file.one(args.expert.map(ExpertName::expert))?;
    let base = Checkpoint::open_any(&args.base)?;
    let options = MergeOptions {
        strength: args.alpha,
        dtype: args.dtype.map(|dtype| dtype.dtype()),
        allow_missing: args.allow_missing,
    };
    let merged = megabytes(&base, |progress| lora::merge_lora(&base, &lora, &args.out, &options, progress))?;
    println!("{convention} LoRA of {} layers: {} tensors changed", lora.layers.len(), merged.changed);
    if !merged.missing.is_empty() {
        println!("not in the base, left out: {}", merged.missing.join(", "));
    }
    merged.files.iter().for_each(|file| println!("{}", file.display()));
    Ok(())
}
