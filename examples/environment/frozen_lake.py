"""A gymnasium environment with text, for `roll run --algo agentic_ppo`. Needs gymnasium and `pip install
./python/roll_reward`.

    roll run --algo agentic_ppo --model causal_lm --env process \
        --set 'env.command=[python3, examples/environment/frozen_lake.py, --demo]'

`--demo` is for the built-in small model: it knows the rules, and reads only maps.
"""

import random
import re
import sys

import gymnasium
import roll_reward
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

MOVES = ["Left", "Down", "Right", "Up"]
RULES = """You are solving the FrozenLake puzzle. Forbid the whole and go to the target. The answer must be one of action \
in a turn, format is <answer>Right</answer>
The meaning of each symbol in the state is:
P: player, _: empty, O: hole, G: goal
Your available actions are:
Left, Down, Right, Up"""


class Lake(gymnasium.Wrapper):
    """Observations as text: the map, the player's place in it marked. A map for each seed."""

    def __init__(self):
        super().__init__(gymnasium.make("FrozenLake-v1", is_slippery=False))

    def seen(self, place):
        # As ROLL draws it.
        symbols = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}
        rows = [[symbols[cell] for cell in row] for row in self.unwrapped.desc]
        row, column = divmod(int(place), len(rows[0]))
        rows[row][column] = "P"
        return "\n".join(map("".join, rows))

    def reset(self, seed=None, **kwargs):
        lake = "\n".join(generate_random_map(size=4, p=0.8, seed=seed)).replace("S", "F")
        start = random.Random(seed).choice([i for i, cell in enumerate(lake) if cell == "F"])
        lake = (lake[:start] + "S" + lake[start + 1 :]).split("\n")
        self.env = gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=False)
        place, info = self.env.reset(seed=seed, **kwargs)
        return self.seen(place), info

    def far(self):
        """Moves to the goal, if there were no holes."""
        rows = [row.tobytes().decode() for row in self.unwrapped.desc]
        row, column = next((i, row.index("G")) for i, row in enumerate(rows) if "G" in row)
        at = divmod(int(self.unwrapped.s), len(rows))
        return abs(at[0] - row) + abs(at[1] - column)

    def step(self, action):
        before = self.far()
        place, reward, ended, cut, info = self.env.step(action)
        # A part of it for a part of the way: with a reward at the end alone most groups of episodes have all the same.
        return self.seen(place), reward + 0.1 * (before - self.far()), ended, cut, {**info, "solved": reward > 0}


def action(said):
    found = re.search(r"<answer>\s*(\w+)\s*</answer>", said)
    if not found or found.group(1).title() not in MOVES:
        raise ValueError(f"Answer with one of {', '.join(MOVES)}, as <answer>Right</answer>.")
    return MOVES.index(found.group(1).title())


if __name__ == "__main__":
    roll_reward.environment(Lake, instructions=None if "--demo" in sys.argv else RULES, action=action)
