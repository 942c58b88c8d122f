//! Creates a model from its options: files, trained parameters, device.

use std::path::Path;
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::weights::HostStore;
use roll_backends::{Backend, Resident, Sharded, WeightStore};
use roll_causal_lm::Tokenizer;
use roll_core::{BuildContext, Error, Noise, Result, ResultExt, StateDict, flat};
use roll_network::hub::Hub;
use roll_network::lora::{AdapterWeights, BaseNetwork, LoraOfFile, merged_on_read, names_of};
use roll_network::options::Placement;
use roll_network::trainable::Trainable;
use roll_network::weights::Streamed;

use crate::dit::{Dit, DitConfig, FINAL_LAYER, PassMemory, PassSettings};
use crate::files::ComponentFiles;
use crate::layout::{Layout, Machine, Networks as Sizes};
use crate::lora;
use crate::model::{EncodingSources, Networks, ZImage};
use crate::options::ZImageOptions;
use crate::text::{MAX_TOKENS, PromptEncoder, TextEncoder};
use crate::transformer_file::TransformerFile;
use crate::vae::Vae;

roll_core::register! {
    Model, "z_image", ZImageOptions,
    "Z-Image and Z-Image-Turbo: text to picture",
    |options, context| open(&options, context),
    plan: crate::plan::needs,
}

/// Opens the model that `options` describe.
///
/// # Errors
/// Fails if a file is missing or does not fit the options.
pub fn open(options: &ZImageOptions, context: &BuildContext) -> Result<ZImage> {
    options.check()?;
    if context.token_ranks.as_ref().is_some_and(|ranks| ranks.world_size() > 1) {
        let problem = "expected 1: the tokens of a picture are not sharded between ranks";
        return Err(Error::config("strategy.sequence_parallel_size", problem));
    }
    let device = roll_backends::device(&context.backend)?;
    let mut files = ComponentFiles::open(options, context, &Hub::of(context))?;
    let base_loras = merge_base_lora(options, context, &mut files)?;
    let sizes = Sizes::of(&files.dit, files.vae_config.clone()).in_section("model")?;
    let layout = Layout::of(options, sizes, Machine::of_run(context, &device))?;
    let mut dit = open_dit(&files.dit, options, context, &layout, &device)?;
    let base = base_network(&files.dit, dit.config(), base_loras)?;
    set_trained_part(&mut dit, &files.dit, options, &base, context)?;
    let vae = Vae::new(files.vae_config.clone(), &files.vae.all()?, &device)
        .while_doing(|| format!("reading {}", files.vae.path().display()))?
        .with_decoder_dtype(layout.decoder_dtype)?;
    let text = open_text(&files, &device)?;
    let sources = encoding_sources(&files, context)?;
    let mut model = ZImage::new(Networks { dit, vae, text: Some(text) }, files.shift);
    model.base = Some(base);
    model.encoding_sources = Some(sources);
    model.placement = Some(layout.placement.to_weight_placement());
    model.layout = Some(layout);
    Ok(model)
}

/// Merges the LoRAs of `base_lora` into the transformer whenever its weights are read. Returns their names.
pub(crate) fn merge_base_lora(
    options: &ZImageOptions,
    context: &BuildContext,
    files: &mut ComponentFiles,
) -> Result<Option<String>> {
    let Some(sources) = &options.base_lora else { return Ok(None) };
    let mut merge = || -> Result<String> {
        let config = files.dit.config()?;
        let mut loras: Vec<LoraOfFile> = Vec::new();
        for adapter in sources.open(|path| context.resolve(path))? {
            let AdapterWeights::Lora(mut lora) = adapter.weights else {
                let problem = "holds all weights of a network and no LoRA: name it in `model.dit_path`";
                return Err(Error::bad_file(adapter.path, problem));
            };
            lora::split_fused(&mut lora, &adapter.path, &config)?;
            loras.push((lora, adapter.strength, adapter.path));
        }
        let merged = merged_on_read(files.dit.as_checkpoint()?, &loras)?;
        files.dit = TransformerFile::new(merged)?;
        Ok(names_of(&loras))
    };
    let names = merge().while_doing(|| "`model.base_lora`".into())?;
    tracing::info!("the transformer has the base LoRA {names}");
    Ok(Some(names))
}

/// Describes the transformer for adapter files.
fn base_network(file: &TransformerFile, config: &DitConfig, loras: Option<String>) -> Result<BaseNetwork> {
    let key = format!("{FINAL_LAYER}.linear.weight");
    BaseNetwork::of_tensor(file.file().path(), config.kind(), &key, file.tensor(&key)?, loras)
}

/// Opens the transformer, with nothing trained yet.
fn open_dit(
    file: &TransformerFile,
    options: &ZImageOptions,
    context: &BuildContext,
    layout: &Layout,
    device: &Device,
) -> Result<Dit> {
    let storage = layout.storage;
    let fp8 = options.products.of(layout.eight_bits, device)?;
    let store: Arc<dyn WeightStore> = match layout.placement {
        // A check reads no weights: this store reads a segment when it is used.
        _ if context.headers_only => Arc::new(Streamed::new(file.file().clone(), device)),
        Placement::Auto | Placement::Resident => {
            Arc::new(Resident::from_weights(file.uploaded(storage, device).collect::<Result<_>>()?, device))
        }
        Placement::Streamed => {
            Arc::new(Streamed::new(file.as_checkpoint()?, device).stored_as(storage).with_prefetch())
        }
        Placement::Host => Arc::new(HostStore::new(file.uploaded(storage, device), device)?),
        Placement::Sharded => Arc::new(Sharded::new(file.tensors(), storage, device, context.ranks.clone())?),
    };
    let dtype = |dtype: DType| if dtype == DType::BF16 { "bf16" } else { "f32" };
    let eight_bits = if layout.eight_bits.is_some() { "; matrices of the blocks in eight bits" } else { "" };
    let (weights, products) = (dtype(storage.dtype), dtype(layout.products));
    tracing::info!("transformer weights in {weights}, products in {products}{eight_bits}");
    let dit = Dit::with_store(layout.networks.dit.clone(), store).with_settings(PassSettings {
        products: layout.products,
        fp8_products: fp8.is_some(),
        activations: None,
        kept: PassMemory { memory: layout.memory, keeps_attention: options.keep_attention.is_always() },
    });
    if layout.placement == Placement::Sharded && context.ranks.world_size() > 1 {
        return Ok(dit.sharding_weights(context.ranks.clone()));
    }
    Ok(dit)
}

/// Sets the trained part of `dit`: the layers of `lora_checkpoint` with their values or, without it, the part that the
/// options select.
fn set_trained_part(
    dit: &mut Dit,
    file: &TransformerFile,
    options: &ZImageOptions,
    base: &BaseNetwork,
    context: &BuildContext,
) -> Result<()> {
    let open = || -> Result<_> {
        let Some(sources) = &options.lora_checkpoint else { return Ok(None) };
        let adapters = sources.open(|path| context.resolve(path))?;
        adapters.iter().for_each(|adapter| base.warn_if_other(adapter));
        let initial = lora::initial_adapter(adapters, &options.lora_request(), dit.config()).in_section("model")?;
        initial.check_weights(&dit.config().weights()).in_section("model")?;
        Ok(Some(initial))
    };
    let initial = open().while_doing(|| "`model.lora_checkpoint`".into())?;
    let trainable = initial.as_ref().map_or_else(|| options.trainable(), |initial| initial.trainable.clone());
    let (trainable, initial) = if context.headers_only && trainable == Trainable::Full {
        // All parameters would take the memory of the weights several times. In a check, a LoRA of rank 1 takes their
        // place.
        (Trainable::Lora { rank: 1, alpha: 1.0, targets: ZImageOptions::default().lora_targets() }, None)
    } else {
        (trainable, initial)
    };
    let state = if trainable == Trainable::Full { file.state()? } else { StateDict::new() };
    dit.add_trainable(&trainable, &Noise::new(context.seed), &state).in_section("model")?;
    if let (Some(initial), Some(parameters)) = (initial, dit.parameters()) {
        let values = flat::from_state(parameters.specs(), &initial.parameters);
        parameters.write(&values.while_doing(|| "`model.lora_checkpoint`".into())?)?;
        dit.start_from(initial.parameters);
    }
    Ok(())
}

/// Opens the text encoder with its tokenizer.
fn open_text(files: &ComponentFiles, device: &Device) -> Result<PromptEncoder> {
    let encoder = TextEncoder::streamed(files.text_config.clone(), &files.text, DType::F32, device)
        .while_doing(|| format!("reading {}", files.text.path().display()))?;
    Ok(PromptEncoder { tokenizer: open_tokenizer(files)?, encoder, max_tokens: MAX_TOKENS })
}

/// Opens the tokenizer. Fails if it has more ids than the text encoder has embeddings.
pub(crate) fn open_tokenizer(files: &ComponentFiles) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::load(&files.tokenizer).in_section("model")?;
    let (ids, embeddings) = (tokenizer.vocabulary(), files.text_config.vocab);
    if ids > embeddings {
        let problem = format!(
            "the tokenizer has {ids} ids, the text encoder {embeddings} embeddings: they do not belong together"
        );
        return Err(Error::bad_file(&files.tokenizer, problem));
    }
    Ok(tokenizer)
}

/// The files and settings that encodings depend on.
fn encoding_sources(files: &ComponentFiles, context: &BuildContext) -> Result<EncodingSources> {
    let networks = [&files.vae, &files.text];
    let backend = Backend::of(&context.backend)?.name();
    Ok(EncodingSources {
        files: networks
            .into_iter()
            .flat_map(|file| file.paths().map(Path::to_path_buf))
            .chain([files.tokenizer.clone()])
            .collect(),
        settings: format!("{backend}, {MAX_TOKENS} tokens, {:?}", files.vae_config),
    })
}
