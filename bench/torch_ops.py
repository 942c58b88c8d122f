"""Times of single operators and of a Wan DiT block in PyTorch on the CPU, for comparison with `operators` (src/bin/operators.rs).

Usage: torch_ops.py [CASE_SUBSTRING] [SECONDS]
prints "case, forward: wall, CPU; forward and backward: wall, CPU" in seconds, tab-separated, each the best of several
runs. CPU time is that of all threads; on a busy machine it is the steadier of the two.
The shapes are the same.
"""
import os
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or waiting counts as CPU time

import torch
import torch.nn.functional as F

torch.set_num_threads(2)
torch.manual_seed(0)
DIM, FFN, HEADS, TOKENS, TEXT, RANK = 1536, 8960, 12, 1024, 512, 32


def best(run):
    budget = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    run()
    start, wall, cpu, count = time.perf_counter(), float("inf"), float("inf"), 0
    while count < 3 or (time.perf_counter() - start < budget and count < 40):
        t, c = time.perf_counter(), time.process_time()
        run()
        wall, cpu = min(wall, time.perf_counter() - t), min(cpu, time.process_time() - c)
        count += 1
    return f"{wall:.4f}\t{cpu:.4f}"


def case(name, function, inputs, tracked, cotangent_shape=None):
    if len(sys.argv) > 1 and sys.argv[1] not in name:
        return

    def forward():
        with torch.no_grad():
            function(*inputs)

    with torch.no_grad():
        cotangent = torch.randn_like(function(*inputs))

    def both():
        leaves = [x.detach().requires_grad_(i in tracked) for i, x in enumerate(inputs)]
        y = function(*leaves)
        torch.autograd.grad(y, [leaves[i] for i in tracked], cotangent)

    print(f"{name}\t{best(forward)}\t{best(both)}", flush=True)


def attention(q, k, v, heads):
    split = lambda t: t.view(1, t.shape[0], heads, -1).transpose(1, 2)
    y = F.scaled_dot_product_attention(split(q), split(k), split(v))
    return y.transpose(1, 2).reshape(q.shape)


def rms(x, gain):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * gain


def rope(x, cos, sin, heads):
    pairs = x.view(x.shape[0], heads, -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    c, s = cos[:, None], sin[:, None]
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).view(x.shape)


def channel_norm(x, gain):
    return F.normalize(x, dim=0) * x.shape[0] ** 0.5 * gain[:, None, None, None]


class Linear:
    def __init__(self, inputs, outputs):
        self.w = torch.randn(outputs, inputs) / inputs**0.5
        self.b = torch.randn(outputs) * 0.1

    def __call__(self, x, lora=None):
        y = F.linear(x, self.w, self.b)
        return y if lora is None else y + (x @ lora[0].T) @ lora[1].T


class Block:
    """q, k, v, o of self attention, the same of cross attention, ffn.0, ffn.2."""

    def __init__(self):
        self.linears = [Linear(DIM, DIM) for _ in range(8)] + [Linear(DIM, FFN), Linear(FFN, DIM)]
        self.gains = [torch.ones(DIM) for _ in range(4)]
        self.norm3 = (torch.ones(DIM), torch.zeros(DIM))
        self.modulation = torch.randn(6, DIM) * 0.1
        angles = torch.randn(TOKENS, DIM // HEADS // 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x, text, e, lora):
        linear = lambda i, x: self.linears[i](x, lora[i])
        e = e + self.modulation
        norm = lambda x: F.layer_norm(x, (DIM,), None, None, 1e-6)
        h = norm(x) * (1 + e[1:2]) + e[0:1]
        q = rope(rms(linear(0, h), self.gains[0]), self.cos, self.sin, HEADS)
        k = rope(rms(linear(1, h), self.gains[1]), self.cos, self.sin, HEADS)
        x = x + linear(3, attention(q, k, linear(2, h), HEADS)) * e[2:3]
        h = F.layer_norm(x, (DIM,), *self.norm3, 1e-6)
        q, k = rms(linear(4, h), self.gains[2]), rms(linear(5, text), self.gains[3])
        x = x + linear(7, attention(q, k, linear(6, text), HEADS))
        h = norm(x) * (1 + e[4:5]) + e[3:4]
        return x + linear(9, F.gelu(linear(8, h), approximate="tanh")) * e[5:6]


def main():
    r = torch.randn
    others = [(197, 768, 3072), (197, 3072, 768), (18900, 128, 128), (12, DIM, DIM), (1, DIM, DIM)]
    for rows, inputs, outputs in [(TOKENS, DIM, DIM), (TOKENS, DIM, FFN), (TOKENS, FFN, DIM), *others]:
        case(f"linear {rows} {inputs}x{outputs}", F.linear, [r(rows, inputs), r(outputs, inputs), r(outputs)], [0])
    case("linear all 1536x8960", F.linear, [r(TOKENS, DIM), r(FFN, DIM), r(FFN)], [0, 1, 2])
    lora = lambda x, w, b, a, u: F.linear(x, w, b) + (x @ a.T) @ u.T
    case("lora 1536x1536", lora, [r(TOKENS, DIM), r(DIM, DIM), r(DIM), r(RANK, DIM), r(DIM, RANK)], [0, 3, 4])
    case("attention 1024x1024", lambda q, k, v: attention(q, k, v, HEADS), [r(TOKENS, DIM) for _ in range(3)], [0, 1, 2])
    case("attention 1024x512", lambda q, k, v: attention(q, k, v, HEADS), [r(TOKENS, DIM), r(TEXT, DIM), r(TEXT, DIM)], [0, 1, 2])
    case("attention 1 head of 384, 1024", lambda q, k, v: attention(q, k, v, 1), [r(1024, 384) for _ in range(3)], [0, 1, 2])
    case("layer_norm", lambda x, g, s: F.layer_norm(x, (DIM,), None, None, 1e-6) * g + s, [r(TOKENS, DIM), r(1, DIM), r(1, DIM)], [0])
    case("rms_norm", rms, [r(TOKENS, DIM), r(DIM)], [0])
    angles = r(TOKENS, DIM // HEADS // 2)
    case("rope", lambda x, c, s: rope(x, c, s, HEADS), [r(TOKENS, DIM), angles.cos(), angles.sin()], [0])
    case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), [r(TOKENS, FFN)], [0])
    case("silu", F.silu, [r(TOKENS, FFN)], [0])
    case("gated_add", lambda x, y, g: x + y * g, [r(TOKENS, DIM), r(TOKENS, DIM), r(1, DIM)], [0, 1])
    case("channel_norm", channel_norm, [r(96, 4, 128, 128), r(96)], [0])
    case("channel_norm silu", lambda x, g: F.silu(channel_norm(x, g)), [r(96, 4, 128, 128), r(96)], [0])
    conv = lambda x, w, b: F.conv3d(x[None], w, b, padding=(0, 1, 1))[0]
    case("conv3d 96 k3 4+2x64x64", conv, [r(96, 6, 64, 64), r(96, 96, 3, 3, 3), r(96)], [0])
    case("conv3d 384 k3 1+2x16x16", conv, [r(384, 3, 16, 16), r(384, 384, 3, 3, 3), r(384)], [0])
    conv = lambda x, w, b: F.conv3d(x[None], w[:, :, None], b, padding=(0, 1, 1))[0]
    case("conv2d 192 4x64x64", conv, [r(192, 4, 64, 64), r(192, 192, 3, 3), r(192)], [0])

    block = Block()
    sizes = [(DIM, DIM)] * 8 + [(DIM, FFN), (FFN, DIM)]
    flat = [p for i, o in sizes for p in (r(RANK, i) * 0.02, r(o, RANK) * 0.02)]

    def run(x, text, e, *flat):
        return block(x, text, e, list(zip(flat[::2], flat[1::2])))

    inputs = [r(TOKENS, DIM), r(TEXT, DIM), r(6, DIM) * 0.1, *flat]
    case("wan block", run, inputs, [0, *range(3, len(inputs))])


main()
