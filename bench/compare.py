"""`roll bench` beside PyTorch: seconds, rate and memory of each phase, and the ratios of a step.

    roll bench --preset a14b --whole-step --json ours.json --backend libtorch-cuda
    python bench/torch_step.py --preset a14b --whole-step > theirs.json
    python bench/compare.py ours.json theirs.json
"""

import json
import pathlib
import sys

# Of the networks and the video: what has to be alike on both sides.
SUBJECT = ("preset", "layers", "frames", "size", "vae", "parameters")


def read(path, keeps=None):
    """The JSON of `roll bench`, or the last line of `torch_step.py`; of those that keep attention or do not, if `keeps`
    says which and there are any."""
    text = pathlib.Path(path).read_text()
    try:
        return json.loads(text)
    except ValueError:
        lines = [json.loads(line) for line in text.strip().splitlines()]
        wanted = [line for line in lines if keeps_attention(line) == keeps]
        return (wanted or lines)[-1]


def keeps_attention(side):
    """Whether results of self-attention are kept for the pull; files from before it was an option do not say."""
    return side.get("keep_attention", False)


def is_alike(ours, theirs):
    return all(ours[key] == theirs[key] for key in SUBJECT) and ours["algorithm"] == "reward_fl" and not ours["guided"]


def ratios(ours, theirs):
    """How many times as fast ours is, over whole steps or over the phases of both; and its memory by theirs."""
    if ours["whole_step"] and ours["step_seconds"] and theirs["step_seconds"]:
        seconds = ours["step_seconds"], theirs["step_seconds"]
    else:
        both = [(p["passes"], p["seconds"], theirs["phases"][p["name"]]["seconds"])
                for p in ours["phases"] if p["name"] in theirs["phases"]]
        seconds = sum(n * s for n, s, _ in both), sum(n * t for n, _, t in both)
    memory = theirs["memory"] or {}
    peak = memory.get("driver_bytes") or memory.get("reserved_bytes")
    is_step = ours["whole_step"] and theirs["whole_step"] and ours["offload"] == theirs["offload"]
    return {"speed": seconds[1] / seconds[0] if seconds[0] else None,
            # The memory of one recorded pass says nothing about that of a step.
            "memory": ours["peak_bytes"] / peak if is_step and peak and ours["peak_bytes"] else None}


def about(theirs):
    """PyTorch's settings, in words."""
    offload = ", block inputs in pinned host memory" if theirs["offload"] else ""
    error = f"; it stopped: {theirs['error']}" if theirs["error"] else ""
    how = "kept" if keeps_attention(theirs) else "recomputed"
    compiled = ", blocks compiled" if theirs.get("compiled") else ""
    return (f"PyTorch {theirs['version']} on {theirs['device']}: products {theirs['dtype']}, between them "
            f"{theirs['activations']}, attention {theirs['attention']} ({how}), VAE {theirs['vae']}, block checkpoints"
            f"{offload}{compiled}{error}")


def table(ours, theirs=None):
    """Markdown: a line for each phase."""
    number = lambda value, digits=3: "-" if value is None else f"{value:.{digits}f}"
    ceiling = ours["matmul_flops_per_second"]
    head = ["phase", "passes", "seconds", "TFLOP/s", "of the fastest product", "GB"]
    lines = [head + (["PyTorch s", "ratio"] if theirs else [])]
    for phase in ours["phases"]:
        rate, bytes_ = phase["flops_per_second"], phase["peak_bytes"]
        digits = 0 if rate and rate > 1e13 else 3
        line = [phase["name"], str(phase["passes"]), number(phase["seconds"]), number(rate and rate / 1e12, digits),
                f"{100 * rate / ceiling:.0f} %" if rate and ceiling else "-", number(bytes_ and bytes_ / 1e9, 2)]
        if theirs:
            their = theirs["phases"].get(phase["name"], {}).get("seconds")
            line += [number(their), number(their and phase["seconds"] / their, 2)]
        lines.append(line)
    lines.insert(1, ["---"] * len(lines[0]))
    said = ["| " + " | ".join(line) + " |" for line in lines]
    step = [] if ours["step_seconds"] is None else [f"a step {ours['step_seconds']:.2f} s"]
    step += [] if ours["peak_bytes"] is None else [f"{ours['peak_bytes'] / 1e9:.1f} GB"]
    rate = ours["transformer_flops_per_second"]
    step += [f"transformer {rate / 1e12:.3g} TFLOP/s"] if rate else []
    step += [f"fastest product {ceiling / 1e12:.3g} TFLOP/s"] if ceiling else ["not complete"]
    said += ["", f"{ours['backend']}: " + ", ".join(step)]
    if theirs:
        found = ratios(ours, theirs)
        kind = "steps" if ours["whole_step"] and theirs["step_seconds"] else "phases"
        said += ["", about(theirs)]
        if theirs["step_seconds"]:
            said[-1] += f"; a step {theirs['step_seconds']:.2f} s"
        alike = keeps_attention(ours) == keeps_attention(theirs)
        unlike = "" if alike else "; **one side keeps its attention, the other computes it again: no fair ratio**"
        said += ["", f"speed {number(found['speed'], 2)} of PyTorch ({kind}), memory {number(found['memory'], 2)}"
                     f"{unlike}"]
    return "\n".join(said)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ours = read(sys.argv[1])
    theirs = read(sys.argv[2], keeps_attention(ours))
    if not is_alike(ours, theirs):
        subject = lambda side: {key: side[key] for key in SUBJECT}
        sys.exit(f"compare: expected the same networks and video, found {subject(ours)} and {subject(theirs)}")
    print(table(ours, theirs))


if __name__ == "__main__":
    main()
