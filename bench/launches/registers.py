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

# Kernels of CubeK, by the names of its functions. The others are this project's, and CubeCL's smallest.
FOREIGN = re.compile("matmul|attention_kernel|convolution|reduce|into_contiguous", re.I)
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
    spilling = [kernel for kernel in kernels if kernel["stores"] or kernel["loads"]]
    ours = [kernel for kernel in spilling if not FOREIGN.search(kernel["name"])]
    print(f"{'kernel':<72}{'registers':>10}{'shared':>9}{'spilled':>9}{'loaded':>9}")
    for kernel in kernels:
        print(f"{kernel['name'][:70]:<72}{kernel['registers']:>10}{kernel['shared']:>9}"
              f"{kernel['stores']:>9}{kernel['loads']:>9}")
    for kernel in refused:
        print(f"{kernel['name']}: {kernel['refused']}")
    print(f"{len(kernels)} kernels for {architecture}: {len(refused)} refused, {len(spilling)} spill, "
          f"{len(ours)} of these are this project's own")
    sys.exit(bool(refused or ours))


main()
