//! `roll convert-lora`: a LoRA for another program.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use roll_network::lora::{self, Convention, Expert, Lora, LoraFile, Names, PEFT_CONFIG, WriteOptions, write_lora};
use roll_network::weights::Checkpoint;

use crate::args::{ConventionName, ConvertLora, LayerNames};
use crate::output::refuse_existing;

/// Writes one file for each adapter and prints its path.
pub fn convert_lora(args: ConvertLora) -> Result<()> {
    let expert = args.expert.map(|name| name.expert());
    let files = LoraFile::open_named(&args.lora, expert)?;
    let has_several_outputs = expert.is_none() && files.iter().map(|file| file.adapters.len()).sum::<usize>() > 1;
    let base = args.base.as_ref().map(Checkpoint::open_any).transpose()?;
    files.into_iter().try_for_each(|file| convert(file, base.as_ref(), has_several_outputs, &args))
}

/// Converts the adapters of one file. With `has_several_outputs`, each output has its expert in its name.
fn convert(mut file: LoraFile, base: Option<&Checkpoint>, has_several_outputs: bool, args: &ConvertLora) -> Result<()> {
    let metadata = std::mem::take(&mut file.metadata);
    let file_path = file.path.clone();
    let convention = match args.to {
        ConventionName::Peft => Convention::Peft,
        ConventionName::Diffsynth => Convention::DiffSynth,
        ConventionName::Diffusers => Convention::Diffusers,
        ConventionName::Comfyui => Convention::ComfyUi,
        ConventionName::Kohya => Convention::Kohya,
    };
    let names = match args.names {
        // A model that fuses layers has the same names in all conventions.
        LayerNames::Official | LayerNames::Fused => Names::Official,
        LayerNames::Diffusers => Names::Diffusers,
    };
    let from = file.convention;
    let mut adapters = match (args.expert, file.adapters.len()) {
        // All of several adapters.
        (None, 2..) => file.adapters,
        // The chosen one, or the only one.
        (expert, _) => {
            let expert = expert.map(|name| name.expert());
            let mut lora = file.one(expert)?;
            lora.expert = expert.or(lora.expert);
            vec![lora]
        }
    };
    if let Some(base) = base {
        for lora in &mut adapters {
            lora::to_names_of(lora, &file_path, base)?;
        }
    }
    adapters.iter().try_for_each(|lora| refuse_unknown(lora, base, &file_path))?;
    if args.names == LayerNames::Fused {
        refuse_fused(convention, &adapters, &file_path)?;
        for adapter in &mut adapters {
            if !lora::fuse(adapter)? {
                let problem = "has no layers that are one in the single file of a model here; leave --names out";
                return Err(Error::bad_file(file_path, problem));
            }
        }
    }
    if let Some(dtype) = args.dtype {
        for lora in &mut adapters {
            lora.to_float(dtype.dtype())?;
            lora.check_finite(&file_path)?;
        }
    }
    for lora in &adapters {
        let out = match lora.target_expert() {
            Some(expert) if has_several_outputs => with_suffix(&args.out, &expert.to_string()),
            _ => args.out.clone(),
        };
        refuse_input(&file_path, &out)?;
        refuse_existing(&out, args.force)?;
        let written = write_lora(lora, WriteOptions { convention, names }, &metadata, &out)?;
        println!("{}: {} layers, {from} to {convention}", written.display(), lora.layers.len());
        if convention == Convention::Peft {
            println!("{}: its configuration for PEFT", written.with_file_name(PEFT_CONFIG).display());
        }
        if (convention, lora.target_expert()) == (Convention::Diffusers, Some(Expert::Low)) {
            println!("load it in diffusers with load_lora_weights(..., load_into_transformer_2=True)");
        }
    }
    Ok(())
}

/// Fails if a LoRA of Wan has layers that neither Wan nor the `base` has: no program would find them.
fn refuse_unknown(lora: &Lora, base: Option<&Checkpoint>, path: &Path) -> Result<()> {
    let is_in_base = |layer: &&str| base.is_some_and(|base| base.contains(&format!("{layer}.weight")));
    let unknown: Vec<&str> = lora.unknown_layers().into_iter().filter(|layer| !is_in_base(layer)).collect();
    // `write_lora` itself refuses names that lost their dots in a kohya file, unless it writes a kohya file again.
    let has_undotted = lora.undotted.iter().any(|name| unknown.contains(&name.as_str()));
    if unknown.is_empty() || has_undotted {
        return Ok(());
    }
    let problem = format!(
        "{}; give the model that has them (--base)",
        lora::not_in_base(&unknown, lora.layers.len() + lora.differences.len())
    );
    Err(Error::bad_file(path, problem))
}

/// Fails if fused names do not fit the convention, or if the layers are not known.
fn refuse_fused(convention: Convention, adapters: &[Lora], path: &Path) -> Result<()> {
    if !matches!(convention, Convention::ComfyUi | Convention::Kohya) {
        let problem = format!("fused is of --to comfyui and kohya, found {convention}");
        return Err(Error::config("--names", problem));
    }
    let undotted = adapters.iter().flat_map(|lora| &lora.undotted).next();
    let Some(name) = undotted else { return Ok(()) };
    let problem = format!("`{name}` has no dots, so q, k and v are not known; give the transformer (--base)");
    Err(Error::bad_file(path, problem))
}

/// Fails if the output is the input, whose tensors are read while the output is written.
fn refuse_input(input: &Path, out: &Path) -> Result<()> {
    if matches!((input.canonicalize(), out.canonicalize()), (Ok(a), Ok(b)) if a == b) {
        return Err(Error::bad_file(out, "is the LoRA itself: write to another file"));
    }
    Ok(())
}

/// `lora.safetensors` as `lora_low_noise.safetensors`.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}_{suffix}{extension}"))
}
