"""Rehearses a run of `gpu-check` with a stand-in for the programs, which sleeps as long as they are expected to take:

    python3 scripts/gpu/rehearsal.py [--speed 10]     # seconds go by as many times as fast

On a card that holds a whole step in PyTorch (H200), and on one that does not (H100), where the demo's files come with
the second call, a part fails, and the run is killed. Asserts which parts are on disk at 170, 300, 420 and 560 seconds,
where the first call ends, and prints them. Nothing is measured: a test of the script, not of `roll`. Then an archive is
packed and unpacked.
"""

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
sys.path.insert(0, str(HERE.parent))
import pack

SPEED = float(os.environ.get("GPU_CHECK_SPEED", "1"))
PHASES = {"forward": 4, "forward, recorded": 4, "reference forward": 4, "decode": 1, "score": 1, "pull of score": 1,
          "pull of decode": 1, "pull of forward": 4, "optimizer": 1}


# --- the stand-in


def rest(seconds):
    time.sleep(seconds / SPEED)


def option(arguments, name, default=None):
    return arguments[arguments.index(name) + 1] if name in arguments else default


def subject(arguments):
    layers = int(option(arguments, "--layers", 40))
    return {"preset": option(arguments, "--preset"), "layers": layers, "frames": 81, "size": [480, 480],
            "vae": None if "--without-vae" in arguments else option(arguments, "--vae-dtype", "f32"),
            "parameters": 350_000_000 * layers, "offload": "--offload" in arguments,
            "keep_attention": "--keep-attention" in arguments, "whole_step": "--whole-step" in arguments,
            "step_seconds": None}


def bench_seconds(arguments):
    """As expected of an H200, whose kernels of `cuda` were carried."""
    if option(arguments, "--preset") == "tiny":
        return 12 if option(arguments, "--backend") == "cuda" else 30
    if "--layers" in arguments:
        return {"1": 25, "2": 18, "3": 40, "10": 13}[option(arguments, "--layers")]
    if "--whole-step" in arguments:
        return 92 if "--offload" in arguments else 60
    return 45


def progress(seconds):
    """Preparation, then a round that warms up and one that counts: after each phase, how many rounds are done."""
    rest(0.4 * seconds)
    for round_ in range(2):
        for i in range(len(PHASES)):
            rest(0.25 * seconds / len(PHASES))
            yield list(PHASES)[:i + 1], round_ + (i + 1 == len(PHASES)) * round_
    rest(0.1 * seconds)


def roll_bench(arguments):
    out = pathlib.Path(option(arguments, "--json", os.devnull))
    found = {**subject(arguments), "backend": option(arguments, "--backend"), "all_layers": 40, "tokens": 18_900,
             "algorithm": "reward_fl", "guided": False, "peak_bytes": 1e11, "matmul_flops_per_second": None,
             "transformer_flops_per_second": 4e14}
    phase = lambda name: {"name": name, "passes": PHASES[name], "seconds": 0.04 * found["layers"] + 0.1, "flops": 1e14,
                          "flops_per_second": 4e14, "peak_bytes": 5e10}

    def write(names, rounds, complete):
        found.update(phases=[phase(name) for name in names], rounds_done=rounds, complete=complete)
        if complete:
            kept = found["keep_attention"]
            found.update(step_seconds=35.0 if kept else 38.0, matmul_flops_per_second=7e14)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(out)

    for names, rounds in progress(bench_seconds(arguments)):
        if "--json" in arguments:
            write(names, rounds, False)
    if "--json" in arguments:
        write(PHASES, 1, True)
    if times := os.environ.get("OPERATOR_TIMES"):
        layers = int(option(arguments, "--layers"))
        operators = {"aten::mm": [10 * layers, 0.04 * layers]}
        lines = [{"phase": name, "gpu": True, "seconds": 0.04 * layers, "operators": operators}
                 for name in ("forward, recorded", "pull of forward")]
        pathlib.Path(times).write_text("".join(json.dumps(line) + "\n" for line in lines))


def roll_run(arguments):
    out = pathlib.Path(option(arguments, "--out"))
    out.mkdir(parents=True)
    for step in range(60):
        rest(110 / 60)
        with open(out / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "actor/loss": 0.1, "time/step": 1.6}) + "\n")
    (out / "summary.json").write_text("{}")


def torch_step(arguments):
    whole, both = "--whole-step" in arguments, "both" in arguments
    for kept in (False, True)[:1 + both]:
        answer = {**subject(arguments), "error": None, "version": "2.11.0", "device": "a stand-in", "dtype": "bf16",
                  "activations": "bf16", "attention": "cudnn", "keep_attention": kept, "threads": 16, "memory": None}
        for names, rounds in progress((56 if both else 115) if whole else 55):
            answer.update(phases={name: {"seconds": 2.0, "peak_bytes": 1e11} for name in names}, rounds_done=rounds)
            print(json.dumps(answer), flush=True)
        answer.update(step_seconds=(42.0 if kept else 44.0) if whole else None,
                      memory={"reserved_bytes": 1e11, "allocated_bytes": 9e10, "driver_bytes": 1.1e11})
        print(json.dumps(answer), flush=True)


def tests(arguments, seconds):
    if "--list" in arguments:
        rest(2)
        print("\n".join(f"ops::tests::number_{i}: test" for i in range(90)))
        return
    for i in range(90):
        rest(seconds / 90)
        print(f"test ops::tests::number_{i} ... ok", flush=True)


def stand_in(program, arguments):
    on_cuda = os.environ.get("ROLL_TEST_BACKENDS") == "cuda"
    if program == "operators":
        tests(arguments, 5 if "nccl::" in arguments else 50 if on_cuda else 55)
    elif program == "parity":
        rest(34 if on_cuda else 40)
        print("\n".join(f"case_{i} {arguments[0]} ok" for i in range(40)))
    elif program == "torch_step":
        torch_step(arguments)
    elif program == "gpu_probe":
        rest(15)
        line = {"name": "addmm", "shape": [64, 64, 64], "flag": True, "survives": 0.3}
        print(json.dumps(line if "addmm" in arguments else {"name": "ceiling", "flops_per_second": 7e14}))
    elif program == "zimage_speed":
        rest(20)
        print(json.dumps({"seconds": {"transformer": [2.0, 2.0], "decode": [1.0, 1.0]}}))
    elif program == "vision_language_speed":
        rest(50)
        phases = {"tower": 0.1, "forward": 0.3, "forward_and_backward": 0.9}
        print(json.dumps({"roll": phases, "PyTorch": phases, "error": 1e-3}))
    elif program == "generation_batch":
        for who in ("roll", "transformers"):
            rest(25)
            print(json.dumps({"who": who, "tokens_per_second": 4000.0}), flush=True)
    elif option(arguments, "--backend") == "cuda" and "STAND_IN_FAILS" in os.environ:
        sys.exit("out of luck")
    elif arguments[0] == "--version":
        rest(5)
        print("roll, a stand-in")
    elif arguments[0] == "devices":
        print("backend        built  devices\nlibtorch-cuda  yes    1\ncuda           yes    1")
    else:
        {"bench": roll_bench, "run": roll_run}[arguments[0]](arguments)


# --- the rehearsal


class Call:
    """A checkout as it is sent, and the directory of the run beside it."""

    def __init__(self, scratch, gpu_bytes, speed, with_demo):
        self.checkout, self.home, self.speed = scratch / "checkout", scratch / "home", speed
        for name in ("scripts", "bench"):
            left_out = shutil.ignore_patterns("__pycache__", "results", "target")
            shutil.copytree(ROOT / name, self.checkout / name, ignore=left_out)
        (self.checkout / "tests" / "fixtures").mkdir(parents=True)
        if with_demo:
            (self.checkout / "demo" / "assets").mkdir(parents=True)
        self.environment = {**os.environ, "GPU_CHECK_SPEED": str(speed), "GPU_CHECK_STAND_IN": str(HERE),
                            "GPU_CHECK_BYTES": str(gpu_bytes)}
        if not with_demo:
            # Parts fail, which ends nothing.
            self.environment["STAND_IN_FAILS"] = "1"

    def check(self, *arguments):
        command = [self.checkout / "scripts" / "gpu-check", arguments[0], "--home", self.home, *arguments[1:]]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=self.environment)

    def start(self):
        self.began = time.monotonic()
        said = self.check("run")
        assert said.returncode == 0, said.stderr

    def wait(self, until, out):
        left = until - (time.monotonic() - self.began) * self.speed
        return self.check("wait", "--for", str(max(left, 0.1)), "--out", str(out))

    def kill(self):
        os.killpg(json.loads((self.home / "state.json").read_text())["pid"], signal.SIGKILL)


def found(out):
    """Of each part, the newest verdict on disk, and how many phases of it."""
    parts = {}
    for line in (out / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        measured = record.get("bench") or record.get("pytorch")
        verdict = record["verdict"]
        if verdict in ("so far", "found") and measured:
            verdict = f"{len(measured['phases'])} phases, {measured['rounds_done']} rounds"
        if verdict != "begins":
            parts[record["part"]] = verdict
    return parts


# By the second that ends a call or a group of parts: what must have passed, on a card that holds a step and on one that
# does not.
UNTIMED = ["environment", "opens", "operators", "nccl", "parity-bf16", "parity-f32", "addmm"]
ON_CUDA = ["cuda-operators", "cuda-parity-bf16", "cuda-parity-f32"]
LARGE = [(170, [*UNTIMED, "opens-cuda", *ON_CUDA, "demo"]), (300, ["step", "attention-kept"]), (420, ["torch-step"]),
         (560, ["eight-bits", "cuda-layers"])]
SMALL = [(170, [*UNTIMED, *ON_CUDA]), (300, ["step"]), (420, ["torch-step"]), (560, ["step-offload"])]


def rehearse(name, gpu_bytes, expected, speed, scratch):
    large = expected is LARGE
    said = [f"{name}: second, what is on disk"]
    call = Call(scratch / name, gpu_bytes, speed, large)
    call.start()
    passed, before = [], {}
    for second, new in expected:
        out = scratch / name / f"at-{second}"
        waited = call.wait(second, out)
        assert waited.returncode == 0 and "the run goes on" in waited.stdout, waited.stdout + waited.stderr
        parts = found(out)
        said.append(f"  {second}: " + ", ".join(f"{p} {v}" for p, v in parts.items() if before.get(p) != v))
        assert (out / "table.md").is_file()
        passed, before = passed + new, parts
        assert all(parts.get(part) == "passed" for part in passed), (name, second, parts)
        assert large or ("demo" not in parts and parts["opens-cuda"] == "FAILED"), parts
    table = (out / "table.md").read_text()
    verdict = table.splitlines()[2]
    said.append(f"  {verdict}")
    assert verdict.startswith("speed 1.16 of PyTorch, both computing attention again"), verdict
    assert ("1.20 both keeping it" if large else "- both keeping it") in verdict, verdict
    if large:
        assert len((out / "demo-metrics.jsonl").read_text().splitlines()) == 60 and "| eight-bits --weights" in table
        # The second call: what is left until the limit, and the end.
        last = call.wait(800, scratch / name / "end")
        parts = found(scratch / name / "end")
        said.append("  end: " + ", ".join(f"{p} {v}" for p, v in parts.items() if before.get(p) != v))
        assert last.returncode == 0 and "the run has ended" in last.stdout, last.stdout + last.stderr
        assert all(parts.get(part) == "passed" for part in ("times", "agents")), parts
        return "\n".join(said)
    # The second call brings the demo, which waits for its turn; then everything is killed, and the records stay.
    (call.checkout / "demo" / "assets").mkdir(parents=True)
    call.wait(600, scratch / name / "at-600")
    assert (call.home / "tree" / "demo" / "assets").is_dir()
    call.kill()
    last = call.check("wait", "--out", str(scratch / name / "killed"))
    assert last.returncode == 1 and "the run was stopped before its end" in last.stdout, last.stdout + last.stderr
    records = [(scratch / name / at / "results.jsonl").read_text() for at in ("at-560", "at-600", "killed")]
    assert records[1].startswith(records[0]) and records[2].startswith(records[1])
    return "\n".join(said)


def rehearse_packing(scratch):
    """What is packed arrives; a call above the limit is refused, and the demo goes with the second if that helps."""
    build, packed, home = scratch / "build", scratch / "packed", scratch / "arrived"
    cache = scratch / "cache"
    for directory in (build, cache / "sm_90a"):
        directory.mkdir(parents=True)
    for name in ("roll", "parity", "roll_backends"):
        shutil.copy(shutil.which("true"), build / name)
    (cache / "sm_90a" / "kernels.json").write_text("{}")
    with contextlib.redirect_stdout(io.StringIO()):
        pack.pack(build, packed, preset=0, kernel_cache=cache)
    programs = pack.unpack(packed, home / "programs")
    assert subprocess.run([programs["parity"]]).returncode == 0
    pack.unpack_archives(packed, home)
    assert (home / "cache" / "kernels" / "sm_90a" / "kernels.json").read_text() == "{}"
    fixtures = {path.name for path in (home / "tree" / "tests" / "fixtures").iterdir()}
    assert "vae21_tiny" in fixtures and not fixtures & {"optimizer", "face_tools"}, fixtures
    weights = "demo/assets/Wan2.1_VAE.safetensors"
    assert (home / "tree" / weights).read_bytes() == (ROOT / weights).read_bytes()

    whole = sum(path.stat().st_size for path in packed.iterdir())
    demo = (packed / "demo.tar.xz").stat().st_size
    weighed = lambda limit: [bytes_ for _, bytes_ in pack.calls(packed, 0, limit)]
    assert weighed(whole) == [whole, 0] and weighed(whole - 1) == [whole - demo, demo]
    for limit, refused in ((pack.LIMIT, False), (demo, True)):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            pack.sizes(packed, limit)
            assert not refused, limit
            continue
        assert refused, limit
    return f"packing: {whole:,} bytes of .gpu arrive"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=float, default=10.0)
    speed = parser.parse_args().speed
    cards = [("H200", 150_754_820_096, LARGE), ("H100", 85_520_809_984, SMALL)]
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor() as pool:
        scratch = pathlib.Path(scratch)
        runs = [pool.submit(rehearse, *card, speed, scratch) for card in cards]
        for run in runs:
            print(run.result())
        print(rehearse_packing(scratch))


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        stand_in(sys.argv[1], sys.argv[2:])
    else:
        main()
