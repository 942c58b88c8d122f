"""Seconds of Z-Image at its real widths: `zimage_speed` of this repository and diffusers, in turns.

    python bench/zimage_speed.py ZIMAGE_SPEED [--side 512] [--layers 1] [--rounds 3]
    python bench/zimage_speed.py --diffusers [--device cuda]     # diffusers alone: its seconds as JSON

ZIMAGE_SPEED is the program of this folder (target/release/zimage_speed). Both sides have the same widths, f32
throughout, a LoRA of rank 32 on the linear layers of the blocks (PEFT's in diffusers), a caption of 64 tokens, and
compute the blocks of the transformer again in the backward pass. roll computes those of the decoder again too; diffusers
keeps them. With `--device cuda` diffusers computes in bf16. OMP_NUM_THREADS is the number of threads of each (2).
"""
import argparse
import json
import os
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))
RANK, ROUNDS = 32, 3
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"]


def least(run, asked):
    import torch

    seconds = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        if asked.device != "cpu":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - begun)
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
    model.enable_gradient_checkpointing()
    model.train()
    on = {"device": asked.device, "dtype": asked.dtype}
    latents = torch.randn(16, 1, asked.side // 8, asked.side // 8, requires_grad=True, **on)
    caption, time_ = torch.randn(asked.caption, 2560, **on), torch.tensor([0.5], **on)

    def run():
        (velocity,) = model([latents], time_, [caption], return_dict=False)[0]
        velocity.sum().backward()

    return least(run, asked)


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
    return least(lambda: vae.decode(latents).sample.sum().backward(), asked)


def diffusers_seconds(asked):
    import torch

    torch.set_num_threads(THREADS)
    asked.dtype = torch.float32 if asked.device == "cpu" else torch.bfloat16
    return {"transformer": transformer_seconds(asked), "decode": decoder_seconds(asked)}


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
            print(who, ", ".join(f"{phase} {value:.2f} s" for phase, value in seconds.items()), flush=True)
            best[who] = {phase: min(value, best[who].get(phase, value)) for phase, value in seconds.items()}
    for phase, ours in best["roll"].items():
        print(f"{phase}: roll takes {ours / best['diffusers'][phase]:.2f} of the time of diffusers (least of "
              f"{asked.rounds} turns)")


if __name__ == "__main__":
    main()
