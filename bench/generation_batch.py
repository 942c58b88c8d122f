"""Tokens a second of 64 continuations in 8 groups: `generation_speed` of this repository, transformers and llama.cpp in
turns.

Usage: generation_batch.py GENERATION_SPEED MODEL [PROMPT_TOKENS] [NEW_TOKENS] [ROUNDS]
GENERATION_SPEED is the program of this folder (target/release/generation_speed), MODEL a GGUF file or a
Hugging Face directory. transformers takes part where torch and transformers are installed (for a GGUF file gguf and
accelerate too), llama.cpp where the file is GGUF and xllamacpp is installed; who is left out is said. OMP_NUM_THREADS
is the number of threads of each (2). Wall and CPU time are printed: where other programs run, compare the latter.
"""
import json
import os
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))

GROUPS, GROUP_SIZE = 8, 8


def prompts(vocabulary, length):
    one = lambda g: [(i * 31 + g * 1009 + 17) % (vocabulary - 64) + 32 for i in range(length)]
    return [one(i // GROUP_SIZE) for i in range(GROUPS * GROUP_SIZE)]


def roll(binary, path, length, tokens):
    """What `generation_speed` printed: tokens, seconds, seconds of a core, vocabulary."""
    told = subprocess.run([binary, path, str(length), str(tokens)], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)})
    return json.loads(told.stdout)


def hugging_face(path, length, tokens):
    """A call of `generate`, which reads every row's prompt; `None` where transformers is missing."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        print(f"{error}: transformers is left out", file=sys.stderr)
        return None
    torch.set_num_threads(THREADS)
    folder, name = os.path.split(path) if path.endswith(".gguf") else (path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def call():
        ids = torch.tensor(prompts(model.config.vocab_size, length))
        start, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                                 do_sample=True, top_k=0, temperature=1.0, pad_token_id=0)
        return out.numel() - ids.numel(), time.perf_counter() - start, time.process_time() - cpu

    return call


def llama_cpp(path, length, tokens, vocabulary):
    """A call that serves all rows at once, the prompt of a group computed once; `None` where it cannot take part."""
    if not path.endswith(".gguf"):
        return None
    try:
        import xllamacpp
    except ImportError as error:
        print(f"{error}: llama.cpp is left out", file=sys.stderr)
        return None
    # Wheels for CPUs are built for old processors too: what they use is part of the result.
    print(f"xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info()}", file=sys.stderr)
    params = xllamacpp.CommonParams()
    params.model.path = path
    rows = GROUPS * GROUP_SIZE
    # A slot for each row, with room for its prompt and answer.
    params.n_parallel, params.n_ctx = rows, rows * (length + tokens + 8)
    params.n_gpu_layers, params.warmup, params.verbosity = 0, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)
    # With `n` a prompt is computed once and its state is copied to the group's other slots. `cache_prompt` would also
    # keep it for the next call, which then reads no prompt.
    request = {"prompt": prompts(vocabulary, length)[::GROUP_SIZE], "n": GROUP_SIZE, "n_predict": tokens,
               "ignore_eos": True, "cache_prompt": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def call():
        start, cpu = time.perf_counter(), time.process_time()
        answer = server.handle_completions(request)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        return made(answer, rows, tokens), wall, cpu

    return call


def made(answer, rows, tokens):
    """Tokens in an answer of llama.cpp to `rows` rows of `tokens`, or an error that shows it.

    A list of prompts is answered by one dict whose `choices` has a row each; its `usage` counts the first row alone.
    """
    choices = answer.get("choices", []) if isinstance(answer, dict) else []
    if len(choices) != rows or any(choice["finish_reason"] != "length" for choice in choices):
        sys.exit(f"llama.cpp was asked for {rows} rows of {tokens} tokens and said {json.dumps(answer)[:500]}")
    return rows * tokens


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    binary, path = sys.argv[1], os.path.abspath(sys.argv[2])
    length, tokens, rounds = (int(sys.argv[i]) if len(sys.argv) > i else d for i, d in ((3, 256), (4, 64), (5, 1)))
    others = None
    for _ in range(rounds):
        found = roll(binary, path, length, tokens)
        tell("roll", found["tokens"], found["seconds"], found["cpu_seconds"])
        others = others or {
            "transformers": hugging_face(path, length, tokens),
            "llama.cpp": llama_cpp(path, length, tokens, found["vocabulary"]),
        }
        for who, call in others.items():
            if call:
                tell(who, *call())


def tell(who, made, wall, cpu):
    print(f"{who}: {made} tokens, {made / wall:.1f} a second, {made / cpu:.1f} a second of one core", flush=True)


if __name__ == "__main__":
    main()
