//! Quality of the exported networks. The figures are measured on the files, through the pipeline that reads them at run
//! time, with people that no network was trained on.

mod detection;
pub mod text;
pub mod vae;
mod verification;

use std::path::Path;

use roll_core::{Error, Noise, Purpose, Result};
use roll_rewards::insightface::{FaceNetworks, IdentityConfig};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::detector::{FILES, SIDE};
use crate::embedder::Role;
use crate::face::{self, Identity, Picture};
use crate::files;
use crate::training::pictures::{Augmentation, blur};

/// The first identity that no training uses.
const FIRST_HELD_OUT: u64 = 10_000;
/// Seed of the pictures that are measured.
const SEED: u64 = 99;
/// File of the figures, below the output directory.
const FILE: &str = "quality.json";

/// Look of the measured pictures.
#[derive(Clone, Copy, Debug)]
enum Look {
    /// As rendered.
    Sharp,
    /// Blurred by a Gaussian of one pixel, with noise. This is worse than the frames of a video model.
    Soft,
}

/// Measures the detector in `face/` below `out`, prints the figures and writes them to `quality.json`.
pub fn detector(out: &Path) -> Result<()> {
    let directory = out.join(FILES[0]).parent().map(Path::to_path_buf).unwrap_or_default();
    // The pipeline requires an embedder next to the detector; these figures do not need one.
    let detector = detection::open(&directory, FILES[0], out)?;
    for (name, look) in [("detector", Look::Sharp), ("detector_soft", Look::Soft)] {
        record(out, name, &detection::measure(&detector, look)?)?;
    }
    Ok(())
}

/// Measures the embedder of `role` with the detector in its folder, prints the figures and writes them to
/// `quality.json`.
pub fn embedder(role: Role, out: &Path) -> Result<()> {
    let networks = networks(role, out)?;
    let name = match role {
        Role::Reward => "embedder",
        Role::Check => "embedder_check",
    };
    for (name, look) in [(name.to_owned(), Look::Sharp), (format!("{name}_soft"), Look::Soft)] {
        record(out, &name, &verification::measure(&networks, look)?)?;
    }
    Ok(())
}

/// Loads the embedder of `role` below `out` and the detector in its folder.
fn networks(role: Role, out: &Path) -> Result<FaceNetworks> {
    let directory = out.join(role.file()).parent().map(Path::to_path_buf).unwrap_or_default();
    FaceNetworks::load(&directory, &config(&directory), &roll_backends::device("flex")?)
}

/// Returns the settings of the reward in the demo.
fn config(directory: &Path) -> IdentityConfig {
    IdentityConfig {
        reward_model_path: directory.display().to_string(),
        det_size: SIDE,
        frames_per_batch: 50,
        ..Default::default()
    }
}

/// Returns a picture of a held-out person.
fn picture(identity: u64, shot: u64, look: Look) -> Picture {
    let noise = Noise::new(SEED);
    let mut uniform = noise.uniform(Purpose::Synthetic, identity, shot);
    let random = face::random_shot(&mut uniform);
    let mut picture = face::render(&Identity::new(identity), &random, [SIDE; 2]);
    soften(&mut picture.pixels, look, &mut uniform);
    picture
}

fn soften(pixels: &mut [f32], look: Look, uniform: &mut impl FnMut() -> f32) {
    if let Look::Soft = look {
        let noise =
            Augmentation { blur_probability: 0.0, max_blur: 0.0, max_noise: 0.08, max_brightness: 0.0, max_gain: 0.0 };
        blur(pixels, [SIDE; 2], 1.0);
        noise.apply(pixels, [SIDE; 2], uniform);
    }
}

/// Prints `figures` and writes them under `name` to the file, which keeps its other entries.
fn record(out: &Path, name: &str, figures: &impl Serialize) -> Result<()> {
    let path = out.join(FILE);
    let bad = |problem: serde_json::Error| Error::bad_file(&path, problem.to_string());
    let mut all: Map<String, Value> = match std::fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(bad)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Map::new(),
        Err(error) => return Err(Error::file("read", &path)(error)),
    };
    let figures = serde_json::to_value(figures).map_err(bad)?;
    println!("{name}: {figures}");
    all.insert(name.into(), figures);
    files::write(&path, &serde_json::to_vec_pretty(&all).map_err(bad)?)
}

/// Rounds to four decimals; further digits are noise.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_figures_stand_beside_those_that_are_there() {
        let directory = tempfile::tempdir().unwrap();
        record(directory.path(), "a", &[1, 2]).unwrap();
        record(directory.path(), "b", &"x").unwrap();
        record(directory.path(), "a", &[3]).unwrap();
        let read: Value = serde_json::from_slice(&std::fs::read(directory.path().join(FILE)).unwrap()).unwrap();
        assert_eq!(read, serde_json::json!({"a": [3], "b": "x"}));
    }
}
