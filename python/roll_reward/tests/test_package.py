"""The package beside a caller that speaks roll's frames: the standard library is enough, NumPy and PyTorch are used where
they are. `python3 -m unittest discover -s python/roll_reward/tests`."""

import array
import base64
import http.client
import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys
import textwrap
import threading
import unittest
import zlib

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src"
sys.path.insert(0, str(SOURCE))

import roll_reward
from roll_reward import frame

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_NUMPY = importlib.util.find_spec("numpy") is not None


def frames(count=2, size=4, seed=0):
    values = [((i * 37 + seed) % 101) / 101 - 0.4 for i in range(count * 3 * size * size)]
    return roll_reward.Array(array.array("f", values), "f32", [count, 3, size, size])


class Program:
    """A script of `body`, asked as roll asks it."""

    def __init__(self, body, *arguments, shared=False):
        script = "import sys\nsys.path.insert(0, %r)\nimport roll_reward\n%s" % (str(SOURCE), textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "ROLL_ANSWERS_ON_STDOUT": "1"},
        )
        self.shared, self.file, self.regions = shared, None, 0

    def ask(self, header, tensors=()):
        pieces = None
        if self.shared and tensors:
            self.forget()
            self.file, self.regions = open(os.memfd_create("roll"), "r+b", buffering=0), self.regions + 1
            size = sum(len(t.data) + 64 for _, t in tensors)
            data = bytearray(size)
            region = {"path": f"/proc/{os.getpid()}/fd/{self.file.fileno()}", "bytes": size, "id": self.regions}
            pieces = frame.pieces({**header, "shared": region}, tensors, memoryview(data))
            self.file.seek(0)
            self.file.write(data)
        for piece in pieces or frame.pieces(header, tensors):
            self.process.stdin.write(piece)
        self.process.stdin.flush()

        def shared(_):
            self.file.seek(0)
            return memoryview(self.file.read())

        return frame.read(self.process.stdout.read, shared)

    def close(self):
        self.process.stdin.close()
        said = self.process.stderr.read().decode()
        self.process.stdout.close()
        self.process.stderr.close()
        self.process.wait(30)
        self.forget()
        return said

    def forget(self):
        if self.file:
            self.file.close()


HELLO = {"call": "hello", "version": 1, "options": {"level": 0.5}}
SCORE = {"call": "score", "fps": 8.0, "prompt": "a cat", "record": True}

BY_HAND = """
print("this is no frame either")
@roll_reward.reward(differentiable=True, prepare=lambda frames: {"mean": [0.25]})
def brightness(frames, prompt, options, reference):
    print("this is no frame")
    values = memoryview(frames).cast("B").cast("f") if hasattr(frames, "__array__") else frames.values
    mean = sum(values) / len(values)
    slope = 2 * (options["level"] - mean) / len(values)
    wanted = float((reference["mean"] if hasattr(reference["mean"], "shape") and hasattr(reference["mean"], "__array__") else reference["mean"].values)[0])
    return roll_reward.Score(-(mean - options["level"]) ** 2, {"mean": mean, "wanted": wanted, "odd": float("nan")}, [slope] * len(values))
roll_reward.serve(brightness)
"""


class Programs(unittest.TestCase):
    def test_a_score_by_hand_with_details_gradient_target_and_options(self):
        for shared in [False, True]:
            program = Program(BY_HAND, shared=shared)
            hello, _ = program.ask(HELLO)
            self.assertEqual((hello["name"], hello["differentiable"], hello["shared"]), ("brightness", True, True))
            _, target = program.ask({"call": "prepare", "fps": 8.0}, [("frames", frames())])
            self.assertEqual(list(target["mean"].values), [0.25])
            answer, tensors = program.ask(SCORE, [("frames", frames()), ("target/mean", target["mean"])])
            mean = sum(frames().values) / len(frames())
            self.assertAlmostEqual(answer["score"], -((mean - 0.5) ** 2), 5)
            self.assertEqual(set(answer["details"]), {"mean", "wanted"})
            self.assertEqual(tensors["gradient"].shape, [2, 3, 4, 4])
            self.assertAlmostEqual(tensors["gradient"].values[7], 2 * (0.5 - mean) / len(frames()), 5)
            self.assertIn("this is no frame either", program.close())

    def test_a_score_without_a_reference_says_that_it_reads_none(self):
        for parameters, expected in [("frames, prompt", False), ("frames, reference", True), ("**all", True)]:
            program = Program(f"roll_reward.serve(lambda {parameters}: 1.0)")
            self.assertEqual(program.ask(HELLO)[0]["reads_reference"], expected, parameters)
            program.close()

    def test_a_score_may_read_the_other_columns_of_the_row(self):
        program = Program("roll_reward.serve(lambda frames, columns: len(columns.get('objects', [])))")
        program.ask(HELLO)
        for columns, expected in [({"columns": {"objects": ["a", "b"]}}, 2.0), ({}, 0.0)]:
            answer, _ = program.ask({**SCORE, "record": False, **columns}, [("frames", frames())])
            self.assertEqual(answer["score"], expected)
        program.close()

    def test_nothing_to_score_and_nothing_to_compare_with(self):
        body = """
        prepare = lambda frames: roll_reward.Missing("nobody")
        roll_reward.serve(roll_reward.reward(lambda frames: None, prepare=prepare))
        """
        program = Program(body)
        program.ask(HELLO)
        prepared, _ = program.ask({"call": "prepare", "fps": 8.0}, [("frames", frames())])
        self.assertEqual((prepared["target"], prepared["reason"]), (None, "nobody"))
        answer, tensors = program.ask(SCORE, [("frames", frames())])
        self.assertEqual((answer["score"], tensors), (None, {}))
        program.close()

    def test_an_exception_is_an_error_with_its_place_and_the_traceback_is_logged(self):
        program = Program("def broken(frames):\n    return {}['weights']\nroll_reward.serve(broken)\n")
        program.ask(HELLO)
        answer, _ = program.ask(SCORE, [("frames", frames())])
        self.assertIn("KeyError: 'weights'", answer["error"])
        self.assertIn("in broken", answer["error"])
        answer, _ = program.ask({"call": "dance"})
        self.assertIn("'dance' is not known", answer["error"])
        self.assertIn("Traceback", program.close())

    def test_wrong_values_are_errors(self):
        for value, part in [("'high'", "could not convert"), ("roll_reward.Score(1.0)", "a gradient is wanted")]:
            program = Program(f"roll_reward.serve(roll_reward.reward(lambda frames: {value}, differentiable=True))")
            program.ask(HELLO)
            answer, _ = program.ask(SCORE, [("frames", frames())])
            self.assertIn(part, answer["error"])
            program.close()

    def test_a_score_that_is_not_finite_is_its_name(self):
        for value in ["NaN", "Infinity", "-Infinity"]:
            function = f"lambda frames: (float('{value}'), {{'a': float('{value}'), 'b': 2}})"
            for differentiable in [False, True]:
                reward = f"roll_reward.reward({function}, differentiable={differentiable})"
                program = Program(f"roll_reward.serve({reward})")
                program.ask(HELLO)
                answer, tensors = program.ask(SCORE, [("frames", frames())])
                self.assertEqual((answer["score"], tensors), (value, {}))
                program.close()

    def test_what_is_no_frame_ends_the_program(self):
        program = Program("roll_reward.serve(lambda frames: 1.0)")
        program.process.stdin.write(b"GET / HTTP/1.1\r\n\r\n")
        self.assertIn("where a frame should begin", program.close())
        self.assertNotEqual(program.process.returncode, 0)

    def test_an_unknown_parameter_is_told_at_once(self):
        with self.assertRaisesRegex(TypeError, "takes `video`; a score may take frames"):
            roll_reward.reward(lambda video: 1.0)

    @unittest.skipUnless(HAS_TORCH, "PyTorch is not installed")
    def test_autograd_gives_the_gradient(self):
        body = """
        @roll_reward.differentiable
        def score(frames, prompt, reference):
            return -(frames.mean() - 0.2) ** 2 + 0 * reference.mean(), {"length": len(prompt)}
        roll_reward.serve(score)
        """
        for shared in [False, True]:
            program = Program(body, shared=shared)
            program.ask(HELLO)
            _, target = program.ask({"call": "prepare", "fps": 8.0}, [("frames", frames())])
            answer, tensors = program.ask(SCORE, [("frames", frames(seed=5)), ("target/reference", target["reference"])])
            values = frames(seed=5).values
            mean = sum(values) / len(values)
            self.assertAlmostEqual(answer["score"], -((mean - 0.2) ** 2), 5)
            self.assertEqual(answer["details"], {"length": 5.0})
            self.assertAlmostEqual(tensors["gradient"].values[3], -2 * (mean - 0.2) / len(values), 6)
            program.close()
        program = Program("roll_reward.serve(roll_reward.differentiable(lambda frames: frames.mean().item()))")
        program.ask(HELLO)
        self.assertIn("has no gradient", program.ask(SCORE, [("frames", frames())])[0]["error"])
        program.close()

    @unittest.skipUnless(HAS_NUMPY, "NumPy is not installed")
    def test_numpy_arrays_come_and_go(self):
        body = """
        import numpy
        def score(frames, prompt):
            assert isinstance(frames, numpy.ndarray) and frames.shape == (2, 3, 4, 4)
            return roll_reward.Score(frames.mean(), gradient=numpy.full_like(frames, 1 / frames.size))
        roll_reward.serve(roll_reward.reward(score, differentiable=True))
        """
        program = Program(body)
        program.ask(HELLO)
        answer, tensors = program.ask(SCORE, [("frames", frames())])
        self.assertAlmostEqual(answer["score"], sum(frames().values) / 96, 5)
        self.assertAlmostEqual(tensors["gradient"].values[5], 1 / 96, 6)
        program.close()


class Services(unittest.TestCase):
    def post(self, port, header, tensors=(), token=None, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = b"".join(bytes(p) for p in frame.pieces(header, tensors)) if body is None else body
        connection.request("POST", "/", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.status != 200:
            return answer.status, data.decode()
        view = memoryview(data)

        def take(count):
            nonlocal view
            piece, view = view[:count], view[count:]
            return piece

        return answer.status, frame.read(take)

    def service(self, body, environment=None):
        script = "import sys\nsys.path.insert(0, %r)\nimport roll_reward\n%s" % (str(SOURCE), textwrap.dedent(body))
        process = subprocess.Popen(
            [sys.executable, "-c", script, "--http", "0", *(["--token-env", "TOKEN"] if environment else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return json.loads(process.stdout.readline())["port"]

    def test_a_service_wants_its_token_and_tells_what_is_no_frame(self):
        port = self.service("roll_reward.serve(lambda frames, options: options['x'])", {"TOKEN": "secret"})
        score = {**SCORE, "options": {"x": 3}}
        self.assertEqual(self.post(port, score, [("frames", frames())])[0], 401)
        self.assertEqual(self.post(port, score, [("frames", frames())], token="wrong")[0], 401)
        status, (answer, _) = self.post(port, score, [("frames", frames())], token="secret")
        self.assertEqual((status, answer["score"]), (200, 3.0))
        for nonsense in [b"", b"hello", b"ROLL\xff\xff\xff\xff", b"ROLL\x02\0\0\0[]", b"ROLL" + struct.pack("<I", 60) + b"{}"]:
            self.assertEqual(self.post(port, {}, token="secret", body=nonsense)[0], 400)

    def test_calls_that_come_together_are_answered_together(self):
        body = """
        def score(frames, prompt):
            return [len(prompt) + 0.001 * len(p) for p in prompt]
        roll_reward.serve(score, batch=4, wait=0.5)
        """
        port, answers = self.service(body), [None] * 4

        def ask(i):
            answers[i] = self.post(port, {**SCORE, "options": {}, "prompt": "x" * i}, [("frames", frames(seed=i))])[1][0]["score"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        for i, answer in enumerate(answers):
            # Each has its own answer; some were answered together.
            self.assertAlmostEqual(answer % 1, 0.001 * i, 6)
        self.assertGreater(max(answers), 2)


class Environments(unittest.TestCase):
    def test_an_environment_with_text_answers_lines(self):
        body = """
        class Count:
            def reset(self, seed=None):
                self.left = seed % 3 + 1
                return self.left, {}
            def step(self, action):
                self.left -= action
                if action > 5:
                    raise RuntimeError("too far")
                return self.left, 1.0 if self.left == 0 else 0.0, self.left <= 0, False, {"solved": self.left == 0}
        roll_reward.environment(Count, instructions="Count down.", text=lambda n: f"{n} left", action=int)
        """
        script = "import sys\nsys.path.insert(0, %r)\nimport roll_reward\n%s" % (str(SOURCE), textwrap.dedent(body))
        requests = [{"reset": {"seed": 4}}, *({"step": {"action": a}} for a in ["one", "two", "1", "1", "9"])]
        done = subprocess.run(
            [sys.executable, "-c", script], input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, timeout=30
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(answers[0], {"observation": "2 left", "instructions": "Count down."})
        self.assertEqual((answers[1]["valid"], answers[1]["reward"]), (False, -0.2))
        # What was not understood is told once, and not again with the next.
        self.assertEqual([a["observation"].count("\n2 left") for a in answers[1:3]], [1, 1])
        self.assertEqual([a["observation"].count("invalid literal") for a in answers[1:3]], [1, 1])
        self.assertEqual((answers[3]["observation"], answers[3]["terminated"]), ("1 left", False))
        self.assertEqual((answers[4]["reward"], answers[4]["terminated"], answers[4]["solved"]), (1.0, True, True))
        self.assertIn("RuntimeError: too far", answers[5]["error"])
        self.assertIn("Traceback", done.stderr)

    def test_pictures_are_sent_as_png(self):
        body = """
        class Pixels:
            shape, dtype = (1, 2, 3), "uint8"
            def tobytes(self):
                return bytes(range(6))
        class Shows:
            def reset(self, seed=None):
                return Pixels(), {}
            def step(self, action):
                return Pixels(), 1.0, False, False, {}
        def action(said):
            if said == "?":
                raise ValueError("what?")
            return said
        roll_reward.environment(Shows, text=lambda pixels: "look", pictures=lambda pixels: [pixels, b"as it is"], action=action)
        """
        script = "import sys\nsys.path.insert(0, %r)\nimport roll_reward\n%s" % (str(SOURCE), textwrap.dedent(body))
        requests = [{"reset": {"seed": 1}}, {"step": {"action": "on"}}, {"step": {"action": "?"}}]
        done = subprocess.run(
            [sys.executable, "-c", script], input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, timeout=30
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([answer["observation"] for answer in answers], ["look", "look", "what?\nlook"])
        for answer in answers:
            png, raw = (base64.b64decode(picture) for picture in answer["pictures"])
            self.assertEqual(raw, b"as it is")
            self.assertTrue(png.startswith(b"\x89PNG\r\n\x1a\n") and png.endswith(b"IEND\xaeB`\x82"))
            length = struct.unpack(">I", png[33:37])[0]
            self.assertEqual(zlib.decompress(png[41 : 41 + length]), b"\0" + bytes(range(6)))

    def test_a_reset_gets_its_split_and_number_and_an_action_is_passed_on(self):
        body = """
        class Rows:
            def reset(self, seed=None, split=None, number=None):
                return f"{split} {number} {seed}", {}
            def step(self, action):
                return "done", 1.0, True, False, {"action": action.upper()}
        roll_reward.environment(Rows)
        """
        script = "import sys\nsys.path.insert(0, %r)\nimport roll_reward\n%s" % (str(SOURCE), textwrap.dedent(body))
        requests = [{"reset": {"seed": 2**31 + 4, "split": "validation", "number": 12}}, {"step": {"action": "left"}}]
        done = subprocess.run(
            [sys.executable, "-c", script], input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, timeout=30
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual((answers[0]["observation"], answers[1]["action"]), ("validation 12 4", "LEFT"))


if __name__ == "__main__":
    unittest.main()
