"""Draws what each algorithm makes of the demo at an equal number of passes of the DiT: the gain in the score
of unseen people, and in that of the second embedder, over the passes and over the KL.

Runs are named METHOD-SEED, as these commands leave them, on one core each (RAYON_NUM_THREADS=1):

    run() {
        /usr/bin/time -a -o runs/$1-$s.cpu -f %U+%S roll run -q --out runs/$1-$s --set seed=$s --steps $2 \\
            --set evaluation.every=$((($2 + 3) / 4)) --set evaluation.samples=12 --set evaluation.train_samples=0 \\
            --model wan2_2 --ranks 1 --set training.warmup_steps=2 "${@:3}"
    }
    high() { run "$@" --algo reward_fl --set algo.mid_timestep=0 --set algo.gradient_split_every=0 \\
        --set model.trainable_models=dit; }
    reward_fl() { run "$@" --algo reward_fl --set algo.mid_timestep=3 --set algo.gradient_split_every=0; }
    grpo() { run "$@" --algo flow_grpo --set algo.eta=0.7 --set algo.advantage_spread=step \\
        --set training.learning_rate=3e-3; }
    for s in 1 2 3; do
        reward_fl window 96
        reward_fl last1 173    --set algo.trained_steps.last=1
        reward_fl leap 144     --set algo.trained_steps.leap.discount=0.3
        reward_fl renoised 157 --set algo.trained_steps.renoised=1
        run nft 14             --algo diffusion_nft
        grpo grpo 15           --set algo.same_latent=false --set algo.share_prefix=false
        grpo share 19
        high highwindow 45
        high highleap 72       --set algo.trained_steps.leap.discount=0.3
    done
    python3 bench/algorithms.py runs --output algorithms.png

A pass is one forward or one backward pass of the DiT for one video. The recomputation of gradient checkpointing and the
passes of evaluations do not count. A step has one clip. METHODS has its passes, which follow from the configuration:
n = 8 denoising steps, of which k are trained, each with a forward pass of the KL's reference and a backward pass.

    window, last, leap        n + 2 k              8 + 2*5, 8 + 2*1, 8 + 2*2
    renoised                  n + 3 k              8 + 3*1
    nft                       8 videos (n + 4 k)   k = 2 noised copies: policy, old policy, reference, backward
    grpo                      8 videos (n + 3 k)   k = 2 stochastic steps
    share                     7 * 3 fewer          three steps before the window, computed once for 8 videos
    highwindow                n + 3 + 8            the gradient passes all 8 steps; 3 have a reference

With `mid_timestep: 3`, Reward-FL trains at the steps of the low-noise expert, as the other methods do, and the KL is
measured at the same steps. CPU seconds are those of the whole process (user and system), evaluations included. Lines
are means over the seeds, bands their range. Needs matplotlib.
"""

import argparse
import json
import pathlib
from statistics import mean

import matplotlib
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot

# Label, passes of a step, and the style of the line; methods without one are in the table only.
METHODS = {
    "window": ("Reward-FL, window", 18, ("#0072B2", "-", "o")),
    "last1": ("Reward-FL, last: 1", 10, ("#56B4E9", "-", "s")),
    "leap": ("Reward-FL, leap", 12, ("#009E73", "-", "^")),
    "renoised": ("Reward-FL, renoised: 1", 11, ("#CC79A7", "-", "v")),
    "nft": ("DiffusionNFT", 128, ("#D55E00", "--", "o")),
    "grpo": ("Flow-GRPO", 112, ("#000000", ":", "^")),
    "share": ("Flow-GRPO, share_prefix", 91, ("#808080", ":", "v")),
    "highwindow": ("high-noise expert, window", 19, None),
    "highleap": ("high-noise expert, leap", 12, None),
}
SCORES = {"eval/unseen": "gain in identity of unseen people", "eval/unseen_check": "gain by the second embedder"}


def evaluations(run, passes_of_a_step):
    """Each evaluation of a run: passes, gains of score and check, and KL.

    The noise of evaluations depends on the seed, and so do the scores before training.
    """
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [step for step in lines if "eval/unseen" in step]
    for step in steps:
        gains = (step[name] - steps[0][name] for name in SCORES)
        yield step["step"] * passes_of_a_step, *gains, step["eval/unseen_kl"]


def cpu_seconds(run):
    """User and system time of all processes of a run: several, if it was resumed."""
    return sum(float(part) for part in run.with_suffix(".cpu").read_text().replace("+", " ").split())


def label(axes, ends):
    """Writes the label of each line at the height of its end, or above the label below."""
    low, high = axes.get_ylim()
    y = low
    for end, text, colour in sorted(ends):
        y = max(y + 0.052 * (high - low), end)
        axes.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), color=colour, fontsize=9, va="center")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--output", default="algorithms.png")
    arguments = parser.parse_args()
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7.5), sharey="row", sharex="col", layout="constrained")
    ends = {name: [] for name in SCORES}
    print("| | steps | passes | CPU seconds | unseen | check | KL |\n|---|---|---|---|---|---|---|")
    for method, (name, passes_of_a_step, style) in METHODS.items():
        paths = sorted(arguments.runs.glob(f"{method}-[0-9]*/"))
        if not paths:
            continue
        runs = [list(evaluations(path, passes_of_a_step)) for path in paths]
        last = [run[-1] for run in runs]
        columns = list(zip(*last))
        spread = [f"{mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in columns[1:]]
        seconds, total = mean(map(cpu_seconds, paths)), columns[0][0]
        print(f"| {name} | {total // passes_of_a_step} | {total} | {seconds:.0f} | {' | '.join(spread)} |")
        if style is None:
            continue
        colour, line, marker = style
        # Each column has the seeds' values at each evaluation.
        passes, *scores, kl = (list(zip(*column)) for column in zip(*(zip(*run) for run in runs)))
        passes = [seeds[0] for seeds in passes]
        for (over_passes, over_kl), values, score in zip(panels, scores, SCORES):
            means = [mean(seeds) for seeds in values]
            drawn = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "linewidth": 1.6}
            over_passes.plot(passes, means, **drawn)
            low, high = [min(seeds) for seeds in values], [max(seeds) for seeds in values]
            over_passes.fill_between(passes, low, high, color=colour, alpha=0.12, linewidth=0)
            over_kl.plot([mean(seeds) for seeds in kl], means, **drawn)
            over_kl.plot(columns[-1], values[-1], color=colour, linestyle="", marker=marker, markersize=3, alpha=0.5)
            ends[score].append((means[-1], name, colour))
    for (over_passes, over_kl), (score, title) in zip(panels, SCORES.items()):
        over_passes.set(ylabel=title)
        label(over_kl, ends[score])
    panels[1][0].set(xlabel="passes of the DiT")
    panels[1][1].set(xlabel="KL to the base model")
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.output, dpi=120)
    # A palette halves the file.
    Image.open(arguments.output).convert("RGB").quantize(128).save(arguments.output, optimize=True)


if __name__ == "__main__":
    main()
