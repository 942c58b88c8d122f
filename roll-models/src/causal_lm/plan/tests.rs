#![allow(clippy::unwrap_used)]

use std::path::Path;

use roll_core::Model;
use roll_core::plan::{CriticWork, MemoryItem, Passes, RolloutWork, Speed};
use serde_json::{Value, json};

use super::super::loading::open;
use super::*;
use crate::weights::gguf::tests::Writer;

/// Eight conversations of at most 128 tokens, in four groups.
fn work() -> LanguageWork {
    let rollout = RolloutWork {
        groups: 4,
        group_size: 2,
        shared_prompts: false,
        at_once: 256,
        new_tokens: 40,
        answers: 4,
        ahead: false,
    };
    LanguageWork {
        rollout: Some(rollout),
        sequence_length: Some(128),
        samples: 8,
        update: 8,
        micro_batch: 4,
        reference: false,
        critic: None,
    }
}

fn input(work: LanguageWork) -> PlanInput {
    PlanInput {
        network: None,
        frames: 1,
        size: None,
        memory: None,
        samples: 1,
        ranks: 1,
        passes: Passes { language: Some(work), ..Passes::default() },
        division: Division::default(),
        speed: Speed { flops: 1e12, link: 1e9, read: 1e9 },
    }
}

fn context() -> BuildContext {
    BuildContext::new("flex")
}

fn planned(options: Value, input: &PlanInput) -> Result<Needs> {
    needs(options.as_object().unwrap(), input, &context())
}

fn parsed(options: &Value) -> CausalLmOptions {
    parse_options("model", options.as_object().unwrap()).unwrap()
}

fn item<'a>(needs: &'a Needs, name: &str) -> &'a MemoryItem {
    let found = needs.memory.iter().find(|item| item.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {:?}", needs.memory))
}

fn bytes(needs: &Needs, name: &str) -> usize {
    item(needs, name).device + item(needs, name).host
}

fn zero(stage: u8, ranks: usize) -> PlanInput {
    let division = Division { all_ranks: true, stage, bucket: 1 << 24, ..Division::default() };
    PlanInput { ranks, division, ..input(work()) }
}

#[test]
fn the_built_in_model_is_counted_as_it_is_opened() {
    for options in [json!({"lora_rank": 0}), json!({"lora_rank": 4}), json!({"lora_target_modules": "q_proj"})] {
        let needs = planned(options.clone(), &input(work())).unwrap();
        let model = open(&parsed(&options), &context()).unwrap();
        assert_eq!(needs.facts["trained_parameters"], model.parameter_count() as f64, "{options}");
        assert_eq!(bytes(&needs, "trained parameters"), model.network().parameters().unwrap().bytes());
        assert_eq!(bytes(&needs, "frozen weights"), model.network().frozen_bytes().unwrap());
    }
}

#[test]
fn stage_3_on_two_ranks_halves_what_it_divides_and_nothing_else() {
    let of = |stage: u8, ranks: usize| {
        let needs = planned(json!({"lora_rank": 0}), &zero(stage, ranks)).unwrap();
        ["optimizer state", "sums of gradients", "trained parameters", "frozen weights"].map(|name| bytes(&needs, name))
    };
    let one = of(3, 1);
    let n = one[2] / 4;
    assert_eq!(one[..2], [8 * n, 4 * n]);
    assert_eq!(of(0, 2), one);
    assert_eq!(of(1, 2), [8 * n.div_ceil(2), one[1], one[2], one[3]]);
    for stage in [2, 3] {
        assert_eq!(of(stage, 2), [8 * n.div_ceil(2), 4 * n.div_ceil(2), one[2], one[3]]);
    }
    // A rank of two has half the conversations too.
    let keys = |ranks| bytes(&planned(json!({}), &zero(3, ranks)).unwrap(), "keys and values");
    assert_eq!(keys(1), 2 * keys(2));
}

#[test]
fn one_process_keeps_a_copy_of_the_parameters_where_it_updates_them() {
    let division = Division { copies_parameters: true, state_on_gpu: usize::MAX, ..Division::default() };
    let host = PlanInput { division, ..input(work()) };
    let needs = planned(json!({}), &host).unwrap();
    assert_eq!(item(&needs, "copy of the parameters").host, bytes(&needs, "trained parameters"));
    let gpu = planned(json!({}), &PlanInput { memory: Some(24_000_000_000), ..host }).unwrap();
    assert!(gpu.memory.iter().all(|item| item.name != "copy of the parameters"));
    assert_eq!(item(&gpu, "optimizer state").host, 0);
}

#[test]
fn keys_and_values_are_those_that_a_rollout_counts() {
    let config = open(&CausalLmOptions::default(), &context()).unwrap().network().config().clone();
    let counted = |rows| Rollout { rows, prompts: 8, prompt_tokens: 88, new_tokens: 40 }.bytes(&config, 4);
    let needs = planned(json!({}), &input(work())).unwrap();
    assert_eq!(item(&needs, "keys and values").device, counted(8).keys_values);
    let few = planned(json!({"rows_at_once": 3}), &input(work())).unwrap();
    assert_eq!(item(&few, "keys and values").device, counted(3).keys_values);
    // A pass that reads all prompts lets go of what the turn before left, layer by layer. Where few rows are written at
    // once, all of that is there until the last two prompts are read, and copies of five rows that gave up their slot.
    let of_token = 2 * config.kv_heads * config.head_dim * 4 * config.layers;
    assert!(needs.memory.iter().all(|item| item.name != "prompt caches"));
    assert_eq!(item(&few, "prompt caches").device, (6 * 88 + 5 * 128) * of_token);
    let mut once = work();
    once.rollout.as_mut().unwrap().answers = 1;
    once.rollout.as_mut().unwrap().shared_prompts = true;
    let once = planned(json!({}), &input(once)).unwrap();
    assert!(once.memory.iter().all(|item| item.name != "prompt caches"));
    let shared = Rollout { rows: 8, prompts: 4, prompt_tokens: 88, new_tokens: 40 }.bytes(&config, 4);
    assert_eq!(item(&once, "keys and values").device, shared.keys_values);
    // On a GPU in bf16.
    let gpu = planned(json!({}), &PlanInput { memory: Some(24_000_000_000), ..input(work()) }).unwrap();
    assert_eq!(2 * item(&gpu, "keys and values").device, counted(8).keys_values);
}

#[test]
fn a_rollout_of_64_times_2048_tokens_is_counted_for_its_last_turn() {
    let mut long = work();
    (long.sequence_length, long.samples, long.update) = (Some(2048), 64, 64);
    (long.rollout.as_mut().unwrap().groups, long.rollout.as_mut().unwrap().group_size) = (8, 8);
    let needs = planned(json!({}), &input(long)).unwrap();
    let config = open(&CausalLmOptions::default(), &context()).unwrap().network().config().clone();
    let counted = Rollout { rows: 64, prompts: 64, prompt_tokens: 2008, new_tokens: 40 }.bytes(&config, 4);
    assert_eq!(item(&needs, "keys and values").device, counted.keys_values);
    // Eight prompts of 2008 tokens are a pass.
    let of_token = 2 * config.kv_heads * config.head_dim * 4 * config.layers;
    assert_eq!(item(&needs, "prompt caches").device, 56 * 2008 * of_token);
    assert_eq!(needs.facts["tokens"], 2048.0);
}

/// A file with a model of the family Llama, whose matrices are in blocks (Q8_0).
fn quantised(path: &Path) -> usize {
    const U32: u32 = 4;
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut writer = Writer::default().value("general.architecture", 8, &text("llama"));
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
fn a_quantised_file_keeps_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let elements = quantised(&path);
    for rank in [0, 2] {
        let options = json!({"model_path": path, "lora_rank": rank});
        let needs = planned(options.clone(), &input(work())).unwrap();
        let model = open(&parsed(&options), &context()).unwrap();
        assert_eq!(bytes(&needs, "frozen weights"), model.network().frozen_bytes().unwrap());
        assert!(bytes(&needs, "frozen weights") < 2 * elements, "{}", item(&needs, "frozen weights").formula);
        assert_eq!(needs.facts["trained_parameters"], model.parameter_count() as f64);
    }
    let decoded = json!({"model_path": path, "weights_dtype": "f32"});
    let needs = planned(decoded.clone(), &input(work())).unwrap();
    assert_eq!(bytes(&needs, "frozen weights"), 4 * elements);
    assert_eq!(open(&parsed(&decoded), &context()).unwrap().network().frozen_bytes().unwrap(), 4 * elements);
    let gpu = PlanInput { memory: Some(24_000_000_000), ..input(work()) };
    assert_eq!(bytes(&planned(json!({"model_path": path}), &gpu).unwrap(), "frozen weights"), 2 * elements);
}

#[test]
fn a_directory_is_counted_as_its_files_store_it() {
    let dir = tempfile::tempdir().unwrap();
    super::super::write_built_in(dir.path()).unwrap();
    let built_in = planned(json!({}), &input(work())).unwrap();
    let same = planned(json!({"model_path": dir.path()}), &input(work())).unwrap();
    assert_eq!(bytes(&same, "frozen weights"), bytes(&built_in, "frozen weights"));
    assert_eq!(same.facts["trained_parameters"], built_in.facts["trained_parameters"]);
    let [f32s, bf16s] = ["f32", "bf16"].map(|dtype| {
        let options = json!({"model_path": dir.path(), "weights_dtype": dtype});
        bytes(&planned(options, &input(work())).unwrap(), "frozen weights")
    });
    assert_eq!(f32s, 2 * bf16s);
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let told = planned(json!({"model_path": dir.path()}), &input(work())).unwrap_err().chain();
    assert!(told.contains("model.safetensors"), "{told}");
}

#[test]
fn activations_follow_what_a_pass_keeps() {
    // Small adapters, so that the update's largest moment is the pull of the last block, not that of the first.
    let of = |mut options: Value| {
        options["lora_rank"] = json!(1);
        planned(options, &input(work())).unwrap()
    };
    let update = |needs: &Needs| needs.held_in(Some("update"), |item| item.device);
    let recomputed = of(json!({}));
    let held = of(json!({"use_gradient_checkpointing": false, "weights_dtype": "f32"}));
    assert!(update(&held) > update(&recomputed));
    assert!(held.memory.iter().any(|item| item.name == "activations"));
    let offloaded = of(json!({"use_gradient_checkpointing_offload": true}));
    assert!(update(&offloaded) < update(&recomputed) && item(&offloaded, "block inputs").host > 0);
    // Weights in bf16 are widened for products in f32, and held so with the activations.
    let widened = of(json!({"use_gradient_checkpointing": false, "weights_dtype": "bf16"}));
    assert!(bytes(&widened, "activations") > bytes(&held, "activations"));
    let mut fewer = work();
    fewer.micro_batch = 1;
    let fewer = planned(json!({"lora_rank": 1}), &input(fewer)).unwrap();
    assert!(update(&fewer) < update(&recomputed));
    // An update that is shared by four ranks leaves two sequences for each.
    let inputs = |ranks| bytes(&planned(json!({}), &zero(2, ranks)).unwrap(), "block inputs");
    assert_eq!(inputs(1), 2 * inputs(4));
}

#[test]
fn the_peak_is_of_the_phase_that_holds_most() {
    let phase = |options: Value, work: LanguageWork| {
        let needs = planned(options, &input(work)).unwrap();
        needs.peak(|item| item.device + item.host).1.unwrap().to_string()
    };
    let mut many = work();
    (many.rollout.as_mut().unwrap().groups, many.micro_batch, many.sequence_length) = (400, 1, Some(1024));
    assert_eq!(phase(json!({}), many), "rollout");
    let mut wide = work();
    (wide.micro_batch, wide.sequence_length) = (8, Some(1024));
    assert_eq!(phase(json!({}), wide), "update");
    let mut short = work();
    (short.micro_batch, short.sequence_length, short.rollout) = (1, Some(2), None);
    short.update = 1;
    assert_eq!(phase(json!({"lora_rank": 0}), short), "checkpoint");
}

#[test]
fn a_rollout_beside_the_update_adds_to_it_and_has_a_policy_of_its_own() {
    let mut ahead = work();
    ahead.rollout.as_mut().unwrap().ahead = true;
    let needs = planned(json!({}), &input(ahead)).unwrap();
    assert_eq!(bytes(&needs, "copy of the policy"), bytes(&needs, "trained parameters"));
    assert!(item(&needs, "keys and values").phase.is_none() && !needs.phases().contains(&"rollout"));
}

#[test]
fn a_critic_keeps_the_features_of_every_token_that_it_values() {
    let with_critic = LanguageWork { critic: Some(CriticWork { tokens: 60 }), ..work() };
    let head = planned(json!({}), &input(with_critic)).unwrap();
    let dim = open(&CausalLmOptions::default(), &context()).unwrap().network().config().dim;
    assert_eq!(item(&head, "critic's features").host, 8 * 60 * 2 * dim * 4);
    assert_eq!(item(&head, "critic").host, 3 * 8 * (2 * dim + 1));
}

#[test]
fn texts_that_are_there_need_no_rollout() {
    let mut texts = work();
    (texts.rollout, texts.sequence_length) = (None, None);
    let needs = planned(json!({"max_length": 300}), &input(texts)).unwrap();
    assert_eq!(needs.facts["tokens"], 300.0);
    assert_eq!(needs.phases(), ["update", "checkpoint"]);
    assert!(needs.time.is_empty() && needs.hints.iter().any(|hint| hint.contains("algo.sequence_length")));
}

#[test]
fn what_a_run_refuses_is_refused_and_named() {
    let told = |options: Value, input: &PlanInput| planned(options, input).unwrap_err().chain();
    let videos = PlanInput { passes: Passes { forward: 8, pulled: 4, ..Passes::default() }, ..input(work()) };
    let refused = told(json!({}), &videos);
    assert!(refused.contains("`algo.name`") && refused.contains("agentic_ppo"), "{refused}");
    let tokens = PlanInput { division: Division { token_ranks: 2, ..Division::default() }, ..input(work()) };
    assert!(told(json!({}), &tokens).contains("`strategy.sequence_parallel_size`"));
    let named = PlanInput { network: Some("wan2_2-ti2v-5b".into()), ..input(work()) };
    assert!(told(json!({}), &named).contains("model.model_path"));
    for (options, key) in [
        (json!({"weights_dtype": "int8"}), "model.weights_dtype"),
        (json!({"max_length": 0}), "model.max_length"),
        (json!({"rows_at_once": 0}), "model.rows_at_once"),
        (json!({"lora_alpha": 0.0}), "model.lora_alpha"),
        (json!({"lora_target_modules": "nosuch"}), "model.lora_target_modules"),
        (json!({"lora_rank": 100_000}), "model.lora_rank"),
        (json!({"lora_ranks": 4}), "model.lora_ranks"),
    ] {
        let refused = told(options, &input(work()));
        assert!(refused.contains(&format!("`{key}`")), "{key}: {refused}");
    }
    let mut texts = work();
    (texts.rollout, texts.samples) = (None, 5);
    let refused = told(json!({}), &PlanInput { passes: input(texts).passes, ..zero(1, 2) });
    assert!(refused.contains("`algo.batch_size`") && refused.contains("5 conversations"), "{refused}");
    let mut endless = work();
    endless.rollout.as_mut().unwrap().groups = usize::MAX;
    assert!(told(json!({}), &input(endless)).contains("16777216 conversations"));
    let missing = told(json!({"model_path": "nowhere/model.gguf"}), &input(work()));
    assert!(missing.contains("nowhere/model.gguf"), "{missing}");
}
