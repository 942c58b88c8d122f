"""Writes the fixtures gemma2_tiny, gemma3_tiny, phi3_tiny and mistral_tiny: random weights through Hugging Face's models.

Usage: language_models.py tests/fixtures

Needs torch, transformers and safetensors. Weights and inputs are drawn with fixed seeds; every number is computed in
float32 and once more in float64, whose difference is the measured error of the reference.
"""
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

NEW_TOKENS = 8
COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    sliding_window=4,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# Windows of four tokens, shorter than the prompts; layers with and without one.
CASES = {
    "gemma2": (8500, Gemma2ForCausalLM, Gemma2Config(
        **COMMON, num_hidden_layers=2, head_dim=12, query_pre_attn_scalar=10, attn_logit_softcapping=2.0,
        final_logit_softcapping=6.0)),
    "gemma3": (8500, Gemma3ForCausalLM, Gemma3TextConfig(
        **COMMON, num_hidden_layers=3, head_dim=12, query_pre_attn_scalar=10, rope_theta=100000.0,
        rope_local_base_freq=10000.0, rope_scaling={"rope_type": "linear", "factor": 4.0},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "phi3": (8501, Phi3ForCausalLM, Phi3Config(**COMMON, num_hidden_layers=2)),
    "mistral": (8502, MistralForCausalLM, MistralConfig(**COMMON, num_hidden_layers=2, head_dim=12)),
}


def random_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # Gemma adds one to what is stored.
                parameter.copy_((0.0 if "Gemma" in type(model).__name__ else 1.0) + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def batches(seed):
    """Three rows of 9, 7 and 5 tokens, padded on either side."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = [torch.randint(3, 96, (n,), generator=generator) for n in (9, 7, 5)]
    out = {}
    for side in ("left", "right"):
        ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
        for i, row in enumerate(rows):
            part = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
            ids[i, part], mask[i, part] = row, 1
        out[side] = (ids, mask)
    return out, rows


def outputs(model, inputs, rows):
    """Each row by itself, without padding: what a batch must equal."""
    found = {}

    def logits_of(row):
        return model(row[None], use_cache=False).logits[0]

    for side, (ids, mask) in inputs.items():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = torch.zeros(*ids.shape, 96, dtype=model.dtype)
        log_probs = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=model.dtype)
        for i, row in enumerate(rows):
            at = mask[i].bool()
            own = logits_of(row)
            logits[i, at] = own
            places = at.nonzero().flatten()[1:] - 1
            log_probs[i, places] = own.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
        found[f"{side}.position_ids"] = positions
        found[f"{side}.logits"] = logits.detach()
        found[f"{side}.log_probs"] = log_probs.detach()
    model.zero_grad()
    sums = [-logits_of(row).log_softmax(-1)[:-1].gather(1, row[1:, None]).sum() for row in rows]
    nll = torch.stack(sums).sum() / sum(len(row) - 1 for row in rows)
    nll.backward()
    found["nll"] = nll.detach()
    for name, parameter in model.named_parameters():
        found[f"grad.{name}"] = parameter.grad.clone()
    ids, logits, margins = [], [], []
    with torch.no_grad():
        for row in rows:
            row_ids, row_logits, row_margins = [], [], []
            for _ in range(NEW_TOKENS):
                last = logits_of(row)[-1]
                best = last.topk(2).values
                row_logits.append(last)
                row_margins.append(best[0] - best[1])
                row = torch.cat([row, last.argmax()[None]])
                row_ids.append(row[-1])
            ids.append(torch.stack(row_ids))
            logits.append(torch.stack(row_logits))
            margins.append(torch.stack(row_margins))
    found["generate.ids"] = torch.stack(ids)
    found["generate.logits"] = torch.stack(logits)
    found["generate.margin"] = torch.stack(margins)
    return found


def write(root, name, seed, kind, config):
    config._attn_implementation = "eager"
    model = kind(config).eval()
    random_weights(model, seed)
    inputs, rows = batches(seed)
    single = outputs(model, inputs, rows)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    double = outputs(model.double(), inputs, rows)
    directory = root / f"{name}_tiny"
    directory.mkdir(exist_ok=True)
    # The numbers of record are those in double precision, rounded once.
    expected = {n: (t.float() if t.is_floating_point() else t).contiguous() for n, t in double.items()}
    tolerance, worst = {}, 0.0
    for n, value in double.items():
        error = float((single[n].double() - value.double()).abs().max())
        relative = error / max(float(value.double().abs().max()), 1e-30)
        tolerance[n] = {"f32_vs_f64_max_abs": error, "f32_vs_f64_rel_to_max": relative}
        worst = max(worst, relative)
    assert torch.equal(single["generate.ids"], double["generate.ids"])
    margin = float(double["generate.margin"].min())
    assert margin > 1e-3, f"{name}: tokens that are nearly equally likely ({margin}); choose another seed"
    files = {
        "model.safetensors": weights,
        "inputs.safetensors": {f"{s}.{w}": t for s, pair in inputs.items() for w, t in zip(("ids", "mask"), pair)},
        "outputs.safetensors": expected,
    }
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    about = {
        "name": f"{name}_tiny",
        "source": f"Hugging Face transformers {transformers.__version__} {kind.__name__} (eager attention), "
        f"torch {torch.__version__.split('+')[0]} CPU; written by tests/scripts/language_models.py",
        "notes": [
            "hf_config.json is the model config; weights use official key names, a tied lm_head is not stored",
            "windows of 4 tokens are shorter than the rows",
            "every row is computed by itself, in float64 from float32 weights, and stands in the padded batches left.* and "
            "right.*; position ids = cumsum(mask)-1 clipped at 0; logits of padded rows are zero",
            "nll: mean over all predicted tokens of -log p; grad.*: its gradient",
            "generate.*: greedy continuation without a cache; margin = top1-top2 logit gap",
        ],
        "config": {"seed": seed, "kind": name, "new_tokens": NEW_TOKENS, "min_generate_margin": margin},
        "files": {file: (directory / file).stat().st_size for file in files},
        "tolerance": tolerance,
        "suggested_tolerance_rel_to_max": max(8 * worst, 1e-6),
        "measured_worst_rel": worst,
    }
    (directory / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    (directory / "hf_config.json").write_text(json.dumps(config.to_dict(), indent=1, default=str) + "\n")
    listed = {
        file: {
            "bytes": (directory / file).stat().st_size,
            "tensors": {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()},
        }
        for file, tensors in files.items()
    }
    (directory / "tensors.json").write_text(json.dumps(listed) + "\n")
    print(f"{name}: worst {worst:.1e}, margin {margin:.4f}, {sum(about['files'].values()) // 1024} KB")


def main():
    torch.manual_seed(0)
    for name, (seed, kind, config) in CASES.items():
        write(Path(sys.argv[1]), name, seed, kind, config)


if __name__ == "__main__":
    main()
