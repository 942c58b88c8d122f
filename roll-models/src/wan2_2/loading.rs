//! Creates a model from its options: files, trained parameters, device.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use roll_backends::device::is_gpu;
use roll_backends::weights::{HostWeight, Matrices, Storage, Turns};
use roll_backends::{Backend, Memory, Resident, Sharded, WeightStore};
use roll_core::{BuildContext, Communicator, Error, Noise, Result, ResultExt, StateDict, flat};

use crate::hub::Hub;
use crate::lora::{OpenedAdapter, Start};
use crate::weights::{self, Checkpoint, Streamed};

use super::clip::Clip;
use super::components;
use super::dit::{Dit, DitConfig, EXACT, Trainable};
use super::model::{Parts, Room, Settings, Sources, Wan};
use super::options::{Checkpoints, IdleExpert, Placement, TileSize, WanOptions};
use super::paths::ComponentFiles;
use super::plan;
use super::prompts::TextEncoder;
use super::starts::{self, Base};
use super::tokenizer::{PROMPT_TOKENS, Tokenizer};
use super::umt5::Umt5;
use super::vae::{Chunking, Fitting, Vae};

roll_core::register! {
    Model, "wan2_2", WanOptions,
    "Wan2.2 and Wan2.1 video diffusion: I2V, T2V, TI2V",
    |options, context| open(&options, context),
    plan: super::plan::needs,
}

/// Opens the model that `options` describe. Fails if a file is missing or does not fit the options.
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
    let precision = Precision::of(&files.dit, options, &device)?;
    let experts = Experts::of(&files, options, context, &precision)?;
    precision.tell(experts.idle);
    let mut bases = Vec::new();
    let mut open_expert = |name: &'static str, file: &Checkpoint| -> Result<Dit> {
        let mut dit = open_dit(name, file, options, &experts)?;
        let base = Base::of(file, dit.config()).while_doing(|| reading(file))?;
        let own = starts.remove(name).unwrap_or_default();
        own.iter().for_each(|adapter| base.compare(adapter));
        bases.push(base);
        train(&mut dit, name, file, options, &trained, own, context.seed)?;
        Ok(dit)
    };
    let dit = open_expert("dit", &files.dit)?;
    let dit2 = files.dit2.as_ref().map(|file| open_expert("dit2", file)).transpose()?;
    let vae_dtype = options.vae_dtype.of(&device)?;
    let vae = Vae::load(&files.vae.all()?, &device).while_doing(|| reading(&files.vae))?.decoding_in(vae_dtype)?;
    let text = match &files.text_encoder {
        Some(file) => Some(open_text(file, &files, options, context, &device)?),
        None => None,
    };
    let clip = match &files.clip {
        Some(file) => Some(Clip::streamed(file, None, &device).while_doing(|| reading(file))?),
        None => None,
    };
    let tiling = options.tiling()?;
    let left = experts.memory.map(|memory| experts.fitting(memory, dit.config(), &vae, options));
    let fitting = left.filter(|_| options.vae_tile_size == TileSize::Auto);
    let offload = options.use_gradient_checkpointing_offload && is_gpu(&device);
    let (checkpoints, room) = match (options.vae_checkpoints, offload) {
        (Checkpoints::Of(count), _) => (count, None),
        (Checkpoints::Auto, true) => (Chunking::default().checkpoints, Some(Room::Host)),
        (Checkpoints::Auto, false) => (Chunking::default().checkpoints, left.map(Room::Device)),
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
        chunking: Chunking { tiling, checkpoints, offload },
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
            kernels(&context.backend)?,
            text.as_ref().map(|text| text.length),
            settings.end_image,
            (settings.chunking.tiling, fitting),
        ),
    };
    let model = Wan::new(Parts { dit, dit2, vae, text, clip }, settings)
        .with_sources(sources)
        .with_bases(bases)
        .fitting(fitting)
        .keeping(room)
        .placed(options.weight_store.chosen());
    Ok(model)
}

fn reading(file: &Checkpoint) -> String {
    format!("reading {}", file.path().display())
}

/// Name of the backend. Encodings depend on its kernels, but not on which device of a machine runs them.
fn kernels(backend: &str) -> Result<&'static str> {
    Ok(Backend::of(backend)?.name())
}

/// Storage of frozen weights and dtype of matrix products.
struct Precision {
    stored: DType,
    storage: Storage,
    products: DType,
    /// Whether the matrices of the blocks are in eight bits.
    eight_bits: bool,
}

impl Precision {
    fn of(file: &Checkpoint, options: &WanOptions, device: &Device) -> Result<Self> {
        let stored = components::dit_dtype(file);
        let precision = || -> Result<Self> {
            let storage = options.weights_dtype.storage(stored, &EXACT, device)?;
            let eight_bits = match storage.matrices {
                Matrices::Dense => false,
                Matrices::AsInFile => components::in_eight_bits(file) && options.weight_store != Placement::Sharded,
                Matrices::Eight(_) => true,
            };
            Ok(Self { stored, storage, products: options.compute_dtype.of(storage.dtype, device)?, eight_bits })
        };
        precision().while_doing(|| format!("reading {}", file.path().display()))
    }

    fn tell(&self, idle: IdleExpert) {
        let name = |dtype: DType| if dtype == DType::BF16 { "bf16" } else { "f32" };
        let as_stored = if self.stored == self.storage.dtype { "as in the files" } else { "converted from the files'" };
        let idle = match idle {
            IdleExpert::Auto | IdleExpert::Keep => "",
            IdleExpert::Host => "; the idle expert waits in host memory",
            IdleExpert::Drop => "; the idle expert is read again when its turn comes",
        };
        let (weights, products) = (name(self.storage.dtype), name(self.products));
        let matrices = match (self.eight_bits, self.storage.matrices) {
            (false, _) => "",
            (true, Matrices::Eight(_)) => "; matrices of the blocks rounded to eight bits",
            (true, _) => "; matrices of the blocks in eight bits, as in the files",
        };
        tracing::info!("transformer weights in {weights} ({as_stored}), products in {products}{matrices}{idle}");
    }
}

/// Settings that the experts of a checkpoint share.
struct Experts {
    device: Device,
    storage: Storage,
    products: DType,
    /// Swaps the experts on the device, if only one is resident at a time.
    turns: Arc<Turns>,
    idle: IdleExpert,
    /// Bytes of frozen weights on the device.
    resident: usize,
    /// Bytes of the GPU's memory, if the device is a GPU and they are known.
    memory: Option<u64>,
    ranks: Arc<dyn Communicator>,
    token_ranks: Option<Arc<dyn Communicator>>,
}

impl Experts {
    fn of(files: &ComponentFiles, options: &WanOptions, context: &BuildContext, precision: &Precision) -> Result<Self> {
        let device = roll_backends::device(&context.backend)?;
        let Precision { stored, storage, products, eight_bits } = *precision;
        let memory = roll_backends::device::memory::total(&context.backend);
        let size = if storage.dtype == DType::BF16 { 2 } else { 4 };
        let bytes = |file: &Checkpoint| plan::weight_bytes(&file.shapes(), size, eight_bits);
        let each: Vec<usize> = [Some(&files.dit), files.dit2.as_ref()].into_iter().flatten().map(bytes).collect();
        let (all, largest) = (each.iter().sum::<usize>(), each.iter().max().copied().unwrap_or(0));
        let converted = stored != storage.dtype || matches!(storage.matrices, Matrices::Eight(_));
        let whole = matches!(options.weight_store, Placement::Auto | Placement::Resident);
        let idle = match whole && each.len() > 1 {
            true => options.idle_expert.chosen(all, is_gpu(&device), memory, converted),
            false => IdleExpert::Keep,
        };
        if memory.is_none() && options.idle_expert == IdleExpert::Auto && idle != IdleExpert::Keep {
            tracing::warn!(
                "the memory of `{}` is unknown, so the expert that is not in use leaves it (`{idle:?}`); \
                 `model.idle_expert: keep` keeps it there",
                context.backend
            );
        }
        let resident = match (whole, idle) {
            (true, IdleExpert::Keep | IdleExpert::Auto) => all,
            (true, _) => largest,
            (false, _) => 0,
        };
        let (ranks, token_ranks) = (context.ranks.clone(), context.token_ranks.clone());
        Ok(Self { device, storage, products, turns: Arc::default(), idle, resident, memory, ranks, token_ranks })
    }

    /// The weight store of one expert whose weights are all on the device while it is used.
    fn store(&self, name: &str, file: &Checkpoint) -> Result<Arc<dyn WeightStore>> {
        let (storage, device) = (self.storage, self.device.clone());
        let number = usize::from(name == "dit2");
        Ok(match self.idle {
            IdleExpert::Auto | IdleExpert::Keep => Arc::new(weights::resident(file, storage, &device)?),
            IdleExpert::Host => {
                let state = weights::in_host_memory(file, storage)?;
                let bring = move || {
                    let weight = |(key, weight): (&String, &HostWeight)| {
                        (key.clone(), weight.clone().upload(storage, key, &device))
                    };
                    Ok(Resident::from_weights(state.iter().map(weight).collect(), &device))
                };
                Arc::new(self.turns.turn(number, file.shapes(), &self.device, bring))
            }
            IdleExpert::Drop => {
                let own = file.clone();
                let bring = move || weights::resident(&own, storage, &device);
                Arc::new(self.turns.turn(number, file.shapes(), &self.device, bring))
            }
        })
    }

    /// The part of `memory` that is left for the VAE, computed as in `roll plan`.
    fn fitting(&self, memory: u64, config: &DitConfig, vae: &Vae, options: &WanOptions) -> Fitting {
        let vae_elements: usize = vae.config().weights().iter().map(|(_, s)| s.iter().product::<usize>()).sum();
        plan::fitting(
            memory as usize,
            self.resident + 4 * vae_elements,
            config,
            plan::kept_bytes(self.products),
            options,
        )
    }
}

/// Opens the transformer `name`, with nothing trained yet.
fn open_dit(name: &str, file: &Checkpoint, options: &WanOptions, experts: &Experts) -> Result<Dit> {
    let Experts { device, storage, products, .. } = experts;
    let heads = options.num_heads.or_else(|| components::heads(file));
    let memory = match (options.use_gradient_checkpointing, options.use_gradient_checkpointing_offload) {
        (_, true) => Memory::Offload,
        (true, false) => Memory::Recompute,
        (false, false) => Memory::Hold,
    };
    let opened = || -> Result<Dit> {
        let config = DitConfig::from_shapes(&file.shapes(), heads)?;
        let dit = match options.weight_store {
            Placement::Auto | Placement::Resident => Dit::with_store(config, experts.store(name, file)?),
            Placement::Streamed => {
                let store = Streamed::new(file.clone(), device).stored_as(*storage).with_prefetch();
                Dit::with_store(config, Arc::new(store))
            }
            Placement::Host => {
                if matches!(storage.matrices, Matrices::Eight(_)) {
                    let problem = "weights in eight bits do not wait in host memory: expected auto, f32 or bf16 beside \
                                   `model.weight_store: host`, or another `model.weight_store`";
                    return Err(Error::config("weights_dtype", problem));
                }
                let store = weights::from_host(file, *storage, device)?;
                Dit::with_store(config, Arc::new(store))
            }
            Placement::Sharded => {
                if matches!(storage.matrices, Matrices::Eight(_)) {
                    let problem = "weights in eight bits are not divided among the ranks: expected auto, f32 or bf16 \
                                   beside `model.weight_store: sharded`, or another `model.weight_store`";
                    return Err(Error::config("weights_dtype", problem));
                }
                let ranks = experts.ranks.clone();
                let store = Sharded::new(&file.all()?, *storage, device, ranks.clone())?;
                file.keys().for_each(|key| file.release(key));
                let dit = Dit::with_store(config, Arc::new(store));
                if ranks.world_size() > 1 { dit.dividing_weights(ranks) } else { dit }
            }
        }
        .with_memory(memory)
        .with_products(*products);
        match experts.token_ranks.clone() {
            Some(ranks) => dividing_tokens(dit, ranks),
            None => Ok(dit),
        }
    };
    opened().in_section("model").while_doing(|| reading(file))
}

fn dividing_tokens(dit: Dit, ranks: Arc<dyn Communicator>) -> Result<Dit> {
    let (heads, count) = (dit.config().heads, ranks.world_size());
    match heads.is_multiple_of(count) {
        true => Ok(dit.dividing_tokens(ranks)),
        false => Err(Error::Unsupported(format!(
            "{count} ranks cannot divide the {heads} heads of the transformer into equal parts: \
             `strategy.sequence_parallel_size` must divide them"
        ))),
    }
}

/// Sets the trained part of `dit`: that of `adapters`, with their values, or that of the options.
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
    // The name of the expert is part of the seed, so that new adapters of the two experts differ.
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

/// Greatest plausible number of text rows. A larger number is a mistake in the file, and attention over that number of
/// rows would exhaust the memory.
const MAX_TEXT_LEN: usize = 1 << 14;

/// Number of rows of the text embedding. Fails if the experts of a checkpoint disagree.
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
    use roll_core::{Adapter, ConditionInput, DiffusionModel, Grad, Purpose, Timestep};

    use super::super::init_tiny::{TinyKind, init_tiny};
    use roll_core::Model;

    use super::*;
    use crate::precision::WeightsDType;

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
        let context = BuildContext { base_dir: dir.path().into(), ..BuildContext::new("flex") };
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
        // The old key, for configurations of earlier runs.
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
        let tiles = refused(|o| (o.vae_tile_size, o.vae_tile_stride) = (TileSize::Of([4, 4]), Some([4, 8])));
        assert!(tiles.contains("`model.vae_tile_stride`"), "{tiles}");
        let list = refused(|o| {
            let list = o.model_paths.as_ref().unwrap();
            let path = list.with_file_name("vae.json");
            std::fs::write(&path, r#"["Wan2.1_VAE.safetensors"]"#).unwrap();
            o.model_paths = Some(path);
        });
        assert!(list.contains("`model.model_paths`"), "{list}");
    }

    fn tiny(dir: &Path, kind: TinyKind) -> WanOptions {
        let files = init_tiny(dir, kind, 0).unwrap();
        WanOptions {
            model_paths: Some(files.model_paths),
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
    fn an_idle_expert_that_is_away_changes_no_bit() {
        let dir = tempfile::tempdir().unwrap();
        let options = tiny(dir.path(), TinyKind::T2v);
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
            let kept = bits(IdleExpert::Keep, dtype);
            assert!(bits(IdleExpert::Host, dtype) == kept && bits(IdleExpert::Drop, dtype) == kept, "{dtype:?}");
        }
    }

    #[test]
    fn encodings_are_keyed_by_kernels_and_not_by_the_number_of_the_device() {
        assert_eq!(kernels("cuda:0").unwrap(), kernels("cuda:1").unwrap());
        assert_eq!(kernels("libtorch-cuda").unwrap(), kernels("libtorch-cuda:7").unwrap());
        let all = ["flex", "libtorch", "libtorch-cuda:1", "cuda:1", "wgpu"].map(|name| kernels(name).unwrap());
        assert!((0..5).all(|i| (0..i).all(|j| all[i] != all[j])), "{all:?}");
        assert_eq!(kernels("cpu").unwrap(), kernels("flex").unwrap());
    }
}
