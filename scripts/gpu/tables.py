"""What the records say, as tables."""

import csv
import datetime
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "bench"))
import compare

GOALS = {"speed": 1.25, "memory": 0.5}
# Of a step on the GPU alone, then of one with offload: the first that both sides have is the one that is compared.
STEPS = [("step", "torch-step"), ("step-offload", "torch-step"), ("step-offload", "torch-step-offload")]

# The same step, its attention kept on both sides.
KEPT = ("attention-kept", "torch-step", "pytorch_kept")


def text(path):
    return path.read_text() if path.is_file() else ""


def read(path):
    """The JSON of each line; a last line that was cut off is left out."""
    lines = []
    for line in text(path).splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def last(records, part, key):
    """The newest of `key` that `part` found."""
    found = [r[key] for r in records if r["part"] == part and key in r]
    return found[-1] if found else None


def pair(records, part, other, key="pytorch"):
    """What both sides found for the same work, both keeping the results of attention or both computing them again."""
    ours, theirs = last(records, part, "bench"), last(records, other, key)
    alike = lambda: (compare.is_alike(ours, theirs) and ours["offload"] == theirs["offload"]
                     and compare.keeps_attention(ours) == compare.keeps_attention(theirs))
    return ours, theirs if ours and theirs and alike() else None


def counted(records, *parts):
    newest = [next((r for r in reversed(records) if r["part"] == part and "total" in r), None) for part in parts]
    found = [r for r in newest if r]
    return f"{sum(r['passed'] for r in found)}/{sum(r['total'] for r in found)}" if found else "-"


def extrapolated(records):
    """Seconds of all blocks, from one and from three: a line that says so, and a line for each phase."""
    found = [r["bench"] for r in records if r["part"] == "cuda-layers" and r["verdict"] == "found"][-2:]
    if len(found) < 2 or [b["layers"] for b in found] != [1, 3]:
        return "one block and three were not both measured", []
    one, three = found
    seconds = lambda bench: {p["name"]: p["seconds"] for p in bench["phases"]}
    many, total, lines = one["all_layers"], 0.0, []
    for phase in one["phases"]:
        first, more = phase["seconds"], seconds(three)[phase["name"]]
        block = max(0.0, (more - first) / 2)
        # The VAE, the reward and the optimizer have no blocks; the optimizer's parameters are in proportion to them.
        with_blocks = "forward" in phase["name"] or phase["name"] == "optimizer"
        whole = first + (many - 1) * block if with_blocks else min(first, more)
        total += whole * phase["passes"]
        lines.append((phase["name"], phase["passes"], first, more, whole))
    return f"a step of {many} blocks {total:.1f} s, extrapolated from 1 and 3", lines


def block_times(records):
    """For each phase, the calls and seconds of every operator in one block: two blocks less one."""
    found = [r for r in records if r["part"] == "times" and "times" in r][-2:]
    if len(found) < 2:
        return {}
    one, two = (r["times"] for r in found)
    phases = {}
    for name in ("forward, recorded", "pull of forward"):
        if name not in one or name not in two:
            continue
        a, b = one[name]["operators"], two[name]["operators"]
        less = {op: [b[op][0] - a.get(op, [0, 0])[0], b[op][1] - a.get(op, [0, 0])[1]] for op in b}
        phases[name] = {op: value for op, value in less.items() if value[0] > 0}
    return phases


def decoder_times(records):
    """The same of the decoder and its pull, which have no blocks."""
    found = [r["times"] for r in records if r["part"] == "times" and r.get("layers") == 1][-1:]
    return [(phase, times[phase]["operators"]) for times in found for phase in ("decode", "pull of decode")
            if phase in times]


def verdict(records):
    """One line: what was found against the goals. A dash stands for what is not known."""
    number = lambda value, form="{:.2f}": "-" if value is None else form.format(value)
    ours, found = None, {"speed": None, "memory": None}
    kept = compare.ratios(*pair(records, *KEPT)) if all(pair(records, *KEPT)) else {"speed": None}
    for part, other in STEPS:
        ours, theirs = pair(records, part, other)
        if ours and theirs:
            found = compare.ratios(ours, theirs)
            break
    ours = ours or last(records, "step", "bench") or last(records, "phases", "bench")
    rate, ceiling = (ours or {}).get("transformer_flops_per_second"), (ours or {}).get("matmul_flops_per_second")
    share = 100 * rate / ceiling if rate and ceiling else None
    return "  ".join([
        f"speed {number(found['speed'])} of PyTorch, both computing attention again (goal {GOALS['speed']})",
        f"{number(kept['speed'])} both keeping it",
        f"memory {number(found['memory'])} ({GOALS['memory']})",
        f"{number(rate and rate / 1e12, '{:.3g}')} TFLOP/s = {number(share, '{:.0f}')} % of the fastest product",
        f"parity {counted(records, 'parity-f32', 'parity-bf16')}",
        f"operators {counted(records, 'operators')}",
        f"cuda: parity {counted(records, 'cuda-parity-f32', 'cuda-parity-bf16')}",
        f"operators {counted(records, 'cuda-operators')}",
    ])


def clocks_by_part(records, path):
    """Of each part, from the log of the clocks: mean clock and power, most memory, reasons of throttling."""
    rows = []
    with open(path, newline="") if path.is_file() else open("/dev/null") as file:
        for row in csv.reader(file, skipinitialspace=True):
            try:
                time = datetime.datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
                rows.append((time, float(row[1]), float(row[3]), float(row[5]), int(row[7], 16)))
            except (ValueError, IndexError):
                continue
    for record in records:
        if "started" not in record:
            continue
        of = [row for row in rows if record["started"] <= row[0] < record["started"] + record["seconds"]]
        # Bit 0: idle.
        throttled = sum(bool(row[4] & ~1) for row in of)
        if of:
            mean = lambda i: sum(row[i] for row in of) / len(of)
            yield [record["part"], f"{mean(1):.0f}", f"{mean(2):.0f}", f"{max(row[3] for row in of) / 1024:.1f}",
                   f"{100 * throttled / len(of):.0f} %"]


def markdown(head, lines):
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def whole(records, clocks):
    said = ["# gpu-check", verdict(records)]
    machine = next((r for r in reversed(records) if r["part"] == "environment" and "gpu" in r), None)
    if machine:
        said.append(f"{machine['gpu'] or 'no GPU'}, {machine['gpu_bytes'] / 1e9:.0f} GB, {machine['cores']} cores, "
                    f"commit {machine['commit']}, {machine['date']}")
    ended = [r for r in records if r["verdict"] in ("passed", "FAILED", "SKIPPED")]
    newest = {r["part"]: r for r in records}
    under_way = [r for r in newest.values() if r["verdict"] in ("begins", "so far", "found")]
    lines = [[r["part"], r["name"], r["verdict"], f"{r['seconds']:.0f}", r["said"].split("\n")[0][:150]] for r in ended]
    lines += [[r["part"], r["name"], "under way", "", ""] for r in under_way]
    said.append(markdown(["part", "", "verdict", "s", ""], lines))
    offload = "torch-step-offload" if last(records, "torch-step-offload", "pytorch") else "torch-step"
    for title, part, other, key in [("A whole step", "step", "torch-step", "pytorch"),
                                    ("A whole step, attention kept", *KEPT),
                                    ("A whole step, PyTorch compiled", "step", "torch-compiled", "pytorch"),
                                    ("Phases one by one", "phases", "torch-phases", "pytorch"),
                                    ("A whole step, offload", "step-offload", offload, "pytorch")]:
        ours, theirs = pair(records, part, other, key)
        if other == "torch-compiled" and not theirs:
            continue
        if ours:
            about = f"{ours['preset']}, {ours['layers']} blocks, {ours['tokens']} tokens"
            said += [f"## {title}: {about}", compare.table(ours, theirs)]
        elif answer := last(records, other, key) if other != "torch-step" or part != "step-offload" else None:
            phases = ", ".join(f"{name} {p['seconds']:.3f}" for name, p in answer["phases"].items())
            said += [f"## {title}: PyTorch alone", compare.about(answer) + f"; seconds: {phases}"]
    line, phases = extrapolated(records)
    if phases:
        lines = [[n, passes, f"{a:.3f}", f"{b:.3f}", f"{c:.3f}"] for n, passes, a, b, c in phases]
        said += ["## cuda", markdown(["phase", "passes", "1 block, s", "3 blocks, s", "all, s"], lines), line]
    for title, *parts in [("Variants", "phases", "vae-f32", "unfused", "weights-host"),
                          ("Ten blocks", "eight-bits", "fp8-products", "streamed")]:
        variants = [(" ".join([r["part"], *r["arguments"]]), r["bench"]) for r in records
                    if r["verdict"] == "found" and "bench" in r and r["part"] in parts]
        if len(variants) < 2:
            continue
        names = [p["name"] for p in variants[0][1]["phases"]]
        of = lambda bench: {p["name"]: f"{p['seconds']:.3f}" for p in bench["phases"]}
        lines = [[part, *(of(bench).get(name, "-") for name in names), f"{(bench['peak_bytes'] or 0) / 1e9:.1f}"]
                 for part, bench in variants]
        said += [f"## {title}, seconds of a pass", markdown(["", *names, "GB"], lines)]
    phases = [(f"One block, {phase}", times) for phase, times in block_times(records).items()]
    for title, times in phases + decoder_times(records):
        total = sum(seconds for _, seconds in times.values()) or 1.0
        lines = [[f"`{op}`" if "::" in op else op, count, f"{1e3 * seconds:.2f}", f"{100 * seconds / total:.0f} %"]
                 for op, (count, seconds) in sorted(times.items(), key=lambda item: -item[1][1])[:25]]
        said += [f"## {title}: {1e3 * total:.1f} ms", markdown(["operator", "calls", "ms", ""], lines)]
    if lines := list(clocks_by_part(records, clocks)):
        said += ["## The GPU", markdown(["part", "MHz", "W", "most GB", "throttled"], lines)]
    return "\n\n".join(said) + "\n"


if __name__ == "__main__":
    results = pathlib.Path(sys.argv[1])
    print(whole(read(results / "results.jsonl"), results / "clocks.csv"))
