//! The check of a language model's files by their headers.

use roll_core::{BuildContext, Error, FileCheck, FilesFound, Kind, Options, Result, parse_options};

use super::chat::ChatTemplate;
use super::config::LmConfig;
use super::loading::CausalLmOptions;
use super::source;
use super::tokenizer::Tokenizer;
use crate::headers::{check_tensors, summary};
use crate::hub::Hub;

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "causal_lm", check }
}

fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: CausalLmOptions = parse_options(Kind::Model.section(), options)?;
    let Some(path) = &options.model_path else {
        return Ok(FilesFound { lines: vec!["the built-in small language model".into()], ..FilesFound::default() });
    };
    let hub = Hub::from_env();
    let offline = Hub { remote: None, ..hub.clone() };
    let location = match source::locate(path, context.resolve(path), &offline) {
        Err(error) if hub.remote.is_some() && !context.resolve(path).exists() => {
            return Ok(FilesFound { missing: Some(error.chain()), ..FilesFound::default() });
        }
        location => location?,
    };
    if location.is_file() {
        let bytes = std::fs::metadata(&location).map_err(Error::file("read", &location))?.len();
        let line = format!("{}: one file of {:.2} GB, not checked", location.display(), bytes as f64 / 1e9);
        return Ok(FilesFound { lines: vec![line], ..FilesFound::default() });
    }
    let config = LmConfig::read(&location.join("config.json"))?;
    let file = source::open_weights(&location)?;
    check_tensors(&file, &config.weights())?;
    let mut lines = vec![summary("language model", &file), format!("context of {} tokens", config.context)];
    let tokenizer = location.join("tokenizer.json");
    match tokenizer.exists() {
        true => {
            Tokenizer::load(&tokenizer)?;
            lines.push("tokenizer: tokenizer.json".into());
        }
        false => lines.push("tokenizer: none (tokenizer.json is not there)".into()),
    }
    if ChatTemplate::load(&location)?.is_none() {
        lines.push("chat template: none".into());
    }
    Ok(FilesFound { lines, ..FilesFound::default() })
}
