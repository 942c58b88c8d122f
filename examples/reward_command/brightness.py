#!/usr/bin/env python3
"""A reward in Python: minus the squared distance of the mean value from a level. Standard library only.

    roll score clip.mp4 --reward command --set 'reward.command=[python3, examples/reward_command/brightness.py]'

The program reads frames from its standard input and answers each on its standard output; whatever it wants to say to
people goes to standard error. A frame: b"ROLL", length of the header (u32, little-endian), the header (JSON), the bytes
of the tensors that the header lists. See roll-rewards/scorers/src/remote/mod.rs for the calls.
"""

import array
import json
import struct
import sys

CODES = {"f32": "f", "i32": "i", "i64": "q", "u8": "B", "bool": "B"}


def read():
    start = sys.stdin.buffer.read(8)
    if len(start) < 8:
        sys.exit(0)  # roll closed the pipe: there is nothing more to do
    magic, length = struct.unpack("<4sI", start)
    assert magic == b"ROLL", magic
    header = json.loads(sys.stdin.buffer.read(length))
    tensors = {}
    for listed in header.pop("tensors"):
        values = array.array(CODES[listed["dtype"]])
        count = 1
        for axis in listed["shape"]:
            count *= axis
        values.frombytes(sys.stdin.buffer.read(count * values.itemsize))
        tensors[listed["name"]] = (values, listed["shape"])
    return header, tensors


def answer(body, tensors=()):
    body["tensors"] = [{"name": n, "dtype": "f32", "shape": shape} for n, _, shape in tensors]
    header = json.dumps(body).encode()
    out = sys.stdout.buffer
    out.write(struct.pack("<4sI", b"ROLL", len(header)) + header)
    for _, values, _ in tensors:
        out.write(values.tobytes())
    out.flush()


def main():
    level = 0.0
    while True:
        header, tensors = read()
        call = header["call"]
        if call == "hello":
            level = float(header["options"].get("level", 0.0))
            answer({"name": "python_brightness", "differentiable": True})
        elif call == "prepare":
            frames, _ = tensors["frames"]
            mean = sum(frames) / len(frames)
            answer({}, [("mean", array.array("f", [mean]), [1])])
        elif call == "score":
            frames, shape = tensors["frames"]
            mean = sum(frames) / len(frames)
            body = {"score": -((mean - level) ** 2), "details": {"mean": mean}}
            if header["record"]:
                slope = -2.0 * (mean - level) / len(frames)
                answer(body, [("gradient", array.array("f", [slope]) * len(frames), shape)])
            else:
                answer(body)
        else:
            answer({"error": f"the call {call} is not known"})


main()
