"""Loads the LoRA files of tests/lora_files.rs into tiny models with the loaders of diffusers and PEFT themselves.

Each loader must report no missing and no unexpected key, and each layer must then add scale * B A, computed here from
the matrices of the source.

    python tests/scripts/lora_loaders.py DIR

DIR holds source.safetensors (the matrices as X.A, X.B and X.scale, X an official layer name), config.json (of the
network), and the files under test: comfyui, kohya, diffusers, diffusers_low (.safetensors), peft and peft_diffusers
(directories). diffusers_low is for the second transformer of a pipeline.
Exits with 77 when a package is not there.
"""

import json
import pathlib
import sys

try:
    import diffusers
    import peft
    import safetensors.torch
    import torch
    from diffusers.loaders import peft as diffusers_peft
except ImportError as error:
    print(error)
    sys.exit(77)

NAMES = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}


class Attention(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(dim, dim) for _ in range(4))


class Block(torch.nn.Module):
    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(dim), Attention(dim)
        self.ffn = torch.nn.Sequential(torch.nn.Linear(dim, ffn_dim), torch.nn.GELU(), torch.nn.Linear(ffn_dim, dim))


class Official(torch.nn.Module):
    """The layers of Wan under their official names; PEFT looks at nothing else."""

    def __init__(self, config):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(config["dim"], config["ffn_dim"]) for _ in range(config["layers"]))


def transformer(config):
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=config["heads"],
        attention_head_dim=config["dim"] // config["heads"],
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=config["ffn_dim"],
        num_layers=config["layers"],
    )


def theirs(layer):
    number, rest = layer.removeprefix("blocks.").split(".", 1)
    return f"blocks.{number}.{NAMES[rest]}"


def check(what, model, source, name, adapter, result):
    missing = [k for k in result.missing_keys if "lora_" in k]
    assert not missing and not result.unexpected_keys, f"{what}: missing {missing}, unexpected {result.unexpected_keys}"
    layers = sorted(k.removesuffix(".A") for k in source if k.endswith(".A"))
    for layer in layers:
        module = model.get_submodule(name(layer))
        expected = source[f"{layer}.scale"].double() * (source[f"{layer}.B"].double() @ source[f"{layer}.A"].double())
        found = module.get_delta_weight(adapter).double()
        worst = (found - expected).abs().max() / expected.abs().max()
        assert worst < 1e-5, f"{what}: {layer} differs by {worst}"
    adapted = [k for k, m in model.named_modules() if hasattr(m, "lora_A")]
    assert len(adapted) == len(layers), f"{what}: {len(adapted)} layers carry a LoRA, expected {len(layers)}"
    print(f"{what}: {len(layers)} layers, 0 missing, 0 unexpected")


def with_diffusers(directory, config, source):
    results = []
    ours = diffusers_peft._maybe_warn_for_unhandled_keys
    diffusers_peft._maybe_warn_for_unhandled_keys = lambda keys, name: (results.append(keys), ours(keys, name))
    for convention, second in [("diffusers", False), ("comfyui", False), ("kohya", False), ("diffusers_low", True)]:
        pipe = diffusers.WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=None,
            transformer=transformer(config),
            transformer_2=transformer(config),
        )
        name = f"{convention}.safetensors"
        pipe.load_lora_weights(str(directory), weight_name=name, adapter_name="roll", load_into_transformer_2=second)
        loaded, other = (pipe.transformer_2, pipe.transformer) if second else (pipe.transformer, pipe.transformer_2)
        assert results, f"{convention}: the loader dropped every key"
        check(f"diffusers {diffusers.__version__}, {convention}", loaded, source, theirs, "roll", results.pop())
        assert not any(hasattr(m, "lora_A") for m in other.modules()), f"{convention}: loaded into the other transformer"


def with_peft(directory, config, source):
    for folder, model, name in [
        ("peft", Official(config), lambda layer: layer),
        ("peft_diffusers", transformer(config), theirs),
    ]:
        path = str(directory / folder)
        adapted = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(path))
        result = peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(path, device="cpu"))
        check(f"peft {peft.__version__}, {folder}", adapted.base_model.model, source, name, "default", result)


def main():
    directory = pathlib.Path(sys.argv[1])
    config = json.loads((directory / "config.json").read_text())
    source = safetensors.torch.load_file(directory / "source.safetensors")
    with_diffusers(directory, config, source)
    with_peft(directory, config, source)


main()
