"""An environment with texts and pictures, as `env.name: process` asks for it: one JSON object a line."""

import base64
import inspect
import io
import json
import struct
import sys
import traceback
import zlib

from .reward import explained
from .serve import claim_stdout


def environment(make, instructions=None, text=str, action=str, invalid=-0.2, pictures=None):
    """Answers resets and steps until roll is done.

    `make` is a gymnasium environment, or a function that makes one: `reset(seed=)` gives an observation and a dict,
    `step(action)` an observation, reward, terminated, truncated and a dict, of which `valid`, `solved` and `action` are
    read. If `reset` has a parameter `split`, it gets "train" or "validation"; if `number`, the number of the group of
    episodes, to play rows in their order.
    `text` makes text of an observation, `pictures` a list of pictures (uint8 arrays [height, width, 3], pictures of PIL,
    or bytes of a PNG), which are shown before the text, or where it has U+FFFC; `action` an action of the agent's answer;
    a `ValueError` in it is an answer that was not understood: it costs a turn, and its reward is `invalid`, which must be
    below that of the worst step of the world, or the agent learns to say nothing. `instructions` are shown before the
    first observation.
    """
    out = claim_stdout()
    world = None
    last = {"observation": ""}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if world is None:
                world = make() if callable(make) else make
            if "reset" in request:
                start = {"seed": request["reset"]["seed"] % 2**31}
                parameters = inspect.signature(world.reset).parameters
                given = {"split": "train", "number": 0} | request["reset"]
                start |= {key: given[key] for key in ("split", "number") if key in parameters}
                observation, _ = world.reset(**start)
                last = _seen(observation, text, pictures)
                answer = dict(last)
                if instructions is not None:
                    answer["instructions"] = instructions
            else:
                answer, last = _step(world, request["step"]["action"], text, pictures, action, last, invalid)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": explained(error)}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _seen(observation, text, pictures):
    """The keys of an answer with the observation."""
    seen = {"observation": text(observation)}
    if pictures is not None:
        seen["pictures"] = [base64.b64encode(_png(picture)).decode() for picture in pictures(observation)]
    return seen


def _png(picture):
    """The picture as a PNG."""
    if isinstance(picture, (bytes, bytearray)):
        return bytes(picture)
    if hasattr(picture, "save"):
        file = io.BytesIO()
        picture.save(file, "png")
        return file.getvalue()
    shape = tuple(getattr(picture, "shape", ()))
    if len(shape) != 3 or shape[2] != 3 or str(picture.dtype) != "uint8":
        raise TypeError(f"a picture must be uint8 [height, width, 3], found {getattr(picture, 'dtype', type(picture))} {shape}")
    height, width, _ = shape
    pixels = picture.tobytes()
    # Filter 0 begins each row.
    rows = b"".join(b"\0" + pixels[i : i + width * 3] for i in range(0, len(pixels), width * 3))

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _step(world, said, text, pictures, action, last, invalid):
    """The answer, and what the world looks like now."""
    try:
        taken = action(said)
    except ValueError as error:
        observation = f"{error}\n{last['observation']}".strip()
        repeated = last | {"observation": observation}
        return repeated | {"reward": float(invalid), "terminated": False, "valid": False}, last
    observation, reward, terminated, truncated, info = world.step(taken)
    seen = _seen(observation, text, pictures)
    answer = {
        **seen,
        "reward": float(reward),
        "terminated": bool(terminated),
        "truncated": bool(truncated),
        "valid": bool(info.get("valid", True)),
    }
    if "solved" in info:
        answer["solved"] = bool(info["solved"])
    if "action" in info:
        answer["action"] = str(info["action"])
    return answer, seen
