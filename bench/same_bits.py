#!/usr/bin/env python3
"""Trains with two builds of `roll` and compares what they leave, bit for bit.

    bench/same_bits.py BEFORE AFTER [--only NAME] [--backend NAME]

Every algorithm runs for two steps on one rank and on two, on networks that `roll init-tiny` of BEFORE writes and on the
built-in world of agents. What a build chooses by itself (learning rates) is set, so that a changed default is no
difference. Compared are all weight files of the last checkpoint, tensor by tensor, and the metrics without times.
Prints a line for each run; ends with 1 if one differs. Needs ffmpeg.
"""

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

VIDEO = ["model.model_paths=tiny/wan22_paths.json", "model.tokenizer_path=tiny/google/umt5-xxl", "model.lora_rank=2",
         "data.metadata=metadata.csv", "data.height=64", "data.width=64", "data.num_frames=5", "sample_steps=0",
         "training.learning_rate=1e-3"]
SHORT = ["algo.num_inference_steps=2", "algo.mid_timestep=1", "algo.final_timestep=1"]
LONGER = ["algo.num_inference_steps=5", "algo.mid_timestep=0", "algo.final_timestep=4"]
REWARD = ["reward.name=brightness"]
GROUPS = ["algo.num_inference_steps=4", "algo.group_size=3", *REWARD]
WORLD = ["algo.num_env_groups=2", "algo.group_size=4", "algo.max_actions_per_traj=3", "algo.val_batch_size=4",
         "training.learning_rate=1e-3"]
ALL_WEIGHTS = ["model.lora_rank=0", "training.learning_rate=1e-4"]

# Name, algorithm, settings.
RUNS = [
    ("reward_fl", "reward_fl", [*VIDEO, *REWARD, *SHORT]),
    ("reward_fl, KL, both experts, leap", "reward_fl",
     [*VIDEO, *REWARD, *LONGER, "algo.kl_weight=0.1", "model.trainable_models=dit,dit2",
      "algo.trained_steps.leap.discount=0.5"]),
    ("reward_fl, random steps, stopped gradient", "reward_fl",
     [*VIDEO, *REWARD, *LONGER, "algo.trained_steps.random=2", "algo.stop_gradient=true"]),
    ("reward_fl, direct", "reward_fl", [*VIDEO, *REWARD, *LONGER, "algo.trained_steps.direct.step=0.05"]),
    ("reward_fl, int8, averaged", "reward_fl",
     [*VIDEO, *REWARD, *SHORT, "model.weights_dtype=int8", "training.average=0.9"]),
    ("reward_fl, bf16", "reward_fl", [*VIDEO, *REWARD, *SHORT, "model.compute_dtype=bf16"]),
    ("flow_matching", "flow_matching", VIDEO),
    ("flow_matching, all weights", "flow_matching", [*VIDEO, *ALL_WEIGHTS, "model.trainable_models=dit2"]),
    ("diffusion_nft", "diffusion_nft", [*VIDEO, *GROUPS, "algo.data_weight=0.5", "algo.reward_gradient.weight=0.1"]),
    ("diffusion_nft, awm", "diffusion_nft", [*VIDEO, *GROUPS, "algo.loss=awm", "algo.updates_per_step=2"]),
    ("flow_grpo", "flow_grpo", [*VIDEO, *GROUPS, "algo.updates_per_step=2"]),
    ("flow_grpo, shared prefix", "flow_grpo",
     [*VIDEO, *GROUPS, "algo.same_latent=true", "algo.share_prefix=true", "algo.window=1", "algo.step_weight=noise"]),
    ("agentic_ppo", "agentic_ppo", WORLD),
    ("agentic_ppo, critic", "agentic_ppo", [*WORLD, "algo.adv_estimator=gae", "algo.critic_epochs=2"]),
    ("agentic_ppo, all weights", "agentic_ppo", [*WORLD, *ALL_WEIGHTS]),
    ("sft", "sft", ["algo.data=talk.jsonl", "training.learning_rate=1e-3"]),
]


def tensors(path):
    """Name, form and bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    body = data[8 + length:]
    return {name: (about["dtype"], about["shape"], body[slice(*about["data_offsets"])])
            for name, about in header.items() if name != "__metadata__"}


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def differences(before, after):
    """What differs between two run directories: tensors by name, then metrics of the newer that the older has too."""
    newest = [max((run / "checkpoints").glob("step-*")) for run in (before, after)]
    files = [{path.relative_to(step) for path in step.rglob("*.safetensors")} for step in newest]
    found = [f"{path} of one alone" for path in sorted(files[0] ^ files[1])]
    compared = 0
    for path in sorted(files[0] & files[1]):
        old, new = tensors(newest[0] / path), tensors(newest[1] / path)
        compared += len(old)
        found += [f"{path}: {name}" for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    for old, new in zip(metrics(before), metrics(after), strict=True):
        found += [f"metrics: {name} {old[name]} and {new[name]}" for name in old.keys() & new.keys()
                  if old[name] != new[name]]
    if not compared:
        found.append("no checkpoint holds a tensor")
    return found, compared


def make_world(roll, directory):
    """Networks, clips of one grey each, and conversations."""
    subprocess.run([roll, "init-tiny", directory / "tiny", "--kind", "i2v"], check=True, capture_output=True)
    rows = ["video,prompt"]
    for i in range(4):
        (directory / f"{i}").mkdir()
        side, frames = 64, 9
        grey = bytes([40 + 50 * i]) * (side * side * 3)
        for frame in range(frames):
            (directory / f"{i}" / f"{frame:03}.ppm").write_bytes(b"P6\n%d %d\n255\n" % (side, side) + grey)
        command = ["ffmpeg", "-v", "error", "-r", "8", "-i", directory / f"{i}" / "%03d.ppm", directory / f"{i}.mp4"]
        subprocess.run(command, check=True)
        rows.append(f"{i}.mp4,a grey square {i}")
    (directory / "metadata.csv").write_text("\n".join(rows) + "\n")
    talk = [{"messages": [{"role": "user", "content": f"{i}+1"}, {"role": "assistant", "content": str(i + 1)}]}
            for i in range(8)]
    (directory / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))


def train(roll, directory, out, algorithm, settings, backend):
    model = "causal_lm" if algorithm in ("agentic_ppo", "sft") else "wan2_2"
    command = [roll, "run", "-q", "--algo", algorithm, "--model", model, "--out", out, "--steps", "2"]
    command += ["--backend", backend]
    command += [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name has it")
    parser.add_argument("--backend", default="flex")
    arguments = parser.parse_args()
    builds = {"before": os.path.abspath(arguments.before), "after": os.path.abspath(arguments.after)}
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        make_world(builds["before"], directory)
        for name, algorithm, settings in RUNS:
            for ranks in (1, 2):
                title = f"{name}, {ranks} rank{'s' * (ranks > 1)}"
                if arguments.only not in title:
                    continue
                more = [f"ranks={ranks}"] + ["strategy.name=zero", "strategy.stage=2"] * (ranks > 1)
                said = []
                for which, roll in builds.items():
                    out = f"{which}-{title}".replace(" ", "_").replace(",", "")
                    ended = train(roll, directory, out, algorithm, settings + more, arguments.backend)
                    if ended.returncode:
                        said.append(f"{which} ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
                compared = 0
                if not said:
                    outs = [directory / f"{which}-{title}".replace(" ", "_").replace(",", "") for which in builds]
                    said, compared = differences(*outs)
                failed += bool(said)
                verdict = "DIFFERS" if said else "same"
                print(f"{title:<52} {verdict:<8} {compared:>5} tensors  {'; '.join(said[:3])}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
