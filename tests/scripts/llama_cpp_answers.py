"""Answers of llama.cpp's server for the parity case `gguf_smollm2`: token ids in, token ids and log-probabilities out.

    llama-quantize --allow-requantize SmolLM2-135M-Instruct.Q4_1.gguf f32.gguf F32
    llama-server -m f32.gguf --port 8080 -ctk f32 -ctv f32 -fa off
    python tests/scripts/llama_cpp_answers.py tests/fixtures/gguf_smollm2 http://127.0.0.1:8080

Asks for the prompts of `reference.json` and writes `llama_cpp_server.json` beside it. The tokens are drawn at temperature 1
from all tokens; the log-probabilities are those before any cut.
"""

import json
import sys
import urllib.request
from pathlib import Path

TOKENS, SEEDS = 16, 4


def answer(server, prompt, seed):
    """The server's continuation of the token ids `prompt`."""
    question = {
        "prompt": prompt, "n_predict": TOKENS, "temperature": 1.0, "samplers": ["temperature"], "seed": seed,
        "return_tokens": True, "n_probs": 1, "ignore_eos": True, "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{server}/completion", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        found = json.load(response)
    drawn = found["completion_probabilities"]
    assert [entry["id"] for entry in drawn] == found["tokens"], "each token has its log-probability"
    return {"prompt": prompt, "tokens": found["tokens"], "log_probs": [round(entry["logprob"], 5) for entry in drawn]}


def main():
    case, server = Path(sys.argv[1]), sys.argv[2]
    prompts = [row["ids"] for row in json.loads((case / "reference.json").read_text())]
    rows = [answer(server, prompt, seed) for prompt in prompts for seed in range(SEEDS)]
    (case / "llama_cpp_server.json").write_text("[" + ",\n".join(json.dumps(row) for row in rows) + "]\n")


main()
