//! The readers of files that may come from anywhere, each as a function of bytes. A reader must return without a panic,
//! in bounded time, and with no more memory than a few times the input. The cargo-fuzz targets in this folder use the
//! readers, and so does tests/fuzz.rs, which mutates the corpus in the ordinary test suite.

use std::collections::BTreeMap;
use std::path::Path;

use roll_causal_lm::{CausalLmOptions, Tokenizer};
use roll_core::{BuildContext, StateDict};
use roll_network::lora::{Convention, EncodedLora, LoraFile, Names, WriteOptions};
use roll_network::weights::Checkpoint;
use roll_network::weights::gguf::GgufFile;
use roll_train::config::ConfigLayers;
use roll_wan::components;

/// Type of a reader.
pub type Entry = fn(&[u8]);

/// All readers by the name of their corpus.
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

/// Reads a safetensors file as a checkpoint and as a LoRA file.
pub fn safetensors(bytes: &[u8]) {
    weights(bytes, "safetensors");
}

/// Reads a torch checkpoint, which is parsed and never executed.
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

/// Reads values and tensors of a GGUF file, and opens the language model in it with its tokenizer and chat template.
/// The model is not run.
pub fn gguf(bytes: &[u8]) {
    with_file(bytes, "gguf", |path| {
        let Ok(file) = GgufFile::open(path) else { return };
        for name in file.names() {
            let _ = file.tensor(name).map(|tensor| tensor.as_bytes().len());
        }
        let options =
            CausalLmOptions { model_path: Some(path.into()), lora_rank: Some(1), ..CausalLmOptions::default() };
        let context = BuildContext::new("flex");
        let _ = roll_causal_lm::open(&options, &context);
    });
}

/// Reads graph and weights of an ONNX file. The model is not run.
pub fn onnx(bytes: &[u8]) {
    if let Ok(device) = roll_backends::device("flex") {
        let _ = roll_onnx::Model::parse(Path::new("fuzz.onnx"), bytes, &device);
    }
}

/// Reads boxes, tables and pictures of an MP4 file.
pub fn mp4(bytes: &[u8]) {
    with_file(bytes, "mp4", |path| {
        let decoder = roll_media::Decoder::Own;
        let options = roll_media::ReadOptions { max_frames: Some(4), decoder, ..roll_media::ReadOptions::default() };
        let _ = roll_media::read_video(path, &options);
    });
}

/// Reads a configuration file with its `defaults`, interpolations and the translation of ROLL's configurations.
pub fn config(bytes: &[u8]) {
    with_file(bytes, "yaml", |path| {
        let _ = ConfigLayers::new().file(path).and_then(|layers| layers.load(None));
    });
}

/// Reads a LoRA file with these names of tensors, one per line. The prefix `#` marks a scalar. Adapters that can be
/// read are written in every convention and read again.
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
            if let Ok(written) = EncodedLora::new(lora, options, &file.metadata) {
                let _ = LoraFile::read(path, &written.state, written.metadata, None);
            }
        }
    }
}

/// Reads an adapter of one layer with this metadata in its header, a JSON object of strings. Adapters that can be read
/// are written in every convention.
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
                    let _ = EncodedLora::new(lora, options, &file.metadata);
                }
            }
        }
    }
}

/// Reads the assignment of clips to prompts: CSV, TSV, JSON lines, or a JSON list.
pub fn metadata(bytes: &[u8]) {
    with_file(bytes, "csv", |path| {
        let _ = roll_video::rows::Metadata::read(path, None);
        let _ = roll_video::rows::RowColumns::read(path, None);
    });
}

/// Reads a picture with its EXIF data, and the size in its header.
pub fn picture(bytes: &[u8]) {
    with_file(bytes, "png", |path| {
        let (sizing, decoder) = (roll_media::Sizing::Exact([8, 8]), roll_media::Decoder::Own);
        let options = roll_media::ReadOptions { max_frames: Some(4), sizing, decoder, ..Default::default() };
        let _ = roll_media::read_video(path, &options);
        let _ = roll_media::probe(path, decoder);
    });
}

/// Reads `tokenizer.json`, encodes a text with it and decodes the ids.
pub fn tokenizer_json(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::parse(bytes) else { return };
    if let Ok(ids) = tokenizer.encode("A man, \u{fdfa}, and a dog \u{1f415}.") {
        let _ = tokenizer.decode(&ids);
    }
}

/// Reads an answer of a remote reward.
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
