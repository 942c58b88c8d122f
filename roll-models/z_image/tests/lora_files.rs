//! LoRA files for other programs, written from adapters of every convention and read again.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{StateDict, Tensor};
use roll_network::lora::{Convention, Lora, LoraFile, Names, WriteOptions, write_lora};
use roll_network::weights::Checkpoint;
use roll_z_image::lora;

/// The directory of a tiny transformer, and of one LoRA for it by the names of several programs.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/zimage_dit_tiny")
}

/// Every `lora_*.safetensors` of the fixture, by the part of its name after `lora_`.
fn files() -> BTreeMap<String, PathBuf> {
    let entries = std::fs::read_dir(fixture()).unwrap().map(|entry| entry.unwrap().path());
    let named = entries.filter_map(|path| {
        let name = path.file_stem()?.to_str()?.strip_prefix("lora_")?.to_string();
        Some((name, path))
    });
    named.collect()
}

fn base() -> Checkpoint {
    Checkpoint::open(fixture().join("weights.safetensors")).unwrap()
}

/// Reads a LoRA with the names of the checkpoint.
fn read(path: &Path) -> Lora {
    let mut read = LoraFile::open(path).unwrap().one(None).unwrap();
    assert!(lora::to_names_of(&mut read, path, &base()).unwrap());
    read
}

fn assert_same(found: &Lora, expected: &Lora, what: &str) {
    assert_eq!(found.layers.keys().collect::<Vec<_>>(), expected.layers.keys().collect::<Vec<_>>(), "{what}");
    for (name, layer) in &expected.layers {
        let other = &found.layers[name];
        assert_eq!(other.scale(), layer.scale(), "{what}: {name}");
        let bytes = |tensor: &Tensor| (tensor.shape().to_vec(), tensor.as_bytes().to_vec());
        assert_eq!(bytes(&other.down), bytes(&layer.down), "{what}: {name}");
        assert_eq!(bytes(&other.up), bytes(&layer.up), "{what}: {name}");
    }
}

fn tensors(path: &Path) -> StateDict {
    Checkpoint::open(path).unwrap().all().unwrap()
}

#[test]
fn a_lora_of_every_program_survives_every_convention_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let files = files();
    assert!(files.len() >= 6, "{files:?}");
    let options = |convention| WriteOptions { convention, names: Names::Official };
    for (name, path) in &files {
        let original = read(path);
        let plain =
            [Convention::Peft, Convention::DiffSynth, Convention::Diffusers, Convention::ComfyUi, Convention::Kohya];
        for convention in plain {
            let out = dir.path().join(format!("{name}_{convention:?}/lora.safetensors"));
            std::fs::create_dir_all(out.parent().unwrap()).unwrap();
            write_lora(&original, options(convention), &BTreeMap::new(), &out).unwrap();
            assert_same(&read(&out), &original, &format!("{name} to {convention}"));
        }
        let mut fused = original.clone();
        lora::fuse(&mut fused).unwrap();
        for convention in [Convention::ComfyUi, Convention::Kohya] {
            let out = dir.path().join(format!("{name}_fused_{convention:?}.safetensors"));
            write_lora(&fused, options(convention), &BTreeMap::new(), &out).unwrap();
            assert_same(&read(&out), &original, &format!("{name} to {convention} with fused names"));
        }
    }
}

#[test]
fn written_files_have_the_tensors_that_other_programs_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let files = files();
    for (theirs, convention) in [
        ("kohya", Convention::Kohya),
        ("comfy_fused", Convention::Kohya),
        ("transformer", Convention::Diffusers),
        ("peft", Convention::Peft),
    ] {
        let mut lora = read(&files[theirs]);
        if theirs == "comfy_fused" {
            lora::fuse(&mut lora).unwrap();
        }
        let out = dir.path().join(format!("{theirs}.safetensors"));
        let options = WriteOptions { convention, names: Names::Official };
        write_lora(&lora, options, &BTreeMap::new(), &out).unwrap();
        let (ours, expected) = (tensors(&out), tensors(&files[theirs]));
        assert_eq!(ours.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{theirs}");
        for (key, tensor) in &expected {
            assert_eq!(ours[key].as_bytes(), tensor.as_bytes(), "{theirs}: {key}");
        }
    }
}
