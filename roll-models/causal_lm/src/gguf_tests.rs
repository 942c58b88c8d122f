//! Models in GGUF files that the tests write, compared with the same weights under their Hugging Face names.
#![allow(clippy::unwrap_used)]

use burn_tensor::DType;
use rand_distr::{Distribution, StandardNormal};
use roll_core::{Adapter, Noise, Purpose, StateDict, Tensor};
use roll_network::tokenizer::Tokenizer;
use roll_testing::GgufWriter;
use serde_json::{Value as Json, json};

use super::config::LmConfig;
use super::gguf;
use super::loaded::LoadedModel;
use super::network::Network;
use super::source;

// Types of values in GGUF.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const LIST: u32 = 9;

fn random(config: &LmConfig) -> StateDict {
    let mut rng = Noise::new(3).generator(Purpose::Parameters, 0, 0);
    let mut draw = || 0.3 * Distribution::<f32>::sample(&StandardNormal, &mut rng);
    let weights = config.weights().into_iter();
    weights
        .map(|(name, shape)| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw()).collect();
            (name, Tensor::new(values, shape).unwrap())
        })
        .collect()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn list(kind: u32, items: &[Vec<u8>]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes(), &items.concat()].concat()
}

/// A file of `family` with these numbers and the weights of `state`. `name` renames a weight as a converter does.
fn written(family: &str, numbers: &[(&str, f64)], state: &StateDict, name: impl Fn(&str) -> String) -> GgufWriter {
    let mut writer = GgufWriter::default().value("general.architecture", TEXT, &text(family));
    for (key, number) in numbers {
        let (kind, bytes) = match number.fract() == 0.0 && !key.contains("softcapping") && !key.contains("freq") {
            true => (U32, (*number as u32).to_le_bytes()),
            false => (F32, (*number as f32).to_le_bytes()),
        };
        writer = writer.value(&format!("{family}.{key}"), kind, &bytes);
    }
    let tokens = ["<unk>", "<s>", "<end>", "\u{2581}", "a", "b", "ab", "\u{2581}ab"];
    let kinds = [2u32, 3, 3, 1, 1, 1, 1, 1];
    let scores = [0.0f32, 0.0, 0.0, -2.0, -3.0, -4.0, 0.0, -1.0];
    let numbers = |values: [u32; 8]| values.map(|value| value.to_le_bytes().to_vec());
    writer = writer
        .value("tokenizer.ggml.model", TEXT, &text("llama"))
        .value("tokenizer.ggml.tokens", LIST, &list(TEXT, &tokens.map(text)))
        .value("tokenizer.ggml.token_type", LIST, &list(I32, &numbers(kinds)))
        .value("tokenizer.ggml.scores", LIST, &list(F32, &numbers(scores.map(f32::to_bits))))
        .value("tokenizer.ggml.add_space_prefix", BOOL, &[u8::from(family == "phi3")])
        .value("tokenizer.ggml.eos_token_id", U32, &2u32.to_le_bytes());
    for (hugging_face, tensor) in state {
        // Gemma's converter adds 1 to the gains.
        let gain = if family.starts_with("gemma") && hugging_face.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let bytes: Vec<u8> = tensor.to_f32_vec().iter().flat_map(|value| (value + gain).to_le_bytes()).collect();
        let shape: Vec<u64> = tensor.shape().iter().map(|d| *d as u64).collect();
        writer = writer.tensor(&name(hugging_face), &shape, 0, &bytes);
    }
    writer
}

fn opened(file: &GgufWriter) -> roll_core::Result<LoadedModel> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let model = gguf::open(&path, false)?;
    // The Hugging Face files that are made from the GGUF file for other programs have the same configuration and
    // tokens.
    let files = gguf::files_for_others(&path)?;
    assert_eq!(LmConfig::parse(files["config.json"].as_bytes()).unwrap(), model.config);
    let tokenizer = Tokenizer::parse(files["tokenizer.json"].as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("ab<end> a").unwrap(), model.tokenizer.as_ref().unwrap().encode("ab<end> a").unwrap());
    assert!(files["tokenizer_config.json"].contains(r#""eos_token": "<end>""#));
    // Checkpoints of a full training have them, those of an adapter do not.
    let beside = |with_files| source::origin(Some(&path), None, with_files).map(|origin| origin.files);
    assert_eq!((beside(true)?, beside(false)?.len()), (files, 0));
    Ok(model)
}

/// Renames a Hugging Face weight as a converter does, by a table of layers.
fn renamed(name: &str, layers: &[(&str, &str)]) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    let (block, layer) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let (_, gguf) = layers.iter().find(|(hugging_face, _)| layer == format!("{hugging_face}.weight")).unwrap();
    format!("blk.{block}.{gguf}.weight")
}

const GEMMA: [(&str, &str); 13] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

const PHI3: [(&str, &str); 6] = [
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
];

/// The configuration of all test models with these changes. `NUMBERS` has its numbers under GGUF's keys.
fn config_with(changes: Json) -> LmConfig {
    let mut json = json!({
        "vocab_size": 8, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 7, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 2f64.powi(-20),
        "eos_token_id": 2, "sliding_window": 3,
    });
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    LmConfig::parse(json.to_string().as_bytes()).unwrap()
}

const NUMBERS: [(&str, f64); 10] = [
    ("embedding_length", 8.0),
    ("feed_forward_length", 12.0),
    ("block_count", 7.0),
    ("attention.head_count", 2.0),
    ("attention.head_count_kv", 1.0),
    ("attention.key_length", 4.0),
    ("attention.sliding_window", 3.0),
    ("attention.layer_norm_rms_epsilon", 1.0 / 1_048_576.0),
    ("context_length", 64.0),
    ("rope.freq_base", 20_000.0),
];

/// Asserts that a model read from a file has this configuration, these weights and their logits.
fn assert_same(model: LoadedModel, config: &LmConfig, state: &StateDict) {
    assert_eq!(model.config, *config);
    assert!(model.quantised.is_empty() && model.state.keys().eq(state.keys()));
    for (name, tensor) in state {
        let (found, expected) = (model.state[name].to_f32_vec(), tensor.to_f32_vec());
        let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 2e-7);
        assert!(near && model.state[name].shape() == tensor.shape(), "{name}");
    }
    let device = roll_backends::device("flex").unwrap();
    let logits = |state: &StateDict| {
        let network = Network::new(config.clone(), state, DType::F32, &device).unwrap();
        let tokens = Tensor::new(vec![3i64, 4, 5, 6, 7, 1], [1, 6]).unwrap();
        network.logits(&tokens, &Tensor::new(vec![1u8; 6], [1, 6]).unwrap(), Adapter::Off).unwrap().to_f32_vec()
    };
    let (found, expected) = (logits(&model.state), logits(state));
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}, {expected:?}");
}

#[test]
fn gemma_2_matches_its_hugging_face_weights() {
    let config = config_with(json!({
        "model_type": "gemma2", "rope_theta": 20_000.0, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 20.5,
    }));
    let state = random(&config);
    // `attn_logit_softcapping` is left out, as in the first Gemma 2 files: the default, 50, is used.
    let numbers = [&NUMBERS[..], &[("final_logit_softcapping", 20.5)]].concat();
    let model = opened(&written("gemma2", &numbers, &state, |name| renamed(name, &GEMMA))).unwrap();
    assert_eq!(model.config.windows[..3], [Some(3), None, Some(3)]);
    let tokenizer = model.tokenizer.as_ref().unwrap();
    assert_eq!(tokenizer.encode("ab ab<end>").unwrap(), [6, 7, 2]);
    assert_same(model, &config, &state);
}

#[test]
fn gemma_3_matches_its_hugging_face_weights() {
    let config = config_with(json!({
        "model_type": "gemma3_text", "rope_theta": 20_000.0, "query_pre_attn_scalar": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }));
    let state = random(&config);
    let file = written("gemma3", &NUMBERS, &state, |name| renamed(name, &GEMMA))
        .value("gemma3.rope.scaling.type", TEXT, &text("linear"))
        .value("gemma3.rope.scaling.factor", F32, &8f32.to_le_bytes());
    let model = opened(&file).unwrap();
    assert_eq!(model.config.windows, [Some(3), Some(3), Some(3), Some(3), Some(3), None, Some(3)]);
    assert_same(model, &config, &state);
}

#[test]
fn phi_3_matches_its_directory() {
    let config = config_with(json!({"model_type": "phi3", "rope_theta": 20_000.0}));
    let state = random(&config);
    let numbers = [&NUMBERS[..], &[("rope.dimension_count", 4.0)]].concat();
    let model = opened(&written("phi3", &numbers, &state, |name| renamed(name, &PHI3))).unwrap();
    assert_eq!(model.config.windows, vec![Some(3); 7]);
    let tokenizer = model.tokenizer.as_ref().unwrap();
    assert_eq!(tokenizer.encode("ab<end> ab").unwrap(), [7, 2, 7]);
    assert_same(model, &config, &state);
}

#[test]
fn rejects_partial_rotary_positions_and_longrope() {
    let config = config_with(json!({"model_type": "phi3"}));
    let mut state = random(&config);
    let part = [&NUMBERS[..], &[("rope.dimension_count", 2.0)]].concat();
    let refused = |file: &GgufWriter| opened(file).map(drop).unwrap_err().to_string();
    assert!(refused(&written("phi3", &part, &state, |name| renamed(name, &PHI3))).contains("part of a head"));
    let long = "rope_factors_long.weight";
    state.insert(long.into(), Tensor::new(vec![1.0f32; 2], [2]).unwrap());
    let name = |name: &str| if name == long { long.into() } else { renamed(name, &PHI3) };
    assert!(refused(&written("phi3", &NUMBERS, &state, name)).contains("LongRoPE"));
}
