//! Describes the files of a model for people, from their headers. Their contents are checked when the model is opened.

use roll_core::{BuildContext, FileCheck, FilesFound, Kind, Options, Result, parse_options};
use roll_network::headers::summary;
use roll_network::hub::Hub;
use roll_network::trainable::Trainable;

use crate::files::ComponentFiles;
use crate::loading::{merge_base_lora, open_tokenizer};
use crate::options::ZImageOptions;
use crate::text::MAX_TOKENS;

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "z_image", check }
}

/// Opens the headers of the model's files and returns a line of text for each network.
fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: ZImageOptions = parse_options(Kind::Model.section(), options)?;
    let is_published = options.model_path.as_ref().is_some_and(|name| !context.resolve(name).exists());
    let mut files = match ComponentFiles::open(&options, context, &Hub::of(context)) {
        // A run would download the files.
        Err(error) if is_published && Hub::from_env().remote.is_some() => {
            return Ok(FilesFound { missing: Some(error.chain()), ..FilesFound::default() });
        }
        files => files?,
    };
    let merged = merge_base_lora(&options, context, &mut files)?;
    let merged = merged.map(|loras| format!(" with {loras} merged in")).unwrap_or_default();
    let training = match (options.trainable(), &options.lora_checkpoint) {
        (_, Some(_)) => "the adapter of `model.lora_checkpoint` is trained".into(),
        (Trainable::Full, _) => "all weights are trained".into(),
        (Trainable::Lora { rank, .. }, _) => format!("a LoRA of rank {rank} is trained"),
        (Trainable::Frozen | Trainable::Layers { .. }, _) => "a LoRA is trained".into(),
    };
    let vocabulary = open_tokenizer(&files)?.vocabulary();
    let lines = vec![
        format!("{}{merged}; {training}", summary("transformer", files.dit.file())),
        summary("VAE", &files.vae),
        summary("text encoder", &files.text),
        format!("tokenizer: {vocabulary} ids, prompts of at most {MAX_TOKENS} tokens"),
        format!("schedule: shift {}", files.shift),
    ];
    Ok(FilesFound { lines, missing: None })
}
