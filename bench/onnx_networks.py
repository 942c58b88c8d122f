"""Seconds of ONNX networks in ONNX Runtime (forward) and PyTorch (forward, forward and gradient of the input).

Usage: onnx_networks.py FILE.onnx...
Needs onnxruntime, torch and onnx2torch. To be read beside `onnx_speed` of this folder, right before or after it, with as many threads (OMP_NUM_THREADS, 2). Medians of 11 rounds; free axes are 1 along axis 0 and 64
elsewhere, as there. PyTorch is left out for a network that onnx2torch cannot read.
"""
import os
import statistics
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))

import numpy as np
import onnx
import onnxruntime
import torch
from onnx2torch import convert

torch.set_num_threads(THREADS)
ROUNDS = 11


def median_seconds(call):
    call()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def pytorch(path, x):
    network = convert(onnx.load(path)).eval().requires_grad_(False)

    def forward():
        with torch.no_grad():
            network(torch.from_numpy(x))

    def gradient():
        outputs = network(torch.from_numpy(x).requires_grad_(True))
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        sum(o.sum() for o in outputs if o.is_floating_point()).backward()

    return median_seconds(forward), median_seconds(gradient)


def main():
    print(f"{'file':28} {'input':18} {'ONNX Runtime':>12} {'PyTorch':>12} {'and gradient':>12}")
    for path in sys.argv[1:]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        port = session.get_inputs()[0]
        sizes = [n if isinstance(n, int) and n > 0 else (1 if axis == 0 else 64) for axis, n in enumerate(port.shape)]
        x = np.random.default_rng(0).random(sizes, dtype=np.float32)
        found = [median_seconds(lambda: session.run(None, {port.name: x}))]
        try:
            found += pytorch(path, x)
        except NotImplementedError as error:
            print(f"{path}: left out of PyTorch: {error}", file=sys.stderr)
        shape = "[" + ",".join(map(str, sizes)) + "]"
        print(f"{os.path.basename(path):28} {shape:18} " + " ".join(f"{s:12.5f}" for s in found), flush=True)


if __name__ == "__main__":
    main()
