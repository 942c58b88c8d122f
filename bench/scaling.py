"""How the time and the memory of a Reward-FL step grow: one axis at a time, with the power that fits.

    python3 bench/scaling.py target/release/roll bench/results/scaling [--axes frames,samples] [--compare]

writes OUTPUT.json after each point and OUTPUT.png at the end; `--plot` draws an OUTPUT.json that is there. `frames` and
`tokens` are `roll bench` with random networks: seconds are those of a step, and the floating-point operations of the
transformer, which it counts, are fitted too. With `--compare` (PYTHON names a Python with torch and safetensors) the
same phases are timed in PyTorch. The other axes are `roll run` of the demo without evaluations: seconds are the median
step, the first left out. `steps` trains the second half, where the demo's trained expert works; `ranks` has one sample
for each rank and one thread for each, so more ranks than cores share these; `threads` is the demo on more cores.

Memory is the largest resident set of a process from start to end, the program and its weights included, so a power
below that of the seconds is expected. The power of all points is a least-squares line through the logarithms; costs
that do not depend on the axis lower it. That of the last two points is closer to the law of large sizes.
Needs matplotlib for the plot.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

AXES = {
    "frames": [9, 17, 33, 49, 81],
    "tokens": [64, 128, 256, 384],
    "steps": [2, 4, 8, 16],
    "rank": [4, 16, 64, 128],
    "samples": [1, 2, 4, 8],
    "ranks": [1, 2, 3, 4],
    "threads": [1, 2],
}
LABELS = {
    "frames": "frames of 32x32",
    "tokens": "tokens (9 square frames, no VAE)",
    "steps": "denoising steps, half of them trained",
    "rank": "rank of the LoRA",
    "samples": "samples of a step",
    "ranks": "ranks, one sample each",
    "threads": "threads of one rank, one sample",
}
SERIES = {"seconds": "#1b6ca8", "pytorch_seconds": "#d1495b", "flops": "#7b5ea7", "peak_bytes": "#edae49"}


def measured(command, **variables):
    """Output, wall seconds and peak resident bytes of the command."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, env={**os.environ, **variables})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}")
        output.seek(0)
        # macOS counts bytes, Linux KiB.
        unit = 1 if sys.platform == "darwin" else 1024
        return output.read().decode(), time.perf_counter() - started, usage.ru_maxrss * unit


def total(phases, field):
    """Over the phases of a step that have this field; `None` if no phase has it."""
    found = [phase["passes"] * phase[field] for phase in phases if phase[field] is not None]
    return sum(found) if found else None


def bench(roll, axis, value, compare):
    shape = ["--frames", str(value), "--size", "32x32"]
    if axis == "tokens":
        shape = ["--frames", "9", "--size", f"{value}x{value}", "--without-vae"]
    told, wall, peak = measured([roll, "bench", "-q", *shape, "--json", "-"])
    found = json.loads(told)
    phases, theirs = found["phases"], {}
    if compare:
        script = pathlib.Path(__file__).with_name("torch_step.py")
        answer, _, _ = measured([os.environ.get("PYTHON", sys.executable), script, *shape])
        theirs = json.loads(answer.splitlines()[-1])["phases"]
    in_both = [phase for phase in phases if phase["name"] in theirs]
    return {
        "x": found["tokens"] if axis == "tokens" else value,
        "seconds": total(phases, "seconds"),
        # PyTorch runs the phases that it can, so ours are summed over the same ones beside them.
        "pytorch_seconds": sum(p["passes"] * theirs[p["name"]]["seconds"] for p in in_both) or None,
        "seconds_of_the_same_phases": total(in_both, "seconds"),
        "flops": total(phases, "flops"),
        "peak_bytes": peak,
        "wall": wall,
    }


def demo(roll, axis, value, optimizer_steps):
    keys = {"algo.num_inference_steps": 4, "algo.mid_timestep": 2, "algo.final_timestep": 3}
    keys |= {"training.per_device_train_batch_size": 1, "save_steps": 0, "sample_steps": 0, "ranks": 1}
    variables = {}
    if axis == "steps":
        keys |= {"algo.num_inference_steps": value, "algo.mid_timestep": value // 2, "algo.final_timestep": value - 1}
    elif axis == "rank":
        keys["model.lora_rank"] = value
    elif axis == "threads":
        variables = {"RAYON_NUM_THREADS": str(value)}
    elif axis == "samples":
        keys["training.per_device_train_batch_size"] = value
    else:
        keys["ranks"] = value
        # The ranks divide them.
        variables = {"RAYON_NUM_THREADS": str(value)}
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "run"
        command = [roll, "run", "-q", "--algo", "reward_fl", "--model", "wan2_2", "--unset", "evaluation"]
        command += ["--steps", str(optimizer_steps), "--out", str(out)]
        command += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        _, wall, peak = measured(command, **variables)
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [step["time/step"] for step in steps if "time/step" in step]
    return {"x": value, "seconds": statistics.median(seconds[1:]), "peak_bytes": peak, "wall": wall}


def law(points, field):
    """`(factor, power, power of the last two points)` of the positive values, `None` with fewer than two."""
    logs = [(math.log(p["x"]), math.log(p[field])) for p in points if p.get(field)]
    if len(logs) < 2:
        return None
    x_mean, y_mean = (statistics.fmean(column) for column in zip(*logs))
    power = sum((x - x_mean) * (y - y_mean) for x, y in logs) / sum((x - x_mean) ** 2 for x, _ in logs)
    (x0, y0), (x1, y1) = logs[-2:]
    return {"factor": math.exp(y_mean - power * x_mean), "power": power, "power_at_the_end": (y1 - y0) / (x1 - x0)}


def measure(arguments):
    result = {
        "command": "python3 " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "rayon_threads": os.environ.get("RAYON_NUM_THREADS"),
        "axes": {},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for axis in arguments.axes.split(","):
        points = []
        for value in AXES[axis]:
            if axis in ("frames", "tokens"):
                points.append(bench(arguments.roll, axis, value, arguments.compare))
            else:
                points.append(demo(arguments.roll, axis, value, arguments.steps))
            laws = {field: found for field in SERIES if (found := law(points, field))}
            result["axes"][axis] = {"points": points, "laws": laws}
            arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            print(f"{axis} {points[-1]}", flush=True)
    return result


def plot(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = result["axes"]
    figure, grid = pyplot.subplots(2, len(axes), figsize=(3.6 * len(axes), 6), squeeze=False, layout="constrained")
    for column, (axis, found) in enumerate(axes.items()):
        for row, fields in enumerate((("seconds", "pytorch_seconds"), ("peak_bytes",))):
            panel = grid[row][column]
            for field in fields:
                points = [p for p in found["points"] if p.get(field)]
                if not points:
                    continue
                scale = 2.0**-20 if field == "peak_bytes" else 1.0
                x = [p["x"] for p in points]
                panel.loglog(x, [p[field] * scale for p in points], "o", color=SERIES[field])
                if fit := found["laws"].get(field):
                    line = [fit["factor"] * v ** fit["power"] * scale for v in x]
                    label = f"{'PyTorch' if field == 'pytorch_seconds' else 'roll'}: power {fit['power']:.2f}"
                    label += f", at the end {fit['power_at_the_end']:.2f}"
                    panel.loglog(x, line, color=SERIES[field], linewidth=1.2, label=label)
            if row == 0 and (fit := found["laws"].get("flops")):
                panel.plot([], [], " ", label=f"operations: power {fit['power']:.2f}")
            panel.set(xlabel=LABELS[axis], ylabel="MiB at the peak" if row else "seconds of a step")
            if panel.get_legend_handles_labels()[1]:
                panel.legend(frameon=False, fontsize=7)
            values = [p["x"] for p in found["points"]]
            panel.set_xticks(values, labels=[str(value) for value in values])
            panel.set_xticks([], minor=True)
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
            panel.grid(alpha=0.25, which="both")
            panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def table(result):
    print("| axis | from to | power of seconds | at the end | of memory | of operations | of PyTorch |\n|" + "---|" * 7)
    for axis, found in result["axes"].items():
        laws, x = found["laws"], [p["x"] for p in found["points"]]
        cell = lambda field, power="power": f"{laws[field][power]:.2f}" if field in laws else ""
        powers = [cell("seconds"), cell("seconds", "power_at_the_end"), cell("peak_bytes"), cell("flops")]
        print(f"| {axis} | {x[0]} to {x[-1]} | {' | '.join(powers)} | {cell('pytorch_seconds')} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roll", help="the program, a release build")
    parser.add_argument("output", type=pathlib.Path, help="path of the results without an ending")
    parser.add_argument("--axes", default=",".join(AXES), help="of %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a run of the demo, at least 2")
    parser.add_argument("--compare", action="store_true", help="time frames and tokens in PyTorch too")
    parser.add_argument("--plot", action="store_true", help="measure nothing, draw what is in OUTPUT.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.axes.split(",")) - set(AXES):
        parser.error(f"axes are {', '.join(AXES)}, found {', '.join(sorted(unknown))}")
    if arguments.steps < 2:
        parser.error(f"--steps is at least 2, as the first is left out; found {arguments.steps}")
    written = arguments.output.with_suffix(".json")
    result = json.loads(written.read_text()) if arguments.plot else measure(arguments)
    table(result)
    plot(result, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
