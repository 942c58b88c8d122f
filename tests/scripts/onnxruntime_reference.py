"""Writes the numbers that tests/face_reward.rs compares with: a portrait through ONNX Runtime, from pixels to embedding.

Everything around the networks is written anew here in NumPy (letterbox with an antialiased resize as torchvision's,
SCRFD's and YuNet's decoding, Umeyama by SVD, bilinear crop), so that an error in ours does not repeat itself. Central
differences of the identity score are taken in float64, by a walk over the embedder's graph: those of float32 networks
are off by percents, because the kinks of their PReLUs forbid a large step and rounding a small one.

    pip install numpy onnx onnxruntime pillow
    python tests/scripts/onnxruntime_reference.py demo demo/assets > tests/face_reward/demo.json
    python tests/scripts/onnxruntime_reference.py real ../shared > tests/face_reward/golden.json
"""

import json
import sys

import numpy as np
import onnx
import onnxruntime as ort
from PIL import Image

TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)


def session(path):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(network, x):
    names = [o.name for o in network.get_outputs()]
    return dict(zip(names, network.run(None, {network.get_inputs()[0].name: x.astype(np.float32)})))


def triangle(old, new):
    """[new, old]: weights of a resize whose triangle filter widens when it shrinks."""
    width = max(old / new, 1.0)
    centre = (np.arange(new)[:, None] + 0.5) * old / new
    weights = (1 - np.abs(np.arange(old)[None] + 0.5 - centre) / width).clip(0)
    return weights / weights.sum(1, keepdims=True)


def canvas(image, side, padding):
    """[1, 3, side, side] in [-1, 1]: the picture in the upper left corner."""
    h, w = image.shape[1:]
    size = (side, int(side * w / h)) if h > w else (int(side * h / w), side)
    out = np.full((1, 3, side, side), padding, np.float64)
    out[:, :, : size[0], : size[1]] = triangle(h, size[0]) @ image @ triangle(w, size[1]).T
    return out, size[0] / h


def best(faces):
    box, score, points = max(faces, key=lambda f: f[1])
    return {"box": list(map(float, box)), "score": float(score), "landmarks": points.tolist()}


def scrfd(network, image, side):
    x, scale = canvas(image, side, 0.0)
    out = run(network, x)
    faces = []
    for stride in (8, 16, 32):
        scores, boxes, points = (out[f"{k}_{stride}"].reshape(-1, n) for k, n in (("score", 1), ("bbox", 4), ("kps", 10)))
        i = int(scores.argmax())
        n = side // stride
        at = np.array([i // 2 % n, i // 2 // n]) * stride
        box = np.concatenate([at - boxes[i, :2] * stride, at + boxes[i, 2:] * stride]) / scale
        faces.append((box, scores[i, 0], (points[i].reshape(5, 2) * stride + at) / scale))
    return best(faces)


def yunet(network, image, side):
    x, scale = canvas(image, side, 0.0)
    out = run(network, (x[:, ::-1] + 1) * 127.5)
    faces = []
    for stride in (8, 16, 32):
        scores = np.sqrt(out[f"cls_{stride}"].clip(0, 1) * out[f"obj_{stride}"].clip(0, 1)).reshape(-1)
        boxes, points = out[f"bbox_{stride}"].reshape(-1, 4), out[f"kps_{stride}"].reshape(-1, 5, 2)
        i = int(scores.argmax())
        n = side // stride
        at = np.array([i % n, i // n])
        centre, size = (at + boxes[i, :2]) * stride, np.exp(boxes[i, 2:]) * stride
        box = np.concatenate([centre - size / 2, centre + size / 2]) / scale
        faces.append((box, scores[i], (points[i] + at) * stride / scale))
    return best(faces)


def crop(image, points):
    """[3, 112, 112]: the similarity that brings `points` nearest to the template, exactly, bilinear."""
    points = np.array(points, np.float64)
    p, q = points - points.mean(0), TEMPLATE - TEMPLATE.mean(0)
    u, s, vt = np.linalg.svd(q.T @ p / 5)
    d = np.diag([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation, scale = u @ d @ vt, (s * np.diag(d)).sum() / p.var(0).sum()
    shift = TEMPLATE.mean(0) - scale * rotation @ points.mean(0)
    j, i = np.meshgrid(np.arange(112), np.arange(112))
    xy = np.linalg.inv(scale * rotation) @ (np.stack([j, i]).reshape(2, -1) - shift[:, None])
    x0, y0 = np.floor(xy).astype(int)
    fx, fy = xy[0] - x0, xy[1] - y0
    h, w = image.shape[1:]
    inside = lambda y, x: ((y >= 0) & (y < h) & (x >= 0) & (x < w)).astype(np.float64)
    at = lambda y, x: image[:, y.clip(0, h - 1), x.clip(0, w - 1)] * inside(y, x)
    out = (at(y0, x0) * (1 - fx) + at(y0, x0 + 1) * fx) * (1 - fy) + (at(y0 + 1, x0) * (1 - fx) + at(y0 + 1, x0 + 1) * fx) * fy
    return out.reshape(3, 112, 112)


def embedding(network, face):
    (values,) = run(network, face[None]).values()
    values = values[0].astype(np.float64)
    return {"norm": float(np.linalg.norm(values)), "head": values[:16].tolist(), "sum": float(values.sum())}


def convolved(x, weight, bias, stride, pads, groups):
    """[C, H, W]: the products of every patch, group by group."""
    padded = np.pad(x, ((0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    patches = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], (1, 2))[:, :: stride[0], :: stride[1]]
    out = []
    for rows, kernels in zip(np.split(patches, groups), np.split(weight, groups)):
        out.append(np.tensordot(kernels, rows, ((1, 2, 3), (0, 3, 4))))
    return np.concatenate(out) + bias[:, None, None]


def embed64(graph, x):
    """The embedder in float64, by walking its graph; only what these files use."""
    values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    values = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in values.items()}
    values[next(i.name for i in graph.input if i.name not in values)] = x
    for node in graph.node:
        args = [values[i] for i in node.input]
        a = {p.name: onnx.helper.get_attribute_value(p) for p in node.attribute}
        if node.op_type == "Conv":
            assert set(a.get("dilations", [1])) == {1}
            bias = args[2] if len(args) > 2 else np.zeros(len(args[1]))
            out = convolved(args[0], args[1], bias, a.get("strides", [1, 1]), a.get("pads", [0] * 4), a.get("group", 1))
        elif node.op_type == "PRelu":
            out = np.where(args[0] >= 0, args[0], args[0] * args[1].reshape(-1, 1, 1))
        elif node.op_type == "Add":
            out = args[0] + args[1]
        elif node.op_type in ("Reshape", "Flatten"):
            out = args[0].reshape(-1)
        elif node.op_type == "Gemm":
            assert a.get("alpha", 1) == a.get("beta", 1) == 1
            out = (args[1] if a.get("transB") else args[1].T) @ args[0] + args[2]
        else:
            raise ValueError(node.op_type)
        values[node.output[0]] = out
    return values[graph.output[0].name]


def direction(k, shape):
    """White noise in [-0.5, 0.5), the same in face_reward.rs."""
    x = np.sin(np.arange(np.prod(shape)) * 12.9898 + k * 78.233) * 43758.5453
    return (x - np.floor(x) - 0.5).reshape(shape)


def slopes(path, image, points):
    """Central differences, in float64, of cosine(embedding, reference), reference[i] = sin(i), along each direction."""
    graph = onnx.load(path).graph
    # As a detector gives them: digits beyond float32 would move some PReLU past its kink, and slopes by a percent.
    points = np.asarray(points, np.float32).astype(np.float64)
    reference = np.sin(np.arange(512, dtype=np.float64))

    def score(picture):
        found = embed64(graph, crop(picture, points))
        return found @ reference / np.linalg.norm(found) / np.linalg.norm(reference)

    step = 1e-7
    along = [(score(image + step * d) - score(image - step * d)) / (2 * step) for d in (direction(k, image.shape) for k in range(8))]
    return {"score": score(image), "along": along}


def pixels(path):
    """[3, H, W] in [-1, 1]."""
    return np.asarray(Image.open(path).convert("RGB")).astype(np.float64).transpose(2, 0, 1) / 127.5 - 1


def portrait(image, found, embedder):
    """What everything says of the face at `found`."""
    face = crop(image, found["landmarks"])
    return {
        "scrfd": found,
        "crop": {"mean": float(face.mean()), "centre": face[:, 56, 56].tolist()},
        "embedding_rgb": embedding(session(embedder), face),
        "embedding_bgr": embedding(session(embedder), face[::-1]),
        "slopes": slopes(embedder, image, found["landmarks"]),
    }


def demo(root):
    # The second person of the second row, of whom the picture shows 128 x 112 pixels.
    image = pixels(f"{root}/faces.png")[:, 128:240, 128:256]
    return portrait(image, scrfd(session(f"{root}/face/scrfd_demo.onnx"), image, 64), f"{root}/face/arcface_demo.onnx")


def real(root):
    image = pixels(f"{root}/media/astronaut.png")
    found = scrfd(session(f"{root}/models/scrfd_2.5g_bnkps.onnx"), image, 640)
    golden = portrait(image, found, f"{root}/models/arcface_mobile_512.onnx")
    return golden | {"yunet": yunet(session(f"{root}/models/yunet_s_dynamic.onnx"), image, 640)}


if __name__ == "__main__":
    json.dump({"demo": demo, "real": real}[sys.argv[1]](sys.argv[2]), sys.stdout, indent=1)
    print()
