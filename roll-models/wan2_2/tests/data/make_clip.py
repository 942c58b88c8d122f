"""Writes clip_tiny.safetensors: random weights of a small CLIP image encoder in official key names, a picture, and
what PyTorch's layers give for it in float64. python make_clip.py (PyTorch 2.9, safetensors)."""

import os
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(3)
dim, patch, grid, ffn, layers, heads = 12, 3, 2, 20, 3, 2
weights = {
    "visual.patch_embedding.weight": torch.randn(dim, 3, patch, patch) * 0.4,
    "visual.cls_embedding": torch.randn(1, 1, dim),
    "visual.pos_embedding": torch.randn(1, grid * grid + 1, dim),
}


def linear(name, out, inputs):
    weights[f"{name}.weight"] = torch.randn(out, inputs) * inputs**-0.5
    weights[f"{name}.bias"] = torch.randn(out) * 0.1


def norm(name):
    weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(dim)
    weights[f"{name}.bias"] = 0.1 * torch.randn(dim)


norm("visual.pre_norm")
for i in range(layers):
    name = f"visual.transformer.{i}"
    norm(f"{name}.norm1")
    norm(f"{name}.norm2")
    linear(f"{name}.attn.to_qkv", 3 * dim, dim)
    linear(f"{name}.attn.proj", dim, dim)
    linear(f"{name}.mlp.0", ffn, dim)
    linear(f"{name}.mlp.2", dim, ffn)

picture = torch.rand(3, 7, 10) * 2 - 1
w = {k: v.double() for k, v in weights.items()}
lin = lambda x, n: F.linear(x, w[f"{n}.weight"], w[f"{n}.bias"])
ln = lambda x, n: F.layer_norm(x, (dim,), w[f"{n}.weight"], w[f"{n}.bias"], 1e-5)

x = F.interpolate(picture.double()[None], size=(patch * grid,) * 2, mode="bicubic", align_corners=False)
mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).double().view(1, 3, 1, 1)
std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).double().view(1, 3, 1, 1)
x = F.conv2d((x * 0.5 + 0.5 - mean) / std, w["visual.patch_embedding.weight"], stride=patch).flatten(2).transpose(1, 2)
x = ln(torch.cat([w["visual.cls_embedding"], x], 1) + w["visual.pos_embedding"], "visual.pre_norm")
for i in range(layers - 1):
    name = f"visual.transformer.{i}"
    qkv = lin(ln(x, f"{name}.norm1"), f"{name}.attn.to_qkv")
    q, k, v = qkv.view(1, -1, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
    x = x + lin(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), f"{name}.attn.proj")
    x = x + lin(F.gelu(lin(ln(x, f"{name}.norm2"), f"{name}.mlp.0")), f"{name}.mlp.2")

out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clip_tiny.safetensors")
save_file({**weights, "picture": picture, "expected": x[0].float()}, out)
