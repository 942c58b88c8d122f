//! `roll merge-lora`: writes a base network to which a LoRA is added.

use std::path::{Path, PathBuf};

use roll_core::{Error, Fault, Result};
use roll_network::lora::{self, LoraError, LoraFile, MergeOptions, about};
use roll_network::weights::Checkpoint;

use super::shards::with_progress;
use crate::args::{ExpertName, MergeLora};
use crate::output::refuse_existing;

impl ExpertName {
    /// The transformer that the argument names.
    pub fn expert(self) -> lora::Expert {
        match self {
            Self::High => lora::Expert::High,
            Self::Low => lora::Expert::Low,
        }
    }
}

/// Merges the LoRA into the base, and prints the files of the result.
pub fn merge_lora(args: MergeLora) -> Result<()> {
    if !args.alpha.is_finite() {
        return Err(Error::config("--alpha", format!("expected a finite number, found {}", args.alpha)));
    }
    if args.out.is_file() {
        refuse_existing(&args.out, args.force)?;
    }
    let expert = args.expert.map(ExpertName::expert);
    let mut files = LoraFile::open_named(&args.lora, expert)?;
    let file = match files.pop() {
        Some(file) if files.is_empty() => file,
        // A run of both experts has a file for each.
        _ => return Err(Error::component(Fault::User, LoraError::TwoExperts { path: args.lora })),
    };
    let convention = file.convention;
    let named_by_file = about::named_expert(&file.path, &file.metadata).map(|(expert, _)| expert);
    let lora = file.one(expert)?;
    let base = Checkpoint::open_any(&args.base)?;
    // The expert that the base is, and the place that says so: its name or its header.
    let named_by_base = about::named_expert(base.path(), &base.metadata());
    if let (Some(expert), Some((other, place))) = (lora.target_expert().or(named_by_file), named_by_base)
        && expert != other
    {
        tracing::warn!(
            "the LoRA is for the expert {expert}, and {place} says the other one, {other}, of the base {}: merge it into \
             {expert}",
            base.path().display()
        );
    }
    let options = MergeOptions {
        strength: args.alpha,
        dtype: args.dtype.map(|dtype| dtype.dtype()),
        allow_missing: args.allow_missing,
    };
    let merged = with_progress(&base, |progress| lora::merge_lora(&base, &lora, &args.out, &options, progress))?;
    println!("{convention} LoRA of {} layers: {} tensors changed", lora.layers.len(), merged.changed);
    if !merged.missing.is_empty() {
        println!("not in the base, left out: {}", merged.missing.join(", "));
    }
    merged.files.iter().for_each(|file| println!("{}", file.display()));
    if args.out.is_dir() {
        let base_directory = base.path().parent().unwrap_or(Path::new(""));
        copy_companions(base_directory, &args.out)?.iter().for_each(|file| println!("{}", file.display()));
    }
    Ok(())
}

/// Files of a language model besides its weights and its `config.json`, which the merge itself copies.
const COMPANIONS: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Copies the [`COMPANIONS`] in `from` into the new directory `to`, and returns the paths of the copies.
fn copy_companions(from: &Path, to: &Path) -> Result<Vec<PathBuf>> {
    let mut copied = Vec::new();
    for name in COMPANIONS {
        let (source, target) = (from.join(name), to.join(name));
        if source.is_file() {
            std::fs::copy(&source, &target).map_err(Error::file("copy", &source))?;
            copied.push(target);
        }
    }
    Ok(copied)
}
