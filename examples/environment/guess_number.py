"""An environment for `roll run --algo agentic_ppo`: guess a number from 1 to 100.

    roll run --algo agentic_ppo --model causal_lm --set model.model_path=Qwen/Qwen2.5-0.5B-Instruct \
        --env process --set 'env.command=[python3, examples/environment/guess_number.py]'

One JSON object a line: requests on stdin, answers on stdout. Only the standard library is needed.
"""

import json
import random
import re
import sys

INSTRUCTIONS = "I think of a number from 1 to 100. Answer with a guess in the form <answer>50</answer>."
TURNS = 8


def main():
    number, turns = 0, 0
    for line in sys.stdin:
        request = json.loads(line)
        if "reset" in request:
            number, turns = random.Random(request["reset"]["seed"]).randint(1, 100), 0
            answer = {"observation": "What is your guess?", "instructions": INSTRUCTIONS}
        else:
            turns += 1
            found = re.search(r"<answer>\s*(\d+)\s*</answer>", request["step"]["action"])
            guess = int(found.group(1)) if found else None
            solved = guess == number
            if guess is None:
                text = "I see no guess."
            elif solved:
                text = "Yes!"
            else:
                text = "Higher." if guess < number else "Lower."
            answer = {
                "observation": text,
                "reward": 1.0 if solved else (-0.1 if guess is None else 0.0),
                "terminated": solved,
                "truncated": not solved and turns >= TURNS,
                "valid": guess is not None,
                "solved": solved,
            }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
