//! Arguments of the commands that make, look at and rewrite weight files.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args as ClapArgs, Command, ValueEnum};
use roll_core::inventory;
use roll_network::new_checkpoint::TinyCheckpoint;

/// Arguments of `roll init-tiny`.
#[derive(Debug, ClapArgs)]
pub struct InitTiny {
    /// Directory to make.
    pub dir: PathBuf,
    /// Kind of model.
    #[arg(long, value_parser = TinyKinds, default_value = "i2v")]
    pub kind: &'static TinyCheckpoint,
    /// Key of the random weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write into a directory that is not empty, replacing files of the same names.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll init-experts`.
#[derive(Debug, ClapArgs)]
pub struct InitExperts {
    /// Directory to make. Put text encoder (`models_t5_*`), tokenizer and VAE beside the files.
    pub dir: PathBuf,
    /// Kind of model.
    #[arg(long, value_enum, default_value_t = WanKind::I2v)]
    pub kind: WanKind,
    /// Width.
    #[arg(long, default_value_t = 128)]
    pub dim: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 4)]
    pub heads: usize,
    /// Width of the feed-forward layers.
    #[arg(long, default_value_t = 512)]
    pub ffn_dim: usize,
    /// Blocks.
    #[arg(long, default_value_t = 6)]
    pub layers: usize,
    /// Width of the text embedding.
    #[arg(long, default_value_t = 64)]
    pub text_dim: usize,
    /// Tokens that prompts are padded or cut to.
    #[arg(long, default_value_t = 32)]
    pub text_len: usize,
    /// Key of the random weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write into a directory that is not empty, replacing files of the same names.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll export`.
#[derive(Debug, ClapArgs)]
pub struct Export {
    /// Run with `model.lora_rank=0` (its newest checkpoint), a checkpoint, or the weight file in it.
    #[arg(value_name = "RUN|CHECKPOINT")]
    pub trained: PathBuf,
    /// Directory to make.
    pub out: PathBuf,
    /// Dtype of the written weights. Default: that of the model from which the training started, by its config.json.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
    /// Upper limit on the size of a shard: 5GB, 500MB.
    #[arg(long, default_value = "5GB", value_name = "SIZE", value_parser = bytes)]
    pub max_size: u64,
}

/// Arguments of `roll export-expert`.
#[derive(Debug, ClapArgs)]
pub struct ExportExpert {
    /// Checkpoint directory of a run with `model.lora_rank=0`, or the weight file in it.
    pub checkpoint: PathBuf,
    /// Directory of the expert that the training started from, with its config.json.
    #[arg(long, value_name = "DIR")]
    pub base: PathBuf,
    /// Directory to write to; may be the base itself, with --force.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Dtype of the written weights.
    #[arg(long, value_enum, default_value_t = StoredDType::F32)]
    pub dtype: StoredDType,
    /// Write into a directory that is not empty; all shards of the transformer in it are replaced.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll merge-lora`.
#[derive(Debug, ClapArgs)]
pub struct MergeLora {
    /// Weight file, index of shards, directory or glob of the transformer.
    pub base: PathBuf,
    /// LoRA file; or the directory of a run (its newest checkpoint), of a checkpoint, or of a PEFT adapter.
    pub lora: PathBuf,
    /// File (.safetensors) or new directory to write.
    pub out: PathBuf,
    /// Strength of the LoRA, a factor on top of its own alpha / rank.
    #[arg(long, default_value_t = 1.0, value_name = "N", allow_negative_numbers = true)]
    pub alpha: f64,
    /// Dtype of the written weights. Default: that of each in the base.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
    /// Leave out layers of the LoRA that are not in the base.
    #[arg(long)]
    pub allow_missing: bool,
    /// Transformer to take from a LoRA file that has adapters for both.
    #[arg(long, value_enum)]
    pub expert: Option<ExpertName>,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll convert-lora`.
#[derive(Debug, ClapArgs)]
pub struct ConvertLora {
    /// LoRA file; or the directory of a run (its newest checkpoint), of a checkpoint, or of a PEFT adapter.
    pub lora: PathBuf,
    /// File (.safetensors) to write; for PEFT also a directory, which gets its adapter_config.json.
    pub out: PathBuf,
    /// Convention of the program that will read the file.
    #[arg(long, value_enum, value_name = "CONVENTION")]
    pub to: ConventionName,
    /// Layer names of a PEFT file, those of the program that will load it; `fused`: of single files that
    /// join layers, such as ComfyUI's.
    #[arg(long, value_enum, default_value_t = LayerNames::Official)]
    pub names: LayerNames,
    /// Transformer to take from a file that has adapters for both. Its name is written into the file's header.
    #[arg(long, value_enum)]
    pub expert: Option<ExpertName>,
    /// Dtype of the written tensors. Default: as they are.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
    /// The target model, needed only for kohya-style names of models other than Wan, and to undo fused names.
    #[arg(long, value_name = "FILE")]
    pub base: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll merge-shards`.
#[derive(Debug, ClapArgs)]
pub struct MergeShards {
    /// Directory of the shards, their index, or a glob.
    pub dir: PathBuf,
    /// File to write.
    pub out: PathBuf,
    /// Dtype of the written weights. Default: as they are.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll split-shards`.
#[derive(Debug, ClapArgs)]
pub struct SplitShards {
    /// Weight file.
    pub file: PathBuf,
    /// Directory to make.
    pub out: PathBuf,
    /// Upper limit on the size of a shard: 5GB, 500MB.
    #[arg(long, default_value = "5GB", value_name = "SIZE", value_parser = bytes)]
    pub max_size: u64,
    /// Dtype of the written weights. Default: as they are.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
    /// Write into a directory that holds files.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll inspect`.
#[derive(Debug, ClapArgs)]
pub struct Inspect {
    /// Weight file, GGUF file, index of shards, glob or directory; for a run, its newest checkpoint is read.
    pub file: PathBuf,
    /// List every tensor.
    #[arg(long)]
    pub keys: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Parses a size such as `5GB` or `1.5MiB` as a number of bytes.
fn bytes(text: &str) -> Result<u64, String> {
    const EXPECTED: &str = "expected a size such as 5GB or 1.5MiB";
    let text = text.trim();
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let bytes_per_unit: u64 = match text[number_end..].trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        other => return Err(format!("{EXPECTED}, found the unit `{other}`")),
    };
    let number: f64 = text[..number_end].parse().map_err(|_| EXPECTED.to_string())?;
    match number * bytes_per_unit as f64 {
        bytes if (1.0..1e18).contains(&bytes) => Ok(bytes as u64),
        _ => Err(format!("{EXPECTED}, found `{text}`")),
    }
}

/// Programs whose LoRA files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConventionName {
    /// `base_model.model.X.lora_A.weight`, with an adapter_config.json.
    Peft,
    /// `X.lora_A.default.weight`: DiffSynth-Studio and ROLL.
    Diffsynth,
    /// `transformer.X.lora_A.weight`.
    Diffusers,
    /// `diffusion_model.X.lora_A.weight`.
    #[value(alias = "comfy")]
    Comfyui,
    /// `lora_unet_X.lora_down.weight`.
    Kohya,
}

/// Layer names of a written LoRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayerNames {
    /// `blocks.0.self_attn.q`.
    Official,
    /// `blocks.0.attn1.to_q`.
    Diffusers,
    /// Those of ComfyUI's single files of models in which q, k and v are one layer: `layers.0.attention.qkv`. For
    /// ComfyUI and kohya.
    Fused,
}

/// The two transformers of Wan2.2-A14B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExpertName {
    /// The high-noise one, `dit` and `transformer`.
    #[value(alias = "dit", alias = "high_noise")]
    High,
    /// The low-noise one, `dit2` and `transformer_2`.
    #[value(alias = "dit2", alias = "low_noise")]
    Low,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredDType {
    /// Four bytes, as trained.
    F32,
    /// Two bytes, rounded.
    Bf16,
    /// Two bytes, rounded, with a smaller range.
    F16,
}

impl StoredDType {
    /// As the dtype of a tensor.
    pub fn dtype(self) -> roll_core::DType {
        match self {
            Self::F32 => roll_core::DType::F32,
            Self::Bf16 => roll_core::DType::Bf16,
            Self::F16 => roll_core::DType::F16,
        }
    }
}

/// The kinds of small model that the models of this program can write.
#[derive(Clone)]
struct TinyKinds;

impl TinyKinds {
    fn all() -> Vec<&'static TinyCheckpoint> {
        let mut all: Vec<_> = inventory::iter::<TinyCheckpoint>().collect();
        all.sort_by_key(|tiny| tiny.kind);
        all
    }

    fn values() -> impl Iterator<Item = PossibleValue> {
        Self::all().into_iter().map(|tiny| PossibleValue::new(tiny.kind).help(tiny.about))
    }
}

impl TypedValueParser for TinyKinds {
    type Value = &'static TinyCheckpoint;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<Self::Value, clap::Error> {
        let kind = PossibleValuesParser::new(Self::values()).parse_ref(command, arg, value)?;
        let found = Self::all().into_iter().find(|tiny| tiny.kind == kind);
        found.ok_or_else(|| clap::Error::new(clap::error::ErrorKind::InvalidValue).with_cmd(command))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Self::values()))
    }
}

/// Kinds of Wan model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WanKind {
    /// Image to video, two experts, 16 latent channels.
    I2v,
    /// Text to video, two experts, 16 latent channels.
    T2v,
    /// Text and image to video, one expert, 48 latent channels.
    Ti2v,
    /// Image to video as in Wan2.1: one expert, 16 latent channels, and a CLIP image encoder.
    I2v21,
}
