"""Answers roll's calls: on standard input and output, or over HTTP."""

import argparse
import hmac
import json
import mmap
import os
import queue
import sys
import threading
import traceback

from . import frame
from .reward import Reward, explained


def serve(score, *, prepare=None, name=None, http=None, host="127.0.0.1", token=None, devices=None, batch=1, wait=0.01):
    """Answers calls until roll is done (a program), or for ever (a service).

    A program is what `reward.name: command` starts; `python score.py --http 8000` makes a service of it, for
    `reward.name: http`. `host` is the address that it listens on, `token` what a caller must know (`reward.token_env`).
    `devices`, ["cuda:0", "cuda:1"], gives each a thread of a service; a program uses the first. With `batch` above 1 a
    service answers up to so many calls at once that came within `wait` seconds and whose frames have one shape: the score
    takes a batch of frames [N, T, 3, H, W], lists of prompts and references, and returns N scores.
    """
    reward = score if isinstance(score, Reward) else Reward(score, prepare, name)
    reward.together = batch > 1
    arguments = argparse.ArgumentParser(description=f"The reward {reward.name} for roll.")
    arguments.add_argument("--http", type=int, default=http, metavar="PORT", help="serve over HTTP instead of standard input")
    arguments.add_argument("--host", default=host, help="address to listen on")
    arguments.add_argument("--token-env", metavar="NAME", help="environment variable with the token that callers must send")
    arguments, _ = arguments.parse_known_args()
    if arguments.token_env:
        token = os.environ.get(arguments.token_env)
        if not token:
            sys.exit(f"the environment variable {arguments.token_env} holds no token")
    if reward.torch:
        # It takes seconds: now, not in the first call.
        import torch  # noqa: F401
    devices = list(devices or [None])
    if arguments.http is None:
        _program(reward, devices[0])
    else:
        _service(reward, arguments.host, arguments.http, token, devices, batch, wait)


class Answering:
    """Answers calls of one reward on one device."""

    def __init__(self, reward, device=None):
        self.reward, self.device, self.options = reward, device, {}

    def answers(self, calls):
        """A body and tensors for each call; an exception becomes an `error`, its traceback goes to standard error."""
        try:
            return self._answers(calls)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            return [({"error": explained(error)}, []) for _ in calls]

    def _answers(self, calls):
        for header, _ in calls:
            header.setdefault("options", self.options)
        call = calls[0][0].get("call")
        if call == "score":
            return self.reward.score(calls, self.device)
        return [self._answer(header, tensors) for header, tensors in calls]

    def _answer(self, header, tensors):
        call = header.get("call")
        if call == "hello":
            self.options = header["options"]
            reward = self.reward
            hello = {"name": reward.name, "differentiable": reward.differentiable, "shared": True}
            return {**hello, "reads_reference": reward.reads_reference}, []
        if call == "prepare":
            return self.reward.prepare(header, tensors, self.device)
        raise ValueError(f"the call {call!r} is not known to this version of roll_reward")


def claim_stdout():
    """The real standard output, for frames; `print` and C libraries write to standard error from now on."""
    return _claimed or _claim()


def _claim():
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # What was printed before goes to standard error too.
    sys.stdout.flush()
    sys.stdout = sys.stderr
    return out


# roll sets this where it reads answers: `print` between the import and `serve` must not be among them.
_claimed = _claim() if os.environ.pop("ROLL_ANSWERS_ON_STDOUT", None) else None


def _program(reward, device):
    out, answering, mapped = claim_stdout(), Answering(reward, device), {}

    def take(count):
        view, got = frame.buffer(count), 0
        while got < count:
            read = os.readv(0, [view[got:]])
            if read == 0:
                break
            got += read
        return view[:got]

    def shared(header):
        """The file that roll has mapped too: requests lie in it, and answers are written over them."""
        path, size, number = (header["shared"][key] for key in ("path", "bytes", "id"))
        if mapped.get("id") != number:
            with open(path, "r+b") as file:
                # In another namespace of processes the path is somebody else's.
                if not os.readlink(f"/proc/self/fd/{file.fileno()}").startswith("/memfd:roll") or os.fstat(file.fileno()).st_size != size:
                    raise frame.FrameError(f"{path} is no memory of roll's")
                mapped.update(id=number, map=mmap.mmap(file.fileno(), size))
        return memoryview(mapped["map"])

    _widen(0, out.fileno())
    while True:
        call = frame.read(take, shared)
        if call is None:
            return
        (body, tensors), = answering.answers([call])
        region = shared(call[0]) if "shared" in call[0] else None
        for piece in frame.pieces(body, tensors, region):
            out.write(piece)
        out.flush()


def _widen(*pipes):
    """A frame of video goes through in hundreds of turns instead of thousands."""
    import fcntl

    for pipe in pipes:
        try:
            fcntl.fcntl(pipe, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)
        except OSError:
            pass  # No pipe, or no Linux.


def _service(reward, host, port, token, devices, batch, wait):
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    waiting = queue.Queue(maxsize=64)

    def work(device):
        answering, held = Answering(reward, device), None
        while True:
            first = held or waiting.get()
            held, together = None, [first]
            # Those that wait already, or come within a moment, and look like the first.
            while len(together) < batch and first.kind is not None:
                try:
                    following = waiting.get(timeout=wait)
                except queue.Empty:
                    break
                if following.kind != first.kind:
                    held = following
                    break
                together.append(following)
            for asked, answer in zip(together, answering.answers([a.call for a in together])):
                asked.answer = answer
                asked.done.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > 1 << 32:
                return self.refuse(411, "a Content-Length of at most 4 GiB is needed")
            if token is not None:
                sent = self.headers.get("Authorization", "")
                if not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
                    self.close_connection = True
                    return self.refuse(401, "the token is missing or wrong")
            left = int(length)

            def take(count):
                nonlocal left
                data = self.rfile.read(min(count, left))
                left -= len(data)
                return data

            try:
                call = frame.read(take)
                if call is None:
                    raise frame.FrameError("an empty body")
            except frame.FrameError as error:
                self.close_connection = True
                return self.refuse(400, str(error))
            asked = Asked(call)
            try:
                waiting.put(asked, timeout=1)
            except queue.Full:
                return self.refuse(503, "busy", {"Retry-After": "1"})
            asked.done.wait()
            pieces = frame.pieces(*asked.answer)
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(sum(len(memoryview(p).cast("B")) for p in pieces)))
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)

        def refuse(self, status, why, headers={}):
            body = why.encode()
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    for device in devices:
        threading.Thread(target=work, args=(device,), daemon=True).start()
    server = ThreadingHTTPServer((host, port), Handler)
    print(f"{reward.name}: listening on http://{host}:{server.server_port}", file=sys.stderr, flush=True)
    print(json.dumps({"port": server.server_port}), flush=True)
    server.serve_forever()


class Asked:
    """A call that waits for its answer."""

    def __init__(self, call):
        header, tensors = call
        self.call, self.done, self.answer = call, threading.Event(), None
        #: Calls of one kind may be answered together.
        self.kind = None
        if header.get("call") == "score" and "frames" in tensors:
            self.kind = (tuple(tensors["frames"].shape), json.dumps(header.get("options"), sort_keys=True))
