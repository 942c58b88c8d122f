//! Creates a model from its options: files, trained parameters, device.

use std::path::Path;
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::ops::Fp8Products;
use roll_backends::weights::{DeviceSlot, HostWeight, MatrixStorage, SegmentMemory};
use roll_backends::{Backend, Resident, Sharded, WeightStore};
use roll_core::{BuildContext, Communicator, Error, Noise, Result, ResultExt, StateDict, flat};
use roll_network::hub::Hub;
use roll_network::lora::{BaseNetwork, InitialAdapter, OpenedAdapter};
use roll_network::trainable::kept_for_pullback;
use roll_network::weights::{self, Checkpoint, Streamed};

use super::base_lora;
use super::clip::Clip;
use super::components;
use super::dit::{Dit, PassMemory, PassSettings, Trainable};
use super::initial_adapters;
use super::layout::{Layout, Machine};
use super::model::{EncodingSources, Parts, Settings, Wan};
use super::networks::Networks;
use super::options::{IdleExpert, Placement, WanOptions};
use super::paths::{ComponentFiles, reading};
use super::prompts::TextEncoder;
use super::tokenizer::{PROMPT_TOKENS, Tokenizer};
use super::umt5::Umt5;
use super::vae::{Chunking, MemoryBudget, Tiling, Vae};

roll_core::register! {
    Model, "wan2_2", WanOptions,
    "Wan2.2 and Wan2.1 video diffusion: I2V, T2V, TI2V",
    |options, context| open(&options, context),
    plan: super::plan::needs,
}

/// The weight whose fingerprint identifies a transformer.
const LAST_WEIGHT: &str = "head.head.weight";

/// Opens the model that `options` describe. Fails if a file is missing or does not fit the options.
pub fn open(options: &WanOptions, context: &BuildContext) -> Result<Wan> {
    options.check()?;
    let device = roll_backends::device(&context.backend)?;
    let mut files = ComponentFiles::open(options, context, &Hub::of(context))?;
    let mut base_loras = base_lora::merge(options, context, &mut files)?;
    base_loras.iter().for_each(|(expert, loras)| tracing::info!("`{expert}` has the base LoRA {loras}"));
    let (mut adapters, trained_experts) = initial_adapters::open(options, context, &files)?;
    let machine = Machine::of_run(context, &device);
    let layout = Layout::of(options, Networks::of(&files, options)?, machine)?;
    warn_of_idle_expert(&layout, options, context);
    let fp8 = options.products.of(layout.eight_bits, &device)?;
    log_precision(&layout, fp8.as_ref());
    let settings_of_experts = ExpertSettings { layout: &layout, fp8, device: &device, device_slot: Arc::default() };
    let (mut dits, mut bases) = (Vec::new(), Vec::new());
    for (name, file) in files.experts() {
        let mut dit = open_dit(name, file, options, context, &settings_of_experts)?;
        let base = BaseNetwork::of(file, dit.config().kind(), LAST_WEIGHT, base_loras.remove(name))
            .while_doing(|| reading(file))?;
        let adapters_of_expert = adapters.remove(name).unwrap_or_default();
        adapters_of_expert.iter().for_each(|adapter| base.warn_if_other(adapter));
        set_trained_part(&mut dit, name, file, options, &trained_experts, adapters_of_expert, context)?;
        dits.push(dit);
        bases.push(base);
    }
    let vae = Vae::load(&files.vae.all()?, &device)
        .while_doing(|| reading(&files.vae))?
        .with_decoder_dtype(layout.decoder_dtype)?;
    let text =
        files.text_encoder.as_ref().map(|file| open_text(file, &files, options, context, &device)).transpose()?;
    let clip = files.clip.as_ref().map(|file| open_clip(file, &device)).transpose()?;
    if options.shift.is_some() {
        tracing::warn!(
            "`model.shift` is the old name of `algo.shift` (and `roll generate --shift`), which wins where both are given"
        );
    }
    let settings = Settings {
        shift: options.shift,
        boundary: options.boundary,
        uses_end_image: options.wants("end_image"),
        chunking: Chunking { offload: layout.offloads_states(), ..Chunking::default() },
    };
    let sources = encoding_sources(&files, text.as_ref(), context, settings.uses_end_image, layout.tile_choice())?;
    let mut dits = dits.into_iter();
    let Some(dit) = dits.next() else { return Err(Error::Misuse("a pipeline without a transformer".into())) };
    let mut model = Wan::new(Parts { dit, dit2: dits.next(), vae, text, clip }, settings);
    model.experts.iter_mut().zip(bases).for_each(|(expert, base)| expert.base = Some(base));
    model.encoding_sources = Some(sources);
    model.placement = Some(layout.placement.to_weight_placement());
    model.layout = Some(layout);
    Ok(model)
}

/// The files and settings that encodings depend on.
fn encoding_sources(
    files: &ComponentFiles,
    text: Option<&TextEncoder>,
    context: &BuildContext,
    uses_end_image: bool,
    tiles: (Option<Tiling>, Option<MemoryBudget>),
) -> Result<EncodingSources> {
    let networks = std::iter::once(&files.vae).chain(&files.text_encoder).chain(&files.clip);
    let (backend, tokens) = (backend_name(&context.backend)?, text.map(|text| text.length));
    Ok(EncodingSources {
        files: networks
            .flat_map(|file| file.paths().map(Path::to_path_buf))
            .chain(text.map(|text| text.tokenizer.path().to_path_buf()))
            .collect(),
        settings: format!("{backend}, {tokens:?} tokens, end image {uses_end_image}, tiles {tiles:?}"),
    })
}

/// Name of the backend. Encodings depend on its kernels, but not on which device of a machine runs them.
fn backend_name(backend: &str) -> Result<&'static str> {
    Ok(Backend::of(backend)?.name())
}

/// Logs the dtypes of the transformers' weights and products, and the location of the idle expert.
fn log_precision(layout: &Layout, fp8: Option<&Fp8Products>) {
    let name = |dtype: DType| if dtype == DType::BF16 { "bf16" } else { "f32" };
    let as_stored = if layout.networks.stored_dtype == layout.storage.dtype {
        "as in the files"
    } else {
        "converted from the files'"
    };
    let idle = match layout.idle {
        IdleExpert::Auto | IdleExpert::Keep => "",
        IdleExpert::Host => "; the idle expert waits in host memory",
        IdleExpert::Drop => "; the idle expert is read again when its turn comes",
    };
    let (weights, products) = (name(layout.storage.dtype), name(layout.products));
    let matrices = match (layout.eight_bits, layout.storage.matrices) {
        (None, _) => "",
        (Some(_), MatrixStorage::Eight(_)) => "; matrices of the blocks rounded to eight bits",
        (Some(_), _) => "; matrices of the blocks in eight bits, as in the files",
    };
    let fp8 = match fp8 {
        None => "",
        Some(Fp8Products::Emulated) => "; products with fp8 weights in fp8, emulated: slower than without",
        Some(_) => "; products with fp8 weights in fp8",
    };
    tracing::info!("transformer weights in {weights} ({as_stored}), products in {products}{matrices}{fp8}{idle}");
}

/// Warns if the idle expert leaves the device only because the device's memory is unknown, and if base LoRAs are merged
/// again each time that weights are read.
fn warn_of_idle_expert(layout: &Layout, options: &WanOptions, context: &BuildContext) {
    let idle = layout.idle;
    if layout.machine.memory.is_none() && options.idle_expert == IdleExpert::Auto && idle != IdleExpert::Keep {
        tracing::warn!(
            "the memory of `{}` is unknown, so the expert that is not in use leaves it (`{idle:?}`); \
             `model.idle_expert: keep` keeps it there",
            context.backend
        );
    }
    // The setting that reads weights repeatedly, and a setting that does not.
    let repeated_reads = match (layout.placement, idle) {
        (Placement::Streamed, _) => Some(("model.weight_store: streamed", "model.weight_store: host")),
        (_, IdleExpert::Drop) => Some(("model.idle_expert: drop", "model.idle_expert: host")),
        _ => None,
    };
    if let (Some((given, better)), Some(_)) = (repeated_reads, &options.base_lora) {
        tracing::warn!(
            "with `{given}` the LoRAs of `model.base_lora` are merged each time weights are read; `{better}` merges \
             them once"
        );
    }
}

/// Settings that all experts share.
struct ExpertSettings<'a> {
    layout: &'a Layout,
    /// How products with fp8 weights are computed in fp8; `None` if they are not computed in fp8.
    fp8: Option<Fp8Products>,
    device: &'a Device,
    /// Swaps the experts on the device, if only one is resident at a time.
    device_slot: Arc<DeviceSlot>,
}

impl ExpertSettings<'_> {
    /// The weight store of one expert whose weights are all on the device while it is used.
    fn store(&self, name: &str, file: &Checkpoint) -> Result<Arc<dyn WeightStore>> {
        let (storage, device) = (self.layout.storage, self.device.clone());
        let number = usize::from(name == "dit2");
        Ok(match self.layout.idle {
            IdleExpert::Auto | IdleExpert::Keep => Arc::new(weights::resident(file, storage, &device)?),
            IdleExpert::Host => {
                let state = weights::in_host_memory(file, storage)?;
                let upload_all = move || {
                    let upload = |(key, weight): (&String, &HostWeight)| {
                        (key.clone(), weight.clone().upload(storage, key, &device, &mut SegmentMemory::default()))
                    };
                    Ok(Resident::from_weights(state.iter().map(upload).collect(), &device))
                };
                Arc::new(self.device_slot.store(number, file.shapes(), self.device, upload_all))
            }
            IdleExpert::Drop => {
                let own_file = file.clone();
                let read_all = move || weights::resident(&own_file, storage, &device);
                Arc::new(self.device_slot.store(number, file.shapes(), self.device, read_all))
            }
        })
    }
}

/// Opens the transformer `name`, with nothing trained yet.
fn open_dit(
    name: &str,
    file: &Checkpoint,
    options: &WanOptions,
    context: &BuildContext,
    settings: &ExpertSettings<'_>,
) -> Result<Dit> {
    let (device, storage, placement) = (settings.device, settings.layout.storage, settings.layout.placement);
    let memory = kept_for_pullback(options.use_gradient_checkpointing, options.use_gradient_checkpointing_offload);
    let open = || -> Result<Dit> {
        let config = components::dit_config(file, options.num_heads)?;
        let store: Arc<dyn WeightStore> = match placement {
            // A check reads no weights: this store reads a segment when it is used.
            _ if context.headers_only => Arc::new(Streamed::new(file.clone(), device)),
            Placement::Auto | Placement::Resident => settings.store(name, file)?,
            Placement::Streamed => Arc::new(Streamed::new(file.clone(), device).stored_as(storage).with_prefetch()),
            Placement::Host => Arc::new(weights::from_host(file, storage, device)?),
            Placement::Sharded => {
                let tensors = file.keys().map(|key| Ok((key.into(), file.tensor(key)?)));
                let store = Sharded::new(tensors, storage, device, context.ranks.clone())?;
                file.keys().for_each(|key| file.release(key));
                Arc::new(store)
            }
        };
        let mut dit = Dit::with_store(config, store).with_settings(PassSettings {
            products: settings.layout.products,
            fp8_products: settings.fp8.is_some(),
            activations: None,
            kept: PassMemory { memory, keeps_attention: options.keep_attention.is_always() },
        });
        if placement == Placement::Sharded && context.ranks.world_size() > 1 {
            dit = dit.sharding_weights(context.ranks.clone());
        }
        match context.token_ranks.clone() {
            Some(ranks) => sharding_tokens(dit, ranks),
            None => Ok(dit),
        }
    };
    open().in_section("model").while_doing(|| reading(file))
}

/// Shards the tokens of the passes of `dit` between `ranks`. Fails if the number of ranks does not divide the
/// number of heads.
fn sharding_tokens(dit: Dit, ranks: Arc<dyn Communicator>) -> Result<Dit> {
    let (heads, count) = (dit.config().heads, ranks.world_size());
    if !heads.is_multiple_of(count) {
        return Err(Error::Unsupported(format!(
            "{count} ranks cannot divide the {heads} heads of the transformer into equal parts: \
             `strategy.sequence_parallel_size` must divide them"
        )));
    }
    Ok(dit.sharding_tokens(ranks))
}

/// Sets the trained part of `dit`, the expert `name`: the layers of `adapters` with their values or, without adapters,
/// the part that the options select. `trained_experts` names the experts that are trained.
fn set_trained_part(
    dit: &mut Dit,
    name: &str,
    file: &Checkpoint,
    options: &WanOptions,
    trained_experts: &[String],
    adapters: Vec<OpenedAdapter>,
    context: &BuildContext,
) -> Result<()> {
    let weights = dit.config().weights();
    let layers =
        weights.iter().filter(|(_, shape)| shape.len() == 2).filter_map(|(key, _)| key.strip_suffix(".weight"));
    let layers: Vec<String> = layers.map(Into::into).collect();
    let initial = if adapters.is_empty() {
        None
    } else {
        let initial = InitialAdapter::new(adapters, &options.lora_request(), &layers).in_section("model")?;
        initial.check_weights(&weights).in_section("model")?;
        Some(initial)
    };
    let trainable =
        initial.as_ref().map_or_else(|| options.trainable(trained_experts, name), |initial| initial.trainable.clone());
    let (trainable, initial) = if context.headers_only && trainable == Trainable::Full {
        // All parameters would take the memory of the weights several times. In a check, a LoRA of rank 1 takes their
        // place.
        (Trainable::Lora { rank: 1, alpha: 1.0, targets: WanOptions::default().lora_targets() }, None)
    } else {
        (trainable, initial)
    };
    // The name of the expert is part of the seed, so that new adapters of the two experts differ.
    let noise = Noise::new(context.seed ^ u64::from(name == "dit2"));
    let base = if trainable == Trainable::Full { file.all()? } else { StateDict::new() };
    dit.add_trainable(&trainable, &noise, &base).in_section("model")?;
    if let (Some(initial), Some(parameters)) = (initial, dit.parameters()) {
        let values = flat::from_state(parameters.specs(), &initial.parameters);
        parameters.write(&values.while_doing(|| "`model.lora_checkpoint`".into())?)?;
        dit.start_from(initial.parameters);
    }
    Ok(())
}

/// Opens the CLIP image encoder `file`.
fn open_clip(file: &Checkpoint, device: &Device) -> Result<Clip> {
    let configured_heads = None;
    Clip::streamed(file, configured_heads, device).while_doing(|| reading(file))
}

/// Opens the text encoder `file` with its tokenizer.
fn open_text(
    file: &Checkpoint,
    files: &ComponentFiles,
    options: &WanOptions,
    context: &BuildContext,
    device: &Device,
) -> Result<TextEncoder> {
    let encoder = Umt5::streamed(file, device).while_doing(|| reading(file))?;
    let tokenizer = open_tokenizer(files, encoder.config().vocab, options, context)?;
    Ok(TextEncoder { tokenizer, encoder, length: text_len(files)? })
}

/// Loads the tokenizer of the options, or the one next to the weights. Fails if it has more ids than the text encoder
/// has embeddings.
pub(super) fn open_tokenizer(
    files: &ComponentFiles,
    embeddings: usize,
    options: &WanOptions,
    context: &BuildContext,
) -> Result<Tokenizer> {
    let path = options.tokenizer_path.as_ref().map(|path| context.resolve(path)).or_else(|| files.tokenizer.clone());
    let Some(path) = path else {
        let problem = "the UMT5 encoder needs its tokenizer: name the directory of tokenizer.json";
        return Err(Error::config("model.tokenizer_path", problem));
    };
    let tokenizer = Tokenizer::load_with(&path, &Hub::of(context)).in_section("model")?;
    let ids = tokenizer.vocabulary();
    if ids > embeddings {
        let problem = format!(
            "the tokenizer has {ids} ids, the text encoder {embeddings} embeddings: they do not belong together"
        );
        return Err(Error::bad_file(path, problem));
    }
    Ok(tokenizer)
}

/// Greatest plausible number of text rows. A larger number is a mistake in the file, and attention over that number of
/// rows would exhaust the memory.
const MAX_TEXT_LEN: usize = 1 << 14;

/// Number of rows of the text embedding. Fails if the experts of a checkpoint disagree.
pub(super) fn text_len(files: &ComponentFiles) -> Result<usize> {
    let length_of = |file: &Checkpoint| components::text_len(file).unwrap_or(PROMPT_TOKENS);
    let length = length_of(&files.dit);
    if length > MAX_TEXT_LEN {
        let problem = format!("has `text_len` {length}; prompts have at most {MAX_TEXT_LEN} tokens");
        return Err(Error::bad_file(files.dit.path(), problem));
    }
    match &files.dit2 {
        Some(low) if length_of(low) != length => Err(Error::bad_file(
            low.path(),
            format!("the experts were trained with prompts of {length} and of {} tokens (`text_len`)", length_of(low)),
        )),
        _ => Ok(length),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Adapter, ConditionInput, DiffusionModel, Grad, Model, Purpose, Timestep};

    use super::super::init_tiny::{WanKind, init_tiny};
    use super::super::options::{ModelPaths, TileSize};
    use super::*;
    use roll_network::precision::WeightsDType;

    fn refused(change: impl FnOnce(&mut WanOptions)) -> String {
        opened(WanKind::T2v, change).err().unwrap().chain()
    }

    fn opened(kind: WanKind, change: impl FnOnce(&mut WanOptions)) -> Result<Wan> {
        let dir = tempfile::tempdir().unwrap();
        let files = init_tiny(dir.path(), kind, 0).unwrap();
        let mut options = WanOptions {
            model_paths: Some(files.model_paths.into()),
            tokenizer_path: Some(files.tokenizer),
            lora_rank: Some(2),
            ..WanOptions::default()
        };
        change(&mut options);
        let context = BuildContext { base_dir: dir.path().into(), ..BuildContext::new("flex") };
        open(&options, &context)
    }

    #[test]
    fn default_shift_and_frame_rate_are_official() {
        let facts = |kind, shift: Option<f64>| {
            let model = opened(kind, |options| options.shift = shift).unwrap();
            (DiffusionModel::schedule(&model).shift, model.frame_rate())
        };
        assert_eq!(facts(WanKind::T2v, None), (12.0, Some(16.0)));
        assert_eq!(facts(WanKind::I2v, None), (5.0, Some(16.0)));
        assert_eq!(facts(WanKind::Ti2v, None), (5.0, Some(24.0)));
        assert_eq!(facts(WanKind::I2v21, None), (5.0, Some(16.0)));
        // The old key, for configurations of earlier runs.
        assert_eq!(facts(WanKind::T2v, Some(5.0)).0, 5.0);
    }

    #[test]
    fn errors_name_keys_with_their_section() {
        let targets = refused(|o| o.lora_target_modules = Some("nosuch".into()));
        assert!(targets.contains("`model.lora_target_modules`"), "{targets}");
        let heads = refused(|o| o.num_heads = Some(7));
        assert!(heads.contains("`model.num_heads`"), "{heads}");
        let tokenizer = refused(|o| o.tokenizer_path = Some("nowhere".into()));
        assert!(tokenizer.contains("`model.tokenizer_path`"), "{tokenizer}");
        let tiles = refused(|o| (o.vae_tile_size, o.vae_tile_stride) = (TileSize::Of([4, 4]), Some([4, 8])));
        assert!(tiles.contains("`model.vae_tile_stride`"), "{tiles}");
        let list = refused(|o| {
            let Some(ModelPaths::Path(list)) = &o.model_paths else { panic!("a file") };
            let path = list.with_file_name("vae.json");
            std::fs::write(&path, r#"["Wan2.1_VAE.safetensors"]"#).unwrap();
            o.model_paths = Some(path.into());
        });
        assert!(list.contains("`model.model_paths`"), "{list}");
    }

    fn tiny(dir: &Path, kind: WanKind) -> WanOptions {
        let files = init_tiny(dir, kind, 0).unwrap();
        WanOptions {
            model_paths: Some(files.model_paths.into()),
            tokenizer_path: Some(files.tokenizer),
            trainable_models: Some("dit,dit2".into()),
            lora_rank: Some(2),
            ..WanOptions::default()
        }
    }

    fn context(dir: &Path) -> BuildContext {
        BuildContext { base_dir: dir.into(), ..BuildContext::new("flex") }
    }

    #[test]
    fn location_of_the_idle_expert_changes_no_bit() {
        let dir = tempfile::tempdir().unwrap();
        let options = tiny(dir.path(), WanKind::T2v);
        let bits = |idle_expert: IdleExpert, weights_dtype: WeightsDType| {
            let mut model =
                open(&WanOptions { idle_expert, weights_dtype, ..options.clone() }, &context(dir.path())).unwrap();
            let count = model.parameters().iter().map(|spec| spec.len()).sum();
            model.write_parameters(&(0..count).map(|i| (i as f32).sin() * 0.1).collect::<Vec<_>>()).unwrap();
            let input =
                ConditionInput { prompt: "a face".into(), frames: 5, size: [32, 32], ..ConditionInput::default() };
            let conditioning = model.encode(&input).unwrap();
            let x = Noise::new(1).normal(Purpose::Synthetic, 0, 0, &conditioning.latent_shape).unwrap();
            // Forward through both experts, then backward: each is off the device while the other computes.
            let (high, low) = (Timestep(950.0), Timestep(300.0));
            let (v, pull_high) = model.velocity(&x, high, &conditioning, Adapter::On, Grad::Record).unwrap();
            let (u, pull_low) = model.velocity(&v, low, &conditioning, Adapter::On, Grad::Record).unwrap();
            let d = pull_high.unwrap().pull(&pull_low.unwrap().pull(&u).unwrap()).unwrap();
            let mut gradients = vec![0.0; count];
            model.take_gradients(&mut gradients).unwrap();
            assert!(gradients.iter().any(|g| *g != 0.0));
            (u.as_bytes().to_vec(), d.as_bytes().to_vec(), gradients.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        for dtype in [WeightsDType::F32, WeightsDType::Bf16] {
            let expected = bits(IdleExpert::Keep, dtype);
            assert!(
                bits(IdleExpert::Host, dtype) == expected && bits(IdleExpert::Drop, dtype) == expected,
                "{dtype:?}"
            );
        }
    }

    #[test]
    fn encoding_keys_depend_on_the_backend_and_not_on_the_device_number() {
        assert_eq!(backend_name("cuda:0").unwrap(), backend_name("cuda:1").unwrap());
        assert_eq!(backend_name("libtorch-cuda").unwrap(), backend_name("libtorch-cuda:7").unwrap());
        let all = ["flex", "libtorch", "libtorch-cuda:1", "cuda:1", "wgpu"].map(|name| backend_name(name).unwrap());
        assert!((0..5).all(|i| (0..i).all(|j| all[i] != all[j])), "{all:?}");
        assert_eq!(backend_name("cpu").unwrap(), backend_name("flex").unwrap());
    }
}
