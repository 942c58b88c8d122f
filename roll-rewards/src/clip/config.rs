//! `config.json` and the preprocessing (`preprocessor_config.json`, `processor_config.json`) of a CLIP or SigLIP directory.

use std::path::{Path, PathBuf};

use roll_core::{Error, Options, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::files::json;
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

/// How the towers begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// The image embedding is the projected class token, the text embedding the projected end token of a causal
    /// transformer.
    Clip,
    /// The image embedding is pooled by attention to all patches, the text embedding is the last of a fixed number of
    /// tokens in a bidirectional transformer.
    Siglip,
}

/// `config.json` as it is written.
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
    /// The defaults of `transformers`.
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
    /// Width of SigLIP's embeddings; default `hidden_size`.
    pub projection_size: Option<usize>,
    pub hidden_act: Activation,
    pub layer_norm_eps: f64,
}

impl TextConfig {
    /// The defaults of `transformers`.
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

/// Replaces values of `defaults` by those of a file.
fn with_defaults<T: Serialize + DeserializeOwned>(defaults: T, written: Options) -> serde_json::Result<T> {
    let mut whole = serde_json::to_value(defaults)?;
    if let Json::Object(keys) = &mut whole {
        keys.extend(written);
    }
    serde_json::from_value(whole)
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

/// Greatest size that a file may request, so that it cannot request any amount of memory.
const MAX_CONFIG_SIZE: usize = 1 << 20;

impl ModelConfig {
    /// Reads the configuration in a directory. Fails if it belongs to another model or contradicts itself.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join("config.json");
        let written: WrittenConfig = json(&path)?;
        let wrong = |problem: String| Err(Error::bad_file(&path, problem));
        let family = match written.model_type.as_str() {
            "clip" => Family::Clip,
            "siglip" => Family::Siglip,
            other => return wrong(format!("expected a model of type `clip` or `siglip`, found `{other}`")),
        };
        let unread = |tower: &str, e: serde_json::Error| Error::bad_file(&path, format!("{tower}: {e}"));
        let vision_config: VisionConfig =
            with_defaults(VisionConfig::of(family), written.vision_config).map_err(|e| unread("vision_config", e))?;
        let text_config: TextConfig =
            with_defaults(TextConfig::of(family), written.text_config).map_err(|e| unread("text_config", e))?;
        let projection_dim = match family {
            Family::Clip => written.projection_dim.unwrap_or(512),
            Family::Siglip => text_config.projection_size.unwrap_or(text_config.hidden_size),
        };
        let config = Self { family, projection_dim, vision_config, text_config };
        let (v, t) = (&config.vision_config, &config.text_config);
        for (tower, width, heads, others) in [
            ("vision_config", v.hidden_size, v.num_attention_heads, [v.intermediate_size, v.num_hidden_layers]),
            ("text_config", t.hidden_size, t.num_attention_heads, [t.intermediate_size, t.num_hidden_layers]),
        ] {
            let sizes = [width, heads, others[0], others[1]];
            if sizes.iter().any(|s| !(1..MAX_CONFIG_SIZE).contains(s)) || !width.is_multiple_of(heads) {
                return wrong(format!(
                    "{tower}: {width} wide with {heads} heads, {} and {} make no tower",
                    others[0], others[1]
                ));
            }
        }
        let (side, patch) = (v.image_size, v.patch_size);
        if patch == 0 || side >= MAX_CONFIG_SIZE || side == 0 || !side.is_multiple_of(patch) {
            return wrong(format!(
                "vision_config: pictures of {side} pixels are no whole number of patches of {patch}"
            ));
        }
        if [t.max_position_embeddings, t.vocab_size, config.projection_dim]
            .iter()
            .any(|s| !(1..MAX_CONFIG_SIZE).contains(s))
        {
            return wrong("text_config: positions, vocabulary and projection must be 1 or more".into());
        }
        for (tower, eps) in [("vision_config", v.layer_norm_eps), ("text_config", t.layer_norm_eps)] {
            if !(eps.is_finite() && eps >= 0.0) {
                return wrong(format!("{tower}: expected a `layer_norm_eps` of at least 0, found {eps}"));
            }
        }
        // SigLIP's image tower has no projection.
        if family == Family::Siglip && config.projection_dim != v.hidden_size {
            let (text, image) = (config.projection_dim, v.hidden_size);
            return wrong(format!("embeddings of texts have {text} numbers, those of pictures {image}"));
        }
        Ok(config)
    }
}

/// Normalisation in the training of OpenAI's CLIP and nearly all later models.
const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f32; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

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

/// The file with the preprocessing: `preprocessor_config.json` or, as transformers 5 saves it, the `image_processor` of
/// `processor_config.json`. `None` if there is neither.
pub fn preprocessing(directory: &Path) -> Option<PathBuf> {
    ["preprocessor_config.json", "processor_config.json"]
        .map(|name| directory.join(name))
        .into_iter()
        .find(|f| f.exists())
}

/// The preprocessing to pictures of `side` pixels, from its file or, without one, the default of the family.
pub fn input(directory: &Path, family: Family, side: usize) -> Result<Input> {
    let file = preprocessing(directory);
    let found = match &file {
        Some(file) => {
            let mut fields: serde_json::Map<String, Json> = json(file)?;
            let fields = fields.remove("image_processor").unwrap_or(Json::Object(fields));
            serde_json::from_value(fields).map_err(|e| Error::bad_file(file, e.to_string()))?
        }
        None => Preprocessor::default(),
    };
    let path = file.unwrap_or_else(|| directory.into());
    let wrong = |problem: String| Error::bad_file(&path, problem);
    let number = |size: &Json, key: &str| size.get(key).unwrap_or(size).as_u64().map(|n| n as usize);
    let (cut_by_default, mean, std) = match family {
        Family::Clip => (true, MEAN, STD),
        Family::Siglip => (false, [0.5; 3], [0.5; 3]),
    };
    let cuts = found.do_center_crop.unwrap_or(cut_by_default);
    let crop = found.crop_size.as_ref().and_then(|size| number(size, "height")).unwrap_or(side);
    let (mut fit, mut shorter_side) = (Fit::Stretch, None);
    if let Some(size) = &found.size {
        let shortest = size.get("shortest_edge").and_then(Json::as_u64).or(size.as_u64()).map(|n| n as usize);
        match (shortest, number(size, "height")) {
            (Some(shortest), _) if cuts => (fit, shorter_side) = (Fit::Crop, Some(shortest)),
            (None, Some(height)) if height == side => {}
            _ => return Err(wrong(format!("`size` {size} does not make pictures of {side} pixels"))),
        }
    } else if cuts {
        fit = Fit::Crop;
    }
    if cuts && crop != side {
        return Err(wrong(format!("`crop_size` is {crop}, but config.json says that pictures have {side} pixels")));
    }
    if [found.do_resize, found.do_rescale].contains(&Some(false)) {
        return Err(wrong("pictures that are not resized and rescaled are not supported".into()));
    }
    let filter = match found.resample {
        None | Some(3) => Filter::Bicubic,
        Some(0) => Filter::Nearest,
        Some(1) => Filter::Lanczos,
        Some(2) => Filter::Bilinear,
        Some(4) => Filter::Box,
        Some(other) => return Err(wrong(format!("`resample` {other} is not one of Pillow's filters, 0 to 4"))),
    };
    let (mean, std) = match found.do_normalize {
        Some(false) => ([0.0; 3], [1.0; 3]),
        _ => (found.image_mean.unwrap_or(mean), found.image_std.unwrap_or(std)),
    };
    let range = [0.0, 255.0 * found.rescale_factor.unwrap_or(1.0 / 255.0)];
    let input = Input { size: Some(Size::Side(side)), fit, shorter_side, filter, mean, std, range, ..Input::default() };
    input.check("input").map_err(|e| wrong(e.to_string()))?;
    Ok(input)
}
