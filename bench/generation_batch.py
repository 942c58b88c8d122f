"""Tokens a second of 64 continuations in 8 groups: `generation_speed` of this repository, transformers and llama.cpp, in
turns.

Usage: generation_batch.py GENERATION_SPEED MODEL [PROMPT_TOKENS] [NEW_TOKENS] [ROUNDS]
GENERATION_SPEED is the example of roll-models (target/release/examples/generation_speed), MODEL a GGUF file or a
Hugging Face directory. Needs torch and transformers, and for a GGUF file gguf and accelerate; llama.cpp takes part
where the file is GGUF and xllamacpp is installed. OMP_NUM_THREADS is the number of threads of each (2). Wall time and CPU time are printed: where other programs run, compare the latter.
"""
import json
import os
import resource
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(THREADS)
GROUPS, GROUP_SIZE = 8, 8


def prompts(vocabulary, length):
    one = lambda g: [(i * 31 + g * 1009 + 17) % (vocabulary - 64) + 32 for i in range(length)]
    return [one(i // GROUP_SIZE) for i in range(GROUPS * GROUP_SIZE)]


def roll(binary, path, length, tokens):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = subprocess.run([binary, path, str(length), str(tokens)], capture_output=True, text=True, check=True,
                          env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(told.stdout)
    return found["tokens"], found["seconds"], found.get("cpu_seconds", after.ru_utime - before.ru_utime)


def hugging_face(model, length, tokens):
    ids = torch.tensor(prompts(model.config.vocab_size, length))
    start, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                             do_sample=True, top_k=0, temperature=1.0, pad_token_id=0)
    made = out.numel() - ids.numel()
    return made, time.perf_counter() - start, time.process_time() - cpu


def llama_cpp(path, length, tokens, vocabulary):
    """A call that serves all rows at once, each prompt of a group once computed; `None` where xllamacpp is missing."""
    try:
        import xllamacpp
    except ImportError:
        print("xllamacpp is not installed: llama.cpp is left out", file=sys.stderr)
        return None
    params = xllamacpp.CommonParams()
    params.model.path = path
    rows = GROUPS * GROUP_SIZE
    params.n_parallel, params.n_ctx = rows, rows * (length + tokens + 8)
    params.n_gpu_layers, params.warmup, params.verbosity = 0, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)

    def call():
        request = {"prompt": prompts(vocabulary, length), "n_predict": tokens, "ignore_eos": True, "cache_prompt": True,
                   "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        start, cpu = time.perf_counter(), time.process_time()
        made = sum(answer["tokens_predicted"] for answer in server.handle_completions(request))
        return made, time.perf_counter() - start, time.process_time() - cpu

    return call


def main():
    binary, path = sys.argv[1], os.path.abspath(sys.argv[2])
    length, tokens, rounds = (int(sys.argv[i]) if len(sys.argv) > i else d for i, d in ((3, 256), (4, 64), (5, 1)))
    folder, name = os.path.split(path) if path.endswith(".gguf") else (path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    calls = {
        "roll": lambda: roll(binary, path, length, tokens),
        "transformers": lambda: hugging_face(model, length, tokens),
    }
    if name and (call := llama_cpp(path, length, tokens, model.config.vocab_size)):
        calls["llama.cpp"] = call
    for _ in range(rounds):
        for who, call in calls.items():
            made, wall, cpu = call()
            print(f"{who}: {made} tokens, {made / wall:.1f} a second, {made / cpu:.1f} a second of one core", flush=True)


if __name__ == "__main__":
    main()
