#!/usr/bin/env python3
"""Writes corpus/gguf: two whole language models of a few weights, and a file with a value and a tensor of every type.

    python3 fuzz/gguf_seeds.py

Standard library only. The values do not matter: readers are tried, not models.
"""

import struct
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, LIST, U64, I64, F64 = range(13)
PLAIN = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
# Type of a tensor: values and bytes of a block.
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}


def text(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def value(kind, given):
    if kind == TEXT:
        return text(given)
    if kind == LIST:
        inner, items = given
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack("<" + PLAIN[kind], given)


def gguf(version, values, tensors):
    """`tensors`: name, shape with the outermost dimension first, type."""
    head, data = b"", b""
    for key, (kind, given) in values.items():
        head += text(key) + struct.pack("<I", kind) + value(kind, given)
    for name, shape, kind in tensors:
        count = 1
        for axis in shape:
            count *= axis
        per, size = BLOCKS[kind]
        data += bytes(-len(data) % 32)
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += bytes(i * 7 % 60 for i in range(count // per * size))
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + head
    return head + bytes(-len(head) % 32) + data


def model(family, bias, tied):
    """One block of width 4, with its tokenizer and chat template."""
    tokens = ["a", "b", "ab", "<e>"]
    values = {
        "general.architecture": (TEXT, family),
        f"{family}.block_count": (U32, 1),
        f"{family}.context_length": (U32, 16),
        f"{family}.embedding_length": (U32, 4),
        f"{family}.feed_forward_length": (U32, 6),
        f"{family}.attention.head_count": (U32, 2),
        f"{family}.attention.head_count_kv": (U32, 1),
        f"{family}.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        f"{family}.rope.freq_base": (F32, 10000.0),
        "tokenizer.ggml.model": (TEXT, "gpt2"),
        "tokenizer.ggml.pre": (TEXT, "qwen2" if bias else "smollm"),
        "tokenizer.ggml.tokens": (LIST, (TEXT, tokens)),
        "tokenizer.ggml.token_type": (LIST, (I32, [1, 1, 1, 3])),
        "tokenizer.ggml.merges": (LIST, (TEXT, ["a b"])),
        "tokenizer.ggml.eos_token_id": (U32, 3),
        "tokenizer.chat_template": (TEXT, "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"),
    }
    tensors = [("token_embd.weight", [4, 4], 0), ("output_norm.weight", [4], 0)]
    for name, out, inner in [("q", 4, 4), ("k", 2, 4), ("v", 2, 4), ("output", 4, 4)]:
        tensors.append((f"blk.0.attn_{name}.weight", [out, inner], 1))
        if bias and name != "output":
            tensors.append((f"blk.0.attn_{name}.bias", [out], 0))
    tensors += [("blk.0.ffn_gate.weight", [6, 4], 0), ("blk.0.ffn_up.weight", [6, 4], 30)]
    tensors += [("blk.0.ffn_down.weight", [4, 6], 0), ("blk.0.attn_norm.weight", [4], 0)]
    tensors.append(("blk.0.ffn_norm.weight", [4], 0))
    if family == "llama":
        tensors.append(("rope_freqs.weight", [1], 0))
    if not tied:
        tensors.append(("output.weight", [4, 4], 0))
    return gguf(3, values, tensors)


def everything():
    given = {U8: 200, I8: -3, U16: 60000, I16: -300, U32: 1 << 31, I32: -5, F32: 0.5, BOOL: True, U64: 7, I64: -7, F64: 2.5}
    values = {f"of.{kind}": (kind, number) for kind, number in given.items()}
    values |= {f"list.{kind}": (LIST, (kind, [number] * 2)) for kind, number in given.items()}
    values |= {"text": (TEXT, "grün"), "texts": (LIST, (TEXT, ["", "x"])), "general.alignment": (U32, 32)}
    return gguf(2, values, [(f"tensor.{kind}", [1, per], kind) for kind, (per, _) in BLOCKS.items()])


if __name__ == "__main__":
    folder = Path(__file__).parent / "corpus" / "gguf"
    folder.mkdir(exist_ok=True)
    (folder / "llama.gguf").write_bytes(model("llama", bias=False, tied=True))
    (folder / "qwen2.gguf").write_bytes(model("qwen2", bias=True, tied=False))
    (folder / "everything.gguf").write_bytes(everything())
