"""What a GPU does at the shapes of Wan2.2-A14B, in PyTorch: one JSON line for each number, as soon as it is known.

    python bench/gpu_probe.py [--tiny] [--only addmm]

Products are of random numbers: those of ones draw less power, and are faster than any network is. `--tiny` takes small
shapes, and the CPU where there is no GPU. Needs torch 2.5 or later.
"""

import argparse
import contextlib
import json
import platform
import time

import torch
import torch.nn.functional as F

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def say(name, **data):
    print(json.dumps({"name": name, **data}), flush=True)


def seconds(device, run, repeats):
    """Mean of `repeats` runs that follow one another, after one."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def versions(device):
    gpu = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {"gpu": properties.name, "memory_bytes": properties.total_memory, "processors":
               properties.multi_processor_count, "capability": list(torch.cuda.get_device_capability(device)),
               "cudnn": torch.backends.cudnn.version()}
    say("versions", python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda, **gpu)


def products(device, tokens, dim, ffn, repeats):
    best = 0.0
    for inputs, outputs in [(dim, ffn), (ffn, dim), (dim, dim)]:
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        w = torch.randn(inputs, outputs, device=device, dtype=torch.bfloat16)
        rate = 2 * tokens * inputs * outputs / seconds(device, lambda: x @ w, repeats)
        best = max(best, rate)
        say("product", shape=[tokens, inputs, outputs], flops_per_second=rate)
    say("ceiling", flops_per_second=best)


def copies(device, elements, repeats):
    x = torch.randn(elements, device=device)
    y = torch.empty_like(x)
    bytes_ = x.numel() * x.element_size()
    say("copy on the device", bytes_per_second=2 * bytes_ / seconds(device, lambda: y.copy_(x), repeats))
    if device.type != "cuda":
        return
    start = time.perf_counter()
    host = torch.empty(elements, pin_memory=True)
    say("pinning", bytes=bytes_, seconds=time.perf_counter() - start)
    for name, to, of in [("device to pinned host", host, x), ("pinned host to device", y, host)]:
        rate = bytes_ / seconds(device, lambda: to.copy_(of, non_blocking=True), 3)
        say(name, bytes_per_second=rate)


def rounding(device, tokens, outputs, inputs):
    """How `y.addmm_(x, w.T)` rounds in bf16: the sum of y and the exact product once, or the product first and then the
    sum. y is smaller than the last bit of the product, as LoRA's part is early in training: `survives` is the share of
    it that is left in the mean, 1 for one rounding. The other shares are of the elements where the two ways differ."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=device)
    x, w = normal(tokens, inputs).bfloat16(), normal(outputs, inputs).mul_(inputs ** -0.5).bfloat16()
    y = normal(tokens, outputs).mul_(2.0 ** -10).bfloat16()
    product = x.double() @ w.double().T
    once, twice = (product + y.double()).bfloat16(), (product.bfloat16().double() + y.double()).bfloat16()
    differ = once != twice
    for flag in (True, False, (False, False)):
        try:
            matmul.allow_bf16_reduced_precision_reduction = flag
        except (RuntimeError, TypeError) as error:
            # A pair, whose second flag is for split K, came with PyTorch 2.10.
            say("addmm", shape=[tokens, outputs, inputs], flag=flag, error=str(error).split("\n")[0])
            continue
        found = y.clone().addmm_(x, w.T)
        # Sums over thousands of terms in f32 differ from the exact one now and then: only shares are of use.
        share = lambda rounded: (found == rounded)[differ].double().mean().item()
        left = ((found.double() - product) * y.double()).sum() / y.double().square().sum()
        say("addmm", shape=[tokens, outputs, inputs], flag=flag, like_one_rounding=share(once),
            like_two_roundings=share(twice), survives=left.item())
    matmul.allow_bf16_reduced_precision_reduction = before


def kernel(name):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    return contextlib.nullcontext() if name == "auto" else sdpa_kernel(known[name])


def attention_speed(device, names, heads, tokens, width, repeats):
    make = lambda: torch.randn(1, heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = make(), make(), make()
    d = torch.randn(1, heads, tokens, width, device=device, dtype=torch.bfloat16)
    flops = 4 * heads * tokens * tokens * width
    for name in names:
        with kernel(name):
            try:
                chosen = KERNELS.get(int(torch._fused_sdp_choice(q, k, v)), "unknown")
                run = lambda: F.scaled_dot_product_attention(q, k, v)
                forward = seconds(device, run, repeats)
                both = seconds(device, lambda: torch.autograd.grad(run(), [q, k, v], d), repeats)
            except RuntimeError as error:
                say("attention", kernel=name, error=str(error).split("\n")[0])
                continue
        backward = max(both - forward, 1e-9)
        say("attention", kernel=name, chosen=chosen, shape=list(q.shape), forward_seconds=forward,
            backward_seconds=backward, forward_flops_per_second=flops / forward,
            backward_flops_per_second=2.5 * flops / backward)


def attention_errors(device, names, lengths, width):
    """Relative to the largest value, of the result and of the gradients of q, k and v, against f64."""
    for tokens in lengths:
        torch.manual_seed(0)
        exact = [torch.randn(1, 1, tokens, width, device=device).bfloat16().double() for _ in range(4)]

        def run(name, dtype):
            q, k, v, d = (x.to(dtype) for x in exact)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            with kernel(name):
                y = F.scaled_dot_product_attention(*leaves)
                return [y.detach(), *torch.autograd.grad(y, leaves, d)]

        expected = run("math", torch.float64)
        for name in names:
            try:
                found = run(name, torch.bfloat16)
            except RuntimeError as error:
                say("attention error", kernel=name, tokens=tokens, error=str(error).split("\n")[0])
                continue
            errors = [((f.double() - e).abs().max() / e.abs().max()).item() for f, e in zip(found, expected)]
            say("attention error", kernel=name, tokens=tokens, relative=errors)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=["products", "copies", "attention", "errors", "addmm"], action="append")
    asked = parser.parse_args()
    tiny = asked.tiny
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        raise SystemExit("PyTorch finds no GPU")
    versions(device)
    names = ["auto", "cudnn", "flash"] if device.type == "cuda" else ["auto"]

    def addmm():
        rounding(device, 64, 64, 64)
        rounding(device, *((256, 128, 64) if tiny else (18900, 5120, 5120)))

    probes = {
        "products": lambda: products(device, *((256, 64, 128, 2) if tiny else (18900, 5120, 13824, 20))),
        "copies": lambda: copies(device, 1 << 16 if tiny else 1 << 30, 3 if tiny else 10),
        "attention": lambda: attention_speed(device, names, *((2, 84, 64, 2) if tiny else (40, 18900, 128, 5))),
        "errors": lambda: attention_errors(device, names, [84, 128] if tiny else [84, 128, 1364, 18900], 128),
        "addmm": addmm,
    }
    for name in asked.only or probes:
        probes[name]()


if __name__ == "__main__":
    main()
