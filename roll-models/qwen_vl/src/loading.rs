//! The options of the network `qwen_vl`, and the construction of the network from them.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::weights::HostStore;
use roll_backends::{EightBits, Memory, Resident, ScaledMatrix, ScaledRows, Weight, WeightStore};
use roll_causal_lm::{Network, Tokenizer, open_weights};
use roll_core::{BuildContext, Error, Result, Tensor};
use roll_network::precision::{ComputeDType, DeviceTraits, WeightsDType};
use roll_network::trainable::kept_for_pullback;
use roll_network::weights::{Checkpoint, stored_dtype};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checkpoint::Weights;
use super::config::{Family, PATCH_EMBEDDING, QwenVlConfig};
use super::network::QwenVl;
use super::output_layer::{HEAD, OutputLayer};
use super::source::locate;

/// The embedding, whose rows are the vocabulary.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Files by which a directory has the weights of a whole model.
const WHOLE_MODELS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// Where frozen weights are between passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WeightLocation {
    /// The device.
    #[default]
    Resident,
    /// In host memory; a pass has two blocks at a time on the device.
    Host,
}

/// Options of the network `qwen_vl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QwenVlOptions {
    /// Hugging Face directory (`config.json`, safetensors, `tokenizer.json`), a file of weights (safetensors or a torch
    /// checkpoint), a published model, `Qwen/Qwen2-VL-2B-Instruct`, or a file of one,
    /// `KwaiVGI/VideoReward:checkpoint-11352/model.pth`.
    pub model_path: Option<PathBuf>,
    /// The `config.json` of the network, for checkpoints without one: a file, its directory, or `ORG/NAME:FILE`. Default:
    /// beside the weights.
    pub config_path: Option<PathBuf>,
    /// The `tokenizer.json`: a file, its directory, or `ORG/NAME:FILE`. Default: beside the adapter or the weights, or in
    /// the directory `tokenizer` there.
    pub tokenizer_path: Option<PathBuf>,
    /// LoRA of PEFT that is merged into the weights when they are read: a file, or a directory with
    /// `adapter_model.safetensors`, and `non_lora_state_dict.pth` for weights that were trained as a whole.
    pub adapter_path: Option<PathBuf>,
    /// LoRA scale numerator. Default: that of `adapter_config.json` or `model_config.json` beside the LoRA.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lora_alpha: Option<f64>,
    /// Recompute activations block by block in the backward pass instead of holding them.
    pub use_gradient_checkpointing: bool,
    /// Recompute in the same way, but keep the inputs of the blocks in host memory until the backward pass.
    pub use_gradient_checkpointing_offload: bool,
    /// Where the weights are: `resident` on the device, or in `host` memory, from which each pass copies block after
    /// block, so that they take no memory of the device while the trained model computes.
    pub weight_store: WeightLocation,
    /// Storage of weights: `f32`, `bf16`, `int8` or `fp8` (matrices of the blocks, rounded when they are read), or
    /// `auto`: bf16 on GPUs, as in the file on the CPU.
    pub weights_dtype: WeightsDType,
    /// Precision of matrix products and attention: `f32`, or `bf16` with sums in f32. `auto`: bf16 if the weights are
    /// bf16 and the device is a GPU, else f32.
    pub compute_dtype: ComputeDType,
}

impl Default for QwenVlOptions {
    fn default() -> Self {
        Self {
            model_path: None,
            config_path: None,
            tokenizer_path: None,
            adapter_path: None,
            lora_alpha: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            weight_store: WeightLocation::Resident,
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
        }
    }
}

impl QwenVlOptions {
    /// What a recorded pass keeps for its pullback.
    pub(super) fn memory(&self) -> Memory {
        kept_for_pullback(self.use_gradient_checkpointing, self.use_gradient_checkpointing_offload)
    }
}

/// The files of a network, with their headers checked.
pub(super) struct NetworkFiles {
    pub weights: Weights,
    pub config: QwenVlConfig,
    /// Names and shapes of the weights that are read.
    pub wanted: Vec<(String, Vec<usize>)>,
    /// Dtype of the stored norms, taken as that of the file.
    pub stored: DType,
    /// Directory of the weights.
    pub directory: PathBuf,
}

impl NetworkFiles {
    /// Opens the files that `options` name and checks their headers. Keys of errors begin with `section`.
    pub fn open(section: &str, options: &QwenVlOptions, context: &BuildContext) -> Result<Self> {
        let name = options.model_path.as_ref().ok_or_else(|| {
            let problem =
                "expected the directory of a model, a file of weights, or a name such as Qwen/Qwen2-VL-2B-Instruct";
            Error::config(format!("{section}.model_path"), problem)
        })?;
        if let Some(alpha) = options.lora_alpha.filter(|alpha| !(*alpha > 0.0 && alpha.is_finite())) {
            let problem = format!("expected a number above 0, found {alpha}");
            return Err(Error::config(format!("{section}.lora_alpha"), problem));
        }
        let path = locate(name, context)?;
        let adapter = options.adapter_path.as_ref().map(|path| context.resolve(path));
        let weights = Weights::open(checkpoint(section, &path)?, adapter.as_deref(), options.lora_alpha)?;
        let directory = if path.is_dir() { path.as_path() } else { path.parent().unwrap_or(Path::new(".")) };
        let config_path = match &options.config_path {
            Some(path) => file_or_in(locate(path, context)?, "config.json"),
            None => directory.join("config.json"),
        };
        if options.config_path.is_none() && !config_path.exists() {
            let problem = format!(
                "missing, and {} has no config.json: expected that of the base model, such as \
                 Qwen2-VL-2B-Instruct/config.json",
                directory.display()
            );
            return Err(Error::config(format!("{section}.config_path"), problem));
        }
        let vocabulary = weights.info(EMBEDDING).and_then(|info| info.shape.first().copied());
        // First, because nothing else fits in a file of another family.
        weights.check_family(Family::read(&config_path)?)?;
        let config = QwenVlConfig::read(&config_path, vocabulary)?;
        let wanted = wanted(&config, &weights);
        check(&weights, &wanted)?;
        let stored = weights.tensor("model.norm.weight").map(|tensor| stored_dtype(&tensor))?;
        Ok(Self { weights, config, wanted, stored, directory: directory.into() })
    }

    /// Reads the weights whose names `part` accepts to `location`. With `headers_only`, reads none.
    pub fn store(
        &self,
        part: fn(&str) -> bool,
        precision: &Precision,
        location: WeightLocation,
        device: &Device,
        headers_only: bool,
    ) -> Result<Arc<dyn WeightStore>> {
        let weights = self.wanted.iter().filter(|(name, _)| !headers_only && part(name));
        let weights = weights.map(|wanted| read(&self.weights, wanted, precision, device));
        Ok(match location {
            WeightLocation::Host => Arc::new(HostStore::new(weights, device)?),
            WeightLocation::Resident => {
                Arc::new(Resident::from_weights(weights.collect::<Result<HashMap<_, _>>>()?, device))
            }
        })
    }
}

/// The dtypes of a network on a device.
pub(super) struct Precision {
    /// Dtype of dense weights.
    pub dtype: DType,
    /// Format of the matrices of the blocks, if they are in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Dtype of matrix products.
    pub products: DType,
}

impl Precision {
    /// The dtypes that `options` choose on a device with `traits` for files with `stored`.
    pub fn of(section: &str, options: &QwenVlOptions, stored: DType, traits: DeviceTraits) -> Result<Self> {
        let in_section = |error: Error| relabelled(error, section);
        let dtype = options.weights_dtype.of(stored, traits).map_err(in_section)?;
        let products = options.compute_dtype.of(dtype, traits).map_err(in_section)?;
        let eight_bits = options.weights_dtype.eight_bits();
        if eight_bits.is_some() && !traits.has_bytes {
            let problem = "expected auto, f32 or bf16: the device of this backend has no integers of eight bits";
            return Err(Error::config(format!("{section}.weights_dtype"), problem));
        }
        Ok(Self { dtype, eight_bits, products })
    }
}

/// Opens the network that `options` describe. Keys of errors begin with `section`.
pub fn open(section: &str, options: &QwenVlOptions, context: &BuildContext) -> Result<QwenVl> {
    let device = roll_backends::device(&context.backend)?;
    let files = NetworkFiles::open(section, options, context)?;
    let precision = Precision::of(section, options, files.stored, DeviceTraits::of(&device))?;
    let tokenizer_path = options.tokenizer_path.as_ref().map(|path| locate(path, context)).transpose()?;
    let tokenizer_path = tokenizer_path.map(|path| file_or_in(path, "tokenizer.json"));
    // An adapter may have added tokens to its base's.
    let adapter = options.adapter_path.as_ref().map(|path| context.resolve(path)).filter(|path| path.is_dir());
    let directories: Vec<&Path> = adapter.as_deref().into_iter().chain([files.directory.as_path()]).collect();
    let tokenizer = tokenizer(tokenizer_path, &directories)?;
    let others = others(&files.weights, &files.wanted, context.headers_only)?;
    let store = |part| files.store(part, &precision, options.weight_store, &device, context.headers_only);
    let (tower, language) = (store(is_of_tower)?, store(|name| !is_of_tower(name) && name != HEAD)?);
    let memory = options.memory();
    let language = Network::with_store(files.config.text.clone(), language);
    let has_head = !files.config.text.tied && files.weights.info(HEAD).is_some();
    let dtype = if precision.dtype == DType::BF16 { roll_core::DType::Bf16 } else { roll_core::DType::F32 };
    let head = has_head.then_some(OutputLayer { weights: files.weights, dtype });
    Ok(QwenVl {
        tower,
        language: language.with_memory(memory).with_products(precision.products),
        tokenizer,
        others,
        head,
        config: files.config,
        products: precision.products,
        memory,
        last: None,
    })
}

/// Whether the weight `name` belongs to the vision tower.
pub(super) fn is_of_tower(name: &str) -> bool {
    name.starts_with("visual.")
}

/// Whether `name` is a matrix of a block, which `weights_dtype` may store in eight bits.
pub(super) fn is_block_matrix(name: &str, shape: &[usize]) -> bool {
    (name.contains(".blocks.") || name.contains(".layers.")) && shape.len() == 2
}

/// Opens the weights at `path`: a file, or a directory with safetensors or a `model.pth`. The error of a directory
/// without any names the one that was probably meant.
pub(super) fn checkpoint(section: &str, path: &Path) -> Result<Checkpoint> {
    if !path.exists() {
        return Err(Error::bad_file(path, "it does not exist; a published model is named with its organisation"));
    }
    if !path.is_dir() {
        return Ok(Checkpoint::open(path)?);
    }
    if path.join("model.pth").exists() {
        return Ok(Checkpoint::open(path.join("model.pth"))?);
    }
    let is_adapter = path.join("adapter_model.safetensors").exists();
    if is_adapter && !WHOLE_MODELS.iter().any(|name| path.join(name).exists()) {
        let problem = format!(
            "it holds an adapter: expected the directory of the base model here, and this one in `{section}.adapter_path`"
        );
        return Err(Error::bad_file(path, problem));
    }
    open_weights(path).map_err(|error| match checkpoint_folder(path) {
        Some(folder) => {
            let problem = format!("it has no weights: expected the folder with them, {}", folder.display());
            Error::bad_file(path, problem)
        }
        None => error,
    })
}

/// The first folder `checkpoint-...` in `path`, as trainers of Hugging Face write them.
fn checkpoint_folder(path: &Path) -> Option<PathBuf> {
    let is_checkpoint = |folder: &PathBuf| {
        folder.is_dir() && folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("checkpoint-"))
    };
    std::fs::read_dir(path).ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(is_checkpoint).min()
}

/// `path`, or the file `name` in it if it is a directory.
fn file_or_in(path: PathBuf, name: &str) -> PathBuf {
    if path.is_dir() { path.join(name) } else { path }
}

/// Names and shapes of the weights that are read. An output layer that the checkpoint lacks is not among them.
fn wanted(config: &QwenVlConfig, weights: &Weights) -> Vec<(String, Vec<usize>)> {
    let mut wanted = config.vision.weights(config.text.dim);
    let has_head = weights.info(HEAD).is_some();
    wanted.extend(config.text.weights().into_iter().filter(|(name, _)| name != HEAD || has_head));
    wanted
}

/// Fails unless the checkpoint has every tensor of `wanted`. The error names the first one that is missing or has
/// another shape.
fn check(weights: &Weights, wanted: &[(String, Vec<usize>)]) -> Result<()> {
    for (name, shape) in wanted {
        let found = match weights.info(name) {
            Some(info) => &info.shape,
            None => {
                return Err(Error::bad_file(
                    weights.path(),
                    format!("the tensor `{name}` is missing (shape {shape:?})"),
                ));
            }
        };
        let flat = |shape: &[usize]| [shape[0], shape[1..].iter().product()];
        let fits = found == shape || (name == PATCH_EMBEDDING && found.len() > 1 && flat(found)[..] == shape[..]);
        if !fits {
            let what = format!("{}: {name}", weights.path().display());
            return Err(Error::shape(what, format!("{shape:?}, as config.json has it"), found));
        }
    }
    Ok(())
}

/// Reads a tensor to the device. One merged weight at a time is in host memory.
fn read(
    weights: &Weights,
    (name, shape): &(String, Vec<usize>),
    precision: &Precision,
    device: &Device,
) -> Result<(String, Weight)> {
    let tensor = weights.tensor(name)?.reshape(shape.clone())?;
    let weight = match precision.eight_bits {
        Some(kind) if is_block_matrix(name, shape) => {
            Weight::from_scaled(ScaledMatrix::new(ScaledRows::quantised(&tensor, kind)?, device))
        }
        _ => Weight::new(&tensor, precision.dtype, device),
    };
    weights.release(name);
    Ok((name.clone(), weight))
}

/// Reads the tensors that belong to neither network; with `headers_only`, zeros of their shapes.
fn others(weights: &Weights, wanted: &[(String, Vec<usize>)], headers_only: bool) -> Result<BTreeMap<String, Tensor>> {
    let read = |key: &str| match weights.info(key) {
        Some(info) if headers_only => Ok(Tensor::zeros(info.shape.clone())),
        _ => weights.tensor(key),
    };
    let is_other = |key: &&str| {
        *key != HEAD
            && !key.starts_with("visual.")
            && !key.starts_with("model.")
            && wanted.iter().all(|(name, _)| name != key)
    };
    let other = weights.keys().into_iter().filter(is_other);
    other.map(|key| Ok((key.to_string(), read(key)?))).collect()
}

/// Loads the tokenizer at `path`, by default the first that is in one of `directories`. Returns `None` if none has one.
pub(super) fn tokenizer(path: Option<PathBuf>, directories: &[&Path]) -> Result<Option<Tokenizer>> {
    let names = ["tokenizer.json", "tokenizer/tokenizer.json"];
    let mut beside = directories.iter().flat_map(|directory| names.map(|name| directory.join(name)));
    let found = path.or_else(|| beside.find(|file| file.exists()));
    found.map(|file| Tokenizer::load(&file)).transpose()
}

/// Replaces the section `model` of the key of an error about the options.
fn relabelled(error: Error, section: &str) -> Error {
    match error {
        Error::Config { key, problem } => match key.strip_prefix("model.") {
            Some(rest) => Error::config(format!("{section}.{rest}"), problem),
            None => Error::config(key, problem),
        },
        other => other,
    }
}
