"""Rehearses a run of `gpu-check` with a stand-in for the programs, which sleeps as long as they are expected to take:

    python3 scripts/gpu/rehearsal.py [--speed 20]     # seconds go by as many times as fast

On a card that holds a whole step (H200) and on one that does not (H100): by second 600 the operators and parity, the
step of A14B, PyTorch's and the demo are on disk; the demo's files come with a second call. What a killed run leaves is
shown at 300, 600 and 900. Nothing is measured: a test of the script, not of `roll`.
"""

import argparse
import concurrent.futures
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
            "whole_step": "--whole-step" in arguments, "step_seconds": None}


def bench_seconds(arguments):
    """As expected of an H200."""
    if option(arguments, "--preset") == "tiny":
        return 60 if option(arguments, "--backend") == "cuda" else 40
    if "--layers" in arguments:
        return 20 if "--without-vae" in arguments else {"1": 80, "3": 100}[option(arguments, "--layers")]
    if "--whole-step" in arguments:
        return 120 if "--offload" in arguments else 80
    return 50 if option(arguments, "--vae-dtype") is None and "--weights-dtype" not in arguments else 45


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
            found.update(step_seconds=38.0, matmul_flops_per_second=7e14)
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
    for step in range(12):
        rest(45 / 12)
        with open(out / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "actor/loss": 0.1, "time/step": 1.6}) + "\n")
    (out / "summary.json").write_text("{}")


def torch_step(arguments):
    whole, offload = "--whole-step" in arguments, "--offload" in arguments
    answer = {**subject(arguments), "error": None, "version": "2.11.0", "device": "a stand-in", "dtype": "bf16",
              "activations": "bf16", "attention": "cudnn", "threads": 16, "memory": None}
    for names, rounds in progress((130 if offload else 100) if whole else 55):
        answer.update(phases={name: {"seconds": 2.0, "peak_bytes": 1e11} for name in names}, rounds_done=rounds)
        print(json.dumps(answer), flush=True)
    answer.update(step_seconds=44.0 if whole else None,
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
        tests(arguments, 88 if on_cuda else 58)
    elif program == "parity":
        rest(90 if on_cuda else 40)
        print("\n".join(f"case_{i} {arguments[0]} ok" for i in range(40)))
    elif program == "torch_step":
        torch_step(arguments)
    elif program == "gpu_probe":
        rest(30)
        print(json.dumps({"name": "ceiling", "flops_per_second": 7e14}))
    elif option(arguments, "--preset") == "tiny" and "STAND_IN_FAILS" in os.environ:
        sys.exit("out of luck")
    elif arguments[0] == "--version":
        rest(10)
        print("roll, a stand-in")
    else:
        {"bench": roll_bench, "run": roll_run}[arguments[0]](arguments)


# --- the rehearsal


class Call:
    """A checkout as it is sent, and the directory of the run beside it."""

    def __init__(self, scratch, gpu_bytes, speed):
        self.checkout, self.home, self.speed = scratch / "checkout", scratch / "home", speed
        for name in ("scripts", "bench"):
            left_out = shutil.ignore_patterns("__pycache__", "results", "target")
            shutil.copytree(ROOT / name, self.checkout / name, ignore=left_out)
        (self.checkout / "tests" / "fixtures").mkdir(parents=True)
        self.environment = {**os.environ, "GPU_CHECK_SPEED": str(speed), "GPU_CHECK_STAND_IN": str(HERE),
                            "GPU_CHECK_BYTES": str(gpu_bytes)}
        if gpu_bytes < 100e9:
            # One part fails, which ends nothing.
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


def rehearse(name, gpu_bytes, speed, scratch):
    said = [f"{name}: second, what is on disk"]
    call = Call(scratch / name, gpu_bytes, speed)
    call.start()
    # The call that began the run has returned, and the next one brings the demo's files.
    for second in (300, 480, 600, 900):
        out = scratch / name / f"at-{second}"
        if second == 600:
            (call.checkout / "demo" / "assets").mkdir(parents=True)
        waited = call.wait(second, out)
        assert waited.returncode == 0 and "the run goes on" in waited.stdout, waited.stdout + waited.stderr
        parts = found(out)
        said.append(f"  {second}: " + ", ".join(f"{part} {verdict}" for part, verdict in parts.items()))
        assert (out / "table.md").is_file()
        if second < 600:
            assert "demo" not in parts, parts
    at_600 = found(scratch / name / "at-600")
    decisive = ["step", "torch-step", "operators", "parity-f32", "parity-bf16", "demo"]
    assert all(at_600.get(part) == "passed" for part in decisive), at_600
    assert at_600["opens"] == ("FAILED" if "STAND_IN_FAILS" in call.environment else "passed"), at_600
    out = scratch / name / "at-600"
    assert len((out / "demo-metrics.jsonl").read_text().splitlines()) == 12 and (out / "demo-summary.json").is_file()
    assert "speed 1.16 of PyTorch" in (out / "table.md").read_text(), (out / "table.md").read_text()
    # The records of 600 are the beginning of those of 900, and stay when everything is killed.
    call.kill()
    last = call.check("wait", "--out", str(scratch / name / "killed"))
    assert last.returncode == 1 and "the run was stopped before its end" in last.stdout, last.stdout + last.stderr
    records = [(scratch / name / at / "results.jsonl").read_text() for at in ("at-600", "at-900", "killed")]
    assert records[1].startswith(records[0]) and records[2].startswith(records[1])
    return "\n".join(said)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=float, default=20.0)
    speed = parser.parse_args().speed
    cards = {"H200": 150_754_820_096, "H100": 85_520_809_984}
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(rehearse, name, size, speed, pathlib.Path(scratch)) for name, size in cards.items()]
        for run in runs:
            print(run.result())


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        stand_in(sys.argv[1], sys.argv[2:])
    else:
        main()
