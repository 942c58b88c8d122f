//! Finds the face networks in a directory, by file name or by contents.

use std::path::{Path, PathBuf};

use burn_tensor::Device;
use roll_core::{Error, Result};
use roll_onnx::Model;

use super::align::CROP;
use crate::RewardError;

/// Width of the embeddings of an ArcFace network.
const EMBEDDING_WIDTH: usize = 512;

/// A network that the identity score needs.
pub(super) struct NetworkRole {
    /// Name of the role in error messages.
    text: &'static str,
    /// The option that selects a file.
    key: &'static str,
    /// The accepted files, for error messages.
    expected: &'static str,
    /// Whether the name of a file (without extension, in lower case) identifies this network.
    recognises: fn(&str) -> bool,
}

/// The face detector.
pub(super) const DETECTOR: NetworkRole = NetworkRole {
    text: "face detector",
    key: "detector",
    expected: "scrfd_*.onnx, det_*.onnx or yunet*.onnx",
    recognises: |stem| ["scrfd_", "det_", "yunet"].iter().any(|p| stem.starts_with(p)),
};

/// The face embedder.
pub(super) const EMBEDDER: NetworkRole = NetworkRole {
    text: "face embedder",
    key: "embedder",
    expected: "glintr100.onnx, w600k_*.onnx, arcface*.onnx or any model from [1, 3, 112, 112] to [1, 512]",
    recognises: |stem| stem == "glintr100" || ["w600k_", "arcface"].iter().any(|p| stem.starts_with(p)),
};

/// Opens the network of `role`: the file `file_name`, or the only one in `directory` that fits.
pub(super) fn open_network(
    directory: &Path,
    role: &NetworkRole,
    file_name: Option<&str>,
    device: &Device,
) -> Result<Model> {
    if let Some(name) = file_name {
        return Ok(Model::open(&directory.join(name), device)?);
    }
    let NetworkRole { text, key, expected, recognises } = *role;
    let several_fit = |candidates: Vec<String>| -> Error {
        RewardError::SeveralNetworks { role: text, directory: directory.into(), candidates, key }.into()
    };
    let none_fits = |seen: Vec<String>| -> Error {
        RewardError::NoNetwork { role: text, directory: directory.into(), expected, seen, key }.into()
    };
    let files = onnx_files(directory)?;
    let stem = |path: &PathBuf| path.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
    let recognised_files: Vec<&PathBuf> = files.iter().filter(|f| recognises(&stem(f))).collect();
    match recognised_files.as_slice() {
        [one] => return Ok(Model::open(one, device)?),
        // A detector is not recognised by its contents.
        [] if key == DETECTOR.key => return Err(none_fits(files.iter().map(|f| name_of(f)).collect())),
        [] => {}
        _ => return Err(several_fit(recognised_files.iter().map(|f| name_of(f)).collect())),
    }
    // No file has a known name: inspect the files that are not recognised as detectors.
    let (mut fitting, mut seen) = (vec![], vec![]);
    for file in files {
        if (DETECTOR.recognises)(&stem(&file)) {
            seen.push(name_of(&file));
            continue;
        }
        match Model::open(&file, device) {
            Ok(model) if embeds_crops(&model) => fitting.push(model),
            Ok(_) => seen.push(name_of(&file)),
            Err(error) => seen.push(format!("{} (not usable: {error})", name_of(&file))),
        }
    }
    if fitting.len() > 1 {
        return Err(several_fit(fitting.iter().map(|m| name_of(m.path())).collect()));
    }
    fitting.pop().ok_or_else(|| none_fits(seen))
}

/// Whether the file declares [N, 3, 112, 112] -> [N, 512], for any N.
fn embeds_crops(model: &Model) -> bool {
    let ([input], [output, ..]) = (model.inputs(), model.outputs()) else { return false };
    matches!(input.shape[..], [_, Some(3), Some(CROP), Some(CROP)])
        && matches!(output.shape[..], [_, Some(EMBEDDING_WIDTH)])
}

/// The ONNX files in a directory, in alphabetical order.
fn onnx_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = || Error::file("read the face networks' directory", directory);
    let mut files = vec![];
    for entry in std::fs::read_dir(directory).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx")) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The file name of a path, for error messages.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
