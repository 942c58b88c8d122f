"""Starts `roll` with the PyTorch of this environment. `scripts/wheel` packs this module with the program."""

import os
import subprocess
import sys
from importlib import metadata

# The version of PyTorch that the program was built against, 2.11: scripts/wheel writes it.
EXPECTED = "@TORCH@"
SITE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.path.realpath(os.path.join(SITE, "roll_cli_cuda", "bin", "roll"))
# roll-cli/build.rs sets this RPATH.
RPATH = os.path.realpath(os.path.join(os.path.dirname(PROGRAM), "../../torch/lib"))


def main():
    torch = next(iter(metadata.distributions(name="torch", path=[SITE, *sys.path])), None)
    if torch is None:
        return refuse("finds none", "")
    library = str(torch.locate_file("torch/lib"))
    found = f"finds {torch.version} in {library}"
    if torch.version.split("+")[0].split(".")[:2] != EXPECTED.split("."):
        return refuse(found, "")
    variables = dict(os.environ)
    # PyTorch may be the system's, and this package that of a user or of an environment.
    if os.path.realpath(library) != RPATH:
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [library, variables.get("LD_LIBRARY_PATH")]))
    # With this variable the loader lists the libraries, and does not start the program.
    listed = subprocess.run([PROGRAM], env={**variables, "LD_TRACE_LOADED_OBJECTS": "1"}, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, universal_newlines=True).stdout
    missing = sorted({line.split()[0] for line in listed.splitlines() if line.endswith("not found")})
    if missing:
        return refuse(f"{found} without {', '.join(missing)}", "--force-reinstall ")
    os.execve(PROGRAM, ["roll", *sys.argv[1:]], variables)


def refuse(found, options):
    print(f"error: this `roll` needs PyTorch {EXPECTED} for NVIDIA GPUs, and {found}: install it with\n"
          f"  {sys.executable} -m pip install {options}'torch=={EXPECTED}.*'", file=sys.stderr)
    return 2
