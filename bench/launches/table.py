"""What one transformer block takes: the difference between passes with two blocks and with one.

    table.py COUNTS.jsonl

Reads what the libraries beside it wrote for `roll-models/examples/count_launches.rs`; see `scripts/count-launches`.
"""

import json
import sys

PHASES = ["forward", "forward, recorded", "pull"]
# Operators of ATen that compute nothing: other shapes of the same memory, and memory that is not written.
NOTHING = set("""
    alias as_strided broadcast_to chunk contiguous detach empty empty_like empty_strided expand expand_as flatten
    lift_fresh movedim mT narrow new_empty new_empty_strided numpy_T permute requires_grad_ reshape _reshape_alias
    resolve_conj resolve_neg select set_ slice split split_with_sizes squeeze t to transpose unbind unflatten
    unsafe_chunk unsafe_split unsqueeze view view_as _fused_sdp_choice
""".split())


def difference(two, one):
    """`two - one`, number by number."""
    if isinstance(two, dict):
        numbers = [key for key in dict.fromkeys([*two, *one]) if not isinstance(two.get(key), (str, list))]
        return {key: difference(two.get(key, 0), one.get(key, 0)) for key in numbers}
    return two - (one or 0)


def row(name, values, form="{:,}"):
    print(f"{name[:70]:<70}" + "".join(f"{form.format(value):>20}" for value in values))


def megabytes(values):
    """Of bytes."""
    return [value / 1e6 for value in values]


def by_name(title, kinds):
    """A line for each name, the most frequent first."""
    print(f"\n{title}")
    total = lambda name: max(counts.get(name, 0) for counts in kinds)
    for name in sorted(dict.fromkeys(n for counts in kinds for n in counts), key=lambda n: (-total(n), n)):
        if any(counts.get(name) for counts in kinds):
            row(f"  {name}", [counts.get(name, 0) for counts in kinds])


def driver(blocks):
    row("launches", [b["launches"] for b in blocks])
    for key, what in [("to_device", "copies to the device"), ("to_host", "copies to the host"),
                      ("on_device", "copies on the device"), ("filled", "memory filled")]:
        row(what, [b["copies"][key]["calls"] for b in blocks])
        row(f"{what}, MB", megabytes(b["copies"][key]["bytes"] for b in blocks), "{:,.3f}")
    for key in ["device", "pinned"]:
        what = f"allocations from the driver, {key} memory"
        row(what, [b["memory"][key]["calls"] for b in blocks])
        row(f"{what}, MB", megabytes(b["memory"][key]["bytes"] for b in blocks), "{:,.1f}")
    for key, what in [("waits", "times the host waits"), ("recorded", "events recorded"), ("streams", "streams made")]:
        row(what, [b[key] for b in blocks])
    by_name("launches by kernel", [b["names"] for b in blocks])


def operators(blocks):
    is_view = lambda name: name.removeprefix("aten::") in NOTHING
    computing = [{n: c for n, c in b["called"].items() if not is_view(n)} for b in blocks]
    row("operators called that compute", [sum(counts.values()) for counts in computing])
    row("views and empty tensors", [sum(b["called"].values()) - sum(c.values()) for b, c in zip(blocks, computing)])
    by_name("operators called, without views", computing)


def main():
    phases = {}
    with open(sys.argv[1], encoding="utf-8") as file:
        for counts in map(json.loads, file):
            before = phases.get(counts["phase"], counts)
            # Of several rounds the last is shown, with the seconds of the fastest.
            phases[counts["phase"]] = {**counts, "seconds": min(counts["seconds"], before["seconds"])}
    try:
        blocks = [difference(phases[f"2 {phase}"], phases[f"1 {phase}"]) for phase in PHASES]
    except KeyError as missing:
        sys.exit(f"{sys.argv[1]}: the phase {missing} is missing: the program ended before it, and said why")
    print(f"{'one block':<70}" + "".join(f"{phase:>20}" for phase in PHASES))
    row("seconds of the host", [b["seconds"] for b in blocks], "{:,.4f}")
    if "launches" not in blocks[0]:
        operators(blocks)
        return
    driver(blocks)
    print("\nwhole passes: threads that call the driver, GB at the highest, blocks of page-locked memory taken")
    for name, counts in phases.items():
        memory = {place: f"{of['peak'] / 1e9:.2f}" for place, of in counts["memory"].items()}
        pinned = [f"{count} x {size / 1e6:.1f} MB" for place, size, count in counts["sizes"] if place == "pinned"]
        print(f"  {name:<24} {counts['threads']:>3} threads, {memory['device']} on the device, "
              f"{memory['pinned']} page-locked: {', '.join(pinned) or 'no more'}")


main()
