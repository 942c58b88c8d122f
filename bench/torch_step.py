"""A Reward-FL step in PyTorch, at the shapes of `roll bench`: seconds and memory of each phase.

    python bench/torch_step.py --preset a14b --size 480x480 --whole-step > theirs.json
    python bench/compare.py ours.json theirs.json        # beside `roll bench ... --json ours.json`

Prints a line of JSON after each phase and round: the last line counts, whatever ends the process. The networks, of
random weights, are those of `torch_reference.py`, with one checkpoint per block of the transformer and one per chunk of
frames of the decoder. A block's pull computes its self-attention again, unless --keep-attention keeps the result, as
`roll bench --keep-attention` does. --keep-attention=both measures one after the other in one process; lines of JSON say
which in `keep_attention`. Only the decoder of Wan2.1's VAE is here, so `ti2v-5b` needs --without-vae. Needs torch 2.5
or later.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from torch_reference import Decoder, block, transformer

# dim, ffn_dim, layers, heads, latent channels, input channels, text dim, text rows; frames, size; decoder's width.
PRESETS = {
    "tiny": (256, 1024, 4, 4, 16, 36, 64, 32, 9, (64, 64), 16),
    "1.3b": (1536, 8960, 30, 12, 16, 16, 4096, 512, 81, (480, 832), 96),
    "ti2v-5b": (3072, 14336, 30, 24, 48, 48, 4096, 512, 121, (704, 1280), None),
    "a14b": (5120, 13824, 40, 40, 16, 36, 4096, 512, 81, (480, 480), 96),
}
# Of one step of Reward-FL with its default options: 8 denoising steps, of which the last 4 are trained.
PASSES = {"forward": 4, "forward, recorded": 4, "reference forward": 4, "pull of forward": 4}
RANK = 32
# A reward of random convolutions over the middle of every frame, as in `roll bench`.
SCORER_SIDE, SCORER_WIDTHS = 112, (3, 64, 128, 256, 512)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ATTENTION = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def transformer_shapes(dim, ffn, layers, channels, inputs, text, **_):
    """Name and shape of every weight of the transformer, as in the official checkpoints."""
    shapes = {}

    def linear(name, rows, columns):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

    for i in range(layers):
        block = f"blocks.{i}."
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"{block}{attention}.{part}", dim, dim)
            for part in "qk":
                shapes[f"{block}{attention}.norm_{part}.weight"] = (dim,)
        linear(f"{block}ffn.0", ffn, dim)
        linear(f"{block}ffn.2", dim, ffn)
        shapes[f"{block}norm3.weight"] = shapes[f"{block}norm3.bias"] = (dim,)
        shapes[f"{block}modulation"] = (1, 6, dim)
    shapes["patch_embedding.weight"], shapes["patch_embedding.bias"] = (dim, inputs, 1, 2, 2), (dim,)
    linear("text_embedding.0", dim, text)
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", dim, 256)
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", 6 * dim, dim)
    linear("head.head", 4 * channels, dim)
    shapes["head.modulation"] = (1, 2, dim)
    return shapes


def decoder_shapes(width, channels=16):
    """Name and shape of every weight of the decoder of Wan2.1's VAE, as in the official checkpoint."""
    shapes = {}

    def conv(name, outputs, inputs, *kernel):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs, *kernel), (outputs,)

    def residual(name, inputs, outputs):
        shapes[f"{name}.residual.0.gamma"] = (inputs, 1, 1, 1)
        conv(f"{name}.residual.2", outputs, inputs, 3, 3, 3)
        shapes[f"{name}.residual.3.gamma"] = (outputs, 1, 1, 1)
        conv(f"{name}.residual.6", outputs, outputs, 3, 3, 3)
        if inputs != outputs:
            conv(f"{name}.shortcut", outputs, inputs, 1, 1, 1)

    most = 4 * width
    conv("conv2", channels, channels, 1, 1, 1)
    conv("decoder.conv1", most, channels, 3, 3, 3)
    residual("decoder.middle.0", most, most)
    shapes["decoder.middle.1.norm.gamma"] = (most, 1, 1)
    conv("decoder.middle.1.to_qkv", 3 * most, most, 1, 1)
    conv("decoder.middle.1.proj", most, most, 1, 1)
    residual("decoder.middle.2", most, most)
    # Levels of three residual blocks; between two levels the height and width double, and the channels halve. In time
    # the first two doublings double as well.
    at, inputs = 0, most
    for level, outputs in enumerate((most, most, 2 * width, width)):
        for _ in range(3):
            residual(f"decoder.upsamples.{at}", inputs, outputs)
            at, inputs = at + 1, outputs
        if level < 3:
            conv(f"decoder.upsamples.{at}.resample.1", outputs // 2, outputs, 3, 3)
            if level < 2:
                conv(f"decoder.upsamples.{at}.time_conv", 2 * outputs, outputs, 3, 1, 1)
            at, inputs = at + 1, outputs // 2
    shapes["decoder.head.0.gamma"] = (width, 1, 1, 1)
    conv("decoder.head.2", 3, width, 3, 3, 3)
    return shapes


def driver_bytes(device):
    """Bytes in use on the GPU by all processes. `nvidia-smi` answers before CUDA starts; where it is missing, the
    driver is asked, which starts CUDA."""
    number = torch.device(device).index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = visible.split(",")[number].strip() if visible else str(number)
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id", name]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20
    except (OSError, ValueError, subprocess.CalledProcessError):
        free, total = torch.cuda.mem_get_info(device)
        return total - free


class Memory:
    """The peaks of a phase and of everything so far: of a GPU's allocator, or of this process."""

    def __init__(self, device):
        self.device, self.is_gpu = device, device.startswith("cuda")
        # Before CUDA starts, so that its own memory is counted as it is for `roll`.
        self.before = driver_bytes(device) if self.is_gpu else None
        self.phases = {}

    def begin(self):
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def end(self, phase):
        if self.is_gpu:
            now = torch.cuda.max_memory_reserved(self.device), torch.cuda.max_memory_allocated(self.device)
        else:
            now = self.of_process(), None
        most = self.phases.get(phase, (None, None))
        self.phases[phase] = tuple(a if b is None else b if a is None else max(a, b) for a, b in zip(now, most))

    @staticmethod
    def of_process():
        with contextlib.suppress(OSError), open("/proc/self/status") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), None)

    def whole(self):
        """`driver_bytes` includes CUDA's own memory; PyTorch keeps all memory that it once took."""
        most = lambda i: max((peak[i] for peak in self.phases.values() if peak[i] is not None), default=None)
        driver = driver_bytes(self.device) - self.before if self.is_gpu else None
        return {"reserved_bytes": most(0), "allocated_bytes": most(1), "driver_bytes": driver}


def attention_kernels(name):
    """The kernel `name` before the general ones, which the decoder needs; process-wide, so for the pull as well."""
    if name == "auto":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]
    return sdpa_kernel([wanted, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def compiled():
    """`torch_reference.block`, compiled once for all blocks: each gets its own weights by the names of the first."""
    first = torch.compile(lambda *given: block(given[0], 0, *given[1:]))
    parts = {}

    def of(weights, i):
        if weights is None:
            return None
        if (id(weights), i) not in parts:
            own = f"blocks.{i}."
            parts[id(weights), i] = {"blocks.0." + k.removeprefix(own): v for k, v in weights.items()
                                     if k.startswith(own)}
        return parts[id(weights), i]

    def run(w, i, x, modulation, context, turn, heads, lora, scale):
        return first(of(w, i), x, modulation, context, turn, heads, of(lora, i), scale)

    return run


class Step:
    """The phases of a step on random networks."""

    def __init__(self, asked):
        self.asked, self.device = asked, asked.device
        self.dtype, self.stream = DTYPES[asked.dtype], DTYPES[asked.activations]
        self.memory = Memory(self.device)
        self.keeps_attention = asked.keep_attention == "yes"
        self.block = compiled() if asked.compile else block
        self.seconds, self.steps, self.rounds_done, self.error = {}, [], 0, None
        self.peaks = None
        shapes = transformer_shapes(**vars(asked))
        self.parameters = sum(math.prod(shape) for shape in shapes.values())
        normal = lambda *shape: torch.randn(*shape, device=self.device)
        # Norms, biases and modulations are of the residual stream's dtype.
        dtype_of = lambda shape: self.dtype if len(shape) == 2 else self.stream
        self.w = {k: self.weight(k, shape, dtype_of(shape)) for k, shape in shapes.items()}
        self.lora = {}
        for key, shape in shapes.items():
            layer = key.removesuffix(".weight")
            if key.startswith("blocks.") and layer != key and len(shape) == 2:
                self.lora[layer + ".lora_A.weight"] = (normal(RANK, shape[1]) * shape[1] ** -0.5).requires_grad_()
                self.lora[layer + ".lora_B.weight"] = torch.zeros(shape[0], RANK, device=self.device).requires_grad_()
        fused = {"fused": True} if self.device.startswith("cuda") else {}
        self.optimizer = torch.optim.AdamW(list(self.lora.values()), lr=1e-6, **fused)
        stride = 16 if asked.preset == "ti2v-5b" else 8
        self.shape = (asked.channels, 1 + (asked.frames - 1) // 4, *(side // stride for side in asked.size))
        self.latents = normal(*self.shape)
        extra = asked.inputs - asked.channels
        self.y = normal(extra, *self.shape[1:]) if extra else None
        self.context = normal(asked.rows, asked.text)
        self.decoder = None
        if not asked.without_vae:
            self.vae_dtype = DTYPES[asked.vae_dtype]
            shapes = decoder_shapes(asked.decoder)
            weights = {k: self.weight(k, shape, self.vae_dtype) for k, shape in shapes.items()}
            self.decoder = Decoder(weights, asked.offload)
            on = {"device": self.device, "dtype": self.vae_dtype}
            self.mean, self.std = torch.zeros(asked.channels, **on), torch.ones(asked.channels, **on)
            pairs = zip(SCORER_WIDTHS, SCORER_WIDTHS[1:])
            self.kernels = [normal(o, i, 3, 3) * (9 * i) ** -0.5 for i, o in pairs]

    def weight(self, key, shape, dtype):
        if ("norm" in key and not key.endswith("bias")) or key.endswith("gamma"):
            return torch.ones(shape, device=self.device, dtype=dtype)
        if len(shape) == 1:
            return torch.zeros(shape, device=self.device, dtype=dtype)
        return torch.randn(shape, device=self.device).mul_(math.prod(shape[1:]) ** -0.5).to(dtype)

    def velocity(self, latents, adapter, recompute):
        lora = self.lora if adapter else None
        return transformer(self.w, latents, 500.0, self.context, self.y, self.asked.heads, lora, 1.0, recompute,
                           self.stream, self.asked.offload, self.keeps_attention, self.block)

    def score(self, frames):
        t, _, h, w = frames.shape
        a, b = min(h, SCORER_SIDE), min(w, SCORER_SIDE)
        x = frames[:, :, (h - a) // 2:(h - a) // 2 + a, (w - b) // 2:(w - b) // 2 + b]
        for kernel in self.kernels:
            x = F.silu(F.conv2d(x, kernel, stride=2, padding=1))
        return x.sum() / t

    def time(self, name, run):
        self.memory.begin()
        start = time.perf_counter()
        value = run()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        self.memory.end(name)
        self.say()
        return value

    def record(self):
        x = self.latents.clone().requires_grad_()
        return self.time("forward, recorded", lambda: self.velocity(x, True, True))

    @torch.no_grad()
    def unrecorded(self, name, adapter):
        self.time(name, lambda: self.velocity(self.latents, adapter, False))

    def scored(self):
        """The cotangent of the latents; `None` without a decoder."""
        if self.decoder is None:
            return None
        z = self.latents.clone().requires_grad_()
        decode = lambda: self.decoder(z.to(self.vae_dtype), self.mean, self.std).float().clamp(-1, 1).transpose(0, 1)
        frames = self.time("decode", decode)
        leaf = frames.detach().requires_grad_()
        score = self.time("score", lambda: self.score(leaf))
        (d_frames,) = self.time("pull of score", lambda: torch.autograd.grad(score, leaf))
        (d,) = self.time("pull of decode", lambda: torch.autograd.grad(frames, z, d_frames))
        return d

    def pull(self, velocity, d):
        self.time("pull of forward", lambda: torch.autograd.backward(velocity, velocity.detach() if d is None else d))

    def update(self):
        def run():
            torch.nn.utils.clip_grad_norm_(list(self.lora.values()), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.time("optimizer", run)

    def by_phases(self):
        """Each phase once."""
        self.unrecorded("forward", True)
        self.unrecorded("reference forward", False)
        velocity = self.record()
        self.pull(velocity, self.scored())
        self.update()

    def whole(self):
        """A step as training makes it: all passes that are pulled back are recorded before the first pull."""
        recorded = []
        for _ in range(PASSES["forward"]):
            self.unrecorded("forward", True)
        for _ in range(PASSES["forward, recorded"]):
            recorded.append(self.record())
            self.unrecorded("reference forward", False)
        d = self.scored()
        while recorded:
            self.pull(recorded.pop(), d)
        self.update()

    def kernel(self):
        """The attention kernel that PyTorch chooses for the transformer."""
        tokens, heads = self.shape[1] * (self.shape[2] // 2) * (self.shape[3] // 2), self.asked.heads
        q = torch.empty(1, heads, tokens, self.asked.dim // heads, device=self.device, dtype=self.dtype)
        chosen = ATTENTION.get(int(torch._fused_sdp_choice(q, q, q)), "unknown")
        if self.asked.attention not in ("auto", chosen):
            raise RuntimeError(f"attention {list(q.shape)}: PyTorch takes {chosen}, expected {self.asked.attention}")
        return chosen

    def run(self):
        """All rounds, with both ways of attention if both are asked for."""
        self.rounds()
        if self.asked.keep_attention == "both" and not self.error:
            self.keeps_attention = True
            self.memory.phases, self.seconds, self.steps, self.rounds_done, self.peaks = {}, {}, [], 0, None
            self.release()
            self.rounds()

    def release(self):
        """Gives the allocator's memory back, so that the next peaks are their own."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def rounds(self):
        """A round that warms up, and the rounds that count."""
        with attention_kernels(self.asked.attention):
            self.attention = self.kernel()
            for round in range(1 + self.asked.rounds):
                # Without copies to the host, whose memory is made by the first step, one pass of each kind warms up.
                whole = self.asked.whole_step and (round > 0 or self.asked.offload)
                start = time.perf_counter()
                try:
                    self.whole() if whole else self.by_phases()
                except getattr(torch, "OutOfMemoryError", MemoryError) as error:
                    self.error = str(error).split("\n")[0]
                    break
                if round == 0:
                    self.seconds = {}
                    continue
                if whole:
                    self.steps.append(time.perf_counter() - start)
                self.rounds_done, self.peaks = round, self.memory.whole()
                self.say()
        self.peaks = self.memory.whole()
        self.say()

    def say(self):
        """What is known so far."""
        median = lambda times: sorted(times)[(len(times) - 1) // 2] if times else None
        phase = lambda name, s: {"seconds": median(s), "peak_bytes": self.memory.phases[name][0]}
        answer = {
            **{key: getattr(self.asked, key) for key in ("preset", "layers", "frames", "offload", "whole_step")},
            "size": list(self.asked.size),
            "vae": None if self.asked.without_vae else self.asked.vae_dtype,
            "parameters": self.parameters,
            "phases": {name: phase(name, s) for name, s in self.seconds.items()},
            "rounds_done": self.rounds_done,
            "step_seconds": median(self.steps),
            "memory": self.peaks,
            "error": self.error,
            "version": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else "the CPU",
            "dtype": self.asked.dtype,
            "activations": self.asked.activations,
            "attention": self.attention,
            "keep_attention": self.keeps_attention,
            "compiled": self.asked.compile,
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(answer), flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--size", type=lambda text: tuple(map(int, text.split("x"))), metavar="HxW")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of products; bf16 on GPUs, f32 on the CPU unless given")
    parser.add_argument("--activations", choices=list(DTYPES), help="between products; as the products unless given")
    parser.add_argument("--vae-dtype", choices=list(DTYPES), help="bf16 on GPUs, f32 on the CPU unless given")
    parser.add_argument("--attention", choices=["auto", "cudnn", "flash"], default="auto")
    parser.add_argument("--keep-attention", choices=["no", "yes", "both"], nargs="?", const="yes", default="no",
                        help="keep results of self-attention for the pull; both: without, then with")
    parser.add_argument("--compile", action="store_true", help="blocks by torch.compile")
    parser.add_argument("--offload", action="store_true", help="inputs of checkpoints wait in pinned host memory")
    parser.add_argument("--without-vae", action="store_true")
    parser.add_argument("--whole-step", action="store_true", help="all passes are recorded before the first pull")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    names = ("dim", "ffn", "layers", "heads", "channels", "inputs", "text", "rows", "frames", "size", "decoder")
    for name, value in zip(names, PRESETS[asked.preset]):
        if getattr(asked, name, None) is None:
            setattr(asked, name, value)
    if asked.compile and asked.keep_attention != "no":
        parser.error("--compile: a compiled block keeps no results of its own attention, so it goes without "
                     "--keep-attention")
    if asked.decoder is None and not asked.without_vae:
        parser.error(f"the VAE of {asked.preset} is not here: add --without-vae")
    is_gpu = asked.device.startswith("cuda")
    asked.dtype = asked.dtype or ("bf16" if is_gpu and asked.preset != "tiny" else "f32")
    asked.activations = asked.activations or asked.dtype
    asked.vae_dtype = asked.vae_dtype or ("bf16" if is_gpu else "f32")
    return asked


def main():
    asked = arguments()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    step = Step(asked)
    step.run()
    sys.exit(1 if step.error else 0)


if __name__ == "__main__":
    main()
