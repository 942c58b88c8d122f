//! Writes a fully trained model as other programs publish models: shards of at most a given size with their index, in
//! the dtype of the base, with configuration, tokenizer and chat template beside them.

use std::path::{Path, PathBuf};

use roll_core::{DType, Error, Result};
use roll_external::files;
use roll_network::headers::check_tensors;
use roll_network::lora::{adapter_files, is_lora_key};
use roll_network::weights::{Checkpoint, Outputs, WeightsError, rewrite};
use serde_json::{Map, Value};

use super::config::LmConfig;
use super::source::BESIDE;

/// The names of the dtype of the weights in a `config.json`: that of transformers 5, and that of older versions, of
/// vLLM and of SGLang.
const DTYPE_KEYS: [&str; 2] = ["dtype", "torch_dtype"];

/// The key of a `config.json` that describes the vision tower of a model that sees.
const VISION_CONFIG: &str = "vision_config";

/// A trained model that is to be exported. Its weights are the parameters in f32, as a checkpoint has them.
pub struct Export {
    weights: Checkpoint,
    /// Directory of the weights and of the text files beside them.
    directory: PathBuf,
    config: Map<String, Value>,
}

impl Export {
    /// Opens `trained`: the weight file in a checkpoint of a run with `lora_rank: 0`, the directory of the checkpoint,
    /// or the run (its newest checkpoint). Averaged weights precede those in training.
    ///
    /// Fails if the weights are a LoRA, or not those of the language model that the `config.json` beside them describes.
    pub fn open(trained: &Path) -> Result<Self> {
        let (file, others) = match adapter_files(trained)?.as_slice() {
            [file, others @ ..] => (file.clone(), others.len()),
            [] => return Err(Error::bad_file(trained, "has no weight file")),
        };
        let weights = Checkpoint::open(&file)?;
        if others > 0 || weights.keys().any(is_lora_key) {
            let problem = "expected all weights of a language model (a checkpoint of `model.lora_rank: 0`), found a \
                           LoRA: `roll merge-lora BASE LORA OUT` adds it to its base";
            return Err(Error::bad_file(&file, problem));
        }
        let directory = file.parent().unwrap_or(Path::new("")).to_path_buf();
        let config_file = directory.join("config.json");
        if !config_file.exists() {
            let problem = format!(
                "expected the config.json of a language model beside it; `roll split-shards {} OUT --dtype bf16` splits \
                 the weights alone",
                files::shell_quoted(&file)
            );
            return Err(Error::bad_file(&file, problem));
        }
        let config = files::read_text(&config_file, files::MAX_TEXT).map_err(Error::file("read", &config_file))?;
        let config: Map<String, Value> =
            serde_json::from_str(&config).map_err(|e| Error::bad_file(&config_file, e.to_string()))?;
        // The weights of a model that sees are known to the crate of the model, which has written them.
        if !config.contains_key(VISION_CONFIG) {
            check_tensors(&weights, &LmConfig::read(&config_file)?.weights())?;
        }
        Ok(Self { weights, directory, config })
    }

    /// The trained weights.
    pub fn weights(&self) -> &Checkpoint {
        &self.weights
    }

    /// The dtype that the base's `config.json` names: that of the files that the training started from. bf16 if it
    /// names none.
    fn dtype_of_base(&self) -> DType {
        let name = DTYPE_KEYS.iter().find_map(|key| self.config.get(*key)?.as_str()).unwrap_or_default();
        match name.trim_start_matches("torch.") {
            "float32" | "float" => DType::F32,
            "float16" | "half" => DType::F16,
            _ => DType::Bf16,
        }
    }

    /// Writes the model to the new or empty directory `out` and returns the paths of the files. Each value is rounded to
    /// `dtype` once (default: the dtype of the base). A shard has at most `max_bytes` bytes of tensors; a larger tensor
    /// has a shard of its own. Memory holds a few megabytes at a time.
    ///
    /// `progress` receives the number of source bytes of each piece. Fails if f16 cannot hold a value.
    pub fn write(
        &self,
        out: &Path,
        dtype: Option<DType>,
        max_bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<PathBuf>> {
        let dtype = dtype.unwrap_or_else(|| self.dtype_of_base());
        let outputs = Outputs::split(&self.weights, out, max_bytes, Some(dtype))?;
        let metadata = self.weights.metadata();
        let mut written = rewrite::<WeightsError>(&self.weights, &outputs, Some(dtype), &mut (), &metadata, progress)?;
        for name in BESIDE.iter().filter(|name| self.directory.join(name).is_file()) {
            let target = out.join(name);
            let copied = match *name {
                "config.json" => std::fs::write(&target, self.config_with(dtype)?),
                name => std::fs::copy(self.directory.join(name), &target).map(drop),
            };
            copied.map_err(Error::file("write", &target))?;
            written.push(target);
        }
        Ok(written)
    }

    /// The text of the `config.json` with `dtype` as the dtype of the weights. Programs load them in that dtype.
    fn config_with(&self, dtype: DType) -> Result<String> {
        let name = match dtype {
            DType::F32 => "float32",
            DType::F16 => "float16",
            _ => "bfloat16",
        };
        let mut config = self.config.clone();
        let known: Vec<&str> = DTYPE_KEYS.into_iter().filter(|key| config.contains_key(*key)).collect();
        for key in if known.is_empty() { vec!["torch_dtype"] } else { known } {
            config.insert(key.into(), name.into());
        }
        let text = serde_json::to_string_pretty(&config)
            .map_err(Error::failed("the configuration of the model cannot be written as JSON"))?;
        Ok(text + "\n")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use roll_core::{BuildContext, Grad, LanguageModel, Model, StateDict, Tensor, header};
    use roll_network::weights::{WeightFile, expand_glob, save_safetensors};

    use super::super::loading::{CausalLmOptions, open};
    use super::super::source;
    use super::*;

    /// Bytes of a shard: less than the embedding of the built-in model in f32, so that there are several shards.
    const SHARD: u64 = 100_000;

    /// A checkpoint in `directory` as a run of `lora_rank: 0` writes it, whose base names `base_dtype`, with weights
    /// that bf16 cannot hold exactly.
    fn checkpoint(directory: &Path, base_dtype: Option<(&str, &str)>) -> StateDict {
        source::write_built_in(directory).unwrap();
        let mut config = json_of(&directory.join("config.json"));
        for key in DTYPE_KEYS {
            config.as_object_mut().unwrap().remove(key);
        }
        if let Some((key, name)) = base_dtype {
            config[key] = name.into();
        }
        std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
        let options =
            CausalLmOptions { model_path: Some(directory.into()), lora_rank: Some(0), ..CausalLmOptions::default() };
        let mut model = open(&options, &BuildContext::new("flex")).unwrap();
        let mut values = vec![0.0; model.parameter_count()];
        model.read_parameters(&mut values).unwrap();
        let moved: Vec<f32> = values.iter().map(|value| value * 1.001 + 1e-5).collect();
        model.write_parameters(&moved).unwrap();
        let mut state = model.export_adapter().unwrap().remove("model").unwrap();
        save_safetensors(directory.join("model.safetensors"), &state, &BTreeMap::new()).unwrap();
        header::take(&mut state).unwrap();
        state
    }

    fn json_of(file: &Path) -> Value {
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    }

    fn export(from: &Path, out: &Path, dtype: Option<DType>) -> Result<Vec<PathBuf>> {
        Export::open(from)?.write(out, dtype, SHARD, &mut |_| {})
    }

    #[test]
    fn shards_have_the_dtype_of_the_base_and_the_trained_values_rounded_once() {
        let here = tempfile::tempdir().unwrap();
        for (at, (base, asked, expected, name)) in [
            (Some(("torch_dtype", "bfloat16")), None, DType::Bf16, "bfloat16"),
            (Some(("dtype", "float16")), None, DType::F16, "float16"),
            (Some(("dtype", "float32")), Some(DType::Bf16), DType::Bf16, "bfloat16"),
            (Some(("torch_dtype", "float32")), None, DType::F32, "float32"),
            (None, None, DType::Bf16, "bfloat16"),
        ]
        .into_iter()
        .enumerate()
        {
            let [trained, out] = ["trained", "out"].map(|part| here.path().join(format!("{part}{at}")));
            let state = checkpoint(&trained, base);
            export(&trained, &out, asked).unwrap();
            let index = json_of(&out.join("model.safetensors.index.json"));
            let shards = index["weight_map"].as_object().unwrap();
            assert!(shards.keys().eq(state.keys()), "every tensor is in the index");
            let weights = source::open_weights(&out).unwrap();
            let mut total = 0;
            for (key, trained) in &state {
                let found = weights.tensor(key).unwrap();
                assert_eq!(found.dtype(), expected, "{key}");
                assert!(found.as_bytes() == trained.to_float(expected).unwrap().as_bytes(), "{key}");
                total += found.as_bytes().len();
            }
            assert_eq!(index["metadata"]["total_size"].as_u64().unwrap() as usize, total);
            // The shards of the index are the weight files of the directory, and only those.
            let mut names: Vec<&str> = shards.values().map(|name| name.as_str().unwrap()).collect();
            names.sort_unstable();
            names.dedup();
            assert!(names.len() > 1, "{names:?}");
            let pattern = format!("{}/*.safetensors", out.display());
            let files = expand_glob(&pattern).unwrap();
            assert!(files.iter().map(|file| file.file_name().unwrap()).eq(names.iter().copied()), "{files:?}");
            for file in files {
                let shard = WeightFile::open(&file).unwrap();
                let bytes: usize = shard.keys().map(|key| weights.stored_bytes(key).unwrap()).sum();
                assert!(bytes as u64 <= SHARD || shard.keys().count() == 1, "{}: {bytes}", file.display());
                assert_eq!(shard.metadata()["format"], "pt");
            }
            let config = json_of(&out.join("config.json"));
            let key = base.map_or("torch_dtype", |(key, _)| key);
            assert_eq!(config[key], name);
            assert_eq!(DTYPE_KEYS.iter().filter(|key| config.get(**key).is_some()).count(), 1);
        }
    }

    #[test]
    fn the_exported_directory_is_a_model_with_the_values_of_the_training_to_rounding() {
        let here = tempfile::tempdir().unwrap();
        let [trained, out] = ["trained", "out"].map(|part| here.path().join(part));
        checkpoint(&trained, Some(("torch_dtype", "bfloat16")));
        export(&trained.join("model.safetensors"), &out, None).unwrap();
        let log_probs = |directory: &Path| {
            let options = CausalLmOptions { model_path: Some(directory.into()), ..CausalLmOptions::default() };
            let mut model = open(&options, &BuildContext::new("flex")).unwrap();
            let messages = [roll_core::Message::new("user", "P_"), roll_core::Message::new("assistant", "at goal")];
            let ids = model.tokenize(&model.render_chat(&messages, false).unwrap()).unwrap();
            let length = ids.len();
            let mask = Tensor::new(vec![1u8; length], [1, length]).unwrap();
            let ids = Tensor::new(ids.into_iter().map(i64::from).collect::<Vec<_>>(), [1, length]).unwrap();
            let (stats, _) = model.evaluate(&ids, &mask, &mask, roll_core::Adapter::On, Grad::Skip).unwrap();
            stats.log_probs.f32s().unwrap().to_vec()
        };
        let (exact, rounded) = (log_probs(&trained), log_probs(&out));
        assert_eq!(exact.len(), rounded.len());
        assert_ne!(exact, rounded);
        for (exact, rounded) in exact.iter().zip(&rounded) {
            assert!((exact - rounded).abs() < 0.05 * exact.abs().max(1.0), "{exact} {rounded}");
        }
    }

    #[test]
    fn what_is_no_full_training_is_refused_with_the_command_for_it() {
        let here = tempfile::tempdir().unwrap();
        let [trained, out] = ["trained", "out"].map(|part| here.path().join(part));
        let refused = |path: &Path, words: &[&str]| {
            let problem = export(path, &out, None).unwrap_err().chain();
            assert!(words.iter().all(|word| problem.contains(word)), "{problem}");
            assert!(!out.exists());
        };
        checkpoint(&trained, None);
        let lora = here.path().join("lora");
        std::fs::create_dir(&lora).unwrap();
        let tensor = Tensor::full([2, 4], 1.0);
        let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
        let state = StateDict::from([(name.to_string(), tensor.clone())]);
        save_safetensors(lora.join("adapter_model.safetensors"), &state, &BTreeMap::new()).unwrap();
        refused(&lora, &["adapter_model.safetensors", "LoRA", "roll merge-lora"]);
        // Weights without one that the configuration wants, and weights without a configuration.
        let file = trained.join("model.safetensors");
        let state = StateDict::from([("model.norm.weight".to_string(), tensor)]);
        save_safetensors(&file, &state, &BTreeMap::new()).unwrap();
        refused(&trained, &["model.embed_tokens.weight", "missing"]);
        std::fs::remove_file(trained.join("config.json")).unwrap();
        refused(&trained, &["config.json", "roll split-shards"]);
        // A directory with files in it is left as it is.
        let full = here.path().join("full");
        checkpoint(&full, None);
        let problem = export(&full, here.path(), None).unwrap_err().chain();
        assert!(problem.contains("new or empty directory"), "{problem}");
    }
}
