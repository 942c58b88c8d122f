"""Writes golden.json: outputs of the real networks by ONNX Runtime, for the input that networks.rs makes too.

Usage: python golden.py MODELS_DIRECTORY > golden.json   (numpy, onnxruntime)
"""
import json, os, re, sys
import numpy as np, onnxruntime

CASES = {"scrfd_2.5g_bnkps": [1, 3, 640, 640], "yunet_s_dynamic": [1, 3, 160, 192], "arcface_mobile_512": [1, 3, 112, 112]}

def values(count, seed=1):
    """A linear congruential generator, in [-1, 1)."""
    out, state = np.empty(count, np.float32), seed
    for i in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        out[i] = (state >> 8) / 2**23 - 1
    return out

golden = {}
for name, shape in CASES.items():
    session = onnxruntime.InferenceSession(os.path.join(sys.argv[1], name + ".onnx"), providers=["CPUExecutionProvider"])
    x = values(int(np.prod(shape))).reshape(shape)
    if name.startswith("yunet"):
        x = (x + 1) * 127.5
    outputs = []
    for port, y in zip(session.get_outputs(), session.run(None, {session.get_inputs()[0].name: x})):
        flat = y.reshape(-1)
        at = np.linspace(0, flat.size - 1, 16).astype(int)
        outputs.append({"name": port.name, "shape": list(y.shape), "largest": float(np.abs(flat).max()),
                        "at": at.tolist(), "values": [float(v) for v in flat[at]]})
    golden[name] = {"input": shape, "outputs": outputs}
text = json.dumps(golden, indent=1)
print(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m.group(1)) + "]", text))
