//! LoRA files that are converted between conventions and merged into a base.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use roll_core::{DType, StateDict, Tensor};

use super::*;
use crate::weights::{Checkpoint, SafetensorsWriter, TensorEntry, save_safetensors};

/// Values for which no factor but a power of two can be undone exactly.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

fn matrix(rows: usize, columns: usize, seed: u64) -> Tensor {
    Tensor::new(values(rows * columns, seed), [rows, columns]).unwrap()
}

fn layer(out: usize, rank: usize, columns: usize, alpha: Option<f64>, seed: u64) -> Layer {
    Layer { down: matrix(rank, columns, seed), up: matrix(out, rank, seed + 1), alpha, bias: None }
}

/// A LoRA with every kind of layer of a block, and some layers outside the blocks.
fn lora(alpha: impl Fn(usize) -> Option<f64>) -> Lora {
    let names = [
        "blocks.0.self_attn.q",
        "blocks.0.self_attn.o",
        "blocks.0.cross_attn.k",
        "blocks.0.cross_attn.k_img",
        "blocks.11.ffn.0",
        "blocks.11.ffn.2",
        "text_embedding.0",
        "time_projection.1",
        "head.head",
    ];
    let layers = names.iter().enumerate().map(|(i, name)| {
        let rank = if i == 3 { 2 } else { 4 };
        (name.to_string(), layer(6, rank, 8, alpha(i), 10 * i as u64 + 1))
    });
    Lora { layers: layers.collect(), ..Lora::default() }
}

fn write(lora: &Lora, convention: Convention, dir: &Path) -> std::path::PathBuf {
    let options = WriteOptions { convention, names: Names::Official };
    let out = match convention {
        Convention::Peft => dir.join("peft"),
        other => dir.join(format!("{other}.safetensors")),
    };
    write_lora(lora, options, &BTreeMap::new(), &out).unwrap()
}

fn bits(tensor: &Tensor) -> (DType, Vec<usize>, Vec<u8>) {
    (tensor.dtype(), tensor.shape().to_vec(), tensor.as_bytes().to_vec())
}

fn assert_same(a: &Lora, b: &Lora) {
    assert_eq!(a.layers.keys().collect::<Vec<_>>(), b.layers.keys().collect::<Vec<_>>());
    for (name, x) in &a.layers {
        let y = &b.layers[name];
        assert_eq!((bits(&x.down), bits(&x.up)), (bits(&y.down), bits(&y.up)), "{name}");
        assert_eq!(x.scale(), y.scale(), "{name}");
        assert_eq!(x.bias.as_ref().map(bits), y.bias.as_ref().map(bits), "{name}");
    }
}

#[test]
fn conversions_between_all_conventions_are_bit_exact() {
    let alphas: [&dyn Fn(usize) -> Option<f64>; 4] =
        [&|_| None, &|_| Some(2.0), &|i| Some(if i % 2 == 0 { 3.0 } else { 0.7f32.into() }), &|i| {
            (i > 2).then_some(16.0)
        }];
    for alpha in alphas {
        let first = lora(alpha);
        for start in 0..5 {
            let dir = tempfile::tempdir().unwrap();
            let mut at = first.clone();
            for step in 0..6 {
                let convention = Convention::ALL[(start + step * 2) % 5];
                let here = dir.path().join(step.to_string());
                std::fs::create_dir(&here).unwrap();
                let file = write(&at, convention, &here);
                let read = LoraFile::open(&file).unwrap();
                assert_eq!(read.convention, convention);
                at = read.one(None).unwrap();
                assert_same(&first, &at);
            }
        }
    }
}

#[test]
fn bf16_loras_are_bit_exact_if_b_contains_the_scale() {
    let mut first = lora(|_| Some(2.5));
    for layer in first.layers.values_mut() {
        layer.up = layer.up.to_float(DType::Bf16).unwrap();
        layer.down = layer.down.to_float(DType::Bf16).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let file = write(&first, Convention::DiffSynth, dir.path());
    let state = Checkpoint::open(&file).unwrap().all().unwrap();
    let folded = &state["head.head.lora_B.default.weight"];
    let expected = first.layers["head.head"].up.to_f32_vec().iter().map(|v| v * (2.5 / 4.0)).collect::<Vec<_>>();
    assert_eq!(folded.to_f32_vec(), expected, "B as DiffSynth reads it includes the scale");
    assert_same(&first, &LoraFile::open(&file).unwrap().one(None).unwrap());
}

#[test]
fn keys_follow_the_conventions() {
    let lora = lora(|_| Some(2.0));
    let keys = |convention, names| {
        let written = EncodedLora::new(&lora, WriteOptions { convention, names }, &BTreeMap::new()).unwrap();
        written.state.into_keys().collect::<Vec<_>>().join("\n")
    };
    let official = Names::Official;
    assert!(keys(Convention::Peft, official).contains("base_model.model.blocks.0.self_attn.q.lora_A.weight"));
    assert!(keys(Convention::Peft, Names::Diffusers).contains("base_model.model.blocks.0.attn1.to_q.lora_A.weight"));
    assert!(keys(Convention::DiffSynth, official).contains("\nblocks.0.self_attn.q.lora_A.default.weight"));
    assert!(keys(Convention::Diffusers, official).contains("transformer.blocks.11.ffn.net.0.proj.lora_B.weight"));
    assert!(keys(Convention::ComfyUi, official).contains("diffusion_model.blocks.0.cross_attn.k.alpha"));
    assert!(keys(Convention::Kohya, official).contains("lora_unet_blocks_0_cross_attn_k_img.lora_down.weight"));
}

#[test]
fn files_with_both_experts_have_two_adapters() {
    let mut state = StateDict::new();
    for (prefix, seed) in [("transformer", 1), ("transformer_2", 2)] {
        state.insert(format!("{prefix}.blocks.0.attn1.to_q.lora_A.weight"), matrix(2, 4, seed));
        state.insert(format!("{prefix}.blocks.0.attn1.to_q.lora_B.weight"), matrix(4, 2, seed));
    }
    let read = |state: &StateDict| LoraFile::read(Path::new("x"), state, BTreeMap::new(), None).unwrap();
    let file = read(&state);
    assert_eq!(file.names, Names::Diffusers);
    assert_eq!(file.adapters.iter().map(|a| a.expert).collect::<Vec<_>>(), [Some(Expert::High), Some(Expert::Low)]);
    assert!(matches!(file.clone().one(None), Err(LoraError::TwoExperts { .. })));
    let low = file.one(Some(Expert::Low)).unwrap();
    assert_eq!(bits(&low.layers["blocks.0.self_attn.q"].down), bits(&matrix(2, 4, 2)));
    let options = WriteOptions { convention: Convention::Diffusers, names: Names::Official };
    let written = EncodedLora::new(&low, options, &BTreeMap::new()).unwrap();
    // diffusers' loader drops keys of any other prefix, whichever transformer it loads into.
    assert!(written.state.keys().all(|key| key.starts_with("transformer.")), "{:?}", written.state.keys());
    let again = LoraFile::read(Path::new("x"), &written.state, written.metadata, None).unwrap();
    assert_eq!(again.adapters[0].target_expert(), Some(Expert::Low), "the header names the expert");
    assert!(matches!(again.one(Some(Expert::High)), Err(LoraError::NoExpert { .. })));
}

#[test]
fn errors_name_the_contradiction() {
    let good = || -> StateDict {
        [("diffusion_model.a.lora_A.weight", matrix(2, 4, 1)), ("diffusion_model.a.lora_B.weight", matrix(3, 2, 2))]
            .map(|(k, t)| (k.to_string(), t))
            .into()
    };
    let error = |change: &dyn Fn(&mut StateDict)| {
        let mut state = good();
        change(&mut state);
        LoraFile::read(Path::new("x.safetensors"), &state, BTreeMap::new(), None).unwrap_err().to_string()
    };
    let with =
        |name: &'static str, tensor: Tensor| move |s: &mut StateDict| drop(s.insert(name.into(), tensor.clone()));
    for (message, named) in [
        (error(&|s| drop(s.pop_last())), "lora_B"),
        (error(&with("diffusion_model.b.alpha", Tensor::scalar(1.0))), "`b`"),
        (error(&with("diffusion_model.a.lora_down.weight", matrix(2, 4, 1))), "twice"),
        (error(&with("diffusion_model.a.lora_B.weight", matrix(3, 4, 1))), "[3, 4]"),
        (error(&with("diffusion_model.a.alpha", Tensor::scalar(f32::NAN))), "not finite"),
        (error(&with("diffusion_model.a.alpha", matrix(1, 2, 1))), "alpha"),
        (error(&with("diffusion_model.a.weight", matrix(1, 2, 1))), "diffusion_model.a.weight"),
        (error(&with("lora_unet_a.alpha", Tensor::scalar(1.0))), "two conventions"),
        (error(&with("diffusion_model.a.lora_A.weight", Tensor::new(vec![1i32; 8], [2, 4]).unwrap())), "i32"),
        (error(&with("diffusion_model.a.lora_A.weight", Tensor::zeros([0, 4]))), "[0, 4]"),
    ] {
        assert!(message.contains(named) && message.contains("x.safetensors"), "{named}: {message}");
    }
}

#[test]
fn scale_of_a_peft_adapter_is_in_its_configuration() {
    let dir = tempfile::tempdir().unwrap();
    write(&lora(|_| None), Convention::Peft, dir.path());
    let path = dir.path().join("peft/adapter_config.json");
    std::fs::write(&path, r#"{"r": 4, "lora_alpha": 8, "alpha_pattern": {"q": 1}, "rank_pattern": {"k_img": 2}}"#)
        .unwrap();
    let read = LoraFile::open(dir.path().join("peft")).unwrap().one(None).unwrap();
    assert_eq!(read.layers["blocks.0.self_attn.q"].scale(), 0.25);
    assert_eq!(read.layers["blocks.11.ffn.2"].scale(), 2.0);
    assert_eq!(read.layers["blocks.0.cross_attn.k_img"].scale(), 4.0, "its rank is 2");
    std::fs::write(&path, "[").unwrap();
    assert!(LoraFile::open(dir.path().join("peft")).unwrap_err().to_string().contains("adapter_config.json"));
    // The configuration of another adapter is not overwritten.
    std::fs::write(&path, "{}").unwrap();
    let options = WriteOptions { convention: Convention::Peft, names: Names::Official };
    let refused = write_lora(&lora(|_| None), options, &BTreeMap::new(), &dir.path().join("peft")).unwrap_err();
    assert!(refused.to_string().contains("another adapter"), "{refused}");
}

#[test]
fn a_configuration_that_is_no_text_is_not_overwritten_and_no_weights_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("adapter_config.json");
    let options = WriteOptions { convention: Convention::Peft, names: Names::Official };
    let refused = || {
        let file = dir.path().join("new.safetensors");
        let error = write_lora(&lora(|_| None), options, &BTreeMap::new(), &file).unwrap_err().to_string();
        assert!(error.contains("adapter_config.json") && !file.exists(), "{error}");
        error
    };
    std::fs::write(&config, [0xff]).unwrap();
    assert!(refused().contains("another adapter"));
    assert_eq!(std::fs::read(&config).unwrap(), [0xff]);
    std::fs::remove_file(&config).unwrap();
    std::fs::create_dir(&config).unwrap();
    assert!(refused().contains("cannot read"));
}

#[test]
fn a_scaled_bias_of_any_layer_is_no_part_of_a_diffsynth_file() {
    let mut lora = lora(|i| (i == 1).then_some(6.0));
    let scaled = lora.layers.iter().find(|(_, layer)| layer.scale() != 1.0).unwrap().0.clone();
    let first = lora.layers.keys().next().unwrap().clone();
    assert_ne!(scaled, first);
    let options = WriteOptions { convention: Convention::DiffSynth, names: Names::Official };
    let bias = |layer: &mut Layer| layer.bias = Some(Tensor::zeros([layer.up.shape()[0]]));
    bias(lora.layers.get_mut(&first).unwrap());
    assert!(EncodedLora::new(&lora, options, &BTreeMap::new()).is_ok());
    bias(lora.layers.get_mut(&scaled).unwrap());
    let refused = EncodedLora::new(&lora, options, &BTreeMap::new()).unwrap_err().to_string();
    assert!(refused.contains(&scaled) && refused.contains("a scaled bias"), "{refused}");
}

#[test]
fn underscored_names_are_resolved_by_the_parameters_of_the_model() {
    let state: StateDict = [
        ("lora_unet_double_blocks_0_img_attn.lora_down.weight", matrix(2, 4, 1)),
        ("lora_unet_double_blocks_0_img_attn.lora_up.weight", matrix(3, 2, 2)),
    ]
    .map(|(k, t)| (k.to_string(), t))
    .into();
    let mut lora = LoraFile::read(Path::new("x"), &state, BTreeMap::new(), None).unwrap().one(None).unwrap();
    let comfy = WriteOptions { convention: Convention::ComfyUi, names: Names::Official };
    let refused = EncodedLora::new(&lora, comfy, &BTreeMap::new()).unwrap_err();
    assert!(refused.to_string().contains("double_blocks_0_img_attn"), "{refused}");
    lora.resolve(["double_blocks.0.img_attn.weight", "other.weight"]);
    let written = EncodedLora::new(&lora, comfy, &BTreeMap::new()).unwrap();
    assert!(written.state.contains_key("diffusion_model.double_blocks.0.img_attn.lora_A.weight"));
}

/// A base with the weights of `lora`'s layers and some others.
fn base(dir: &Path, dtype: DType) -> Checkpoint {
    let mut state = StateDict::new();
    for (i, name) in lora(|_| None).layers.keys().enumerate() {
        state.insert(format!("{name}.weight"), matrix(6, 8, 500 + i as u64).to_float(dtype).unwrap());
        state.insert(format!("{name}.bias"), matrix(1, 6, 600 + i as u64).reshape([6]).unwrap());
    }
    state.insert("norm.weight".into(), Tensor::new(vec![7i64, 8], [2]).unwrap());
    let path = dir.join("base.safetensors");
    save_safetensors(&path, &state, &BTreeMap::from([("num_heads".to_string(), "2".to_string())])).unwrap();
    Checkpoint::open(path).unwrap()
}

fn merged(base: &Checkpoint, lora: &Lora, options: &MergeOptions) -> StateDict {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    merge_lora(base, lora, &out, options, &mut |_| {}).unwrap();
    let file = Checkpoint::open(out).unwrap();
    assert_eq!(file.metadata(), base.metadata());
    file.all().unwrap()
}

#[test]
fn merge_adds_the_scaled_product_only() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), DType::Bf16);
    let lora = lora(|i| (i % 2 == 0).then_some(6.0));
    let state = merged(&base, &lora, &MergeOptions { strength: 0.5, ..MergeOptions::default() });
    for (key, before) in base.all().unwrap() {
        let after = &state[&key];
        let Some(layer) = key.strip_suffix(".weight").and_then(|name| lora.layers.get(name)) else {
            assert_eq!(bits(&before), bits(after), "{key}");
            continue;
        };
        let (a, b) = (layer.down.to_f32_vec(), layer.up.to_f32_vec());
        let expected: Vec<bf16> = (0..48)
            .map(|i| {
                let product: f64 = (0..layer.rank())
                    .map(|r| f64::from(b[i / 8 * layer.rank() + r]) * f64::from(a[r * 8 + i % 8]))
                    .sum();
                bf16::from_f64(f64::from(before.to_f32_vec()[i]) + 0.5 * layer.scale() * product)
            })
            .collect();
        assert_eq!(after.as_slice::<bf16>().unwrap(), expected, "{key}");
    }
    let wide = merged(&base, &lora, &MergeOptions { dtype: Some(DType::F32), ..MergeOptions::default() });
    assert_eq!(wide["head.head.weight"].dtype(), DType::F32);
    assert_eq!(wide["norm.weight"].dtype(), DType::I64);
}

#[test]
fn merge_matches_layers_across_naming_schemes() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), DType::F32);
    let lora = lora(|_| Some(2.0));
    let expected = merged(&base, &lora, &MergeOptions::default());
    for (i, convention) in Convention::ALL.into_iter().enumerate() {
        let here = dir.path().join(i.to_string());
        std::fs::create_dir(&here).unwrap();
        let read = LoraFile::open(write(&lora, convention, &here)).unwrap().one(None).unwrap();
        assert_eq!(merged(&base, &read, &MergeOptions::default()).len(), expected.len());
        for (key, tensor) in merged(&base, &read, &MergeOptions::default()) {
            assert_eq!(bits(&tensor), bits(&expected[&key]), "{convention}: {key}");
        }
    }
    let theirs: StateDict = base
        .all()
        .unwrap()
        .into_iter()
        .map(|(key, tensor)| {
            let (layer, end) = key.rsplit_once('.').unwrap();
            (format!("model.diffusion_model.{}.{end}", layer_names::diffusers(layer)), tensor)
        })
        .collect();
    let path = dir.path().join("theirs.safetensors");
    save_safetensors(&path, &theirs, &base.metadata()).unwrap();
    let theirs = merged(&Checkpoint::open(path).unwrap(), &lora, &MergeOptions::default());
    assert_eq!(
        bits(&theirs["model.diffusion_model.blocks.11.ffn.net.2.weight"]),
        bits(&expected["blocks.11.ffn.2.weight"])
    );
}

#[test]
fn merges_differences_and_biases() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), DType::F32);
    let mut lora = lora(|_| Some(2.0));
    let bias = matrix(1, 6, 3).reshape([6]).unwrap();
    let weight = matrix(6, 8, 4);
    lora.layers.retain(|name, _| name == "blocks.0.self_attn.q");
    lora.layers.values_mut().for_each(|layer| layer.bias = Some(bias.clone()));
    lora.differences.insert(
        "head.head".into(),
        Difference { weight: Some(weight.clone()), bias: Some(bias.clone()), modulation: None },
    );
    let state = merged(&base, &lora, &MergeOptions::default());
    let before = base.all().unwrap();
    let check = |key: &str, added: &Tensor, scale: f32| {
        let expected: Vec<f32> =
            before[key].to_f32_vec().iter().zip(added.to_f32_vec()).map(|(b, d)| b + scale * d).collect();
        assert_eq!(state[key].to_f32_vec(), expected, "{key}");
    };
    check("blocks.0.self_attn.q.bias", &bias, 0.5);
    check("head.head.bias", &bias, 1.0);
    check("head.head.weight", &weight, 1.0);
}

#[test]
fn a_merge_into_eight_bits_is_refused_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fp8.safetensors");
    let (name, dtype, shape) = ("blocks.0.self_attn.q.weight".to_string(), "F8_E4M3".to_string(), vec![6, 8]);
    let entry = TensorEntry { name: name.clone(), dtype, shape, bytes: 48, alignment: 1 };
    let mut writer = SafetensorsWriter::create(&path, vec![entry], &BTreeMap::new()).unwrap();
    writer.write(&name, &[0; 48]).unwrap();
    writer.finish().unwrap();
    let mut lora = lora(|_| None);
    lora.layers.retain(|layer, _| layer == "blocks.0.self_attn.q");
    for dtype in [None, Some(DType::Bf16)] {
        let options = MergeOptions { dtype, ..MergeOptions::default() };
        let base = Checkpoint::open(&path).unwrap();
        let refused = merge_lora(&base, &lora, &dir.path().join("out.safetensors"), &options, &mut |_| {}).unwrap_err();
        let message = refused.to_string();
        assert!(message.contains(&name) && message.contains("f8_e4m3"), "{message}");
        assert!(message.contains("base in bf16") && message.contains("model.weights_dtype"), "{message}");
    }
}

#[test]
fn failed_merges_write_nothing_and_name_the_mismatch() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), DType::F32);
    let out = dir.path().join("out.safetensors");
    let merge = |lora: &Lora, options: &MergeOptions| merge_lora(&base, lora, &out, options, &mut |_| {});
    let mut other = lora(|_| None);
    other.layers.insert("blocks.40.self_attn.q".into(), layer(6, 4, 8, None, 1));
    let refused = merge(&other, &MergeOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("1 of 10") && refused.contains("blocks.40.self_attn.q"), "{refused}");
    let allowed = MergeOptions { allow_missing: true, ..MergeOptions::default() };
    assert!(!out.exists());
    assert_eq!(merge(&other, &allowed).unwrap().missing, ["blocks.40.self_attn.q"]);
    std::fs::remove_file(&out).unwrap();
    other.layers.retain(|name, _| name.contains("40"));
    assert!(matches!(merge(&other, &allowed), Err(LoraError::NothingMatched { .. })));
    let mut wide = lora(|_| None);
    wide.layers.insert("head.head".into(), layer(6, 4, 9, None, 1));
    let refused = merge(&wide, &allowed).unwrap_err().to_string();
    assert!(refused.contains("[6, 9]") && refused.contains("[6, 8]"), "{refused}");
    let same = merge_lora(&base, &lora(|_| None), base.path(), &allowed, &mut |_| {}).unwrap_err();
    assert!(same.to_string().contains("base.safetensors"), "{same}");
    let huge = MergeOptions { strength: 3e38, ..allowed.clone() };
    assert!(matches!(merge(&lora(|_| None), &huge), Err(LoraError::NotFinite { .. })));
    let half = MergeOptions { strength: 1e6, dtype: Some(DType::F16), ..allowed };
    assert!(merge(&lora(|_| None), &half).unwrap_err().to_string().contains("beyond the values of f16"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the base is left");
}

#[test]
fn only_a_patch_embedding_of_other_channels_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("base.safetensors");
    let state: StateDict = [
        ("blocks.0.self_attn.q.weight", Tensor::zeros([6, 8])),
        ("blocks.0.cross_attn.k.weight", Tensor::zeros([6, 8])),
        ("patch_embedding.weight", Tensor::zeros([6, 36, 1, 2, 2])),
        ("patch_embedding.bias", Tensor::zeros([6])),
    ]
    .map(|(name, tensor)| (name.to_string(), tensor))
    .into();
    save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
    let merged = |others: &[(&str, Vec<usize>)]| {
        let q = ["lora_A", "lora_B"].into_iter().zip([vec![2, 8], vec![6, 2]]);
        let q = q.map(|(part, shape)| (format!("blocks.0.self_attn.q.{part}.weight"), Tensor::full(shape, 0.5)));
        let others = others.iter().map(|(name, shape)| (name.to_string(), Tensor::full(shape.clone(), 0.5)));
        let lora = LoraFile::read(Path::new("x"), &q.chain(others).collect(), BTreeMap::new(), None);
        let lora = lora.and_then(|file| file.one(None)).unwrap();
        let base = merged_on_read(Checkpoint::open(&path).unwrap(), &[(lora, 1.0, "x.safetensors".into())]);
        base.map(|base| base.tensor("patch_embedding.weight").unwrap().to_f32_vec()[0]).map_err(|e| e.to_string())
    };
    let low_rank = |a: &[usize], b: &[usize]| {
        [("patch_embedding.lora_A.weight", a.to_vec()), ("patch_embedding.lora_B.weight", b.to_vec())]
    };
    let image = [("blocks.0.cross_attn.k_img.diff_b", vec![6]), ("img_emb.proj.1.diff", vec![6, 6])];
    for (others, value) in [
        (&[("patch_embedding.diff", vec![6, 36, 1, 2, 2])][..], 0.5),
        (&[("patch_embedding.diff", vec![6, 16, 1, 2, 2])], 0.0),
        (&low_rank(&[2, 36, 1, 2, 2], &[6, 2, 1, 1, 1]), 0.5),
        (&low_rank(&[2, 16, 1, 2, 2], &[6, 2, 1, 1, 1]), 0.0),
        (&low_rank(&[2, 36 * 4], &[6, 2]), 0.5),
        (&low_rank(&[2, 16 * 4], &[6, 2]), 0.0),
        (&image, 0.0),
    ] {
        assert_eq!(merged(others), Ok(value), "{others:?}");
    }
    for (others, words) in [
        (&[("patch_embedding.diff", vec![7, 16, 1, 2, 2])][..], "[7, 16, 1, 2, 2]"),
        (&[("patch_embedding.diff", vec![6, 16, 1, 4, 4])], "[6, 16, 1, 4, 4]"),
        (&[("patch_embedding.diff", vec![6, 18])], "[6, 18]"),
        (&[("patch_embedding.diff_b", vec![7])], "[7]"),
        (&low_rank(&[2, 16, 1, 2, 2], &[7, 2, 1, 1, 1]), "[7, 16, 1, 2, 2]"),
        (&[("blocks.3.cross_attn.k_img.diff_b", vec![6])], "`blocks.3.cross_attn.k_img.bias`"),
        (&[("blocks.0.cross_attn.q_img.diff_b", vec![6])], "`blocks.0.cross_attn.q_img.bias`"),
        (&[("foo_img.diff_b", vec![6])], "`foo_img.bias`"),
    ] {
        let refused = merged(others).unwrap_err();
        assert!(refused.contains(words), "{others:?}: {refused}");
    }
}

#[test]
fn matrices_and_alphas_of_f64_are_rounded_to_f32() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let entry = |name: &str, shape: &[usize]| TensorEntry {
        name: format!("diffusion_model.blocks.0.self_attn.q.{name}"),
        dtype: "F64".into(),
        shape: shape.into(),
        bytes: 8 * shape.iter().product::<usize>() as u64,
        alignment: 8,
    };
    let entries = vec![entry("lora_A.weight", &[1, 3]), entry("lora_B.weight", &[2, 1]), entry("alpha", &[])];
    let mut writer = SafetensorsWriter::create(&path, entries, &BTreeMap::new()).unwrap();
    for entry in writer.order().to_vec() {
        let values = (0..entry.bytes / 8).flat_map(|i| (0.1 + i as f64).to_le_bytes());
        writer.write(&entry.name, &values.collect::<Vec<_>>()).unwrap();
    }
    writer.finish().unwrap();
    let lora = LoraFile::open(&path).unwrap().one(None).unwrap();
    let layer = &lora.layers["blocks.0.self_attn.q"];
    assert_eq!((layer.down.to_f32_vec(), layer.up.to_f32_vec()), (vec![0.1, 1.1, 2.1], vec![0.1, 1.1]));
    assert_eq!(layer.alpha, Some(f64::from(0.1f32)));
}
