//! Converts a checkpoint of full fine-tuning into an expert's weight file that can be used as a base.

use std::path::{Path, PathBuf};

use roll_core::{DType, Error, Result, StateDict};
use roll_external::files;
use roll_network::new_checkpoint::{make_directory, save};
use roll_network::weights::{Checkpoint, expand_glob};

use super::adapter_io::EXPERT_FILE;
use super::components::heads;
use super::dit::DitConfig;

/// Writes the transformer in `trained` to `out/diffusion_pytorch_model.safetensors`, stored as `dtype`, and returns the
/// file's path. `trained` is the checkpoint directory of a run with `lora_rank: 0`, or a weight file.
///
/// `base` is the directory of the expert from which the training started; its `config.json` is copied. `out` may be
/// `base` itself. Fails if the sizes of the weights contradict the `config.json`.
pub fn export_expert(trained: &Path, base: &Path, out: &Path, dtype: DType) -> Result<PathBuf> {
    let source = if trained.is_dir() { only_expert(trained)? } else { trained.to_path_buf() };
    let checkpoint = Checkpoint::open(&source)?;
    let config_file = base.join("config.json");
    let config_json = files::read_filled(&config_file, files::MAX_TEXT).map_err(Error::file("read", &config_file))?;
    let base_config = serde_json::from_slice::<serde_json::Value>(&config_json)
        .map_err(|e| Error::bad_file(&config_file, format!("expected JSON: {e}")))?;
    let base_heads = base_config.get("num_heads").and_then(|n| usize::try_from(n.as_u64()?).ok());
    let config = DitConfig::from_shapes(&checkpoint.shapes(), base_heads.or_else(|| heads(&checkpoint)))
        .map_err(|e| Error::bad_file(&source, format!("expected every weight of a transformer: {e}")))?;
    check_sizes(&base_config, &config).map_err(|problem| {
        let base = config_file.display();
        Error::bad_file(&source, format!("is not of the base that {base} describes: {problem}"))
    })?;
    let state: Result<StateDict> =
        checkpoint.all()?.into_iter().map(|(key, tensor)| Ok((key, tensor.to_float(dtype)?))).collect();
    make_directory(out)?;
    let shards = old_shards(out)?;
    let file = out.join(format!("{EXPERT_FILE}.safetensors"));
    save(&file, &state?)?;
    // Next to the new file, the old shards would be a second transformer.
    for shard in shards {
        std::fs::remove_file(&shard).map_err(Error::file("remove", &shard))?;
    }
    let copy = out.join("config.json");
    std::fs::write(&copy, config_json).map_err(Error::file("write", &copy))?;
    Ok(file)
}

/// Fails if the sizes of the weights, `config`, differ from the sizes in a `config.json`, `base_config`.
fn check_sizes(base_config: &serde_json::Value, config: &DitConfig) -> std::result::Result<(), String> {
    // Official name and diffusers' name of each size. diffusers does not store the width.
    let sizes = [
        (["dim", ""], config.dim),
        (["ffn_dim", "ffn_dim"], config.ffn_dim),
        (["num_layers", "num_layers"], config.layers),
        (["in_dim", "in_channels"], config.in_channels),
        (["out_dim", "out_channels"], config.out_channels),
    ];
    for (names, found) in sizes {
        let base_size = names.iter().find_map(|name| Some((name, base_config.get(name)?.as_u64()?)));
        if let Some((name, expected)) = base_size
            && expected != found as u64
        {
            return Err(format!("expected `{name}` {expected}, found {found}"));
        }
    }
    Ok(())
}

/// The shards of a transformer that are already in `directory`, and their index. One new file replaces them.
fn old_shards(directory: &Path) -> Result<Vec<PathBuf>> {
    let escaped = glob::Pattern::escape(&directory.to_string_lossy());
    let mut shards = Vec::new();
    // `expand_glob` fails if no file matches.
    for pattern in ["-*-of-*.safetensors", ".safetensors.index.json"] {
        shards.extend(expand_glob(&format!("{escaped}/{EXPERT_FILE}{pattern}")).unwrap_or_default());
    }
    Ok(shards)
}

/// The only transformer of a checkpoint directory. Fails if it has none or several.
fn only_expert(directory: &Path) -> Result<PathBuf> {
    let pattern = format!("{}/{EXPERT_FILE}*.safetensors", glob::Pattern::escape(&directory.to_string_lossy()));
    match expand_glob(&pattern).unwrap_or_default().as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Error::bad_file(
            directory,
            "expected the checkpoint of a full training (`model.lora_rank: 0`), found no transformer in it",
        )),
        several => Err(Error::bad_file(
            directory,
            format!(
                "holds several transformers; name one of the files: {}",
                several.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
            ),
        )),
    }
}
