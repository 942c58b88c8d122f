//! Weights under the names of this crate, whatever library or wrapper wrote them, with LoRAs merged when they are read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, StateDict, Tensor};
use roll_external::files;
use roll_network::lora::{LoraFile, merged_on_read};
use roll_network::weights::{Checkpoint, TensorInfo, WeightsError};
use serde_json::{Map, Value, json};

use super::config::Family;

/// Prefix of the layers of a model that PEFT wraps.
const PEFT: &str = "base_model.model.";
/// Files beside an adapter with the weights that were trained as a whole.
const WHOLE_WEIGHTS: [&str; 2] = ["non_lora_state_dict.pth", "non_lora_state_dict.bin"];

/// The weights of a network: those of a checkpoint, some replaced by those beside an adapter.
pub struct Weights {
    /// In the order of precedence.
    files: Vec<Checkpoint>,
}

/// Returns the name of a tensor in this crate: the name in the published files of Qwen2-VL, without prefixes of
/// wrappers. `None`: the tensor has no effect, as the untrained copy of a module that PEFT trains as a whole.
pub fn canonical(key: &str) -> Option<String> {
    if key.contains(".original_module.") {
        return None;
    }
    let key = key.strip_prefix(PEFT).unwrap_or(key);
    let key = key.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".");
    // Newer versions of transformers put both networks under `model`.
    let newer =
        [("model.visual.", "visual."), ("model.language_model.", "model."), ("language_model.model.", "model.")];
    for (prefix, published) in newer {
        if let Some(rest) = key.strip_prefix(prefix) {
            return Some(format!("{published}{rest}"));
        }
    }
    Some(key)
}

/// Whether `key` is a matrix of a LoRA.
fn is_lora(key: &str) -> bool {
    key.contains(".lora_A.") || key.contains(".lora_B.")
}

impl Weights {
    /// Takes the tensors of `file`, and adds its LoRA, if it has one, and that of `adapter` (a file or a directory of
    /// PEFT). `alpha` is the numerator of the LoRAs' scale; by default, it comes from the files beside them.
    pub fn open(file: Checkpoint, adapter: Option<&Path>, alpha: Option<f64>) -> Result<Self> {
        let mut files = Vec::new();
        let mut loras = Vec::new();
        if file.keys().any(is_lora) {
            loras.push(lora(&file, file.path(), alpha)?);
        }
        if let Some(path) = adapter {
            let path = if path.is_dir() { path.join("adapter_model.safetensors") } else { path.into() };
            let adapter = Checkpoint::open(&path)?;
            if !adapter.keys().any(is_lora) {
                return Err(Error::bad_file(&path, "expected a LoRA of PEFT (keys with `lora_A`), found none"));
            }
            loras.push(lora(&adapter, &path, alpha)?);
            let beside = WHOLE_WEIGHTS.iter().map(|name| path.with_file_name(name)).find(|file| file.exists());
            for trained in beside.map(Checkpoint::open).transpose()?.into_iter().chain([adapter]) {
                files.push(renamed(trained)?);
            }
        }
        let mut base = renamed(file)?;
        if !loras.is_empty() {
            base = merged_on_read(base, &loras)?;
        }
        files.push(base);
        Ok(Self { files })
    }

    /// Names of the tensors, each once.
    pub fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.files.iter().flat_map(Checkpoint::keys).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    fn file_of(&self, key: &str) -> Option<&Checkpoint> {
        self.files.iter().find(|file| file.contains(key))
    }

    /// Shape and dtype of a tensor.
    pub fn info(&self, key: &str) -> Option<&TensorInfo> {
        self.file_of(key)?.info(key)
    }

    /// The checkpoint's first file, for messages.
    pub fn path(&self) -> &Path {
        self.files.last().map_or(Path::new(""), Checkpoint::path)
    }

    /// Reads a tensor, with the LoRAs on it. The error of a missing tensor names it.
    pub fn tensor(&self, key: &str) -> Result<Tensor> {
        let file = self.file_of(key).ok_or_else(|| WeightsError::missing(self.path(), key))?;
        Ok(file.tensor(key)?)
    }

    /// Releases the memory of a mapped tensor that was copied.
    pub fn release(&self, key: &str) {
        if let Some(file) = self.file_of(key) {
            file.release(key);
        }
    }

    /// Fails unless the vision tower is that of `family`.
    pub fn check_family(&self, family: Family) -> Result<()> {
        let marks = [
            ("visual.blocks.0.mlp.fc1.weight", Some(Family::Qwen2Vl), "Qwen2-VL"),
            ("visual.blocks.0.mlp.gate_proj.weight", Some(Family::Qwen25Vl), "Qwen2.5-VL"),
            ("visual.blocks.0.mlp.linear_fc1.weight", None, "Qwen3-VL"),
        ];
        let refuse = |found: String| {
            let problem = format!("expected the weights of a {} network, found {found}", family.model_type());
            Err(Error::bad_file(self.path(), problem))
        };
        match marks.iter().find(|(key, ..)| self.info(key).is_some()) {
            Some((_, found, _)) if *found == Some(family) => Ok(()),
            Some((key, Some(_), name)) => refuse(format!("those of {name} (`{key}`): name its config.json")),
            Some((key, None, name)) => refuse(format!("those of {name} (`{key}`), which is not supported")),
            None => {
                let keys = self.keys().into_iter().take(3).collect::<Vec<_>>().join(", ");
                refuse(format!("no vision tower (`visual.blocks.0.*`); its tensors are {keys}, ..."))
            }
        }
    }
}

/// Returns the tensors of `file` under their names in this crate, without LoRAs.
fn renamed(file: Checkpoint) -> Result<Checkpoint> {
    Ok(file.rename(|key| if is_lora(key) { None } else { canonical(key) })?)
}

/// Reads the LoRA among the tensors of `file`. Returns it with a strength of 1.
fn lora(file: &Checkpoint, path: &Path, alpha: Option<f64>) -> Result<(roll_network::lora::Lora, f64, PathBuf)> {
    let state: StateDict = file
        .state(is_lora)?
        .into_iter()
        .filter_map(|(key, tensor)| Some((format!("{PEFT}{}", canonical(&key)?), tensor)))
        .collect();
    if let Some(key) = file.keys().find(|key| key.contains("lora_") && !is_lora(key)) {
        let problem = format!("expected a LoRA of linear layers (`lora_A`, `lora_B`), found `{key}`");
        return Err(Error::bad_file(path, problem));
    }
    let (config_path, config) = match (alpha, peft_config(path)?) {
        (None, Some(found)) => found,
        (None, None) => {
            let problem = "its LoRA has no scale: expected `lora_alpha` in adapter_config.json beside it, or in \
                           `peft_lora_config` of model_config.json; set the option `lora_alpha` otherwise";
            return Err(Error::bad_file(path, problem));
        }
        (Some(alpha), Some((config_path, mut config))) => {
            config["lora_alpha"] = json!(alpha);
            (config_path, config)
        }
        (Some(alpha), None) => (path.to_path_buf(), json!({"peft_type": "LORA", "lora_alpha": alpha})),
    };
    let bytes = serde_json::to_vec(&config).map_err(|e| Error::bad_file(&config_path, e.to_string()))?;
    let read = LoraFile::read(path, &state, BTreeMap::new(), Some((&config_path, &bytes)))?;
    Ok((read.one(None)?, 1.0, path.into()))
}

/// Finds the configuration of the LoRA in the file `path`: `adapter_config.json` beside it, else `peft_lora_config` of
/// a `model_config.json` beside it or one directory above, as VideoAlign writes it.
fn peft_config(path: &Path) -> Result<Option<(PathBuf, Value)>> {
    let adapter = path.with_file_name("adapter_config.json");
    if adapter.exists() {
        return Ok(Some((adapter.clone(), Value::Object(object(&adapter)?))));
    }
    let directory = path.parent().unwrap_or(Path::new("."));
    for directory in [Some(directory), directory.parent()].into_iter().flatten() {
        let file = directory.join("model_config.json");
        if !file.exists() {
            continue;
        }
        let config = object(&file)?;
        let peft = config.get("peft_lora_config").and_then(Value::as_object);
        let alpha = peft.and_then(|peft| peft.get("lora_alpha")).filter(|alpha| alpha.is_number());
        if let (Some(peft), Some(alpha)) = (peft, alpha) {
            let flag = |key: &str| peft.get(key).and_then(Value::as_bool).unwrap_or(false);
            let (stabilised, decomposed) = (flag("use_rslora"), flag("use_dora"));
            let config = json!({
                "peft_type": "LORA", "lora_alpha": alpha, "use_rslora": stabilised, "use_dora": decomposed,
            });
            return Ok(Some((file, config)));
        }
    }
    Ok(None)
}

fn object(file: &Path) -> Result<Map<String, Value>> {
    let bytes = files::read_filled(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(file, e.to_string()))
}
