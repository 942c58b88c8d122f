"""CLIP and SigLIP directories with random weights, and what `transformers` makes of them.

    python make_clip.py                                    # clip_tiny, clip_tiny_gelu and siglip_tiny, beside this file
    python make_clip.py DIR --vocabulary bpe_simple_vocab_16e6.txt.gz
                                     # vit-b-32, vit-l-14, vit-h-14 and siglip-b-16 of the published sizes
    ... --only siglip_tiny                                 # that one alone

torch 2.9, transformers 4.57, torchvision 0.24, Pillow. The vocabulary is that of OpenAI's CLIP; the package open_clip_torch
has it. Directories are as `save_pretrained` writes them; golden.json in each holds, for texts and a picture:

- `ids` and `text`: token ids (SigLIP's with its padding), and `get_text_features`;
- `processor`: pixels of the image processor (8 bits), `pixels`: of the same steps in floats (every `stride`-th);
- `image`: `get_image_features` of `pixels`; `cosine` with each text; `factor`: exp(logit_scale); SigLIP's `bias`;
- `gradient`: that of the first cosine in the frame, values in [-1, 1] (every `stride`-th);
- `aesthetic` and `aesthetic_gradient`: the head's number and its gradient in the frame.

CLIP score and HPSv2 are the cosine, PickScore is factor times cosine, as their own code computes them.
"""

import argparse
import gzip
import json
import math
import pathlib
import tempfile

import numpy as np
import torch
from PIL import Image
from torch import nn
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTokenizerFast,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

TEXTS = ["a photo of a cat", "Two  dogs, running; fast!", "", "a very long text " * 30]


def byte_symbols():
    """The printable character of each byte, as GPT-2 and CLIP write it."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {b: chr(b) for b in own}, 0
    for byte in range(256):
        if byte not in symbols:
            symbols[byte], extra = chr(256 + extra), extra + 1
    return [symbols[b] for b in own] + [symbols[b] for b in range(256) if b not in own]


def tokenizer(vocabulary):
    """OpenAI's, or one of a few merges."""
    if vocabulary:
        lines = gzip.open(vocabulary).read().decode().split("\n")
        merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    else:
        merges = [("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g"), ("dog", "s</w>"), ("o", "f</w>"), ("p", "h")]
    symbols = byte_symbols()
    words = symbols + [s + "</w>" for s in symbols] + ["".join(m) for m in merges] + ["<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        (directory / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in merges) + "\n")
        return CLIPTokenizerFast(str(directory / "vocab.json"), str(directory / "merges.txt"))


def siglip_tokenizer():
    """Of the kind of SigLIP's: lower case, no punctuation, pieces by their probability, an end, padding by that end."""
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "\u2581cat", "\u2581dogs", "\u2581very", "ing"]
    text = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2))
    kept = [normalizers.Lowercase(), normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""), normalizers.Replace(Regex(r"\s+"), " ")]
    text.normalizer = normalizers.Sequence([*kept, normalizers.Strip()])
    text.pre_tokenizer = pre_tokenizers.Metaspace()
    text.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=text, pad_token="</s>", eos_token="</s>", unk_token="<unk>")


def picture(height, width):
    """Waves, as 8-bit values; the Rust test makes the same."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    waves = np.sin(0.11 * x + 0.7 * c) + np.sin(0.07 * y - 0.03 * x + c) + 0.5 * np.sin(0.9 * x * 0.31 + 1.3 * y * 0.17)
    return np.floor(127.5 + 48.0 * waves).astype(np.uint8)


def pixels_of(frame, side, processor):
    """The processor's steps in floats: [3, H, W] in [-1, 1] to [1, 3, side, side]."""
    unit = (frame[None] + 1) / 2
    height, width = unit.shape[2:]
    short = processor.size.get("shortest_edge")
    if short is None:
        size = (side, side)
    else:
        size = (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
    resized = nn.functional.interpolate(unit, size=size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    cut = resized[:, :, top : top + side, left : left + side]
    mean, std = (torch.tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std))
    return (cut - mean) / std


def write(directory, config, tokens, processor, hidden, dtype, size):
    torch.manual_seed(1)
    directory.mkdir(parents=True, exist_ok=True)
    is_clip = isinstance(config, CLIPConfig)
    model = (CLIPModel if is_clip else SiglipModel)(config).eval()
    outputs = config.projection_dim if is_clip else config.vision_config.hidden_size
    head = nn.Sequential(*(nn.Linear(a, b) for a, b in zip([outputs, *hidden], [*hidden, 1])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        model.logit_scale.fill_(math.log(100.0 if is_clip else 10.0))
        if not is_clip:
            model.logit_bias.fill_(-1.5)
    model.to(dtype).save_pretrained(directory)
    model.float()  # what is computed with is what was saved
    tokens.save_pretrained(directory)
    for unread in ["vocab.json", "merges.txt", "special_tokens_map.json", *(["tokenizer_config.json"] if is_clip else [])]:
        (directory / unread).unlink(missing_ok=True)
    processor.save_pretrained(directory)
    from safetensors.torch import save_file

    # As the predictor of LAION names its layers, dropouts counted.
    names = {2 * i: layer for i, layer in enumerate(head)}
    save_file({f"layers.{i}.{k}": v for i, layer in names.items() for k, v in layer.state_dict().items()}, directory / "head.safetensors")

    side = config.vision_config.image_size
    stride = max(1, side // 24) ** 2 * 3 + 1
    image = picture(*size)
    frame = (torch.tensor(image).permute(2, 0, 1).float() / 127.5 - 1).requires_grad_()
    pixels = pixels_of(frame, side, processor)
    embedding = model.get_image_features(pixels)
    padding = False if is_clip else "max_length"
    ids = [tokens(text, truncation=True, padding=padding)["input_ids"] for text in TEXTS]
    with torch.no_grad():
        texts = [model.get_text_features(torch.tensor([i]))[0] for i in ids]
    cosines = [nn.functional.cosine_similarity(embedding[0], text, dim=0) for text in texts]
    rate = head(nn.functional.normalize(embedding, dim=-1))[0, 0]
    (gradient,) = torch.autograd.grad(cosines[0], frame, retain_graph=True)
    (aesthetic,) = torch.autograd.grad(rate, frame)
    seen = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"]
    flat = lambda t: [float(f"{v:.8g}") for v in t.detach().flatten().tolist()]
    golden = {
        "made by": f"make_clip.py with torch {torch.__version__}",
        "texts": TEXTS,
        "ids": ids,
        "text": [flat(t) for t in texts],
        "size": size,
        "stride": stride,
        "processor": flat(seen.flatten()[::stride]),
        "pixels": flat(pixels.flatten()[::stride]),
        "image": flat(embedding),
        "cosine": [c.item() for c in cosines],
        "factor": model.logit_scale.exp().item(),
        "bias": 0.0 if is_clip else model.logit_bias.item(),
        "gradient": flat(gradient.flatten()[::stride]),
        "aesthetic": rate.item(),
        "aesthetic_gradient": flat(aesthetic.flatten()[::stride]),
    }
    (directory / "golden.json").write_text(json.dumps(golden) + "\n")
    print(directory, sum(p.numel() for p in model.parameters()), "parameters")


def tower(width, hidden, layers, heads, **others):
    return {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, **others}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("directory", nargs="?")
    arguments.add_argument("--vocabulary")
    arguments.add_argument("--only")
    arguments = arguments.parse_args()
    wanted = lambda name: arguments.only in (None, name)
    tokens = tokenizer(arguments.vocabulary)
    tokens.model_max_length = 77
    words = {"vocab_size": len(tokens), "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    if arguments.directory is None:
        here = pathlib.Path(__file__).parent
        if wanted("siglip_tiny"):
            pieces = siglip_tokenizer()
            pieces.model_max_length = 16
            config = SiglipConfig(
                text_config={**tower(32, 40, 2, 2), "vocab_size": len(pieces), "max_position_embeddings": 16},
                vision_config={**tower(32, 48, 2, 4), "image_size": 24, "patch_size": 8},
            )
            processor = SiglipImageProcessor(size={"height": 24, "width": 24})
            write(here / "siglip_tiny", config, pieces, processor, [8, 4], torch.float32, (40, 57))
        for name, act, dtype, end in [("clip_tiny", "quick_gelu", torch.float32, words["eos_token_id"]), ("clip_tiny_gelu", "gelu", torch.bfloat16, 2)]:
            if not wanted(name):
                continue
            tokens.model_max_length = 16
            config = CLIPConfig(
                text_config={**tower(24, 40, 2, 3), **words, "eos_token_id": end, "max_position_embeddings": 16, "hidden_act": act},
                vision_config={**tower(32, 48, 2, 4), "image_size": 24, "patch_size": 8, "hidden_act": act},
                projection_dim=20,
            )
            processor = CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
            write(here / name, config, tokens, processor, [8, 4], dtype, (40, 57))
        return
    sizes = {
        "vit-b-32": ("quick_gelu", 512, tower(512, 2048, 12, 8), tower(768, 3072, 12, 12, patch_size=32)),
        "vit-l-14": ("quick_gelu", 768, tower(768, 3072, 12, 12), tower(1024, 4096, 24, 16, patch_size=14)),
        "vit-h-14": ("gelu", 1024, tower(1024, 4096, 24, 16), tower(1280, 5120, 32, 16, patch_size=14)),
    }
    for name, (act, projection, text, vision) in sizes.items():
        if not wanted(name):
            continue
        config = CLIPConfig(
            text_config={**text, **words, "hidden_act": act},
            vision_config={**vision, "hidden_act": act},
            projection_dim=projection,
        )
        write(pathlib.Path(arguments.directory) / name, config, tokens, CLIPImageProcessor(), [1024, 128, 64, 16], torch.float32, (480, 832))
    if wanted("siglip-b-16"):
        pieces = siglip_tokenizer()
        pieces.model_max_length = 64
        directory = pathlib.Path(arguments.directory) / "siglip-b-16"
        write(directory, SiglipConfig(), pieces, SiglipImageProcessor(), [1024, 128, 64, 16], torch.float32, (480, 832))


if __name__ == "__main__":
    main()
