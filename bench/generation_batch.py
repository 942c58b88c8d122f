"""Tokens a second of 64 continuations in 8 groups: `generation_speed` of this repository, transformers and llama.cpp in
turns.

    python bench/generation_batch.py GENERATION_SPEED MODEL [PROMPT_TOKENS] [NEW_TOKENS] [ROUNDS]
    python bench/generation_batch.py GENERATION_SPEED DIR --random 0.5b --backend libtorch-cuda

GENERATION_SPEED is the program of this folder (target/release/generation_speed), MODEL a GGUF file or a
Hugging Face directory. --random writes a model of that size, of random weights in bf16, into DIR. transformers takes
part where torch and transformers are installed (for a GGUF file gguf and accelerate too), on the GPU if --backend has
one, there in bf16; llama.cpp where the file is GGUF and xllamacpp is installed; who is left out is said.
OMP_NUM_THREADS is the number of threads of each (2). Wall and CPU time are printed: where other programs run, compare the latter.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "2"))

# Of Qwen2.5-0.5B, and of a test: vocabulary, width, inner width, layers, heads, heads of keys.
SHAPES = {"0.5b": (151_936, 896, 4864, 24, 14, 2), "tiny": (256, 64, 128, 2, 4, 2)}
GROUPS, GROUP_SIZE = 8, 8


def prompts(vocabulary, length):
    one = lambda g: [(i * 31 + g * 1009 + 17) % (vocabulary - 64) + 32 for i in range(length)]
    return [one(i // GROUP_SIZE) for i in range(GROUPS * GROUP_SIZE)]


def write_random(shape, directory):
    """A model of Qwen2's architecture, of random weights. No token ends an answer."""
    import torch
    from safetensors.torch import save_file

    vocabulary, width, inner, layers, heads, kv_heads = SHAPES[shape]
    kv = width // heads * kv_heads
    torch.manual_seed(0)
    matrix = lambda rows, columns: (torch.randn(rows, columns) * columns**-0.5).bfloat16()
    ones, zeros = (lambda n: torch.ones(n).bfloat16()), (lambda n: torch.zeros(n).bfloat16())
    weights = {"model.embed_tokens.weight": matrix(vocabulary, width), "model.norm.weight": ones(width)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, rows in (("q", width), ("k", kv), ("v", kv)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows, width)
            weights[f"{layer}self_attn.{name}_proj.bias"] = zeros(rows)
        weights[f"{layer}self_attn.o_proj.weight"] = matrix(width, width)
        for name in ("gate", "up"):
            weights[f"{layer}mlp.{name}_proj.weight"] = matrix(inner, width)
        weights[f"{layer}mlp.down_proj.weight"] = matrix(width, inner)
        for name in ("input", "post_attention"):
            weights[f"{layer}{name}_layernorm.weight"] = ones(width)
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocabulary,
              "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
              "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
              "dtype": "bfloat16", "eos_token_id": None, "bos_token_id": None}
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def roll(binary, path, length, tokens, backend):
    """What `generation_speed` printed: tokens, seconds, seconds of a core, vocabulary."""
    command = [binary, path, str(length), str(tokens), backend]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "RAYON_NUM_THREADS": str(THREADS)})
    return json.loads(told.stdout)


def hugging_face(path, length, tokens, on_gpu):
    """A call of `generate`, which reads every row's prompt; `None` where transformers is missing."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        print(f"{error}: transformers is left out", file=sys.stderr)
        return None
    torch.set_num_threads(THREADS)
    folder, name = os.path.split(path) if path.endswith(".gguf") else (path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name,
                                                 dtype=torch.bfloat16 if on_gpu else torch.float32).eval()
    model = model.to("cuda:0") if on_gpu else model
    model.generation_config.eos_token_id = None

    def call(tokens=tokens):
        ids = torch.tensor(prompts(model.config.vocab_size, length), device=model.device)
        start, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                                 do_sample=True, top_k=0, temperature=1.0, pad_token_id=0)
        if on_gpu:
            torch.cuda.synchronize()
        return out.numel() - ids.numel(), time.perf_counter() - start, time.process_time() - cpu

    if on_gpu:
        # Kernels are loaded by the first call.
        call(2)
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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="GENERATION_SPEED")
    parser.add_argument("model", metavar="MODEL")
    for name, default in (("prompt_tokens", 256), ("new_tokens", 64), ("rounds", 1)):
        parser.add_argument(name, type=int, nargs="?", default=default, help="(%(default)s)")
    parser.add_argument("--random", choices=list(SHAPES), metavar="SIZE", help=" or ".join(SHAPES))
    parser.add_argument("--backend", default="flex", help="of roll (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each measurement")
    return parser.parse_args()


def main():
    asked = arguments()
    path, length, tokens = os.path.abspath(asked.model), asked.prompt_tokens, asked.new_tokens
    if asked.random:
        write_random(asked.random, path)
    others = None
    for _ in range(asked.rounds):
        found = roll(asked.binary, path, length, tokens, asked.backend)
        tell(asked, "roll", found["tokens"], found["seconds"], found["cpu_seconds"])
        on_gpu = asked.backend.startswith(("libtorch-cuda", "cuda"))
        others = others or {
            "transformers": hugging_face(path, length, tokens, on_gpu),
            "llama.cpp": llama_cpp(path, length, tokens, found["vocabulary"]),
        }
        for who, call in others.items():
            if call:
                tell(asked, who, *call())


def tell(asked, who, made, wall, cpu):
    if asked.json:
        print(json.dumps({"who": who, "tokens": made, "seconds": wall, "cpu_seconds": cpu,
                          "tokens_per_second": made / wall, "prompt_tokens": asked.prompt_tokens,
                          "new_tokens": asked.new_tokens, "backend": asked.backend}), flush=True)
    else:
        print(f"{who}: {made} tokens, {made / wall:.1f} a second, {made / cpu:.1f} a second of one core", flush=True)


if __name__ == "__main__":
    main()
