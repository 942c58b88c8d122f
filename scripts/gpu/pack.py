"""What travels to a machine with a GPU, in .gpu/, and what it weighs beside the files of the checkout that are sent:

    programs.xz        `roll`, the tests, the profiler of operators; manifest.json describes them
    fixtures.tar.xz    references of the networks that compute on a device
    demo.tar.xz        the demo's networks and faces
    kernels.tar.xz     compiled kernels of `cuda`, where --kernel-cache names a cache of them
"""

import argparse
import hashlib
import json
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACK = ROOT / ".gpu"
# Bytes that a call may send, ignored files that are carried included: the limit of the machines this was written for.
LIMIT = 64 << 20
# Tracked files that gpu-check reads beside the archives.
READ = ["scripts", "bench"]
# Archives, and where they are unpacked below the directory of a run.
ARCHIVES = {"fixtures": "tree/tests/fixtures", "demo": "tree/demo/assets", "kernels": "cache/kernels"}
# Pictures of the pages.
PICTURES = ["learned.gif", "portraits.png", "score_against_kl.png", "vae_reconstructions.png"]


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
    more = {"times": directory / "operators.so"}
    more |= {name: directory / name for name in ("generation_speed", "vision_language")}
    return {name: newest(directory, stem) for name, stem in stems} | {k: p for k, p in more.items() if p.is_file()}


def on_devices():
    """Fixtures whose cases compute on a device: of a host's the CPU's tests are enough. Detectors of faces are large,
    and their convolutions are those of other cases."""
    kinds = re.findall(r'\("(\w+)", On::Host', (ROOT / "tests" / "parity.rs").read_text())
    if not kinds:
        sys.exit("gpu-pack: tests/parity.rs lists no kind `On::Host`: which fixtures are needed is not known")
    left_out = [*kinds, "face_tools"]
    fixtures = sorted(path for path in (ROOT / "tests" / "fixtures").iterdir() if path.is_dir())
    return [path for path in fixtures if path.name.split("__")[0] not in left_out]


def archive(paths, target, preset):
    with tarfile.open(target, "w:xz", preset=preset) as file:
        for path in paths:
            file.add(path, arcname=path.name)


def stripped(program, scratch):
    target = scratch / program.name
    if shutil.which("strip") is None or subprocess.run(["strip", "-o", target, program]).returncode:
        return program.read_bytes()
    return target.read_bytes()


def pack(directory, out=PACK, preset=9 | lzma.PRESET_EXTREME, kernel_cache=None):
    """One archive of programs, which have most of their code in common: it is a third smaller than three."""
    if kernel_cache and not any(kernel_cache.iterdir()):
        sys.exit(f"gpu-pack: the kernel cache {kernel_cache} is empty")
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
    archive(on_devices(), out / "fixtures.tar.xz", preset)
    demo = sorted((ROOT / "demo" / "assets").iterdir())
    archive([path for path in demo if path.name not in PICTURES], out / "demo.tar.xz", preset)
    if kernel_cache:
        archive(sorted(kernel_cache.iterdir()), out / "kernels.tar.xz", preset)
    for path in sorted(out.iterdir()):
        print(f"{path.name:<18} {path.stat().st_size:>12,} bytes")


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


def unpack_archives(source, home):
    """The archives that are there and were not unpacked before."""
    for name, below in ARCHIVES.items():
        packed, target = source / f"{name}.tar.xz", home / below
        if not packed.is_file() or target.exists():
            continue
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with tarfile.open(packed) as file:
            file.extractall(part, filter="data") if hasattr(tarfile, "data_filter") else file.extractall(part)
        part.rename(target)


def tracked():
    """Bytes of the tracked files that gpu-check reads, and of those at the root, which git leaves in every checkout."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    sent = [name for name in names if name and ("/" not in name or name.split("/")[0] in READ)]
    return sum((ROOT / name).lstat().st_size for name in sent if (ROOT / name).is_file())


def calls(packed, read, limit=LIMIT):
    """What each of the two calls sends, as (files of .gpu, bytes): all with the first if it fits, else the demo with
    the second. Of later calls gpu-check needs its own script alone: what came before has been copied."""
    files = {path.name: path.stat().st_size for path in sorted(packed.iterdir())}
    whole = lambda names: (names, read + sum(files[name] for name in names))
    first, second = whole(list(files)), whole([])
    if first[1] > limit and "demo.tar.xz" in files:
        first, second = whole([name for name in files if name != "demo.tar.xz"]), whole(["demo.tar.xz"])
    return [first, second]


def sizes(packed=PACK, limit=LIMIT):
    """What the two calls weigh against the limit. Fails if one is above it."""
    if not packed.is_dir():
        sys.exit(f"gpu-pack: nothing is packed in {packed}")
    found = calls(packed, tracked(), limit)
    print(f"\nA call may send {limit:,} bytes. `git sparse-checkout set {' '.join(READ)}` leaves what is read beside "
          f".gpu ({tracked():,} bytes); `git sparse-checkout disable` brings everything back.")
    print(f"{'call':<5} {'bytes':>12} {'left':>12}  of .gpu")
    for number, (names, bytes_) in enumerate(found, 1):
        carried = "all" if len(names) == len(list(packed.iterdir())) else " ".join(names) or "nothing"
        print(f"{number:<5} {bytes_:>12,} {limit - bytes_:>12,}  {carried}")
    over = [(number, bytes_ - limit) for number, (_, bytes_) in enumerate(found, 1) if bytes_ > limit]
    if over:
        sys.exit("gpu-pack: too large to be sent: " + ", ".join(f"call {n} by {by:,} bytes" for n, by in over))


def main():
    parser = argparse.ArgumentParser(prog="gpu-pack", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", nargs="?", type=pathlib.Path, help="a build's directory; without it sizes alone")
    parser.add_argument("--kernel-cache", type=pathlib.Path, metavar="DIR",
                        help="`kernels` of a cache that the compile test filled")
    parser.add_argument("--out", type=pathlib.Path, default=PACK, metavar="DIR", help="(%(default)s)")
    asked = parser.parse_args()
    if asked.kernel_cache and not asked.kernel_cache.is_dir():
        parser.error(f"--kernel-cache {asked.kernel_cache}: expected a directory")
    if asked.binaries:
        pack(asked.binaries.resolve(), asked.out, kernel_cache=asked.kernel_cache)
    sizes(asked.out)


if __name__ == "__main__":
    main()
