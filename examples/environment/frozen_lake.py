"""A gymnasium environment with text, for `roll run --algo agentic_ppo`. Needs gymnasium and `pip install
./python/roll_reward`.

    roll run --algo agentic_ppo --model causal_lm --env process \
        --set 'env.command=[python3, examples/environment/frozen_lake.py]'
"""

import re

import gymnasium
import roll_reward

MOVES = ["left", "down", "right", "up"]


class Lake(gymnasium.Wrapper):
    """Observations as text: the map, the player's place in it marked."""

    def __init__(self):
        super().__init__(gymnasium.make("FrozenLake-v1", is_slippery=False))

    def seen(self, place):
        rows = [[cell.decode() for cell in row] for row in self.unwrapped.desc]
        row, column = divmod(int(place), len(rows[0]))
        rows[row][column] = "P"
        return "\n".join(map("".join, rows))

    def reset(self, **kwargs):
        place, info = self.env.reset(**kwargs)
        return self.seen(place), info

    def step(self, action):
        place, reward, ended, cut, info = self.env.step(action)
        return self.seen(place), reward, ended, cut, {**info, "solved": reward > 0}


def action(said):
    found = re.search(r"<answer>\s*(\w+)\s*</answer>", said)
    if not found or found.group(1).lower() not in MOVES:
        raise ValueError(f"Answer with one of {', '.join(MOVES)}, as <answer>left</answer>.")
    return MOVES.index(found.group(1).lower())


if __name__ == "__main__":
    rules = "You are P on a frozen lake. F is ice, H a hole, G the goal. Answer with a move: <answer>left</answer>."
    roll_reward.environment(Lake, instructions=rules, action=action)
