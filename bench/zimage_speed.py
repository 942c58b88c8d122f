"""Seconds of Z-Image at its real widths: `zimage_speed` of this repository and diffusers, in turns.

    python bench/zimage_speed.py ZIMAGE_SPEED [--side 512] [--layers 1] [--rounds 3]
    python bench/zimage_speed.py --diffusers [--device cuda]     # diffusers alone: its seconds as JSON

ZIMAGE_SPEED is the program of this folder (target/release/zimage_speed). Both sides have the same widths, f32
throughout, a LoRA of rank 32 on the linear layers of the blocks (PEFT's in diffusers) and a caption of 64 tokens.
`transformer` and `decode` compute their blocks again in the backward pass on both sides; `transformer_held` and
`decode_held` hold every activation. roll's decoder always computes again, so `decode_held` is diffusers' alone, and its
ratio is that of roll's `decode`. With `--device cuda` diffusers computes in bf16 and holds nothing. OMP_NUM_THREADS is
the number of threads of each (2). Where other programs run, compare the seconds of a core.
"""
import argparse
import json
import os
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or waiting counts as CPU time
RANK, ROUNDS = 32, 3
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"]


def least(run, asked):
    """Seconds by the clock and of all cores."""
    import torch

    seconds = [float("inf")] * 2
    for _ in range(ROUNDS):
        begun, cores = time.perf_counter(), time.process_time()
        run()
        if asked.device != "cpu":
            torch.cuda.synchronize()
        found = [time.perf_counter() - begun, time.process_time() - cores]
        seconds = [min(pair) for pair in zip(seconds, found)]
    return seconds


def transformer_seconds(asked):
    import torch
    from diffusers import ZImageTransformer2DModel
    from peft import LoraConfig

    sizes = {"n_layers": asked.layers, "n_refiner_layers": asked.refiners}
    with torch.device(asked.device):
        model = ZImageTransformer2DModel(**sizes).to(asked.dtype)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    model.train()
    on = {"device": asked.device, "dtype": asked.dtype}
    latents = torch.randn(16, 1, asked.side // 8, asked.side // 8, requires_grad=True, **on)
    caption, time_ = torch.randn(asked.caption, 2560, **on), torch.tensor([0.5], **on)

    def run():
        (velocity,) = model([latents], time_, [caption], return_dict=False)[0]
        velocity.sum().backward()

    return recomputed_and_held("transformer", model, run, asked)


def recomputed_and_held(phase, model, run, asked):
    """Seconds with and without gradient checkpointing. A GPU may not hold the activations of all layers."""
    model.enable_gradient_checkpointing()
    seconds = {phase: least(run, asked)}
    if asked.device != "cpu":
        return seconds
    model.disable_gradient_checkpointing()
    return seconds | {f"{phase}_held": least(run, asked)}


def decoder_seconds(asked):
    import torch
    from diffusers import AutoencoderKL

    widths = [128, 256, 512, 512]
    vae = AutoencoderKL(
        block_out_channels=widths, latent_channels=16, layers_per_block=2, norm_num_groups=32,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        use_quant_conv=False, use_post_quant_conv=False).to(asked.device, asked.dtype).requires_grad_(False)
    side = asked.decoded_side // 8
    latents = torch.randn(1, 16, side, side, requires_grad=True, device=asked.device, dtype=asked.dtype)
    vae.train()
    return recomputed_and_held("decode", vae, lambda: vae.decode(latents).sample.sum().backward(), asked)


def diffusers_seconds(asked):
    import torch

    torch.set_num_threads(THREADS)
    asked.dtype = torch.float32 if asked.device == "cpu" else torch.bfloat16
    return transformer_seconds(asked) | decoder_seconds(asked)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="ZIMAGE_SPEED", nargs="?")
    for name, default in (("side", 512), ("layers", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    parser.add_argument("--diffusers", action="store_true", help="diffusers alone, at sizes of its own:")
    for name, default, about in (("refiners", 1, "refiners of each kind"), ("caption", 64, "tokens of the caption"),
                                 ("decoded-side", None, "half of --side")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    asked = parser.parse_args()
    asked.decoded_side = asked.decoded_side or asked.side // 2
    if asked.diffusers:
        return print(json.dumps({"seconds": diffusers_seconds(asked)}))
    if asked.binary is None:
        parser.error("expected ZIMAGE_SPEED, or --diffusers")
    sizes = [str(asked.side), str(asked.layers)]
    sides = {
        "roll": [asked.binary, *sizes],
        "diffusers": [sys.executable, __file__, "--diffusers", "--side", sizes[0], "--layers", sizes[1]],
    }
    best = {who: {} for who in sides}
    for _ in range(asked.rounds):
        for who, command in sides.items():
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                                  env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)}).stdout
            seconds = json.loads(told.splitlines()[-1])["seconds"]
            print(who, ", ".join(f"{phase} {clock:.2f} s ({cores:.2f} s of a core)"
                                 for phase, (clock, cores) in seconds.items()), flush=True)
            for phase, found in seconds.items():
                best[who][phase] = [min(pair) for pair in zip(found, best[who].get(phase, found))]
    for phase, theirs in best["diffusers"].items():
        ours = best["roll"].get(phase, best["roll"][phase.removesuffix("_held")])
        clock, cores = (a / b for a, b in zip(ours, theirs))
        print(f"{phase}: roll takes {clock:.2f} of the time of diffusers, {cores:.2f} of its cores' time (least of "
              f"{asked.rounds} turns)")


if __name__ == "__main__":
    main()
