"""The parts of a check, in their order: what decides comes first."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time

import tables
from engine import FIRST_START, STAND_IN, Failed, Part, SideBySide, Skipped, torch_directory

TINY = ["--preset", "tiny", "--layers", "1", "--frames", "5", "--size", "32x32"]
# Tests of roll-backends that run on the devices of ROLL_TEST_BACKENDS; those of `device::` open all there are.
OPERATORS = ["ops::", "async_copies::", "offload::", "parameters::", "strategy::single::device_tests::",
             "nccl::tests::"]
# Exact products in f32: without TF32, as the references were computed.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
# Bytes of a GPU that holds a step of A14B with all its recorded passes, also if PyTorch or `roll` keeps attention; of
# one that holds the step if the decoder keeps few caches (75.6 GB by the plan); and of one that holds an expert.
HOLDS_A_STEP, HOLDS_WITH_FEW_CACHES, HOLDS_AN_EXPERT = 130e9, 80e9, 60e9
FEW_CACHES = ["--vae-checkpoints", "4"]


def shape(run):
    """The networks that are measured: one expert of A14B at 18,900 tokens, where the GPU holds it."""
    if run.tiny:
        return TINY
    return ["--preset", "a14b" if run.gpu.bytes >= HOLDS_AN_EXPERT else "1.3b", "--size", "480x480"]


def kept(run, more=0):
    """What `roll` needs to hold a step: fewer caches of the decoder, then block inputs in host memory. `more` are bytes
    beside those of a plain step."""
    if run.tiny or run.gpu.bytes >= HOLDS_A_STEP:
        return []
    return FEW_CACHES if run.gpu.bytes >= HOLDS_WITH_FEW_CACHES + more else ["--offload", *FEW_CACHES]


def kept_by_pytorch(run):
    """PyTorch's decoder has one way alone (98.8 GB)."""
    return [] if run.tiny or run.gpu.bytes >= HOLDS_A_STEP else ["--offload"]


def environment(run):
    about = json.loads((run.home.path / "programs.json").read_text()) if not STAND_IN else {}
    run.record("found", gpu=run.gpu.name, gpu_bytes=run.gpu.bytes, cores=os.cpu_count(),
               host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), libc=" ".join(platform.libc_ver()),
               kernel=platform.release(), python=platform.python_version(), commit=about.get("commit"),
               packed=about.get("packed"), date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    if not run.tiny and run.gpu.name is None:
        raise Failed("the driver, libcuda.so.1, knows no GPU")
    if shutil.which("ldd") and not STAND_IN:
        lines = run.command(["ldd", *run.program("roll")], FIRST_START).output.splitlines()
        missing = [line.strip() for line in lines if "not found" in line]
        if missing:
            raise Failed("; ".join(missing))
    version = run.command([*run.program("roll"), "--version"], FIRST_START).check().output.strip()
    said = run.command([*run.program("roll"), "devices"], FIRST_START).check().output
    run.record("found", devices=said)
    # A line for each backend: its name, whether it is built, and how many devices it finds.
    lines = {line.split()[0]: line.split()[1:3] for line in said.splitlines() if len(line.split()) > 2}
    missing = [b for b in dict.fromkeys((run.backend, run.second)) if lines.get(b, ["", "0"])[1] in ("0", "")]
    problems = [f"`roll devices` finds no device for {backend}" for backend in missing]
    problems += [f"scripts/setup-cuda --installed: {run.cuda_problem}"] if run.cuda_problem else []
    if problems:
        raise Failed("; ".join(problems))
    return f"{version}, {run.gpu.name or f'{os.cpu_count()} cores'}, {run.gpu.bytes / 1e9:.0f} GB"


def bench(run, *arguments, backend=None, of=None, extra=(), limit=None):
    """`roll bench`, whose result is recorded after each phase."""
    file = run.scratch / f"{run.part.id}.json"
    file.unlink(missing_ok=True)
    command = [*run.program("roll"), "bench", *(of or shape(run)), "--backend", backend or run.backend, "--rounds", "1",
               *arguments, "--json", file]
    seen = [None]

    def watch(_):
        if file.is_file() and file.stat().st_mtime_ns != seen[0]:
            seen[0] = file.stat().st_mtime_ns
            run.record("so far", bench=json.loads(file.read_text()))

    ended = run.command(command, limit, extra, watch)
    if file.is_file():
        found = json.loads(file.read_text())
        run.record("found", bench=found, arguments=[str(a) for a in arguments], environment=dict(extra),
                   **ended.facts)
    ended.check()
    return found


def said_of(found):
    rate = found["transformer_flops_per_second"] or 0
    step = f"step {found['step_seconds']:.2f} s, " if found["step_seconds"] else ""
    return f"{step}transformer {rate / 1e12:.3g} TFLOP/s, {(found['peak_bytes'] or 0) / 1e9:.1f} GB"


def opens(backend):
    def part(run):
        on = {"gpu": run.backend, "second": run.second}[backend]
        return said_of(bench(run, backend=on, of=TINY if run.tiny else ["--preset", "tiny", "--dtype", "bf16"]))
    return part


def ours(*arguments, extra=()):
    def part(run):
        return said_of(bench(run, *arguments, *kept(run), extra=extra))
    return part


def attention_kept(run):
    """The same step with results of attention kept: 33 GB more, which only a large card has."""
    return said_of(bench(run, "--whole-step", "--keep-attention", *kept(run, more=33e9)))


def eight_bits(run):
    """Ten blocks without the VAE: in bf16, in eight bits on the GPU, and in eight bits from host memory."""
    ways = [[], ["--weights-dtype", "int8"], ["--weights-dtype", "int8", "--weight-store", "host", "--offload"],
            ["--weights-dtype", "fp8"]]
    seconds = [of_ten_blocks(run, way) for way in ways]
    return f"of bf16: int8 {seconds[1] / seconds[0]:.2f}, from the host {seconds[2] / seconds[0]:.2f}, " \
           f"fp8 {seconds[3] / seconds[0]:.2f}"


def of_ten_blocks(run, way):
    """Seconds of the passes of a step through ten blocks."""
    of = [*TINY, "--without-vae"] if run.tiny else [*shape(run), "--layers", "10", "--without-vae"]
    found = bench(run, *way, of=of, limit=0.5 * run.left())
    return sum(p["passes"] * p["seconds"] for p in found["phases"])


def fp8_products(run):
    """Ten blocks with fp8 weights: decoded for products in bf16, and with products in fp8."""
    weights = ["--weights-dtype", "fp8"]
    decoded = of_ten_blocks(run, weights)
    try:
        fp8 = of_ten_blocks(run, [*weights, "--fp8-products"])
    except Failed as failed:
        if "takes no products in fp8" in str(failed):
            raise Skipped(str(failed)) from failed
        raise
    return f"products in fp8 {fp8 / decoded:.2f} of decoded weights"


def streamed(run):
    """Ten blocks without the VAE: on the GPU, and from a file that the page cache holds, a block ahead."""
    resident, streamed = of_ten_blocks(run, []), of_ten_blocks(run, ["--weight-store", "streamed"])
    return f"streamed {streamed / resident:.2f} of resident"


def weights_on_host(run):
    """An expert of A14B also on a GPU that does not hold it."""
    of = TINY if run.tiny else ["--preset", "a14b", "--size", "480x480"]
    return said_of(bench(run, "--weight-store", "host", "--offload", of=of))


HOLD = """
import sys, torch
left, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, left - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("holds", held.numel(), flush=True)
sys.stdin.read()
"""


def card_of_24(run):
    """An expert of A14B as `docs/src/real-model.md` configures it for a card of 24 GB; another process holds the rest
    of this card's memory."""
    arguments = ["--weight-store", "host", "--weights-dtype", "int8", "--offload", "--whole-step", "--vae-checkpoints", "4",
                 "--set", "algo.trained_steps.last=3"]
    of = TINY if run.tiny else ["--preset", "a14b", "--size", "480x480"]
    holder = None
    if run.gpu.name and not STAND_IN:
        if torch_directory() is None:
            raise Skipped(f"no PyTorch in {sys.executable}")
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(24 * 10**9)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        said = holder.stdout.readline()
        if not said.startswith("holds"):
            raise Failed("the process that holds the rest of the memory did not start")
        run.log(said)
    try:
        return said_of(bench(run, *arguments, of=of))
    finally:
        if holder:
            holder.kill()
            holder.wait()


def ours_step(run):
    """A whole step: all on the GPU if it has the memory, or with fewer caches of the decoder, or with offload."""
    attempts = [[], FEW_CACHES, ["--offload", *FEW_CACHES]]
    for arguments in attempts[attempts.index(kept(run)):]:
        try:
            return said_of(bench(run, "--whole-step", *arguments))
        except Failed as failed:
            if "out of memory" not in str(failed).lower() or arguments == attempts[-1]:
                raise
            run.log(f"{arguments}: out of memory\n")


def theirs(*arguments):
    """PyTorch in a process of its own, whose result is recorded after each phase."""
    def part(run):
        if torch_directory() is None and not STAND_IN:
            raise Skipped(f"no PyTorch in {sys.executable}")
        chosen = [*shape(run), "--rounds", "1", *arguments]
        if run.tiny:
            # On the CPU there is no choice of kernels.
            chosen = [a for a in chosen if a not in ("--attention", "cudnn")] + ["--device", "cpu"]
        seen = [0]
        # A step that keeps attention is recorded beside one that does not.
        key = lambda answer: "pytorch_kept" if answer["keep_attention"] else "pytorch"

        def watch(output):
            output.seek(0)
            text = output.read()
            lines = text[:text.rfind("\n") + 1].splitlines()
            if len(lines) > seen[0]:
                seen[0] = len(lines)
                answer = json.loads(lines[-1])
                run.record("so far", **{key(answer): answer})

        ended = run.command([*run.program("torch_step"), *chosen], watch=watch)
        lines = [line for line in ended.output.splitlines() if line.startswith("{")]
        if not lines:
            ended.check()
            raise Failed(f"it said nothing; last:\n{ended.tail()}")
        answers = {}
        for line in lines:
            answer = json.loads(line)
            answers[key(answer)] = answer
        run.record("found", **answers, **ended.facts)
        errors = [answer["error"] for answer in answers.values() if answer["error"]]
        if errors:
            raise Failed("; ".join(errors))
        ended.check()
        return "; ".join(said_of_pytorch(answer) for answer in answers.values())
    return part


def said_of_pytorch(answer):
    pull = answer["phases"].get("pull of forward", {}).get("seconds") or 0
    memory = answer["memory"] or {}
    peak = memory.get("driver_bytes") or memory.get("reserved_bytes") or 0
    step = f"step {answer['step_seconds']:.2f} s, " if answer["step_seconds"] else ""
    how = "kept" if answer["keep_attention"] else "recomputed"
    return f"{answer['dtype']}, attention {answer['attention']}, {how}: {step}pull {pull:.3f} s, {peak / 1e9:.1f} GB"


def theirs_step(run):
    """A whole step, then the same with attention kept where the GPU holds that."""
    both = run.tiny or run.gpu.bytes >= HOLDS_A_STEP
    return theirs("--whole-step", *(["--keep-attention", "both"] if both else []), *kept_by_pytorch(run))(run)


def theirs_phases(run):
    return theirs("--attention", "cudnn", *kept_by_pytorch(run))(run)


TEST = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", re.MULTILINE)


def operators(backend, wanted=OPERATORS):
    """The unit tests of operators on one device. Tests that a crash took along run again, each alone."""
    def part(run):
        on = {"gpu": run.backend, "second": run.second}[backend]
        extra = {**EXACT, "ROLL_TEST_BACKENDS": on}
        program = run.program("operators")
        listed = run.command([*program, "--list", "--format", "terse", *wanted], FIRST_START, extra).check().output
        names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
        if not names:
            raise Skipped(f"the program has no test {' or '.join(wanted)}")
        ended = run.command([*program, *wanted, "--test-threads", "4"], run.left() - 5, extra)
        verdicts = dict(TEST.findall(ended.output))
        # Output of a test may stand between its name and its verdict.
        lost = [name for name in names if name not in verdicts]
        while lost and run.left() > 10:
            name = lost.pop(0)
            alone = run.command([*program, "--exact", name], min(30, run.left() - 5), extra)
            verdicts[name] = "ok" if alone.code == 0 else "FAILED"
        passed = sum(verdict == "ok" for verdict in verdicts.values())
        failed = sorted(name for name, verdict in verdicts.items() if verdict == "FAILED")
        total = sum(verdict != "ignored" for verdict in verdicts.values()) + len(lost)
        # libtest ends with 101 when tests failed. What passes alone and not beside others is no pass of all.
        crash = f"; all together ended with {ended.code}" if ended.in_time and ended.code not in (0, 101) else ""
        run.record("found", backend=on, passed=passed, total=total, failed=failed, lost=lost, crash=crash)
        if failed or lost or crash or not passed:
            raise Failed(f"{passed}/{total}{crash}; failed: {', '.join(failed + lost) or 'none'}")
        return f"{passed}/{total}"
    return part


CASE = re.compile(r"^(\S+ \S+)\s+(ok|FAILED|skipped)\s*(.*)$", re.MULTILINE)


def parity(backend, dtype):
    def part(run):
        on = {"gpu": run.backend, "second": run.second}[backend]
        filters = [f"{on}-{dtype}"]
        if run.tiny:
            filters = [f"dit_tiny_t2v {on}-{dtype}"]
        extra = {**(EXACT if dtype == "f32" else {}), "ROLL_TEST_BACKENDS": on}
        ended = run.command([*run.program("parity"), *filters], run.left() - 2, extra)
        cases = CASE.findall(ended.output)
        passed = sum(verdict == "ok" for _, verdict, _ in cases)
        failed = {name: said for name, verdict, said in cases if verdict == "FAILED"}
        total = passed + len(failed)
        run.record("found", backend=on, dtype=dtype, passed=passed, total=total, failed=failed, in_time=ended.in_time)
        if not cases:
            raise Failed(f"no case ran; it said last:\n{ended.tail()}")
        if failed or not passed or not ended.in_time:
            late = "" if ended.in_time else ", stopped at its limit"
            raise Failed(f"{passed}/{total}{late}; failed: {', '.join(failed)}")
        return f"{passed}/{total}"
    return part


def demo(run):
    """The demo as a user runs it. Its metrics and its summary are among the results."""
    directory = run.scratch / "demo"
    command = [*run.program("roll"), "run", "-q", "--backend", run.backend, "--out", directory]
    if run.tiny:
        keys = {"ranks": 1, "training.per_device_train_batch_size": 1, "algo.num_inference_steps": 2,
                "algo.mid_timestep": 1, "algo.final_timestep": 1}
        command += ["--steps", "3", "--unset", "evaluation"]
        command += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]

    def copy(_=None):
        for name in ("metrics.jsonl", "summary.json"):
            if (directory / name).is_file():
                shutil.copy(directory / name, run.results / f"demo-{name}")

    ended = run.command(command, run.left() - 2, watch=copy)
    copy()
    metrics = [json.loads(line) for line in tables.text(run.results / "demo-metrics.jsonl").splitlines()]
    losses = [line["actor/loss"] for line in metrics if "actor/loss" in line]
    seconds = [line["time/step"] for line in metrics if "time/step" in line]
    run.record("found", losses=losses, step_seconds=seconds, **ended.facts)
    ended.check()
    if not losses or any(loss is None or loss != loss or abs(loss) == float("inf") for loss in losses):
        raise Failed(f"losses {losses}")
    return f"{len(losses)} steps, the last {seconds[-1]:.2f} s" if seconds else f"{len(losses)} steps"


def layers(run):
    """The second backend with one block and with three: the difference is two blocks, the rest what all have."""
    for count, limit in ((1, 60), (3, 90)):
        of = [*(TINY[:2] + TINY[4:] if run.tiny else shape(run)), "--layers", count, "--without-vae"]
        bench(run, backend=run.second, of=of, limit=limit)
    return tables.extrapolated(run.records)[0]


def times(run):
    """Seconds by operator of one block and its pull, the difference between two blocks and one; and of the decoder."""
    if run.tiny and run.backend == "flex":
        raise Skipped("operators of libtorch are timed, and this is flex")
    for count in (1, 2):
        file = run.scratch / f"times-{count}.jsonl"
        of = TINY[:2] + TINY[4:] if run.tiny else shape(run)
        command = [*run.program("roll"), "bench", *of, "--layers", count, *(["--without-vae"] if count == 2 else []),
                   "--backend", run.backend, "--rounds", "1"]
        preload = {"LD_PRELOAD": str(run.program("times")[0]), "OPERATOR_TIMES": str(file)}
        run.command(command, 0.5 * run.left(), preload).check()
        # The last of each phase: the first warms up.
        phases = {line["phase"]: line for line in tables.read(file)}
        run.record("found", times=phases, layers=count)
    return f"{len(tables.block_times(run.records))} phases"


def probed(run, *only):
    """The lines of `gpu_probe.py`."""
    if torch_directory() is None and not STAND_IN:
        raise Skipped(f"no PyTorch in {sys.executable}")
    chosen = [word for name in only for word in ("--only", name)]
    ended = run.command([*run.program("gpu_probe"), *(["--tiny"] if run.tiny else []), *chosen], run.left() - 2)
    found = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    for line in found:
        run.record("found", probe=line)
    ended.check()
    return found


def addmm(run):
    """Whether a product is rounded before it is added to a small sum, by shape and by the flag of reduced precision."""
    found = [line for line in probed(run, "addmm") if line["name"] == "addmm" and "error" not in line]
    return "; ".join(f"{'x'.join(map(str, line['shape']))}, flag {line['flag']}: {line['survives']:.2f} survives"
                     for line in found)


def probe(run):
    found = probed(run, "products", "copies", "attention", "errors")
    ceiling = next(line["flops_per_second"] for line in found if line["name"] == "ceiling")
    return f"{ceiling / 1e12:.3g} TFLOP/s of random bf16"


def agents(run):
    """Tokens a second of a language model of random weights and of 0.5B's shapes: 64 rows that share 8 prompts, ours
    and transformers' in turn."""
    if torch_directory() is None and not STAND_IN:
        raise Skipped(f"no PyTorch in {sys.executable}")
    arguments = ["--random", "tiny" if run.tiny else "0.5b", "--backend", run.backend, "--json"]
    ended = run.command([*run.program("generation_batch"), *run.program("generation_speed"), run.scratch / "lm",
                         *arguments], run.left() - 2)
    found = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    for line in found:
        run.record("found", agents=line)
    ended.check()
    return ", ".join(f"{line['who']} {line['tokens_per_second']:.0f} tokens/s" for line in found)


def pictures(run):
    """A step of Z-Image with all blocks at 1024x1024 and its memory; then two blocks and the decoder with their pulls,
    beside diffusers at the same widths."""
    side, layers = (32, 1) if run.tiny else (1024, 2)
    preset = ["--preset", "z-image"]
    small = ["--size", f"{side}x{side}", "--layers", layers, *(["--dtype", "f32"] if run.tiny else [])]
    said = []
    if not run.tiny:
        step = bench(run, "--whole-step", of=preset)
        said.append(f"step {step['step_seconds']:.2f} s, {(step['peak_bytes'] or 0) / 1e9:.1f} GB")
    found = bench(run, of=[*preset, *small])
    seconds = {phase["name"]: phase["seconds"] for phase in found["phases"]}
    ours = {"transformer": seconds["forward, recorded"] + seconds["pull of forward"],
            "decode": seconds["decode"] + seconds["pull of decode"]}
    if torch_directory() is None and not STAND_IN:
        said.append(f"no PyTorch in {sys.executable}")
        return "; ".join(said)
    device = "cpu" if run.tiny else "cuda"
    ended = run.command([*run.program("zimage_speed"), "--diffusers", "--device", device, "--side", side, "--layers",
                         layers, "--refiners", 2, "--caption", 128, "--decoded-side", side], run.left() - 2)
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    if "No module named" in ended.errors:
        said.append(ended.errors.strip().splitlines()[-1])
        return "; ".join(said)
    ended.check()
    theirs = {phase: clock for phase, (clock, _) in lines[-1]["seconds"].items()}
    run.record("found", pictures={"side": side, "layers": layers, "roll": ours, "diffusers": theirs})
    return "; ".join([*said, *(f"{name} {ours[name] / theirs[name]:.2f} of diffusers" for name in ours)])


def vision_language(run):
    """Tower, text with a clip, and gradient at the pixels of a vision-language network at 2B's widths, ours and
    PyTorch's in turn."""
    if torch_directory() is None and not STAND_IN:
        raise Skipped(f"no PyTorch in {sys.executable}")
    sizes = ["--blocks", "1", "--layers", "1", "--size", "56x84", "--words", "8", "--rounds", "1"] if run.tiny else \
        ["--blocks", "32", "--layers", "28", "--steps", "4", "--size", "448x448", "--rounds", "2"]
    ended = run.command([*run.program("vision_language_speed"), *run.program("vision_language"), *sizes, "--backend",
                         run.backend, "--json"], run.left() - 2)
    found = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    for line in found:
        run.record("found", vision_language=line)
    ended.check()
    ours, theirs = found[-1]["roll"], found[-1]["PyTorch"]
    ratios = (f"{phase} {ours[phase] / theirs[phase]:.2f}" for phase in ours)
    return f"of PyTorch: {', '.join(ratios)}; states differ by {found[-1]['error']:.1e}"


def sanitizer(run):
    if run.tiny:
        raise Skipped("it needs a GPU")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise Skipped("compute-sanitizer is not installed")
    command = [*run.program("roll"), "bench", *TINY, "--without-vae", "--offload", "--backend", run.backend]
    # Without a cache every tensor has an allocation of its own, whose ends are checked.
    ended = run.command([tool, "--tool", "memcheck", "--error-exitcode", "9", *command], run.left() - 2,
                        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    summary = re.findall(r"ERROR SUMMARY: .*", ended.output + ended.errors)
    run.record("found", summary=summary, **ended.facts)
    ended.check()
    return summary[-1] if summary else "no summary"


def in_order(run):
    """All parts. The first four minutes of a lease of 15 decide most: what measures no time runs side by side. `phases`
    and those behind it are for a longer run, or for `--only`. A GPU that cannot hold a step in PyTorch compares steps
    with block inputs in host memory, on both sides."""
    holds = run.tiny or run.gpu.bytes >= HOLDS_A_STEP
    parity_needs = ("parity", "tests/fixtures")
    side_by_side = SideBySide(155, "phases", [
        [
            Part("opens-cuda", "a tiny step on cuda", 15, 90, opens("second"), again=True),
            Part("cuda-operators", "operators on cuda", 50, 120, operators("second"), ("operators",), again=True),
            Part("cuda-parity-bf16", "parity on cuda, bf16", 40, 90, parity("second", "bf16"), parity_needs, True),
            Part("cuda-parity-f32", "parity on cuda, f32", 40, 90, parity("second", "f32"), parity_needs, True),
        ],
        [
            Part("opens", "a tiny step on libtorch-cuda", 40, 90, opens("gpu")),
            Part("operators", "operators on libtorch-cuda", 60, 100, operators("gpu"), ("operators",)),
            Part("nccl", "NCCL, one rank", 5, 30, operators("gpu", ["nccl::"]), ("operators",), again=True),
        ],
        [
            Part("parity-bf16", "parity, bf16", 40, 75, parity("gpu", "bf16"), parity_needs),
            Part("parity-f32", "parity, f32", 40, 75, parity("gpu", "f32"), parity_needs),
        ],
        [Part("demo", "the demo", 110, 155, demo, ("roll", "demo/assets"))],
        [Part("addmm", "rounding of PyTorch's addmm", 20, 60, addmm, ("gpu_probe",))],
    ])
    step = Part("step", "roll, a whole step", 65, 110, ours_step)
    kept_step = Part("attention-kept", "roll, results of attention kept", 65, 130, attention_kept, again=True)
    torch_step = Part("torch-step", "PyTorch, a whole step", 120, 180, theirs_step, ("torch_step",))
    offload = Part("step-offload", "roll, a whole step, offload", 100, 150, ours("--whole-step", "--offload"))
    torch_offload = Part("torch-step-offload", "PyTorch, a whole step, offload", 130, 180,
                         theirs("--whole-step", "--offload"), ("torch_step",), again=True)
    # A small card makes its step with offload in any case.
    again = [offload] if "--offload" not in kept(run) else []
    steps = [step, kept_step, torch_step] if holds else [step, torch_step, *again, kept_step]
    return [
        Part("environment", "machine, libraries", 15, 90, environment),
        side_by_side,
        *steps,
        Part("eight-bits", "roll, ten blocks, weights in eight bits", 60, 100, eight_bits),
        Part("cuda-layers", "cuda, one block and three", 80, 155, layers),
        Part("times", "seconds by operator", 45, 80, times, ("roll", "times")),
        Part("agents", "tokens of a language model", 70, 90, agents, ("generation_speed", "generation_batch")),
        Part("phases", "roll, phases one by one", 50, 110, ours()),
        Part("fp8-products", "roll, ten blocks, products in fp8", 40, 80, fp8_products),
        Part("torch-phases", "PyTorch, phases, cuDNN", 55, 110, theirs_phases, ("torch_step",)),
        Part("card-24", "roll, a whole step on 24 GB", 190, 260, card_of_24, again=True),
        Part("torch-compiled", "PyTorch, a whole step, compiled", 180, 260,
             lambda run: theirs("--whole-step", "--compile", *kept_by_pytorch(run))(run), ("torch_step",), again=True),
        *([offload, torch_offload] if holds else []),
        Part("vae-f32", "roll, the VAE in f32", 45, 90, ours("--vae-dtype", "f32"), again=True),
        Part("unfused", "roll without its own kernels", 45, 90, ours(extra={"ROLL_FUSED": "0"}), again=True),
        Part("streamed", "roll, ten blocks, weights from a file", 40, 90, streamed),
        Part("weights-host", "roll, weights in host memory", 45, 90, weights_on_host, again=True),
        Part("pictures", "Z-Image: a step; blocks and decoder beside diffusers", 90, 150, pictures,
             ("roll", "zimage_speed")),
        Part("vision-language", "a vision-language network beside PyTorch", 60, 120, vision_language,
             ("vision_language", "vision_language_speed")),
        Part("probe", "PyTorch's products, copies, attention", 30, 60, probe, ("gpu_probe",)),
        Part("sanitizer", "compute-sanitizer", 60, 120, sanitizer),
    ]


def chosen(run, only, from_):
    every = in_order(run)
    each = [part for item in every for part in ([p for chain in item.chains for p in chain]
                                                if isinstance(item, SideBySide) else [item])]
    ids = [part.id for part in each]
    names = only.split(",") if only else [from_] if from_ else []
    unknown = [name for name in names if name not in ids]
    if unknown:
        sys.exit(f"gpu-check: no part is called {', '.join(unknown)}: {' '.join(ids)}")
    if only:
        return [each[ids.index(name)] for name in names]
    if from_:
        return [part for part in each[ids.index(from_):] if not (run.tiny and part.again)]
    # A self-test has two cores, which the parts of a group would share.
    return [part for part in each if not part.again] if run.tiny else every
