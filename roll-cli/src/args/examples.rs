//! Examples at the end of each help text. Lines have at most 79 columns, so that a terminal of 80 shows a command as it
//! is typed.

pub const ROLL: &str = r"Examples:
  roll run                              the demo
  roll run my.yaml --set training.learning_rate=1e-5
  roll run --resume runs/my             continue where it stopped
  roll report runs/my runs/other
`roll COMMAND --help` has examples of each command.

Exit codes:
  0    done
  1    something failed
  2    your input is wrong
  3    ended early by `evaluation.stop_when`
  130  interrupted, after a checkpoint";

pub const RUN: &str = r"Examples:
  roll run                                         the demo
  roll run --model z_image                         the demo of pictures
  roll run --algo agentic_ppo --model causal_lm    the demo of an agent
  roll run my.yaml --set strategy.name=zero --set save_steps=10
  roll run --resume runs/my                        continue where it stopped
  roll run --resume runs/my --steps 200            continue, and train longer

SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 write a
checkpoint and exit with 130; a second Ctrl-C stops at once.";

pub const INIT: &str = r"Examples:
  roll init                     asks, and writes roll.yaml
  roll init my.yaml && roll run my.yaml
  roll init my.yaml --yes --set algo.name=flow_matching \
    --set model.model_paths=wan22_paths.json --set data.metadata=clips

Each answer is checked when it is given. If you name no files of a model, the
written configuration is that of the demo.";

pub const CHECK: &str = r"Examples:
  roll check my.yaml
  roll check my.yaml --on 1x80 --samples 100

It takes the arguments of `roll run`, reads headers of weights, writes nothing,
and exits with 1 if the run would fail.";

pub const GENERATE: &str = r"Examples:
  roll generate --config runs/my/config.yaml --adapter runs/my \
    --prompt 'a person talks' --image face.png --output out.mp4
  roll generate --set model.model_paths=wan22_paths.json \
    --set model.tokenizer_path=google/umt5-xxl --prompts prompts.txt \
    --image face.png --timesteps 1000,750,500,250 --output out.mp4";

pub const ASK: &str = r"Examples:
  roll ask --model-path Qwen/Qwen2.5-0.5B-Instruct 'Where is Paris?'
  roll ask --model-path SmolLM2-135M-Instruct.Q4_1.gguf --temperature 0.7 \
    'Tell me a story.'";

pub const EVAL: &str = r"Examples:
  roll eval runs/sums                       the base and the newest checkpoint
  roll eval runs/sums --questions exam.jsonl --samples 8 --json
  roll eval --model-path Qwen/Qwen2.5-0.5B-Instruct --questions exam.jsonl
  roll eval --env frozen_lake --adapter runs/lake --episodes 200";

pub const SCORE: &str = r"Example:
  roll score clip.mp4 --reference portrait.png --reward insightface \
    --set reward.reward_model_path=antelopev2";

pub const DATA: &str = r"Examples:
  roll data inspect my/clips
  roll data prepare my/clips prepared --set data.fps=16";

pub const DATA_INSPECT: &str = r"Examples:
  roll data inspect my/metadata.csv
  roll data inspect my/clips --set data.fps=16 \
    --set 'data.bucket_ratios=[1.78, 1, 0.56]'
  roll data inspect my/clips --set reward.name=insightface \
    --set reward.reward_model_path=antelopev2";

pub const DATA_PREPARE: &str = r"Examples:
  roll data prepare my/clips prepared --set data.fps=16 \
    --set data.num_frames=81 --set data.max_pixels=399360
  roll data prepare my/clips faces --crop face \
    --set data.height=480 --set data.width=480 --set reward.name=insightface \
    --set reward.reward_model_path=antelopev2";

pub const DATA_CAPTION: &str = r"Examples:
  roll data caption my/clips --url http://127.0.0.1:8000/v1 \
    --model Qwen/Qwen2.5-VL-7B-Instruct --frames 8 --output my/metadata.jsonl

A kill or a failure loses no answer: the same command goes on.";

pub const DATA_VOTES: &str = r"Example:
  roll data votes runs/a votes.jsonl

A line has the prompt, the question, the paths of the clips, and that of the
chosen one: null for a vote for 'equal'.";

pub const REWARDS: &str = r"Example:
  roll rewards try sharpness clip.mp4 --set reward.wanted=reference \
    --reference other.mp4 --output gradient.png";

pub const INIT_TINY: &str = r"Example:
  roll init-tiny tiny --kind ti2v";

pub const REPORT: &str = r"Examples:
  roll report runs/a
  roll report runs/a runs/b --output compare.html";

pub const WATCH: &str = r"Examples:
  roll watch runs/a
  roll watch runs/a runs/b --port 4711 --control
  roll watch --vote runs/a

The page can be opened on this machine only, by the printed address, which has
a secret. From another machine: ssh -L 4711:127.0.0.1:4711 HOST, with
--port 4711.";

pub const PLOT: &str = r"Example:
  roll plot runs/a runs/b --x eval/unseen_kl --y eval/unseen --output plot.svg";

pub const INIT_EXPERTS: &str = r"Example:
  roll init-experts small --dim 256 --heads 8 --layers 12";

pub const EXPORT: &str = r"Example:
  roll export runs/x qwen-trained
  vllm serve qwen-trained";

pub const EXPORT_EXPERT: &str = r"Example:
  roll export-expert runs/x/checkpoints/step-000100 \
    --base wan/low_noise_model --out wan-trained/low_noise_model";

pub const MERGE_LORA: &str = r"Example:
  roll merge-lora wan/low_noise_model low_noise_lora.safetensors merged \
    --alpha 0.8 --dtype bf16

OUT is a file if it ends in .safetensors, otherwise a new directory with the
shards of the base.";

pub const CONVERT_LORA: &str = r"Examples:
  roll convert-lora runs/x kohya.safetensors --to kohya
  roll convert-lora lora.safetensors peft_adapter --to peft --names diffusers

A file with adapters for both transformers becomes two, OUT_high_noise and
OUT_low_noise.";

pub const MERGE_SHARDS: &str = r"Example:
  roll merge-shards wan/high_noise_model high_noise.safetensors --dtype bf16";

pub const SPLIT_SHARDS: &str = r"Example:
  roll split-shards high_noise.safetensors wan/high_noise_model --max-size 5GB";

pub const INSPECT: &str = r"Examples:
  roll inspect lora.safetensors
  roll inspect runs/my --json";

pub const PLUGINS: &str = r"Examples:
  roll plugins list
  roll plugins info insightface
  roll plugins check target/release/libsharpness_reward.so";

pub const DEVICES: &str = r"Examples:
  roll devices
  roll devices --json";

pub const PLAN: &str = r"Examples:
  roll plan --network wan2_2-i2v-a14b --on 8x80 --set strategy.name=zero \
    --set strategy.stage=3
  roll plan --algo agentic_ppo --model causal_lm --memory 8";

pub const BENCH: &str = r"Examples:
  roll bench
  roll bench --preset a14b --backend libtorch-cuda --json a14b.json
  roll bench --preset a14b --backend libtorch-cuda --whole-step --offload
  roll bench --preset 1.3b --layers 2 --frames 17 --size 240x416";

pub const CONFIG: &str = r"Examples:
  roll config --config my.yaml --set training.learning_rate=1e-5
  roll config --reference training
  roll config --reference lora_rank
  roll config --template --algo flow_matching > my.yaml";

pub const COMPLETIONS: &str = r#"Examples:
  roll completions bash > ~/.local/share/bash-completion/completions/roll
  roll completions zsh > "${fpath[1]}/_roll"
  roll completions fish > ~/.config/fish/completions/roll.fish"#;
