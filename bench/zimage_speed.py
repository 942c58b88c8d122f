"""Seconds of Z-Image at its real widths: `zimage_speed` of this repository and diffusers, in turns.

    python bench/zimage_speed.py ZIMAGE_SPEED [--side 512] [--layers 1] [--rounds 3]

ZIMAGE_SPEED is the program of this folder (target/release/zimage_speed). Both sides have the same widths, f32
throughout, a LoRA of rank 32 on the linear layers of the blocks (PEFT's in diffusers), a caption of 64 tokens, and
compute the blocks of the transformer again in the backward pass. roll computes those of the decoder again too; diffusers
keeps them. OMP_NUM_THREADS is the number of threads of each (2).
"""
import argparse
import json
import os
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))
RANK, CAPTION, ROUNDS = 32, 64, 3
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"]


def least(run):
    seconds = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        seconds = min(seconds, time.perf_counter() - begun)
    return seconds


def transformer_seconds(side, layers):
    import torch
    from diffusers import ZImageTransformer2DModel
    from peft import LoraConfig

    model = ZImageTransformer2DModel(n_layers=layers, n_refiner_layers=1)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    model.enable_gradient_checkpointing()
    model.train()
    latents = torch.randn(16, 1, side // 8, side // 8, requires_grad=True)
    caption = torch.randn(CAPTION, 2560)

    def run():
        (velocity,) = model([latents], torch.tensor([0.5]), [caption], return_dict=False)[0]
        velocity.sum().backward()

    return least(run)


def decoder_seconds(side):
    import torch
    from diffusers import AutoencoderKL

    widths = [128, 256, 512, 512]
    vae = AutoencoderKL(
        block_out_channels=widths, latent_channels=16, layers_per_block=2, norm_num_groups=32,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        use_quant_conv=False, use_post_quant_conv=False).requires_grad_(False)
    latents = torch.randn(1, 16, side // 8, side // 8, requires_grad=True)
    return least(lambda: vae.decode(latents).sample.sum().backward())


def diffusers_seconds(side, layers):
    import torch

    torch.set_num_threads(THREADS)
    return {"transformer": transformer_seconds(side, layers), "decode": decoder_seconds(side // 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="ZIMAGE_SPEED")
    for name, default in (("side", 512), ("layers", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    # One side in a process of its own.
    parser.add_argument("--diffusers", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.diffusers:
        return print(json.dumps({"seconds": diffusers_seconds(asked.side, asked.layers)}))
    sizes = [str(asked.side), str(asked.layers)]
    sides = {
        "roll": [asked.binary, *sizes],
        "diffusers": [sys.executable, __file__, asked.binary, "--diffusers", "--side", sizes[0], "--layers", sizes[1]],
    }
    best = {who: {} for who in sides}
    for _ in range(asked.rounds):
        for who, command in sides.items():
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                                  env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)}).stdout
            seconds = json.loads(told.splitlines()[-1])["seconds"]
            print(who, ", ".join(f"{phase} {value:.2f} s" for phase, value in seconds.items()), flush=True)
            best[who] = {phase: min(value, best[who].get(phase, value)) for phase, value in seconds.items()}
    for phase, ours in best["roll"].items():
        print(f"{phase}: roll takes {ours / best['diffusers'][phase]:.2f} of the time of diffusers (least of "
              f"{asked.rounds} turns)")


if __name__ == "__main__":
    main()
