//! The plan of a network against the bytes of the open one, and where its weights are.

use roll_backends::Weight;
use roll_core::plan::{PlanInput, Speed};
use roll_core::{BuildContext, Grad, PlannedReads, Positions, Tensor, VisionLanguageModel};
use roll_network::precision::WeightsDType;

use super::fixture::Fixture;
use crate::plan::needs;
use crate::{QwenVlOptions, WeightLocation};

fn input(memory: Option<u64>) -> PlanInput {
    PlanInput {
        network: None,
        frames: 5,
        size: None,
        memory,
        samples: 1,
        ranks: 1,
        passes: Default::default(),
        division: Default::default(),
        speed: Speed { flops: 1e9, link: 1.0, read: 1.0 },
    }
}

fn reads(fixture: &Fixture, count: [usize; 2]) -> PlannedReads {
    let model = fixture.open("flex", "f32");
    let text = fixture.texts("video", &model).remove(0);
    let media = text.media.iter().map(|medium| medium.pixels.shape().try_into().unwrap()).collect();
    PlannedReads { tokens: text.tokens.len(), media, count }
}

#[test]
fn planned_weights_are_those_of_the_open_network() {
    for fixture in Fixture::all() {
        let reads = reads(&fixture, [1, 0]);
        for dtype in [WeightsDType::F32, WeightsDType::Bf16, WeightsDType::Int8] {
            let options = QwenVlOptions { weights_dtype: dtype, ..fixture.options("f32") };
            let context = BuildContext { headers_only: true, ..BuildContext::new("flex") };
            let planned = needs("reward.model", &options, &reads, &input(None), &context).unwrap();
            let model = crate::open("reward.model", &options, &BuildContext::new("flex")).unwrap();
            let tower: usize = model.tower.segment("").unwrap().values().map(Weight::size).sum();
            assert_eq!(planned.memory[0].device, tower + model.language.frozen_bytes().unwrap(), "{dtype:?}");
            assert_eq!(planned.memory[0].host, 0);
        }
    }
}

#[test]
fn a_gradient_costs_block_inputs_and_a_second_pass() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let context = BuildContext::new("flex");
    let of = |count| {
        needs("reward.model", &fixture.options("f32"), &reads(&fixture, count), &input(Some(1 << 30)), &context)
            .unwrap()
    };
    let (without, with) = (of([1, 0]), of([0, 1]));
    assert!(without.memory.iter().all(|item| item.name != "block inputs"));
    assert!(with.memory.iter().any(|item| item.name == "block inputs" && item.device > 0));
    assert_eq!((without.time.len(), with.time.len()), (1, 2));
    // Recomputation, and one product for each weight.
    assert!(with.time[1].flops > 1.9 * with.time[0].flops, "{:?}", with.time);
    assert!((with.time[0].seconds - with.time[0].flops / 1e9).abs() < 1e-9);
}

#[test]
fn weights_in_host_memory_give_the_same_states_and_gradients() {
    for fixture in Fixture::all() {
        let read = |weight_store| {
            let options = QwenVlOptions { weight_store, ..fixture.options("f32") };
            let mut model = crate::open("reward.model", &options, &BuildContext::new("flex")).unwrap();
            let text = fixture.texts("video", &model).remove(0);
            let wanted = [text.tokens.len() - 1];
            let (states, pullback) =
                model.read(&text.tokens, &text.media, Positions::Multimodal, &wanted, Grad::Record).unwrap();
            let d = Tensor::full(states.shape(), 0.5);
            (states.to_f32_vec(), pullback.unwrap().pull(&d).unwrap().to_f32_vec())
        };
        assert_eq!(read(WeightLocation::Host), read(WeightLocation::Resident));
    }
}

#[test]
fn a_special_token_is_the_next_id_if_the_embedding_has_a_row_for_it() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let mut model = fixture.open("flex", "f32");
    assert!(model.add_special_token("<|Reward|>").is_err(), "without a tokenizer");
    let rows = model.facts().vocabulary;
    let tokenizer = |count: usize| {
        let vocabulary: std::collections::BTreeMap<String, usize> = (0..count).map(|i| (format!("t{i}"), i)).collect();
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": null, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        });
        roll_causal_lm::Tokenizer::parse(json.to_string().as_bytes()).unwrap()
    };
    model.tokenizer = Some(tokenizer(rows - 1));
    assert_eq!(model.add_special_token("<|Reward|>").unwrap() as usize, rows - 1);
    assert_eq!(model.tokenize("<|Reward|>").unwrap(), [rows as u32 - 1]);
    model.tokenizer = Some(tokenizer(rows));
    assert!(model.add_special_token("<|Reward|>").unwrap_err().to_string().contains(&rows.to_string()));
}
