"""Checks and measures `roll` on a machine with an NVIDIA GPU; see `scripts/gpu-check`.

    gpu_check.py pack [--binaries DIR] [--add FILE ...]
    gpu_check.py run [--from N] [--only ID,ID] [--limit SECONDS] [--out DIR] [--bench ARGUMENTS]
                     [--self-test] [--binaries DIR]

`pack` puts `roll` and the tests of parity and of operators into `.gpu/`. `run` unpacks them and works through the parts
in order, each within its own limit. A part writes its results to `results.jsonl` as soon as it has them and what its
commands said to `log.txt`, so nothing is lost when everything is stopped; a failed part stops no other. The last line
sums up what was found against the goals. With --self-test the parts run at tiny sizes on the CPU.

Needs Python 3.10. PyTorch is needed on the GPU machine; without it the parts that want it are skipped.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import lzma
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACK = ROOT / ".gpu"
RESULTS = ROOT / "bench" / "results" / "gpu"
UNPACKED = pathlib.Path(tempfile.gettempdir()) / "gpu-check-unpacked"
MOST_PACKED = 24_000_000
GOALS = {"speed": 1.25, "memory": 0.5}
# One expert at 18,900 tokens, and what takes seconds anywhere.
A14B = ["--preset", "a14b", "--size", "480x480"]
TINY = ["--preset", "tiny", "--layers", "1", "--frames", "5", "--size", "32x32"]
# Tests of roll-backends that run on the devices of ROLL_TEST_BACKENDS; those of `device::` open all there are.
OPERATORS = ["ops::", "side_copies::", "offload::", "parameters::", "strategy::single::device_tests::"]
# Exact products in f32: without TF32, as the references were computed.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}


# --- packing


def newest(directory, stem):
    """The newest executable `stem`, or cargo's `deps/stem-HASH`."""
    plain = directory / stem
    if plain.is_file():
        return plain
    named = re.compile(re.escape(stem) + r"-[0-9a-f]{16}")
    found = [p for p in (directory / "deps").glob(stem + "-*") if named.fullmatch(p.name) and os.access(p, os.X_OK)]
    if not found:
        sys.exit(f"gpu-check: no {stem} in {directory} or its deps: build it first, tests with `cargo test --no-run`")
    return max(found, key=lambda p: p.stat().st_mtime)


def built(directory):
    return {name: newest(directory, stem) for name, stem in
            [("roll", "roll"), ("parity", "parity"), ("operators", "roll_backends")]}


def packed(source, target, preset):
    """Strips and compresses one program."""
    with tempfile.TemporaryDirectory() as scratch:
        stripped = pathlib.Path(scratch) / target.stem
        if shutil.which("strip") is None or subprocess.run(["strip", "-o", stripped, source]).returncode:
            shutil.copy(source, stripped)
        # Machine code: relative calls are made absolute, and fields have no alignment.
        code = {"id": lzma.FILTER_LZMA2, "preset": preset, "lc": 4, "pb": 0}
        if preset:
            code["dict_size"] = 128 << 20
        with lzma.open(target, "wb", filters=[{"id": lzma.FILTER_X86}, code]) as file:
            file.write(stripped.read_bytes())
    return f"{target.stem}: {source}, {source.stat().st_size / 1e6:.1f} MB, packed {target.stat().st_size / 1e6:.1f}"


def pack(binaries, out, add, preset):
    """One file for each program, so that a call can carry the ones whose parts it runs."""
    files = built(binaries)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for said in pool.map(lambda item: packed(item[1], out / f"{item[0]}.xz", preset), files.items()):
            print(said, flush=True)
    for path in add:
        shutil.copy(path, out)
    sums = {name: hashlib.sha256((out / f"{name}.xz").read_bytes()).hexdigest() for name in files}
    manifest = {"commit": commit(), "packed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "sha256": sums}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {total / 1e6:.1f} MB of {MOST_PACKED / 1e6:.0f}")
    return total


def commit():
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or None


def unpack(source, into=UNPACKED):
    """The programs that were carried, and those of the same manifest that an earlier call on this machine unpacked."""
    manifest = source / "manifest.json"
    if not manifest.is_file():
        sys.exit(f"gpu-check: no {manifest}: `scripts/gpu-check pack` makes it, or name --binaries DIR")
    programs = {}
    for name, sum_ in json.loads(manifest.read_text())["sha256"].items():
        target, archive = into / sum_[:16] / name, source / f"{name}.xz"
        if not target.is_file() and archive.is_file():
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != sum_:
                sys.exit(f"gpu-check: {archive} is not that of {manifest}: expected {sum_}, found {found}")
            target.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not there, whenever this is stopped.
            part = target.with_suffix(".part")
            with lzma.open(archive) as file:
                part.write_bytes(file.read())
            part.chmod(0o755)
            part.rename(target)
        programs[name] = target if target.is_file() else None
    return programs


# --- running


class Failed(Exception):
    """A part did not do what it must."""


class Skipped(Exception):
    """A part cannot run here."""


class Ended:
    """What became of a command."""

    def __init__(self, code, output, errors, seconds, peak_bytes, in_time):
        self.code, self.output, self.errors, self.in_time = code, output, errors, in_time
        self.facts = {"wall_seconds": round(seconds, 3), "host_peak_bytes": peak_bytes}

    def tail(self, lines=12):
        said = [line for line in (self.output + "\n" + self.errors).splitlines() if line.strip()]
        return "\n".join(said[-lines:])

    def check(self):
        if not self.in_time:
            raise Failed(f"stopped at its limit; it said last:\n{self.tail()}")
        if self.code:
            how = f"signal {-self.code}" if self.code < 0 else f"code {self.code}"
            raise Failed(f"ended with {how}; it said last:\n{self.tail()}")
        return self

    def json(self):
        self.check()
        try:
            return json.loads(self.output)
        except ValueError:
            raise Failed(f"expected JSON, found:\n{self.tail()}") from None


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def torch_directory():
    spec = importlib.util.find_spec("torch")
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def nvidia_smi(facts):
    """What the driver says about the first GPU; `None` where there is none."""
    command = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader", "--id", "0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return said.stdout.strip() if said.returncode == 0 else None
    return None


def library_path(before):
    """Where libtorch and NVIDIA's libraries are: beside Python's PyTorch."""
    torch = torch_directory()
    if torch is None:
        return before
    directories = [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]
    return ":".join([*map(str, directories), *filter(None, [before])])


class Run:
    def __init__(self, arguments):
        self.tiny, self.further = arguments.self_test, arguments.bench.split()
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self.programs = {}
        chosen = arguments.out or (self.scratch / "results" if self.tiny else os.environ.get("OUT") or RESULTS)
        self.out = pathlib.Path(chosen)
        self.out.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + arguments.limit if arguments.limit else None
        self.part_end = None
        self.child = None
        self.part = None
        self.results, self.log = self.out / "results.jsonl", self.out / "log.txt"
        if arguments.from_ == "0" and not arguments.only:
            self.results.unlink(missing_ok=True)
            self.log.unlink(missing_ok=True)
        # Answers of PyTorch from an earlier call serve the parts that are compared with them; what an earlier build
        # of ours did is nothing to this one.
        earlier = [] if self.tiny else read_lines(RESULTS / "results.jsonl")
        self.records = [line for line in earlier if "answer" in line or "probe" in line]
        if self.results != RESULTS / "results.jsonl":
            self.records += read_lines(self.results)
        else:
            self.records = earlier
        # The paths of the checkout that the tests were built in are not those of this one.
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": library_path(os.environ.get("LD_LIBRARY_PATH", "")),
            "ROLL_FIXTURES": str(ROOT / "tests" / "fixtures"),
            "ROLL_DEMO": str(ROOT / "demo" / "assets"),
            "PYTHONUNBUFFERED": "1",
            "ROLL_LOG": "info,roll=debug",
            "RUST_BACKTRACE": "1",
        }
        self.gpu_name = nvidia_smi("name")
        self.gpu, self.second = ("flex", "flex") if self.tiny else ("libtorch-cuda", "cuda")
        self.has_torch = torch_directory() is not None

    # Results

    def record(self, verdict, **data):
        line = {"part": self.part.id, "name": self.part.name, "verdict": verdict, **data}
        self.records.append(line)
        with open(self.results, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def say(self, text):
        print(text, flush=True)
        self.write_log(text + "\n")

    def write_log(self, text):
        with open(self.log, "a") as file:
            file.write(text)

    def last(self, part, key):
        """The newest record of `part` that has `key`."""
        found = [r for r in self.records if r["part"] == part and key in r]
        return found[-1] if found else None

    def answers(self, of):
        """PyTorch's to the same request on this machine's GPU, the last of each kind."""
        kinds = ("of", "attention", "activations", "offload")
        given = [r["answer"] for r in self.records if "answer" in r and phases_alone(r["answer"]["of"]) == of]
        last = {tuple(a[kind] for kind in kinds): a for a in given if self.tiny or a["device"] == self.gpu_name}
        return [a for a in last.values() if not a["error"]]

    # Commands

    def command(self, arguments, limit, extra=(), stdin="", watch=None):
        """Runs a command in a process group of its own, which is killed at the limit. `watch(pid)` is called twice a
        second while it runs. A new session would outlive what starts this program."""
        arguments = [str(a) for a in arguments]
        limit = max(1.0, min(limit, self.left()))
        start, code, peak, in_time = time.monotonic(), None, 0, True
        said = ["", ""]
        scratch = lambda: tempfile.TemporaryFile("w+", errors="replace")
        try:
            with scratch() as given, scratch() as output, scratch() as errors:
                given.write(stdin)
                given.seek(0)
                try:
                    process = subprocess.Popen(arguments, stdin=given, stdout=output, stderr=errors, cwd=ROOT,
                                               env={**self.environment, **dict(extra)}, preexec_fn=os.setpgrp)
                    self.child = process.pid
                    next_watch = start
                    while True:
                        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                        if pid:
                            break
                        now = time.monotonic()
                        if in_time and now - start > limit:
                            in_time = False
                            self.stop_child()
                        if watch and in_time and now >= next_watch:
                            watch(process.pid)
                            next_watch = now + 0.5
                        time.sleep(0.02)
                    self.child = None
                    code = process.returncode = os.waitstatus_to_exitcode(status)
                    peak = usage.ru_maxrss * 1024
                finally:
                    said = [(file.seek(0), file.read())[1] for file in (output, errors)]
        finally:
            self.stop_child()
            shown = " ".join(a if len(a) < 200 else a[:200] + "..." for a in arguments)
            how = f"code {code}, {time.monotonic() - start:.1f} s{'' if in_time else ', stopped at its limit'}"
            # Requests to PyTorch are lines of 100 kB.
            output, errors = ("\n".join(line[:2000] for line in text[-100_000:].splitlines()) for text in said)
            self.write_log(f"\n--- part {self.part.id}: {shown}\n{output}\n{errors}\n--- {how}\n")
        return Ended(code, *said, time.monotonic() - start, peak, in_time)

    def stop_child(self):
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child, signal.SIGKILL)

    def program(self, name):
        if self.programs[name] is None:
            raise Skipped(f"{name}.xz was not carried")
        return self.programs[name]

    def left(self):
        return self.part_end - time.monotonic()

    def bench(self, *arguments, backend=None, shape=None):
        shape = shape or [*(TINY if self.tiny else A14B), *self.further]
        return [self.program("roll"), "bench", *shape, "--backend", backend or self.gpu, "--rounds", "1", *arguments]

    def work(self, parts):
        failures = 0
        for part in parts:
            self.part = part
            end = time.monotonic() + part.limit
            self.part_end = min(end, self.end) if self.end else end
            start = time.monotonic()
            try:
                if self.left() < min(10, part.limit):
                    raise Skipped("no time is left")
                said = part.run(self) or ""
                verdict = "passed"
            except Skipped as reason:
                said, verdict = str(reason), "SKIPPED"
            except Exception as error:
                known = isinstance(error, Failed)
                said, verdict = str(error) if known else f"{type(error).__name__}: {error}", "FAILED"
                failures += 1
            self.record(verdict, said=said, seconds=round(time.monotonic() - start, 1))
            self.say(f"{part.id:<3} {part.name:<44} {verdict:<8} {time.monotonic() - start:6.1f} s  {said}")
        return failures


class Part:
    """`again` says that it differs from another part in numbers alone: a self-test leaves it out."""

    def __init__(self, id, name, limit, run, again=False):
        self.id, self.name, self.limit, self.run, self.again = id, name, limit, run, again

    @property
    def number(self):
        return int(re.match(r"\d+", self.id)[0])


# --- the parts


def environment(run):
    gpu = nvidia_smi("name,driver_version,memory.total,memory.used,clocks.max.sm")
    manifest = json.loads((PACK / "manifest.json").read_text()) if (PACK / "manifest.json").is_file() else {}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    run.record("found", gpu=gpu, cores=os.cpu_count(), host_bytes=memory,
               libc=" ".join(platform.libc_ver()), kernel=platform.release(), python=platform.python_version(),
               commit=manifest.get("commit") or commit(), packed=manifest.get("packed"),
               date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    if not run.tiny and gpu is None:
        raise Failed("nvidia-smi lists no GPU")
    return gpu or f"{os.cpu_count()} cores"


def probe(run):
    need_torch(run)
    script = [sys.executable, ROOT / "bench" / "gpu_probe.py", *(["--tiny"] if run.tiny else [])]
    ended = run.command(script, run.left() - 2)
    found = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    for line in found:
        run.record("found", probe=line)
    ended.check()
    ceiling = next(line["flops_per_second"] for line in found if line["name"] == "ceiling")
    chosen = next((line.get("chosen") for line in found if line["name"] == "attention"), None)
    return f"{ceiling / 1e12:.3g} TFLOP/s of random bf16, attention {chosen}"


def opens(run):
    """Every library is found, and each backend makes a step."""
    if shutil.which("ldd"):
        lines = run.command(["ldd", run.program("roll")], 10).output.splitlines()
        missing = [line.strip() for line in lines if "not found" in line]
        if missing:
            raise Failed("; ".join(missing))
    version = run.command([run.program("roll"), "--version"], 10).check().output.strip()
    opened = {}
    for backend in dict.fromkeys([run.gpu, "libtorch"]):
        try:
            found = run.command(run.bench("--json", "-", backend=backend, shape=TINY), 40).json()
            opened[backend] = found["step_seconds"]
        except Failed as error:
            absent = "not part of this build" in str(error)
            opened[backend] = "not part of this build" if absent else str(error)
            if backend == run.gpu or not absent:
                run.record("found", version=version, opened=opened)
                raise
    run.record("found", version=version, opened=opened)
    said = (f"{k}: {v:.2f} s" if isinstance(v, float) else f"{k}: {v}" for k, v in opened.items())
    return ", ".join([version, *said])


def need_torch(run):
    if not run.has_torch:
        raise Skipped(f"no PyTorch in {sys.executable}")


def theirs(*arguments):
    """PyTorch alone, on the request of `roll bench`."""
    def part(run):
        need_torch(run)
        # On the CPU there is no choice of kernels.
        chosen = [a for a in arguments if not (run.tiny and a in ("--torch-attention", "cudnn", "flash"))]
        request = run.command(run.bench(*chosen, "--request"), 10).check().output.strip()
        asked = {**json.loads(request.removeprefix("step ")), "progress": True}
        script = [sys.executable, ROOT / "bench" / "torch_reference.py", os.cpu_count(), "-"]
        ended = run.command(script, run.left() - 2, stdin=f"step {json.dumps(asked)}\n")
        # It writes a line after each round: the last one counts, also of a process that was stopped.
        answers = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
        if not answers:
            ended.check()
            raise Failed(f"it said nothing; last:\n{ended.tail()}")
        answer = answers[-1]
        run.record("found", answer=answer, **ended.facts)
        if answer["error"]:
            raise Failed(answer["error"])
        peak = answer["memory"]["driver_bytes"] or answer["memory"]["reserved_bytes"] or 0
        pull = answer["phases"].get("pull of forward", {}).get("seconds")
        step = answer["step_seconds"]
        return (f"{answer['attention']}, {answer['activations']}: " + (f"step {step:.2f} s, " if step else "")
                + f"pull {pull or 0:.3f} s, {peak / 1e9:.1f} GB")
    return part


def phases_alone(of):
    return of.removesuffix(", whole steps")


def compared(ours, answer):
    """Ours beside one answer of PyTorch: how many times as fast, how many times the memory."""
    if ours["whole_step"] and answer["step_seconds"]:
        seconds = ours["step_seconds"], answer["step_seconds"]
    else:
        both = [(p, answer["phases"][p["name"]]) for p in ours["phases"] if p["name"] in answer["phases"]]
        seconds = sum(p["passes"] * p["seconds"] for p, _ in both), sum(p["passes"] * t["seconds"] for p, t in both)
    peak = answer["memory"]["driver_bytes"] or answer["memory"]["reserved_bytes"]
    alike = ours["whole_step"] == bool(answer["step_seconds"])
    return {"attention": answer["attention"], "activations": answer["activations"], "offload": answer["offload"],
            "whole_step": bool(answer["step_seconds"]),
            "speed": seconds[1] / seconds[0] if seconds[0] else None,
            # The memory of one recorded pass says nothing about that of a step.
            "memory": ours["peak_bytes"] / peak if alike and peak and ours["peak_bytes"] else None}


def ours(*arguments, backend=None, shape=None):
    def part(run):
        on = {None: run.gpu, "second": run.second}[backend]
        command = run.bench(*arguments, backend=on, shape=None if run.tiny else shape)
        asked = run.command([*command, "--request"], 10).check().output.removeprefix("step ")
        of = phases_alone(json.loads(asked)["of"])
        ended = run.command([*command, "--json", "-"], run.left() - 2)
        found = ended.json()
        ratios = [compared(found, answer) for answer in run.answers(of)]
        run.record("found", bench=found, compared=ratios, **ended.facts)
        rate = found["transformer_flops_per_second"]
        said = (f"step {found['step_seconds'] or 0:.2f} s, transformer {rate / 1e12:.3g} TFLOP/s, "
                f"{(found['peak_bytes'] or 0) / 1e9:.1f} GB")
        for ratio in ratios:
            kind = f"{ratio['attention']} {ratio['activations']}{' offload' if ratio['offload'] else ''}"
            memory = f", memory {ratio['memory']:.2f}" if ratio["memory"] else ""
            said += f"; {ratio['speed']:.2f} of PyTorch ({kind}){memory}"
        return said
    return part


TEST = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", re.MULTILINE)


def operators(backend, extra=()):
    """The unit tests of operators on one device. Tests that a crash took along run again, each alone."""
    def part(run):
        on = {"gpu": run.gpu, "second": run.second}[backend]
        wanted = ["ops::tests::attention"] if run.tiny and backend == "second" else OPERATORS
        extra_here = {**dict(extra), "ROLL_TEST_BACKENDS": on}
        program = run.program("operators")
        listed = run.command([program, "--list", "--format", "terse", *wanted], 20, extra_here).check().output
        names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
        ended = run.command([program, *wanted, "--test-threads", "4"], run.left() - 5, extra_here)
        verdicts = dict(TEST.findall(ended.output))
        # Output of a test may stand between its name and its verdict.
        lost = [name for name in names if name not in verdicts]
        while lost and run.left() > 10:
            name = lost.pop(0)
            alone = run.command([program, "--exact", name], min(30, run.left() - 5), extra_here)
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


def parity(backend, dtype, extra=(), judged=True):
    def part(run):
        on = {"gpu": run.gpu, "second": run.second}[backend]
        filters = [f"{on}-{dtype}"]
        if run.tiny:
            filters = [f"dit_tiny_t2v {on}-{dtype}", f"scheduler {on}-{dtype}"]
        extra_here = {**dict(extra), "ROLL_TEST_BACKENDS": on}
        ended = run.command([run.program("parity"), *filters], run.left() - 2, extra_here)
        cases = [(name, verdict, said) for name, verdict, said in CASE.findall(ended.output)]
        passed = sum(verdict == "ok" for _, verdict, _ in cases)
        failed = {name: said for name, verdict, said in cases if verdict == "FAILED"}
        total = passed + len(failed)
        run.record("found", backend=on, dtype=dtype, judged=judged, passed=passed, total=total, failed=failed,
                   in_time=ended.in_time)
        if judged and (failed or not passed or not ended.in_time):
            if not cases:
                raise Failed(f"no case ran; it said last:\n{ended.tail()}")
            late = "" if ended.in_time else ", stopped at its limit"
            raise Failed(f"{passed}/{total}{late}; failed: {', '.join(failed)}")
        return f"{passed}/{total}"
    return part


def used_bytes(pid, is_gpu):
    """Of the GPU by all processes, or of the process `pid`."""
    if is_gpu:
        used = nvidia_smi("memory.used")
        return int(used.split()[0]) << 20 if used else None
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return None


def demo(backend):
    """A real run: every loss is finite, and memory does not grow from step to step."""
    def part(run):
        on = {"gpu": run.gpu, "second": run.second}[backend]
        directory, steps, taken = run.scratch / f"demo-{run.part.id}", 3 if run.tiny else 8, []
        keys = {"ranks": 1, "training.per_device_train_batch_size": 1, "save_steps": 0, "sample_steps": 0}
        if run.tiny:
            keys |= {"algo.num_inference_steps": 2, "algo.mid_timestep": 1, "algo.final_timestep": 1}
        command = [run.program("roll"), "run", "-q", "--algo", "reward_fl", "--model", "wan2_2"]
        command += ["--unset", "evaluation", "--backend", on, "--steps", steps, "--out", directory]
        command += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        metrics = directory / "metrics.jsonl"

        def watch(pid):
            done = metrics.read_text().count("\n") if metrics.is_file() else 0
            taken.append((done, used_bytes(pid, is_gpu=on != "flex")))

        ended = run.command(command, run.left() - 2, watch=watch)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        losses = [line["actor/loss"] for line in lines if "actor/loss" in line]
        seconds = [line["time/step"] for line in lines if "time/step" in line]
        # Peaks after the first steps, in which caches fill, and at the end.
        peak = lambda chosen: max((b for done, b in taken if b is not None and chosen(done)), default=None)
        early, late = peak(lambda done: 0 < done <= steps // 2), peak(lambda done: done > steps // 2)
        run.record("found", backend=on, losses=losses, step_seconds=seconds, early_bytes=early, late_bytes=late,
                   **ended.facts)
        ended.check()
        if not losses or any(loss is None or loss != loss or abs(loss) == float("inf") for loss in losses):
            raise Failed(f"losses {losses}")
        if early and late and late > 1.1 * early + (64 << 20):
            raise Failed(f"memory grew from {early / 1e9:.2f} to {late / 1e9:.2f} GB")
        grown = f", memory {early / 1e9:.2f} then {late / 1e9:.2f} GB" if early and late else ""
        return f"{len(losses)} losses, the last step {seconds[-1]:.2f} s{grown}" if seconds else f"{len(losses)} losses"
    return part


def sanitizer(backend):
    def part(run):
        on = {"gpu": run.gpu, "second": run.second}[backend]
        if run.tiny:
            raise Skipped("it needs a GPU")
        tool = shutil.which("compute-sanitizer") or next(
            (p for p in ["/usr/local/cuda/bin/compute-sanitizer"] if os.access(p, os.X_OK)), None)
        if tool is None:
            raise Skipped("compute-sanitizer is not installed")
        command = run.bench("--without-vae", "--offload", backend=on, shape=TINY)
        # Without a cache every tensor has an allocation of its own, whose ends are checked.
        ended = run.command([tool, "--tool", "memcheck", "--error-exitcode", "9", *command], run.left() - 2,
                            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        summary = re.findall(r"ERROR SUMMARY: .*", ended.output + ended.errors)
        run.record("found", backend=on, summary=summary, **ended.facts)
        ended.check()
        return summary[-1] if summary else "no summary"
    return part


PARTS = [
    Part("0a", "environment", 15, environment),
    Part("0b", "PyTorch's speed of products, copies, attention", 60, probe),
    Part("1", "libraries and backends open", 60, opens),
    Part("2a", "PyTorch, whole step, offload", 180, theirs("--whole-step", "--offload")),
    Part("2b", "PyTorch, whole step", 150, theirs("--whole-step"), again=True),
    Part("2c", "PyTorch, phases, cuDNN", 70, theirs("--torch-attention", "cudnn")),
    Part("2d", "PyTorch, phases, FlashAttention-2", 80, theirs("--torch-attention", "flash"), again=True),
    Part("2e", "PyTorch, phases, f32 between products", 80, theirs("--torch-activations", "f32"), again=True),
    Part("3", "operators", 90, operators("gpu", EXACT)),
    Part("4a", "parity, f32", 60, parity("gpu", "f32", EXACT)),
    Part("4b", "parity, bf16", 60, parity("gpu", "bf16")),
    Part("4c", "parity, f32 with TF32 convolutions (not judged)", 60, parity("gpu", "f32", judged=False), again=True),
    Part("5a", "ours, whole step, offload", 180, ours("--whole-step", "--offload")),
    Part("5b", "ours, whole step", 150, ours("--whole-step"), again=True),
    Part("5c", "ours, phases", 100, ours()),
    Part("6", "a run of the demo", 60, demo("gpu")),
    Part("7a", "the second backend: a tiny step", 120,
         ours(backend="second", shape=["--preset", "tiny", "--dtype", "bf16"])),
    Part("7b", "the second backend: operators", 180, operators("second", EXACT)),
    Part("7c", "the second backend: parity, f32", 120, parity("second", "f32", EXACT), again=True),
    Part("7d", "the second backend: parity, bf16", 120, parity("second", "bf16"), again=True),
    Part("8", "the second backend: one block of A14B", 180,
         ours("--without-vae", backend="second", shape=[*A14B, "--layers", "1"])),
    Part("9a", "compute-sanitizer", 90, sanitizer("gpu")),
    Part("9b", "compute-sanitizer, the second backend", 90, sanitizer("second")),
]


# --- the verdict


def verdict(run):
    """One line: what was found against the goals. A dash stands for what is not known."""
    measured = [r for part in ("5a", "5b", "5c") if (r := run.last(part, "bench"))]
    # Like beside like: copies to the host on both sides or on none, bf16 between products on both.
    alike = lambda bench, c: c["offload"] == bench["offload"] and c["activations"] != "float32"
    pairs = [(r["bench"], c) for r in measured for c in r["compared"]]
    pairs = [pair for pair in pairs if alike(*pair)] or pairs
    bench = pairs[0][0] if pairs else measured[0]["bench"] if measured else None
    of_bench = [c for b, c in pairs if b is bench]
    speed = min((c["speed"] for c in of_bench if c["whole_step"] == bench["whole_step"] and c["speed"]), default=None)
    memory = next((c["memory"] for _, c in pairs if c["memory"]), None)
    rate = bench and bench["transformer_flops_per_second"]
    probed = [r["probe"]["flops_per_second"] for r in run.records if r.get("probe", {}).get("name") == "ceiling"]
    ceiling = max([*probed[-1:], *([bench["matmul_flops_per_second"]] if bench else [])], default=None)
    number = lambda value, form="{:.2f}": "-" if value is None else form.format(value)
    tera = lambda flops: number(flops and flops / 1e12, "{:.3g}")
    share = number(100 * rate / ceiling if rate and ceiling else None, "{:.0f}")

    def counted(*parts):
        found = [r for part in parts if (r := run.last(part, "total"))]
        return f"{sum(r['passed'] for r in found)}/{sum(r['total'] for r in found)}" if found else "-"

    said = [
        f"speed {number(speed)} of PyTorch (goal {GOALS['speed']})",
        f"memory {number(memory)} ({GOALS['memory']})",
        f"{tera(rate)} TFLOP/s = {share} % of {tera(ceiling)} measured",
        f"parity {counted('4a', '4b')}",
        f"operators {counted('3')}",
    ]
    if any(run.last(part, "total") for part in ("7b", "7c", "7d")):
        said.append(f"{run.second}: parity {counted('7c', '7d')}  operators {counted('7b')}")
    return "  ".join(said)


def cuda_tools(run):
    """What `cuda` needs: CUDA's compiler under a name that is looked for, and its headers."""
    if run.tiny:
        return
    script = f'eval "$("{ROOT}/scripts/setup-cuda" --installed "{run.scratch}/cuda")" && env -0'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=run.environment)
    if said.returncode == 0:
        variables = dict(line.split("=", 1) for line in said.stdout.split("\0") if "=" in line)
        run.environment |= {key: variables[key] for key in ("LD_LIBRARY_PATH", "CUDA_PATH") if key in variables}
        return
    # By hand: links to the libraries that are there.
    places = [*run.environment["LD_LIBRARY_PATH"].split(":"), "/usr/local/cuda/lib64"]
    links = run.scratch / "nvrtc"
    links.mkdir(exist_ok=True)
    found = next((path for place in places for path in sorted(pathlib.Path(place).glob("libnvrtc.so.1[0-9]"))), None)
    if found:
        (links / "libnvrtc.so").symlink_to(found)
        run.environment["LD_LIBRARY_PATH"] += f":{links}:{found.parent}"
    headers = ["/usr/local/cuda", *(str(pathlib.Path(place).parent) for place in places)]
    with_headers = next((h for h in headers if pathlib.Path(h, "include", "cuda_fp16.h").is_file()), None)
    if with_headers and "CUDA_PATH" not in run.environment:
        run.environment["CUDA_PATH"] = with_headers
    run.write_log(f"setup-cuda: {said.stderr.strip()}; by hand: {found}, {with_headers}\n")


def run_parts(arguments):
    run = Run(arguments)
    wanted = arguments.only.split(",") if arguments.only else None
    number = int(re.match(r"\d+", arguments.from_)[0])
    chosen = [p for p in PARTS if (any(p.id.startswith(w) for w in wanted) if wanted else p.number >= number)]
    chosen = [p for p in chosen if not (run.tiny and p.again)]
    if not chosen:
        sys.exit(f"gpu-check: no part is called {arguments.only or arguments.from_}: {' '.join(p.id for p in PARTS)}")

    def stop(*_):
        run.stop_child()
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, stop)
    start = time.monotonic()
    failures = 1
    try:
        if arguments.binaries and not run.tiny:
            run.programs = built(pathlib.Path(arguments.binaries).resolve())
        elif arguments.binaries:
            # So that packing is tested as well; fast rather than small.
            pack(pathlib.Path(arguments.binaries).resolve(), run.scratch / "packed", [], preset=0)
            run.programs = unpack(run.scratch / "packed", run.scratch)
        else:
            run.programs = unpack(PACK)
        cuda_tools(run)
        run.say(f"unpacked in {time.monotonic() - start:.1f} s; results in {run.out}")
        failures = run.work(chosen)
    finally:
        # Also of what was stopped half-way.
        line = verdict(run)
        with open(run.results, "a") as file:
            seconds = round(time.monotonic() - start, 1)
            file.write(json.dumps({"part": "verdict", "said": line, "seconds": seconds}) + "\n")
        if failures and run.out.is_relative_to(run.scratch):
            said = run.log.read_text().splitlines() if run.log.is_file() else []
            print("\n".join(said[-300:]), flush=True)
        shutil.rmtree(run.scratch, ignore_errors=True)
        print(line, flush=True)
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    packing = commands.add_parser("pack", help="put what is built into .gpu/")
    packing.add_argument("--binaries", default=target, help="cargo's directory of the build (%(default)s)")
    packing.add_argument("--add", nargs="*", default=[], help="further files to carry")
    running = commands.add_parser("run", help="check and measure")
    running.add_argument("--from", dest="from_", default="0", metavar="N", help="begin with part N")
    running.add_argument("--only", metavar="ID,ID", help="these parts alone: 3,5a; 2 is all of 2a, 2b, ...")
    running.add_argument("--limit", type=float, metavar="SECONDS", help="skip what does not fit any more")
    running.add_argument("--out", metavar="DIR", help="for results.jsonl and log.txt: $OUT, or bench/results/gpu")
    running.add_argument("--bench", default="", metavar="ARGUMENTS",
                         help="further arguments of `roll bench` for steps of A14B, here and in PyTorch: "
                              "'--vae-dtype bf16'")
    running.add_argument("--self-test", action="store_true", help="tiny sizes, no GPU")
    running.add_argument("--binaries", metavar="DIR", help="a build's directory in place of .gpu/")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        total = pack(pathlib.Path(arguments.binaries), PACK, arguments.add, preset=9 | lzma.PRESET_EXTREME)
        if total > MOST_PACKED:
            sys.exit(f"gpu-check: {total / 1e6:.1f} MB are more than {MOST_PACKED / 1e6:.0f}: the files can be carried "
                     "one after another, each with manifest.json, to a machine that stays")
        return
    sys.exit(run_parts(arguments))


if __name__ == "__main__":
    main()
