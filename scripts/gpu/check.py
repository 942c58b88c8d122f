"""Checks and measures `roll` on a machine with an NVIDIA GPU; see `scripts/gpu-check`.

`run` copies what it needs out of the checkout and starts one process in a session of its own, which works through the
parts in order (`parts.py`), each within its limit; parts that measure no time run side by side. A part that fails or
is skipped ends nothing. One whose files were not carried waits until a later `run` or `wait` brings them. `wait` shows
what is found and copies the results:

    results.jsonl    one JSON object a line, written as it becomes known, phase by phase
    table.md         the tables and the goals, written anew after each part
    log.txt          what the commands said
    clocks.csv       clock, power, temperature, memory and throttling of the GPU, each second

Needs Python 3.10, and PyTorch in `python3`: without it the parts that want it are skipped.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import pack
import parts
import tables
from engine import Run, now

ROOT = pack.ROOT
RESULTS = ROOT / "bench" / "results" / "gpu"
# What is copied out of the checkout, which another call may replace. Fixtures and the demo are there or packed.
CARRIED = ["scripts", "bench", "tests/fixtures", "demo/assets"]


class Home:
    """The directory of a run, which stays between calls."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.tree, self.results, self.state = self.path / "tree", self.path / "results", self.path / "state.json"

    def carry(self, packed):
        """Takes over what the checkout has and this directory does not."""
        pack.unpack_archives(packed, self.path)
        for name in CARRIED:
            source, target = ROOT / name, self.tree / name
            if source.is_dir() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(target.name + ".part")
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(source, part, ignore=shutil.ignore_patterns("target", "results", "__pycache__"))
                part.rename(target)
        if (packed / "programs.xz").is_file():
            programs = pack.unpack(packed, self.path / "programs")
            manifest = json.loads((packed / "manifest.json").read_text())
            about = {"programs": {k: str(v) for k, v in programs.items()},
                     **{k: manifest[k] for k in ("commit", "packed")}}
            part = self.path / "programs.part"
            part.write_text(json.dumps(about))
            part.rename(self.path / "programs.json")

    def is_running(self):
        try:
            stat = pathlib.Path(f"/proc/{json.loads(self.state.read_text())['pid']}/stat").read_text()
        except (OSError, ValueError, KeyError):
            return False
        # Where nobody waits for it, the process that has ended remains as a zombie.
        return stat.rpartition(")")[2].split()[0] != "Z"

    def is_there(self):
        return self.state.is_file()

    def copy_results(self, to):
        to.mkdir(parents=True, exist_ok=True)
        for path in self.results.iterdir() if self.results.is_dir() else ():
            target = to / path.name
            if path.suffix != ".part" and not (target.is_file() and target.stat().st_mtime >= path.stat().st_mtime):
                shutil.copy2(path, target)

    def verdict(self):
        """The record that ends a run; `None` where it has not ended by itself."""
        lines = tables.read(self.results / "results.jsonl")
        return lines[-1] if lines and lines[-1]["part"] == "end" else None


def start(home, arguments, packed):
    """Starts the run, in a session of its own: the end of the shell or of the call that began it is not its end."""
    if home.is_running():
        sys.exit(f"gpu-check: a run is under way in {home.path}: `gpu-check wait`")
    again = arguments.only or arguments.from_
    if not again:
        shutil.rmtree(home.path, ignore_errors=True)
    home.results.mkdir(parents=True, exist_ok=True)
    home.carry(packed)
    script = home.tree / "scripts" / "gpu" / "check.py"
    command = [sys.executable, script, "work", "--home", home.path, "--limit", str(arguments.limit)]
    for option, value in [("--only", arguments.only), ("--from", arguments.from_)]:
        command += [option, value] if value else []
    command += ["--self-test"] if arguments.self_test else []
    with open(home.results / "progress.txt", "a") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=home.tree,
                                   start_new_session=True)
    home.state.write_text(json.dumps({"pid": process.pid}))
    return process


def follow(home, seconds, to):
    """Shows what a run says, and copies its results, until it ends or the seconds are over."""
    end = now() + seconds if seconds else None
    shown = 0
    while True:
        ended = not home.is_running()
        said = home.results / "progress.txt"
        text = said.read_text() if said.is_file() else ""
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if to:
            home.copy_results(to)
        if ended or (end and now() >= end):
            return ended
        time.sleep(0.2)


def run(arguments):
    with contextlib.ExitStack() as held:
        home, packed = Home(arguments.home), pack.PACK
        if arguments.self_test:
            home = Home(held.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        if arguments.binaries:
            packed = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory(prefix="gpu-pack-"))) / "packed"
            # Fast rather than small.
            pack.pack(pathlib.Path(arguments.binaries).resolve(), packed, preset=0)
        process = start(home, arguments, packed)
        if not arguments.self_test:
            print(f"runs as {process.pid} in {home.path}; `scripts/gpu-check wait` shows what it finds")
            return 0
        # An interrupt does not reach a session of its own.
        held.callback(lambda: process.poll() is None and process.terminate())
        follow(home, None, None)
        process.wait()
        if arguments.out:
            home.copy_results(pathlib.Path(arguments.out))
        print((home.results / "table.md").read_text() if (home.results / "table.md").is_file() else "no table")
        if process.returncode and (home.results / "log.txt").is_file():
            print("\n".join((home.results / "log.txt").read_text().splitlines()[-300:]))
        return process.returncode


def wait(arguments):
    home = Home(arguments.home)
    if not home.is_there():
        sys.exit(f"gpu-check: no run was started in {home.path}: `gpu-check run`")
    if home.is_running():
        home.carry(pack.PACK)
    to = pathlib.Path(arguments.out or os.environ.get("OUT") or RESULTS)
    ended = follow(home, arguments.seconds, to)
    verdict = home.verdict()
    how = "the run goes on" if not ended else "the run has ended" if verdict else "the run was stopped before its end"
    print((to / "table.md").read_text() if (to / "table.md").is_file() else "no part has ended yet")
    print(f"{how}; results are in {to}")
    return 0 if verdict is None and not ended else 1 if not verdict or verdict["failures"] else 0


def work(arguments):
    home = Home(arguments.home)
    run = Run(home, arguments.limit, arguments.self_test)
    chosen = parts.chosen(run, arguments.only, arguments.from_)

    def stop(*_):
        run.stop_all()
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, stop)
    return 1 if run.work(chosen) else 0


def main():
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    default = pathlib.Path(tempfile.gettempdir()) / "gpu-check"
    for name, help_, does in [("run", "check and measure, in the background", run), ("work", "do so here", work),
                              ("wait", "show what is found and copy the results", wait)]:
        command = commands.add_parser(name, help=help_)
        command.set_defaults(does=does)
        command.add_argument("--home", default=default, metavar="DIR", help="directory of the run (%(default)s)")
        command.add_argument("--out", metavar="DIR", help="for the results: $OUT, or bench/results/gpu")
        if name == "wait":
            command.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="return then")
            continue
        command.add_argument("--limit", type=float, default=740, metavar="SECONDS", help="(%(default)s)")
        command.add_argument("--only", metavar="ID,ID",
                             help="these parts alone, in this order, beside the results of an earlier run")
        command.add_argument("--from", dest="from_", metavar="ID", help="this part and those behind it")
        command.add_argument("--self-test", action="store_true", help="tiny sizes, no GPU")
        command.add_argument("--binaries", metavar="DIR", help="a build's directory in place of .gpu/")
    arguments = parser.parse_args()
    sys.exit(arguments.does(arguments))


if __name__ == "__main__":
    main()
