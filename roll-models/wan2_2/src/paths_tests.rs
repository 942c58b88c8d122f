//! Files of a pipeline: listed, globbed, in the cache, in both layouts, and wrong.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;

use roll_core::{Fault, StateDict, Tensor};
use roll_network::names::{self, Direction};
use roll_network::weights::save_safetensors;

use super::super::init_tiny::{WanKind, init_tiny};
use super::*;

const HIGH: &str = "high_noise_model/diffusion_pytorch_model.safetensors";
const LOW: &str = "low_noise_model/diffusion_pytorch_model.safetensors";
const T5: &str = "models_t5_umt5-xxl-enc-bf16.safetensors";
const VAE: &str = "Wan2.1_VAE.safetensors";

fn model(kind: WanKind) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), kind, 0).unwrap();
    dir
}

fn list(dir: &Path, json: &str) -> Result<ComponentFiles> {
    let path = dir.join("list.json");
    fs::write(&path, json).unwrap();
    ComponentFiles::from_json(path)
}

fn chain(e: &Error) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(e) = source {
        text = format!("{text}: {e}");
        source = e.source();
    }
    text
}

fn assert_user_error(result: Result<ComponentFiles>, words: &[&str]) {
    let e = result.err().unwrap();
    assert_eq!(e.fault(), Fault::User, "{e}");
    let text = chain(&e);
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn the_list_itself_can_be_the_value_of_the_option() {
    let dir = model(WanKind::I2v);
    let open = |paths: serde_json::Value| {
        let options: WanOptions = serde_json::from_value(serde_json::json!({"model_paths": paths})).unwrap();
        let context = BuildContext { base_dir: dir.path().into(), ..BuildContext::new("flex") };
        ComponentFiles::open(&options, &context, &Hub::default())
    };
    let files = open(serde_json::json!([HIGH, [LOW], VAE, "models_t5*"])).unwrap();
    assert!(files.dit.path().ends_with(HIGH) && files.dit2.unwrap().path().ends_with(LOW));
    assert!(files.text_encoder.is_some() && files.tokenizer.is_some());
    for (paths, words) in [
        (serde_json::json!([]), "`model.model_paths`: expected a list of weight files, found an empty list"),
        (serde_json::json!([HIGH, "nowhere.safetensors"]), "entry 2"),
        (serde_json::json!([HIGH, LOW]), "expected a Wan VAE"),
    ] {
        let problem = open(paths).err().unwrap().chain();
        assert!(problem.contains(words), "{problem}");
    }
}

#[test]
fn components_are_recognised_in_any_order_and_the_first_transformer_is_high_noise() {
    let dir = model(WanKind::I2v);
    let files = list(dir.path(), &format!(r#"["{VAE}", "{HIGH}", "{T5}", "{LOW}"]"#)).unwrap();
    assert!(files.dit.path().ends_with(HIGH) && files.dit2.unwrap().path().ends_with(LOW));
    assert!(files.vae.path().ends_with(VAE) && files.text_encoder.unwrap().path().ends_with(T5));
    let swapped = list(dir.path(), &format!(r#"["{LOW}", "{HIGH}", "{VAE}"]"#)).unwrap();
    assert!(swapped.dit.path().ends_with(LOW) && swapped.text_encoder.is_none());
}

#[test]
fn an_entry_may_be_shards_a_glob_or_a_directory() {
    let dir = model(WanKind::I2v);
    let whole = Checkpoint::open(dir.path().join(HIGH)).unwrap().all().unwrap();
    let (a, b): (StateDict, StateDict) = whole.into_iter().partition(|(key, _)| key.as_str() < "blocks.1");
    for (name, part) in [("s-00001-of-00002.safetensors", &a), ("s-00002-of-00002.safetensors", &b)] {
        save_safetensors(dir.path().join(name), part, &BTreeMap::new()).unwrap();
    }
    let shards = r#"["s-00001-of-00002.safetensors", "s-00002-of-00002.safetensors"]"#;
    for entry in [shards, r#""s-*.safetensors""#, r#"["s-*.safetensors"]"#, r#""high_noise_model""#, r#""high*/diff*""#]
    {
        let files = list(dir.path(), &format!(r#"[{entry}, "{VAE}"]"#)).unwrap();
        assert_eq!(files.dit.len(), a.len() + b.len(), "{entry}");
    }
    assert_user_error(list(dir.path(), r#"["s-00001*"]"#), &["00002-of-00002"]);
}

#[test]
fn official_directories_have_all_components() {
    for (kind, experts) in [(WanKind::T2v, 2), (WanKind::Ti2v, 1)] {
        let dir = model(kind);
        let files = ComponentFiles::from_json(dir.path()).unwrap();
        assert_eq!(1 + usize::from(files.dit2.is_some()), experts);
        assert!(files.text_encoder.is_some() && files.tokenizer.is_some());
    }
}

/// Writes the weights of `dir` as a directory in diffusers' layout.
fn as_diffusers(dir: &Path, to: &Path, kind: WanKind) {
    let files = ComponentFiles::from_json(dir).unwrap();
    let vae = if kind == WanKind::Ti2v { names::vae_22 } else { names::vae_21 };
    let write = |checkpoint: &Checkpoint, file: &str, rename: fn(&str, Direction) -> Option<String>| {
        let path = to.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let renamed = |(key, t): (String, Tensor)| (rename(&key, Direction::FromOfficial).unwrap(), t);
        let state: StateDict = checkpoint.all().unwrap().into_iter().map(renamed).collect();
        save_safetensors(path, &state, &BTreeMap::new()).unwrap();
    };
    write(&files.dit, "transformer/diffusion_pytorch_model.safetensors", names::dit);
    if let Some(dit2) = &files.dit2 {
        write(dit2, "transformer_2/diffusion_pytorch_model.safetensors", names::dit);
    }
    write(&files.vae, "vae/diffusion_pytorch_model.safetensors", vae);
    write(files.text_encoder.as_ref().unwrap(), "text_encoder/model.safetensors", names::umt5);
    fs::create_dir_all(to.join("tokenizer")).unwrap();
    fs::copy(files.tokenizer.unwrap(), to.join("tokenizer/tokenizer.json")).unwrap();
    fs::write(to.join("transformer/config.json"), r#"{"num_attention_heads": 2, "attention_head_dim": 32}"#).unwrap();
}

#[test]
fn diffusers_and_official_directories_have_the_same_weights() {
    for kind in [WanKind::I2v, WanKind::Ti2v] {
        let (dir, to) = (model(kind), tempfile::tempdir().unwrap());
        as_diffusers(dir.path(), to.path(), kind);
        let official = ComponentFiles::from_json(dir.path()).unwrap();
        let converted = ComponentFiles::from_json(to.path()).unwrap();
        assert_eq!(converted.vae_kind, official.vae_kind);
        assert!(converted.tokenizer.is_some());
        assert_eq!(super::super::components::heads(&converted.dit), Some(2));
        let pairs = [
            (Some(&official.dit), Some(&converted.dit)),
            (official.dit2.as_ref(), converted.dit2.as_ref()),
            (Some(&official.vae), Some(&converted.vae)),
            (official.text_encoder.as_ref(), converted.text_encoder.as_ref()),
        ];
        for (a, b) in pairs {
            assert_eq!(a.is_some(), b.is_some());
            let (Some(a), Some(b)) = (a, b) else { continue };
            assert_eq!(a.shapes(), b.shapes());
            assert!(a.keys().all(|k| a.tensor(k).unwrap().as_bytes() == b.tensor(k).unwrap().as_bytes()));
        }
    }
}

#[test]
fn wrapped_state_dictionaries_are_unwrapped() {
    let dir = model(WanKind::T2v);
    for (wrapper, source) in [("model.diffusion_model.", HIGH), ("state_dict.module.", HIGH), ("model_state.", VAE)] {
        let checkpoint = Checkpoint::open(dir.path().join(source)).unwrap();
        let mut state: StateDict =
            checkpoint.all().unwrap().into_iter().map(|(k, t)| (format!("{wrapper}{k}"), t)).collect();
        state.insert("step".into(), Tensor::scalar(3.0));
        let path = dir.path().join("wrapped.safetensors");
        save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
        let (_, unwrapped) = recognise(Checkpoint::open(path).unwrap()).unwrap();
        assert_eq!(unwrapped.shapes(), checkpoint.shapes());
    }
}

#[test]
fn a_variant_of_the_transformer_is_refused_by_its_first_unknown_weight() {
    let dir = model(WanKind::I2v21);
    let files = ComponentFiles::from_json(dir.path()).unwrap();
    let path = dir.path().join("variant.safetensors");
    let message = |key: &str, shape: &[usize]| {
        let mut state = files.dit.all().unwrap();
        state.insert(key.into(), Tensor::zeros(shape));
        save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
        let (component, checkpoint) = recognise(Checkpoint::open(&path).unwrap()).unwrap();
        assert_eq!(component, Component::Dit);
        super::super::components::dit_config(&checkpoint, Some(2)).map_err(|error| error.to_string())
    };
    for key in ["img_emb.emb_pos", "vace_blocks.0.before_proj.weight", "blocks.7.ffn.0.weight"] {
        let found = message(key, &[4, 4]).unwrap_err();
        assert!(found.contains(&format!("`{key}`")) && found.contains("variant"), "{found}");
    }
    message("optimizer.state.0.exp_avg", &[4, 4]).unwrap();
    message("step", &[]).unwrap();
}

#[test]
fn models_are_found_in_the_local_caches() {
    let root = tempfile::tempdir().unwrap();
    let snapshot = root.path().join("hub/models--Wan-AI--Wan2.2-I2V-A14B/snapshots/0123abc");
    init_tiny(&snapshot, WanKind::I2v, 0).unwrap();
    let hub = Hub { caches: vec![root.path().join("hub")], folders: vec![root.path().join("models")], remote: None };
    let id = "Wan-AI/Wan2.2-I2V-A14B";
    let ids = format!(
        "{id}:high_noise_model/diffusion_pytorch_model*.safetensors,{id}:low_noise_model/diffusion_pytorch_model*.safetensors,\
         {id}:models_t5_umt5-xxl-enc-bf16.safetensors, {id}:Wan2.1_VAE.safetensors"
    );
    let files = ComponentFiles::resolve(None, Some(&ids), &hub).unwrap();
    let paths = |files: &ComponentFiles| -> Vec<PathBuf> {
        let optional = [&files.dit2, &files.text_encoder, &files.clip].into_iter().flatten();
        let networks = [&files.dit, &files.vae].into_iter().chain(optional);
        networks.flat_map(|network| network.paths().map(Path::to_path_buf)).collect()
    };
    assert_eq!(paths(&files).len(), 4);
    assert!(files.dit2.is_some() && files.tokenizer.is_some());
    assert_eq!(paths(&ComponentFiles::resolve(None, Some(id), &hub).unwrap()), paths(&files));
    assert_user_error(
        ComponentFiles::resolve(None, Some(&format!("{id}:Wan2.1_VAE.pth")), &hub),
        &["Wan2.1_VAE.pth", "hf download Wan-AI/Wan2.2-I2V-A14B", "0123abc"],
    );
}

#[test]
fn errors_name_the_mistake_in_the_list() {
    let dir = model(WanKind::I2v);
    let at = dir.path();
    assert_user_error(ComponentFiles::from_json(at.join("none.json")), &["none.json"]);
    assert_user_error(list(at, "{}"), &["list.json", "JSON list"]);
    assert_user_error(list(at, "[1]"), &["list.json"]);
    assert_user_error(list(at, "[]"), &["empty"]);
    assert_user_error(list(at, r#"["missing.safetensors"]"#), &["entry 1", "missing.safetensors"]);
    assert_user_error(list(at, r#"["nothing*.safetensors"]"#), &["entry 1", "nothing*.safetensors"]);
    assert_user_error(list(at, r#"["google"]"#), &["google", "directory"]);
    assert_user_error(list(at, &format!(r#"["{HIGH}"]"#)), &["VAE"]);
    assert_user_error(list(at, &format!(r#"["{VAE}"]"#)), &["transformer"]);
    assert_user_error(list(at, &format!(r#"["{HIGH}","{LOW}","{HIGH}","{VAE}"]"#)), &["a third"]);
    assert_user_error(list(at, &format!(r#"["{HIGH}","{VAE}","{VAE}"]"#)), &["a second Wan2.1 VAE"]);
    assert_user_error(ComponentFiles::from_json(at.join(VAE)), &["wan22_paths.json", "one weight file"]);
    assert_user_error(ComponentFiles::resolve(None, None, &Hub::default()), &["model_paths"]);
    let stray: StateDict = [("layer.weight".to_string(), Tensor::scalar(1.0))].into();
    save_safetensors(at.join("stray.safetensors"), &stray, &BTreeMap::new()).unwrap();
    assert_user_error(list(at, r#"["stray.safetensors"]"#), &["stray.safetensors", "layer.weight"]);
    let lora: StateDict = [("blocks.0.self_attn.q.lora_A.weight".to_string(), Tensor::zeros([4, 64]))].into();
    save_safetensors(at.join("lora.safetensors"), &lora, &BTreeMap::new()).unwrap();
    assert_user_error(list(at, r#"["lora.safetensors"]"#), &["LoRA"]);
}
