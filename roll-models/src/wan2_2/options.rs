//! Options of the Wan models.

use std::borrow::Cow;
use std::path::PathBuf;

use burn::tensor::{DType, Device};
use roll_core::{
    ConfiguredOptions, Error, IdleKeys, Kind, OptionNotes, Result, ResultExt, WeightPlacement, When, parse_options,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value as Json;

use crate::comma_list::{self, split};
use crate::lora::{AdapterSources, Asked};
use crate::precision::{ComputeDType, WeightsDType};
use crate::trainable::{Trainable, check_alpha};

use super::vae::Tiling;

/// Options of the model `wan2_2`; names and defaults as in the reference where it has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WanOptions {
    /// JSON file that lists the weight files (`wan22_paths.json`), a single weight file, or a directory in diffusers
    /// layout.
    pub model_paths: Option<PathBuf>,
    /// List of `ORG/NAME:PATTERN` entries: files of the Hugging Face cache, downloaded where they are missing.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub model_id_with_origin_paths: Option<String>,
    /// Directory of the UMT5 `tokenizer.json`.
    pub tokenizer_path: Option<PathBuf>,
    /// List of the experts that are trained: `dit` (high noise), `dit2` (low noise). Every list of these options is
    /// one of YAML, or a text with commas. Those that `lora_checkpoint` is for unless given; without it `dit2`.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub trainable_models: Option<String>,
    /// List of the experts that carry the LoRA; those of `trainable_models` unless given.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub lora_base_model: Option<String>,
    /// List of the layers that carry the LoRA, by the end of their name. As in `lora_checkpoint` unless given; without it
    /// `q,k,v,o,ffn.0,ffn.2`.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub lora_target_modules: Option<String>,
    /// Rank of the LoRA; 0 trains every weight of the experts instead. As in `lora_checkpoint` unless given; without it
    /// 32.
    pub lora_rank: Option<usize>,
    /// LoRA scale numerator. As in `lora_checkpoint` unless given; without it the rank.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lora_alpha: Option<f64>,
    /// LoRA to start from, in any convention: a file, the directory of a checkpoint, of a run (its newest checkpoint) or
    /// of a PEFT adapter; `HIGH,LOW` or a map `{dit: HIGH, dit2: LOW}` for both experts. A list of these is added up, and
    /// `FILE=0.8` is its strength.
    pub lora_checkpoint: Option<AdapterSources>,
    /// Recompute activations block by block in the backward pass instead of holding them.
    pub use_gradient_checkpointing: bool,
    /// Keep the inputs of the blocks in host memory meanwhile.
    pub use_gradient_checkpointing_offload: bool,
    /// List of the inputs beside the prompt: `input_image`, `end_image`.
    #[serde(deserialize_with = "comma_list::required")]
    #[schemars(schema_with = "comma_list::required_schema")]
    pub extra_inputs: String,
    /// Storage of frozen weights: `f32`, `bf16`, or `auto`: bf16 on GPUs, as in the file on the CPU. On GPUs the time
    /// embedding and the head of an f32 file stay f32. Matrices that a file has in fp8 or int8, with scales, stay so.
    /// `int8` and `fp8` round the matrices of the blocks at loading, each row to its own scale: half the memory of
    /// bf16.
    pub weights_dtype: WeightsDType,
    /// Precision of matrix products and attention: `f32`, or `bf16` with sums in f32. `auto`: bf16 where the weights
    /// are and the device is a GPU. Embeddings, head, norms, residuals, adapters' weights and gradients are f32 either
    /// way. With bf16, block inputs that wait for the backward pass are kept in bf16; on `libtorch-cuda` also the
    /// values between the layers of a block.
    pub compute_dtype: ComputeDType,
    /// Where the frozen weights of the experts live: `resident` on the device, `streamed` from their files block by
    /// block, `host`: in host memory, which is faster than files, `sharded` over the ranks (weights that are trained
    /// too, when all are). `auto` is resident, unless the strategy says otherwise (`strategy.stage: 3`,
    /// `strategy.offload_param`).
    pub weight_store: Placement,
    /// Where the weights of the expert that is not in use are, if the weights are resident: `keep` them on the device;
    /// `host`: in host memory; `drop` them, and read the files again (one copy less, and ranks share the system's
    /// cache of them). `auto`: on GPUs away, unless both experts take at most half of a memory that is known; kept on
    /// the CPU.
    pub idle_expert: IdleExpert,
    /// Attention heads, when neither the weights' width nor a `config.json` beside them tells.
    pub num_heads: Option<usize>,
    /// Timesteps at or above `boundary * 1000` use `dit`; 0.9 for I2V and 0.875 for T2V unless given.
    pub boundary: Option<f64>,
    /// Old name of `algo.shift`, which wins where both are given.
    pub shift: Option<f64>,
    /// Decode and encode in tiles: `[height, width]` in latent pixels, beside `vae_tile_stride`; `none` takes frames
    /// whole. `auto`: whole on the CPU, and on a GPU whose memory is known in the largest tiles that it has room for.
    pub vae_tile_size: TileSize,
    /// Distance of the tiles, `[height, width]` in latent pixels.
    pub vae_tile_stride: Option<[usize; 2]>,
    /// Cache checkpoints the decoder's backward pass may hold; fewer need less memory and more recomputation, and
    /// results are the same. `auto`: 4 on the CPU; on a GPU whose memory is known, as many as fit into half of the
    /// memory that is left. With `model.use_gradient_checkpointing_offload` they wait in host memory, as many as fit
    /// into half of its free part.
    pub vae_checkpoints: Checkpoints,
    /// Precision of the VAE's decoder. With `bf16` weights and activations are rounded and sums are f32; latents,
    /// attention and the layer that makes the frames stay f32, and so does the encoder. On `libtorch-cuda` convolutions
    /// in `f32` are TF32 unless the environment says `NVIDIA_TF32_OVERRIDE=0`.
    pub vae_dtype: VaeDType,
}

/// Rank of a LoRA that is not started from a file.
const RANK: usize = 32;
/// Its layers.
const TARGETS: &str = "q,k,v,o,ffn.0,ffn.2";
/// Of a weight that is trained itself: parameter, gradient and two moments, all f32.
const TRAINED_BYTES: u64 = 16;
/// Inputs that a model may have beside the prompt.
const INPUTS: [&str; 2] = ["input_image", "end_image"];

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Model, name: "wan2_2", idle: crate::trainable::IDLE, more: Some(notes) }
}

fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let options: WanOptions = match config.value("model") {
        Some(Json::Object(options)) => {
            let own = options.iter().filter(|(key, _)| *key != "name").map(|(k, v)| (k.clone(), v.clone())).collect();
            parse_options("model", &own)?
        }
        _ => return Ok(Vec::new()),
    };
    options.check()?;
    let mut notes = Vec::new();
    if let (Some(base), Some(models)) = (&options.lora_base_model, &options.trainable_models)
        && options.lora_rank != Some(0)
        && split(base) != split(models)
    {
        notes.extend(config.idle(&[IdleKeys {
            keys: &["model.trainable_models"],
            when: When::Always,
            because: "`model.lora_base_model` names the network that carries the LoRA",
        }]));
    }
    if options.lora_rank == Some(0) {
        let experts = options.lora_base_model.as_ref().or(options.trainable_models.as_ref());
        notes.push(format!(
            "`model.lora_rank: 0`: every weight of `{}` is trained, with {TRAINED_BYTES} bytes of parameters, gradient \
             and optimizer each (an expert of 14B: {} GB); `model.lora_rank: {RANK}` trains a LoRA instead",
            experts.map_or("dit2", String::as_str),
            14_288_491_584 * TRAINED_BYTES / 1_000_000_000,
        ));
    }
    Ok(notes)
}

/// Where frozen weights live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// As the strategy asks; resident if it does not ask.
    #[default]
    Auto,
    /// On the device, all the time.
    Resident,
    /// In their memory-mapped files; read block by block, one ahead.
    Streamed,
    /// In host memory; brought block by block, one ahead.
    Host,
    /// Sharded over the ranks; gathered block by block.
    Sharded,
}

impl Placement {
    /// This one, or where it is left open that which the strategy wants.
    pub fn or(self, wanted: Option<WeightPlacement>) -> Self {
        match (self, wanted) {
            (Self::Auto, Some(WeightPlacement::Resident)) => Self::Resident,
            (Self::Auto, Some(WeightPlacement::Streamed)) => Self::Streamed,
            (Self::Auto, Some(WeightPlacement::Sharded)) => Self::Sharded,
            (given, _) => given,
        }
    }

    /// Where the weights are once a model is open.
    pub(super) fn chosen(self) -> WeightPlacement {
        match self {
            Self::Auto | Self::Resident => WeightPlacement::Resident,
            Self::Streamed | Self::Host => WeightPlacement::Streamed,
            Self::Sharded => WeightPlacement::Sharded,
        }
    }
}

/// Where the weights of the expert are that is not in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IdleExpert {
    /// Away where it matters.
    #[default]
    Auto,
    /// On the device.
    Keep,
    /// In host memory, as they are stored on the device.
    Host,
    /// In their files.
    Drop,
}

impl IdleExpert {
    /// The choice, for experts of `bytes` together. `memory` is that of the GPU, where it is one and its memory is known;
    /// `converted` says that their files have another dtype, whose conversion takes longer than a copy.
    pub(super) fn chosen(self, bytes: usize, gpu: bool, memory: Option<u64>, converted: bool) -> Self {
        match self {
            Self::Auto if !gpu || memory.is_some_and(|memory| 2 * bytes as u64 <= memory) => Self::Keep,
            Self::Auto if converted => Self::Host,
            Self::Auto => Self::Drop,
            given => given,
        }
    }
}

/// Size of the tiles of the VAE in latent pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TileSize {
    /// As the device's memory wants it.
    #[default]
    Auto,
    /// The frames are one tile.
    Whole,
    /// Height and width.
    Of([usize; 2]),
}

impl JsonSchema for TileSize {
    fn schema_name() -> Cow<'static, str> {
        "TileSize".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"const": "auto"}, {"const": "none"}, <[usize; 2]>::json_schema(generator)]})
    }
}

impl Serialize for TileSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => "auto".serialize(serializer),
            Self::Whole => "none".serialize(serializer),
            Self::Of(size) => size.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for TileSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        match &value {
            serde_json::Value::Null => return Ok(Self::Whole),
            serde_json::Value::String(text) if text == "auto" => return Ok(Self::Auto),
            serde_json::Value::String(text) if text == "none" => return Ok(Self::Whole),
            _ => {}
        }
        let wrong = || de::Error::custom(format!("expected `auto`, `none` or [height, width], found {value}"));
        serde_json::from_value(value.clone()).map(Self::Of).map_err(|_| wrong())
    }
}

/// Checkpoints of the VAE's decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpoints {
    /// As memory wants it.
    #[default]
    Auto,
    /// So many, besides the first.
    Of(usize),
}

impl JsonSchema for Checkpoints {
    fn schema_name() -> Cow<'static, str> {
        "Checkpoints".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"const": "auto"}, usize::json_schema(generator)]})
    }
}

impl Serialize for Checkpoints {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => "auto".serialize(serializer),
            Self::Of(count) => count.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Checkpoints {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        if value.as_str() == Some("auto") {
            return Ok(Self::Auto);
        }
        let wrong = || de::Error::custom(format!("expected `auto` or a whole number of at least 0, found {value}"));
        serde_json::from_value(value.clone()).map(Self::Of).map_err(|_| wrong())
    }
}

/// Precision of the VAE's decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VaeDType {
    /// f32.
    #[default]
    F32,
    /// bf16, with sums in f32.
    Bf16,
}

impl VaeDType {
    /// For a decoder on `device`. Fails if bf16 is asked of a device without it.
    pub(super) fn of(self, device: &Device) -> Result<DType> {
        match self {
            Self::F32 => Ok(DType::F32),
            Self::Bf16 if device.supports_dtype(DType::BF16) => Ok(DType::BF16),
            Self::Bf16 => Err(Error::config("model.vae_dtype", "expected f32: the device of this backend has no bf16")),
        }
    }
}

impl Default for WanOptions {
    fn default() -> Self {
        Self {
            model_paths: None,
            model_id_with_origin_paths: None,
            tokenizer_path: None,
            trainable_models: None,
            lora_base_model: None,
            lora_target_modules: None,
            lora_rank: None,
            lora_alpha: None,
            lora_checkpoint: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            extra_inputs: "input_image".into(),
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
            weight_store: Placement::Auto,
            idle_expert: IdleExpert::Auto,
            num_heads: None,
            boundary: None,
            shift: None,
            vae_tile_size: TileSize::Auto,
            vae_tile_stride: None,
            vae_checkpoints: Checkpoints::Auto,
            vae_dtype: VaeDType::F32,
        }
    }
}

impl WanOptions {
    /// Fails on values that can only be mistakes.
    pub fn check(&self) -> Result<()> {
        check_alpha(self.lora_alpha)?;
        match split(&self.extra_inputs).iter().find(|input| !INPUTS.contains(&input.as_str())) {
            Some(unknown) => {
                let problem =
                    format!("`{unknown}` is not an input; there are {}", INPUTS.map(|i| format!("`{i}`")).join(", "));
                Err(Error::config("model.extra_inputs", problem))
            }
            None => Ok(()),
        }
    }

    /// The experts that the configuration names for training, and the key that does; `None` where it names none.
    pub fn named_experts(&self) -> Result<Option<(&'static str, Vec<String>)>> {
        let (key, list) = match (&self.lora_base_model, &self.trainable_models) {
            (Some(list), _) => ("model.lora_base_model", list),
            (None, Some(list)) => ("model.trainable_models", list),
            (None, None) => return Ok(None),
        };
        let names = split(list);
        match names.iter().find(|name| !["dit", "dit2"].contains(&name.as_str())) {
            Some(unknown) => {
                Err(Error::config(key, format!("`{unknown}` is not an expert; there are `dit` and `dit2`")))
            }
            None => Ok(Some((key, names))),
        }
    }

    /// The experts to train, by name, given those that the checkpoint holds. `started` are those that `lora_checkpoint`
    /// is for.
    pub fn trained_experts(&self, present: &[&str], started: &[&str]) -> Result<Vec<String>> {
        let Some((key, names)) = self.named_experts()? else {
            return Ok(match (started, present.contains(&"dit2")) {
                ([], true) => vec!["dit2".into()],
                ([], false) => vec!["dit".into()],
                (started, _) => started.iter().map(|name| name.to_string()).collect(),
            });
        };
        if names.iter().any(|n| n == "dit2") && !present.contains(&"dit2") {
            if names.len() > 1 {
                return Err(Error::config(key, "this checkpoint has one expert, `dit`; `dit2` is not there"));
            }
            tracing::warn!("this checkpoint has one expert: `dit` is trained, although `{key}` says `dit2`");
            return Ok(vec!["dit".into()]);
        }
        Ok(names)
    }

    /// The trained part of `expert`, when the experts `trained` are and nothing is started from.
    pub fn trainable(&self, trained: &[String], expert: &str) -> Trainable {
        let rank = self.lora_rank.unwrap_or(RANK);
        match (trained.iter().any(|name| name == expert), rank) {
            (false, _) => Trainable::Frozen,
            (true, 0) => Trainable::Full,
            (true, rank) => {
                Trainable::Lora { rank, alpha: self.lora_alpha.unwrap_or(rank as f64), targets: self.lora_targets() }
            }
        }
    }

    /// The layers that carry a LoRA that is not started from a file.
    pub fn lora_targets(&self) -> Vec<String> {
        split(self.lora_target_modules.as_deref().unwrap_or(TARGETS))
    }

    /// The words on a LoRA beside its file; `targets` are those of `lora_target_modules`, where it is given.
    pub(super) fn asked<'a>(&self, targets: Option<&'a [String]>) -> Asked<'a> {
        Asked { rank: self.lora_rank, alpha: self.lora_alpha, targets }
    }

    /// The tiles of the VAE that the options name; the size alone says whether there are others.
    pub(super) fn tiling(&self) -> Result<Option<Tiling>> {
        match (self.vae_tile_size, self.vae_tile_stride) {
            (TileSize::Of(size), Some(stride)) => {
                let tiling = Tiling { size, stride };
                tiling.check().in_section("model")?;
                Ok(Some(tiling))
            }
            (TileSize::Auto | TileSize::Whole, None) => Ok(None),
            _ => Err(Error::config("model.vae_tile_size", "needs `vae_tile_stride` beside it, and the reverse")),
        }
    }

    /// Whether the configuration asks for this input beside the prompt.
    pub fn wants(&self, input: &str) -> bool {
        split(&self.extra_inputs).iter().any(|i| i == input)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::json;

    use super::*;

    fn parsed(options: serde_json::Value) -> Result<WanOptions> {
        parse_options("model", options.as_object().unwrap())
    }

    #[test]
    fn lists_are_those_of_yaml_or_texts_with_commas() {
        let text = parsed(json!({
            "trainable_models": "dit,dit2", "lora_base_model": null, "lora_target_modules": "q,k",
            "extra_inputs": "input_image,end_image", "model_id_with_origin_paths": "o/n:a*,o/n:b",
        }));
        let list = parsed(json!({
            "trainable_models": ["dit", "dit2"], "lora_target_modules": ["q", " k"],
            "extra_inputs": ["input_image", "end_image"], "model_id_with_origin_paths": ["o/n:a*", "o/n:b"],
        }));
        let (text, list) = (text.unwrap(), list.unwrap());
        assert_eq!(text, list);
        assert_eq!(list.trained_experts(&["dit", "dit2"], &[]).unwrap(), ["dit", "dit2"]);
        assert_eq!((list.lora_targets(), list.wants("end_image")), (vec!["q".into(), "k".into()], true));
        let base = parsed(json!({"lora_base_model": ["dit"]})).unwrap();
        assert_eq!(base.trained_experts(&["dit", "dit2"], &[]).unwrap(), ["dit"]);
    }

    #[test]
    fn tiles_are_a_size_a_word_or_nothing() {
        let tiles = |value: serde_json::Value| parsed(json!({"vae_tile_size": value})).map(|o| o.vae_tile_size);
        assert_eq!(tiles(json!("auto")).unwrap(), TileSize::Auto);
        assert_eq!((tiles(json!("none")).unwrap(), tiles(json!(null)).unwrap()), (TileSize::Whole, TileSize::Whole));
        assert_eq!(tiles(json!([34, 34])).unwrap(), TileSize::Of([34, 34]));
        for value in [json!("some"), json!([34]), json!(34)] {
            let said = tiles(value).unwrap_err().to_string();
            assert!(said.contains("[height, width]"), "{said}");
        }
        for size in [TileSize::Auto, TileSize::Whole, TileSize::Of([8, 9])] {
            let text = serde_json::to_value(size).unwrap();
            assert_eq!(serde_json::from_value::<TileSize>(text).unwrap(), size);
        }
    }

    #[test]
    fn checkpoints_are_a_number_or_left_open() {
        let checkpoints =
            |value: serde_json::Value| parsed(json!({"vae_checkpoints": value})).map(|o| o.vae_checkpoints);
        assert_eq!(checkpoints(json!("auto")).unwrap(), Checkpoints::Auto);
        assert_eq!(checkpoints(json!(0)).unwrap(), Checkpoints::Of(0));
        for value in [json!("all"), json!(-1), json!([4])] {
            let said = checkpoints(value).unwrap_err().to_string();
            assert!(said.contains("vae_checkpoints"), "{said}");
        }
        for count in [Checkpoints::Auto, Checkpoints::Of(7)] {
            let text = serde_json::to_value(count).unwrap();
            assert_eq!(serde_json::from_value::<Checkpoints>(text).unwrap(), count);
        }
    }

    #[test]
    fn the_idle_expert_goes_where_memory_is_short() {
        let chosen = |gpu, memory, converted| IdleExpert::Auto.chosen(57_000_000_000, gpu, memory, converted);
        assert_eq!(chosen(false, None, true), IdleExpert::Keep);
        assert_eq!(chosen(true, Some(141_000_000_000), true), IdleExpert::Keep);
        assert_eq!(chosen(true, Some(80_000_000_000), true), IdleExpert::Host);
        assert_eq!(
            (chosen(true, Some(80_000_000_000), false), chosen(true, None, false)),
            (IdleExpert::Drop, IdleExpert::Drop)
        );
        assert_eq!(IdleExpert::Host.chosen(1, false, None, false), IdleExpert::Host);
    }

    #[test]
    fn what_is_no_list_is_an_error_that_names_the_key() {
        for (options, key) in [
            (json!({"trainable_models": 3}), "model.trainable_models"),
            (json!({"extra_inputs": null}), "model.extra_inputs"),
            (json!({"lora_base_model": ["dit", 2]}), "model.lora_base_model"),
            (json!({"lora_target_modules": ["q,k"]}), "model.lora_target_modules"),
        ] {
            let message = parsed(options).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
    }

    #[test]
    fn an_expert_is_trained_as_the_options_say() {
        let options = WanOptions { lora_rank: Some(4), ..WanOptions::default() };
        let trained = ["dit2".to_string()];
        assert_eq!(options.trainable(&trained, "dit"), Trainable::Frozen);
        let expected = Trainable::Lora { rank: 4, alpha: 4.0, targets: options.lora_targets() };
        assert_eq!(options.trainable(&trained, "dit2"), expected);
        assert_eq!(WanOptions { lora_rank: Some(0), ..options }.trainable(&trained, "dit2"), Trainable::Full);
    }

    #[test]
    fn experts_are_those_that_are_named_or_those_of_the_file_or_the_second() {
        let both = ["dit", "dit2"];
        let options = WanOptions::default();
        assert_eq!(options.trained_experts(&both, &[]).unwrap(), ["dit2"]);
        assert_eq!(options.trained_experts(&["dit"], &[]).unwrap(), ["dit"]);
        assert_eq!(options.trained_experts(&both, &["dit"]).unwrap(), ["dit"]);
        let named = WanOptions { trainable_models: Some("dit,dit2".into()), ..options };
        assert_eq!(named.trained_experts(&both, &["dit"]).unwrap(), both);
        assert!(named.trained_experts(&["dit"], &[]).is_err());
    }

    #[test]
    fn options_without_effect_are_told_and_unknown_inputs_refused() {
        let told = |changes: serde_json::Value| {
            let defaults: Options = json!({"model": WanOptions::default()}).as_object().unwrap().clone();
            let mut config = defaults.clone();
            for (key, value) in changes.as_object().unwrap() {
                config["model"][key] = value.clone();
            }
            OptionNotes::of(Kind::Model, "wan2_2", &ConfiguredOptions::new(&config, &defaults))
                .map_err(|e| e.to_string())
        };
        assert_eq!(told(json!({})).unwrap(), Vec::<String>::new());
        assert_eq!(told(json!({"lora_base_model": "dit2", "trainable_models": "dit2"})).unwrap().len(), 0);
        for (changes, word) in [
            (json!({"lora_base_model": "dit", "trainable_models": "dit2"}), "`model.lora_base_model` names"),
            (json!({"lora_rank": 0, "lora_alpha": 3.0}), "`model.lora_alpha: 3.0` has no effect"),
            (
                json!({"use_gradient_checkpointing": false, "use_gradient_checkpointing_offload": true}),
                "`model.use_gradient_checkpointing: false` has no effect",
            ),
        ] {
            let notes = told(changes).unwrap();
            assert!(notes.iter().any(|note| note.contains(word)), "{notes:?}");
        }
        let whole = told(json!({"lora_rank": 0, "trainable_models": "dit"})).unwrap();
        assert!(
            whole.len() == 1 && whole[0].contains("every weight of `dit`") && whole[0].contains("228 GB"),
            "{whole:?}"
        );
        let refused = told(json!({"extra_inputs": "input_image,foo"})).unwrap_err();
        assert!(refused.contains("`foo`") && refused.contains("`end_image`"), "{refused}");
        for alpha in [0.0, -1.0] {
            let refused = told(json!({"lora_alpha": alpha})).unwrap_err();
            assert!(refused.contains("model.lora_alpha") && refused.contains("above 0"), "{refused}");
        }
    }
}
