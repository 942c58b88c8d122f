//! Describes the files of a model for people, from their headers. Their contents are checked when the model is opened.

use roll_core::{BuildContext, FileCheck, FilesFound, Kind, Options, Result, parse_options};
use roll_network::headers::summary;
use roll_network::hub::Hub;

use super::base_lora;
use super::components::Component;
use super::dit::Trainable;
use super::initial_adapters;
use super::loading::{open_tokenizer, text_len};
use super::options::WanOptions;
use super::paths::ComponentFiles;
use super::umt5::Umt5Config;

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "wan2_2", check }
}

/// Opens the headers of the model's files and returns a line of text for each network.
fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: WanOptions = parse_options(Kind::Model.section(), options)?;
    let can_download = Hub::from_env().remote.is_some();
    let mut files = match ComponentFiles::open(&options, context, &Hub::of(context)) {
        // A run would download the files.
        Err(error) if options.model_id_with_origin_paths.is_some() && can_download => {
            return Ok(FilesFound { missing: Some(error.chain()), ..FilesFound::default() });
        }
        files => files?,
    };
    let base_loras = base_lora::merge(&options, context, &mut files)?;
    let (adapters, trained) = initial_adapters::open(&options, context, &files)?;
    let expert_line = |(name, file)| {
        let training = match options.trainable(&trained, name) {
            Trainable::Frozen => "frozen".into(),
            // The file from which the LoRA starts determines the rank.
            Trainable::Lora { .. } if adapters.contains_key(name) => {
                "the LoRA of `model.lora_checkpoint` is trained".into()
            }
            Trainable::Lora { rank, .. } => format!("a LoRA of rank {rank} is trained"),
            Trainable::Layers { .. } => "a LoRA is trained".into(),
            Trainable::Full => "all weights are trained".into(),
        };
        let merged = base_loras.get(name).map(|loras| format!(" with {loras} merged in")).unwrap_or_default();
        format!("{}{merged}; {training}", summary(&format!("transformer `{name}`"), file))
    };
    let mut lines: Vec<String> = files.experts().map(expert_line).collect();
    lines.push(summary(&files.vae_kind.to_string(), &files.vae));
    if let Some(file) = &files.text_encoder {
        lines.push(summary(&Component::TextEncoder.to_string(), file));
        let vocabulary = Umt5Config::from_shapes(&file.shapes())?.vocab;
        let tokenizer = open_tokenizer(&files, vocabulary, &options, context)?;
        lines.push(format!("tokenizer: {} ids, prompts of {} tokens", tokenizer.vocabulary(), text_len(&files)?));
    }
    lines.extend(files.clip.iter().map(|file| summary(&Component::Clip.to_string(), file)));
    Ok(FilesFound { lines, missing: None })
}
