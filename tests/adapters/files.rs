//! Files that a run starts from.

use std::collections::BTreeMap;

use roll_core::{Model, Noise, Purpose, StateDict};
use roll_network::lora::{Convention, Names, WriteOptions, write_lora};
use roll_network::weights::{Checkpoint, save_safetensors};
use roll_wan::Wan;
use roll_wan::init_tiny::WanKind;
use serde_json::json;

use super::{Tiny, parameters};

#[test]
fn rank_layers_and_scale_come_from_the_file() {
    let tiny = Tiny::new(WanKind::I2v);
    let options =
        json!({"lora_rank": 3, "lora_alpha": 6.0, "lora_target_modules": "q,ffn.0", "trainable_models": "dit2"});
    let trained = tiny.trained("a", options.clone());
    for place in ["a/adapter.safetensors", "a"] {
        let started = tiny.open(json!({"lora_checkpoint": place})).unwrap();
        assert_eq!(parameters(&started), parameters(&trained), "{place}");
        let bytes = |model: &Wan| {
            let files = model.export_adapter().unwrap().into_values().flatten();
            files.map(|(name, tensor)| (name, tensor.as_bytes().to_vec())).collect::<Vec<_>>()
        };
        assert_eq!(bytes(&started), bytes(&trained), "also alpha and header");
    }
    let mut same = options;
    same["lora_checkpoint"] = "a".into();
    assert_eq!(
        parameters(&tiny.open(same).unwrap()),
        parameters(&trained),
        "options that agree with the file are valid"
    );
    for (changes, words) in [
        (json!({"lora_rank": 4}), ["model.lora_rank", "rank 4", "rank 3"]),
        (json!({"lora_alpha": 3.0}), ["model.lora_alpha", "alpha 3", "alpha 6"]),
        (json!({"lora_target_modules": "q,k"}), ["model.lora_target_modules", "q,k", "ffn.0"]),
        (json!({"trainable_models": "dit"}), ["adapter.safetensors", "low_noise", "`dit`"]),
        (json!({"lora_rank": 0}), ["model.lora_rank", "merge-lora", "a/adapter"]),
    ] {
        let mut options = changes;
        options["lora_checkpoint"] = "a".into();
        let printed_text = tiny.refused(options);
        words.iter().for_each(|word| assert!(printed_text.contains(word), "no {word}: {printed_text}"));
    }
}

#[test]
fn reads_adapters_of_both_experts_from_a_directory_pair_map_or_file() {
    let tiny = Tiny::new(WanKind::I2v);
    let trained = tiny.trained("both", json!({"lora_rank": 2, "trainable_models": "dit,dit2"}));
    let (high, low) = ("both/adapter_high_noise.safetensors", "both/adapter_low_noise.safetensors");
    let mut combined = StateDict::new();
    for (file, prefix) in [(high, "transformer."), (low, "transformer_2.")] {
        for (key, tensor) in Checkpoint::open(tiny.path(file)).unwrap().all().unwrap() {
            combined.insert(key.replace("diffusion_model.", prefix), tensor);
        }
    }
    save_safetensors(tiny.path("combined.safetensors"), &combined, &BTreeMap::new()).unwrap();
    for source in [
        json!("both"),
        json!(format!("{high},{low}")),
        json!({"dit": high, "dit2": low}),
        json!([low, high]),
        json!("combined.safetensors"),
    ] {
        let started = tiny.open(json!({"lora_checkpoint": source})).unwrap();
        assert_eq!(parameters(&started), parameters(&trained), "{source}");
    }
    // Either alone: its expert is trained, and the other one is not.
    for (file, expert) in [(high, "dit."), (low, "dit2.")] {
        let started = parameters(&tiny.open(json!({"lora_checkpoint": file})).unwrap());
        assert!(started.keys().all(|name| name.starts_with(expert)), "{file}");
        assert!(started.iter().all(|(name, values)| values == &parameters(&trained)[name]), "{file}");
        // Where both are trained, the other one starts anew.
        let both = tiny.open(json!({"lora_checkpoint": file, "trainable_models": "dit,dit2", "lora_rank": 2})).unwrap();
        let both = parameters(&both);
        assert_eq!(both.len(), parameters(&trained).len());
        assert!(both.iter().all(|(name, values)| name.starts_with(expert) == (values == &parameters(&trained)[name])));
    }
    let swapped = tiny.refused(json!({"lora_checkpoint": format!("{low},{high}")}));
    assert!(swapped.contains("low_noise") && swapped.contains("`dit`, high_noise"), "{swapped}");
    let one = tiny.refused(json!({"lora_checkpoint": "both", "trainable_models": "dit2"}));
    assert!(one.contains("`dit`, high_noise") && one.contains("model.trainable_models"), "{one}");
}

#[test]
fn a_file_without_expert_is_for_the_trained_one() {
    let tiny = Tiny::new(WanKind::I2v);
    let trained = tiny.trained("a", json!({"lora_rank": 2, "trainable_models": "dit2"}));
    // As another program would have written it.
    let tensors = Checkpoint::open(tiny.path("a/adapter.safetensors")).unwrap().all().unwrap();
    save_safetensors(tiny.path("foreign.safetensors"), &tensors, &BTreeMap::new()).unwrap();
    let foreign = || json!({"lora_checkpoint": "foreign.safetensors"});
    assert_eq!(parameters(&tiny.open(foreign()).unwrap()), parameters(&trained));
    let mut for_high = foreign();
    for_high["trainable_models"] = "dit".into();
    assert!(parameters(&tiny.open(for_high).unwrap()).keys().all(|name| name.starts_with("dit.")));
    let mut for_both = foreign();
    for_both["trainable_models"] = "dit,dit2".into();
    assert!(tiny.refused(for_both).contains("HIGH,LOW"));
}

#[test]
fn reads_per_layer_ranks_and_scales_of_every_convention() {
    let tiny = Tiny::new(WanKind::Ti2v);
    let noise = |which: u64, shape: [usize; 2]| Noise::new(2).normal(Purpose::Synthetic, which, 0, &shape).unwrap();
    let mut lora = roll_network::lora::Lora::default();
    for (i, (name, rank, alpha)) in
        [("blocks.0.self_attn.q", 2, Some(4.0)), ("blocks.1.cross_attn.o", 5, None)].into_iter().enumerate()
    {
        let (down, up) = (noise(2 * i as u64, [rank, 64]), noise(2 * i as u64 + 1, [64, rank]));
        lora.layers.insert(name.into(), roll_network::lora::Layer { down, up, alpha, bias: None });
    }
    let mut all = Vec::new();
    for convention in Convention::ALL {
        let directory = tiny.path(&convention.to_string());
        std::fs::create_dir(&directory).unwrap();
        let options = WriteOptions { convention, names: Names::Official };
        write_lora(&lora, options, &BTreeMap::new(), &directory.join("adapter_model.safetensors")).unwrap();
        let started = tiny.open(json!({"lora_checkpoint": convention.to_string()})).unwrap();
        assert_eq!(started.parameters().len(), 4, "only the layers of the file are trained");
        all.push(parameters(&started));
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "one adapter under five conventions");
    let up = &all[0]["dit.blocks.0.self_attn.q.lora_B.weight"];
    let doubled: Vec<f32> = lora.layers["blocks.0.self_attn.q"].up.to_f32_vec().iter().map(|v| 2.0 * v).collect();
    assert_eq!(up, &doubled, "a scale that is not everyone's stands in B");
}

#[test]
fn rejects_unusable_adapters_by_their_file() {
    let tiny = Tiny::new(WanKind::I2v);
    tiny.trained("a", json!({"lora_rank": 2}));
    let tensors = || Checkpoint::open(tiny.path("a/adapter.safetensors")).unwrap().all().unwrap();
    let message = |change: &dyn Fn(&mut StateDict)| {
        let mut state = tensors();
        change(&mut state);
        save_safetensors(tiny.path("bad.safetensors"), &state, &BTreeMap::new()).unwrap();
        tiny.refused(json!({"lora_checkpoint": "bad.safetensors"}))
    };
    let q = "diffusion_model.blocks.0.self_attn.q";
    let nan = message(&|state| {
        let mut values = state[&format!("{q}.lora_B.weight")].to_f32_vec();
        values[3] = f32::NAN;
        state.insert(format!("{q}.lora_B.weight"), roll_core::Tensor::new(values, [64, 2]).unwrap());
    });
    assert!(nan.contains("bad.safetensors") && nan.contains("not finite") && nan.contains("self_attn.q"), "{nan}");
    let other = message(&|state| {
        for part in ["lora_A", "lora_B"] {
            let tensor = state.remove(&format!("{q}.{part}.weight")).unwrap();
            state.insert(format!("diffusion_model.blocks.9.self_attn.q.{part}.weight"), tensor);
        }
    });
    assert!(other.contains("blocks.9.self_attn.q") && other.contains("lora_checkpoint"), "{other}");
    let whole = message(&|state| {
        state.insert("diffusion_model.blocks.0.diff_m".into(), roll_core::Tensor::zeros([1, 6, 64]));
    });
    assert!(whole.contains("merge-lora") && whole.contains("bad.safetensors"), "{whole}");
    std::fs::create_dir(tiny.path("empty")).unwrap();
    assert!(tiny.refused(json!({"lora_checkpoint": "empty"})).contains("expected an adapter"));
    assert!(tiny.refused(json!({"lora_checkpoint": "a,a,a"})).contains("HIGH,LOW"));
}
