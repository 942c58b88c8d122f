"""Writes the seeds of corpus/: lora_metadata, metadata, picture, tokenizer_json and frame. Only the
standard library is needed."""

import base64
import json
import struct
import zlib
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
# Pictures of 8 x 8 pixels: ffmpeg -f lavfi -i testsrc2=size=8x8 -frames:v 1 -q:v 31 s.jpg; ... color=red:size=8x8 ... s.webp
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAgAAAQABAAD//gAQTGF2YzU5LjM3LjEwMAD/2wBDAAg+Pkk+SVVVVVVVVWRdZGhoaGRkZGRoaGhwcHCDg4NwcHBoaHBwfHyDg4+T"
    "j4eHg4eTk5ubm7q6srLZ2eD/////xABfAAADAQAAAAAAAAAAAAAAAAACBgQHAQEBAAAAAAAAAAAAAAAAAAAFBhABAAICAgMBAAAAAAAAAAAAAQACEVEx"
    "IcGRckERAQEAAgMBAAAAAAAAAAAAAAECABMhMbEi/8AAEQgACAAIAwEiAAIRAAMRAP/aAAwDAQACEQMRAD8AzlbKB+Z11DzfZ7rKTm3w+IpwzZUgGWJ3"
    "XKfVe5//2Q=="
)
WEBP = base64.b64decode("UklGRhwAAABXRUJQVlA4TA8AAAAvB8ABAAcQ9Y/+ByKi/wEA")


def put(target, name, data):
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    (CORPUS / target / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def lora_metadata():
    layer = "blocks.0.self_attn.q"
    words = {
        "roll.format": "1", "roll.expert": "low_noise", "roll.rank": "2", "roll.alpha": "4", "roll.steps": "7",
        "roll.targets": "self_attn.q", "roll.base": "wan2_2 model.safetensors", "roll.run": "faces",
    }
    put("lora_metadata", "ours.json", json.dumps(words | {"lora_alphas": json.dumps({layer: 4.0})}))
    config = {
        "transformer.r": 2, "transformer.lora_alpha": 4, "transformer.rank_pattern": {},
        "transformer.alpha_pattern": {layer: 8}, "transformer.use_rslora": False,
        "transformer.target_modules": ["to_q"],
    }
    put("lora_metadata", "diffusers.json", json.dumps({"lora_adapter_metadata": json.dumps(config), "format": "pt"}))
    kohya = {"ss_network_dim": "2", "ss_network_alpha": "4.0", "modelspec.title": "x"}
    put("lora_metadata", "kohya.json", json.dumps(kohya))


def metadata():
    put("metadata", "a.csv", '\ufeffprompt,video,end_image\n"a man, talking",a/b.mp4,\nx,/c.gif,e.png\n')
    put("metadata", "a.tsv", "video\tprompt\timage\na.mp4\ta man, and a dog\ti.png\n")
    put("metadata", "a.jsonl", '{"prompt": "p\\nq", "video": ["a.mp4", "/b.mp4"], "score": [1, {"a": null}]}\n'
                               '{"video": "c.gif", "prompt": "", "image": null}\n')
    put("metadata", "a.json", '[\n {"video": ["a", "b"],\n "prompt": "p"},'
                              ' {"prompt": "q\\u00e9", "video": "c", "x": [[], {}]}]')


def exif(orientation, order):
    """A TIFF header, and a directory of one entry: the orientation."""
    mark = b"II" if order == "<" else b"MM"
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    return mark + struct.pack(order + "HIH", 42, 8, 1) + entry + struct.pack(order + "I", 0)


def png(width, height, rows, *more):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


def picture():
    rows = b"".join(b"\0" + bytes([40 * y, 80, 20 * y]) * 4 for y in range(3))
    put("picture", "turned.png", png(4, 3, rows, (b"eXIf", exif(6, ">"))))
    profile = (b"iCCP", b"a\0\0" + zlib.compress(b"p" * 200))
    put("picture", "mirrored.png", png(4, 3, rows, (b"eXIf", exif(5, "<")), profile))
    turned = b"Exif\0\0" + exif(3, ">")
    put("picture", "turned.jpg", JPEG[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(turned)) + turned + JPEG[2:])
    gif = b"GIF89a" + struct.pack("<HHBBB", 2, 2, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    for _ in range(2):
        gif += b"\x21\xf9\x04\0\x0a\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 2, 2, 0)
        gif += b"\x02\x03\x44\x02\x05\x00"
    put("picture", "two.gif", gif + b";")
    turned = exif(8, "<")
    extended = b"VP8X" + struct.pack("<I", 10) + bytes([8, 0, 0, 0]) + b"\7\0\0\7\0\0"
    body = b"WEBP" + extended + WEBP[12:] + b"EXIF" + struct.pack("<I", len(turned)) + turned
    put("picture", "exif.webp", b"RIFF" + struct.pack("<I", len(body)) + body)


def charsmap():
    """A trie of one root without children, with a place for each byte, and the texts after it."""
    trie = struct.pack("<256I", *[0] * 256)
    return struct.pack("<I", len(trie)) + trie + b"A\0ab\0"


def tokenizer_json():
    flags = ["single_word", "lstrip", "rstrip", "normalized"]
    special = {"id": 0, "content": "<unk>", "special": True} | dict.fromkeys(flags, False)
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap()).decode()}
    replace = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    vocabulary = [["<unk>", 0.0], ["\u2581a", -1.0], ["man", -2.0]]
    put("tokenizer_json", "unigram.json", json.dumps({
        "version": "1.0", "added_tokens": [special], "pre_tokenizer": space, "decoder": space,
        "normalizer": {"type": "Sequence", "normalizers": [table, replace, {"type": "NFKC"}]},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": vocabulary},
    }))
    pattern = {"Regex": "\\p{L}+|\\s+(?!\\S)|\\s+"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {"a": 0, "m": 1, "n": 2, "ma": 3, "man": 4, "\u0120": 5}
    put("tokenizer_json", "bpe.json", json.dumps({
        "version": "1.0", "added_tokens": [special | {"id": 6}], "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["m", "a"], ["ma", "n"]]},
    }))
    bert = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    piece = {"unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    put("tokenizer_json", "wordpiece.json", json.dumps({
        "version": "1.0", "added_tokens": [special], "normalizer": {"type": "BertNormalizer"} | bert,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "vocab": {"<unk>": 0, "a": 1, "man": 2, "##s": 3}} | piece,
    }))


def frame():
    def framed(header, *tensors):
        text = json.dumps(header).encode()
        return b"ROLL" + struct.pack("<I", len(text)) + text + b"".join(tensors)

    put("frame", "hello", framed({"name": "odd", "differentiable": True, "shared": True}))
    gradient = {"name": "gradient", "dtype": "f32", "shape": [2, 1, 2]}
    score = {"score": 0.5, "details": {"mean": 0.1}, "tensors": [gradient, {"name": "b", "dtype": "u8", "shape": [3]}]}
    put("frame", "score", framed(score, struct.pack("<4f", 1, 2, 3, 4), b"abc"))
    put("frame", "shared", framed({"score": None, "reason": "nobody", "tensors": [gradient | {"at": 64}]}))


for write in [lora_metadata, metadata, picture, tokenizer_json, frame]:
    write()
