//! Describes the files of a language model for people, from their headers. Their contents are checked when the model is
//! opened.

use std::path::Path;

use roll_core::{BuildContext, Error, FileCheck, FilesFound, Kind, Options, Result, parse_options};
use roll_network::headers::summary;
use roll_network::hub::Hub;

use super::chat::ChatTemplate;
use super::loading::CausalLmOptions;
use super::source;

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "causal_lm", check }
}

fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: CausalLmOptions = parse_options(Kind::Model.section(), options)?;
    let Some(path) = &options.model_path else {
        return Ok(FilesFound { lines: vec!["the built-in small language model".into()], missing: None });
    };
    // Whether a run could download the files. The check itself does not: `Hub::of` turns downloads off for it.
    let can_download = Hub::from_env().remote.is_some();
    let location = match source::locate(path, context.resolve(path), &Hub::of(context)) {
        // A run would download the files.
        Err(error) if can_download => return Ok(FilesFound { missing: Some(error.chain()), ..FilesFound::default() }),
        location => location?,
    };
    if source::is_gguf(&location)? {
        let bytes = std::fs::metadata(&location).map_err(Error::file("read", &location))?.len();
        let line = format!("{}: one file of {:.2} GB", location.display(), bytes as f64 / 1e9);
        return Ok(FilesFound { lines: vec![line], missing: None });
    }
    let mut lines = vec![summary("language model", &source::open_weights(&location)?)];
    lines.extend(missing_beside(&location)?);
    Ok(FilesFound { lines, missing: None })
}

/// A line for each of tokenizer and chat template that `directory` lacks.
pub fn missing_beside(directory: &Path) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    if !directory.join("tokenizer.json").exists() {
        lines.push("tokenizer: none (tokenizer.json is not there)".into());
    }
    if ChatTemplate::load(directory)?.is_none() {
        lines.push("chat template: none".into());
    }
    Ok(lines)
}
