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
from engine import FIRST_START, STAND_IN, Failed, Part, Skipped, torch_directory

TINY = ["--preset", "tiny", "--layers", "1", "--frames", "5", "--size", "32x32"]
# Tests of roll-backends that run on the devices of ROLL_TEST_BACKENDS; those of `device::` open all there are.
OPERATORS = ["ops::", "async_copies::", "offload::", "parameters::", "strategy::single::device_tests::",
             "nccl::tests::"]
# Exact products in f32: without TF32, as the references were computed.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
# Bytes of a GPU that holds a step of A14B with all its recorded passes, and one that holds an expert.
HOLDS_A_STEP, HOLDS_AN_EXPERT = 130e9, 60e9


def shape(run):
    """The networks that are measured: one expert of A14B at 18,900 tokens, where the GPU holds it."""
    if run.tiny:
        return TINY
    return ["--preset", "a14b" if run.gpu.bytes >= HOLDS_AN_EXPERT else "1.3b", "--size", "480x480"]


def kept(run):
    """Recorded block inputs, and the states of the VAE, wait in host memory where the GPU is too small for them."""
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
    return f"{version}, {run.gpu.name or f'{os.cpu_count()} cores'}, {run.gpu.bytes / 1e9:.0f} GB"


def bench(run, *arguments, backend=None, of=None, extra=(), limit=None):
    """`roll bench`, whose result is recorded after each phase."""
    file = run.scratch / "bench.json"
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


def weights_on_host(run):
    """An expert of A14B also on a GPU that does not hold it."""
    of = TINY if run.tiny else ["--preset", "a14b", "--size", "480x480"]
    return said_of(bench(run, "--weights-on-host", "--offload", of=of))


HOLD = """
import sys, torch
left, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, left - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("holds", held.numel(), flush=True)
sys.stdin.read()
"""


def card_of_24(run):
    """An expert of A14B as `docs/src/real-model.md` configures it for a card of 24 GB; another process holds the rest of
    this card's memory."""
    arguments = ["--weights-on-host", "--weights-dtype", "int8", "--offload", "--whole-step", "--vae-checkpoints", "4",
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
    attempts = [["--offload"]]
    if not kept(run):
        attempts = [[], ["--vae-checkpoints", "12"], *attempts]
    for arguments in attempts:
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

        def watch(output):
            output.seek(0)
            text = output.read()
            lines = text[:text.rfind("\n") + 1].splitlines()
            if len(lines) > seen[0]:
                seen[0] = len(lines)
                run.record("so far", pytorch=json.loads(lines[-1]))

        ended = run.command([*run.program("torch_step"), *chosen], watch=watch)
        lines = [line for line in ended.output.splitlines() if line.startswith("{")]
        if not lines:
            ended.check()
            raise Failed(f"it said nothing; last:\n{ended.tail()}")
        answer = json.loads(lines[-1])
        run.record("found", pytorch=answer, **ended.facts)
        if answer["error"]:
            raise Failed(answer["error"])
        ended.check()
        pull = answer["phases"].get("pull of forward", {}).get("seconds") or 0
        peak = answer["memory"]["driver_bytes"] or answer["memory"]["reserved_bytes"] or 0
        step = f"step {answer['step_seconds']:.2f} s, " if answer["step_seconds"] else ""
        return f"{answer['dtype']}, attention {answer['attention']}: {step}pull {pull:.3f} s, {peak / 1e9:.1f} GB"
    return part


def theirs_step(run):
    return theirs("--whole-step", *kept(run))(run)


def theirs_phases(run):
    return theirs("--attention", "cudnn", *kept(run))(run)


TEST = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", re.MULTILINE)


def operators(backend):
    """The unit tests of operators on one device. Tests that a crash took along run again, each alone."""
    def part(run):
        on = {"gpu": run.backend, "second": run.second}[backend]
        wanted = ["ops::tests::attention"] if run.tiny and backend == "second" else OPERATORS
        extra = {**EXACT, "ROLL_TEST_BACKENDS": on}
        program = run.program("operators")
        listed = run.command([*program, "--list", "--format", "terse", *wanted], FIRST_START, extra).check().output
        names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
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
            filters = [f"dit_tiny_t2v {on}-{dtype}", f"scheduler {on}-{dtype}"]
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
    for count in (1, 3):
        of = [*(TINY[:2] + TINY[4:] if run.tiny else shape(run)), "--layers", count]
        bench(run, *kept(run), backend=run.second, of=of, limit=run.left() if count == 3 else 0.6 * run.left())
    return tables.extrapolated(run.records)[0]


def times(run):
    """Seconds by operator of one block and its pull: the difference between two blocks and one."""
    if run.tiny and run.backend == "flex":
        raise Skipped("operators of libtorch are timed, and this is flex")
    for count in (1, 2):
        file = run.scratch / f"times-{count}.jsonl"
        of = TINY[:2] + TINY[4:] if run.tiny else shape(run)
        command = [*run.program("roll"), "bench", *of, "--layers", count, "--without-vae", "--backend",
                   run.backend, "--rounds", "1"]
        preload = {"LD_PRELOAD": str(run.program("times")[0]), "OPERATOR_TIMES": str(file)}
        run.command(command, 0.5 * run.left(), preload).check()
        # The last of each phase: the first warms up.
        phases = {line["phase"]: line for line in tables.read(file)}
        run.record("found", times=phases, layers=count)
    return f"{len(tables.block_times(run.records))} phases"


def probe(run):
    if torch_directory() is None and not STAND_IN:
        raise Skipped(f"no PyTorch in {sys.executable}")
    ended = run.command([*run.program("gpu_probe"), *(["--tiny"] if run.tiny else [])], run.left() - 2)
    found = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    for line in found:
        run.record("found", probe=line)
    ended.check()
    ceiling = next(line["flops_per_second"] for line in found if line["name"] == "ceiling")
    return f"{ceiling / 1e12:.3g} TFLOP/s of random bf16"


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
    """All parts. What decides is done by second 500; phases one by one, which the whole step has too, come later. A GPU
    that cannot hold a step keeps block inputs in host memory, on both sides."""
    holds = run.tiny or run.gpu.bytes >= HOLDS_A_STEP
    step, torch_step = ((80, 150), (100, 150)) if holds else ((120, 180), (130, 180))
    offload = [
        Part("step-offload", "roll, a whole step, offload", 120, 180, ours("--whole-step", "--offload")),
        Part("torch-step-offload", "PyTorch, a whole step, offload", 130, 180, theirs("--whole-step", "--offload"),
             ("torch_step",), again=True),
    ]
    parity_needs = ("parity", "tests/fixtures")
    return [
        Part("environment", "machine, libraries", 20, 130, environment),
        Part("opens", "a tiny step on libtorch-cuda", 40, 90, opens("gpu")),
        Part("step", "roll, a whole step", *step, ours_step),
        Part("torch-step", "PyTorch, a whole step", *torch_step, theirs_step, ("torch_step",)),
        Part("operators", "operators on libtorch-cuda", 60, 90, operators("gpu"), ("operators",)),
        Part("parity-f32", "parity, f32", 40, 60, parity("gpu", "f32"), parity_needs),
        Part("parity-bf16", "parity, bf16", 40, 60, parity("gpu", "bf16"), parity_needs),
        Part("demo", "the demo", 110, 160, demo, ("roll", "demo/assets")),
        Part("phases", "roll, phases one by one", 50, 110, ours()),
        Part("torch-phases", "PyTorch, phases, cuDNN", 55, 110, theirs_phases, ("torch_step",)),
        Part("attention-kept", "roll, results of attention kept", 60, 180, ours("--whole-step", "--keep-attention"),
             again=True),
        Part("card-24", "roll, a whole step on 24 GB", 190, 260, card_of_24, again=True),
        *(offload if holds else []),
        Part("opens-cuda", "a tiny step on cuda", 60, 150, opens("second"), again=True),
        Part("cuda-operators", "operators on cuda", 90, 180, operators("second"), ("operators",)),
        Part("cuda-parity-bf16", "parity on cuda, bf16", 90, 120, parity("second", "bf16"), parity_needs, again=True),
        Part("cuda-parity-f32", "parity on cuda, f32", 90, 120, parity("second", "f32"), parity_needs, again=True),
        Part("cuda-layers", "cuda, one block and three", 180, 260, layers),
        Part("vae-f32", "roll, the VAE in f32", 45, 90, ours("--vae-dtype", "f32"), again=True),
        Part("unfused", "roll without its own kernels", 45, 90, ours(extra={"ROLL_FUSED": "0"}), again=True),
        Part("weights-host", "roll, weights in host memory", 45, 90, weights_on_host, again=True),
        Part("weights-fp8", "roll, weights in fp8", 45, 90, ours("--weights-dtype", "fp8")),
        Part("times", "seconds by operator", 40, 80, times, ("roll", "times")),
        Part("probe", "PyTorch's products, copies, attention", 30, 60, probe, ("gpu_probe",)),
        Part("sanitizer", "compute-sanitizer", 60, 120, sanitizer),
    ]


def chosen(run, only, from_):
    every = in_order(run)
    ids = [part.id for part in every]
    names = only.split(",") if only else [from_] if from_ else []
    unknown = [name for name in names if name not in ids]
    if unknown:
        sys.exit(f"gpu-check: no part is called {', '.join(unknown)}: {' '.join(ids)}")
    if only:
        return [part for part in every if part.id in names]
    every = every[ids.index(from_):] if from_ else every
    return [part for part in every if not (run.tiny and part.again)]
