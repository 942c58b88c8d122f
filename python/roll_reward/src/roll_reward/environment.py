"""An environment with text, as `env.name: process` asks for it: one JSON object a line."""

import inspect
import json
import sys
import traceback

from .reward import explained
from .serve import claim_stdout


def environment(make, instructions=None, text=str, action=str, invalid=-0.2):
    """Answers resets and steps until roll is done.

    `make` is a gymnasium environment, or a function that makes one: `reset(seed=)` gives an observation and a dict,
    `step(action)` an observation, reward, terminated, truncated and a dict, of which `valid`, `solved` and `action` are
    read. If `reset` has a parameter `split`, it gets "train" or "validation"; if `number`, the number of the group of
    episodes, to play rows in their order.
    `text` makes text of an observation, `action` an action of the agent's answer; a `ValueError` in it is an answer that
    was not understood: it costs a turn, and its reward is `invalid`, which must be below that of the worst step of the
    world, or the agent learns to say nothing. `instructions` are shown before the first observation.
    """
    out = claim_stdout()
    world = None
    last = ""
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
                last = text(observation)
                answer = {"observation": last}
                if instructions is not None:
                    answer["instructions"] = instructions
            else:
                answer, last = _step(world, request["step"]["action"], text, action, last, invalid)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": explained(error)}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _step(world, said, text, action, last, invalid):
    """The answer, and what the world looks like now."""
    try:
        taken = action(said)
    except ValueError as error:
        observation = f"{error}\n{last}".strip()
        return {"observation": observation, "reward": float(invalid), "terminated": False, "valid": False}, last
    observation, reward, terminated, truncated, info = world.step(taken)
    answer = {
        "observation": text(observation),
        "reward": float(reward),
        "terminated": bool(terminated),
        "truncated": bool(truncated),
        "valid": bool(info.get("valid", True)),
    }
    if "solved" in info:
        answer["solved"] = bool(info["solved"])
    if "action" in info:
        answer["action"] = str(info["action"])
    return answer, answer["observation"]
