#!/usr/bin/env python3
"""A reward as a service: minus the squared distance of the mean value from a level. Standard library only.

    python3 examples/reward_http/brightness.py 8080
    roll score clip.mp4 --reward http --set reward.url=http://127.0.0.1:8080

Every request is one frame and every answer another: b"ROLL", length of the header (u32, little-endian), the header
(JSON), the bytes of the tensors that the header lists. See roll-rewards/scorers/src/remote/mod.rs for the calls. A service that
is busy answers 503 with Retry-After, and is asked again.
"""

import array
import json
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CODES = {"f32": "f", "i32": "i", "i64": "q", "u8": "B", "bool": "B"}


def unpack(data):
    magic, length = struct.unpack_from("<4sI", data)
    assert magic == b"ROLL", magic
    header, at, tensors = json.loads(data[8 : 8 + length]), 8 + length, {}
    for listed in header.pop("tensors"):
        values = array.array(CODES[listed["dtype"]])
        count = 1
        for axis in listed["shape"]:
            count *= axis
        size = count * values.itemsize
        values.frombytes(data[at : at + size])
        at += size
        tensors[listed["name"]] = (values, listed["shape"])
    return header, tensors


def pack(body, tensors=()):
    body["tensors"] = [{"name": n, "dtype": "f32", "shape": shape} for n, _, shape in tensors]
    header = json.dumps(body).encode()
    return struct.pack("<4sI", b"ROLL", len(header)) + header + b"".join(v.tobytes() for _, v, _ in tensors)


def answer(header, tensors):
    call, level = header["call"], float(header["options"].get("level", 0.0))
    if call == "hello":
        return pack({"name": "served_brightness", "differentiable": True})
    if call == "prepare":
        return pack({})
    if call == "score":
        frames, shape = tensors["frames"]
        mean = sum(frames) / len(frames)
        body = {"score": -((mean - level) ** 2), "details": {"mean": mean}}
        if not header["record"]:
            return pack(body)
        slope = -2.0 * (mean - level) / len(frames)
        return pack(body, [("gradient", array.array("f", [slope]) * len(frames), shape)])
    return pack({"error": f"the call {call} is not known"})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = answer(*unpack(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
