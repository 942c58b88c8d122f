"""Counts what a rollout over HTTP costs: connections, seconds of a turn, and seconds from Ctrl-C to the end.

    python3 bench/environments.py --roll target/release/roll --environments 64 --delay 0.5

Each request to the service takes `--delay` seconds, and each episode `--turns` turns of the built-in model. A turn of all
environments at the same time takes the delay and what the model writes meanwhile; one after another they would take
`environments` times as long.
"""

import argparse
import collections
import http.server
import json
import pathlib
import signal
import subprocess
import tempfile
import threading
import time


class Service(http.server.ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, delay, turns):
        super().__init__(("127.0.0.1", 0), Handler)
        self.delay, self.turns = delay, turns
        self.lock, self.counts, self.answered = threading.Lock(), collections.Counter(), threading.Condition()
        self.left = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def count(self, what):
        with self.answered:
            self.counts[what] += 1
            self.answered.notify_all()

    def wait_for(self, what, number):
        with self.answered:
            return self.answered.wait_for(lambda: self.counts[what] >= number, timeout=600)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.count("connections")

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = request["session"]
        answer = {}
        if "reset" in request:
            self.server.count("resets")
            self.server.left[session] = self.server.turns
            answer = {"observation": "start"}
            time.sleep(self.server.delay)
        elif "step" in request:
            self.server.count("steps")
            self.server.left[session] -= 1
            answer = {"observation": "on", "reward": 0, "terminated": self.server.left[session] == 0}
            time.sleep(self.server.delay)
        else:
            self.server.count("closes")
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def command(arguments, service, directory, steps, more=()):
    settings = [
        f"env.url=http://127.0.0.1:{service.server_address[1]}/",
        f"algo.num_env_groups={arguments.environments // 8}",
        "algo.group_size=8",
        f"algo.max_actions_per_traj={arguments.turns}",
        "algo.max_tokens_per_step=8",
        "algo.val_batch_size=0",
        "training.max_skipped_steps=0",
        *more,
    ]
    line = [arguments.roll, "run", "--algo", "agentic_ppo", "--model", "causal_lm", "--env", "http", "-q"]
    line += ["--steps", str(steps), "--out", str(directory), "--ranks", str(arguments.ranks)]
    return line + [word for setting in settings for word in ("--set", setting)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roll", default="target/release/roll")
    parser.add_argument("--environments", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = pathlib.Path(directory) / "run"
        service = Service(arguments.delay, arguments.turns)
        subprocess.run(command(arguments, service, run, arguments.steps), check=True, stdout=subprocess.DEVNULL)
        seconds = [json.loads(line)["time/step_rollout"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        counts = service.counts
        requests = counts["resets"] + counts["steps"] + counts["closes"]
        print(f"{arguments.environments} environments, {arguments.steps} rollouts of {arguments.turns} turns")
        print(f"connections: {counts['connections']} for {requests} requests ({counts['closes']} of them `close`)")
        # The reset takes a delay like a turn.
        turns = ", ".join(f"{second / (arguments.turns + 1):.2f}" for second in seconds)
        print(f"seconds of a turn, in each rollout: {turns} (delay {arguments.delay})")

        ahead = pathlib.Path(directory) / "ahead"
        service = Service(arguments.delay, arguments.turns)
        line = command(arguments, service, ahead, 100, ["algo.async_generation_ratio=1"])
        running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # The resets of a second rollout: it has just begun, while the first step trains.
        assert service.wait_for("resets", 2 * arguments.environments), "no rollout is played ahead"
        begun = time.monotonic()
        running.send_signal(signal.SIGINT)
        code = running.wait(timeout=600)
        whole = (arguments.turns + 1) * arguments.delay
        print(f"async_generation_ratio: 1: {time.monotonic() - begun:.1f} s from SIGINT to the end (exit code {code}); "
              f"a rollout takes {whole:.1f} s or longer")


if __name__ == "__main__":
    main()
