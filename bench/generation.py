"""Tokens a second of `roll ask` and of Hugging Face transformers (f32, 2 threads) on one GGUF file, in turns.

Usage: generation.py ROLL GGUF [NEW_TOKENS] [ROUNDS]
ROLL is the binary (target/release/roll). Needs torch, transformers and gguf. Prints the median of the rounds.
"""
import os
import re
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(2)
PROMPT = "The history of the city begins with"


def roll(binary, path, tokens):
    command = [binary, "ask", "--raw", "--model-path", path, "--max-new-tokens", str(tokens), PROMPT]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "RAYON_NUM_THREADS": "2"})
    return float(re.search(r"([\d.]+) tokens a second", told.stderr).group(1))


def main():
    binary, path = sys.argv[1], os.path.abspath(sys.argv[2])
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 3
    folder, name = os.path.split(path)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(roll(binary, path, tokens))
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        theirs.append((out.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"{name}, {tokens} new tokens, batch 1: roll {a:.1f} tokens/s, transformers {b:.1f} tokens/s, ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
