"""An agent program for the tests: plays FrozenLake through the endpoint, with the standard library alone.

Maps, symbols and rewards are those of the environment `frozen_lake`; the draws are Python's.
"""

import http.client
import json
import os
import random

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
CELLS = [(row, column) for row in range(4) for column in range(4)]
address, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").split("/", 1)
connection = http.client.HTTPConnection(address)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}


def complete(messages):
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", f"/{path}/chat/completions", body, headers)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]


def moved(place, move):
    return tuple(min(max(old + change, 0), 3) for old, change in zip(place, MOVES[move]))


def passable(holes, start, goal):
    seen, unexplored = {start}, [start]
    while unexplored:
        place = unexplored.pop()
        neighbours = {moved(place, move) for move in MOVES} - seen - holes
        seen |= neighbours
        unexplored += neighbours
    return goal in seen


draws = random.Random(json.loads(os.environ["ROLL_EPISODE"])["seed"])
while True:
    place, goal = draws.sample(CELLS, 2)
    holes = {cell for cell in CELLS if draws.random() > 0.8} - {place, goal}
    if passable(holes, place, goal):
        break

messages, reward = [], 0.0
for _ in range(6):
    symbols = dict.fromkeys(holes, "O") | {goal: "G", place: "P"}
    text = "\n".join("".join(symbols.get((row, column), "_") for column in range(4)) for row in range(4))
    messages.append({"role": "user", "content": text})
    answer = complete(messages)
    messages.append({"role": "assistant", "content": answer})
    move = next((move for move in MOVES if f"<answer>{move}</answer>" in answer), None)
    if move is None:
        reward -= 0.1
        continue
    place = moved(place, move)
    if place == goal or place in holes:
        break
print(json.dumps({"reward": reward + (place == goal), "solved": place == goal}))
