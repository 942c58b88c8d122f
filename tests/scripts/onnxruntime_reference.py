"""Writes the numbers that tests/face_reward.rs compares with: the portrait through ONNX Runtime, from pixels to embedding.

Everything around the networks is written anew here in NumPy (letterbox with an antialiased resize by torchvision,
SCRFD's and YuNet's decoding, Umeyama by SVD, bilinear crop), so that an error in ours does not repeat itself. Central
differences of the identity score are taken in float64, by PyTorch: those of float32 networks are off by percents,
because the kinks of their PReLUs forbid a large step and rounding a small one.

    python tests/scripts/onnxruntime_reference.py ../shared > tests/face_reward/golden.json
"""

import json
import sys

import numpy as np
import onnx
import onnxruntime as ort
import torch
from PIL import Image

SIDE = 640
TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)


def session(root, name):
    return ort.InferenceSession(f"{root}/models/{name}", providers=["CPUExecutionProvider"])


def run(network, x):
    names = [o.name for o in network.get_outputs()]
    return dict(zip(names, network.run(None, {network.get_inputs()[0].name: x.astype(np.float32)})))


def canvas(image, padding):
    """[1, 3, SIDE, SIDE] in [-1, 1]: the picture in the upper left corner."""
    h, w = image.shape[1:]
    size = (SIDE, int(SIDE * w / h)) if h > w else (int(SIDE * h / w), SIDE)
    small = torch.nn.functional.interpolate(
        torch.tensor(image)[None], size, mode="bilinear", antialias=True, align_corners=False
    )
    out = np.full((1, 3, SIDE, SIDE), padding, np.float64)
    out[:, :, : size[0], : size[1]] = small.numpy()
    return out, size[0] / h


def best(faces):
    box, score, points = max(faces, key=lambda f: f[1])
    return {"box": list(map(float, box)), "score": float(score), "landmarks": points.tolist()}


def scrfd(network, image):
    x, scale = canvas(image, 0.0)
    out = run(network, x)
    faces = []
    for stride in (8, 16, 32):
        scores, boxes, points = (out[f"{k}_{stride}"].reshape(-1, n) for k, n in (("score", 1), ("bbox", 4), ("kps", 10)))
        i = int(scores.argmax())
        n = SIDE // stride
        at = np.array([i // 2 % n, i // 2 // n]) * stride
        box = np.concatenate([at - boxes[i, :2] * stride, at + boxes[i, 2:] * stride]) / scale
        faces.append((box, scores[i, 0], (points[i].reshape(5, 2) * stride + at) / scale))
    return best(faces)


def yunet(network, image):
    x, scale = canvas(image, 0.0)
    out = run(network, (x[:, ::-1] + 1) * 127.5)
    faces = []
    for stride in (8, 16, 32):
        scores = np.sqrt(out[f"cls_{stride}"].clip(0, 1) * out[f"obj_{stride}"].clip(0, 1)).reshape(-1)
        boxes, points = out[f"bbox_{stride}"].reshape(-1, 4), out[f"kps_{stride}"].reshape(-1, 5, 2)
        i = int(scores.argmax())
        n = SIDE // stride
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
    fx, fy = (torch.tensor(f) if torch.is_tensor(image) else f for f in (fx, fy))
    inside = lambda y, x: torch.tensor(within(y, x)) if torch.is_tensor(image) else within(y, x)
    within = lambda y, x: ((y >= 0) & (y < h) & (x >= 0) & (x < w)).astype(np.float64)
    at = lambda y, x: image[:, y.clip(0, h - 1), x.clip(0, w - 1)] * inside(y, x)
    out = (at(y0, x0) * (1 - fx) + at(y0, x0 + 1) * fx) * (1 - fy) + (at(y0 + 1, x0) * (1 - fx) + at(y0 + 1, x0 + 1) * fx) * fy
    return out.reshape(3, 112, 112)


def embedding(network, face):
    values = run(network, face[None])["output"][0].astype(np.float64)
    return {"norm": float(np.linalg.norm(values)), "head": values[:16].tolist(), "sum": float(values.sum())}


def embed64(path, x):
    """The embedder in float64, by walking its graph; only what that one file uses."""
    graph = onnx.load(path).graph
    values = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in graph.initializer}
    values = {k: v.double() if v.is_floating_point() else v for k, v in values.items()}
    values[next(i.name for i in graph.input if i.name not in values)] = x[None]
    for node in graph.node:
        args = [values[i] for i in node.input]
        a = {p.name: onnx.helper.get_attribute_value(p) for p in node.attribute}
        if node.op_type == "Conv":
            p = a.get("pads", [0, 0, 0, 0])
            padded = torch.nn.functional.pad(args[0], (p[1], p[3], p[0], p[2]))
            out = torch.nn.functional.conv2d(
                padded, *args[1:], stride=a.get("strides", 1), dilation=a.get("dilations", 1), groups=a.get("group", 1)
            )
        elif node.op_type == "PRelu":
            out = torch.where(args[0] >= 0, args[0], args[0] * args[1])
        elif node.op_type == "Add":
            out = args[0] + args[1]
        elif node.op_type == "Reshape":
            out = args[0].reshape(args[1].tolist())
        else:
            raise ValueError(node.op_type)
        values[node.output[0]] = out
    return values[graph.output[0].name][0]


def direction(k, shape):
    """White noise in [-0.5, 0.5), the same in face_reward.rs."""
    x = np.sin(np.arange(np.prod(shape)) * 12.9898 + k * 78.233) * 43758.5453
    return (x - np.floor(x) - 0.5).reshape(shape)


def slopes(root, image, points):
    """Central differences, in float64, of cosine(embedding, reference), reference[i] = sin(i), along each direction."""
    path = f"{root}/models/arcface_mobile_512.onnx"
    # As a detector gives them: digits beyond float32 would move some PReLU past its kink, and slopes by a percent.
    points = np.asarray(points, np.float32).astype(np.float64)
    reference = torch.sin(torch.arange(512, dtype=torch.float64))
    score = lambda picture: torch.cosine_similarity(embed64(path, crop(picture, points)), reference, dim=0)
    picture = torch.tensor(image, requires_grad=True)
    value = score(picture)
    value.backward()
    along, step = [], 1e-7
    for k in range(8):
        d = torch.tensor(direction(k, image.shape))
        with torch.no_grad():
            numeric = (score(picture + step * d) - score(picture - step * d)).item() / (2 * step)
        print(f"differences {numeric:+.8f}, autograd {(picture.grad * d).sum().item():+.8f}", file=sys.stderr)
        along.append(numeric)
    return {"score": value.item(), "along": along}


def main(root):
    image = np.asarray(Image.open(f"{root}/media/astronaut.png").convert("RGB")).astype(np.float64)
    image = image.transpose(2, 0, 1) / 127.5 - 1
    found = scrfd(session(root, "scrfd_2.5g_bnkps.onnx"), image)
    arcface = session(root, "arcface_mobile_512.onnx")
    face = crop(image, found["landmarks"])
    golden = {
        "scrfd": found,
        "yunet": yunet(session(root, "yunet_s_dynamic.onnx"), image),
        "crop": {"mean": float(face.mean()), "centre": face[:, 56, 56].tolist()},
        "embedding_rgb": embedding(arcface, face),
        "embedding_bgr": embedding(arcface, face[::-1]),
        "slopes": slopes(root, image, found["landmarks"]),
    }
    json.dump(golden, sys.stdout, indent=1)
    print()


main(sys.argv[1])
