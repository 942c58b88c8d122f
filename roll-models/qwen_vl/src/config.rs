//! The architecture of a network, from `config.json`.

use std::path::Path;

use roll_causal_lm::LmConfig;
use roll_core::{Error, Result, VisionLanguageFacts};
use roll_external::files;
use serde_json::{Map, Value};

/// Maximum size of a vision tower, such as a width. A file with a larger size is wrong or hostile.
const MAX_SIZE: usize = 1 << 20;
/// Maximum number of blocks of the vision tower.
const MAX_DEPTH: usize = 1 << 10;

/// The convolution of the patch embedding, which is used as a matrix.
pub const PATCH_EMBEDDING: &str = "visual.patch_embed.proj.weight";

/// The generation of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Layer norms, quick-GELU, full attention within each time step.
    Qwen2Vl,
    /// RMS norms, SwiGLU, windows in most blocks, positions that follow the time.
    Qwen25Vl,
}

impl Family {
    /// Reads the family of a `config.json` of Hugging Face.
    pub fn read(file: &Path) -> Result<Self> {
        let bytes = files::read_filled(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
        let json: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(file, e.to_string()))?;
        Self::of(&json).map_err(|problem| Error::bad_file(file, problem))
    }

    /// The family by the `model_type` of a `config.json`.
    fn of(json: &Map<String, Value>) -> Result<Self, String> {
        match json.get("model_type").and_then(Value::as_str) {
            Some("qwen2_vl") => Ok(Self::Qwen2Vl),
            Some("qwen2_5_vl") => Ok(Self::Qwen25Vl),
            found => {
                let found = found.unwrap_or("no `model_type`");
                Err(format!("expected the model_type `qwen2_vl` or `qwen2_5_vl`, found {found}"))
            }
        }
    }

    /// The `model_type` in `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Qwen2Vl => "qwen2_vl",
            Self::Qwen25Vl => "qwen2_5_vl",
        }
    }
}

/// Windows of the vision tower's attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Side of a window, in squares of merged patches.
    pub side: usize,
    /// Blocks with attention over the whole time step.
    pub full: Vec<usize>,
}

/// Architecture of the vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// The generation, which decides norms and activations.
    pub family: Family,
    /// Number of blocks.
    pub depth: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Hidden width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Frames of a patch.
    pub patch_frames: usize,
    /// Patches along each side of a square that becomes one token.
    pub merge: usize,
    /// Windows; `None`: every block attends to the whole time step.
    pub windows: Option<Windows>,
    /// Positions of a clip per second; `None`: one per time step.
    pub tokens_per_second: Option<f64>,
}

impl VisionConfig {
    /// Number of values of a patch: channels, frames, rows, columns.
    pub fn patch_values(&self) -> usize {
        3 * self.patch_frames * self.patch * self.patch
    }

    /// Names and shapes of the weights. `out` is the width of the language model.
    pub fn weights(&self, out: usize) -> Vec<(String, Vec<usize>)> {
        let (width, ffn, joined) = (self.width, self.ffn_dim, self.width * self.merge * self.merge);
        let gated = self.family == Family::Qwen25Vl;
        let mut all = Vec::new();
        let mut add = |name: String, shape: &[usize]| all.push((name, shape.to_vec()));
        add(PATCH_EMBEDDING.into(), &[width, self.patch_values()]);
        for block in 0..self.depth {
            let mut linear = |name: &str, out: usize, input: usize| {
                add(format!("visual.blocks.{block}.{name}.weight"), &[out, input]);
                add(format!("visual.blocks.{block}.{name}.bias"), &[out]);
            };
            linear("attn.qkv", 3 * width, width);
            linear("attn.proj", width, width);
            let layers: &[(&str, usize, usize)] = if gated {
                &[("mlp.gate_proj", ffn, width), ("mlp.up_proj", ffn, width), ("mlp.down_proj", width, ffn)]
            } else {
                &[("mlp.fc1", ffn, width), ("mlp.fc2", width, ffn)]
            };
            layers.iter().for_each(|(name, out, input)| linear(name, *out, *input));
            for norm in ["norm1", "norm2"] {
                add(format!("visual.blocks.{block}.{norm}.weight"), &[width]);
                if !gated {
                    add(format!("visual.blocks.{block}.{norm}.bias"), &[width]);
                }
            }
        }
        add("visual.merger.ln_q.weight".into(), &[width]);
        if !gated {
            add("visual.merger.ln_q.bias".into(), &[width]);
        }
        for (name, out, input) in [("mlp.0", joined, joined), ("mlp.2", out, joined)] {
            add(format!("visual.merger.{name}.weight"), &[out, input]);
            add(format!("visual.merger.{name}.bias"), &[out]);
        }
        all
    }
}

/// Architecture of a vision-language network.
#[derive(Clone, Debug)]
pub struct QwenVlConfig {
    /// The vision tower.
    pub vision: VisionConfig,
    /// The language model.
    pub text: LmConfig,
    /// Numbers of rotary frequencies that turn with the time, the row and the column of a token.
    pub sections: [usize; 3],
    /// Facts for callers.
    pub facts: VisionLanguageFacts,
}

impl QwenVlConfig {
    /// Reads a `config.json` of Hugging Face. `vocabulary` is the number of rows of the checkpoint's embedding, which
    /// may differ from the file's.
    pub fn read(file: &Path, vocabulary: Option<usize>) -> Result<Self> {
        let bytes = files::read_filled(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
        Self::parse(&bytes, vocabulary).map_err(|problem| Error::bad_file(file, problem))
    }

    /// Parses the text of a `config.json`; see [`QwenVlConfig::read`].
    pub fn parse(json: &[u8], vocabulary: Option<usize>) -> Result<Self, String> {
        let json: Map<String, Value> = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let family = Family::of(&json)?;
        // Newer files hold the language model in a map of its own.
        let text = Section { name: "text_config", map: object(&json, "text_config").unwrap_or(&json) };
        let vision = object(&json, "vision_config").ok_or("expected the map `vision_config`, found none")?;
        let vision = Section { name: "vision_config", map: vision };
        let language = language(&json, text.map, vocabulary)?;
        let vision = vision_config(family, &vision, language.dim)?;
        let sections = sections(text.map, language.head_dim)?;
        let token = |key: &str| {
            let id = json.get(key).or_else(|| text.map.get(key)).and_then(Value::as_u64);
            let id = id.and_then(|id| u32::try_from(id).ok()).ok_or(format!("expected a token id in `{key}`"))?;
            if (id as usize) < language.vocab {
                Ok(id)
            } else {
                Err(format!("`{key}` is {id}, outside the vocabulary of {}", language.vocab))
            }
        };
        let facts = VisionLanguageFacts {
            patch: vision.patch,
            patch_frames: vision.patch_frames,
            merge: vision.merge,
            width: language.dim,
            vocabulary: language.vocab,
            image_token: token("image_token_id")?,
            video_token: token("video_token_id")?,
            vision_start: token("vision_start_token_id")?,
            vision_end: token("vision_end_token_id")?,
        };
        Ok(Self { vision, text: language, sections, facts })
    }
}

/// A map of the file with sizes.
struct Section<'a> {
    name: &'static str,
    map: &'a Map<String, Value>,
}

impl Section<'_> {
    /// The size `key`, or `default` if the map lacks it.
    fn size(&self, key: &str, default: Option<usize>) -> Result<usize, String> {
        let size = match self.map.get(key) {
            Some(value) => value.as_u64().and_then(|n| usize::try_from(n).ok()),
            None => default,
        };
        let found = || self.map.get(key).map_or("none".into(), Value::to_string);
        size.filter(|n| (1..=MAX_SIZE).contains(n))
            .ok_or_else(|| format!("expected a size of 1 to {MAX_SIZE} in `{}.{key}`, found {}", self.name, found()))
    }
}

/// Types of rotary positions whose frequencies are the plain ones.
const PLAIN_FREQUENCIES: [&str; 2] = ["mrope", "default"];

fn object<'a>(map: &'a Map<String, Value>, key: &str) -> Option<&'a Map<String, Value>> {
    map.get(key).and_then(Value::as_object)
}

/// The language model: Qwen2, under the keys of `text`; `json` is the whole file.
fn language(json: &Map<String, Value>, text: &Map<String, Value>, rows: Option<usize>) -> Result<LmConfig, String> {
    let mut map = text.clone();
    map.remove("vision_config");
    map.insert("model_type".into(), "qwen2".into());
    // Multimodal positions are computed here; the frequencies are the plain ones.
    for key in ["rope_scaling", "rope_parameters"] {
        let kinds = ["type", "rope_type"].into_iter().filter_map(|kind| object(text, key)?.get(kind)?.as_str());
        if let Some(found) = kinds.into_iter().find(|kind| !PLAIN_FREQUENCIES.contains(kind)) {
            return Err(format!("expected plain rotary frequencies (`mrope`) in `{key}`, found `{found}`"));
        }
    }
    map.remove("rope_scaling");
    if let Some(theta) = map.remove("rope_parameters").as_ref().and_then(|parameters| parameters.get("rope_theta")) {
        map.insert("rope_theta".into(), theta.clone());
    }
    if let Some(tied) = json.get("tie_word_embeddings") {
        map.insert("tie_word_embeddings".into(), tied.clone());
    }
    if let Some(rows) = rows {
        map.insert("vocab_size".into(), rows.into());
    }
    LmConfig::parse(&serde_json::to_vec(&map).map_err(|e| e.to_string())?)
}

fn vision_config(family: Family, section: &Section<'_>, out: usize) -> Result<VisionConfig, String> {
    let depth = section.size("depth", None)?;
    if depth > MAX_DEPTH {
        return Err(format!("expected at most {MAX_DEPTH} blocks in `vision_config.depth`, found {depth}"));
    }
    let (patch, merge) = (section.size("patch_size", Some(14))?, section.size("spatial_merge_size", Some(2))?);
    let heads = section.size("num_heads", None)?;
    let (width, ffn_dim, out_key, act) = match family {
        Family::Qwen2Vl => {
            let width = section.size("embed_dim", None)?;
            (width, width * section.size("mlp_ratio", Some(4))?, "hidden_size", "quick_gelu")
        }
        Family::Qwen25Vl => {
            let width = section.size("hidden_size", Some(1280))?;
            (width, section.size("intermediate_size", Some(3420))?, "out_hidden_size", "silu")
        }
    };
    if section.size(out_key, Some(out))? != out {
        return Err(format!(
            "`vision_config.{out_key}` differs from `hidden_size`, {out}: the tower feeds another model"
        ));
    }
    let found = section.map.get("hidden_act").and_then(Value::as_str).unwrap_or(act);
    if found != act {
        return Err(format!("expected the activation `{act}` in `vision_config.hidden_act`, found `{found}`"));
    }
    if section.size("in_channels", Some(3))? != 3 || !width.is_multiple_of(heads) || !(width / heads).is_multiple_of(4)
    {
        return Err(format!("expected 3 channels, and heads of a multiple of 4; found {heads} heads of width {width}"));
    }
    let (windows, tokens_per_second) = match family {
        Family::Qwen2Vl => (None, None),
        Family::Qwen25Vl => {
            let full = match section.map.get("fullatt_block_indexes") {
                None => vec![7, 15, 23, 31],
                Some(value) => serde_json::from_value(value.clone())
                    .map_err(|e| format!("`vision_config.fullatt_block_indexes`: {e}"))?,
            };
            let side = section.size("window_size", Some(112))? / patch / merge;
            if side == 0 {
                return Err("`vision_config.window_size` is less than one token".into());
            }
            let per_second = section.map.get("tokens_per_second").map_or(Some(2.0), Value::as_f64);
            let per_second = per_second.filter(|n| *n > 0.0 && n.is_finite());
            let per_second = per_second.ok_or("expected a number above 0 in `vision_config.tokens_per_second`")?;
            (Some(Windows { side, full }), Some(per_second))
        }
    };
    let patch_frames = section.size("temporal_patch_size", Some(2))?;
    Ok(VisionConfig { family, depth, width, heads, ffn_dim, patch, patch_frames, merge, windows, tokens_per_second })
}

/// The sections of multimodal positions.
fn sections(text: &Map<String, Value>, head_dim: usize) -> Result<[usize; 3], String> {
    let scaling =
        ["rope_scaling", "rope_parameters"].into_iter().find_map(|key| object(text, key)?.get("mrope_section"));
    let sections: [usize; 3] = match scaling {
        Some(value) => serde_json::from_value(value.clone()).map_err(|e| format!("`mrope_section`: {e}"))?,
        None => return Err("expected `rope_scaling.mrope_section`: this is no vision-language model".into()),
    };
    let sum = sections.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    if sum == Some(head_dim / 2) {
        Ok(sections)
    } else {
        Err(format!("expected an `mrope_section` that adds up to {}, half a head; found {sections:?}", head_dim / 2))
    }
}
