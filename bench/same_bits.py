#!/usr/bin/env python3
"""Trains with two builds of `roll` and compares what they leave, bit for bit.

    bench/same_bits.py BEFORE AFTER [--only TEXT] [--plugins DIRECTORY] [--backend NAME]
    bench/same_bits.py --self-test ROLL

For a change that must not change a number: keep the program of the commit before it, then compare the new one with it.

    cp target/release/roll /tmp/before && git switch the-change && cargo test --release --workspace --no-run
    bench/same_bits.py /tmp/before target/release/roll --plugins target/release/deps

Every algorithm runs for two steps on one rank and on two, on networks that `roll init-tiny` of BEFORE writes, clips of
the demo, and the built-in world of agents. What a build chooses by itself (learning rates) is set, so that a changed
default is no difference. Each run is compared with that of BEFORE:

    AFTER                        from the start to the end
    AFTER, resumed               its last checkpoint removed, and `roll run --resume`: the second step again
    AFTER, as plugins            algorithm, model and strategy from the libraries in DIRECTORY

Compared are all weight files of all checkpoints, tensor by tensor, and the metrics without times and sizes of memory.
Prints a line for each comparison; ends with 1 if one differs.

`--self-test` compares ROLL with itself in a few of these runs, which must be the same, and with another seed, which
must differ. It is part of the tests (`--test it same_bits`).
"""

import argparse
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VIDEO = ["model.model_paths=tiny/wan22_paths.json", "model.tokenizer_path=tiny/google/umt5-xxl", "model.lora_rank=2",
         "data.metadata=metadata.csv", "data.height=64", "data.width=64", "data.num_frames=5", "sample_steps=0",
         "training.learning_rate=1e-3"]
PICTURES = ["model.name=z_image", "model.model_path=pictures", "model.lora_rank=2", "data.metadata=metadata.csv",
            "data.height=64", "data.width=64", "data.num_frames=1", "sample_steps=0", "training.learning_rate=1e-3"]
SHORT = ["algo.num_inference_steps=2", "algo.mid_timestep=1", "algo.final_timestep=1"]
LONGER = ["algo.num_inference_steps=5", "algo.mid_timestep=0", "algo.final_timestep=4"]
REWARD = ["reward.name=brightness"]
GROUPS = ["algo.num_inference_steps=4", "algo.group_size=3", *REWARD]
WORLD = ["algo.num_env_groups=2", "algo.group_size=4", "algo.max_actions_per_traj=3", "algo.val_batch_size=4",
         "training.learning_rate=1e-3"]
TALK = ["algo.data=talk.jsonl", "training.learning_rate=1e-3"]
PAIRS = ["algo.data=pairs.jsonl", "training.learning_rate=1e-3"]
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
    ("reward_fl, data term, sum of rewards", "reward_fl",
     [*VIDEO, *SHORT, "reward=[{name: brightness}, {name: sharpness, weight: 0.5}]", "algo.data_weight=0.5",
      "training.gradient_accumulation_steps=2"]),
    ("reward_fl, int8, averaged", "reward_fl",
     [*VIDEO, *REWARD, *SHORT, "model.weights_dtype=int8", "training.average=0.9"]),
    ("reward_fl, bf16", "reward_fl", [*VIDEO, *REWARD, *SHORT, "model.compute_dtype=bf16"]),
    ("reward_fl, z_image", "reward_fl", [*PICTURES, *REWARD, *SHORT]),
    ("flow_matching", "flow_matching", VIDEO),
    ("flow_matching, all weights", "flow_matching", [*VIDEO, *ALL_WEIGHTS, "model.trainable_models=dit2"]),
    ("diffusion_nft", "diffusion_nft", [*VIDEO, *GROUPS, "algo.data_weight=0.5", "algo.reward_gradient.weight=0.1"]),
    ("diffusion_nft, awm", "diffusion_nft", [*VIDEO, *GROUPS, "algo.loss=awm", "algo.updates_per_step=2"]),
    ("flow_grpo", "flow_grpo", [*VIDEO, *GROUPS, "algo.updates_per_step=2"]),
    ("flow_grpo, z_image", "flow_grpo", [*PICTURES, *GROUPS]),
    ("flow_grpo, shared prefix", "flow_grpo",
     [*VIDEO, *GROUPS, "algo.same_latent=true", "algo.share_prefix=true", "algo.window=1", "algo.step_weight=noise"]),
    ("agentic_ppo", "agentic_ppo", WORLD),
    ("agentic_ppo, critic", "agentic_ppo", [*WORLD, "algo.adv_estimator=gae", "algo.critic_epochs=2"]),
    ("agentic_ppo, ahead, slippery", "agentic_ppo",
     [*WORLD, "algo.async_generation_ratio=1", "env.is_slippery=true", "algo.ppo_epochs=2"]),
    ("agentic_ppo, all weights", "agentic_ppo", [*WORLD, *ALL_WEIGHTS]),
    ("sft", "sft", TALK),
    ("sft, all weights", "sft", [*TALK, *ALL_WEIGHTS]),
    ("dpo", "dpo", PAIRS),
    ("dpo, all weights", "dpo", [*PAIRS, *ALL_WEIGHTS]),
]
# Number of ranks, and what the strategy is.
RANKS = [
    ("1 rank", ["ranks=1", "strategy.name=single"]),
    ("1 rank, zero", ["ranks=1", "strategy.name=zero", "strategy.stage=2"]),
    ("2 ranks", ["ranks=2", "strategy.name=zero", "strategy.stage=2"]),
    ("2 ranks, stage 3", ["ranks=2", "strategy.name=zero", "strategy.stage=3"]),
]
# Built-in components that are libraries too.
PLUGINS = ["zero", "wan2_2", "z_image", "insightface", "reward_fl", "diffusion_nft", "flow_grpo", "agentic_ppo"]
# Runs and ranks of the self-test.
SELF_TEST = [("reward_fl", "1 rank"), ("flow_matching", "2 ranks"), ("agentic_ppo", "1 rank"), ("sft", "2 ranks")]
# The tensor of a checkpoint that was written while a rollout of the next step was under way.
AHEAD = "policy_of_rollout"
# Parts of the names of metrics that differ from run to run.
MEASURED = ("time/", "memory", "answered_from_cache", "/requests", "reward/tokens")


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
    return [{name: value for name, value in row.items() if not any(part in name for part in MEASURED)} for row in rows]


def weight_files(run):
    """The files, but those of a policy that a rollout ahead still generates with: it may have ended before the step."""
    paths = (run / "checkpoints").rglob("*.safetensors")
    return {path.relative_to(run) for path in paths if set(tensors(path)) != {AHEAD}}


def differences(before, after):
    """What differs between two run directories: tensors by name, then metrics of the newer that the older has too."""
    files = [weight_files(run) for run in (before, after)]
    found = [f"{path} of one alone" for path in sorted(files[0] ^ files[1])]
    compared = 0
    for path in sorted(files[0] & files[1]):
        old, new = tensors(before / path), tensors(after / path)
        compared += len(old)
        found += [f"{path}: {name}" for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    rows = [metrics(run) for run in (before, after)]
    if len(rows[0]) != len(rows[1]):
        found.append(f"metrics: {len(rows[0])} and {len(rows[1])} lines")
    for old, new in zip(*rows):
        found += [f"metrics: {name} {old[name]} and {new[name]}" for name in sorted(old.keys() & new.keys())
                  if old[name] != new[name]]
    if not compared:
        found.append("no checkpoint holds a tensor")
    return found, compared


def make_world(roll, directory):
    """Networks, four clips of the demo, and conversations."""
    for name, kind in [("tiny", "i2v"), ("pictures", "z_image")]:
        subprocess.run([roll, "init-tiny", directory / name, "--kind", kind], check=True, capture_output=True)
    clips = ROOT / "demo" / "assets" / "clips" / "train"
    rows = (clips / "metadata.csv").read_text().splitlines()[:5]
    (directory / "metadata.csv").write_text("\n".join(rows) + "\n")
    for row in rows[1:]:
        name = row.split(",")[0]
        shutil.copyfile(clips / name, directory / name)
    talk = [{"messages": [{"role": "user", "content": f"{i}+1"}, {"role": "assistant", "content": str(i + 1)}]}
            for i in range(8)]
    (directory / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))
    pairs = [{"prompt": row["messages"][0]["content"], "chosen": row["messages"][1]["content"], "rejected": "at hole"}
             for row in talk]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


class Problem(Exception):
    pass


class Comparison:
    """Runs in one directory; counts comparisons that differ."""

    def __init__(self, directory, backend):
        self.directory, self.backend, self.failed, self.number = directory, backend, 0, 0
        names = {name: value for name, value in os.environ.items() if not name.startswith("ROLL_")}
        self.environment = names | {"ROLL_CACHE": "none", "ROLL_STATE": str(directory / "state")}

    def roll(self, *command):
        ended = subprocess.run(command, cwd=self.directory, env=self.environment, capture_output=True, text=True)
        if ended.returncode:
            raise Problem(f"ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")

    def train(self, roll, algorithm, settings, arguments=()):
        """Trains for two steps with a checkpoint each; returns the run directory."""
        self.number += 1
        out = self.directory / f"run{self.number}"
        command = [roll, "run", "-q", "--algo", algorithm, "--out", out, "--steps", "2"]
        if not any(setting.startswith("model.name=") for setting in settings):
            command += ["--model", "causal_lm" if algorithm in ("agentic_ppo", "sft", "dpo") else "wan2_2"]
        command += ["--backend", self.backend, *arguments]
        command += [word for setting in ["save_steps=1", *settings] for word in ("--set", setting)]
        self.roll(*command)
        return out

    def resume(self, roll, run):
        """Trains the last step of a run again, as if it had been killed before its end."""
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))
        (run / "summary.json").unlink()
        self.roll(roll, "run", "-q", "--resume", run)

    def compare(self, title, before, run):
        """`run` makes the run directory that is compared with `before`, and returns it."""
        compared, after = 0, None
        try:
            after = run()
            said, compared = differences(before, after)
        except Problem as problem:
            said = [str(problem)]
        self.failed += bool(said)
        verdict = "DIFFERS" if said else "same"
        more = f" and {len(said) - 2} more" * (len(said) > 2)
        print(f"{title:<68} {verdict:<8} {compared:>5} tensors  {'; '.join(said[:2])}{more}", flush=True)
        return after


def compare_builds(comparison, before, after, only, plugins):
    for name, algorithm, settings in RUNS:
        for ranks, strategy in RANKS:
            title = f"{name}, {ranks}"
            if only not in title:
                continue
            # Weights in eight bits are not sharded.
            if "strategy.stage=3" in strategy and "model.weights_dtype=int8" in settings:
                continue
            every = [*settings, *strategy]
            try:
                expected = comparison.train(before, algorithm, every)
            except Problem as problem:
                comparison.failed += 1
                print(f"{title:<68} BEFORE {problem}", flush=True)
                continue
            run = comparison.compare(title, expected, lambda: comparison.train(after, algorithm, every))
            if run:
                def resumed():
                    comparison.resume(after, run)
                    return run
                comparison.compare(f"{title}, resumed", expected, resumed)
            # A model behind the border cannot generate while it is updated.
            if plugins and "algo.async_generation_ratio=1" not in settings:
                # Weights that are sharded need the strategy that is linked in.
                names = [name for name in PLUGINS if name != "zero" or "strategy.stage=3" not in strategy]
                libraries = [word for name in names for word in ("--plugin", os.path.join(plugins, f"lib{name}.so"))]
                comparison.compare(f"{title}, as plugins", expected,
                                   lambda: comparison.train(after, algorithm, every, [*libraries, "--plugins-replace"]))


def self_test(comparison, roll):
    """Whether equal runs are told from different ones. Returns the number of wrong verdicts."""
    wrong = 0
    for wanted, ranks in SELF_TEST:
        algorithm, settings = next((algorithm, settings) for name, algorithm, settings in RUNS if name == wanted)
        every = [*settings, *dict(RANKS)[ranks]]
        expected = comparison.train(roll, algorithm, every)
        for title, differs, more in [(f"{wanted}, {ranks}", False, []), (f"{wanted}, another seed", True, ["seed=7"])]:
            failed = comparison.failed
            comparison.compare(title, expected, lambda: comparison.train(roll, algorithm, every + more))
            wrong += (comparison.failed > failed) != differs
        # A run that has all but one bit of one tensor.
        path = sorted(weight_files(expected))[0]
        other = comparison.directory / f"{expected.name}-flipped"
        shutil.copytree(expected, other)
        data = bytearray((other / path).read_bytes())
        data[-1] ^= 1
        (other / path).write_bytes(data)
        failed = comparison.failed
        comparison.compare(f"{wanted}, one bit", expected, lambda: other)
        wrong += comparison.failed == failed
    print(f"{wrong} wrong verdicts")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name has it")
    parser.add_argument("--plugins", metavar="DIRECTORY", help="also train with the built-in components as libraries")
    parser.add_argument("--backend", default="flex")
    parser.add_argument("--self-test", metavar="ROLL")
    arguments = parser.parse_args()
    if bool(arguments.self_test) == bool(arguments.after):
        parser.error("expected BEFORE and AFTER, or --self-test ROLL")
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(pathlib.Path(scratch), arguments.backend)
        if arguments.self_test:
            roll = os.path.abspath(arguments.self_test)
            make_world(roll, comparison.directory)
            sys.exit(1 if self_test(comparison, roll) else 0)
        before, after = os.path.abspath(arguments.before), os.path.abspath(arguments.after)
        plugins = arguments.plugins and os.path.abspath(arguments.plugins)
        make_world(before, comparison.directory)
        compare_builds(comparison, before, after, arguments.only, plugins)
    print(f"{comparison.failed} differ")
    sys.exit(1 if comparison.failed else 0)


if __name__ == "__main__":
    main()
