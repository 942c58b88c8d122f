//! Facts of loading: names, LoRAs, vocabularies, checkpoints of other families.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{
    BuildContext, Component, Grad, Positions, StateDict, Tensor, VisionLanguageModel, open_vision_language,
};
use roll_network::precision::WeightsDType;
use roll_network::weights::{Checkpoint, save_safetensors};

use super::fixture::Fixture;
use crate::{QwenVl, QwenVlOptions};

/// Numerator of the LoRA's scale, and its rank.
const ALPHA: f64 = 6.0;
const RANK: usize = 2;

fn weights(fixture: &Fixture) -> StateDict {
    Checkpoint::open(fixture.directory.join("model.safetensors")).unwrap().all().unwrap()
}

/// Writes `state` into `directory` with the configuration of `fixture`.
fn write(directory: &Path, fixture: &Fixture, state: &StateDict) -> QwenVlOptions {
    std::fs::copy(fixture.directory.join("hf_config.json"), directory.join("config.json")).unwrap();
    save_safetensors(directory.join("model.safetensors"), state, &BTreeMap::new()).unwrap();
    QwenVlOptions { model_path: Some(directory.into()), ..QwenVlOptions::default() }
}

fn open(options: &QwenVlOptions) -> roll_core::Result<QwenVl> {
    crate::open("reward.model", options, &BuildContext::new("flex"))
}

/// The states of the picture's text.
fn states(fixture: &Fixture, model: &mut QwenVl) -> Vec<f32> {
    let text = fixture.texts("image", model).remove(0);
    let wanted: Vec<usize> = (0..text.tokens.len()).collect();
    let (states, _) = model.read(&text.tokens, &text.media, Positions::Multimodal, &wanted, Grad::Skip).unwrap();
    states.f32s().unwrap().to_vec()
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-5)
}

/// A LoRA on every linear layer of the language model: its matrices by layer, and the weights with it merged.
fn lora(state: &StateDict) -> (BTreeMap<String, [Tensor; 2]>, StateDict) {
    let (mut matrices, mut merged) = (BTreeMap::new(), state.clone());
    for (name, weight) in state.iter().filter(|(name, _)| name.contains("_proj.weight") && name.contains(".layers.")) {
        let [out, input] = *weight.shape() else { panic!("{name} is no matrix") };
        let noise =
            |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed) as f32 * 0.61).sin() * 0.1).collect::<Vec<_>>();
        let (a, b) = (noise(RANK * input, out), noise(out * RANK, input));
        let mut values = weight.to_f32_vec();
        for row in 0..out {
            for column in 0..input {
                let product: f32 = (0..RANK).map(|r| b[row * RANK + r] * a[r * input + column]).sum();
                values[row * input + column] += product * (ALPHA / RANK as f64) as f32;
            }
        }
        merged.insert(name.clone(), Tensor::new(values, [out, input]).unwrap());
        let pair = [Tensor::new(a, [RANK, input]).unwrap(), Tensor::new(b, [out, RANK]).unwrap()];
        matrices.insert(name.strip_suffix(".weight").unwrap().to_string(), pair);
    }
    assert!(!matrices.is_empty());
    (matrices, merged)
}

#[test]
fn older_and_newer_names_are_the_same_network() {
    for fixture in Fixture::all() {
        let expected = states(&fixture, &mut fixture.open("flex", "f32"));
        let newer = |name: &str| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None if name.starts_with("visual.") => format!("model.{name}"),
            None => name.to_string(),
        };
        let state = weights(&fixture).into_iter().map(|(name, tensor)| (newer(&name), tensor)).collect();
        let directory = tempfile::tempdir().unwrap();
        let mut model = open(&write(directory.path(), &fixture, &state)).unwrap();
        assert_eq!(states(&fixture, &mut model), expected);
    }
}

#[test]
fn a_lora_inside_a_checkpoint_or_beside_it_is_merged() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let state = weights(&fixture);
    let (matrices, merged) = lora(&state);
    let directory = tempfile::tempdir().unwrap();
    let expected = states(&fixture, &mut open(&write(directory.path(), &fixture, &merged)).unwrap());
    assert!(!near(&expected, &states(&fixture, &mut fixture.open("flex", "f32"))));

    // As VideoAlign saves a whole model, its output layer stored again and a head beside it.
    let mut wrapped = StateDict::new();
    for (name, tensor) in &state {
        let in_lora = name.rsplit_once('.').is_some_and(|(layer, _)| matrices.contains_key(layer));
        let (layer, end) = name.rsplit_once('.').unwrap();
        let base = if in_lora { format!("{layer}.base_layer.{end}") } else { name.clone() };
        wrapped.insert(format!("base_model.model.{base}"), tensor.clone());
    }
    for (layer, [a, b]) in &matrices {
        wrapped.insert(format!("base_model.model.{layer}.lora_A.default.weight"), a.clone());
        wrapped.insert(format!("base_model.model.{layer}.lora_B.default.weight"), b.clone());
    }
    wrapped.insert("base_model.model.lm_head.weight".into(), state["model.embed_tokens.weight"].clone());
    wrapped.insert("base_model.model.rm_head.weight".into(), Tensor::full([1, 48], 0.5));
    let whole = tempfile::tempdir().unwrap();
    let options = write(whole.path(), &fixture, &wrapped);
    let unscaled = open(&options).err().unwrap().chain();
    assert!(unscaled.contains("`lora_alpha`"), "{unscaled}");
    let mut model = open(&QwenVlOptions { lora_alpha: Some(ALPHA), ..options.clone() }).unwrap();
    assert!(near(&states(&fixture, &mut model), &expected));
    let published =
        format!(r#"{{"peft_lora_config": {{"lora_r": {RANK}, "lora_alpha": {ALPHA}, "use_rslora": false}}}}"#);
    std::fs::write(whole.path().join("model_config.json"), published).unwrap();
    let mut model = open(&options).unwrap();
    assert!(near(&states(&fixture, &mut model), &expected));
    assert_eq!(model.other_tensors().keys().collect::<Vec<_>>(), ["rm_head.weight"]);

    // As PEFT saves an adapter.
    let base = tempfile::tempdir().unwrap();
    let options = write(base.path(), &fixture, &state);
    let peft = tempfile::tempdir().unwrap();
    let mut adapter = StateDict::new();
    for (layer, [a, b]) in &matrices {
        adapter.insert(format!("base_model.model.{layer}.lora_A.weight"), a.clone());
        adapter.insert(format!("base_model.model.{layer}.lora_B.weight"), b.clone());
    }
    save_safetensors(peft.path().join("adapter_model.safetensors"), &adapter, &BTreeMap::new()).unwrap();
    let config = format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {ALPHA}}}"#);
    std::fs::write(peft.path().join("adapter_config.json"), config).unwrap();
    let mut model = open(&QwenVlOptions { adapter_path: Some(peft.path().into()), ..options }).unwrap();
    assert!(near(&states(&fixture, &mut model), &expected));
}

#[test]
fn a_directory_of_another_level_is_refused_with_the_one_that_was_meant() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = directory.path().join("checkpoint-7");
    std::fs::create_dir(&checkpoint).unwrap();
    let options = write(&checkpoint, &fixture, &weights(&fixture));
    let refusal = |options: &QwenVlOptions| open(options).err().unwrap().chain();
    let above = QwenVlOptions { model_path: Some(directory.path().into()), ..options.clone() };
    let message = refusal(&above);
    assert!(message.contains(checkpoint.to_str().unwrap()) && message.contains("no weights"), "{message}");
    // Directories of the configuration and of the tokenizer, as trainers leave them.
    let config = directory.path().join("config");
    std::fs::create_dir(&config).unwrap();
    std::fs::rename(checkpoint.join("config.json"), config.join("config.json")).unwrap();
    let message = refusal(&options);
    assert!(message.contains("`reward.model.config_path`") && message.contains("base model"), "{message}");
    let options = QwenVlOptions { config_path: Some(config), ..options };
    assert!(open(&options).is_ok());
    let words = serde_json::json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    });
    let folder = checkpoint.join("tokenizer");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("tokenizer.json"), words.to_string()).unwrap();
    for tokenizer_path in [None, Some(folder.clone()), Some(folder.join("tokenizer.json"))] {
        let model = open(&QwenVlOptions { tokenizer_path, ..options.clone() }).unwrap();
        assert_eq!(model.tokenize("a").unwrap(), [0]);
    }
    // A directory that holds an adapter alone.
    std::fs::remove_file(checkpoint.join("model.safetensors")).unwrap();
    std::fs::write(checkpoint.join("adapter_model.safetensors"), "").unwrap();
    let message = refusal(&options);
    assert!(message.contains("holds an adapter") && message.contains("`reward.model.adapter_path`"), "{message}");
}

#[test]
fn the_vocabulary_is_that_of_the_checkpoint() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let mut state = weights(&fixture);
    let embedding = &state["model.embed_tokens.weight"];
    let [rows, width] = *embedding.shape() else { panic!() };
    let mut longer = embedding.f32s().unwrap().to_vec();
    longer.extend(vec![0.5; 3 * width]);
    state.insert("model.embed_tokens.weight".into(), Tensor::new(longer, [rows + 3, width]).unwrap());
    let directory = tempfile::tempdir().unwrap();
    let model = open(&write(directory.path(), &fixture, &state)).unwrap();
    assert_eq!(model.facts().vocabulary, rows + 3);
    assert_eq!(model.head_rows(&[rows as u32 + 2]).unwrap().f32s().unwrap(), vec![0.5; width]);
    assert!(model.head_rows(&[rows as u32 + 3]).is_err());
}

#[test]
fn checkpoints_that_are_not_of_the_family_are_refused_by_name() {
    let [older, newer] = [Fixture::named("qwen2vl_tiny"), Fixture::named("qwen25vl_tiny")];
    let refusal = |options: &QwenVlOptions| open(options).err().unwrap().chain();
    let directory = tempfile::tempdir().unwrap();
    // The weights of Qwen2.5-VL with the configuration of Qwen2-VL.
    let message = refusal(&write(directory.path(), &older, &weights(&newer)));
    assert!(message.contains("Qwen2.5-VL") && message.contains("mlp.gate_proj"), "{message}");
    // A language model.
    let mut words = weights(&older);
    words.retain(|name, _| !name.starts_with("visual."));
    let message = refusal(&write(directory.path(), &older, &words));
    assert!(message.contains("no vision tower"), "{message}");
    // A tensor is missing, or has another shape.
    let mut state = weights(&older);
    state.remove("visual.merger.mlp.0.bias");
    let message = refusal(&write(directory.path(), &older, &state));
    assert!(message.contains("`visual.merger.mlp.0.bias` is missing"), "{message}");
    state.insert("visual.merger.mlp.0.bias".into(), Tensor::zeros([3]));
    let message = refusal(&write(directory.path(), &older, &state));
    assert!(message.contains("visual.merger.mlp.0.bias") && message.contains("[3]"), "{message}");
    // Another `model_type`.
    let options = write(directory.path(), &older, &weights(&older));
    std::fs::write(directory.path().join("config.json"), r#"{"model_type": "qwen3_vl"}"#).unwrap();
    let message = refusal(&options);
    assert!(message.contains("qwen3_vl") && message.contains("qwen2_5_vl"), "{message}");
}

#[test]
fn hostile_configurations_are_errors() {
    let fixture = Fixture::named("qwen25vl_tiny");
    let text = std::fs::read_to_string(fixture.directory.join("hf_config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let changes = [
        ("/vision_config/depth", serde_json::json!(1u64 << 40), "depth"),
        ("/vision_config/num_heads", serde_json::json!(0), "num_heads"),
        ("/vision_config/num_heads", serde_json::json!(16), "heads"),
        ("/vision_config/window_size", serde_json::json!(1), "window_size"),
        ("/vision_config/out_hidden_size", serde_json::json!(7), "out_hidden_size"),
        ("/vision_config/hidden_act", serde_json::json!("relu"), "relu"),
        ("/vision_config/patch_size", serde_json::json!(-3), "patch_size"),
        ("/vision_config/tokens_per_second", serde_json::json!(-1.0), "tokens_per_second"),
        ("/rope_scaling/mrope_section", serde_json::json!([1, 2, 3]), "mrope_section"),
        ("/rope_scaling/mrope_section", serde_json::json!([u64::MAX, 2, 3]), "mrope_section"),
        (
            "/rope_scaling",
            serde_json::json!({"type": "yarn", "factor": 4.0, "mrope_section": [1, 1, 2]}),
            "found `yarn`",
        ),
        ("/image_token_id", serde_json::json!(1000), "image_token_id"),
        ("/vision_config", serde_json::json!(3), "vision_config"),
    ];
    for (place, value, part) in changes {
        let mut json = json.clone();
        *json.pointer_mut(place).unwrap() = value;
        let problem = crate::QwenVlConfig::parse(json.to_string().as_bytes(), None).unwrap_err();
        assert!(problem.contains(part), "{place}: {problem}");
    }
}

#[test]
fn weights_in_eight_bits_are_near() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let expected = states(&fixture, &mut fixture.open("flex", "f32"));
    for dtype in [WeightsDType::Int8, WeightsDType::Fp8] {
        let options = QwenVlOptions { weights_dtype: dtype, ..fixture.options("f32") };
        let found = states(&fixture, &mut open(&options).unwrap());
        let (mut error, mut size) = (0.0, 0.0);
        for (a, b) in found.iter().zip(&expected) {
            error += f64::from(a - b).powi(2);
            size += f64::from(*b).powi(2);
        }
        let error = (error / size).sqrt();
        assert!(error > 1e-4 && error < 0.12, "{dtype:?}: {error}");
    }
}

#[test]
fn the_registry_opens_it_and_names_the_keys_of_mistakes() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let mut component = Component::named("qwen_vl");
    let open = |component: &Component| open_vision_language("reward.model", component, &BuildContext::new("flex"));
    let missing = open(&component).err().unwrap().chain();
    assert!(missing.contains("`reward.model.model_path`"), "{missing}");
    let path = |name: &str| fixture.directory.join(name).display().to_string();
    component.options.insert("model_path".into(), path("model.safetensors").into());
    component.options.insert("config_path".into(), path("hf_config.json").into());
    assert_eq!(open(&component).unwrap().facts().width, 48);
    component.options.insert("model_pat".into(), "x".into());
    let unknown = open(&component).err().unwrap().chain();
    assert!(unknown.contains("`reward.model.model_pat`") && unknown.contains("`model_path`"), "{unknown}");
    // A check reads headers alone.
    component.options.remove("model_pat");
    let context = BuildContext { headers_only: true, ..BuildContext::new("flex") };
    assert!(open_vision_language("reward.model", &component, &context).is_ok());
}
