"""What every kernel takes of a GPU: registers, shared memory, and bytes that it spills.

    registers.py PTXAS ARCHITECTURE DIRECTORY

Assembles each module of DIRECTORY (`*.ptx`, as `driver.c` leaves them) with PTXAS. Fails if a module is refused, or if
a kernel of this project's own spills: a register that waits in memory costs more than what it holds.
"""

import concurrent.futures
import pathlib
import re
import subprocess
import sys

# This project's own kernels, by the names of their functions. The others are CubeCL's, CubeK's and Burn's.
OWN = re.compile("(backward|cotangents|exponentials|finish|forward|turn)_")
FACTS = {
    "registers": r"Used (\d+) registers",
    "shared": r"(\d+) bytes smem",
    "stores": r"(\d+) bytes spill stores",
    "loads": r"(\d+) bytes spill loads",
}


def assembled(ptxas, architecture, module):
    command = [ptxas, "-v", f"-arch={architecture}", "-o", "/dev/null", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [{"name": str(module), "refused": done.stderr.strip()}]
    kernels = re.split(r"Compiling entry function '", done.stderr)[1:]
    return [{"name": text.split("'")[0], **{key: found(text, form) for key, form in FACTS.items()}} for text in kernels]


def found(text, form):
    match = re.search(form, text)
    return int(match[1]) if match else 0


def main():
    ptxas, architecture, directory = sys.argv[1:]
    modules = sorted(pathlib.Path(directory).glob("*.ptx"))
    if not modules:
        sys.exit(f"no module is in {directory}: nothing was compiled")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        kernels = [k for found in pool.map(lambda module: assembled(ptxas, architecture, module), modules) for k in found]
    refused = [kernel for kernel in kernels if "refused" in kernel]
    kernels = sorted((k for k in kernels if "refused" not in k), key=lambda k: (-k["stores"], -k["registers"], k["name"]))
    own = [kernel for kernel in kernels if OWN.match(kernel["name"])]
    others = [kernel for kernel in kernels if not OWN.match(kernel["name"])]
    table("this project's own", own)
    table("of others, those that spill", [kernel for kernel in others if spills(kernel)])
    for kernel in refused:
        print(f"{kernel['name']}: {kernel['refused']}")
    print(f"{len(kernels)} kernels for {architecture}: {len(refused)} refused; {sum(map(spills, own))} of this project's "
          f"{len(own)} spill, {sum(map(spills, others))} of {len(others)} others")
    sys.exit(bool(refused or any(map(spills, own))))


def spills(kernel):
    return bool(kernel["stores"] or kernel["loads"])


def table(title, kernels):
    print(f"{title:<72}{'registers':>10}{'shared':>9}{'stored':>9}{'loaded':>9}")
    for kernel in kernels:
        print(f"  {kernel['name'][:68]:<70}{kernel['registers']:>10}{kernel['shared']:>9}"
              f"{kernel['stores']:>9}{kernel['loads']:>9}")
    print()


main()
