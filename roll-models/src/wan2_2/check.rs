//! Checks the files of a model by their headers. Reports the errors that opening the model would, without opening it.

use roll_core::{BuildContext, FileCheck, FilesFound, Kind, Options, Result, ResultExt, parse_options};

use super::components::{self, Component};
use super::dit::Trainable;
use super::initial_adapters;
use super::loading::{open_tokenizer, reading, text_len};
use super::model::video_unit;
use super::options::WanOptions;
use super::paths::ComponentFiles;
use super::umt5::Umt5Config;
use super::vae::VaeConfig;
use crate::headers::{check_tensors, summary};
use crate::hub::Hub;

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "wan2_2", check }
}

fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: WanOptions = parse_options(Kind::Model.section(), options)?;
    options.check()?;
    let hub = Hub::from_env();
    let offline = Hub { remote: None, ..hub.clone() };
    let files = match ComponentFiles::open(&options, context, &offline) {
        Err(error) if options.model_id_with_origin_paths.is_some() && hub.remote.is_some() => {
            return Ok(FilesFound { missing: Some(error.chain()), ..FilesFound::default() });
        }
        files => files?,
    };
    let mut lines = Vec::new();
    let (adapters, trained) = initial_adapters::open(&options, context, &files)?;
    for (name, file) in files.experts() {
        check_tensors(file, &components::dit_config(file, options.num_heads).while_doing(|| reading(file))?.weights())?;
        let how = match options.trainable(&trained, name) {
            Trainable::Frozen => "frozen".into(),
            Trainable::Full => "all weights are trained".into(),
            // The rank is in the file that the LoRA starts from.
            Trainable::Lora { .. } if adapters.contains_key(name) => {
                "the LoRA of `model.lora_checkpoint` is trained".into()
            }
            Trainable::Lora { rank, .. } => format!("a LoRA of rank {rank} is trained"),
            Trainable::Layers { .. } => "a LoRA is trained".into(),
        };
        lines.push(format!("{}; {how}", summary(&format!("transformer `{name}`"), file)));
    }
    let vae = VaeConfig::from_shapes(&files.vae.shapes()).while_doing(|| reading(&files.vae))?;
    check_tensors(&files.vae, &vae.weights())?;
    let unit = video_unit(&vae, &components::dit_config(&files.dit, options.num_heads)?);
    lines.push(summary(&files.vae_kind.to_string(), &files.vae));
    if let Some(file) = &files.text_encoder {
        let config = Umt5Config::from_shapes(&file.shapes()).while_doing(|| reading(file))?;
        check_tensors(file, &config.weights())?;
        lines.push(summary(&Component::TextEncoder.to_string(), file));
        let tokenizer = open_tokenizer(&files, config.vocab, &options, context, &offline)?;
        let length = text_len(&files)?;
        lines.push(format!("tokenizer: {} ids, prompts of {length} tokens", tokenizer.vocabulary()));
    }
    if let Some(file) = &files.clip {
        lines.push(summary(&Component::Clip.to_string(), file));
    }
    Ok(FilesFound { lines, missing: None, unit })
}
