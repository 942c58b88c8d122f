"""An agent as it is, for `--env agent`: it walks over a map by an OpenAI client, and reports a reward at its end.

    pip install openai
    roll run --algo agentic_ppo --model causal_lm --env agent --set 'env.command=[python3, examples/environment/agent.py]'

`OpenAI()` reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which name the endpoint of the run and the episode.
"""

import json
import os
import random

from openai import OpenAI

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
SIZE = 4

client = OpenAI()
episode = json.loads(os.environ.get("ROLL_EPISODE", '{"seed": 0}'))  # also "split" and "number"
cells = [(row, column) for row in range(SIZE) for column in range(SIZE)]
place, goal = random.Random(episode["seed"]).sample(cells, 2)
way = abs(place[0] - goal[0]) + abs(place[1] - goal[1])

messages = []
for _ in range(6):
    symbols = {place: "P", goal: "G"}
    lines = ["".join(symbols.get((row, column), "_") for column in range(SIZE)) for row in range(SIZE)]
    messages.append({"role": "user", "content": "\n".join(lines)})
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})
    step = next((MOVES[move] for move in MOVES if f"<answer>{move}</answer>" in answer.content), (0, 0))
    place = tuple(min(max(old + change, 0), SIZE - 1) for old, change in zip(place, step))
    if place == goal:
        break

left = abs(place[0] - goal[0]) + abs(place[1] - goal[1])
print(json.dumps({"reward": 1 - left / way, "solved": place == goal}))
