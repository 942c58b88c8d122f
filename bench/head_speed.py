"""Seconds and bytes of an update at Qwen2.5's vocabulary: `head_speed` of this repository, with all and with some tokens
wanted, and transformers.

    python bench/head_speed.py HEAD_SPEED [--tokens 1024] [--layers 2] [--wanted 0.15] [--rounds 1]

HEAD_SPEED is the program of this folder (target/release/head_speed). Both sides have the same widths, a LoRA of rank 16
on the linear layers of the blocks, f32 throughout, and hold activations. transformers computes the logits of all tokens, as
its trainers do, and the log-probabilities of the wanted ones; roll the entropies too. OMP_NUM_THREADS is the number of
threads of each (2). Where other programs run, compare the seconds of a core.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))
VOCABULARY, ROW, TURN, ROUNDS = 151_936, 256, 20, 3


def transformers_update(tokens, layers, wanted):
    """Seconds of a pass with its gradient, the least of three, and the bytes by which the process grows."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(THREADS)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False))
    model.requires_grad_(False)

    class Lora(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = torch.nn.Parameter(torch.randn(16, base.in_features) * 0.02)
            self.up = torch.nn.Parameter(torch.zeros(base.out_features, 16))

        def forward(self, x):
            return self.base(x) + (x @ self.down.T) @ self.up.T

    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, Lora(linear))
    count = tokens // ROW * ROW
    position = torch.arange(count)
    ids = ((position * 7919 + 13) % VOCABULARY).reshape(-1, ROW)
    kept = (position % TURN >= TURN * (1 - wanted) - 1e-9).reshape(-1, ROW)[:, 1:]
    pages = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    before, seconds, of_all_cores = pages(), float("inf"), float("inf")
    # The peak of the process so far is forgotten.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(ROUNDS):
        begun, cpu = time.perf_counter(), time.process_time()
        logits = model(ids).logits[:, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (-log_probs * kept).sum().backward()
        seconds = min(seconds, time.perf_counter() - begun)
        of_all_cores = min(of_all_cores, time.process_time() - cpu)
        del logits, log_probs
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    return {"seconds": seconds, "cpu_seconds": of_all_cores, "bytes": 1024 * int(peak) - before,
            "wanted": int(kept.sum()), "tokens": count}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="HEAD_SPEED")
    for name, kind, default in (("tokens", int, 1024), ("layers", int, 2), ("wanted", float, 0.15), ("rounds", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=default, help="(%(default)s)")
    # One side in a process of its own, whose peak is measured.
    parser.add_argument("--side", choices=["transformers"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        return print(json.dumps(transformers_update(asked.tokens, asked.layers, asked.wanted)))
    roll = lambda wanted: [asked.binary, str(wanted), str(asked.tokens), str(asked.layers), str(VOCABULARY)]
    sides = {
        "roll, all tokens": roll(1),
        f"roll, {100 * asked.wanted:.0f} %": roll(asked.wanted),
        "transformers": [sys.executable, __file__, asked.binary, "--side", "transformers", "--tokens", str(asked.tokens),
                         "--layers", str(asked.layers), "--wanted", str(asked.wanted)],
    }
    for _ in range(asked.rounds):
        for who, command in sides.items():
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                                  env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)}).stdout
            found = json.loads(told.splitlines()[-1])
            print(f"{who}: {found['seconds']:.2f} s, {found['cpu_seconds']:.2f} s of a core, "
                  f"{found['bytes'] / 1e9:.2f} GB more memory, "
                  f"{found['wanted']} of {found['tokens']} tokens", flush=True)


if __name__ == "__main__":
    main()
