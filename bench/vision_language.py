"""Seconds of a Qwen2-VL at 2B's widths, of a few layers, in roll and in PyTorch: tower, text with a clip, gradient.

    python bench/vision_language.py VISION_LANGUAGE [--blocks 4] [--layers 3] [--steps 1] [--size 336x588] [--rounds 3]

VISION_LANGUAGE is the program of this folder (target/release/vision_language). Both sides read one file of random weights
in f32, hold activations, freeze the weights and pull the gradient back to the pixels; the states of the last token are
compared. They take turns. With `--backend libtorch-cuda` both compute in bf16 on the GPU.
OMP_NUM_THREADS is the number of threads of each (2). Where other programs run, compare the
seconds of a core. Needs torch 2.5 or later and safetensors.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or waiting counts as CPU time
VOCABULARY, REPEATS = 4096, 3
PHASES = ("tower", "forward", "forward_and_backward")


def layout(blocks, layers):
    from torch_qwen_vl import config
    return config(VOCABULARY, 1536, layers, 12, 2, 8960, 1280, blocks, 16, 14, [16, 24, 24], VOCABULARY - 5)


def write(directory, asked):
    """Writes the model: `config.json` and random weights."""
    import torch
    from safetensors.torch import save_file
    from torch_qwen_vl import QwenVl, initialise

    network = QwenVl(layout(asked.blocks, asked.layers))
    initialise(network, torch.Generator().manual_seed(1))
    (directory / "config.json").write_text(json.dumps(network.config))
    save_file({name: weight.detach().contiguous() for name, weight in network.state_dict().items()},
              directory / "model.safetensors")


def pytorch(directory, asked):
    import torch
    from safetensors.torch import load_file
    from torch_qwen_vl import QwenVl, to_patches

    torch.set_num_threads(THREADS)
    cpu = "cuda" not in asked.backend
    device, dtype = ("cpu", torch.float32) if cpu else ("cuda", torch.bfloat16)
    network = QwenVl(layout(asked.blocks, asked.layers))
    network.load_state_dict(load_file(directory / "model.safetensors"))
    network = network.to(device, dtype).requires_grad_(False)
    height, width = map(int, asked.size.split("x"))
    rows, columns = height // 14, width // 14
    squares = asked.steps * rows * columns // 4
    special = network.config["vision_start_token_id"]
    words = [i * 7919 % special for i in range(asked.words)]
    tokens = torch.tensor([special] + [network.config["video_token_id"]] * squares + [special + 1] + words, device=device)
    clip = [(1 + t, 1 + y, 1 + x) for t in range(asked.steps) for y in range(rows // 2) for x in range(columns // 2)]
    after = 1 + max(asked.steps, rows // 2, columns // 2)
    positions = torch.tensor([(0, 0, 0)] + clip + [(after + i,) * 3 for i in range(1 + asked.words)], device=device)
    row = network.model["embed_tokens"].weight[1]
    least = {phase: [float("inf")] * 2 for phase in PHASES}
    count = asked.steps * 2 * 3 * height * width

    def tower(pixels):
        return network.visual(to_patches(pixels, 14), rows, columns)

    def state(pixels):
        return network.read(tokens, tower(pixels).flatten(0, 1)[None], positions)[0, -1]

    def pulled(pixels):
        pixels = pixels.clone().requires_grad_(True)
        (state(pixels) @ row).backward()

    last = None
    for repeat in range(REPEATS):
        pixels = ((torch.arange(count) + 31 * repeat) % 1009).float() / 504.5 - 1
        pixels = pixels.view(asked.steps, 2, 3, height, width).to(device, dtype)
        for phase, work in zip(PHASES, (tower, state, pulled)):
            begun, cpu = time.perf_counter(), time.process_time()
            with torch.set_grad_enabled(phase == "forward_and_backward"):
                found = work(pixels)
            if not cpu:
                torch.cuda.synchronize()
            seconds = [time.perf_counter() - begun, time.process_time() - cpu]
            least[phase] = [min(pair) for pair in zip(least[phase], seconds)]
            last = found if phase == "forward" else last
    return least | {"state": last.float().tolist(), "tokens": len(tokens), "patches": 4 * squares}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="VISION_LANGUAGE")
    for name, kind, default in (("blocks", int, 4), ("layers", int, 3), ("steps", int, 1), ("size", str, "336x588"),
                                ("words", int, 128), ("rounds", int, 3)):
        parser.add_argument(f"--{name}", type=kind, default=default, help="(%(default)s)")
    parser.add_argument("--backend", default="flex", help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each round, too")
    parser.add_argument("--side", type=pathlib.Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        return print(json.dumps(pytorch(asked.side, asked)))
    with tempfile.TemporaryDirectory() as directory:
        write(pathlib.Path(directory), asked)
        height, width = asked.size.split("x")
        sides = {"roll": [asked.binary, directory, str(asked.steps), height, width, str(asked.words),
                         asked.backend],
                 "PyTorch": [sys.executable, *sys.argv, "--side", directory]}
        for _ in range(asked.rounds):
            found = {}
            for who, command in sides.items():
                told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                                      env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)}).stdout
                found[who] = json.loads(told.splitlines()[-1])
            ours, theirs = found["roll"], found["PyTorch"]
            largest = max(map(abs, theirs["state"]))
            error = max(abs(a - b) for a, b in zip(ours["state"], theirs["state"])) / largest
            print(f"{ours['patches']} patches, {ours['tokens']} tokens; the states differ by {error:.1e} of the largest")
            if asked.json:
                phases = {who: {phase: side[phase][0] for phase in PHASES} for who, side in found.items()}
                print(json.dumps(phases | {"error": error}), flush=True)
            for phase in PHASES:
                (clock, cpu), (their_clock, their_cpu) = ours[phase], theirs[phase]
                print(f"  {phase}: roll {clock:.2f} s, {cpu:.2f} s of a core; PyTorch {their_clock:.2f} s, "
                      f"{their_cpu:.2f} s of a core; ratio {clock / their_clock:.2f}, of cores {cpu / their_cpu:.2f}",
                      flush=True)


if __name__ == "__main__":
    main()
