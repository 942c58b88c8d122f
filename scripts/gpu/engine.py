"""Runs parts, one after another or side by side: commands within limits, records on disk as they become known."""

import contextlib
import copy
import ctypes
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import tables

# For a rehearsal (`rehearsal.py`): seconds go by faster, and a program stands in for those that are packed.
SPEED = float(os.environ.get("GPU_CHECK_SPEED", "1"))
STAND_IN = os.environ.get("GPU_CHECK_STAND_IN")
# The first start on a cold machine maps 3 GB of libtorch.
FIRST_START = 60
CLOCKS = ["timestamp", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used", "utilization.gpu"]
# The newer name, and that of drivers before 535.
THROTTLING = ["clocks_event_reasons.active", "clocks_throttle_reasons.active"]


def now():
    return time.monotonic() * SPEED


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


class Gpu:
    """The first GPU, as NVIDIA's driver knows it: `nvidia-smi` may be missing."""

    def __init__(self):
        self.name, self.bytes = None, 0
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL("libcuda.so.1")
            device, name, size = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
            if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
                return
            driver.cuDeviceGetName(name, len(name), device)
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            self.name, self.bytes = name.value.decode(), size.value


def torch_directory():
    spec = importlib.util.find_spec("torch")
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def library_path(before):
    """Where libtorch and NVIDIA's libraries are: beside Python's PyTorch."""
    torch = torch_directory()
    if torch is None:
        return before
    directories = [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]
    return ":".join([*map(str, directories), *filter(None, [before])])


class Run:
    def __init__(self, home, limit, tiny):
        self.home, self.tiny = home, tiny
        self.start = now()
        self.end = self.start + limit
        self.scratch = home.path / "scratch"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self.results = home.results
        self.records = tables.read(self.results / "results.jsonl")
        self.child = self.part = self.part_end = None
        self.lanes, self.lock = [self], threading.RLock()
        self.gpu = Gpu()
        if STAND_IN:
            self.gpu.name, self.gpu.bytes = "a stand-in", int(os.environ["GPU_CHECK_BYTES"])
        self.backend, self.second = ("flex", "flex") if tiny else ("libtorch-cuda", "cuda")
        self.cuda_problem = None
        # The paths of the checkout that the tests were built in are not those of this one.
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": library_path(os.environ.get("LD_LIBRARY_PATH", "")),
            "ROLL_FIXTURES": str(home.tree / "tests" / "fixtures"),
            "ROLL_DEMO": str(home.tree / "demo" / "assets"),
            # Kernels that one process has compiled serve the others.
            "ROLL_CACHE": str(home.path / "cache"),
            "PYTHONUNBUFFERED": "1",
            "ROLL_LOG": "info,roll=debug",
            "RUST_BACKTRACE": "1",
        }
        if not tiny and not STAND_IN:
            self.find_cuda()

    def find_cuda(self):
        """What `cuda` needs: CUDA's compiler under a name that is looked for, and its headers."""
        script = f'eval "$(scripts/setup-cuda --installed "{self.home.path}/cuda")" && env -0'
        said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=self.environment,
                              cwd=self.home.tree)
        if said.returncode:
            self.cuda_problem = said.stderr.strip() or f"setup-cuda ended with {said.returncode}"
            return
        variables = dict(line.split("=", 1) for line in said.stdout.split("\0") if "=" in line)
        self.environment |= {key: variables[key] for key in ("LD_LIBRARY_PATH", "CUDA_PATH") if key in variables}

    # Files

    def has(self, need):
        """Whether a program or a folder of the checkout was carried here."""
        return need in self.programs() if "/" not in need else (self.home.tree / need).is_dir()

    def programs(self):
        if STAND_IN:
            names = ["roll", "parity", "operators", "times", "generation_speed", "vision_language", "torch_step",
                     "gpu_probe", "generation_batch", "vision_language_speed", "zimage_speed"]
            return {name: [sys.executable, STAND_IN, name] for name in names}
        with contextlib.suppress(OSError):
            packed = json.loads((self.home.path / "programs.json").read_text())["programs"]
            script = lambda name: [sys.executable, self.home.tree / "bench" / f"{name}.py"]
            scripts = {name: script(name) for name in ("torch_step", "gpu_probe", "generation_batch", "zimage_speed")}
            scripts["vision_language_speed"] = script("vision_language")
            return {name: [path] for name, path in packed.items()} | scripts
        return {}

    def program(self, name):
        return self.programs()[name]

    def record(self, verdict, **data):
        at = round(now() - self.start, 1)
        line = {"part": self.part.id, "name": self.part.name, "at": at, "verdict": verdict, **data}
        with self.lock, open(self.results / "results.jsonl", "a") as file:
            self.records.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def log(self, text):
        with self.lock, open(self.results / "log.txt", "a") as file:
            file.write(text)

    def write_table(self):
        part = self.results / "table.part"
        with self.lock:
            part.write_text(tables.whole(self.records, self.results / "clocks.csv"))
            part.rename(self.results / "table.md")

    # Commands

    def left(self):
        return self.part_end - now()

    def command(self, arguments, limit=None, extra=(), watch=None):
        """Runs a command in a process group of its own, which is killed at the limit. `watch(output)` is called four
        times a second with the file of its output."""
        arguments = [str(a) for a in arguments]
        limit = max(1.0, min(limit or self.left(), self.left()))
        start, code, peak, in_time = now(), None, 0, True
        said = ["", ""]
        scratch = lambda: tempfile.TemporaryFile("w+", errors="replace", dir=self.scratch)
        try:
            with scratch() as output, scratch() as errors:
                try:
                    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                                               cwd=self.home.tree, env={**self.environment, **dict(extra)},
                                               process_group=0)
                    self.child = process.pid
                    turn = 0
                    while True:
                        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                        if watch and (pid or turn % 12 == 0):
                            watch(output)
                        if pid:
                            break
                        if in_time and now() - start > limit:
                            in_time = False
                            self.stop_child()
                        turn += 1
                        time.sleep(0.02)
                    self.child = None
                    code = process.returncode = os.waitstatus_to_exitcode(status)
                    peak = usage.ru_maxrss * 1024
                finally:
                    said = [(file.seek(0), file.read())[1] for file in (output, errors)]
        finally:
            self.stop_child()
            shown = " ".join(arguments)
            how = f"code {code}, {now() - start:.1f} s{'' if in_time else ', stopped at its limit'}"
            output, errors = (text[-100_000:] for text in said)
            self.log(f"\n--- {self.part.id}: {shown} {dict(extra) or ''}\n{output}\n{errors}\n--- {how}\n")
        return Ended(code, *said, now() - start, peak, in_time)

    def stop_child(self):
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child, signal.SIGKILL)
            self.child = None

    def stop_all(self):
        for lane in self.lanes:
            lane.end = 0
            lane.stop_child()

    @contextlib.contextmanager
    def clocks(self):
        """Logs the clocks, each second, as long as the run lasts."""
        logger = None
        for reasons in THROTTLING if shutil.which("nvidia-smi") and not self.tiny else ():
            query = ["nvidia-smi", f"--query-gpu={','.join([*CLOCKS, reasons])}", "--format=csv,nounits", "--id=0"]
            if subprocess.run(query, capture_output=True).returncode == 0:
                with open(self.results / "clocks.csv", "a") as file:
                    logger = subprocess.Popen([*query, "--loop=1"], stdout=file, stderr=subprocess.DEVNULL)
                break
        try:
            yield
        finally:
            if logger:
                logger.terminate()

    # The parts

    def work(self, parts):
        failures, waiting = 0, list(parts)
        with self.clocks():
            while waiting:
                # The first in order whose files are here; the last turn skips those whose files never came.
                ready = [p for p in waiting if all(map(self.has, p.needs))]
                part = ready[0] if ready else waiting[0]
                at = waiting.index(part)
                waiting.remove(part)
                if isinstance(part, SideBySide):
                    failed, left = self.side_by_side(part)
                    failures += failed
                    names = [p.id for p in waiting]
                    at = names.index(part.rest_before) if part.rest_before in names else len(waiting)
                    waiting[at:at] = left
                else:
                    failures += self.do(part, ready)
        self.part = Part("end", "", 0, 0, None)
        self.record("end", failures=failures, seconds=round(now() - self.start, 1), said=tables.verdict(self.records))
        self.write_table()
        print(tables.verdict(self.records), flush=True)
        return failures

    def side_by_side(self, group):
        """Works through all chains at once. Returns how many parts failed, and those that were not begun: their files
        are not here, or the group's time was over."""
        lanes = [copy.copy(self) for _ in group.chains]
        for lane in lanes:
            lane.end = min(now() + group.limit, self.end)
        self.lanes += lanes
        failures, left = [0] * len(lanes), [[] for _ in lanes]

        def follow(i):
            for part in group.chains[i]:
                if not all(map(self.has, part.needs)) or lanes[i].end - now() < min(part.limit, 0.7 * part.seconds):
                    left[i].append(part)
                else:
                    failures[i] += lanes[i].do(part, True)

        threads = [threading.Thread(target=follow, args=(i,), daemon=True) for i in range(len(lanes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(failures), [part for parts in left for part in parts]

    def do(self, part, ready):
        self.part = part
        start = now()
        self.part_end = min(start + part.limit, self.end)
        try:
            missing = [need for need in part.needs if not self.has(need)]
            if not ready:
                raise Skipped(f"not carried: {', '.join(missing)}")
            if self.left() < min(part.limit, 0.7 * part.seconds):
                raise Skipped(f"{max(self.left(), 0):.0f} s are left")
            self.record("begins")
            said, verdict = part.run(self) or "", "passed"
        except Skipped as reason:
            said, verdict = str(reason), "SKIPPED"
        except Exception as error:
            known = isinstance(error, Failed)
            said, verdict = str(error) if known else f"{type(error).__name__}: {error}", "FAILED"
            if now() >= self.end:
                # The limit of the whole run stopped it: that is no fault of the part.
                said, verdict = f"the run's time was over; {said}", "SKIPPED"
            if not known:
                self.log(traceback.format_exc())
        seconds = now() - start
        self.record(verdict, said=said, seconds=round(seconds, 1), started=time.time() - seconds / SPEED)
        print(f"{start - self.start:6.0f} {part.id:<22} {verdict:<8} {seconds:6.1f} s  {said}", flush=True)
        try:
            self.write_table()
        except Exception:
            # A table that cannot be written ends no run: the records are there.
            self.log(traceback.format_exc())
        return verdict == "FAILED"


class Part:
    """`seconds` are expected on one H200, `limit` is the most; `needs` are programs and folders of the checkout.
    `again` marks a part that differs from another in numbers alone: a self-test leaves it out."""

    def __init__(self, id, name, seconds, limit, run, needs=("roll",), again=False):
        self.id, self.name, self.seconds, self.limit = id, name, seconds, limit
        self.run, self.needs, self.again = run, needs, again


class SideBySide:
    """Chains of parts that measure no time: the chains run at once, each with its parts one after another. Parts that
    are left over come before the part `rest_before`."""

    needs, again = (), False

    def __init__(self, limit, rest_before, chains):
        self.id, self.limit, self.rest_before, self.chains = "side-by-side", limit, rest_before, chains
