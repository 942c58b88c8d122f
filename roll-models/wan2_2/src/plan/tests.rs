#![allow(clippy::unwrap_used)]

use burn_tensor::DType;
use roll_backends::weights::HostStore;
use roll_backends::{Weight, WeightStore};
use roll_core::plan::{Division, MemoryItem, Needs, Passes, Speed, TextPass, Videos};
use roll_core::{BuildContext, Noise, Options, StateDict};
use roll_network::precision::{DeviceTraits, WeightsDType};
use roll_network::weights::from_host;

use super::*;
use crate::dit::{Dit, DitConfig};
use crate::eight_bits_tests;
use crate::layout::Machine;
use crate::options::{IdleExpert, Placement, TileSize, WanOptions};
use crate::vae::{DEFAULT_CHECKPOINTS, Tiling};

fn lora(rank: usize) -> Trainable {
    let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    Trainable::Lora { rank, alpha: rank as f64, targets }
}

fn input(network: &str) -> PlanInput {
    PlanInput {
        network: Some(network.into()),
        frames: 81,
        size: Some([480, 832]),
        memory: None,
        samples: 1,
        ranks: 1,
        passes: Passes { forward: 8, pulled: 4, ..Passes::default() },
        division: Division { all_ranks: true, overlap_comm: true, ..Division::default() },
        speed: Speed { flops: 4e14, link: 3e11, read: 3e9 },
    }
}

/// A plan with bf16 weights, f32 block inputs and whole frames.
fn plan(name: &str) -> Plan {
    let network = PublishedModel::ALL.iter().find(|n| n.name == name).unwrap();
    let options = WanOptions {
        weights_dtype: WeightsDType::Bf16,
        idle_expert: IdleExpert::Keep,
        vae_tile_size: TileSize::Whole,
        ..WanOptions::default()
    };
    let layout = Layout::of(&options, network.networks(), Machine::planned(&input(name))).unwrap();
    Plan::new(layout, input(name), lora(32), vec!["dit2".into()], 512).unwrap()
}

/// Shards weights, as ZeRO does at stage 3.
fn shard(plan: &mut Plan) {
    (plan.input.division.stage, plan.layout.placement) = (3, Placement::Sharded);
}

#[test]
fn the_start_of_training_takes_memory_if_the_kl_compares_with_it() {
    let memory = |of: &str, reference_is_start: bool, options: serde_json::Value| {
        let passes = Passes { forward: 8, pulled: 4, reference_is_start, ..Passes::default() };
        let input = PlanInput { passes, ..input(of) };
        let needed = needs(options.as_object().unwrap(), &input, &BuildContext::new("flex")).unwrap();
        needed.memory.iter().find(|item| item.name == "reference of the KL").map(|item| item.device)
    };
    let start = || serde_json::json!({"lora_checkpoint": "run"});
    let n = plan("wan2_2-i2v-a14b").trained_elements().unwrap();
    assert_eq!(memory("wan2_2-i2v-a14b", true, start()), Some(4 * n));
    assert_eq!(memory("wan2_2-i2v-a14b", false, start()), None);
    assert_eq!(memory("wan2_2-i2v-a14b", true, serde_json::json!({})), None);
}

fn bytes(plan: &Plan, name: &str) -> usize {
    plan.memory().unwrap().into_iter().filter(|i| i.name == name).map(|i| i.device + i.host).sum()
}

#[test]
fn published_models_have_their_published_sizes() {
    let billions = |name: &str| plan(name).layout.networks.dit_elements() as f64 / 1e9;
    assert!((14.0..14.6).contains(&billions("wan2_2-i2v-a14b")), "{}", billions("wan2_2-i2v-a14b"));
    assert!((1.3..1.5).contains(&billions("wan2_1-t2v-1_3b")));
    assert!((4.9..5.1).contains(&billions("wan2_2-ti2v-5b")));
    let vae = plan("wan2_2-i2v-a14b").layout.networks.vae_elements() as f64;
    assert!((126e6..128e6).contains(&vae), "{vae}");
    // 21 latent frames of 60 x 104, in patches of 2 x 2.
    assert_eq!(plan("wan2_2-i2v-a14b").tokens(), 21 * 30 * 52);
}

#[test]
fn pull_flops_follow_the_formula() {
    let mut plan = plan("wan2_2-i2v-a14b");
    plan.input.size = Some([480, 480]);
    let (tokens, text, dim, ffn, layers) = (18_900.0, 512.0, 5120.0, 13_824.0, 40.0);
    let linear = layers * (2.0 * tokens * (6.0 * dim * dim + 2.0 * dim * ffn) + 4.0 * text * dim * dim);
    let attention = layers * 4.0 * tokens * (tokens + text) * dim;
    let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-12, "{found} {expected}");
    near(plan.forward_flops(), linear + attention);
    // Twice the forward pass and one and a half attentions, 1.96 PFLOP.
    near(plan.pull_flops(), 2.0 * plan.forward_flops() + 1.5 * attention);
    assert!((1.95e15..1.97e15).contains(&plan.pull_flops()), "{}", plan.pull_flops());
    plan.trainable = Trainable::Full;
    near(plan.pull_flops(), linear + attention + 2.0 * linear + 2.5 * attention);
    let phases = plan.time();
    let pull = phases.iter().find(|phase| phase.name == "time/pull").unwrap();
    near(pull.flops, 4.0 * plan.pull_flops());
}

#[test]
fn trained_elements_equal_those_of_the_model() {
    let mut plan = plan("wan2_1-t2v-1_3b");
    plan.layout.networks.dit = DitConfig { dim: 64, ffn_dim: 128, layers: 3, heads: 2, ..plan.layout.networks.dit };
    let device = roll_backends::device("flex").unwrap();
    let zeros = |(name, shape): (String, Vec<usize>)| (name, roll_core::Tensor::zeros(shape));
    let state: StateDict = plan.layout.networks.dit.weights().into_iter().map(zeros).collect();
    assert_eq!(plan.layout.networks.dit_elements(), state.values().map(|t| t.len()).sum::<usize>());
    let mut dit = Dit::new(&state, Some(2), burn_tensor::DType::F32, &device).unwrap();
    for trainable in [lora(4), Trainable::Full] {
        dit.add_trainable(&trainable, &Noise::new(0), &state).unwrap();
        plan.trainable = trainable;
        let trained: usize = dit.parameters().unwrap().specs().iter().map(|s| s.len()).sum();
        assert_eq!(plan.trained_elements().unwrap(), trained);
    }
}

#[test]
fn weights_in_host_memory_take_the_planned_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let file = eight_bits_tests::wide_file(dir.path());
    let device = roll_backends::device("flex").unwrap();
    let mut plan = plan("wan2_2-i2v-a14b");
    (plan.layout.networks.dit, plan.layout.placement) = (eight_bits_tests::wide(), Placement::Host);
    for dtype in [WeightsDType::F32, WeightsDType::Bf16, WeightsDType::Int8, WeightsDType::Fp8] {
        let storage = dtype.storage(DType::F32, &[], DeviceTraits::of(&device)).unwrap();
        let store = from_host(&file, storage, &device).unwrap();
        let [small, host] = store.bytes();
        let segment = store.segment("blocks.0.").unwrap();
        let large = |weight: &Weight| weight.size() >= HostStore::SMALL;
        let scales = |weight: &Weight| weight.scaled().map_or(0, |matrix| 4 * matrix.shape()[0]);
        let block: usize = segment.values().filter(|w| large(w)).map(|w| w.size() - scales(w)).sum();
        (plan.layout.storage, plan.layout.eight_bits) = (storage, dtype.eight_bits());
        let item = plan.memory().unwrap().into_iter().find(|item| item.name == "transformer weights").unwrap();
        assert_eq!([item.device, item.host], [2 * block + 2 * small, 2 * host], "{dtype:?}");
    }
}

/// The configuration of "A card of 24 GB" in docs/src/real-model.md.
#[test]
fn a14b_in_eight_bits_fits_24_gb_and_64_gb_of_host_memory() {
    let base = input("wan2_2-i2v-a14b");
    let input = PlanInput {
        size: Some([480, 480]),
        memory: Some(24_000_000_000),
        division: Division { state_on_gpu: 1 << 30, ..base.division },
        ..base
    };
    for weights_dtype in ["int8", "fp8"] {
        let planned = |weight_store: &str| {
            let options = serde_json::json!({
                "weights_dtype": weights_dtype,
                "weight_store": weight_store,
                "use_gradient_checkpointing_offload": true,
                "vae_dtype": "bf16",
            });
            needs(options.as_object().unwrap(), &input, &BuildContext::new("flex")).unwrap()
        };
        let host = planned("host");
        let gigabytes =
            [host.peak(|item| item.device).0, host.peak(|item| item.host).0].map(|bytes| bytes as f64 / 1e9);
        assert!(gigabytes[0] < 24.0 && gigabytes[1] < 60.0, "{weights_dtype}: {gigabytes:?}");
        let weights = item(&host, "transformer weights");
        assert!(weights.device < 800_000_000 && weights.host < 29_100_000_000, "{weights:?}");
        assert!(planned("auto").hints.iter().any(|hint| hint.contains("weight_store=host")));
    }
}

#[test]
fn each_zero_stage_shards_one_more_item() {
    let mut plan = plan("wan2_2-i2v-a14b");
    plan.input.ranks = 8;
    let mut at = |stage: u8| {
        plan.input.division.stage = stage;
        if stage == 3 {
            shard(&mut plan);
        }
        ["optimizer state", "sums of gradients", "transformer weights", "trained parameters"].map(|i| bytes(&plan, i))
    };
    let [zero, one, two, three] = [at(0), at(1), at(2), at(3)];
    let eighth = |a: usize, b: usize| a.abs_diff(b.div_ceil(8)) <= 8;
    assert!(eighth(one[0], zero[0]) && one[1..] == zero[1..]);
    assert!(eighth(two[1], zero[1]) && two[2..] == zero[2..]);
    // Two blocks of one expert are gathered.
    assert!(three[2] > zero[2] / 8 && three[2] < zero[2] / 8 + zero[2] / 38);
    assert_eq!(three[3], zero[3]);
}

#[test]
fn optimizer_state_is_on_the_gpu_up_to_the_limit() {
    let mut plan = plan("wan2_2-i2v-a14b");
    let n = plan.trained_elements().unwrap();
    let device_and_host = |plan: &Plan| {
        let state = plan.memory().unwrap().into_iter().find(|item| item.name == "optimizer state").unwrap();
        [state.device, state.host]
    };
    for (memory, most, expected) in
        [(None, n, [0, 8 * n]), (Some(80 << 30), n, [8 * n, 0]), (Some(80 << 30), n - 1, [0, 8 * n])]
    {
        (plan.input.memory, plan.input.division.state_on_gpu) = (memory, most);
        assert_eq!(device_and_host(&plan), expected);
        plan.input.division.copies_parameters = true;
        assert_eq!(bytes(&plan, "copy of the parameters"), expected[1] / 2);
    }
}

#[test]
fn sharded_optimizer_state_is_on_the_gpu_and_sums_of_gradients_on_the_host() {
    let mut plan = plan("wan2_2-i2v-a14b");
    let n = plan.trained_elements().unwrap();
    (plan.input.memory, plan.input.ranks) = (Some(80 << 30), 4);
    plan.input.division = Division { stage: 2, state_on_gpu: n / 4, ..plan.input.division };
    let device_and_host = |name: &str| {
        let item = plan.memory().unwrap().into_iter().find(|item| item.name == name).unwrap();
        [item.device, item.host]
    };
    assert_eq!(n % 4, 0);
    assert_eq!(device_and_host("optimizer state"), [8 * n / 4, 0]);
    assert_eq!(device_and_host("sums of gradients"), [0, 4 * n / 4]);
}

#[test]
fn sharded_tokens_shard_block_inputs_and_time_and_cost_exchanges() {
    let alone = plan("wan2_2-i2v-a14b");
    let mut plan = alone.clone();
    (plan.input.ranks, plan.input.division.token_ranks) = (8, 4);
    assert_eq!(plan.own_tokens(), alone.tokens() / 4);
    assert_eq!(4 * bytes(&plan, "block inputs"), bytes(&alone, "block inputs"));
    assert_eq!(4 * plan.block_pullback(), alone.block_pullback());
    assert_eq!(bytes(&plan, "transformer weights"), bytes(&alone, "transformer weights"));
    // Keys and values of the text are computed on every rank.
    let quarter = alone.forward_flops() / 4.0;
    assert!((1.0..1.01).contains(&(plan.forward_flops() / quarter)));
    let phase = |plan: &Plan, name: &str| plan.time().into_iter().find(|phase| phase.name == name).unwrap();
    let [rollout, pull] = ["time/rollout", "time/pull"].map(|name| phase(&plan, name));
    // Three quarters of q, k, v and the result, in f32, of every layer and pass; twice in a pull.
    let dit = &plan.layout.networks.dit;
    let exchanged = 0.75 * (4 * 4 * plan.own_tokens() * dit.dim * dit.layers) as f64;
    assert_eq!((rollout.moved, pull.moved), (8.0 * exchanged, 2.0 * 4.0 * exchanged));
    assert!(rollout.seconds > rollout.flops / plan.input.speed.flops);
    // A video is decoded by every rank of a group.
    assert_eq!(phase(&plan, "time/decode"), phase(&alone, "time/decode"));
    assert_eq!(phase(&alone, "time/pull").moved, 0.0);
}

#[test]
fn token_groups_must_divide_tokens_heads_and_ranks() {
    let mut plan = plan("wan2_2-i2v-a14b");
    plan.input.ranks = 8;
    let possible = |plan: &Plan| (1..=9).filter(|n| plan.can_shard_tokens(*n)).collect::<Vec<_>>();
    // 32,760 tokens, 40 heads.
    assert_eq!(possible(&plan), [1, 2, 4, 8]);
    plan.input.division.stage = 3;
    assert_eq!(possible(&plan), [1, 8]);
}

#[test]
fn trained_weights_are_sharded_at_stage_3() {
    let mut plan = plan("wan2_2-ti2v-5b");
    shard(&mut plan);
    (plan.input.ranks, plan.trainable) = (8, Trainable::Full);
    let (n, block) = (plan.layout.networks.dit_elements(), plan.layout.networks.block_elements());
    // A block is computed with, and the next on its way.
    assert_eq!(bytes(&plan, "trained parameters"), 4 * (n.div_ceil(8) + 2 * block));
    assert_eq!(bytes(&plan, "transformer weights"), (2 * n).div_ceil(8) + 2 * 2 * block);
    assert_eq!(bytes(&plan, "optimizer state"), 8 * n.div_ceil(8));
    plan.input.division.overlap_comm = false;
    assert_eq!(bytes(&plan, "trained parameters"), 4 * (n.div_ceil(8) + block));
    plan.input.ranks = 1;
    assert_eq!(bytes(&plan, "trained parameters"), 4 * n);
}

#[test]
fn streamed_weights_and_tiles_fit_a14b_into_24_gb() {
    let whole = plan("wan2_2-i2v-a14b");
    let mut small = whole.clone();
    small.layout.placement = Placement::Streamed;
    small.video.tiling = Some(Tiling::default());
    small.layout.offload_inputs = true;
    let device = |plan: &Plan| plan.memory().unwrap().iter().map(|i| i.device).sum::<usize>() as f64 / 1e9;
    assert!(device(&whole) > 80.0 && device(&small) < 24.0, "{} {}", device(&whole), device(&small));
}

#[test]
fn formulas_agree_with_measurements_at_small_scale() {
    let near = |formula: usize, mib: f64| (formula as f64 / (mib * 1048576.0) - 1.0).abs() < 0.1;
    // The example dit_memory of commit ac7d28a: 4096 tokens of width 512, 208 MiB beyond the weights.
    let mut plan = plan("wan2_1-t2v-1_3b");
    plan.layout.networks.dit = DitConfig { dim: 512, ffn_dim: 2048, layers: 8, heads: 4, ..plan.layout.networks.dit };
    (plan.input.frames, plan.input.size) = (13, Some([512, 512]));
    assert_eq!(plan.tokens(), 4096);
    assert!(near(plan.block_pullback(), 208.0));
    // The example vae_memory of commit ac7d28a at 128 x 128: 1475 and 1833 MiB with 17 and 65 frames, weights and
    // process in it.
    for (frames, peak) in [(17, 1475.0), (65, 1833.0)] {
        (plan.input.frames, plan.input.size) = (frames, Some([128, 128]));
        assert!(
            near(
                plan.decoder_pullback(DEFAULT_CHECKPOINTS) + 4 * plan.layout.networks.vae_elements() + (60 << 20),
                peak
            ),
            "{frames}"
        );
    }
}

fn needed(options: serde_json::Value, memory: Option<u64>, network: &str) -> Needs {
    needed_for(options, memory, network, 81, [480, 480])
}

fn needed_for(
    options: serde_json::Value,
    memory: Option<u64>,
    network: &str,
    frames: usize,
    size: [usize; 2],
) -> Needs {
    let speed = Speed { flops: 400e12, link: 50e9, read: 3e9 };
    let input = PlanInput { frames, size: Some(size), memory, division: Division::default(), speed, ..input(network) };
    let context = BuildContext::new("flex");
    needs(options.as_object().unwrap(), &input, &context).unwrap()
}

#[test]
fn rejects_algorithms_for_language_models() {
    let passes = Passes { texts: vec![TextPass::default()], ..Passes::default() };
    let input = PlanInput { passes, ..input("wan2_2-ti2v-5b") };
    let context = BuildContext::new("flex");
    let message = needs(&Options::new(), &input, &context).unwrap_err().to_string();
    assert!(message.contains("model.name") && message.contains("causal_lm"), "{message}");
}

fn item<'a>(needs: &'a Needs, name: &str) -> &'a MemoryItem {
    needs.memory.iter().find(|item| item.name == name).unwrap()
}

#[test]
fn weights_are_counted_in_their_dtype_on_the_device() {
    let weights = |options, memory| {
        let needs = needed(options, memory, "wan2_2-ti2v-5b");
        (item(&needs, "transformer weights").device as f64 / 5e9).round()
    };
    assert_eq!(weights(serde_json::json!({}), Some(80_000_000_000)), 2.0);
    assert_eq!(weights(serde_json::json!({}), None), 4.0);
    assert_eq!(weights(serde_json::json!({"weights_dtype": "f32"}), Some(80_000_000_000)), 4.0);
    assert_eq!(weights(serde_json::json!({"weights_dtype": "bf16"}), None), 2.0);
    for eight in ["int8", "fp8"] {
        assert_eq!(weights(serde_json::json!({"weights_dtype": eight}), Some(80_000_000_000)), 1.0);
    }
    let fp8 = serde_json::json!({"weights_dtype": "fp8", "products": "fp8"});
    assert_eq!(weights(fp8, Some(80_000_000_000)), 1.0);
}

#[test]
fn idle_expert_tiles_and_block_inputs_follow_the_memory() {
    let options = serde_json::json!({"vae_dtype": "f32"});
    let on = |gigabytes: u64| needed(options.clone(), Some(gigabytes * 1_000_000_000), "wan2_2-i2v-a14b");
    let one = |needs: &Needs| item(needs, "transformer weights").device as f64 / 28.6e9;
    let (large, small) = (on(141), on(80));
    assert!((1.9..2.1).contains(&one(&large)) && item(&large, "transformer weights").host == 0);
    assert!((0.9..1.1).contains(&one(&small)) && item(&small, "transformer weights").host > 57_000_000_000);
    let decoder = |needs: &Needs| item(needs, "decoder and its pullback").formula.clone();
    assert!(decoder(&small).contains("tiles of 34 x 34"), "{}", decoder(&small));
    // All chunks but the last have a checkpoint.
    let plenty = decoder(&on(400));
    assert!(plenty.contains("frames whole") && plenty.starts_with("20 checkpoints"), "{plenty}");
    let chosen = serde_json::json!({"vae_checkpoints": 7});
    let chosen = decoder(&needed(chosen, Some(400_000_000_000), "wan2_2-i2v-a14b"));
    assert!(chosen.starts_with("7 checkpoints"), "{chosen}");
    let kept = serde_json::json!({"keep_attention": true});
    let kept = needed(kept, Some(400_000_000_000), "wan2_2-i2v-a14b");
    assert_eq!(item(&kept, "results of attention").device, 4 * 40 * 18_900 * (2 * 5120 + 4 * 40));
    // bf16: two bytes per element.
    assert_eq!(item(&large, "block inputs").device, 2 * 18_900 * 5120 * 42 * 4);
    assert!(small.time.iter().any(|phase| phase.name == "change of experts" && phase.seconds > 1.0));
    assert!(!small.hints.iter().any(|hint| hint.contains("vae_tile_size")), "{:?}", small.hints);
    let options = serde_json::json!({"vae_dtype": "f32", "vae_tile_size": [64, 64], "vae_tile_stride": [48, 48]});
    let large = needed(options, Some(80_000_000_000), "wan2_2-i2v-a14b");
    assert!(large.hints.iter().any(|hint| hint.contains("vae_tile_size=[34,34]")), "{:?}", large.hints);
}

#[test]
fn experts_with_a_merged_lora_are_merged_once_and_wait_in_host_memory() {
    // Two experts of 57 GB in the dtype of their files: read again when their turn comes, unless that merges again.
    let weights = |mut options: serde_json::Value| {
        options["weights_dtype"] = "f32".into();
        let needs = needed(options, Some(80_000_000_000), "wan2_2-i2v-a14b");
        let seconds = needs.time.iter().find(|phase| phase.name == "change of experts").unwrap().seconds;
        (item(&needs, "transformer weights").host, seconds)
    };
    let (plain, merged) = (weights(serde_json::json!({})), weights(serde_json::json!({"base_lora": "high,low"})));
    assert_eq!(plain.0, 0);
    assert!(merged.0 > 114_000_000_000 && merged.1 < plain.1, "{merged:?}, without a LoRA {plain:?}");
    let dropped = weights(serde_json::json!({"base_lora": "high,low", "idle_expert": "drop"}));
    assert_eq!(dropped.0, 0);
}

#[test]
fn the_decoder_is_in_bf16_on_a_gpu_unless_asked_otherwise() {
    let decoder = |vae_dtype: &str, memory| {
        let needs = needed(serde_json::json!({"vae_dtype": vae_dtype}), memory, "wan2_2-i2v-a14b");
        item(&needs, "decoder and its pullback").device
    };
    let gpu = ["auto", "bf16", "f32"].map(|dtype| decoder(dtype, Some(400_000_000_000)));
    assert!(gpu[0] == gpu[1] && gpu[0] < gpu[2], "{gpu:?}");
    assert_eq!(decoder("auto", None), decoder("f32", None));
}

#[test]
fn the_decoder_takes_half_in_bf16_and_its_time_grows_with_the_overlap_of_tiles() {
    let mut plan = plan("wan2_2-i2v-a14b");
    let whole = plan.clone();
    let decoder = |plan: &Plan| plan.decoder_pullback(DEFAULT_CHECKPOINTS);
    plan.layout.decoder_dtype = DType::BF16;
    assert!((2 * decoder(&plan)).abs_diff(decoder(&whole)) < 10);
    // Checkpoints on a GPU may lie in host memory; the CPU has no other.
    (plan.layout.decoder_dtype, plan.layout.offload_inputs) = (DType::F32, true);
    assert_eq!(decoder(&plan), decoder(&whole));
    plan.input.memory = Some(80 << 30);
    assert!(decoder(&plan) < decoder(&whole));
    let phase = |plan: &Plan, name: &str| plan.time().into_iter().find(|phase| phase.name == name).unwrap();
    let decode = phase(&plan, "time/decode");
    assert!(decode.seconds > 4.0 * decode.flops / plan.input.speed.flops, "a GPU decodes at a fraction of its rate");
    plan.video.tiling = Some(Tiling::default());
    let overlap = phase(&plan, "time/decode").flops / decode.flops;
    assert!((2.0..4.0).contains(&overlap), "{overlap}");
}

#[test]
fn experts_take_turns_in_each_sample_or_for_all_rollouts_of_a_step() {
    let moved = |samples, videos: Option<Videos>, trained: &str| {
        let mut plan = plan("wan2_2-i2v-a14b");
        plan.trained_experts = vec![trained.into()];
        (plan.layout.idle, plan.input.passes.videos, plan.input.samples) = (IdleExpert::Host, videos, samples);
        plan.time().into_iter().find(|phase| phase.name == "change of experts").unwrap().moved
    };
    let videos = Some(Videos { count: 8, at_once: 1 });
    let one = moved(1, None, "dit2");
    assert_eq!([moved(4, None, "dit2"), moved(4, None, "dit")], [one, 4.0 * one]);
    assert_eq!([moved(1, videos, "dit2"), moved(4, videos, "dit2")], [3.0 * one, 9.0 * one]);
}

#[test]
fn long_videos_fit_on_one_gpu_of_141_gb_with_inputs_in_host_memory() {
    const MEMORY: u64 = 141_000_000_000;
    let device = |needs: &Needs| needs.memory.iter().map(|item| item.device as u64).sum::<u64>();
    for (frames, size, tokens) in [(81, [720, 1280], 75_600), (161, [480, 832], 63_960)] {
        for weights_dtype in ["bf16", "int8"] {
            let options = |offload: bool| {
                let key = "use_gradient_checkpointing_offload";
                serde_json::json!({"weights_dtype": weights_dtype, key: offload})
            };
            let needs = needed_for(options(true), Some(MEMORY), "wan2_2-i2v-a14b", frames, size);
            assert!(device(&needs) < MEMORY, "{frames} frames, {weights_dtype}: {}", device(&needs));
            assert_eq!(needs.facts["tokens"], f64::from(tokens));
            let held = needed_for(options(false), Some(MEMORY), "wan2_2-i2v-a14b", frames, size);
            assert!(device(&held) > MEMORY, "{frames} frames, {weights_dtype}: {}", device(&held));
        }
        // The largest matrix of a pass: its elements are counted in 32 bits by some kernels.
        assert!(tokens as usize * 13_824 < 1 << 31);
    }
}

#[test]
fn attention_is_kept_where_it_fits_and_its_time_is_subtracted() {
    let on = |options: serde_json::Value, gigabytes: u64| {
        needed(options, Some(gigabytes * 1_000_000_000), "wan2_2-i2v-a14b")
    };
    let kept = |needs: &Needs| needs.memory.iter().any(|item| item.name == "results of attention");
    let offload = serde_json::json!({"use_gradient_checkpointing_offload": true});
    let [h200, h100, h100_offload] = [on(serde_json::json!({}), 141), on(serde_json::json!({}), 80), on(offload, 80)];
    assert_eq!([&h200, &h100, &h100_offload].map(kept), [true, false, true]);
    for (needs, memory) in [(&h200, 141e9), (&h100_offload, 80e9)] {
        assert!((needs.peak(|item| item.device).0 as f64) < memory);
    }
    // On the CPU, and where it is refused, it is off.
    assert!(!kept(&needed(serde_json::json!({}), None, "wan2_2-i2v-a14b")));
    let without = on(serde_json::json!({"keep_attention": false}), 141);
    assert!(!kept(&without));
    // One forward pass of self-attention per pulled pass: 4 tokens^2 dim layers.
    let pull = |needs: &Needs| needs.time.iter().find(|phase| phase.name == "time/pull").unwrap().flops;
    let saved = 4.0 * 4.0 * 18_900.0f64.powi(2) * (5120 * 40) as f64;
    assert!(((pull(&without) - pull(&h200)) / saved - 1.0).abs() < 1e-6);
}

#[test]
fn passes_that_fit_stay_on_the_device_with_offloading() {
    let inputs = |gigabytes: u64| {
        let options = serde_json::json!({
            "weights_dtype": "int8",
            "weight_store": "host",
            "use_gradient_checkpointing_offload": true,
            "keep_attention": false,
        });
        let needs = needed(options, Some(gigabytes * 1_000_000_000), "wan2_2-i2v-a14b");
        assert!(needs.peak(|item| item.device).0 as u64 <= gigabytes * 1_000_000_000);
        let item = item(&needs, "block inputs");
        (item.device, item.host)
    };
    let (pass, in_flight) = (2 * 18_900 * 5120 * 42, 2 * 4 * 18_900 * 5120);
    assert_eq!(inputs(16), (in_flight, 4 * pass));
    assert_eq!(inputs(24), (pass + in_flight, 3 * pass));
    assert_eq!(inputs(80), (4 * pass, 0));
}

#[test]
fn a_plan_refuses_and_counts_what_a_run_does() {
    let sharded = Division { stage: 3, placement: Some(roll_core::WeightPlacement::Sharded), ..Division::default() };
    let input = PlanInput { division: sharded, ..input("wan2_2-i2v-a14b") };
    let options = serde_json::json!({"weights_dtype": "int8"});
    let error = needs(options.as_object().unwrap(), &input, &BuildContext::new("flex")).unwrap_err().to_string();
    assert!(error.contains("`model.weights_dtype`") && error.contains("not sharded"), "{error}");
    // Checkpoints that the options name, on the CPU and in host memory.
    let chosen = |mut options: serde_json::Value, memory, name: &str| {
        options["vae_checkpoints"] = 7.into();
        item(&needed(options, memory, "wan2_2-i2v-a14b"), name).formula.clone()
    };
    let on_cpu = chosen(serde_json::json!({}), None, "decoder and its pullback");
    assert!(on_cpu.starts_with("7 checkpoints"), "{on_cpu}");
    let offload = serde_json::json!({"use_gradient_checkpointing_offload": true});
    let on_host = chosen(offload, Some(80_000_000_000), "decoder's feature caches");
    assert!(on_host.starts_with("7 checkpoints") && !on_host.contains("more if memory allows"), "{on_host}");
}
