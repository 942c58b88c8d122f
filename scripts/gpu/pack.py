"""The programs that travel to a machine with a GPU: one compressed file, and what the checkout may hold beside it."""

import hashlib
import json
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACK = ROOT / ".gpu"
# Bytes that a checkout may have, ignored files that are carried included: that of the machines this was written for.
LIMIT = 64 << 20
# What gpu-check reads; nothing else of a checkout has to travel.
READ = ["scripts", "bench", "tests/fixtures", "demo/assets"]


def newest(directory, stem):
    """The newest executable `stem`, or cargo's `deps/stem-HASH`."""
    plain = directory / stem
    if plain.is_file():
        return plain
    named = re.compile(re.escape(stem) + r"-[0-9a-f]{16}")
    found = [p for p in (directory / "deps").glob(stem + "-*") if named.fullmatch(p.name) and os.access(p, os.X_OK)]
    if not found:
        sys.exit(f"gpu-pack: no {stem} in {directory} or its deps: build it first, tests with `cargo test --no-run`")
    return max(found, key=lambda p: p.stat().st_mtime)


def built(directory):
    """Programs of a build by the names that gpu-check has for them."""
    stems = [("roll", "roll"), ("parity", "parity"), ("operators", "roll_backends")]
    times = directory / "operators.so"
    return {name: newest(directory, stem) for name, stem in stems} | ({"times": times} if times.is_file() else {})


def stripped(program, scratch):
    target = scratch / program.name
    if shutil.which("strip") is None or subprocess.run(["strip", "-o", target, program]).returncode:
        return program.read_bytes()
    return target.read_bytes()


def pack(directory, out=PACK, preset=9 | lzma.PRESET_EXTREME):
    """One archive: the programs have most of their code in common, so that it is a third smaller than three."""
    files = built(directory)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    programs, whole = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for name, path in files.items():
            data = stripped(path, pathlib.Path(scratch))
            programs.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
            whole.append(data)
            print(f"{name:<10} {path}: {path.stat().st_size / 1e6:.1f} MB, {len(data) / 1e6:.1f} stripped", flush=True)
    code = {"id": lzma.FILTER_LZMA2, "preset": preset, "lc": 4, "pb": 0}
    if preset:
        code["dict_size"] = 256 << 20
    with lzma.open(out / "programs.xz", "wb", filters=[code]) as file:
        for data in whole:
            file.write(data)
    manifest = {"commit": commit(), "packed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "programs": programs}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{out}: {size(out) / 1e6:.1f} MB")


def size(directory):
    return sum(path.stat().st_size for path in directory.iterdir())


def commit():
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or None


def unpack(source, into):
    """The programs of an archive, once for each manifest."""
    manifest = json.loads((source / "manifest.json").read_text())
    targets = {p["name"]: into / p["sha256"][:16] / p["name"] for p in manifest["programs"]}
    if all(target.is_file() for target in targets.values()):
        return targets
    with lzma.open(source / "programs.xz") as file:
        for program in manifest["programs"]:
            target, data = targets[program["name"]], file.read(program["bytes"])
            found = hashlib.sha256(data).hexdigest()
            if found != program["sha256"]:
                sys.exit(f"gpu-check: {program['name']} in {source} is not that of the manifest: {found}")
            target.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not there, whenever this is stopped.
            part = target.with_suffix(".part")
            part.write_bytes(data)
            part.chmod(0o755)
            part.rename(target)
    return targets


def tracked():
    """Bytes of the tracked files that are in the checkout, by path."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    return {name: (ROOT / name).lstat().st_size for name in names if name and (ROOT / name).is_file()}


def sizes():
    """What a checkout with the archive weighs, whole and in parts, against the limit."""
    files = tracked()
    programs = size(PACK) if PACK.is_dir() else 0
    under = lambda folders: sum(n for name, n in files.items() if any(name.startswith(f + "/") for f in folders))
    whole = sum(files.values())
    print(f"\nLimit {LIMIT:,} bytes; tracked files {whole:,}; .gpu {programs:,}; left {LIMIT - whole - programs:,}")
    for folder in sorted({name.split("/")[0] for name in files if "/" in name}, key=lambda f: -under([f]))[:4]:
        print(f"  {folder + '/':<12} {under([folder]):>12,}")
    ways = [("everything", whole, ""),
            ("what gpu-check reads", under(READ), f"git sparse-checkout set {' '.join(READ)}"),
            ("first call: without demo/", under(READ[:3]), f"git sparse-checkout set {' '.join(READ[:3])}"),
            ("next call: the demo", under(["scripts", "bench", "demo/assets"]),
             "git sparse-checkout set scripts bench demo/assets")]
    print(f"\n{'what is sent, with .gpu':<30} {'bytes':>12} {'left':>12}")
    for name, bytes_, command in ways:
        left = LIMIT - bytes_ - programs
        print(f"{name:<30} {bytes_ + programs:>12,} {left:>12,} {'fits ' if left >= 0 else 'too large'}  {command}")
    print("`git sparse-checkout disable` brings everything back.")


def main():
    if len(sys.argv) > 1:
        pack(pathlib.Path(sys.argv[1]).resolve())
    sizes()


if __name__ == "__main__":
    main()
