//! Checks the files of a model by their headers. Reports the errors that opening the model would, without opening it.

use roll_core::{
    BuildContext, Error, FileCheck, FilesFound, Kind, Options, Result, ResultExt, VideoUnit, parse_options,
};

use super::components::{self, Component};
use super::dit::{DitConfig, Trainable};
use super::loading::text_len;
use super::options::WanOptions;
use super::paths::ComponentFiles;
use super::starts;
use super::tokenizer::Tokenizer;
use super::umt5::Umt5Config;
use super::vae::VaeConfig;
use crate::headers::{check_tensors, summary};
use crate::hub::Hub;
use crate::weights::Checkpoint;

roll_core::inventory::submit! {
    FileCheck { kind: Kind::Model, name: "wan2_2", check }
}

fn check(options: &Options, context: &BuildContext) -> Result<FilesFound> {
    let options: WanOptions = parse_options(Kind::Model.section(), options)?;
    options.check()?;
    let section = Kind::Model.section();
    let paths = options.model_paths.as_ref().map(|path| context.resolve(path));
    let ids = options.model_id_with_origin_paths.as_deref();
    if paths.is_none() && ids.is_none() {
        return Err(Error::config(
            "model.model_paths",
            "no weights are named: give a wan22_paths.json, or a directory",
        ));
    }
    let hub = Hub::from_env();
    let here = Hub { remote: None, ..hub.clone() };
    let files = match ComponentFiles::resolve(paths.as_deref(), ids, &here).in_section(section) {
        Err(error) if ids.is_some() && hub.remote.is_some() => {
            return Ok(FilesFound { missing: Some(error.chain()), ..FilesFound::default() });
        }
        files => files?,
    };
    let mut lines = Vec::new();
    let present: &[&str] = if files.dit2.is_some() { &["dit", "dit2"] } else { &["dit"] };
    let adapters = match &options.lora_checkpoint {
        Some(sources) => sources.open(|path| context.resolve(path)).while_doing(|| "`model.lora_checkpoint`".into())?,
        None => Vec::new(),
    };
    let starts = starts::assign(adapters, &options, present)?;
    let trained = options.trained_experts(present, &starts.keys().copied().collect::<Vec<_>>())?;
    for (name, file) in [("dit", Some(&files.dit)), ("dit2", files.dit2.as_ref())] {
        let Some(file) = file else { continue };
        let heads = options.num_heads.or_else(|| components::heads(file));
        check_tensors(file, &DitConfig::from_shapes(&file.shapes(), heads).while_doing(|| reading(file))?.weights())?;
        let how = match options.trainable(&trained, name) {
            Trainable::Frozen => "frozen".into(),
            Trainable::Full => "all weights are trained".into(),
            // The rank is in the file that the LoRA starts from.
            Trainable::Lora { .. } if starts.contains_key(name) => {
                "the LoRA of `model.lora_checkpoint` is trained".into()
            }
            Trainable::Lora { rank, .. } => format!("a LoRA of rank {rank} is trained"),
            Trainable::Layers { .. } => "a LoRA is trained".into(),
        };
        lines.push(format!("{}; {how}", summary(&format!("transformer `{name}`"), file)));
    }
    let vae = VaeConfig::from_shapes(&files.vae.shapes()).while_doing(|| reading(&files.vae))?;
    check_tensors(&files.vae, &vae.weights())?;
    let heads = options.num_heads.or_else(|| components::heads(&files.dit));
    let [_, height, width] = DitConfig::from_shapes(&files.dit.shapes(), heads)?.patch;
    let unit = VideoUnit {
        height: height * vae.spatial_stride(),
        width: width * vae.spatial_stride(),
        frames: vae.temporal_stride(),
    };
    lines.push(summary(&files.vae_kind.to_string(), &files.vae));
    if let Some(file) = &files.text_encoder {
        let config = Umt5Config::from_shapes(&file.shapes()).while_doing(|| reading(file))?;
        check_tensors(file, &config.weights())?;
        lines.push(summary(&Component::TextEncoder.to_string(), file));
        let given = options.tokenizer_path.as_ref().map(|path| context.resolve(path));
        let Some(place) = given.or_else(|| files.tokenizer.clone()) else {
            let problem = "the UMT5 encoder needs its tokenizer: name the directory of tokenizer.json";
            return Err(Error::config("model.tokenizer_path", problem));
        };
        let tokenizer = Tokenizer::load_with(&place, &here).in_section(section)?;
        if tokenizer.vocabulary() > config.vocab {
            let (found, most) = (tokenizer.vocabulary(), config.vocab);
            let problem = format!("the tokenizer has {found} ids, the text encoder {most} embeddings");
            return Err(Error::bad_file(place, problem));
        }
        let length = text_len(&files)?;
        lines.push(format!("tokenizer: {} ids, prompts of {length} tokens", tokenizer.vocabulary()));
    }
    if let Some(file) = &files.clip {
        lines.push(summary(&Component::Clip.to_string(), file));
    }
    Ok(FilesFound { lines, missing: None, unit })
}

fn reading(file: &Checkpoint) -> String {
    format!("reading {}", file.path().display())
}
