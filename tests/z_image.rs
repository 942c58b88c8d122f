//! Z-Image as the program runs it: every algorithm that generates its pictures trains it, a stopped run goes on with the
//! same bits, and so does the model as a plugin and with sharded weights.

use std::path::Path;

use roll_network::weights::{Checkpoint, save_safetensors};

use crate::plugins::library;
use crate::program::{done, fails, roll};
use crate::world::{checkpoint_file, metrics};

/// `roll run` of `algorithm` on the small checkpoint, with guidance, into `out`.
fn train(directory: &Path, algorithm: &str, out: &str, steps: &str, settings: &[&str]) {
    let fixed = [
        "model={name: z_image, model_path: tiny, lora_rank: 2}",
        "data={metadata: prompts.txt, height: 32, width: 48}",
        "reward={name: brightness}",
        "algo.guidance_scale=3.5",
        "save_steps=1",
    ];
    let mut arguments = vec!["run", "--algo", algorithm, "--out", out, "--steps", steps];
    fixed.iter().chain(settings).for_each(|setting| arguments.extend(["--set", setting]));
    done(directory, &arguments);
}

fn small_checkpoint() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("prompts.txt"), "a red house\na blue dog\n").unwrap();
    done(directory.path(), &["init-tiny", "tiny", "--kind", "z_image"]);
    directory
}

#[test]
fn a_stopped_run_of_z_image_goes_on_with_the_same_bits_and_its_lora_can_be_trained_on() {
    let directory = small_checkpoint();
    let path = directory.path();
    let adapter =
        |run: &str, step: usize| path.join(run).join(format!("checkpoints/step-{step:06}/adapter.safetensors"));
    let bytes = |run: &str, step: usize| std::fs::read(adapter(run, step)).unwrap();
    train(path, "reward_fl", "whole", "2", &[]);
    train(path, "reward_fl", "stopped", "1", &[]);
    assert_eq!(bytes("stopped", 1), bytes("whole", 1));
    done(path, &["run", "--resume", "stopped", "--steps", "2"]);
    assert_eq!(bytes("stopped", 2), bytes("whole", 2));
    assert_ne!(bytes("whole", 1), bytes("whole", 2));
    train(path, "reward_fl", "further", "1", &["model.lora_checkpoint=whole"]);
    assert!(path.join("further/samples/step-000001/sample-000000.png").is_file());
}

#[test]
fn policy_gradients_train_z_image() {
    let directory = small_checkpoint();
    for algorithm in ["diffusion_nft", "flow_grpo"] {
        train(directory.path(), algorithm, algorithm, "1", &[]);
    }
}

/// Metrics without times, and the bytes of the adapter and of the optimizer after two steps.
fn results(directory: &Path, run: &str) -> (Vec<serde_json::Value>, [Vec<u8>; 2]) {
    let run = directory.join(run);
    let files = ["adapter.safetensors", "trainer/optimizer.safetensors"];
    (metrics(&run), files.map(|file| checkpoint_file(&run, 2, file)))
}

#[test]
fn z_image_as_a_plugin_trains_with_the_same_bits() {
    let directory = small_checkpoint();
    let path = directory.path();
    let plugin = format!("plugins=[{}]", library("z_image"));
    for algorithm in ["reward_fl", "flow_grpo"] {
        let [linked, loaded] = ["linked", "loaded"].map(|how| format!("{algorithm}-{how}"));
        train(path, algorithm, &linked, "2", &[]);
        train(path, algorithm, &loaded, "2", &[&plugin, "plugins_replace=true"]);
        assert!(results(path, &loaded) == results(path, &linked), "{algorithm}");
    }
}

#[test]
fn location_of_weights_changes_no_bit_of_z_image() {
    let directory = small_checkpoint();
    let path = directory.path();
    let two = ["ranks=2", "strategy.name=zero"];
    train(path, "reward_fl", "resident", "2", &two);
    for (out, setting) in [
        ("sharded", "strategy.stage=3"),
        ("host", "model.weight_store=host"),
        ("streamed", "model.weight_store=streamed"),
        ("offloaded", "model.use_gradient_checkpointing_offload=true"),
        ("attention", "model.keep_attention=true"),
    ] {
        train(path, "reward_fl", out, "2", &[two[0], two[1], setting]);
        assert!(results(path, out) == results(path, "resident"), "{out}");
    }
}

#[test]
fn a_lora_of_z_image_is_fused_and_divided_again_and_its_files_are_described() {
    let directory = small_checkpoint();
    let path = directory.path();
    train(path, "reward_fl", "run", "1", &[]);
    done(path, &["convert-lora", "run", "plain.safetensors", "--to", "diffusers"]);
    done(path, &["convert-lora", "run", "fused.safetensors", "--to", "kohya", "--names", "fused"]);
    let back = ["convert-lora", "fused.safetensors", "back.safetensors", "--to", "diffusers"];
    fails(&roll(path, &back), 2, &["--base"]);
    done(path, &[&back[..], &["--base", "tiny/transformer"]].concat());
    let tensors = |name: &str| Checkpoint::open(path.join(name)).unwrap().all().unwrap();
    let (back, plain) = (tensors("back.safetensors"), tensors("plain.safetensors"));
    assert_eq!(back.keys().collect::<Vec<_>>(), plain.keys().collect::<Vec<_>>());
    assert!(plain.iter().all(|(name, tensor)| back[name].as_bytes() == tensor.as_bytes()));
    assert!(tensors("fused.safetensors").contains_key("lora_unet_layers_0_attention_qkv.lora_down.weight"));
    let wan = ["convert-lora", "wan.safetensors", "x.safetensors", "--to", "kohya", "--names", "fused"];
    let tensor = |shape: [usize; 2]| roll_core::Tensor::full(shape, 1.0);
    let layer = "diffusion_model.blocks.0.self_attn.q";
    let [down, up] =
        [("lora_A", [1, 4]), ("lora_B", [4, 1])].map(|(name, shape)| (format!("{layer}.{name}.weight"), tensor(shape)));
    save_safetensors(path.join("wan.safetensors"), &[down, up].into(), &Default::default()).unwrap();
    fails(&roll(path, &wan), 2, &["wan.safetensors", "leave --names out"]);
    let about = done(path, &["inspect", "tiny"]);
    for part in ["Z-Image transformer", "KL autoencoder", "language model", "1 noise refiners"] {
        assert!(about.contains(part), "no {part} in {about}");
    }
}
