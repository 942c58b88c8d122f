"""The same work in PyTorch, for side-by-side timing.

Started by the benchmark `speed`, which sends one case name per line and reads back one JSON object per line:
`{"seconds": s, "check": x}` where `check` is a number both sides must agree on. `torch_step.py` measures the networks
of this file at the shapes of `roll bench`.

The transformer is that of DiffSynth-Studio's Wan pipeline in plain PyTorch, with ATen's own operators wherever one
does what is needed, so that nothing is slower than it must be: rotary tables are made once, nothing is f64, blocks are
checkpointed without keeping states of random numbers. With activations in bf16 everything between its products is
bf16, the residual stream too, as there; with f32 it is f32, and products alone are narrow. Needs torch 2.4 or later
and safetensors.

    python bench/torch_reference.py THREADS FIXTURES
    python bench/torch_reference.py --bf16-errors tests/fixtures     # writes into vae21_tiny/config.json
"""

import contextlib
import functools
import json
import math
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

EPS = 1e-6


def linear(w, name, x, lora=None, scale=1.0, stream=torch.float32):
    """In the dtype of the weight, as autocast has it; `stream` comes out."""
    weight = w[name + ".weight"]
    narrow = lambda t: t if t is None else t.to(weight.dtype)
    x = narrow(x)
    y = F.linear(x, weight, narrow(w.get(name + ".bias")))
    if lora is not None and name + ".lora_A.weight" in lora:
        low = F.linear(x, narrow(lora[name + ".lora_A.weight"]))
        # Scaled where it is narrow: PEFT scales the wide result, which takes longer.
        y = y + F.linear(low * scale, narrow(lora[name + ".lora_B.weight"]))
    return y.to(stream)


def saved(offload):
    """Where the inputs of checkpoints wait: in pinned host memory, or where they are."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else contextlib.nullcontext()


def rms(x, gain):
    return F.rms_norm(x, (x.shape[-1],), gain, EPS)


def rope(x, turn, heads):
    length, width = x.shape
    pairs = torch.view_as_complex(x.float().reshape(length, heads, width // heads // 2, 2))
    return torch.view_as_real(pairs * turn).reshape(length, width).to(x.dtype)


def attention(q, k, v, heads, dtype):
    split = lambda t: t.to(dtype).unflatten(-1, (heads, -1)).transpose(0, 1).unsqueeze(0)
    y = F.scaled_dot_product_attention(split(q), split(k), split(v))
    return y.squeeze(0).transpose(0, 1).flatten(1).to(q.dtype)


def block(w, i, x, modulation, context, turn, heads, lora=None, scale=1.0):
    n = f"blocks.{i}."
    shift1, scale1, gate1, shift2, scale2, gate2 = (w[n + "modulation"][0] + modulation).chunk(6, 0)
    lin = lambda name, h: linear(w, n + name, h, lora, scale, x.dtype)
    dim, dtype = x.shape[-1], w[n + "self_attn.q.weight"].dtype
    h = F.layer_norm(x, (dim,), eps=EPS) * (1 + scale1) + shift1
    q = rope(rms(lin("self_attn.q", h), w[n + "self_attn.norm_q.weight"]), turn, heads)
    k = rope(rms(lin("self_attn.k", h), w[n + "self_attn.norm_k.weight"]), turn, heads)
    x = x + gate1 * lin("self_attn.o", attention(q, k, lin("self_attn.v", h), heads, dtype))
    h = F.layer_norm(x, (dim,), w[n + "norm3.weight"], w[n + "norm3.bias"], EPS)
    q = rms(lin("cross_attn.q", h), w[n + "cross_attn.norm_q.weight"])
    k = rms(lin("cross_attn.k", context), w[n + "cross_attn.norm_k.weight"])
    x = x + lin("cross_attn.o", attention(q, k, lin("cross_attn.v", context), heads, dtype))
    h = F.layer_norm(x, (dim,), eps=EPS) * (1 + scale2) + shift2
    return x + gate2 * lin("ffn.2", F.gelu(lin("ffn.0", h), approximate="tanh"))


@functools.lru_cache(maxsize=4)
def turns(grid, head_dim, device="cpu"):
    spatial = 2 * (head_dim // 6)
    parts = []
    for axis, width in zip(torch.meshgrid(*[torch.arange(n) for n in grid], indexing="ij"),
                           (head_dim - 2 * spatial, spatial, spatial)):
        frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        parts.append(axis.reshape(-1, 1).double() * frequency)
    angles = torch.cat(parts, 1)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1).to(device)


@functools.lru_cache(maxsize=32)
def sinusoid(timestep, width, device):
    angle = timestep * 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    return torch.cat([angle.cos(), angle.sin()]).float().to(device)


def keeping_attention():
    """A context of checkpoints that keeps the results of self-attention, and computes all else again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    names = ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
    ops = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in names}

    def policy(_, op, q=None, k=None, *rest, **options):
        # Cross-attention reads as many keys as the text has rows, and costs little.
        is_self = op in ops and q.shape == k.shape
        return CheckpointPolicy.MUST_SAVE if is_self else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def transformer(w, latents, timestep, context, y, heads, lora, scale, recompute, stream=torch.float32, offload=False,
                keep_attention=False, block=block):
    """Velocity of `[C, T, H, W]` latents, one checkpoint per block when gradients are recorded."""
    x = torch.cat([latents, y]) if y is not None else latents
    channels, frames, height, width = x.shape
    patches = x.reshape(channels, frames, height // 2, 2, width // 2, 2).permute(1, 2, 4, 0, 3, 5)
    kernel = w["patch_embedding.weight"].flatten(1).to(stream)
    h = F.linear(patches.reshape(-1, channels * 4).to(stream), kernel, w["patch_embedding.bias"].to(stream))
    lin = lambda name, h: linear(w, name, h, stream=stream)
    t = sinusoid(timestep, w["time_embedding.0.weight"].shape[1], x.device)
    t = lin("time_embedding.2", F.silu(lin("time_embedding.0", t)))
    modulation = lin("time_projection.1", F.silu(t)).reshape(6, -1)
    text = lin("text_embedding.2", F.gelu(lin("text_embedding.0", context), approximate="tanh"))
    grid = (frames, height // 2, width // 2)
    turn = turns(grid, h.shape[1] // heads, x.device)
    layers = sum(1 for k in w if k.startswith("blocks.") and k.endswith("self_attn.norm_q.weight"))
    contexts = {"context_fn": keeping_attention} if keep_attention else {}
    for i in range(layers):
        if recompute:
            with saved(offload):
                h = checkpoint(lambda h, i=i: block(w, i, h, modulation, text, turn, heads, lora, scale), h,
                               use_reentrant=False, preserve_rng_state=False, **contexts)
        else:
            h = block(w, i, h, modulation, text, turn, heads, lora, scale)
    shift, gain = (w["head.modulation"][0] + t).chunk(2, 0)
    h = lin("head.head", F.layer_norm(h, (h.shape[1],), eps=EPS) * (1 + gain) + shift).float()
    out = h.shape[1] // 4
    return h.reshape(*grid, 2, 2, out).permute(5, 0, 1, 3, 2, 4).reshape(out, frames, height, width)


class Decoder:
    """The Wan2.1 VAE decoder with its feature cache: one latent frame per chunk, each chunk checkpointed."""

    def __init__(self, w, offload=False):
        self.w, self.offload = w, offload

    def conv(self, x, name, cache):
        w, b = self.w[name + ".weight"], self.w[name + ".bias"]
        kt, kh, kw = w.shape[2:]
        if kt > 1:
            before = cache.pop(0)
            joined = x if before is None else torch.cat([before, x], 1)
            # A copy: a view would keep all of `joined` until the pull.
            self.fresh.append(joined[:, -(kt - 1):].clone())
            missing = kt - 1 + x.shape[1] - joined.shape[1]
            x = F.pad(joined, (0, 0, 0, 0, missing, 0)) if missing else joined
        return F.conv3d(x.unsqueeze(0), w, b, padding=(0, kh // 2, kw // 2)).squeeze(0)

    def norm(self, x, name):
        gain = self.w[name + ".gamma"].reshape(-1, 1, 1, 1)
        return F.normalize(x, dim=0) * math.sqrt(x.shape[0]) * gain

    def residual(self, x, name, cache):
        h = self.conv(F.silu(self.norm(x, name + ".residual.0")), name + ".residual.2", cache)
        h = self.conv(F.silu(self.norm(h, name + ".residual.3")), name + ".residual.6", cache)
        return h + (self.conv(x, name + ".shortcut", cache) if name + ".shortcut.weight" in self.w else x)

    def middle_attention(self, x, name):
        c, t, h, w = x.shape
        n = (F.normalize(x, dim=0) * math.sqrt(c) * self.w[name + ".norm.gamma"].reshape(-1, 1, 1, 1)).transpose(0, 1)
        qkv = F.conv2d(n, self.w[name + ".to_qkv.weight"], self.w[name + ".to_qkv.bias"])
        q, k, v = qkv.reshape(t, 1, 3 * c, h * w).transpose(2, 3).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(t, c, h, w)
        return x + F.conv2d(out, self.w[name + ".proj.weight"], self.w[name + ".proj.bias"]).transpose(0, 1)

    def upsample(self, x, name, cache, first):
        if name + ".time_conv.weight" in self.w:
            if first:
                self.fresh.append(None)
                cache.pop(0)
            else:
                c = x.shape[0]
                x = self.conv(x, name + ".time_conv", cache)
                x = x.reshape(2, c, *x.shape[1:]).permute(1, 2, 0, 3, 4).flatten(1, 2)
        x = F.interpolate(x.transpose(0, 1), scale_factor=2.0, mode="nearest-exact")
        x = F.conv2d(x, self.w[name + ".resample.1.weight"], self.w[name + ".resample.1.bias"], padding=1)
        return x.transpose(0, 1)

    def chunk(self, z, cache, first):
        self.fresh = []
        cache = list(cache) if cache else [None] * 64
        x = self.conv(z, "decoder.conv1", cache)
        x = self.residual(x, "decoder.middle.0", cache)
        x = self.middle_attention(x, "decoder.middle.1")
        x = self.residual(x, "decoder.middle.2", cache)
        i = 0
        while True:
            name = f"decoder.upsamples.{i}"
            if name + ".residual.0.gamma" in self.w:
                x = self.residual(x, name, cache)
            elif name + ".resample.1.weight" in self.w:
                x = self.upsample(x, name, cache, first)
            else:
                break
            i += 1
        x = self.conv(F.silu(self.norm(x, "decoder.head.0")), "decoder.head.2", cache)
        return x, self.fresh

    def __call__(self, latents, mean, std):
        z = latents * std.reshape(-1, 1, 1, 1) + mean.reshape(-1, 1, 1, 1)
        z = F.conv3d(z.unsqueeze(0), self.w["conv2.weight"], self.w["conv2.bias"]).squeeze(0)
        frames, cache = [], None
        for t in range(z.shape[1]):
            with saved(self.offload):
                x, cache = checkpoint(self.chunk, z[:, t:t + 1], cache, t == 0, use_reentrant=False,
                                      preserve_rng_state=False)
            frames.append(x)
        return torch.cat(frames, 1)


def load_file(path):
    from safetensors.torch import load_file

    return load_file(path)


def own_names(lora):
    strip = lambda k: k.removeprefix("base_model.model.").replace(".default.weight", ".weight")
    return {strip(k): v for k, v in lora.items()}


class BlockCase:
    def __init__(self, backward):
        self.backward = backward
        dim, ffn, tokens, text, rank = 1536, 8960, 1024, 512, 32
        random = lambda *shape, s=1.0: torch.randn(*shape) * s
        w, lora = {}, {}

        def layer(name, out, inp, adapted=True):
            w[name + ".weight"], w[name + ".bias"] = random(out, inp, s=inp ** -0.5), random(out, s=0.1)
            if adapted:
                lora[name + ".lora_A.weight"] = random(rank, inp, s=0.02).requires_grad_(backward)
                lora[name + ".lora_B.weight"] = random(out, rank, s=0.02).requires_grad_(backward)

        for attn in ("self_attn", "cross_attn"):
            for part in "qkvo":
                layer(f"blocks.0.{attn}.{part}", dim, dim)
            for norm in ("norm_q", "norm_k"):
                w[f"blocks.0.{attn}.{norm}.weight"] = torch.ones(dim)
        layer("blocks.0.ffn.0", ffn, dim)
        layer("blocks.0.ffn.2", dim, ffn)
        w["blocks.0.norm3.weight"], w["blocks.0.norm3.bias"] = torch.ones(dim), torch.zeros(dim)
        w["blocks.0.modulation"] = random(1, 6, dim, s=0.1)
        self.w, self.lora = w, lora
        self.x, self.context, self.g = random(tokens, dim), random(text, dim), random(tokens, dim)
        self.modulation, self.turn = random(6, dim, s=0.1), turns((1, 32, 32), 128)

    def run(self):
        x = self.x.clone().requires_grad_(self.backward)
        with torch.set_grad_enabled(self.backward):
            y = block(self.w, 0, x, self.modulation, self.context, self.turn, 12, self.lora, 1.0)
        if self.backward:
            torch.autograd.grad(y, [x, *self.lora.values()], self.g)
        return 0.0


class DecodeCase:
    """Decode plus pull at 128x128x17 with the VAE weights that the Rust side wrote to a file."""

    def __init__(self, path):
        w = load_file(path)
        self.latents, self.g = w.pop("bench.latents"), w.pop("bench.cotangent")
        self.mean, self.std = w.pop("bench.mean"), w.pop("bench.std")
        self.decoder = Decoder(w)

    def run(self):
        latents = self.latents.clone().requires_grad_()
        frames = self.decoder(latents, self.mean, self.std).clamp(-1, 1)
        (d,) = torch.autograd.grad(frames, latents, self.g)
        return d.abs().sum().item()


class StepCase:
    """One whole Reward-FL step on the fixture `reward_fl_step`: loss and the gradient of every LoRA weight."""

    def __init__(self, fixtures):
        root = fixtures + "/reward_fl_step/"
        self.config = json.load(open(root + "config.json"))["config"]
        self.high, self.low = load_file(root + "dit_high.safetensors"), load_file(root + "dit_low.safetensors")
        self.lora = {k: v.requires_grad_() for k, v in own_names(load_file(root + "lora.safetensors")).items()}
        self.decoder, self.scorer = Decoder(load_file(root + "vae.safetensors")), load_file(root + "scorer.safetensors")
        self.inputs = {k: v.squeeze(0) for k, v in load_file(root + "inputs.safetensors").items()}
        constants = load_file(fixtures + "/vae21_tiny/inputs.safetensors")
        self.mean, self.std = constants["latent_mean"], constants["latent_std"]

    def run(self):
        c = self.config
        t = torch.linspace(1000, 0, c["steps"] + 1) / 1000
        sigmas = c["shift"] * t / (1 + (c["shift"] - 1) * t)
        scale = c["lora"]["alpha"] / c["lora"]["r"]
        heads, x, kl = c["model"]["num_heads"], self.inputs["noise"], []
        for i in range(c["final"] + 1):
            timestep = float(sigmas[i]) * 1000
            low = timestep < 900
            weights, lora = (self.low, self.lora) if low else (self.high, None)
            call = lambda lora, grad: transformer(weights, x, timestep, self.inputs["context"], self.inputs["y"],
                                                  heads, lora, scale, grad)
            if i < c["mid"]:
                with torch.no_grad():
                    v = call(lora, False)
            else:
                v = call(lora, True)
                with torch.no_grad():
                    u = call(None, False)
                kl.append(((v - u) ** 2 / (2 * sigmas[i] ** 2)).mean())
            x = x + (sigmas[i + 1] - sigmas[i]) * v
        frames = self.decoder(x, self.mean, self.std).clamp(-1, 1).transpose(0, 1)
        s = self.scorer
        h = F.silu(F.conv2d(frames, s["conv1.weight"], s["conv1.bias"], stride=2, padding=1))
        h = F.silu(F.conv2d(h, s["conv2.weight"], s["conv2.bias"], stride=2, padding=1))
        emb = F.normalize(F.linear(h.mean((2, 3)), s["proj.weight"], s["proj.bias"]), dim=-1)
        ref = self.inputs["ref_embeddings"][1:]
        used = ref.abs().sum(1) > 0
        cosines = (emb @ F.normalize(ref[used], dim=-1).T).mean(1)
        mask = self.inputs["id_mask"]
        score = (cosines * mask).sum() / mask.sum()
        loss = -(score - 0.54) / 0.16 * 0.1 + torch.stack(kl).mean()
        torch.autograd.grad(loss, list(self.lora.values()))
        return loss.item()


class NarrowDecoder(Decoder):
    """The decoder in bf16 with f32 at both ends, as in `roll`: the first layer, and the last, the frames' own."""

    WIDE = ("conv2.", "decoder.head.2.")

    def __init__(self, w):
        super().__init__({k: v if k.startswith(self.WIDE) else v.bfloat16() for k, v in w.items()})

    def conv(self, x, name, cache):
        return super().conv(x.to(self.w[name + ".weight"].dtype), name, cache)


def cuts(extent, size, stride):
    """Intervals of at most `size`, every `stride`, until the end is covered."""
    found = [(0, min(size, extent))]
    while found[-1][0] + size < extent:
        start = found[-1][0] + stride
        found.append((start, min(start + size, extent)))
    return found


def ramp(length, border, at_start, at_end):
    """Weights of a tile along one axis: linear over `border` pixels, except at the sides of the picture."""
    rise = torch.arange(1, border + 1, dtype=torch.float64) / border if border else torch.ones(0)
    values = torch.ones(length, dtype=torch.float64)
    if not at_start:
        values[:border] = rise[:length]
    if not at_end:
        values[length - min(border, length):] = rise[:length].flip(0)
    return values


def tiled_decode(decoder, latents, mean, std, size, stride, scale=8):
    """Tiles of the latent plane are decoded, blended and clamped."""
    extent = latents.shape[2:]
    size = [min(s, n) for s, n in zip(size, extent)]
    borders = [(s - t) * scale for s, t in zip(size, stride)]
    total = weights = 0
    for top, bottom in cuts(extent[0], size[0], stride[0]):
        for left, right in cuts(extent[1], size[1], stride[1]):
            frames = decoder(latents[:, :, top:bottom, left:right], mean, std)
            rows = ramp(frames.shape[2], borders[0], top == 0, bottom == extent[0])
            columns = ramp(frames.shape[3], borders[1], left == 0, right == extent[1])
            mask = torch.minimum(rows[:, None], columns).to(frames.dtype)
            beside = (left * scale, (extent[1] - right) * scale, top * scale, (extent[0] - bottom) * scale)
            total = total + F.pad(frames * mask, beside)
            weights = weights + F.pad(mask, beside)
    return (total / weights).clamp(-1, 1)


def write_bf16_errors(fixtures):
    """Into the tolerances of `vae21_tiny`: how far PyTorch's decoder in bf16 is from the expected gradient of the tiled
    decode, relative to its largest value, and the cosine of the two. Fails if this decoder in f32 is off itself."""
    root = pathlib.Path(fixtures) / "vae21_tiny"
    case = json.loads((root / "config.json").read_text())
    expected = load_file(root / "outputs.safetensors")
    inputs, weights = load_file(root / "inputs.safetensors"), load_file(root / "weights.safetensors")
    tiles = case["config"]["tiled_decode"]

    def run(decoder):
        latents = inputs["latent_tiled"][0].clone().requires_grad_()
        frames = tiled_decode(decoder, latents, inputs["latent_mean"], inputs["latent_std"], tiles["tile_size"],
                              tiles["tile_stride"])
        return frames.detach(), torch.autograd.grad(frames, latents, inputs["g_tiled"][0])[0]

    names = ("tiled_decode", "tiled_decode_grad_latent")
    relative = lambda found, name: ((found - expected[name][0]).abs().max() / expected[name].abs().max()).item()
    for name, found in zip(names, run(Decoder(weights))):
        if relative(found, name) > 1e-4:
            sys.exit(f"{name}: the decoder in f32 is off by {relative(found, name):.2e} of the largest value")
    _, gradient = run(NarrowDecoder(weights))
    name = names[1]
    cosine = F.cosine_similarity(gradient.flatten().double(), expected[name].flatten().double(), dim=0).item()
    case["tolerance"][name] |= {"bf16_rel_to_max": relative(gradient, name), "bf16_cosine": cosine}
    (root / "config.json").write_text(json.dumps(case, indent=1, ensure_ascii=False))
    print(name, case["tolerance"][name])


def main():
    if sys.argv[1] == "--bf16-errors":
        return write_bf16_errors(sys.argv[2])
    threads, fixtures = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cases = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in cases:
            make = {"block_forward": lambda: BlockCase(False), "block_pull": lambda: BlockCase(True),
                    "reward_fl_step": lambda: StepCase(fixtures)}
            cases[name] = DecodeCase(name.split(" ", 1)[1]) if name.startswith("decode ") else make[name]()
            cases[name].run()
        start = time.perf_counter()
        check = cases[name].run()
        print(json.dumps({"seconds": time.perf_counter() - start, "check": check}), flush=True)


if __name__ == "__main__":
    main()
