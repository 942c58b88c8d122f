"""Draws what each algorithm makes of the demo: the score of unseen people over the time and over the KL.

Runs are named METHOD-SEED, as these commands leave them (each takes 5 to 10 minutes on one core):

    for s in 1 2 3; do
        E="--model wan2_2 -q --set seed=$s --set evaluation.every=10"
        roll run --algo reward_fl     $E --out runs/window-$s
        roll run --algo reward_fl     $E --out runs/last1-$s   --set algo.trained_steps.last=1
        roll run --algo reward_fl     $E --out runs/random1-$s --set algo.trained_steps.random=1
        roll run --algo diffusion_nft $E --out runs/nft-$s
        roll run --algo flow_grpo     $E --out runs/grpo-$s
    done
    python3 bench/algorithms.py runs --output algorithms.png

Seconds are those of training, without evaluations: the number of steps times a method's median step, that of its
fastest seed, so that other work on the machine counts little. Needs matplotlib.
"""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

METHODS = {
    "window": ("Reward-FL, window", "#1b6ca8"),
    "last1": ("Reward-FL, last: 1", "#58a4d6"),
    "random1": ("Reward-FL, random: 1", "#7b5ea7"),
    "nft": ("DiffusionNFT", "#d1495b"),
    "grpo": ("Flow-GRPO", "#edae49"),
}


def read(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(metrics, seconds_a_step):
    """Seconds of training, KL, score and score of the check at each evaluation of a run."""
    for step in metrics:
        if "eval/unseen" in step:
            yield step["step"] * seconds_a_step, *(step[f"eval/unseen{part}"] for part in ("_kl", "", "_check"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--output", default="algorithms.png")
    arguments = parser.parse_args()
    figure, (over_time, over_kl) = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    print("| | seconds | unseen | check | KL |\n|---|---|---|---|---|")
    for method, (label, colour) in METHODS.items():
        runs = [read(run) for run in sorted(arguments.runs.glob(f"{method}-[0-9]*/"))]
        steps = [[step["time/step"] for step in metrics if "time/step" in step] for metrics in runs]
        seconds_a_step = min(map(statistics.median, filter(None, steps)), default=0.0)
        all_points = [list(evaluations(metrics, seconds_a_step)) for metrics in runs]
        for i, points in enumerate(all_points):
            seconds, kl, score, _ = zip(*points)
            style = {"color": colour, "marker": ".", "linewidth": 1.3, "label": label if i == 0 else None}
            over_time.plot(seconds, score, **style)
            over_kl.plot(kl, score, **style)
        ends = [points[-1] for points in all_points]
        if ends:
            seconds, kl, score, check = (", ".join(f"{v:.{d}f}" for v in c) for c, d in zip(zip(*ends), (0, 3, 3, 3)))
            print(f"| {label} | {seconds} | {score} | {check} | {kl} |")
    over_time.set(xlabel="seconds of training, one core", ylabel="identity of unseen people")
    over_kl.set(xlabel="KL to the base model")
    over_time.legend(frameon=False)
    for axes in (over_time, over_kl):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.output, dpi=130)


if __name__ == "__main__":
    main()
