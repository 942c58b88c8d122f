"""A tool for `roll run --algo agentic_ppo`: sums, differences and products of whole numbers.

    algo:
      tools:
        - name: calculate
          description: Computes a sum, a difference or a product of two whole numbers.
          parameters:
            type: object
            properties: {a: {type: integer}, b: {type: integer}, operation: {enum: [add, subtract, multiply]}}
            required: [a, b, operation]
          command: [python3, examples/tool/calculate.py]

The call comes as one JSON object on standard input; the result is one JSON value on standard output. What a tool writes
to standard error when it fails is shown to the agent.
"""

import json
import sys

OPERATIONS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}


def main():
    arguments = json.load(sys.stdin)["arguments"]
    a, b, operation = arguments.get("a"), arguments.get("b"), arguments.get("operation")
    if operation not in OPERATIONS:
        sys.exit(f"`operation` is one of {', '.join(OPERATIONS)}")
    if not all(isinstance(value, int) and abs(value) < 10**30 for value in (a, b)):
        sys.exit("`a` and `b` are whole numbers of at most 30 digits")
    print(json.dumps({"result": OPERATIONS[operation](a, b)}))


if __name__ == "__main__":
    main()
