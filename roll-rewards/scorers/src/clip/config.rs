//! Reads the configuration of a CLIP or SigLIP directory: `config.json`, and the preprocessing of pictures in
//! `preprocessor_config.json` or `processor_config.json`.

use std::path::{Path, PathBuf};

use roll_core::{Error, Options, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::files::read_json;
use crate::picture::{Filter, Fit, Input, Size};

/// `config.json` of a `CLIPModel` or a `SiglipModel`. Missing keys have the defaults of `transformers`.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// CLIP or SigLIP.
    pub family: Family,
    /// Width of the embeddings.
    pub projection_dim: usize,
    /// The image tower.
    pub vision_config: VisionConfig,
    /// The text tower.
    pub text_config: TextConfig,
}

/// The architecture of the model: how embeddings are read from its two towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// The image embedding is the projected class token, the text embedding the projected end token of a causal
    /// transformer.
    Clip,
    /// The image embedding is pooled by attention to all patches, the text embedding is the last of a fixed number of
    /// tokens in a bidirectional transformer.
    Siglip,
}

/// `config.json` as it is in the file, without the defaults.
#[derive(Deserialize)]
struct WrittenConfig {
    model_type: String,
    projection_dim: Option<usize>,
    #[serde(default)]
    vision_config: Options,
    #[serde(default)]
    text_config: Options,
}

/// Sizes of the image tower.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VisionConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub image_size: usize,
    pub patch_size: usize,
    pub hidden_act: Activation,
    pub layer_norm_eps: f64,
}

impl VisionConfig {
    /// The defaults of `transformers` for a family.
    fn of(family: Family) -> Self {
        let clip = Self {
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            image_size: 224,
            patch_size: 32,
            hidden_act: Activation::QuickGelu,
            layer_norm_eps: 1e-5,
        };
        match family {
            Family::Clip => clip,
            Family::Siglip => {
                Self { patch_size: 16, hidden_act: Activation::GeluPytorchTanh, layer_norm_eps: 1e-6, ..clip }
            }
        }
    }
}

/// Sizes of the text tower.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TextConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub max_position_embeddings: usize,
    pub vocab_size: usize,
    pub eos_token_id: Option<u32>,
    /// SigLIP's padding token, if the tokenizer names none.
    pub pad_token_id: Option<u32>,
    /// Width of SigLIP's embeddings; `hidden_size` if absent.
    pub projection_size: Option<usize>,
    pub hidden_act: Activation,
    pub layer_norm_eps: f64,
}

impl TextConfig {
    /// The defaults of `transformers` for a family.
    fn of(family: Family) -> Self {
        let clip = Self {
            hidden_size: 512,
            intermediate_size: 2048,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            max_position_embeddings: 77,
            vocab_size: 49408,
            eos_token_id: Some(49407),
            pad_token_id: Some(1),
            projection_size: None,
            hidden_act: Activation::QuickGelu,
            layer_norm_eps: 1e-5,
        };
        match family {
            Family::Clip => clip,
            Family::Siglip => Self {
                hidden_size: 768,
                intermediate_size: 3072,
                num_attention_heads: 12,
                max_position_embeddings: 64,
                vocab_size: 32000,
                hidden_act: Activation::GeluPytorchTanh,
                layer_norm_eps: 1e-6,
                ..clip
            },
        }
    }
}

/// The values `written` in a file, with `defaults` for missing keys.
fn with_defaults<T: Serialize + DeserializeOwned>(defaults: T, written: Options) -> serde_json::Result<T> {
    let mut merged = serde_json::to_value(defaults)?;
    if let Json::Object(keys) = &mut merged {
        keys.extend(written);
    }
    serde_json::from_value(merged)
}

/// Activation function of the feed-forward layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(1.702 x)`.
    QuickGelu,
    /// GELU with the error function.
    Gelu,
    /// The tanh approximation of GELU.
    #[serde(alias = "gelu_new")]
    GeluPytorchTanh,
}

/// Bound on the sizes in a file, which also bounds the memory that they request.
const MAX_CONFIG_SIZE: usize = 1 << 20;
/// Default of CLIP's `projection_dim` in `transformers`.
const DEFAULT_PROJECTION: usize = 512;

impl ModelConfig {
    /// Reads the configuration in a directory. Fails if it belongs to another model or contradicts itself.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join("config.json");
        let written: WrittenConfig = read_json(&path)?;
        let family = match written.model_type.as_str() {
            "clip" => Family::Clip,
            "siglip" => Family::Siglip,
            other => {
                let problem = format!("expected a model of type `clip` or `siglip`, found `{other}`");
                return Err(Error::bad_file(&path, problem));
            }
        };
        let unreadable = |tower: &str, e: serde_json::Error| Error::bad_file(&path, format!("{tower}: {e}"));
        let vision_config: VisionConfig = with_defaults(VisionConfig::of(family), written.vision_config)
            .map_err(|e| unreadable("vision_config", e))?;
        let text_config: TextConfig =
            with_defaults(TextConfig::of(family), written.text_config).map_err(|e| unreadable("text_config", e))?;
        let projection_dim = match family {
            Family::Clip => written.projection_dim.unwrap_or(DEFAULT_PROJECTION),
            Family::Siglip => text_config.projection_size.unwrap_or(text_config.hidden_size),
        };
        let config = Self { family, projection_dim, vision_config, text_config };
        config.check().map_err(|problem| Error::bad_file(&path, problem))?;
        Ok(config)
    }

    /// Fails, with the problem, if sizes are out of range or contradict each other.
    fn check(&self) -> Result<(), String> {
        let (v, t) = (&self.vision_config, &self.text_config);
        for (tower, width, heads, hidden, layers) in [
            ("vision_config", v.hidden_size, v.num_attention_heads, v.intermediate_size, v.num_hidden_layers),
            ("text_config", t.hidden_size, t.num_attention_heads, t.intermediate_size, t.num_hidden_layers),
        ] {
            let sizes = [width, heads, hidden, layers];
            if sizes.iter().any(|s| !(1..MAX_CONFIG_SIZE).contains(s)) || !width.is_multiple_of(heads) {
                return Err(format!("{tower}: {width} wide with {heads} heads, {hidden} and {layers} make no tower"));
            }
        }
        let (side, patch) = (v.image_size, v.patch_size);
        if patch == 0 || side >= MAX_CONFIG_SIZE || side == 0 || !side.is_multiple_of(patch) {
            return Err(format!("vision_config: pictures of {side} pixels are no whole number of patches of {patch}"));
        }
        if [t.max_position_embeddings, t.vocab_size, self.projection_dim]
            .iter()
            .any(|s| !(1..MAX_CONFIG_SIZE).contains(s))
        {
            return Err("text_config: positions, vocabulary and projection must be 1 or more".into());
        }
        for (tower, eps) in [("vision_config", v.layer_norm_eps), ("text_config", t.layer_norm_eps)] {
            if !(eps.is_finite() && eps >= 0.0) {
                return Err(format!("{tower}: expected a `layer_norm_eps` of at least 0, found {eps}"));
            }
        }
        // SigLIP's image tower has no projection to the width of the text embeddings.
        if self.family == Family::Siglip && self.projection_dim != v.hidden_size {
            let (text, image) = (self.projection_dim, v.hidden_size);
            return Err(format!("embeddings of texts have {text} numbers, those of pictures {image}"));
        }
        Ok(())
    }
}

/// The mean and standard deviation of pixels by which OpenAI's CLIP and nearly all later models normalise.
const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f32; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

/// The preprocessing as it is in the file. Sizes are a number or an object (`height` and `width`, or `shortest_edge`).
#[derive(Default, Deserialize)]
#[serde(default)]
struct Preprocessor {
    size: Option<Json>,
    crop_size: Option<Json>,
    do_resize: Option<bool>,
    do_center_crop: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    rescale_factor: Option<f32>,
    resample: Option<u32>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
}

/// The path of the file with the preprocessing: `preprocessor_config.json` or, as transformers 5 saves it,
/// `processor_config.json`. `None` if the directory has neither.
pub fn preprocessing_file(directory: &Path) -> Option<PathBuf> {
    ["preprocessor_config.json", "processor_config.json"]
        .map(|name| directory.join(name))
        .into_iter()
        .find(|f| f.exists())
}

/// Reads the preprocessing to pictures of `side` pixels from the file of the directory. Without a file, returns the
/// default of the family.
pub fn read_input(directory: &Path, family: Family, side: usize) -> Result<Input> {
    let file = preprocessing_file(directory);
    let written = match &file {
        Some(file) => {
            let mut fields: serde_json::Map<String, Json> = read_json(file)?;
            // `processor_config.json` has the preprocessing of pictures in a field of its own.
            let fields = fields.remove("image_processor").unwrap_or(Json::Object(fields));
            serde_json::from_value(fields).map_err(|e| Error::bad_file(file, e.to_string()))?
        }
        None => Preprocessor::default(),
    };
    let path = file.unwrap_or_else(|| directory.into());
    let invalid = |problem: String| Error::bad_file(&path, problem);
    let (crops_by_default, mean, std) = match family {
        Family::Clip => (true, MEAN, STD),
        Family::Siglip => (false, [0.5; 3], [0.5; 3]),
    };
    let crops = written.do_center_crop.unwrap_or(crops_by_default);
    let crop_height = written.crop_size.as_ref().and_then(height_of).unwrap_or(side);
    let (fit, shorter_side) = fit_of(written.size.as_ref(), crops, side).map_err(invalid)?;
    if crops && crop_height != side {
        let problem = format!("`crop_size` is {crop_height}, but config.json says that pictures have {side} pixels");
        return Err(invalid(problem));
    }
    if [written.do_resize, written.do_rescale].contains(&Some(false)) {
        return Err(invalid("pictures that are not resized and rescaled are not supported".into()));
    }
    let filter = match written.resample {
        None => Filter::Bicubic,
        Some(number) => pillow_filter(number)
            .ok_or_else(|| invalid(format!("`resample` {number} is not one of Pillow's filters, 0 to 4")))?,
    };
    let (mean, std) = match written.do_normalize {
        Some(false) => ([0.0; 3], [1.0; 3]),
        _ => (written.image_mean.unwrap_or(mean), written.image_std.unwrap_or(std)),
    };
    // The values of black and white, which are 0 and 255 before the rescaling.
    let range = [0.0, 255.0 * written.rescale_factor.unwrap_or(1.0 / 255.0)];
    let input = Input { size: Some(Size::Side(side)), fit, shorter_side, filter, mean, std, range, ..Input::default() };
    input.check("input").map_err(|e| invalid(e.to_string()))?;
    Ok(input)
}

/// How `size` in the file fits frames into pictures of `side` pixels, and the length of the shorter side before
/// cropping, if the file has it. `crops` says whether frames are cropped.
fn fit_of(size: Option<&Json>, crops: bool, side: usize) -> Result<(Fit, Option<usize>), String> {
    let Some(size) = size else { return Ok((if crops { Fit::Crop } else { Fit::Stretch }, None)) };
    let shortest_edge = size.get("shortest_edge").and_then(Json::as_u64).or(size.as_u64()).map(|n| n as usize);
    match (shortest_edge, height_of(size)) {
        // The shorter side is resized to this number, then the middle is cropped.
        (Some(shortest_edge), _) if crops => Ok((Fit::Crop, Some(shortest_edge))),
        // `height` and `width`: both sides are resized, without cropping.
        (None, Some(height)) if height == side => Ok((Fit::Stretch, None)),
        _ => Err(format!("`size` {size} does not make pictures of {side} pixels")),
    }
}

/// The height of a size, which is a number or has the field `height`.
fn height_of(size: &Json) -> Option<usize> {
    size.get("height").unwrap_or(size).as_u64().map(|n| n as usize)
}

/// The filter with this number in Pillow.
fn pillow_filter(number: u32) -> Option<Filter> {
    match number {
        0 => Some(Filter::Nearest),
        1 => Some(Filter::Lanczos),
        2 => Some(Filter::Bilinear),
        3 => Some(Filter::Bicubic),
        4 => Some(Filter::Box),
        _ => None,
    }
}
