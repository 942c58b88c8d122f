//! From options to a model: which files, what is trained, on which device.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use roll_backends::{Memory, Sharded};
use roll_core::model::flat;
use roll_core::registry::{default_options, parse_options};
use roll_core::{
    BuildContext, Error, Factory, Model, Noise, Options, Planner, Registration, Result, ResultExt, StateDict,
    communicator,
};

use crate::hub::Hub;
use crate::lora::{OpenedAdapter, Start};
use crate::weights::{Checkpoint, Streamed};

use super::clip::Clip;
use super::components;
use super::dit::{Dit, DitConfig, Trainable};
use super::model::{Parts, Settings, Sources, TextEncoder, Wan};
use super::options::{Placement, WanOptions};
use super::paths::ComponentFiles;
use super::starts::{self, Base};
use super::tokenizer::{PROMPT_TOKENS, Tokenizer};
use super::umt5::Umt5;
use super::vae::{Chunking, Tiling, Vae};

roll_core::inventory::submit! {
    Registration {
        name: "wan2_2",
        summary: "Wan2.2 and Wan2.1 video diffusion: I2V, T2V, TI2V",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<WanOptions>,
        factory: Factory::Model(make),
        planner: Some(Planner::Model(super::plan::needs)),
    }
}

fn make(options: &Options, context: &BuildContext) -> Result<Box<dyn Model>> {
    Ok(Box::new(open(&parse_options("model", options)?, context)?))
}

/// Opens the model that `options` describe.
pub fn open(options: &WanOptions, context: &BuildContext) -> Result<Wan> {
    let placed = WanOptions { weight_store: options.weight_store.or(context.placement), ..options.clone() };
    let options = &placed;
    let device = roll_backends::device(&context.backend)?;
    let model_paths = options.model_paths.as_ref().map(|p| context.resolve(p));
    let ids = options.model_id_with_origin_paths.as_deref();
    if model_paths.is_none() && ids.is_none() {
        return Err(Error::config(
            "model.model_paths",
            "no weights are named: give a wan22_paths.json, or `model.model_id_with_origin_paths`; \
             `roll init-tiny DIR` writes a small checkpoint to try things with",
        ));
    }
    options.check()?;
    let files = ComponentFiles::resolve(model_paths.as_deref(), ids, &Hub::from_env()).in_section("model")?;
    let present: Vec<&str> = if files.dit2.is_some() { vec!["dit", "dit2"] } else { vec!["dit"] };
    let adapters = match &options.lora_checkpoint {
        Some(sources) => sources.open(|path| context.resolve(path)).while_doing(|| "`model.lora_checkpoint`".into())?,
        None => Vec::new(),
    };
    let mut starts = starts::assign(adapters, options, &present)?;
    let trained = options.trained_experts(&present, &starts.keys().copied().collect::<Vec<_>>())?;
    let mut bases = Vec::new();
    let mut open_expert = |name: &'static str, file: &Checkpoint| -> Result<Dit> {
        let mut dit = open_dit(file, options, &device)?;
        let base = Base::of(file, dit.config()).while_doing(|| reading(file))?;
        let own = starts.remove(name).unwrap_or_default();
        own.iter().for_each(|adapter| base.compare(adapter));
        bases.push(base);
        train(&mut dit, name, file, options, &trained, own, context.seed)?;
        Ok(dit)
    };
    let dit = open_expert("dit", &files.dit)?;
    let dit2 = files.dit2.as_ref().map(|file| open_expert("dit2", file)).transpose()?;
    let vae = Vae::load(&files.vae.all()?, &device).while_doing(|| reading(&files.vae))?;
    let text = match &files.text_encoder {
        Some(file) => Some(open_text(file, &files, options, context, &device)?),
        None => None,
    };
    let clip = match &files.clip {
        Some(file) => Some(Clip::streamed(file, None, &device).while_doing(|| reading(file))?),
        None => None,
    };
    let tiling = match (options.vae_tile_size, options.vae_tile_stride) {
        (Some(size), Some(stride)) => {
            let tiling = Tiling { size, stride };
            tiling.check().in_section("model")?;
            Some(tiling)
        }
        (None, None) => None,
        _ => return Err(Error::config("model.vae_tile_size", "needs `vae_tile_stride` beside it, and the reverse")),
    };
    if options.shift.is_some() {
        tracing::warn!(
            "`model.shift` is the old name of `algo.shift` (and `roll generate --shift`), which wins where both are given"
        );
    }
    let settings = Settings {
        shift: options.shift,
        boundary: options.boundary,
        end_image: options.wants("end_image"),
        chunking: Chunking { tiling, checkpoints: options.vae_checkpoints },
    };
    let sources = Sources {
        files: std::iter::once(&files.vae)
            .chain(&files.text_encoder)
            .chain(&files.clip)
            .flat_map(|file| file.paths().map(Path::to_path_buf))
            .chain(text.as_ref().map(|text| text.tokenizer.path().to_path_buf()))
            .collect(),
        settings: format!(
            "{}, {:?} tokens, end image {}, tiles {:?}",
            context.backend,
            text.as_ref().map(|text| text.length),
            settings.end_image,
            settings.chunking.tiling,
        ),
    };
    let model = Wan::new(Parts { dit, dit2, vae, text, clip }, settings)
        .with_sources(sources)
        .with_bases(bases)
        .placed(options.weight_store.chosen());
    Ok(model)
}

fn reading(file: &Checkpoint) -> String {
    format!("reading {}", file.path().display())
}

/// A transformer of which nothing is trained yet.
fn open_dit(file: &Checkpoint, options: &WanOptions, device: &Device) -> Result<Dit> {
    let stored = match file.info("head.head.weight").and_then(|info| info.dtype) {
        Some(roll_core::DType::Bf16) => DType::BF16,
        _ => DType::F32,
    };
    let dtype = options.weights_dtype.of(stored, device)?;
    let heads = options.num_heads.or_else(|| components::heads(file));
    let memory = match (options.use_gradient_checkpointing, options.use_gradient_checkpointing_offload) {
        (_, true) => Memory::Offload,
        (true, false) => Memory::Recompute,
        (false, false) => Memory::Hold,
    };
    let opened = || -> Result<Dit> {
        let dit = match options.weight_store {
            Placement::Auto | Placement::Resident => Dit::new(&file.all()?, heads, dtype, device)?,
            Placement::Streamed => {
                let store = Streamed::new(file.clone(), device).with_dtype(dtype).reading_ahead();
                Dit::with_store(DitConfig::from_shapes(&file.shapes(), heads)?, Arc::new(store))
            }
            Placement::Sharded => {
                let config = DitConfig::from_shapes(&file.shapes(), heads)?;
                let store = Sharded::new(&file.all()?, dtype, device, communicator::current())?;
                file.keys().for_each(|key| file.release(key));
                let dit = Dit::with_store(config, Arc::new(store));
                let ranks = communicator::current();
                if ranks.world_size() > 1 { dit.dividing_weights(ranks) } else { dit }
            }
        }
        .with_memory(memory)
        .with_products(options.compute_dtype.of(dtype, device)?);
        Ok(dit)
    };
    opened().in_section("model").while_doing(|| reading(file))
}

/// Chooses what is trained of `dit`: what `adapters` hold, from their values on, or what the options say.
fn train(
    dit: &mut Dit,
    name: &str,
    file: &Checkpoint,
    options: &WanOptions,
    trained: &[String],
    adapters: Vec<OpenedAdapter>,
    seed: u64,
) -> Result<()> {
    let weights = dit.config().weights();
    let layers =
        weights.iter().filter(|(_, shape)| shape.len() == 2).filter_map(|(key, _)| key.strip_suffix(".weight"));
    let layers: Vec<String> = layers.map(Into::into).collect();
    let targets = options.lora_target_modules.as_ref().map(|_| options.lora_targets());
    let start = match adapters.is_empty() {
        true => None,
        false => Some(Start::new(adapters, options.asked(targets.as_deref()), &layers).in_section("model")?),
    };
    let trainable = start.as_ref().map_or_else(|| options.trainable(trained, name), Start::trainable);
    // The two experts start from different adapters: their names are part of the draws' key.
    let noise = Noise::new(seed ^ u64::from(name == "dit2"));
    let base = if trainable == Trainable::Full { file.all()? } else { StateDict::new() };
    dit.train(&trainable, &noise, &base).in_section("model")?;
    match (start, dit.parameters()) {
        (Some(start), Some(parameters)) => {
            let values = flat::from_state(parameters.specs(), start.parameters());
            parameters.write(&values.while_doing(|| "`model.lora_checkpoint`".into())?)
        }
        _ => Ok(()),
    }
}

fn open_text(
    file: &Checkpoint,
    files: &ComponentFiles,
    options: &WanOptions,
    context: &BuildContext,
    device: &Device,
) -> Result<TextEncoder> {
    let given = options.tokenizer_path.as_ref().map(|p| context.resolve(p));
    let place: &Path = given.as_deref().or(files.tokenizer.as_deref()).ok_or_else(|| {
        Error::config(
            "model.tokenizer_path",
            "the UMT5 encoder needs its tokenizer: name the directory of tokenizer.json",
        )
    })?;
    let tokenizer = Tokenizer::load(place).in_section("model")?;
    let encoder = Umt5::streamed(file, device).while_doing(|| format!("reading {}", file.path().display()))?;
    if tokenizer.vocabulary() > encoder.config().vocab {
        return Err(Error::bad_file(
            place,
            format!(
                "the tokenizer has {} ids, the text encoder {} embeddings: they do not belong together",
                tokenizer.vocabulary(),
                encoder.config().vocab
            ),
        ));
    }
    Ok(TextEncoder { tokenizer, encoder, length: text_len(files)? })
}

/// More rows than that are a mistake in the file; attention over them would only fill the memory.
const MAX_TEXT_LEN: usize = 1 << 14;

/// Rows of the text embedding; the experts of a checkpoint must agree.
pub(super) fn text_len(files: &ComponentFiles) -> Result<usize> {
    let of = |file: &Checkpoint| components::text_len(file).unwrap_or(PROMPT_TOKENS);
    let length = of(&files.dit);
    if length > MAX_TEXT_LEN {
        let problem = format!("says `text_len` {length}; prompts have at most {MAX_TEXT_LEN} tokens");
        return Err(Error::bad_file(files.dit.path(), problem));
    }
    match files.dit2.as_ref().filter(|low| of(low) != length) {
        Some(low) => Err(Error::bad_file(
            low.path(),
            format!("the experts were trained with prompts of {length} and of {} tokens (`text_len`)", of(low)),
        )),
        None => Ok(length),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::DiffusionModel;

    use super::super::init_tiny::{TinyKind, init_tiny};
    use super::*;

    fn refused(spoil: impl FnOnce(&mut WanOptions)) -> String {
        opened(TinyKind::T2v, spoil).err().unwrap().chain()
    }

    fn opened(kind: TinyKind, spoil: impl FnOnce(&mut WanOptions)) -> Result<Wan> {
        let dir = tempfile::tempdir().unwrap();
        let files = init_tiny(dir.path(), kind, 0).unwrap();
        let mut options = WanOptions {
            model_paths: Some(files.model_paths),
            tokenizer_path: Some(files.tokenizer),
            lora_rank: Some(2),
            ..WanOptions::default()
        };
        spoil(&mut options);
        let context = BuildContext { backend: "flex".into(), seed: 0, base_dir: dir.path().into(), placement: None };
        open(&options, &context)
    }

    #[test]
    fn shift_and_frame_rate_are_those_of_the_official_inference() {
        let facts = |kind, shift: Option<f64>| {
            let model = opened(kind, |options| options.shift = shift).unwrap();
            (DiffusionModel::schedule(&model).shift, model.frame_rate())
        };
        assert_eq!(facts(TinyKind::T2v, None), (12.0, Some(16.0)));
        assert_eq!(facts(TinyKind::I2v, None), (5.0, Some(16.0)));
        assert_eq!(facts(TinyKind::Ti2v, None), (5.0, Some(24.0)));
        assert_eq!(facts(TinyKind::I2v21, None), (5.0, Some(16.0)));
        // The old key of runs that were begun with it.
        assert_eq!(facts(TinyKind::T2v, Some(5.0)).0, 5.0);
    }

    #[test]
    fn errors_name_the_key_with_its_section() {
        let targets = refused(|o| o.lora_target_modules = Some("nosuch".into()));
        assert!(targets.contains("`model.lora_target_modules`"), "{targets}");
        let heads = refused(|o| o.num_heads = Some(7));
        assert!(heads.contains("`model.num_heads`"), "{heads}");
        let tokenizer = refused(|o| o.tokenizer_path = Some("nowhere".into()));
        assert!(tokenizer.contains("`model.tokenizer_path`"), "{tokenizer}");
        let tiles = refused(|o| (o.vae_tile_size, o.vae_tile_stride) = (Some([4, 4]), Some([4, 8])));
        assert!(tiles.contains("`model.vae_tile_stride`"), "{tiles}");
        let list = refused(|o| {
            let list = o.model_paths.as_ref().unwrap();
            let path = list.with_file_name("vae.json");
            std::fs::write(&path, r#"["Wan2.1_VAE.safetensors"]"#).unwrap();
            o.model_paths = Some(path);
        });
        assert!(list.contains("`model.model_paths`"), "{list}");
    }
}
