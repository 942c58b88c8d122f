//! `roll check` and `roll run` agree: a table of configurations that a run refuses before or within its first step, and
//! of some that it takes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use roll_core::{Tensor, Video};
use roll_network::weights::save_safetensors;
use roll_wan::init_tiny::{WanKind, init_tiny};

use crate::program::{printed, stderr_text};
use crate::world::{SETTINGS, SHORT, World, fails};

/// What a row changes.
#[derive(Clone, Copy)]
enum Base {
    /// Reward-FL on clips.
    Fl,
    /// DiffusionNFT on clips.
    Nft,
    /// Flow-GRPO on clips.
    Grpo,
    /// Flow matching on clips.
    Fm,
    /// Supervised fine-tuning of the built-in language model.
    Sft,
    /// DPO of the built-in language model.
    Dpo,
    /// Agentic PPO with the built-in language model.
    Agent,
}

const AGENT: [&str; 11] = [
    "algo.name=agentic_ppo",
    "model.name=causal_lm",
    "env.name=frozen_lake",
    "algo.num_env_groups=2",
    "algo.group_size=2",
    "algo.max_actions_per_traj=2",
    "algo.max_tokens_per_step=8",
    "algo.agent_system_template=",
    "algo.agent_template='{observation}'",
    "algo.val_batch_size=0",
    "sample_steps=0",
];

impl Base {
    fn settings(self) -> Vec<&'static str> {
        let clips = |own: &[&'static str]| [&SETTINGS[..], own].concat();
        match self {
            Self::Fl => clips(&[&SHORT[..], &["reward.name=brightness"]].concat()),
            Self::Nft => clips(&["algo.name=diffusion_nft", "reward.name=brightness", "algo.num_inference_steps=4"]),
            Self::Grpo => clips(&["algo.name=flow_grpo", "reward.name=brightness", "algo.num_inference_steps=4"]),
            Self::Fm => clips(&["algo.name=flow_matching"]),
            Self::Sft => {
                vec!["algo.name=sft", "model.name=causal_lm", "algo.data=good.jsonl", "algo.batch_size=2"]
            }
            Self::Dpo => {
                vec!["algo.name=dpo", "model.name=causal_lm", "algo.data=pairs.jsonl", "algo.batch_size=2"]
            }
            Self::Agent => AGENT.to_vec(),
        }
    }
}

/// A model that takes no pictures.
const T2V: &str = "model.model_paths=t2v/wan22_paths.json";

/// Rows that a run takes.
const TAKEN: &[(Base, &[&str])] = &[
    (Base::Fl, &[]),
    (Base::Nft, &[]),
    (Base::Grpo, &[]),
    (Base::Fm, &[]),
    (Base::Sft, &[]),
    (Base::Agent, &[]),
    (Base::Agent, &["algo.adv_estimator=gae"]),
    (Base::Agent, &["algo.group_size=1", "algo.reward_normalization.grouping=batch"]),
    (Base::Fl, &["ranks=2", "strategy.name=zero"]),
    (Base::Fl, &["model.lora_checkpoint=adapter", "model.lora_rank=null"]),
    (Base::Fl, &["model.lora_checkpoint=adapter", "model.lora_rank=null", "algo.kl_reference=base"]),
    (Base::Fl, &["model.base_lora=adapter"]),
    (Base::Nft, &["model.base_lora={dit2: adapter}", "model.lora_rank=0"]),
    (Base::Fl, &["evaluation.prompts=[{prompt: a, image: picture.png}]", "evaluation.train_samples=1"]),
    (Base::Fm, &["model.lora_rank=0"]),
    (Base::Sft, &["algo.data=mixed.jsonl"]),
    (Base::Dpo, &[]),
    (Base::Dpo, &["algo.ipo=true", "algo.val_data=pairs.jsonl"]),
    (Base::Dpo, &["algo.reference_free=true", "algo.length_normalised=true", "algo.margin=1", "model.lora_rank=0"]),
    (Base::Fl, &["data.cache_dir=cache"]),
    (
        Base::Fl,
        &["model.model_paths=[tiny/high_noise_model/*.safetensors, \
             [tiny/low_noise_model/diffusion_pytorch_model.safetensors], tiny/Wan2.1_VAE.safetensors, tiny/models_t5*]"],
    ),
    // Rows without a clip.
    (Base::Fl, &[T2V, "algo.shift=1", "data.metadata=prompts.txt"]),
    (Base::Nft, &[T2V, "algo.shift=1", "data.metadata=prompts.csv"]),
    (
        Base::Grpo,
        &[
            T2V,
            "algo.shift=1",
            "data.metadata=prompts.txt",
            "data.height=null",
            "data.width=null",
            "data.max_pixels=5000",
        ],
    ),
    (Base::Fl, &["data.metadata=portraits.csv"]),
    (Base::Fl, &["data.metadata=portraits.csv", "data.height=null", "data.width=null"]),
    (Base::Fl, &["data.metadata=portraits.csv", "reward.name=first_frame", "algo.reference=image"]),
    (
        Base::Fl,
        &[
            T2V,
            "algo.shift=1",
            "data.metadata=mixed.csv",
            "evaluation.metadata=prompts.txt",
            "evaluation.train_samples=2",
        ],
    ),
    (Base::Fl, &["data.metadata=stills.csv", "data.num_frames=1"]),
    (Base::Fl, &["model.products=fp8", "model.weights_dtype=fp8"]),
    (Base::Fm, &["data.metadata=stills.csv"]),
];

/// Rows that a run refuses.
const REFUSED: &[(Base, &[&str])] = &[
    // Options of the algorithm.
    (Base::Fl, &["algo.mid_timestep=9"]),
    (Base::Fl, &["algo.final_timestep=7"]),
    (Base::Fl, &["algo.sampler=unipc"]),
    (Base::Fl, &["algo.timesteps=[1000]"]),
    (Base::Fl, &["algo.shift=0"]),
    (Base::Fl, &["algo.reward_std=0"]),
    (Base::Fl, &["algo.trained_steps={last: 5}"]),
    (Base::Fl, &["algo.max_timestep_boundary=0.1"]),
    (Base::Fl, &["algo.name=reward_f"]),
    (Base::Nft, &["algo.num_inference_steps=1"]),
    (Base::Grpo, &["algo.num_inference_steps=2"]),
    (Base::Grpo, &["algo.num_inference_steps=1"]),
    (Base::Grpo, &["algo.share_prefix=true"]),
    (Base::Nft, &["algo.beta=0"]),
    (Base::Fm, &["algo.min_timestep_boundary=1"]),
    (Base::Sft, &["algo.batch_size=3", "ranks=2", "strategy.name=zero"]),
    (Base::Sft, &["algo.sequence_length=2"]),
    (Base::Dpo, &["algo.batch_size=3", "ranks=2", "strategy.name=zero"]),
    (Base::Dpo, &["algo.sequence_length=2"]),
    (Base::Dpo, &["algo.beta=0"]),
    (Base::Agent, &["algo.agent_template=hello"]),
    (Base::Agent, &["algo.agent_template='{nosuch} {observation}'"]),
    (Base::Agent, &["algo.sequence_length=4"]),
    (Base::Agent, &["algo.tags=[x]"]),
    (Base::Agent, &["algo.group_size=1"]),
    // Options of the model.
    (Base::Fl, &["model.lora_rnak=2"]),
    (Base::Fl, &["model.trainable_models=dit"]),
    (Base::Fl, &["model.trainable_models=dit3"]),
    (Base::Fl, &["model.num_heads=7"]),
    (Base::Fl, &["model.lora_target_modules=nosuch"]),
    (Base::Fl, &["model.lora_rank=100000"]),
    (Base::Fl, &["model.weight_store=sharded", "model.weights_dtype=int8"]),
    (Base::Fl, &["model.products=fp8"]),
    (Base::Fl, &["model.products=fp8", "model.weights_dtype=int8"]),
    (Base::Fl, &["model.vae_tile_size=[4,4]"]),
    (Base::Fl, &["model.tokenizer_path=nowhere"]),
    (Base::Fl, &["model.name=causal_lm"]),
    (Base::Sft, &["model.max_length=99999"]),
    (Base::Sft, &["model.weights_dtype=int8"]),
    (Base::Sft, &["model.lora_target_modules=nosuch"]),
    (Base::Sft, &["model.chat_template_args={a: 1}"]),
    (Base::Sft, &["model.rows_at_once=0"]),
    // Files of the model.
    (Base::Fl, &["model.model_paths=nowhere.json"]),
    (Base::Fl, &["model.model_paths=tiny/no_vae.json"]),
    (Base::Fl, &["model.model_paths=tiny/no_text.json"]),
    (Base::Fl, &["model.model_paths=tiny/truncated.json"]),
    (Base::Sft, &["model.model_path=nowhere"]),
    // Adapters.
    (Base::Fl, &["model.lora_checkpoint=nowhere.safetensors"]),
    (Base::Fl, &["model.lora_checkpoint=tiny/Wan2.1_VAE.safetensors", "model.lora_rank=null"]),
    (Base::Fl, &["model.lora_checkpoint=adapter", "model.lora_rank=4"]),
    (Base::Fl, &["model.lora_checkpoint=adapter", "model.trainable_models=dit"]),
    (Base::Sft, &["model.lora_checkpoint=adapter"]),
    (Base::Fl, &["model.base_lora=nowhere.safetensors"]),
    (Base::Fl, &["model.base_lora=tiny/Wan2.1_VAE.safetensors"]),
    (Base::Fl, &["model.base_lora={dit: adapter}"]),
    (Base::Fl, &["model.base_lora=[]"]),
    (Base::Fl, &["model.base_lora=other.safetensors"]),
    (Base::Fl, &["algo.kl_reference=before"]),
    // Data.
    (Base::Fl, &["data.metadata=nowhere.csv"]),
    (Base::Fl, &["data.metadata=broken.csv"]),
    (Base::Fl, &["data.metadata=gone.csv"]),
    (Base::Fl, &["data.metadata=empty.csv"]),
    (Base::Fl, &["data.height=65"]),
    (Base::Fl, &["data.height=null"]),
    (Base::Fl, &["data.cache_dir=metadata.csv/below"]),
    (Base::Fm, &[T2V, "data.metadata=prompts.txt"]),
    (Base::Fm, &["evaluation.metadata=portraits.csv"]),
    (Base::Fl, &[T2V, "data.metadata=mixed.csv", "algo.data_weight=0.5"]),
    (Base::Nft, &[T2V, "data.metadata=prompts.txt", "algo.data_weight=0.5"]),
    (Base::Fl, &[T2V, "data.metadata=mixed.csv", "reward.name=first_frame"]),
    (Base::Fl, &["data.metadata=portraits.csv", "reward.name=first_frame"]),
    (Base::Grpo, &[T2V, "data.metadata=prompts.txt", "reward.name=first_frame", "algo.reference=image"]),
    (Base::Grpo, &[T2V, "data.metadata=prompts.txt", "reward.name=sharpness", "reward.wanted=reference"]),
    (
        Base::Fl,
        &[T2V, "data.metadata=prompts.txt", "evaluation.train_samples=1", "evaluation.check=[{name: first_frame}]"],
    ),
    (Base::Fl, &["data.metadata=prompts.txt"]),
    (Base::Fl, &["evaluation.metadata=prompts.txt"]),
    (Base::Fl, &["data.metadata=stills.csv"]),
    (Base::Fl, &["data.metadata=stills.csv", "algo.data_weight=0.5"]),
    (Base::Fl, &[T2V, "data.metadata=prompts.txt", "data.height=null", "data.width=null", "data.max_pixels=9"]),
    (Base::Fl, &["data.metadata=blank.txt"]),
    (Base::Sft, &["algo.data=nowhere.jsonl"]),
    (Base::Sft, &["algo.data=questions.jsonl"]),
    (Base::Sft, &["algo.val_data=questions.jsonl"]),
    (Base::Dpo, &["algo.data=good.jsonl"]),
    (Base::Dpo, &["algo.data=same.jsonl"]),
    (Base::Dpo, &["data.metadata=good.jsonl"]),
    (Base::Sft, &["data.metadata=good.jsonl"]),
    (Base::Sft, &["evaluation.metadata=good.jsonl"]),
    (Base::Agent, &["data.metadata=good.jsonl"]),
    (Base::Agent, &["evaluation.metadata=good.jsonl"]),
    (Base::Fl, &["algo.data=good.jsonl"]),
    // Rewards.
    (Base::Fl, &["reward=[]"]),
    (Base::Fl, &["reward.target=7"]),
    (Base::Fl, &["reward.weight=0"]),
    (Base::Fl, &["reward.name=insightface"]),
    (Base::Fl, &["reward.name=insightface", "reward.reward_model_path=nowhere"]),
    (Base::Fl, &["reward.name=command", "reward.command=[nosuchprogram]"]),
    (Base::Nft, &["reward.name=judge"]),
    (
        Base::Nft,
        &["reward.name=judge", "reward.url=http://127.0.0.1:9/v1", "reward.model=m", "reward.questions=no.txt"],
    ),
    (Base::Fl, &["reward.name=judge", "reward.url=http://127.0.0.1:9/v1", "reward.model=m", "reward.questions=[a]"]),
    // Environments.
    (Base::Fl, &["env.name=frozen_lake"]),
    (Base::Sft, &["env.name=frozen_lake"]),
    (Base::Agent, &["env=null"]),
    (Base::Agent, &["env.size=1"]),
    (Base::Agent, &["env.name=mixed"]),
    (Base::Agent, &["env.name=process", "env.command=[nosuchprogram]"]),
    (Base::Agent, &["env.name=process", "env.command=[sh, failing.sh]"]),
    (Base::Agent, &["env.name=process", "env.command=[echo, hello]"]),
    (Base::Agent, &["env.name=http", "env.url=http://127.0.0.1:9", "env.retries=0"]),
    // Evaluations.
    (Base::Fl, &["evaluation.metadata=nowhere.csv"]),
    (Base::Fl, &["evaluation.metadata=broken.csv"]),
    (Base::Fl, &["evaluation.check=[{name: insightface, reward_model_path: nowhere}]"]),
    (Base::Fl, &["evaluation.prompts=[{prompt: a, image: nowhere.png}]"]),
    (Base::Fl, &["evaluation.prompts=[a]"]),
    (Base::Sft, &["evaluation.prompts=[a]"]),
    // The run itself.
    (Base::Fl, &["backend=flux"]),
    (Base::Fl, &["strategy.name=nosuch"]),
    (Base::Fl, &["strategy.name=zero", "strategy.sequence_parallel_size=2"]),
    (Base::Fl, &["ranks=2", "strategy.name=single"]),
    (Base::Fl, &["training.per_device_train_batch_size=0"]),
    (Base::Fl, &["exp_name=a/b"]),
    (Base::Fl, &["plugins=[nowhere.so]"]),
];

/// A world with the files that the rows name.
fn world() -> World {
    let world = World::new(2);
    let write = |name: &str, text: &str| std::fs::write(world.path(name), text).unwrap();
    write("broken.mp4", "no video");
    write("broken.csv", "video,prompt\nbroken.mp4,a\nbroken.mp4,b\n");
    write("gone.csv", "video,prompt\nnowhere.mp4,a\nnowhere.mp4,b\n");
    write("empty.csv", "video,prompt\n");
    init_tiny(world.path("t2v"), WanKind::T2v, 3).unwrap();
    write("prompts.txt", "a grey square\n\na man, talking\n");
    write("prompts.csv", "prompt\na grey square\na man\n");
    write("mixed.csv", "video,prompt\n0.mp4,a grey square\n,a man\n");
    write("portraits.csv", "prompt,image\na grey square,picture.png\na man,picture.png\n");
    write("stills.csv", "video,prompt\npicture.png,a grey square\npicture.png,a man\n");
    write("blank.txt", "\n");
    let (question, answer) = (r#"{"role": "user", "content": "a"}"#, r#"{"role": "assistant", "content": "b"}"#);
    let good = format!("{{\"messages\": [{question}, {answer}]}}\n");
    let bare = format!("{{\"messages\": [{question}]}}\n");
    write("good.jsonl", &good.repeat(2));
    let pair = |rejected: &str| {
        let pair = serde_json::json!({"prompt": "P_", "chosen": "at goal", "rejected": rejected});
        format!("{pair}\n").repeat(2)
    };
    write("pairs.jsonl", &pair("at hole"));
    write("same.jsonl", &pair("at goal"));
    write("mixed.jsonl", &format!("{good}{good}{bare}"));
    write("questions.jsonl", &bare.repeat(2));
    write("failing.sh", "while read line; do echo '{\"error\": \"no rows\"}'; done\n");
    let picture = Video::new(Tensor::zeros([1, 3, 64, 64]), 8.0).unwrap();
    let pictures = roll_media::write_pngs(world.path("pictures"), &picture).unwrap();
    std::fs::rename(&pictures[0], world.path("picture.png")).unwrap();
    let list: Vec<String> =
        serde_json::from_slice(&std::fs::read(world.path("tiny/wan22_paths.json")).unwrap()).unwrap();
    let save = |name: &str, list: Vec<String>| write(&format!("tiny/{name}"), &serde_json::json!(list).to_string());
    let without = |part: &str| list.iter().filter(|file| !file.contains(part)).cloned().collect::<Vec<_>>();
    save("no_vae.json", without("VAE"));
    save("no_text.json", without("t5"));
    let bytes = std::fs::read(world.path("tiny/Wan2.1_VAE.safetensors")).unwrap();
    std::fs::write(world.path("tiny/half.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
    save("truncated.json", [without("VAE"), vec!["half.safetensors".into()]].concat());
    let other = [("lora_A", [2, 64]), ("lora_B", [64, 2])];
    let other =
        other.map(|(part, shape)| (format!("diffusion_model.blocks.9.ffn.0.{part}.weight"), Tensor::zeros(shape)));
    save_safetensors(world.path("other.safetensors"), &other.into(), &BTreeMap::new()).unwrap();
    world.train("adapter", 1, &[&SHORT[..], &["reward.name=brightness"]].concat());
    world
}

/// The command with the row's settings.
fn ends_well(world: &World, command: &[&str], settings: &[&str]) -> (bool, String) {
    let mut command = world.command(command);
    for setting in settings {
        command.args(["--set", setting]);
    }
    let output = command.output().unwrap();
    (output.status.success(), format!("{}{}", printed(&output), stderr_text(&output)))
}

#[test]
fn check_refuses_the_runs_that_run_refuses() {
    assert!(REFUSED.len() >= 60);
    let world = world();
    let rows: Vec<_> = TAKEN.iter().map(|row| (row, true)).chain(REFUSED.iter().map(|row| (row, false))).collect();
    let (next, wrong) = (AtomicUsize::new(0), std::sync::Mutex::new(Vec::new()));
    let work = || {
        loop {
            let row = next.fetch_add(1, Ordering::Relaxed);
            let Some(((base, changes), taken)) = rows.get(row) else { break };
            let (settings, out) = ([&base.settings()[..], changes].concat(), format!("out-{row}"));
            let (runs, run_text) = ends_well(&world, &["run", "--quiet", "--steps", "1", "--out", &out], &settings);
            let (passes, check_text) = ends_well(&world, &["check", "--steps", "1", "--tflops", "1"], &settings);
            if [runs, passes] != [*taken; 2] {
                wrong.lock().unwrap().push(format!("{changes:?}\nrun: {run_text}\ncheck: {check_text}"));
            }
        }
    };
    std::thread::scope(|threads| (0..2).for_each(|_| drop(threads.spawn(work))));
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} rows differ:\n{}", wrong.len(), rows.len(), wrong.join("\n\n"));
}

#[test]
fn check_lists_all_problems_in_one_round_and_writes_nothing() {
    let world = World::new(1);
    let before = std::fs::read_dir(world.path(".")).unwrap().count();
    let settings = [
        &Base::Fl.settings()[..],
        &[
            "model.model_paths=nowhere.json",
            "evaluation.metadata=unseen.csv",
            "reward.name=insightface",
            "reward.reward_model_path=antelopev2",
            "algo.reference=image",
            "data.cache_dir=new/cache",
        ],
    ]
    .concat();
    let (passes, text) = ends_well(&world, &["check", "--tflops", "1"], &settings);
    assert!(!passes && text.contains("3 problems above"), "{text}");
    ["nowhere.json", "unseen.csv", "antelopev2"].iter().for_each(|part| assert!(text.contains(part), "{text}"));
    assert_eq!(std::fs::read_dir(world.path(".")).unwrap().count(), before);
    let wrong = ["seed=a", "data.fps=1000", "algo.mid_timestp=2"];
    fails(
        &world.roll(&["check", "--set", wrong[0], "--set", wrong[1], "--set", wrong[2]]),
        2,
        &["`seed`", "`data.fps`", "`algo.mid_timestp`"],
    );
}

#[test]
fn notes_name_keys_without_effect_and_a_cpu_that_gpus_were_planned_for() {
    let world = World::new(1);
    let settings =
        [&Base::Fl.settings()[..], &["evaluation.every=2", "evaluation.check=[{name: brightness}]"]].concat();
    let (passes, text) = ends_well(&world, &["check", "--on", "1x80"], &settings);
    assert!(passes, "{text}");
    for part in ["`evaluation.check`, `evaluation.every`", "no clip is evaluated", "`--on 1x80` names GPUs"] {
        assert!(text.contains(part), "no {part} in: {text}");
    }
    let stage = [&Base::Fl.settings()[..], &["strategy.stage=3"]].concat();
    assert!(ends_well(&world, &["check"], &stage).1.contains("`strategy.name=zero`"));
    fails(&world.roll(&["run", "--steps", "1.5"]), 2, &["expected a whole number"]);
    let prompt = "a face ".repeat(1000);
    std::fs::write(world.path("long.csv"), format!("video,prompt\n0.mp4,a\n0.mp4,{prompt}\n")).unwrap();
    let long = [&Base::Fl.settings()[..], &["data.metadata=long.csv"]].concat();
    let (_, text) = ends_well(&world, &["check"], &long);
    assert!(text.contains("\"a face a face") && text.contains("is cut to"), "{text}");
}

#[test]
fn notes_name_keys_without_effect_of_every_algorithm_on_videos() {
    let world = World::new(1);
    let guidance = "`algo.negative_prompt: blurred` has no effect";
    let clip = "`algo.clip_range: 0.01` has no effect: with one update a step";
    let end_image = "`end_image` in `model.extra_inputs` has no effect on training";
    let weighted = "`weight` of 1 row of `evaluation.metadata` has no effect";
    std::fs::write(world.path("weighted.csv"), "video,prompt,weight\n0.mp4,a,2\n0.mp4,b,\n").unwrap();
    std::fs::write(world.path("masked.csv"), "video,prompt,mask\n0.mp4,a,0.mp4\n0.mp4,b,\n").unwrap();
    let windows = "`data.windows` has no effect: no clip of `data.metadata` has room for a second window";
    for (base, setting, note) in [
        (Base::Fm, "evaluation.metadata=weighted.csv", weighted),
        (Base::Fl, "data.metadata=masked.csv", "1 row of `data.metadata` has a `mask`, which has no effect"),
        (Base::Fl, "data.windows={sliding: 9}", windows),
        (Base::Fl, "algo.negative_prompt=blurred", guidance),
        (Base::Nft, "algo.negative_prompt=blurred", guidance),
        (Base::Grpo, "algo.negative_prompt=blurred", guidance),
        (Base::Fm, "algo.negative_prompt=blurred", guidance),
        (Base::Grpo, "algo.clip_range=0.01", clip),
        (Base::Fl, "model.extra_inputs=input_image,end_image", end_image),
    ] {
        let (_, text) = ends_well(&world, &["check", "--steps", "1"], &[&base.settings()[..], &[setting]].concat());
        assert!(text.contains(note), "{setting}: no {note} in: {text}");
    }
}

/// A backend that this machine cannot use.
fn unusable() -> Option<roll_backends::Backend> {
    roll_backends::Backend::ALL.into_iter().find(|backend| backend.check_usable(0).is_err())
}

#[test]
fn without_its_backend_everything_else_is_checked_on_the_cpu() {
    let Some(backend) = unusable() else { return };
    let backend = format!("backend={backend}");
    let world = World::new(1);
    let check = |wrong: &[&str], on: &[&str]| {
        let settings = [&Base::Fl.settings()[..], &[backend.as_str()], wrong].concat();
        ends_well(&world, &[&["check", "--tflops", "1", "--memory", "24"], on].concat(), &settings)
    };
    let wrong =
        ["model.model_paths=nowhere.json", "data.metadata=no.csv", "evaluation.metadata=unseen.csv", "reward.target=7"];
    let parts = ["nowhere.json", "no.csv", "unseen.csv"];
    for (on, problems) in [(&["--on", "1x80"][..], "3 problems above"), (&[], "4 problems above")] {
        let (passes, text) = check(&wrong[..3], on);
        assert!(!passes && text.contains(problems), "{text}");
        parts.iter().for_each(|part| assert!(text.contains(part), "no {part} in: {text}"));
    }
    let (passes, text) = check(&[], &["--on", "1x80"]);
    assert!(passes && text.contains("note: ") && text.contains("everything else is checked on the CPU"), "{text}");
    assert!(text.contains("`brightness` scores the first clip"), "{text}");
    let (passes, text) = check(&[], &[]);
    assert!(!passes && text.contains("1 problem above"), "{text}");
    // An unknown one is a mistake wherever the run is.
    let unknown = [&Base::Fl.settings()[..], &["backend=flux"]].concat();
    assert!(!ends_well(&world, &["check", "--on", "1x80"], &unknown).0);
    let plan = [&Base::Fl.settings()[..], &[backend.as_str()]].concat();
    let (planned, text) = ends_well(&world, &["plan"], &plan);
    assert!(!planned && text.contains("`--on 1x80`"), "{text}");
}

#[test]
fn a_reward_is_asked_for_one_score() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("no python3 for a reward of its own", needs = "python");
    }
    let world = World::new(1);
    let package = format!("{}/../python/roll_reward/src", env!("CARGO_MANIFEST_DIR"));
    let check = |returns: &str, more: &[&str]| {
        let script =
            format!("import roll_reward\n\n\ndef score(frames):\n    return {returns}\n\n\nroll_reward.serve(score)\n");
        std::fs::write(world.path("own.py"), script).unwrap();
        let command = format!("reward.command=[env, PYTHONPATH={package}, python3, own.py]");
        let settings = [&Base::Nft.settings()[..], &["reward.name=command", &command], more].concat();
        ends_well(&world, &["check", "--tflops", "1"], &settings)
    };
    let (passes, text) = check("0.25", &[]);
    assert!(passes && text.contains("`score` scores the first clip 0.2500, in "), "{text}");
    for (returns, problem) in [("[0.1, 0.2]", "failed in `score`"), ("frames.no_such", "no_such")] {
        let (passes, text) = check(returns, &[]);
        assert!(!passes && text.contains("1 problem above") && text.contains(problem), "{text}");
    }
    let (passes, text) = check("float('nan')", &[]);
    assert!(passes && text.contains("is NaN, which counts as nothing to score"), "{text}");
    // A check that is measured only is asked, too; a row without a clip has a grey video.
    std::fs::write(world.path("prompts.txt"), "a grey square\n").unwrap();
    init_tiny(world.path("t2v"), WanKind::T2v, 3).unwrap();
    let prompts = [
        &Base::Fl.settings()[..],
        &[T2V, "algo.shift=1", "data.metadata=prompts.txt", "evaluation.train_samples=1"],
        &["evaluation.check=[{name: motion}]"],
    ];
    let (passes, text) = ends_well(&world, &["check", "--tflops", "1"], &prompts.concat());
    let gradient =
        text.lines().any(|line| line.contains("`brightness` scores a grey video") && line.ends_with("gradient"));
    assert!(passes && gradient && text.contains("`motion` scores a grey video"), "{text}");
}

#[test]
fn a_directory_that_cannot_be_written_and_a_disk_that_is_too_small_are_problems() {
    let world = World::new(1);
    let output = [&Base::Fl.settings()[..], &["output_dir=metadata.csv"]].concat();
    let below = [&Base::Fl.settings()[..], &["output_dir=metadata.csv/runs"]].concat();
    for command in [&["run", "--quiet", "--steps", "1"][..], &["check", "--steps", "1", "--tflops", "1"]] {
        for settings in [&output, &below] {
            let (passes, text) = ends_well(&world, command, settings);
            assert!(!passes && text.contains("metadata.csv") && text.contains("in the way"), "{command:?}: {text}");
        }
        let out = [command, &["--out", "metadata.csv/run"]].concat();
        assert!(!ends_well(&world, &out, &Base::Fl.settings()).0, "{out:?}");
    }
    let steps = |more: &[&str]| {
        let settings = [&Base::Fl.settings()[..], &["save_steps=1"], more].concat();
        ends_well(&world, &["check", "--steps", "1000000000000", "--tflops", "1"], &settings)
    };
    let (passes, text) = steps(&[]);
    assert!(!passes && text.contains("1000000000000 checkpoints of ") && text.contains("`max_ckpt_to_keep`"), "{text}");
    assert!(steps(&["max_ckpt_to_keep=2"]).0);
    // The size that is counted is the size that is written.
    let run = world.training("sized", 1, &[&SHORT[..], &["reward.name=brightness"]].concat()).output().unwrap();
    assert!(run.status.success(), "{}", stderr_text(&run));
    let size: u64 = files_below(&world.path("sized/checkpoints")).iter().map(|f| f.metadata().unwrap().len()).sum();
    let text = stderr_text(&run);
    let (before, _) = text.split_once(" parameters of `wan2_2`").unwrap();
    let parameters: String = before.rsplit(' ').next().unwrap().chars().filter(char::is_ascii_digit).collect();
    let counted = 12 * parameters.parse::<u64>().unwrap();
    assert!(size >= counted && size < counted + counted / 2 + 100_000, "{size} bytes, counted {counted}");
}

fn files_below(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

#[test]
fn notes_name_idle_devices_a_warm_up_without_end_and_missing_programs() {
    let world = World::new(1);
    let noted = |arguments: &[&str], settings: &[&str]| {
        std::fs::remove_dir_all(world.path("warm")).unwrap_or_default();
        let (passes, text) = ends_well(&world, arguments, &[&Base::Fl.settings()[..], settings].concat());
        assert!(passes, "{text}");
        text
    };
    let text = noted(&["check", "--on", "8x80"], &[]);
    assert!(text.contains("the run has 1 rank, the machine 8 devices") && text.contains("--ranks 8"), "{text}");
    let two = ["strategy.name=zero", "ranks=2"];
    assert!(noted(&["check", "--on", "1x80"], &two).contains("the run has 2 ranks, the machine 1 device: ranks share"));
    assert!(!noted(&["check", "--on", "2x80"], &two).contains("the machine"));
    // `cpu` is another name of `flex`, whose memory is that of this machine.
    for backend in ["backend=cpu", "backend=flex"] {
        assert!(!noted(&["check", "--tflops", "1"], &[backend]).contains("`--memory GB` says"), "{backend}");
    }
    let warm_up = ["training.warmup_steps=100", "training.lr_scheduler_type=linear"];
    let programs = ["on_finish=[no-such-program]", "on_metrics=[./nowhere]"];
    for command in [&["run", "--steps", "1", "--out", "warm"][..], &["check", "--steps", "4", "--tflops", "1"]] {
        assert!(noted(command, &warm_up).contains("never reaches"), "{command:?}");
        assert!(noted(command, &warm_up[..1]).contains("`training.warmup_steps: 100` has no effect"), "{command:?}");
        let text = noted(command, &programs);
        assert!(text.contains("`no-such-program` is not there") && text.contains("`./nowhere`"), "{text}");
    }
}

#[test]
fn validation_on_the_training_data_is_said_by_check_run_and_report() {
    let world = World::new(3);
    // A copy elsewhere, of which two rows are trained on, and one has a clip of its own.
    std::fs::create_dir(world.path("copy")).unwrap();
    for (from, to) in [("0.mp4", "0.mp4"), ("1.mp4", "one.mp4"), ("2.mp4", "2.mp4")] {
        std::fs::copy(world.path(from), world.path("copy").join(to)).unwrap();
    }
    let rows = "video,prompt\n0.mp4,a grey square 0\none.mp4,a grey square 1\n2.mp4,another prompt\n";
    std::fs::write(world.path("copy/rows.csv"), rows).unwrap();
    let note = "2 rows of 3 of `evaluation.metadata` are trained on, too";
    for base in [Base::Fl, Base::Fm] {
        let settings = [&base.settings()[..], &["evaluation.metadata=copy/rows.csv", "sample_steps=0"]].concat();
        assert!(ends_well(&world, &["check", "--steps", "1", "--tflops", "1"], &settings).1.contains(note));
        let (done, text) = ends_well(&world, &["run", "--steps", "2", "--out", "run"], &settings);
        assert!(done && text.contains(note), "{text}");
        let page = std::fs::read_to_string(world.path("run/report.html")).unwrap();
        assert!(
            page.contains("of which 2 are trained on, too") && !page.contains("that were not trained on"),
            "{page}"
        );
        std::fs::remove_dir_all(world.path("run")).unwrap();
    }
    let turns = |text: &str| {
        let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        format!("{}\n", serde_json::json!({"messages": [turn("user", text), turn("assistant", "b")]}))
    };
    std::fs::write(world.path("good.jsonl"), turns("a") + &turns("b")).unwrap();
    std::fs::write(world.path("held.jsonl"), turns("b") + &turns("c")).unwrap();
    let settings = [&Base::Sft.settings()[..], &["algo.val_data=held.jsonl", "sample_steps=0"]].concat();
    let note = "1 of 2 conversations of `algo.val_data` are trained on, too";
    assert!(ends_well(&world, &["check", "--steps", "1", "--tflops", "1"], &settings).1.contains(note));
    let (done, text) = ends_well(&world, &["run", "--steps", "1", "--out", "run"], &settings);
    assert!(done && text.contains(note), "{text}");
    let page = std::fs::read_to_string(world.path("run/report.html")).unwrap();
    assert!(page.contains("conversations, 1 of 2 of which are trained on, too"), "{page}");
}
