//! The readers of files that may come from anywhere, each as a function of bytes that must return: no panic, no endless
//! work, no memory beyond a few times the input. Used by the targets for cargo-fuzz beside this file, and by
//! tests/fuzz.rs, which mutates the corpus in the ordinary test suite.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{BuildContext, StateDict};
use roll_models::causal_lm::{self, CausalLmOptions, Tokenizer};
use roll_models::lora::{Convention, LoraFile, Names, WriteOptions, Written};
use roll_models::wan2_2::components;
use roll_models::weights::Checkpoint;
use roll_models::weights::gguf::GgufFile;
use roll_train::config::ConfigLayers;

/// A reader.
pub type Entry = fn(&[u8]);

/// Every reader by the name of its corpus.
pub const ENTRIES: [(&str, Entry); 12] = [
    ("safetensors", safetensors),
    ("pth", pth),
    ("gguf", gguf),
    ("onnx", onnx),
    ("mp4", mp4),
    ("config", config),
    ("lora_keys", lora_keys),
    ("lora_metadata", lora_metadata),
    ("metadata", metadata),
    ("picture", picture),
    ("tokenizer_json", tokenizer_json),
    ("frame", frame),
];

/// Header and tensors of a safetensors file, and what is told of it.
pub fn safetensors(bytes: &[u8]) {
    weights(bytes, "safetensors");
}

/// A torch checkpoint, parsed and never executed.
pub fn pth(bytes: &[u8]) {
    weights(bytes, "pth");
}

fn weights(bytes: &[u8], extension: &str) {
    with_file(bytes, extension, |path| {
        let Ok(checkpoint) = Checkpoint::open(path) else { return };
        for key in checkpoint.keys() {
            let _ = checkpoint.tensor(key).map(|tensor| tensor.as_bytes().len());
        }
        let _ = LoraFile::open(path);
        let _ = components::recognise(checkpoint);
    });
}

/// Values and tensors of a GGUF file, and the language model in it, with its tokenizer and chat template; it is not run.
pub fn gguf(bytes: &[u8]) {
    with_file(bytes, "gguf", |path| {
        let Ok(file) = GgufFile::open(path) else { return };
        for name in file.names() {
            let _ = file.tensor(name).map(|tensor| tensor.as_bytes().len());
        }
        let options =
            CausalLmOptions { model_path: Some(path.into()), lora_rank: Some(1), ..CausalLmOptions::default() };
        let context = BuildContext::new("flex");
        let _ = causal_lm::open(&options, &context);
    });
}

/// The graph of an ONNX file and its weights; it is not run.
pub fn onnx(bytes: &[u8]) {
    if let Ok(device) = roll_backends::device("flex") {
        let _ = roll_rewards::onnx::Model::parse(Path::new("fuzz.onnx"), bytes, &device);
    }
}

/// Boxes, tables and pictures of an MP4.
pub fn mp4(bytes: &[u8]) {
    with_file(bytes, "mp4", |path| {
        let decoder = roll_data::Decoder::Own;
        let options = roll_data::ReadOptions { max_frames: Some(4), decoder, ..roll_data::ReadOptions::default() };
        let _ = roll_data::read_video(path, &options);
    });
}

/// A configuration file, with its `defaults`, interpolations and translation from ROLL's.
pub fn config(bytes: &[u8]) {
    with_file(bytes, "yaml", |path| {
        let _ = ConfigLayers::new().file(path).and_then(|layers| layers.load(None));
    });
}

/// Names of tensors, one a line, as a LoRA file; a name in front of which a `#` stands is for a scalar. What can be read
/// is written in every convention, and read again.
pub fn lora_keys(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (matrix, scalar) = (roll_core::Tensor::full([2, 2], 0.5), roll_core::Tensor::scalar(3.0));
    let state: StateDict = text
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(name) => (name.to_string(), scalar.clone()),
            None => (line.to_string(), matrix.clone()),
        })
        .collect();
    let path = Path::new("fuzz.safetensors");
    let Ok(file) = LoraFile::read(path, &state, BTreeMap::new(), None) else { return };
    for lora in &file.adapters {
        for convention in Convention::ALL {
            let options = WriteOptions { convention, names: Names::Official };
            if let Ok(written) = Written::new(lora, options, &file.metadata) {
                let _ = LoraFile::read(path, &written.state, written.metadata, None);
            }
        }
    }
}

/// The words of an adapter's header, a JSON object of texts, beside an adapter of one layer; what can be read is written
/// in every convention.
pub fn lora_metadata(bytes: &[u8]) {
    let Ok(words) = serde_json::from_slice::<BTreeMap<String, String>>(bytes) else { return };
    let matrix = roll_core::Tensor::full([2, 2], 0.5);
    let path = Path::new("fuzz.safetensors");
    for [down, up] in [
        ["blocks.0.self_attn.q.lora_A.default.weight", "blocks.0.self_attn.q.lora_B.default.weight"],
        ["transformer.blocks.0.attn1.to_q.lora_A.weight", "transformer.blocks.0.attn1.to_q.lora_B.weight"],
        ["base_model.model.blocks.0.self_attn.q.lora_A.weight", "base_model.model.blocks.0.self_attn.q.lora_B.weight"],
    ] {
        let state: StateDict = [down, up].map(|name| (name.to_string(), matrix.clone())).into();
        let beside = Some((Path::new("adapter_config.json"), bytes));
        for config in [None, beside] {
            let Ok(file) = LoraFile::read(path, &state, words.clone(), config) else { continue };
            for lora in &file.adapters {
                for convention in Convention::ALL {
                    let options = WriteOptions { convention, names: Names::Official };
                    let _ = Written::new(lora, options, &file.metadata);
                }
            }
        }
    }
}

/// Which clip goes with which prompt: CSV, TSV, JSON lines, a JSON list.
pub fn metadata(bytes: &[u8]) {
    with_file(bytes, "csv", |path| {
        let _ = roll_data::Metadata::read(path, None);
    });
}

/// A picture with its EXIF data, and the size of what claims to be one.
pub fn picture(bytes: &[u8]) {
    with_file(bytes, "png", |path| {
        let (sizing, decoder) = (roll_data::Sizing::Exact([8, 8]), roll_data::Decoder::Own);
        let options = roll_data::ReadOptions { max_frames: Some(4), sizing, decoder, ..Default::default() };
        let _ = roll_data::read_video(path, &options);
        let _ = roll_data::probe(path, decoder);
    });
}

/// `tokenizer.json`, a text with it, and back.
pub fn tokenizer_json(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::parse(bytes) else { return };
    if let Ok(ids) = tokenizer.encode("A man, \u{fdfa}, and a dog \u{1f415}.") {
        let _ = tokenizer.decode(&ids);
    }
}

/// Answers of a reward.
pub fn frame(bytes: &[u8]) {
    let _ = roll_rewards::remote::frame::read::<serde_json::Value>(&mut &*bytes, 1 << 20);
}

fn with_file(bytes: &[u8], extension: &str, read: impl FnOnce(&Path)) {
    let Ok(directory) = tempfile::tempdir() else { return };
    let path = directory.path().join(format!("fuzz.{extension}"));
    if std::fs::write(&path, bytes).is_ok() {
        read(&path);
    }
}
