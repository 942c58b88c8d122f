//! The bounds of pictures: options, and those of a `preprocessor_config.json`.

use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;
use roll_media::{MEAN, PixelLimits, STD};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::VisionConfig;
use super::pictures::MAX_PIXELS;

/// Greatest difference of a colour's mean or deviation from the published one, which files round.
const COLOUR_TOLERANCE: f64 = 1e-4;

/// How pictures are prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PictureOptions {
    /// Pictures with fewer pixels are enlarged. Default: that of `preprocessor_config.json`, or 3136.
    #[schemars(range(min = 1))]
    pub min_pixels: Option<usize>,
    /// Pictures with more pixels are reduced. A picture has a token for every 28 x 28 pixels (2 x 2 patches). Default:
    /// that of `preprocessor_config.json`, or 1003520.
    #[schemars(range(min = 1))]
    pub max_pixels: Option<usize>,
}

/// Returns the bounds of `options`, by default those of the `preprocessor_config.json` in `directory`, and without it
/// those of the published processors. Fails if the file is for patches of other sizes than `vision` or has other
/// statistics of colours, or on a lower bound above the upper one.
pub fn limits(directory: &Path, options: &PictureOptions, vision: &VisionConfig) -> Result<PixelLimits> {
    let file = directory.join("preprocessor_config.json");
    let json: Map<String, Value> = match file.exists() {
        true => {
            let bytes = files::read_filled(&file, files::MAX_TEXT).map_err(Error::file("read", &file))?;
            serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&file, e.to_string()))?
        }
        false => Map::new(),
    };
    let sizes =
        [("patch_size", vision.patch), ("merge_size", vision.merge), ("temporal_patch_size", vision.patch_frames)];
    for (key, expected) in sizes {
        if let Some(found) = json.get(key).filter(|found| found.as_u64() != Some(expected as u64)) {
            let problem = format!("expected `{key}` {expected}, as in config.json; found {found}");
            return Err(Error::bad_file(&file, problem));
        }
    }
    for (key, expected) in [("image_mean", MEAN), ("image_std", STD)] {
        let Some(found) = json.get(key) else { continue };
        let values: Vec<f64> = found.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        let is_same = |(found, expected): (&f64, &f32)| (found - f64::from(*expected)).abs() < COLOUR_TOLERANCE;
        if values.len() != expected.len() || !values.iter().zip(&expected).all(is_same) {
            let problem = format!("expected `{key}` {expected:?}, as in the published files; found {found}");
            return Err(Error::bad_file(&file, problem));
        }
    }
    // Older and newer files name the bounds differently.
    let bound = |key: &str, side: &str| {
        let size = json.get("size").and_then(Value::as_object);
        let found = json.get(key).or_else(|| size?.get(side)).or_else(|| size?.get(key));
        found.and_then(Value::as_u64).and_then(|bound| usize::try_from(bound).ok()).filter(|bound| *bound > 0)
    };
    let max = options.max_pixels.or_else(|| bound("max_pixels", "longest_edge")).unwrap_or(MAX_PIXELS);
    let default = PixelLimits::of_processor(max).min;
    // An upper bound below the file's lower one, which was chosen alone, lowers both.
    let min = options.min_pixels.unwrap_or_else(|| bound("min_pixels", "shortest_edge").unwrap_or(default).min(max));
    if min == 0 || min > max {
        let problem = format!("expected 1 to {max}, the upper bound `model.max_pixels`; found {min}");
        return Err(Error::config("model.min_pixels", problem));
    }
    Ok(PixelLimits { min, max })
}
