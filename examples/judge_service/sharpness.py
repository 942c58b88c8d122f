#!/usr/bin/env python3
"""A judge without a model, to try the reward `judge` with: the sharper the pictures, the more probable is "Yes".
Standard library only.

    python3 examples/judge_service/sharpness.py 8199 &
    roll rewards try judge clip.mp4 --set reward.url=http://127.0.0.1:8199/v1 --set reward.model=sharpness \\
        --set 'reward.questions=[Is the video sharp?]'

It answers POST /v1/chat/completions with the fields of OpenAI's API that the reward reads: the text, and the
log-probabilities of the first token.
"""

import base64
import json
import math
import struct
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def rows(png):
    """The rows of a PNG in 8-bit RGB without interlacing, each as bytes."""
    at, compressed = 8, b""
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        data = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, *form = struct.unpack(">IIBBBBB", data)
            assert form == [8, 2, 0, 0, 0], form
        elif kind == b"IDAT":
            compressed += data
        at += length + 12
    filtered, stride, above = zlib.decompress(compressed), 3 * width, bytes(3 * width)
    for start in range(0, len(filtered), stride + 1):
        kind, row = filtered[start], bytearray(filtered[start + 1 : start + 1 + stride])
        for i in range(stride):
            left, up, corner = (row[i - 3], above[i], above[i - 3]) if i >= 3 else (0, above[i], 0)
            near = min((abs(up - corner), 0, left), (abs(left - corner), 1, up), (abs(left + up - 2 * corner), 2, corner))
            row[i] = (row[i] + (0, left, up, (left + up) // 2, near[2])[kind]) & 255
        above = row
        yield row


def sharpness(png):
    """The mean difference of neighbouring pixels in green, 0 to 255."""
    differences = [abs(row[i] - row[i - 3]) for row in rows(png) for i in range(4, len(row), 3)]
    return sum(differences) / max(len(differences), 1)


def answer(request):
    parts = request["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    amount = sum(sharpness(base64.b64decode(url.split(",")[1])) for url in urls) / len(urls)
    yes = (amount + 0.01) / (amount + 8.0)
    choice = {"index": 0, "message": {"role": "assistant", "content": "Yes" if yes > 0.5 else "No"}}
    if request.get("logprobs"):
        top = [{"token": "Yes", "logprob": math.log(yes)}, {"token": "No", "logprob": math.log(1.0 - yes)}]
        top.sort(key=lambda token: -token["logprob"])
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    return {"object": "chat.completion", "model": request["model"], "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.dumps(answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
