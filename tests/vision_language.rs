//! Rewards that see, with files of the published sizes: the costs of their recipes by `roll plan` and `roll check`.

use std::collections::BTreeMap;

use roll_qwen_vl::QwenVlConfig;
use serde_json::{Value, json};

use crate::program::root;
use crate::recipes::{official_world, recipe, write_hole};
use crate::world::World;

/// Ids of the words of Qwen2's tokenizer; special tokens follow.
const WORDS: usize = 151_643;
/// The special tokens of Qwen2-VL, from the id [`WORDS`] on.
const SPECIAL: [&str; 14] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
];
/// The reward tokens of VideoReward.
const REWARD_TOKENS: [&str; 3] = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"];
/// Rank of VideoReward's LoRA.
const RANK: usize = 64;

/// Sizes of a language model of Qwen2-VL.
struct Language {
    width: usize,
    heads: [usize; 2],
    ffn_dim: usize,
    rows: usize,
    tied: bool,
}

const VIDEO_REWARD: Language = Language { width: 1536, heads: [12, 2], ffn_dim: 8960, rows: WORDS + 17, tied: true };
const HPSV3: Language = Language { width: 3584, heads: [28, 4], ffn_dim: 18944, rows: WORDS + 15, tied: false };

impl Language {
    /// The `config.json` of the base model, whose embedding is longer than that of the reward.
    fn config(&self) -> Value {
        json!({
            "model_type": "qwen2_vl", "vocab_size": 151_936, "hidden_size": self.width, "num_hidden_layers": 28,
            "num_attention_heads": self.heads[0], "num_key_value_heads": self.heads[1],
            "intermediate_size": self.ffn_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": self.tied, "max_position_embeddings": 32768,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_start_token_id": WORDS + 9, "vision_end_token_id": WORDS + 10,
            "image_token_id": WORDS + 12, "video_token_id": WORDS + 13,
            "vision_config": {
                "depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": self.width,
                "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3,
            },
        })
    }

    /// Names and shapes of the network's tensors, the output layer among them.
    fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        let config = QwenVlConfig::parse(self.config().to_string().as_bytes(), Some(self.rows)).unwrap();
        let mut tensors: BTreeMap<_, _> = config.vision.weights(self.width).into_iter().collect();
        tensors.extend(config.text.weights());
        tensors.insert("lm_head.weight".into(), vec![self.rows, self.width]);
        tensors
    }
}

/// The tensors of VideoReward under their published names: a LoRA on the linear layers of the language model, and a head.
fn video_reward() -> BTreeMap<String, Vec<usize>> {
    let mut wrapped = BTreeMap::new();
    for (name, shape) in VIDEO_REWARD.tensors() {
        let (layer, end) = name.rsplit_once('.').unwrap();
        match (layer.contains(".layers.") && layer.ends_with("_proj"), &shape[..]) {
            (true, [out, input]) => {
                wrapped.insert(format!("{layer}.lora_A.default.weight"), vec![RANK, *input]);
                wrapped.insert(format!("{layer}.lora_B.default.weight"), vec![*out, RANK]);
                wrapped.insert(format!("{layer}.base_layer.{end}"), shape);
            }
            (true, _) => _ = wrapped.insert(format!("{layer}.base_layer.{end}"), shape),
            (false, _) => _ = wrapped.insert(name, shape),
        }
    }
    wrapped.insert("rm_head.weight".into(), vec![1, VIDEO_REWARD.width]);
    wrapped.into_iter().map(|(name, shape)| (format!("base_model.model.{name}"), shape)).collect()
}

/// A tokenizer with a token per word, and the ids of Qwen2-VL's special tokens.
fn tokenizer(more: &[&str]) -> String {
    let words: BTreeMap<String, usize> = (0..WORDS).map(|i| (format!("w{i}"), i)).collect();
    let special = SPECIAL.iter().chain(more).enumerate().map(|(i, token)| {
        json!({
            "id": WORDS + i, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    });
    let json = json!({
        "version": "1.0", "added_tokens": special.collect::<Vec<_>>(), "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    });
    json.to_string()
}

fn write(world: &World, file: &str, text: &str) {
    let path = world.path(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// Stand-ins of the files of VideoReward and HPSv3 under the names that the recipes have. Weights are holes; the texts
/// have about as many tokens as the published ones: 900 and 520 with a prompt.
pub fn write_vision_rewards(world: &World) {
    const BF16: (&str, usize) = ("BF16", 2);
    write_hole(world.path("VideoReward/checkpoint-11352/model.safetensors"), &video_reward(), BF16);
    write(world, "VideoReward/checkpoint-11352/tokenizer/tokenizer.json", &tokenizer(&REWARD_TOKENS));
    let config = json!({
        "data_config": {"max_frame_pixels": 200_704, "num_frames": null, "fps": 2.0},
        "peft_lora_config": {"lora_r": RANK, "lora_alpha": 2 * RANK, "use_rslora": false},
        "inference_config": {},
    });
    write(world, "VideoReward/model_config.json", &config.to_string());
    write(world, "Qwen2-VL-2B-Instruct/config.json", &VIDEO_REWARD.config().to_string());
    let words = |count: usize| "word ".repeat(count);
    let [vq, mq, ta] = REWARD_TOKENS;
    let text = format!("{}{vq} {mq} {{text_prompt}} {ta}\n", words(770));
    write(world, "VideoAlign/prompt_template.py", &constant("DETAILED_PROMPT_WITH_SPECIAL_TOKEN", &text));

    let mut hpsv3 = HPSV3.tensors();
    let mut input = HPSV3.width;
    for (layer, outputs) in [("0", 1024), ("3", 16), ("5", 2)] {
        hpsv3.insert(format!("rm_head.{layer}.weight"), vec![outputs, input]);
        hpsv3.insert(format!("rm_head.{layer}.bias"), vec![outputs]);
        input = outputs;
    }
    write_hole(world.path("HPSv3/HPSv3.safetensors"), &hpsv3, BF16);
    write(world, "Qwen2-VL-7B-Instruct/config.json", &HPSV3.config().to_string());
    write(world, "Qwen2-VL-7B-Instruct/tokenizer.json", &tokenizer(&[]));
    let text = constant("INSTRUCTION", &format!("{}{{text_prompt}}\n", words(380)))
        + &constant("prompt_with_special_token", "\nRate it: <|Reward|>\n");
    write(world, "HPSv3/hpsv3/dataset/data_collator_qwen.py", &text);
}

/// A constant of a Python file.
fn constant(name: &str, text: &str) -> String {
    format!("{name} = \"\"\"{text}\"\"\"\n")
}

#[test]
fn the_stand_in_has_as_many_tensors_and_bytes_as_the_published_file() {
    let tensors = video_reward();
    assert_eq!(tensors.len(), 1123);
    let bytes: usize = tensors.values().map(|shape| 2 * shape.iter().product::<usize>()).sum();
    // The rest of its 5,031,072,529 bytes is the archive's index.
    assert!((5_030_000_000..5_031_072_529).contains(&bytes), "{bytes}");
}

/// GB of the device and of the host, seconds of a step, and lines of the memory, by `roll plan` with all files.
fn planned(world: &World, config: &str, machine: &str, more: &[&str]) -> ([f64; 3], Vec<(String, f64, f64)>) {
    let tokenizer = ["--set", "model.tokenizer_path=tiny/google/umt5-xxl"];
    let arguments = [&["plan", "-q", "--json", "--config", config, "--on", machine][..], &tokenizer, more].concat();
    let plan: Value = serde_json::from_str(&world.done(&arguments)).unwrap();
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap();
    let of = |item: &Value| {
        (item["name"].as_str().unwrap().to_string(), number(item, "device") / 1e9, number(item, "host") / 1e9)
    };
    let memory: Vec<_> = plan["memory"].as_array().unwrap().iter().map(of).collect();
    let seconds = plan["time"].as_array().unwrap().iter().map(|phase| number(phase, "seconds")).sum();
    let sums = [memory.iter().map(|item| item.1).sum(), memory.iter().map(|item| item.2).sum(), seconds];
    (sums, memory)
}

#[test]
fn recipes_with_videoalign_cost_what_the_page_says() {
    let world = official_world();
    write_vision_rewards(&world);
    let page = std::fs::read_to_string(root().join("docs/src/rewards.md")).unwrap();
    let section = page.split("\n### ").find(|part| part.starts_with("Recipes with VideoAlign")).unwrap();
    let mut columns = [const { Vec::new() }; 4];
    for (name, machine, steps) in [("videoalign-reward-fl", "1x80", 200.0), ("videoalign-nft", "8x80", 300.0)] {
        let ([device, host, seconds], memory) = planned(&world, &recipe(name), machine, &[]);
        let of_reward = memory.iter().filter(|(name, ..)| name.starts_with("videoalign: ")).map(|item| item.1);
        let cells = [
            format!("{device:.0} GB, {host:.0} GB"),
            format!("{:.1} GB", of_reward.sum::<f64>()),
            format!("{seconds:.0} s"),
            format!("{:.0} h", steps * seconds / 3600.0),
        ];
        columns.iter_mut().zip(cells).for_each(|(column, cell)| column.push(cell));
        let check = ["check", "--config", &recipe(name), "--on", machine, "--set"];
        let said = world.done(&[&check[..], &["model.tokenizer_path=tiny/google/umt5-xxl"]].concat());
        assert!(!said.contains("PROBLEM") && !said.contains("no effect"), "{name}: {said}");
        assert!(said.contains("videoalign"), "{said}");
    }
    let rows = columns.map(|row| format!("| {} |", row.join(" | ")));
    assert!(rows.iter().all(|row| section.contains(row)), "rewards.md: expected the cells {rows:#?}");
}
