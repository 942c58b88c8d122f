//! LoRA files through the command line, and in the loaders of diffusers and PEFT where Python has them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use roll_core::{Noise, Purpose, StateDict, Tensor};
use roll_network::lora::{Convention, Layer, Lora, LoraFile, Names, WriteOptions, write_lora};
use roll_network::weights::{Checkpoint, save_safetensors};

use crate::program::{done, fails, printed, roll, stderr_text};

const DIM: usize = 24;
const FFN: usize = 40;
const RANK: usize = 4;
const LAYERS: usize = 2;

fn refuses(directory: &Path, arguments: &[&str], needles: &[&str]) {
    fails(&roll(directory, arguments), 2, needles);
}

/// A LoRA for every matrix of the blocks; every third layer has a scale of its own.
fn lora(scaled: bool) -> Lora {
    let mut lora = Lora::default();
    for block in 0..LAYERS {
        let names = ["self_attn", "cross_attn"].iter().flat_map(|a| ["q", "k", "v", "o"].map(|m| format!("{a}.{m}")));
        for (i, name) in names.chain(["ffn.0".into(), "ffn.2".into()]).enumerate() {
            let (out, inner) = match name.as_str() {
                "ffn.0" => (FFN, DIM),
                "ffn.2" => (DIM, FFN),
                _ => (DIM, DIM),
            };
            let matrix = |shape: [usize; 2], which: u64| {
                Noise::new(1).normal(Purpose::Synthetic, which, (block * 100 + i) as u64, &shape).unwrap()
            };
            let alpha = scaled.then_some(if i % 3 == 0 { 1.7f32.into() } else { 2.0 });
            let layer = Layer { down: matrix([RANK, inner], 0), up: matrix([out, RANK], 1), alpha, bias: None };
            lora.layers.insert(format!("blocks.{block}.{name}"), layer);
        }
    }
    lora
}

fn comfy(lora: &Lora, path: &Path) {
    let options = WriteOptions { convention: Convention::ComfyUi, names: Names::Official };
    write_lora(lora, options, &BTreeMap::new(), path).unwrap();
}

#[test]
fn lora_conversions_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    for scaled in [false, true] {
        let here = dir.path().join(scaled.to_string());
        std::fs::create_dir(&here).unwrap();
        comfy(&lora(scaled), &here.join("first.safetensors"));
        let mut at = "first.safetensors".to_string();
        for to in ["kohya", "peft", "diffusers", "diffsynth", "comfyui"] {
            let out = format!("{to}/adapter_model.safetensors");
            std::fs::create_dir(here.join(to)).unwrap();
            let printed_text = done(&here, &["convert-lora", &at, &out, "--to", to]);
            assert!(printed_text.contains("20 layers"), "{printed_text}");
            at = out;
        }
        let read = |name: &str| std::fs::read(here.join(name)).unwrap();
        assert!(read(&at) == read("first.safetensors"), "the bytes differ (scaled: {scaled})");
    }
}

#[test]
fn a_file_of_two_experts_becomes_two_files() {
    let dir = tempfile::tempdir().unwrap();
    let mut both = StateDict::new();
    for (prefix, seed) in [("transformer", 1.0f32), ("transformer_2", 2.0)] {
        both.insert(format!("{prefix}.blocks.0.attn1.to_q.lora_A.weight"), Tensor::full([2, 4], seed));
        both.insert(format!("{prefix}.blocks.0.attn1.to_q.lora_B.weight"), Tensor::full([4, 2], seed));
    }
    save_safetensors(dir.path().join("both.safetensors"), &both, &BTreeMap::new()).unwrap();
    done(dir.path(), &["convert-lora", "both.safetensors", "out.safetensors", "--to", "kohya"]);
    for (name, value) in [("out_high_noise.safetensors", 1.0), ("out_low_noise.safetensors", 2.0)] {
        let lora = LoraFile::open(dir.path().join(name)).unwrap().one(None).unwrap();
        assert_eq!(lora.layers["blocks.0.self_attn.q"].down.to_f32_vec(), [value; 8]);
    }
    refuses(dir.path(), &["merge-lora", "both.safetensors", "both.safetensors", "x.safetensors"], &["--expert"]);
}

/// The matrices of the LoRA's layers, in two shards.
fn base(directory: &Path) -> PathBuf {
    let mut state = StateDict::new();
    for (name, layer) in lora(false).layers {
        let shape = [layer.up.shape()[0], layer.down.shape()[1]];
        state.insert(format!("{name}.weight"), Tensor::full(shape, 1.0).to_float(roll_core::DType::Bf16).unwrap());
    }
    let whole = directory.join("base.safetensors");
    save_safetensors(&whole, &state, &BTreeMap::new()).unwrap();
    whole
}

#[test]
fn shards_split_merge_and_join() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    base(here);
    comfy(&lora(true), &here.join("lora.safetensors"));
    done(here, &["split-shards", "base.safetensors", "shards", "--max-size", "9KB"]);
    assert!(here.join("shards/base.safetensors.index.json").exists());
    let printed_text = done(here, &["merge-lora", "shards", "lora.safetensors", "merged", "--alpha", "0.5"]);
    assert!(printed_text.contains("20 tensors changed"), "{printed_text}");
    done(here, &["merge-lora", "base.safetensors", "lora.safetensors", "merged.safetensors", "--alpha", "0.5"]);
    done(here, &["merge-shards", "merged", "joined.safetensors"]);
    let read = |name: &str| std::fs::read(here.join(name)).unwrap();
    assert!(read("joined.safetensors") == read("merged.safetensors"), "one file and shards are merged alike");
    assert!(read("joined.safetensors") != read("base.safetensors"));
    done(here, &["merge-shards", "shards", "f32.safetensors", "--dtype", "f32"]);
    let wide = Checkpoint::open(here.join("f32.safetensors")).unwrap();
    assert_eq!(wide.tensor("blocks.0.ffn.0.weight").unwrap().f32s().unwrap(), [1.0; DIM * FFN]);

    let about = done(here, &["inspect", "lora.safetensors"]);
    assert!(about.contains("ComfyUI") && about.contains("blocks.#.ffn.0 (2)"), "{about}");
    let about: serde_json::Value = serde_json::from_str(&done(here, &["inspect", "shards", "--json"])).unwrap();
    assert_eq!((&about["what"], &about["tensors"]), (&"unknown network".into(), &20.into()));
}

#[test]
fn merging_into_the_other_expert_warns() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    for name in ["high_noise_model", "low_noise_model"] {
        std::fs::create_dir(here.join(name)).unwrap();
        base(&here.join(name));
    }
    let options = WriteOptions { convention: Convention::ComfyUi, names: Names::Official };
    let about = BTreeMap::from([("roll.expert".to_string(), "low_noise".to_string())]);
    write_lora(&lora(true), options, &about, &here.join("low.safetensors")).unwrap();
    for (base, warns) in [("high_noise_model", true), ("low_noise_model", false)] {
        let out = format!("{base}.safetensors");
        let output = roll(here, &["merge-lora", &format!("{base}/base.safetensors"), "low.safetensors", &out]);
        let messages = stderr_text(&output);
        assert!(output.status.success() && messages.contains("says the other one") == warns, "{base}: {messages}");
    }
}

#[test]
fn errors_write_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    base(here);
    let mut other = lora(false);
    let layer = other.layers.remove("blocks.1.ffn.2").unwrap();
    other.layers.insert("blocks.7.ffn.2".into(), layer);
    comfy(&other, &here.join("other.safetensors"));
    let merge = ["merge-lora", "base.safetensors", "other.safetensors", "out.safetensors"];
    refuses(here, &merge, &["blocks.7.ffn.2", "1 of 20", "--allow-missing"]);
    assert!(!here.join("out.safetensors").exists());
    let printed_text = done(here, &[&merge[..], &["--allow-missing"]].concat());
    assert!(printed_text.contains("left out: blocks.7.ffn.2"), "{printed_text}");
    refuses(here, &["merge-lora", "base.safetensors", "base.safetensors", "x"], &["base.safetensors", "LoRA"]);
    refuses(here, &["merge-lora", "base.safetensors", "other.safetensors", "base.safetensors"], &["base.safetensors"]);
    refuses(here, &["convert-lora", "none.safetensors", "x.safetensors", "--to", "peft"], &["none.safetensors"]);
    refuses(here, &["convert-lora", "other.safetensors", "x.bin", "--to", "kohya"], &[".safetensors"]);
    refuses(here, &["split-shards", "base.safetensors", "s", "--max-size", "9parsecs"], &["PARSECS"]);
    refuses(here, &["inspect", "nothing"], &["nothing"]);
}

#[test]
fn diffusers_and_peft_load_what_is_written() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let mut source = StateDict::new();
    let lora = lora(true);
    for (name, layer) in &lora.layers {
        source.insert(format!("{name}.A"), layer.down.clone());
        source.insert(format!("{name}.B"), layer.up.clone());
        source.insert(format!("{name}.scale"), Tensor::scalar(layer.scale() as f32));
    }
    save_safetensors(here.join("source.safetensors"), &source, &BTreeMap::new()).unwrap();
    let config = serde_json::json!({ "dim": DIM, "ffn_dim": FFN, "layers": LAYERS, "heads": 2 });
    std::fs::write(here.join("config.json"), config.to_string()).unwrap();
    comfy(&lora, &here.join("comfyui.safetensors"));
    for (out, to) in [("kohya.safetensors", "kohya"), ("diffusers.safetensors", "diffusers"), ("peft", "peft")] {
        done(here, &["convert-lora", "comfyui.safetensors", out, "--to", to]);
    }
    let named = ["convert-lora", "comfyui.safetensors", "peft_diffusers", "--to", "peft", "--names", "diffusers"];
    done(here, &named);
    let low = ["convert-lora", "comfyui.safetensors", "diffusers_low.safetensors", "--to", "diffusers"];
    let printed_text = done(here, &[&low[..], &["--expert", "low"]].concat());
    assert!(printed_text.contains("load_into_transformer_2=True"), "{printed_text}");

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/scripts/lora_loaders.py");
    let output = match Command::new(&python).arg(script).arg(here).output() {
        Ok(output) => output,
        Err(e) => {
            roll_testing::skip!(
                format!("{python}: {e}; set PYTHON to one with diffusers and peft"),
                needs = "diffusers"
            )
        }
    };
    let printed_text = printed(&output);
    match output.status.code() {
        Some(77) => {
            let why = format!("{}; set PYTHON to one with diffusers and peft", printed_text.trim());
            roll_testing::skip!(why, needs = "diffusers")
        }
        Some(0) => print!("{printed_text}"),
        _ => panic!("{printed_text}\n{}", stderr_text(&output)),
    }
}
