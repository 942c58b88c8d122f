#!/usr/bin/env python3
"""Makes pairs of answers from conversations about FrozenLake, for `algo.name: dpo`.

    python3 demo/agent/preferences.py demo/assets/conversations.jsonl > demo/assets/preferences.jsonl
    python3 demo/agent/preferences.py demo/assets/conversations_unseen.jsonl > demo/assets/preferences_unseen.jsonl

Each map of the conversations is one pair. Both answers read the map as the conversation does. The preferred one moves nearer
to the goal and into no hole, the other one does not. A map from which no such move exists is left out.
"""

import json
import pathlib
import random
import re
import sys

MOVES = ["Left", "Down", "Right", "Up"]


def pair(reading, draw):
    """A preferred and another move, by what was read: "at 2 3, goal 4 1: down 2 left 2, holes left down"."""
    way, holes = reading.split(": ")[1].split(", holes ")
    good = [move for move in MOVES if move.lower() in way.split() and move.lower() not in holes.split()]
    bad = [move for move in MOVES if move not in good]
    return (draw.choice(good), draw.choice(bad)) if good else None


def main():
    draw, seen = random.Random(0), set()
    for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
        messages = json.loads(line)["messages"]
        for question, answer in zip(messages[::2], messages[1::2]):
            reading = re.search("<think>(.*)</think>", answer["content"]).group(1)
            moves = None if question["content"] in seen else pair(reading, draw)
            seen.add(question["content"])
            if moves:
                chosen, rejected = (f"<think>{reading}</think><answer>{move}</answer>" for move in moves)
                row = {"prompt": question["content"], "chosen": chosen, "rejected": rejected}
                print(json.dumps(row, separators=(",", ":")))


main()
