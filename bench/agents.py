"""Draws how agents learn: success on starts that training never sees, over the steps, for each world and estimator.

Runs are named WORLD-ESTIMATOR-SEED, as these commands leave them. On one core a run takes 7 to 8 minutes on FrozenLake, 11
on slippery ice and 15 on Sokoban, whose start is made as demo/README.md says:

    for s in 1 2 3; do
        A="--algo agentic_ppo --model causal_lm -q --set seed=$s"
        L="$A --env frozen_lake --set algo.adv_estimator"
        roll run $L=grpo  --out runs/lake-grpo-$s
        roll run $L=gigpo --out runs/lake-gigpo-$s
        roll run $L=gae   --out runs/lake-gae-$s --set algo.lambd=1 --set algo.whiten_advantages=true
        roll run --config demo/agent/slippery.yaml -q --set seed=$s --out runs/slippery-step_reinforce-$s
        roll run --config demo/agent/sokoban.yaml  -q --set seed=$s --out runs/sokoban-step_reinforce-$s
    done
    python3 bench/agents.py runs --output agents.png

A line is the mean of the seeds, its shade their range. Needs matplotlib.
"""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WORLDS = {"lake": "FrozenLake 4x4", "slippery": "FrozenLake 4x4, slippery", "sokoban": "Sokoban 6x6, one box"}
ESTIMATORS = {"gae": "#1b6ca8", "grpo": "#edae49", "gigpo": "#d1495b", "step_reinforce": "#7b5ea7"}


def evaluations(run):
    """Success in percent at each step that was evaluated."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        if "val/env/success" in step:
            found[step["step"]] = 100 * step["val/env/success"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--output", default="agents.png")
    arguments = parser.parse_args()
    found = {
        (world, estimator): [evaluations(run) for run in sorted(arguments.runs.glob(f"{world}-{estimator}-[0-9]*/"))]
        for world in WORLDS
        for estimator in ESTIMATORS
    }
    worlds = [world for world in WORLDS if any(found[world, estimator] for estimator in ESTIMATORS)]
    figure, plots = pyplot.subplots(
        1, len(worlds), figsize=(4.2 * len(worlds), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    print("| world | estimator | before | after |\n|---|---|---|---|")
    for axes, world in zip(plots[0], worlds):
        for estimator, colour in ESTIMATORS.items():
            runs = [run for run in found[world, estimator] if run]
            if not runs:
                continue
            # Steps at which every seed was evaluated.
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            at = [[run[step] for run in runs] for step in steps]
            axes.fill_between(steps, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.18, linewidth=0)
            axes.plot(steps, list(map(statistics.mean, at)), color=colour, marker=".", label=estimator)
            before, after = (", ".join(f"{run[step]:.1f}" for run in runs) for step in (steps[0], steps[-1]))
            print(f"| {WORLDS[world]} | {estimator} | {before} | {after} after {steps[-1]} steps |")
        axes.set(title=WORLDS[world], xlabel="step")
        axes.legend(frameon=False, loc="lower right")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    plots[0][0].set(ylabel="success on unseen starts, %", ylim=(0, 100))
    figure.savefig(arguments.output, dpi=130)


if __name__ == "__main__":
    main()
