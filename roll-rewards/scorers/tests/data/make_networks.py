"""Published networks as the reward `onnx` sees them: scores and gradients in the frames, by PyTorch.

    python make_networks.py DIR     # torch 2.9, onnx2torch 1.5; reads DIR/*.onnx, writes networks.json beside this file

The networks themselves are no part of the repository. Each case holds the reward's `options`, the `frames` (their shape;
values are half of `noise(count, 1)`, those of the reference half of `noise(count, 2)`), the `score` and its `gradient` in
the frames, every `stride`-th.
"""

import json
import pathlib
import sys

import numpy as np
import onnx
import torch
from onnx2torch import convert

from make_exported import noise

STRIDE = 101
CASES = [
    {
        "options": {
            "file": "arcface_mobile_512.onnx",
            "score": "cosine",
            "input": {"fit": "crop", "mean": [0.5] * 3, "std": [0.5] * 3},
        },
        "frames": [3, 3, 80, 96],
    },
    {
        "options": {
            "file": "scrfd_2.5g_bnkps.onnx",
            "output": "kps_32",
            "score": "distance",
            "frames": "first_and_last",
            "input": {"range": [0, 255], "mean": [127.5] * 3, "std": [127.5] * 3},
        },
        "frames": [3, 3, 80, 96],
    },
    {
        "options": {
            "file": "yunet_s_dynamic.onnx",
            "output": "kps_16",
            "score": "value",
            "index": 11,
            "input": {"size": [96, 128], "range": [0, 255], "order": "bgr"},
        },
        "frames": [2, 3, 80, 96],
    },
]


def prepared(frames, options, size):
    """What the reward does to frames in [-1, 1] before the network: resize and cut, reorder, scale."""
    given = options["input"]
    height, width = given.get("size", size)
    rows, columns = frames.shape[2:]
    resized = (height, width)
    if given.get("fit") == "crop":
        scale = max(height / rows, width / columns)
        resized = (int(rows * scale + 1e-9), int(columns * scale + 1e-9))
    x = torch.nn.functional.interpolate(frames, size=resized, mode="bilinear", antialias=True, align_corners=False)
    top, left = (resized[0] - height) // 2, (resized[1] - width) // 2
    x = x[:, :, top : top + height, left : left + width]
    if given.get("order") == "bgr":
        x = x.flip(1)
    low, high = given.get("range", [0, 1])
    mean, std = (torch.tensor(given.get(k, [d] * 3))[:, None, None] for k, d in [("mean", 0.0), ("std", 1.0)])
    return (low + (high - low) * (x + 1) / 2 - mean) / std


def main():
    folder, golden = pathlib.Path(sys.argv[1]), []
    for case in CASES:
        options = case["options"]
        model = onnx.load(folder / options["file"])
        size = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[2:]]
        names = [o.name for o in model.graph.output]
        network = convert(model).eval()

        def rows(frames):
            if options.get("frames") == "first_and_last":
                frames = frames[[0, -1]]
            found = []
            for frame in prepared(frames, options, size):
                outputs = network(frame[None])
                outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
                found.append(outputs[names.index(options["output"]) if "output" in options else 0].flatten())
            return torch.stack(found)

        count = int(np.prod(case["frames"]))
        frames = torch.tensor(noise(count, 1) / 2).reshape(case["frames"]).requires_grad_()
        with torch.no_grad():
            reference = rows(torch.tensor(noise(count, 2) / 2).reshape(case["frames"]))
        found = rows(frames)
        if options["score"] == "cosine":
            score = torch.nn.functional.cosine_similarity(found[:, None], reference[None], dim=2).mean()
        elif options["score"] == "distance":
            score = -((found[:, None] - reference[None]) ** 2).mean(2).sqrt().mean()
        else:
            score = found[:, options["index"]].mean()
        (gradient,) = torch.autograd.grad(score, frames)
        numbers = [float(f"{v:.8g}") for v in gradient.flatten()[::STRIDE].tolist()]
        golden.append({**case, "stride": STRIDE, "score": score.item(), "gradient": numbers})
        print(options["file"], score.item(), max(map(abs, numbers)))
    (pathlib.Path(__file__).parent / "networks.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
