//! Finds the files of a network: paths, and published models of the Hugging Face hub.

use std::path::{Path, PathBuf};

use roll_core::{BuildContext, Error, Result, ResultExt};
use roll_network::hub::Hub;

/// Patterns of files that a published network of the Hugging Face layout has.
const NEEDED: &[&str] = &["config.json", "*.safetensors"];
/// Small files of a published model: tokenizer, configurations, chat template, index of shards.
const SMALL: &[&str] = &["**/*.json", "*.jinja"];

/// A name of a published model: `ORG/NAME`, or `ORG/NAME:FILE` for one file and the small files of its repository.
struct Published<'a> {
    model: &'a str,
    file: Option<&'a str>,
}

impl<'a> Published<'a> {
    /// Parses `name`; `None` if it is a path: it exists, is no pair of plain names, or begins like a path.
    fn parse(name: &'a str, context: &BuildContext) -> Option<Self> {
        let (model, file) = name.split_once(':').map_or((name, None), |(model, file)| (model, Some(file)));
        let is_pair = model.split('/').filter(|part| !part.is_empty()).count() == 2;
        let is_path = name.starts_with(['.', '/', '~']) || context.resolve(name).exists();
        let is_weight_file = file.is_none() && [".safetensors", ".pth", ".json"].iter().any(|end| model.ends_with(end));
        (is_pair && !is_path && !is_weight_file).then_some(Self { model, file })
    }

    fn find(&self, hub: &Hub) -> Result<PathBuf> {
        let found = match self.file {
            Some(file) => hub.directory(self.model, &[file], SMALL).map(|directory| directory.join(file)),
            None => hub.directory(self.model, NEEDED, SMALL),
        };
        let found = found.map_err(Error::from).while_doing(|| {
            format!(
                "looking for the published model `{0}`; of a repository whose weights are not safetensors beside \
                 config.json, name the file: `{0}:FOLDER/model.pth`",
                self.model
            )
        })?;
        match found.exists() {
            true => Ok(found),
            false => Err(Error::bad_file(found, "it does not exist")),
        }
    }
}

/// The path of `name`: a path, `ORG/NAME` or `ORG/NAME:FILE`. Missing files of a published model are downloaded, unless
/// the network is only checked.
pub fn locate(name: &Path, context: &BuildContext) -> Result<PathBuf> {
    match Published::parse(&name.to_string_lossy(), context) {
        Some(published) => published.find(&Hub::of(context)),
        None => Ok(context.resolve(name)),
    }
}

/// The names of published models among `names` whose files a run would download first; `None` if all files are on this
/// machine, or downloads are off.
pub fn missing<'a>(names: impl Iterator<Item = &'a PathBuf>, context: &BuildContext) -> Option<String> {
    let online = Hub::from_env();
    let offline = Hub { remote: None, ..online.clone() };
    let names = names.map(|name| name.to_string_lossy());
    let is_missing =
        |name: &str| Published::parse(name, context).is_some_and(|published| published.find(&offline).is_err());
    let missing: Vec<String> = names.filter(|name| is_missing(name)).map(|name| format!("`{name}`")).collect();
    (online.remote.is_some() && !missing.is_empty()).then(|| missing.join(", "))
}
