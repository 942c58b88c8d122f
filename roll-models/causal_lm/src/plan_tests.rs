#![allow(clippy::unwrap_used)]

use std::path::Path;

use roll_core::{
    Adapter, BuildContext, Grad, LanguageModel, Model, Result, Tensor,
    plan::{Division, MemoryItem, Needs, Passes, PlanInput, Speed, TextPass},
};
use roll_testing::GgufWriter;
use serde_json::{Value, json};

use super::loading::{CausalLmOptions, open};
use super::plan::needs;

/// Eight conversations of at most 128 tokens, in four groups.
fn work() -> [TextPass; 2] {
    let texts = TextPass { rows: 8, tokens: Some(128), ..TextPass::default() };
    let rollout = TextPass { group: 2, at_once: 256, generated: 40, continues: true, ..texts.clone() };
    let update = TextPass { phase: "update".into(), at_once: 4, grad: true, reference: true, ..texts };
    [TextPass { phase: "rollout".into(), ..rollout }, update]
}

fn input(texts: &[TextPass]) -> PlanInput {
    PlanInput {
        network: None,
        frames: 1,
        size: None,
        memory: None,
        samples: 1,
        ranks: 1,
        passes: Passes { texts: texts.to_vec(), ..Passes::default() },
        division: Division::default(),
        speed: Speed { flops: 1e12, link: 1e9, read: 1e9 },
    }
}

fn on_gpu() -> PlanInput {
    PlanInput { memory: Some(24_000_000_000), ..input(&work()) }
}

fn zero(stage: u8, ranks: usize) -> PlanInput {
    let division = Division { all_ranks: true, stage, bucket: 1 << 24, ..Division::default() };
    PlanInput { ranks, division, ..input(&work()) }
}

fn context() -> BuildContext {
    BuildContext::new("flex")
}

fn planned(options: Value, input: &PlanInput) -> Result<Needs> {
    needs(options.as_object().unwrap(), input, &context())
}

fn parsed(options: &Value) -> CausalLmOptions {
    serde_json::from_value(options.clone()).unwrap()
}

fn find<'a>(needs: &'a Needs, name: &str) -> Option<&'a MemoryItem> {
    needs.memory.iter().find(|item| item.name == name)
}

fn bytes(needs: &Needs, name: &str) -> usize {
    find(needs, name).unwrap_or_else(|| panic!("no {name} in {:?}", needs.memory)).bytes()
}

#[test]
fn built_in_model_has_the_predicted_sizes() {
    for options in [json!({"lora_rank": 0}), json!({"lora_rank": 4}), json!({"lora_target_modules": "q_proj"})] {
        let needs = planned(options.clone(), &input(&work())).unwrap();
        let model = open(&parsed(&options), &context()).unwrap();
        assert_eq!(needs.facts["trained_parameters"], model.parameter_count() as f64, "{options}");
        assert_eq!(bytes(&needs, "trained parameters"), model.network().parameters().unwrap().bytes());
        assert_eq!(bytes(&needs, "frozen weights"), model.network().frozen_bytes().unwrap());
    }
}

#[test]
fn stage_3_on_two_ranks_halves_optimizer_and_rollout_memory() {
    let of = |stage, ranks| {
        let needs = planned(json!({"lora_rank": 0}), &zero(stage, ranks)).unwrap();
        ["optimizer state", "sums of gradients", "trained parameters", "keys and values"].map(|n| bytes(&needs, n))
    };
    let one = of(3, 1);
    let n = one[2] / 4;
    assert_eq!(one[..2], [8 * n, 4 * n]);
    assert_eq!(of(1, 2), [8 * n.div_ceil(2), one[1], one[2], one[3] / 2]);
    assert_eq!(of(3, 2), [8 * n.div_ceil(2), 4 * n.div_ceil(2), one[2], one[3] / 2]);
}

#[test]
fn full_training_without_a_reference_has_no_frozen_weights_and_one_blocks_gradients() {
    let [rollout, update] = work();
    let of = |reference: bool, input: PlanInput| {
        let texts = [rollout.clone(), TextPass { reference, ..update.clone() }];
        planned(
            json!({"lora_rank": 0}),
            &PlanInput { passes: Passes { texts: texts.to_vec(), ..Passes::default() }, ..input },
        )
        .unwrap()
    };
    assert!(find(&of(false, on_gpu()), "frozen weights").is_none());
    assert!(find(&of(true, on_gpu()), "frozen weights").is_some());
    let context = BuildContext { needs_reference: false, ..context() };
    let mut model = open(&parsed(&json!({"lora_rank": 0})), &context).unwrap();
    assert_eq!(model.network().frozen_bytes().unwrap(), 0);
    let (tokens, mask) = (Tensor::new(vec![1i64, 2, 3], [1, 3]).unwrap(), Tensor::new(vec![1u8; 3], [1, 3]).unwrap());
    let mut evaluated = |adapter| model.evaluate(&tokens, &mask, &mask, adapter, Grad::Skip).map(|(stats, _)| stats);
    let of_reference = evaluated(Adapter::Off).unwrap_err().to_string();
    assert!(of_reference.contains("reference policy"), "{of_reference}");
    let found = evaluated(Adapter::On).unwrap();
    let mut with_reference = open(&parsed(&json!({"lora_rank": 0})), &self::context()).unwrap();
    for adapter in [Adapter::On, Adapter::Off] {
        let (expected, _) = with_reference.evaluate(&tokens, &mask, &mask, adapter, Grad::Skip).unwrap();
        assert_eq!(found.log_probs.f32s().unwrap(), expected.log_probs.f32s().unwrap());
    }
    // On a GPU, the optimizer's state in host memory: gradients leave the model block by block.
    let config = model.network().config();
    let n = model.parameter_count();
    let in_host_memory = of(false, on_gpu());
    let on_the_gpu =
        of(false, PlanInput { division: Division { state_on_gpu: usize::MAX, ..Division::default() }, ..on_gpu() });
    let gradients = |needs: &Needs| find(needs, "gradients in the model").map_or(0, |item| item.device);
    assert_eq!(gradients(&on_the_gpu), 4 * n);
    let embedding = if config.tied { config.vocab * config.dim } else { 0 };
    assert!(gradients(&in_host_memory) <= 4 * (embedding + n / config.layers), "{:?}", in_host_memory.memory);
}

#[test]
fn keys_and_values_are_held_once() {
    let config = open(&CausalLmOptions::default(), &context()).unwrap().network().config().clone();
    let of_token = 2 * config.kv_heads * config.head_dim * 4 * config.layers;
    let [rollout, update] = work();
    let counted = |options: Value, rollout: &TextPass| {
        let needs = planned(options, &input(&[rollout.clone(), update.clone()])).unwrap();
        bytes(&needs, "keys and values")
    };
    // The last token of a sequence is not cached. Fewer rows at once leave the conversations in their slots.
    assert_eq!(counted(json!({}), &rollout), 8 * 127 * of_token);
    assert_eq!(counted(json!({"rows_at_once": 3}), &rollout), 8 * 127 * of_token);
    let few_a_call = TextPass { at_once: 2, ..rollout.clone() };
    assert_eq!(counted(json!({}), &few_a_call), 8 * 127 * of_token);
    let once = TextPass { continues: false, shared_prompt: true, ..rollout.clone() };
    assert_eq!(counted(json!({}), &once), (4 * 88 + 8 * 39) * of_token);
    let apart = TextPass { shared_prompt: false, ..once };
    assert_eq!(counted(json!({}), &apart), (8 * 88 + 8 * 39) * of_token);
    // A single answer frees its slot, and a call its prompts.
    assert_eq!(counted(json!({"rows_at_once": 3}), &apart), (8 * 88 + 3 * 39) * of_token);
    assert_eq!(counted(json!({}), &TextPass { at_once: 2, ..apart }), 2 * (88 + 39) * of_token);
    let long = TextPass { rows: 64, group: 8, tokens: Some(2048), ..rollout };
    let needs = planned(json!({}), &input(&[long])).unwrap();
    assert_eq!(bytes(&needs, "keys and values"), 64 * 2047 * of_token);
    assert_eq!(needs.facts["tokens"], 2048.0);
    // A GPU in bf16.
    assert_eq!(2 * bytes(&planned(json!({}), &on_gpu()).unwrap(), "keys and values"), 8 * 127 * of_token);
}

/// A file with a model of the family Llama, whose matrices are in blocks (Q8_0).
fn quantised(path: &Path) -> usize {
    const U32: u32 = 4;
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut writer = GgufWriter::default().value("general.architecture", 8, &text("llama"));
    let numbers: [(&str, u32); 7] = [
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("block_count", 2),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("context_length", 256),
        ("attention.key_length", 16),
    ];
    for (key, number) in numbers {
        writer = writer.value(&format!("llama.{key}"), U32, &number.to_le_bytes());
    }
    let mut shapes = vec![("token_embd".to_string(), vec![32u64, 64]), ("output_norm".into(), vec![64])];
    for block in 0..2 {
        for (name, shape) in [
            ("attn_norm", vec![64]),
            ("attn_q", vec![64, 64]),
            ("attn_k", vec![32, 64]),
            ("attn_v", vec![32, 64]),
            ("attn_output", vec![64, 64]),
            ("ffn_norm", vec![64]),
            ("ffn_gate", vec![96, 64]),
            ("ffn_up", vec![96, 64]),
            ("ffn_down", vec![64, 96]),
        ] {
            shapes.push((format!("blk.{block}.{name}"), shape));
        }
    }
    let mut elements = 0;
    for (name, shape) in shapes {
        let count: u64 = shape.iter().product();
        elements += count as usize;
        let (kind, bytes) = if shape.len() == 2 { (8, count / 32 * 34) } else { (0, 4 * count) };
        writer = writer.tensor(&format!("{name}.weight"), &shape, kind, &vec![0; bytes as usize]);
    }
    std::fs::write(path, writer.bytes()).unwrap();
    elements
}

#[test]
fn quantised_matrices_have_the_size_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let elements = quantised(&path);
    for options in [json!({"model_path": path}), json!({"model_path": path, "weights_dtype": "f32"})] {
        let needs = planned(options.clone(), &input(&work())).unwrap();
        let model = open(&parsed(&options), &context()).unwrap();
        assert_eq!(bytes(&needs, "frozen weights"), model.network().frozen_bytes().unwrap());
        assert_eq!(bytes(&needs, "frozen weights") < 2 * elements, options.get("weights_dtype").is_none());
    }
    let needs = planned(json!({"model_path": path}), &on_gpu()).unwrap();
    assert_eq!(bytes(&needs, "frozen weights"), 2 * elements);
    // Before they are on the GPU: blocks, and five norms in f32.
    let norms = 5 * 64;
    let opened = (elements - norms) / 32 * 34 + 4 * norms;
    assert_eq!(find(&needs, "weights of the file").unwrap().host, opened);
    let all = planned(json!({"model_path": path, "lora_rank": 0}), &on_gpu()).unwrap();
    assert_eq!(find(&all, "weights of the file").unwrap().host, opened + 4 * (elements - norms));
    assert!(find(&planned(json!({}), &on_gpu()).unwrap(), "weights of the file").is_none());
}

#[test]
fn frozen_weights_have_the_dtype_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    super::write_built_in(dir.path()).unwrap();
    let of = |options: Value| bytes(&planned(options, &input(&work())).unwrap(), "frozen weights");
    let [f32s, bf16s] = ["f32", "bf16"].map(|dtype| of(json!({"model_path": dir.path(), "weights_dtype": dtype})));
    assert!(of(json!({"model_path": dir.path()})) == of(json!({})) && f32s == 2 * bf16s);
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let message = planned(json!({"model_path": dir.path()}), &input(&work())).unwrap_err().chain();
    assert!(message.contains("model.safetensors"), "{message}");
}

#[test]
fn activations_depend_on_gradient_checkpointing() {
    // Small adapters, so that the largest moment is the backward pass of the last block, not of the first.
    let update = |mut options: Value, texts: &[TextPass]| {
        options["lora_rank"] = json!(1);
        let needs = planned(options, &input(texts)).unwrap();
        (needs.held_in(Some("update"), |item| item.device), needs)
    };
    let (recomputed, _) = update(json!({}), &work());
    let (held, of_held) = update(json!({"use_gradient_checkpointing": false, "weights_dtype": "f32"}), &work());
    let (offloaded, needs) = update(json!({"use_gradient_checkpointing_offload": true}), &work());
    assert!(held > recomputed && offloaded < recomputed && find(&needs, "block inputs").unwrap().host > 0);
    // Weights in bf16 are converted for products in f32, and held with the activations.
    let (_, converted) = update(json!({"use_gradient_checkpointing": false, "weights_dtype": "bf16"}), &work());
    assert!(bytes(&converted, "activations") > bytes(&of_held, "activations"));
    let [_, mut fewer] = work();
    fewer.at_once = 1;
    assert!(update(json!({}), &[fewer]).0 < recomputed);
}

#[test]
fn asynchronous_rollouts_take_memory_in_all_phases() {
    let [rollout, update] = work();
    let critic = TextPass { tokens: Some(60), hidden_states: 2, grad: false, ..update.clone() };
    let needs = planned(json!({}), &input(&[TextPass { ahead: true, ..rollout }, update, critic])).unwrap();
    assert_eq!(bytes(&needs, "copy of the policy"), bytes(&needs, "trained parameters"));
    assert_eq!(bytes(&needs, "policy for checkpoints"), bytes(&needs, "trained parameters"));
    assert_eq!(needs.phases(), ["update", "checkpoint"]);
    let dim = open(&CausalLmOptions::default(), &context()).unwrap().network().config().dim;
    assert_eq!(find(&needs, "hidden states").unwrap().host, 8 * 60 * 2 * dim * 4);
}

#[test]
fn rejects_invalid_options_by_key() {
    let message = |options: Value, input: &PlanInput| planned(options, input).unwrap_err().chain();
    let videos = PlanInput { passes: Passes { forward: 8, pulled: 4, ..Passes::default() }, ..input(&[]) };
    assert!(message(json!({}), &videos).contains("agentic_ppo"));
    let tokens = PlanInput { division: Division { token_ranks: 2, ..Division::default() }, ..input(&work()) };
    assert!(message(json!({}), &tokens).contains("`strategy.sequence_parallel_size`"));
    let named = PlanInput { network: Some("wan2_2-ti2v-5b".into()), ..input(&work()) };
    assert!(message(json!({}), &named).contains("model.model_path"));
    for (options, key) in [
        (json!({"weights_dtype": "int8"}), "model.weights_dtype"),
        (json!({"lora_target_modules": "nosuch"}), "model.lora_target_modules"),
        (json!({"model_path": "nowhere/model.gguf"}), "nowhere/model.gguf"),
    ] {
        let message = message(options, &input(&work()));
        assert!(message.contains(key), "{key}: {message}");
    }
}
