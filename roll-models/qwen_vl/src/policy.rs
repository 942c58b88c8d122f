//! The model `qwen_vl`: the language model of a vision-language network as a policy that sees pictures.
//!
//! The language model is trained, the vision tower is frozen. Everything but the tower and the tokens of pictures is that
//! of the model `causal_lm`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use roll_causal_lm::{
    CausalLm, CausalLmOptions, ChatTemplate, LoadedModel, Module, add_end_of_tokenizer, missing_beside, opened, origin,
    planned,
};
use roll_core::plan::{Needs, PlanInput};
use roll_core::{BuildContext, Error, FileCheck, FilesFound, Kind, Options, Result, StateDict, parse_options};
use roll_media::PixelLimits;
use roll_network::headers::summary;
use roll_network::precision::DeviceTraits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::loading::{NetworkFiles, Precision, QwenVlOptions, WeightLocation, checkpoint, is_of_tower, tokenizer};
use super::pictures::Pictures;
use super::plan;
use super::processor::{self, PictureOptions};
use super::source::{locate, missing};

/// The section of errors.
const SECTION: &str = "model";

/// Options of the model `qwen_vl`: those of a language model, and those of pictures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PolicyOptions {
    /// Options of the language model.
    #[serde(flatten)]
    pub language: CausalLmOptions,
    /// Options of pictures.
    #[serde(flatten)]
    pub pictures: PictureOptions,
}

impl PolicyOptions {
    /// Opens the files and checks their headers, and reads the bounds of pictures.
    fn files(&self, context: &BuildContext) -> Result<(NetworkFiles, PixelLimits)> {
        let is_gguf = |path: &Path| path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        if let Some(path) = self.language.model_path.as_deref().filter(|path| is_gguf(path)) {
            let problem = format!(
                "expected the directory of a Qwen2-VL or Qwen2.5-VL, found {}: a GGUF file has no vision tower, and opens \
                 with `model.name: causal_lm`",
                path.display()
            );
            return Err(Error::config("model.model_path", problem));
        }
        let mut files = NetworkFiles::open(SECTION, &self.network(), context)?;
        files.config.text.read_generation(&files.directory.join("config.json"))?;
        let limits = processor::limits(&files.directory, &self.pictures, &files.config.vision)?;
        Ok((files, limits))
    }

    /// The options of the network alone.
    fn network(&self) -> QwenVlOptions {
        let language = &self.language;
        QwenVlOptions {
            model_path: language.model_path.clone(),
            use_gradient_checkpointing: language.use_gradient_checkpointing,
            use_gradient_checkpointing_offload: language.use_gradient_checkpointing_offload,
            weights_dtype: language.weights_dtype,
            compute_dtype: language.compute_dtype,
            ..QwenVlOptions::default()
        }
    }
}

/// Opens the model that `options` describe.
pub fn open_policy(options: &PolicyOptions, context: &BuildContext) -> Result<CausalLm> {
    let device = roll_backends::device(&context.backend)?;
    let (files, limits) = options.files(context)?;
    let network = options.network();
    let precision = Precision::of(SECTION, &network, files.stored, DeviceTraits::of(&device))?;
    let tower = files.store(is_of_tower, &precision, WeightLocation::Resident, &device, context.headers_only)?;
    let pictures = Pictures::new(files.config.clone(), tower, precision.products, network.memory(), limits);
    let directory = files.directory.as_path();
    let tokenizer = tokenizer(None, &[directory])?;
    let mut config = files.config.text.clone();
    if let Some(tokenizer) = &tokenizer {
        add_end_of_tokenizer(&mut config, tokenizer, directory)?;
    }
    let tensors = |of_tower: bool| -> Result<StateDict> {
        let names = files.wanted.iter().filter(|(name, _)| is_of_tower(name) == of_tower);
        names.map(|(name, _)| Ok((name.clone(), files.weights.tensor(name)?))).collect()
    };
    let loaded = LoadedModel {
        config,
        state: tensors(false)?,
        quantised: BTreeMap::new(),
        tokenizer,
        template: ChatTemplate::load(directory)?,
        location: directory.display().to_string(),
    };
    let name = options.language.model_path.clone();
    let published = name.filter(|name| directory != context.resolve(name));
    let origin = |trains_all: bool| {
        let mut origin = origin(Some(directory), published, trains_all)?;
        origin.module = Module::LanguageModel;
        if trains_all {
            origin.frozen = tensors(true)?;
        }
        Ok(origin)
    };
    opened(&options.language, context, loaded, Some(Arc::new(pictures)), origin)
}

/// Predicts the memory of each rank of a run with these options. Only the headers of the files are read.
fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let options: PolicyOptions = parse_options(SECTION, options)?;
    let (files, limits) = options.files(context)?;
    let device = DeviceTraits::planned(input.memory.is_some());
    let precision = Precision::of(SECTION, &options.network(), files.stored, device)?;
    let headers = (files.config.text.clone(), files.stored);
    let mut needs = planned("qwen_vl", &options.language, headers, input, context)?;
    needs.memory.extend(plan::of_policy(&files, &precision, limits, options.language.max_length, input));
    Ok(needs)
}

/// Describes the files for people.
fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: PolicyOptions = parse_options(SECTION, options)?;
    let Some(name) = &options.language.model_path else { return Ok(FilesFound::default()) };
    if let Some(models) = missing(std::iter::once(name), context) {
        return Ok(FilesFound { missing: Some(models), ..FilesFound::default() });
    }
    let (files, _) = options.files(context)?;
    let mut lines = vec![summary("vision-language model", &checkpoint(SECTION, &locate(name, context)?)?)];
    lines.extend(missing_beside(&files.directory)?);
    Ok(FilesFound { lines, missing: None })
}

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "qwen_vl", check }
}

roll_core::inventory::submit! {
    roll_core::OptionNotes {
        kind: Kind::Model,
        name: "qwen_vl",
        idle: roll_network::trainable::IDLE_KEYS,
        more: None,
    }
}

roll_core::register! {
    Model, "qwen_vl", PolicyOptions,
    "Language models that see pictures: Qwen2-VL, Qwen2.5-VL",
    |options, context| open_policy(&options, context),
    plan: needs,
}
