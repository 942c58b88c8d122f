"""Weights in the layout of HPSv2's checkpoints and of LAION's aesthetic predictor, with random numbers, and their scores.

    python make_open_clip.py          # writes open_clip_tiny beside this file; numpy

`weights.pt` has the names and shapes of open_clip below `state_dict`, `head.pth` the five layers of the predictor, both as
`torch.save` writes them. Sizes, tokenizer and activation are those of clip_tiny_gelu. golden.json has the results in f64 of
the formulas of these projects: pixels fitted into a black square before normalisation, one matrix for queries, keys and
values, projections from the right, the text's embedding at the largest id, the cosine as HPSv2, and the predictor on the
normalised embedding.
"""

import json
import math
import pathlib
import pickle
import sys
import types
import zipfile
from collections import OrderedDict

import numpy as np

HERE = pathlib.Path(__file__).parent
WIDTH, HIDDEN, HEADS, LAYERS = {"visual.": 32, "": 24}, {"visual.": 48, "": 40}, {"visual.": 4, "": 3}, 2
SIDE, PATCH, OUTPUTS, WORDS, POSITIONS, FRAME = 24, 8, 20, 521, 16, (40, 57)
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


class Storage:
    def __init__(self, array):
        self.array = array


def module(name, **members):
    found = types.ModuleType(name)
    for key, member in members.items():
        member.__module__, member.__qualname__, member.__name__ = name, key, key
        setattr(found, key, member)
    sys.modules[name] = found
    return found


# What a pickle of torch refers to by name.
module("torch", HalfStorage=type("HalfStorage", (), {}), FloatStorage=type("FloatStorage", (), {}))
module("torch._utils", _rebuild_tensor_v2=lambda *arguments: arguments)


class Tensor:
    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        strides = tuple(stride // self.array.itemsize for stride in self.array.strides)
        arguments = (Storage(self.array), 0, self.array.shape, strides, False, OrderedDict())
        return sys.modules["torch._utils"]._rebuild_tensor_v2, arguments


def save(path, state):
    """Writes the archive of `torch.save`."""
    arrays = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            if not isinstance(item, Storage):
                return None
            arrays.append(item.array)
            kind = {"float16": "HalfStorage", "float32": "FloatStorage"}[str(item.array.dtype)]
            return "storage", getattr(sys.modules["torch"], kind), str(len(arrays) - 1), "cpu", item.array.size

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Pickler(file, protocol=2).dump(state)
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(arrays):
            archive.writestr(f"archive/data/{i}", array.tobytes())
        archive.writestr("archive/version", "3\n")


def weights():
    random = np.random.default_rng(5)
    draw = lambda *shape, scale=0.3: random.normal(0, scale, shape).astype(np.float16)
    state = OrderedDict(positional_embedding=draw(POSITIONS, WIDTH[""]), text_projection=draw(WIDTH[""], OUTPUTS))
    state["logit_scale"] = np.array(math.log(100), np.float16)
    state["visual.class_embedding"] = draw(WIDTH["visual."])
    state["visual.positional_embedding"] = draw((SIDE // PATCH) ** 2 + 1, WIDTH["visual."])
    state["visual.proj"] = draw(WIDTH["visual."], OUTPUTS)
    state["visual.conv1.weight"] = draw(WIDTH["visual."], 3, PATCH, PATCH, scale=0.1)
    norms = ["visual.ln_pre", "visual.ln_post", "ln_final"]
    for tower in ["visual.", ""]:
        width, hidden = WIDTH[tower], HIDDEN[tower]
        for i in range(LAYERS):
            block = f"{tower}transformer.resblocks.{i}"
            state[f"{block}.attn.in_proj_weight"], state[f"{block}.attn.in_proj_bias"] = draw(3 * width, width), draw(3 * width)
            for name, out, into in [("attn.out_proj", width, width), ("mlp.c_fc", hidden, width), ("mlp.c_proj", width, hidden)]:
                state[f"{block}.{name}.weight"], state[f"{block}.{name}.bias"] = draw(out, into), draw(out)
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
    state["token_embedding.weight"] = draw(WORDS, WIDTH[""])
    for norm in norms:
        width = WIDTH["visual." if norm.startswith("visual.") else ""]
        state[f"{norm}.weight"], state[f"{norm}.bias"] = (1 + draw(width)).astype(np.float16), draw(width)
    return state


def head():
    """Linear layers with dropouts after the first three, which count in the names."""
    random = np.random.default_rng(6)
    sizes, state = [OUTPUTS, 16, 8, 6, 4, 1], OrderedDict()
    for i, into, out in zip([0, 2, 4, 6, 7], sizes, sizes[1:]):
        for name, shape in [("weight", (out, into)), ("bias", (out,))]:
            state[f"layers.{i}.{name}"] = random.normal(0, 0.5, shape).astype(np.float32)
    return state


def norm(w, name, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def transformer(w, tower, x, causal):
    tokens, width = x.shape
    size = width // HEADS[tower]
    for i in range(LAYERS):
        block = f"{tower}transformer.resblocks.{i}"
        normed = norm(w, f"{block}.ln_1", x)
        joined = normed @ w[f"{block}.attn.in_proj_weight"].T + w[f"{block}.attn.in_proj_bias"]
        q, k, v = (part.reshape(tokens, -1, size).transpose(1, 0, 2) for part in np.split(joined, 3, axis=1))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(size)
        if causal:
            scores = scores + np.triu(np.full((tokens, tokens), -np.inf), 1)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(tokens, width)
        x = x + linear(w, f"{block}.attn.out_proj", mixed)
        wide = linear(w, f"{block}.mlp.c_fc", norm(w, f"{block}.ln_2", x))
        gelu = 0.5 * wide * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
        x = x + linear(w, f"{block}.mlp.c_proj", gelu)
    return x


def image_embedding(w, pixels):
    grid = SIDE // PATCH
    patches = pixels.reshape(3, grid, PATCH, grid, PATCH).transpose(1, 3, 0, 2, 4).reshape(grid * grid, -1)
    x = patches @ w["visual.conv1.weight"].reshape(WIDTH["visual."], -1).T
    x = np.concatenate([w["visual.class_embedding"][None], x]) + w["visual.positional_embedding"]
    x = transformer(w, "visual.", norm(w, "visual.ln_pre", x), False)
    return norm(w, "visual.ln_post", x[0]) @ w["visual.proj"]


def text_embedding(w, ids):
    padded = np.array(ids + [0] * (POSITIONS - len(ids)))
    x = transformer(w, "", w["token_embedding.weight"][padded] + w["positional_embedding"], True)
    return norm(w, "ln_final", x)[padded.argmax()] @ w["text_projection"]


def resize_rows(x, size):
    """The first axis to `size`, by an antialiased cubic of -1/2."""
    scale = x.shape[0] / size
    out = np.zeros((size, *x.shape[1:]))
    for i in range(size):
        centre, support = (i + 0.5) * scale, 2 * max(scale, 1)
        low, high = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), x.shape[0])
        t = np.abs((np.arange(low, high) - centre + 0.5) / max(scale, 1))
        near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
        weight = np.where(t < 1, near, np.where(t < 2, far, 0))
        out[i] = np.tensordot(weight / weight.sum(), x[low:high], 1)
    return out


def pixels_of(unit):
    """[H, W, 3] in [0, 1] to the network's input: the longer side fills it, and the rest is black."""
    scale = SIDE / max(FRAME)
    height, width = (round(side * scale) for side in FRAME)
    small = resize_rows(resize_rows(unit, height).transpose(1, 0, 2), width).transpose(1, 0, 2)
    assert 0 < small.min() and small.max() < 1, "nothing is clamped"
    square = np.zeros((SIDE, SIDE, 3))
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    square[top : top + height, left : left + width] = small
    return ((square - MEAN) / STD).transpose(2, 0, 1)


def picture():
    """Waves, as 8-bit values; as make_clip.py."""
    y, x, c = np.meshgrid(np.arange(FRAME[0]), np.arange(FRAME[1]), np.arange(3), indexing="ij")
    waves = np.sin(0.11 * x + 0.7 * c) + np.sin(0.07 * y - 0.03 * x + c) + 0.5 * np.sin(0.9 * x * 0.31 + 1.3 * y * 0.17)
    return np.floor(127.5 + 48.0 * waves)


def main():
    out = HERE / "open_clip_tiny"
    out.mkdir(exist_ok=True)
    w, layers = weights(), head()
    tensors = lambda state: OrderedDict((name, Tensor(array)) for name, array in state.items())
    save(out / "weights.pt", {"epoch": 3, "state_dict": tensors(w)})
    save(out / "head.pth", tensors(layers))
    w, layers = ({name: array.astype(np.float64) for name, array in state.items()} for state in (w, layers))
    texts = json.loads((HERE / "clip_tiny_gelu/golden.json").read_text())

    unit = picture() / 255
    unitary = lambda x: x / np.linalg.norm(x)
    cosine = lambda unit, ids: float(unitary(image_embedding(w, pixels_of(unit))) @ unitary(text_embedding(w, ids)))

    def aesthetic(unit):
        x = unitary(image_embedding(w, pixels_of(unit)))
        for i in [0, 2, 4, 6, 7]:
            x = linear(layers, f"layers.{i}", x)
        return float(x[0])

    # Along it the derivatives are taken; frames have values in [-1, 1], and channels first.
    direction = np.sin(np.arange(3 * FRAME[0] * FRAME[1])).reshape(3, *FRAME).transpose(1, 2, 0)
    slope = lambda score: (score(unit + 5e-5 * direction) - score(unit - 5e-5 * direction)) / 2e-4
    golden = {
        "texts": texts["texts"],
        "size": FRAME,
        "pixels": [float(f"{v:.8g}") for v in pixels_of(unit).flatten()],
        "image": image_embedding(w, pixels_of(unit)).tolist(),
        "text": [text_embedding(w, ids).tolist() for ids in texts["ids"]],
        "cosine": [cosine(unit, ids) for ids in texts["ids"]],
        "cosine_slope": slope(lambda unit: cosine(unit, texts["ids"][0])),
        "factor": math.exp(w["logit_scale"]),
        "aesthetic": aesthetic(unit),
        "aesthetic_slope": slope(aesthetic),
    }
    (out / "golden.json").write_text(json.dumps(golden) + "\n")
    print({name: golden[name] for name in ["cosine", "cosine_slope", "aesthetic", "aesthetic_slope"]})


if __name__ == "__main__":
    main()
