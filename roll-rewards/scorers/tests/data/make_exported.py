"""Small networks as `torch.onnx.export` writes them, by both of its exporters, with values and gradients of PyTorch.

    python make_exported.py          # torch 2.9, onnx, onnxscript; writes exported/*.onnx and exported/golden.json

For an input x of the shape in golden.json, values of `noise` below: `output` is the network's, `gradient` that of
sum(output * noise(len, 2)) in x.
"""

import json
import pathlib

import numpy as np
import onnx
import torch
from torch import nn

OUT = pathlib.Path(__file__).parent / "exported"


def noise(count, seed):
    """The generator of roll's tests: values in [-1, 1)."""
    state, values = seed, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        values.append((state >> 8) / 2**23 - 1.0)
    return np.array(values, dtype=np.float32)


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, dim=8, tokens=16):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(5))
        mlp = lambda width, hidden: nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.token = nn.ModuleList(mlp(tokens, 12) for _ in range(2))
        self.channel = nn.ModuleList(mlp(dim, 16) for _ in range(2))
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.token[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channel[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x).mean(1))


class ViT(nn.Module):
    """A vision transformer with a class token, PyTorch's own encoder layer."""

    def __init__(self, dim=12, tokens=16):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, tokens + 1, dim))
        layer = lambda: nn.TransformerEncoderLayer(dim, 3, 20, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(dim, 6)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = layer(x)
        return nn.functional.normalize(self.head(x[:, 0]), dim=-1)


class ConvNeXt(nn.Module):
    """ConvNeXt: depthwise 7x7, channels last, layer scale."""

    def __init__(self, dim=8):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, dim, 4, stride=4), nn.LayerNorm(dim)
        self.depth = nn.ModuleList(nn.Conv2d(dim, dim, 7, padding=3, groups=dim) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in range(2))
        self.scale = nn.ParameterList(0.5 * torch.randn(dim) for _ in range(2))
        self.shrink = nn.Conv2d(dim, 10, 2, stride=2)
        self.head = nn.Linear(10, 4)

    def forward(self, x):
        x = self.stem_norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for i in range(2):
            y = self.norm[i](self.depth[i](x).permute(0, 2, 3, 1))
            y = self.scale[i] * self.down[i](nn.functional.gelu(self.up[i](y)))
            x = x + y.permute(0, 3, 1, 2)
        return self.head(self.shrink(x).mean((2, 3)))


class Clip3d(nn.Module):
    """3-D convolutions over frames."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm3d(6)
        self.second = nn.Conv3d(6, 8, (3, 3, 3), stride=(1, 2, 2), padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.avg_pool3d(torch.nn.functional.silu(self.second(x)), (1, 2, 2))
        return self.head(x.mean((2, 3, 4)))


def strip(path):
    """Without the stack traces of every node, which are half of a small file."""
    model = onnx.load(path)
    for thing in [model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output]:
        del thing.metadata_props[:]
    del model.graph.value_info[:]
    onnx.save(model, path)


def main():
    OUT.mkdir(exist_ok=True)
    torch.manual_seed(1)
    golden = {"made by": f"make_exported.py with torch {torch.__version__}"}
    networks = {
        "mixer": (Mixer(), (2, 3, 16, 16)),
        "vit": (ViT(), (2, 3, 16, 16)),
        "convnext": (ConvNeXt(), (2, 3, 16, 16)),
        "clip3d": (Clip3d(), (1, 3, 5, 12, 12)),
    }
    for name, (network, shape) in networks.items():
        network.eval()
        x = torch.tensor(noise(int(np.prod(shape)), 1)).reshape(shape).requires_grad_()
        y = network(x)
        (y * torch.tensor(noise(y.numel(), 2)).reshape(y.shape)).sum().backward()
        golden[name] = {
            "input": shape,
            "output": [float(f"{v:.8g}") for v in y.flatten().tolist()],
            "gradient": [float(f"{v:.8g}") for v in x.grad.flatten().tolist()[::7]],
        }
        for exporter in ["script", "dynamo"]:
            path = str(OUT / f"{name}_{exporter}.onnx")
            example = (torch.zeros(shape),)
            if exporter == "script":
                axes = {"x": {0: "n"}} if name != "clip3d" else None
                torch.onnx.export(network, example, path, dynamo=False, opset_version=17, input_names=["x"], output_names=["y"], dynamic_axes=axes)
            else:
                shapes = {"x": {0: torch.export.Dim("n", min=2)}} if name != "clip3d" else None
                torch.onnx.export(network, example, path, dynamo=True, external_data=False, input_names=["x"], output_names=["y"], dynamic_shapes=shapes)
                strip(path)
    (OUT / "golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
