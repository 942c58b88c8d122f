//! Writes new checkpoints: directories, files, and weights that are drawn at random.
//!
//! A model whose small checkpoint `roll init-tiny` shall write submits a [`TinyCheckpoint`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Error, Noise, Purpose, Result, StateDict, Tensor};

use crate::weights::save_safetensors;

/// A kind of small checkpoint with random weights, for trying a configuration and for tests.
#[derive(Debug)]
pub struct TinyCheckpoint {
    /// Its name: the value of `roll init-tiny --kind`.
    pub kind: &'static str,
    /// What it is, in one sentence.
    pub about: &'static str,
    /// Writes the checkpoint, with weights drawn from a seed, into a directory that is created if it is missing.
    /// Returns the lines to print: which option names which file.
    pub write: fn(&Path, u64) -> Result<Vec<String>>,
}

roll_core::inventory::collect!(TinyCheckpoint);

/// The line to print after the paths of a checkpoint with random weights.
pub const RANDOM_WEIGHTS: &str = "The weights are random: this checkpoint is for trying things, not for pictures.";

/// Standard deviation of biases and, around 1, of the gains of norms.
pub const SMALL_DEVIATION: f32 = 0.02;

/// Draws tensors with normal values. `rule` returns mean and deviation for a key and shape. The values of a tensor
/// depend on `network` and the position of the tensor in `shapes`.
///
/// # Errors
/// Fails if a shape has more elements than memory can hold.
pub fn drawn_state(
    noise: &Noise,
    network: u64,
    shapes: &[(String, Vec<usize>)],
    rule: impl Fn(&str, &[usize]) -> (f32, f32),
) -> Result<StateDict> {
    let tensor = |(i, (key, shape)): (usize, &(String, Vec<usize>))| {
        let (mean, deviation) = rule(key, shape);
        let drawn = noise.normal(Purpose::Synthetic, network, i as u64, shape)?;
        let values = drawn.f32s()?.iter().map(|v| mean + deviation * v).collect();
        Ok((key.clone(), Tensor::new::<f32>(values, shape.clone())?))
    };
    shapes.iter().enumerate().map(tensor).collect()
}

/// The deviation of weights with which a linear layer preserves the variance of its input: 1 / sqrt(fan-in).
pub fn preserving_deviation(shape: &[usize]) -> f32 {
    1.0 / (shape[1..].iter().product::<usize>().max(1) as f32).sqrt()
}

/// Creates a directory and its parents.
///
/// # Errors
/// Fails if the directory cannot be created.
pub fn make_directory(path: &Path) -> Result<()> {
    // A trailing `.` cannot be created; `components` leaves it out.
    let path: PathBuf = path.components().collect();
    std::fs::create_dir_all(&path).map_err(Error::file("create the directory", &path))
}

/// Fails if `directory` is not empty, so that no file of the user is overwritten.
///
/// # Errors
/// Names the first entry that was found.
pub fn require_empty(directory: &Path) -> Result<()> {
    let first_entry = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        listing => listing.map_err(Error::file("list", directory))?.next(),
    };
    let Some(entry) = first_entry else { return Ok(()) };
    let entry = entry.map_err(Error::file("list", directory))?;
    let problem = format!(
        "expected a new or empty directory, found `{}` in it; --force replaces files of the same names",
        entry.file_name().to_string_lossy()
    );
    Err(Error::bad_file(directory, problem))
}

/// Writes weights to a safetensors file.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn save(path: &Path, state: &StateDict) -> Result<()> {
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    Ok(save_safetensors(path, state, &metadata)?)
}

/// Writes a text file.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(Error::file("write", path))
}
