//! Names of tensors in LoRA files: each kind is read, or refused in the same words, by every command.

use std::collections::BTreeMap;

use roll_core::{Adapter, StateDict, Tensor};
use roll_network::weights::{Checkpoint, save_safetensors};
use roll_wan::init_tiny::WanKind;
use serde_json::json;

use super::{PROMPT, Tiny, generate, parameters, picture, velocity};
use crate::world::{SETTINGS, World, stderr_text};

/// The tensors under other names: `name` gets the name of a layer, and dotted names are those of Wan.
fn renamed(state: &StateDict, name: impl Fn(&str) -> String) -> StateDict {
    let rename = |(key, tensor): (&String, &Tensor)| {
        let (layer, end) = key.strip_prefix("diffusion_model.").unwrap().split_once(".lora_").unwrap();
        (format!("{}.lora_{end}", name(layer)), tensor.clone())
    };
    state.iter().map(rename).collect()
}

fn underscored(layer: &str) -> String {
    layer.replace('.', "_")
}

#[test]
fn every_kind_of_names_is_the_same_lora_to_every_command() {
    let tiny = Tiny::new(WanKind::I2v);
    let trained = tiny.trained("a", json!({"lora_rank": 2, "lora_target_modules": "q,ffn.2"}));
    // Without the header, which names the expert.
    let state = Checkpoint::open(tiny.path("a/adapter.safetensors")).unwrap().all().unwrap();
    let state: StateDict = state.into_iter().filter(|(key, _)| key.contains(".lora_")).collect();
    let save = |name: &str, state: &StateDict| save_safetensors(tiny.path(name), state, &BTreeMap::new()).unwrap();
    save("plain.safetensors", &state);
    let base = "tiny/low_noise_model/diffusion_pytorch_model.safetensors";
    let roll = |arguments: &[&str]| crate::program::done(tiny.dir.path(), arguments);
    let bytes = |name: &str| std::fs::read(tiny.path(name)).unwrap();
    let merged_on_read = |name: &str| {
        let mut model = tiny.open(json!({"base_lora": {"dit2": name}, "lora_rank": 2})).unwrap();
        velocity(&mut model, Adapter::Off)
    };
    roll(&["convert-lora", "plain.safetensors", "plain_converted.safetensors", "--to", "comfyui"]);
    roll(&["merge-lora", base, "plain.safetensors", "plain_merged.safetensors"]);
    let (converted, merged) = (bytes("plain_converted.safetensors"), bytes("plain_merged.safetensors"));
    let (plain, without) =
        (merged_on_read("plain.safetensors"), velocity(&mut tiny.open(json!({})).unwrap(), Adapter::Off));
    assert!(plain != without);

    type Name = fn(&str) -> String;
    let kinds: [(&str, Name); 14] = [
        ("official names", |layer| layer.into()),
        ("PEFT", |layer| format!("base_model.model.{layer}")),
        ("diffusers", |layer| {
            let names = [("self_attn.q", "attn1.to_q"), ("cross_attn.q", "attn2.to_q"), ("ffn.2", "ffn.net.2")];
            format!("transformer.{}", names.iter().fold(layer.to_string(), |name, (from, to)| name.replace(from, to)))
        }),
        ("diffusers' prefix", |layer| format!("transformer.{layer}")),
        ("DiffSynth", |layer| format!("pipe.dit.{layer}")),
        ("a whole checkpoint", |layer| format!("model.diffusion_model.{layer}")),
        ("kohya", |layer| format!("lora_unet_{}", underscored(layer))),
        ("VideoX-Fun", |layer| format!("lora_unet__{}", underscored(layer))),
        ("kohya, compiled", |layer| format!("lora_unet__orig_mod_{}", underscored(layer))),
        ("compiled", |layer| format!("diffusion_model._orig_mod.{layer}")),
        ("compiled and parallel", |layer| format!("module._orig_mod.diffusion_model.module.{layer}")),
        ("SimpleTuner", |layer| format!("transformer.base_model.model.{layer}")),
        ("FSDP and checkpointing in blocks", |layer| {
            let (block, rest) = layer.split_at("blocks.0".len());
            format!("_fsdp_wrapped_module.{block}._checkpoint_wrapped_module{rest}")
        }),
        ("musubi-tuner's converter", |layer| format!("diffusion_model.{}", layer.replace('_', "."))),
    ];
    for (number, (kind, name)) in kinds.into_iter().enumerate() {
        let file = format!("{number}.safetensors");
        save(&file, &renamed(&state, name));
        let [as_comfyui, into_base] = ["converted", "merged"].map(|end| format!("{number}_{end}.safetensors"));
        roll(&["convert-lora", &file, &as_comfyui, "--to", "comfyui"]);
        assert!(bytes(&as_comfyui) == converted, "{kind}: convert-lora");
        roll(&["merge-lora", base, &file, &into_base]);
        assert!(bytes(&into_base) == merged, "{kind}: merge-lora");
        let about = roll(&["inspect", &file]);
        assert!(about.contains("blocks.#.ffn.2 (2)") && !about.contains("Wan does not have"), "{kind}: {about}");
        // `roll run`, `check` and `generate` read adapters so.
        let started = tiny.open(json!({"lora_checkpoint": file})).unwrap();
        assert_eq!(parameters(&started), parameters(&trained), "{kind}: lora_checkpoint");
        assert!(merged_on_read(&file) == plain, "{kind}: base_lora");
    }

    // Both experts in one file, as ai-toolkit writes them, also from a compiled model.
    for (number, prefix) in ["diffusion_model.", "diffusion_model._orig_mod.", "module."].into_iter().enumerate() {
        let mut both = renamed(&state, |layer| format!("{prefix}transformer_2.{layer}"));
        let negative =
            |tensor: &Tensor| Tensor::new::<f32>(tensor.to_f32_vec().iter().map(|v| -v).collect(), tensor.shape());
        let high = state.iter().map(|(key, tensor)| (key.clone(), negative(tensor).unwrap())).collect();
        both.extend(renamed(&high, |layer| format!("{prefix}transformer_1.{layer}")));
        let mut ambiguous = both.clone();
        ambiguous.extend(renamed(&state, |layer| format!("{prefix}{layer}")));
        let file = format!("ambiguous{number}.safetensors");
        save(&file, &ambiguous);
        let error = tiny.open(json!({"base_lora": file})).err().unwrap();
        let error = roll_core::one_line(&error);
        assert!(error.contains("others with none of an expert"), "{prefix}: {error}");
        let file = format!("both{number}.safetensors");
        save(&file, &both);
        let out = format!("both{number}_converted");
        roll(&["convert-lora", &file, &format!("{out}.safetensors"), "--to", "comfyui"]);
        let low = Checkpoint::open(tiny.path(&format!("{out}_low_noise.safetensors"))).unwrap().all().unwrap();
        assert!(low.iter().all(|(key, tensor)| tensor.as_bytes() == state[key].as_bytes()) && low.len() == state.len());
        let high = Checkpoint::open(tiny.path(&format!("{out}_high_noise.safetensors"))).unwrap().all().unwrap();
        assert!(
            high.iter().all(|(key, tensor)| tensor.as_bytes() != state[key].as_bytes()) && high.len() == state.len()
        );
        let merged_low = format!("{out}_merged.safetensors");
        roll(&["merge-lora", base, &file, &merged_low, "--expert", "low"]);
        assert!(bytes(&merged_low) == merged, "{prefix}");
        let mut model = tiny.open(json!({"base_lora": file, "lora_rank": 2})).unwrap();
        assert!(velocity(&mut model, Adapter::Off) == plain, "{prefix}");
        let started = parameters(&tiny.open(json!({"lora_checkpoint": file})).unwrap());
        let low = |name: &str| name.starts_with("dit2.");
        assert_eq!(started.len(), 2 * parameters(&trained).len());
        assert!(parameters(&trained).iter().all(|(name, values)| low(name) && started[name] == *values), "{prefix}");
    }
}

#[test]
fn unknown_layers_are_refused_in_the_same_words_by_every_command() {
    let world = World::new(1);
    picture(&world, "0.png", 0.1);
    let state = |layers: &[&str]| -> StateDict {
        let parts = |layer: &&str| {
            [("lora_A", [2, 64]), ("lora_B", [64, 2])]
                .map(|(part, shape)| (format!("diffusion_model.{layer}.{part}.weight"), Tensor::full(shape, 0.1)))
        };
        layers.iter().flat_map(parts).collect()
    };
    let unknown_prefix = "`diffusion_model.foo.blocks.0.self_attn.q.lora_A.weight` is not a layer of Wan: expected \
                          `blocks.0.self_attn.q`, found the unknown prefix `foo.`";
    let unknown_layer = "1 of 2 layers of the LoRA are not in the base: `blocks.0.self_attn.qq`";
    for (number, (layers, words, inspected)) in [
        (&["foo.blocks.0.self_attn.q", "foo.blocks.0.self_attn.v"][..], unknown_prefix, unknown_prefix),
        (&["blocks.0.self_attn.q", "blocks.0.self_attn.qq"], unknown_layer, "blocks.0.self_attn.qq"),
    ]
    .into_iter()
    .enumerate()
    {
        let file = format!("{number}.safetensors");
        save_safetensors(world.path(&file), &state(layers), &BTreeMap::new()).unwrap();
        let base = "tiny/low_noise_model/diffusion_pytorch_model.safetensors";
        let on_start = format!("model.lora_checkpoint={file}");
        let in_base = format!("model.base_lora={{dit2: {file}}}");
        let settings: Vec<&str> = SETTINGS.iter().copied().filter(|setting| !setting.contains("rank")).collect();
        let set = |command: &[&'static str], own: &str| {
            let all = settings.iter().copied().chain(["reward.name=brightness", own]);
            let set = all.flat_map(|setting| ["--set".to_string(), setting.to_string()]);
            command.iter().map(|word| word.to_string()).chain(set).collect::<Vec<_>>()
        };
        let words_of = |command: &[&str]| command.iter().map(|word| word.to_string()).collect::<Vec<_>>();
        for command in [
            words_of(&["convert-lora", &file, "x.safetensors", "--to", "kohya"]),
            words_of(&["merge-lora", base, &file, "x.safetensors"]),
            words_of(&generate("x.mp4", &[&PROMPT[..], &["--adapter", &file]].concat())),
            words_of(&generate("x.mp4", &[&PROMPT[..], &["--set", &in_base]].concat())),
            set(&["run", "--out", "x", "--steps", "1"], &on_start),
            set(&["run", "--out", "x", "--steps", "1"], &in_base),
            set(&["check"], &on_start),
            set(&["check"], &in_base),
        ] {
            let command: Vec<&str> = command.iter().map(String::as_str).collect();
            let output = world.roll(&command);
            let messages = format!("{}{}", stderr_text(&output), String::from_utf8_lossy(&output.stdout));
            assert!(!output.status.success() && messages.contains(words), "{command:?}: {messages}");
        }
        let about = world.done(&["inspect", &file]);
        assert!(about.contains(inspected), "{about}");
        assert!(["x", "x.mp4", "x.safetensors"].iter().all(|name| !world.path(name).exists()));
    }
}

/// Warnings when `names` are given to the experts `dit` and `dit2`.
fn exchange_is_noticed(world: &World, names: [&str; 2]) -> bool {
    let lora = Checkpoint::open(world.path("lora.safetensors")).unwrap().all().unwrap();
    for name in names {
        save_safetensors(world.path(name), &lora, &BTreeMap::new()).unwrap();
    }
    let key = format!("model.base_lora={{dit: {}, dit2: {}}}", names[0], names[1]);
    let output = world.roll(&generate("x.gif", &[&PROMPT[..], &["--force", "--set", &key]].concat()));
    let messages = stderr_text(&output);
    assert!(output.status.success(), "{messages}");
    assert!(messages.contains(names[0]) && messages.contains(names[1]), "merged LoRAs are logged: {messages}");
    messages.contains("are the two experts exchanged?")
}

#[test]
fn exchanged_experts_are_noticed_by_the_names_of_their_files() {
    let world = World::new(0);
    picture(&world, "0.png", 0.1);
    let layer = [("lora_A", [2, 64]), ("lora_B", [64, 2])];
    let state: StateDict =
        layer.map(|(part, shape)| (format!("blocks.0.self_attn.q.{part}.weight"), Tensor::full(shape, 0.1))).into();
    save_safetensors(world.path("lora.safetensors"), &state, &BTreeMap::new()).unwrap();
    for [high, low] in [
        ["high_noise_model.safetensors", "low_noise_model.safetensors"],
        ["Lightning_HIGH_fp16.safetensors", "Lightning_LOW_fp16.safetensors"],
        ["face-HighNoise.safetensors", "face-LowNoise.safetensors"],
        ["transformer.safetensors", "transformer_2.safetensors"],
    ] {
        assert!(!exchange_is_noticed(&world, [high, low]), "{high}, {low}");
        assert!(exchange_is_noticed(&world, [low, high]), "{low}, {high}");
    }

    // Transformers of the base.
    let paths: Vec<serde_json::Value> =
        serde_json::from_str(&std::fs::read_to_string(world.path("tiny/wan22_paths.json")).unwrap()).unwrap();
    let at = |name: &str| world.path(name);
    for [high, low] in [["Wan2_2-I2V-A14B-HIGH_bf16", "Wan2_2-I2V-A14B-LOW_bf16"], ["HighNoise/a", "LowNoise/a"]] {
        for (from, name) in [("high_noise_model", high), ("low_noise_model", low)] {
            let to = at(&format!("tiny/{name}.safetensors"));
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(at(&format!("tiny/{from}/diffusion_pytorch_model.safetensors")), &to).unwrap();
            let config = at(&format!("tiny/{from}/config.json"));
            if config.exists() {
                std::fs::copy(config, to.with_file_name("config.json")).unwrap();
            }
        }
        for (first, second, warns) in [(high, low, false), (low, high, true)] {
            let mut listed = paths.clone();
            (listed[0], listed[1]) = (json!(format!("{first}.safetensors")), json!(format!("{second}.safetensors")));
            std::fs::write(at("tiny/other.json"), serde_json::to_vec(&listed).unwrap()).unwrap();
            let arguments = [&PROMPT[..], &["--force", "--set", "model.model_paths=tiny/other.json"]].concat();
            let output = world.roll(&generate("x.gif", &arguments));
            let messages = stderr_text(&output);
            assert!(output.status.success(), "{messages}");
            assert_eq!(messages.contains("are the two experts exchanged?"), warns, "{first}, {second}: {messages}");
        }
    }
}
