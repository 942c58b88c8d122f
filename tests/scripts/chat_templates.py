"""Compares the texts of chat templates with those of transformers.

Usage: chat_templates.py DIRECTORY [--roll PROGRAM] [--show]

DIRECTORY holds templates (*.jinja, in folders too). Each renders twelve conversations: with transformers, and with
`roll template-worker`. Prints how many texts are equal, and names each template whose texts differ. Needs transformers and
jinja2; downloads nothing. Exit status 1: a text differs, or a template is refused here alone.
"""
import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TOOL = {"type": "function", "function": {
    "name": "add", "description": "Adds two numbers, e.g. 2 < 3 & \"ü\".",
    "parameters": {"type": "object", "properties": {
        "a": {"type": "integer", "description": "First."},
        "b": {"type": "number", "default": 1e-7, "enum": [1, 2.5, None, True]}}, "required": ["a"]}}}
SECOND = {"type": "function", "function": {
    "name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(name, arguments, number="abcdefgh1"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


USER, ANSWER, SYSTEM = message("user", "2 + 3?"), message("assistant", "5"), message("system", "Be brief. \n")
CALLS = message("assistant", "", tool_calls=[call("add", {"a": 2, "b": 1e-7, "c": 10**21, "d": None, "e": ["ü", True]})])
RESULT = message("tool", '{"sum": 5}', tool_call_id="abcdefgh1", name="add")
THOUGHT = message("assistant", "5", reasoning_content="Two and three.")
CONVERSATIONS = {
    "question": dict(messages=[USER], add_generation_prompt=True),
    "system": dict(messages=[SYSTEM, USER], add_generation_prompt=True),
    "answer": dict(messages=[SYSTEM, USER, ANSWER], add_generation_prompt=False),
    "turns": dict(messages=[USER, ANSWER, message("user", " And\r\n4 + 4? ")], add_generation_prompt=True),
    "thoughts": dict(messages=[USER, THOUGHT, USER, THOUGHT], add_generation_prompt=False),
    "tags": dict(messages=[USER, message("assistant", "<think>\nhm\n</think>\n\n5"), USER], add_generation_prompt=True),
    "no thoughts": dict(messages=[USER], add_generation_prompt=True, enable_thinking=False),
    "tools": dict(messages=[SYSTEM, USER], tools=[TOOL, SECOND], add_generation_prompt=True),
    "call": dict(messages=[USER, CALLS], tools=[TOOL], add_generation_prompt=False),
    "result": dict(messages=[SYSTEM, USER, CALLS, RESULT], tools=[TOOL, SECOND], add_generation_prompt=True),
    "null": dict(messages=[USER, {**CALLS, "content": None}, RESULT, ANSWER, USER], tools=[TOOL],
                 add_generation_prompt=True),
    "text": dict(messages=[USER, message("assistant", "", tool_calls=[call("add", '{"a": 2}')]), RESULT, ANSWER],
                 tools=[TOOL], add_generation_prompt=False),
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def expected(source, conversation):
    arguments = dict(conversation)
    messages = arguments.pop("messages")
    texts, _ = render_jinja_template([messages], chat_template=source, **TOKENS, **arguments)
    return texts[0]


def found(program, source, conversations):
    """Yields the text of each conversation, or the error."""
    lines = [{"source": source, "bos": TOKENS["bos_token"], "eos": TOKENS["eos_token"]}]
    for conversation in conversations:
        arguments = dict(conversation)
        request = {key: arguments.pop(key) for key in ("messages", "add_generation_prompt")}
        lines.append({**request, "arguments": arguments})
    worker = subprocess.Popen([program, "template-worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    refused = None
    for i, line in enumerate(lines):
        worker.stdin.write(json.dumps(line, ensure_ascii=False) + "\n")
        worker.stdin.flush()
        text = worker.stdout.readline()
        answer = json.loads(text) if text else {"Err": "the worker ended"}
        if i == 0:
            refused = answer.get("Err")
        else:
            yield (None, refused) if refused else (answer.get("Ok"), answer.get("Err"))
    worker.stdin.close()
    worker.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--roll", default="roll", help="the program")
    parser.add_argument("--show", action="store_true", help="also prints both texts where they differ")
    args = parser.parse_args()
    counts, bad = Counter(), Counter()
    files = sorted(args.directory.rglob("*.jinja"))
    for file in files:
        # As Python opens a file for text: transformers does not see CR LF either.
        source = file.read_text(encoding="utf-8")
        raw = file.read_bytes().decode("utf-8")
        for (name, conversation), (text, problem) in zip(
                CONVERSATIONS.items(), found(args.roll, raw, CONVERSATIONS.values())):
            try:
                wanted, refusal = expected(source, conversation), None
            except Exception as error:  # Any error of a template is a refusal.
                wanted, refusal = None, error
            if wanted is not None and text is not None:
                outcome = "equal" if wanted == text else "differ"
            elif wanted is None and text is None:
                outcome = "refused by both"
            else:
                outcome = "refused here alone" if text is None else "refused by transformers alone"
            counts[outcome] += 1
            if outcome in ("differ", "refused here alone"):
                bad[file] += 1
                print(f"{file.relative_to(args.directory)}: {name}: {outcome} {problem or ''}")
                if args.show and outcome == "differ":
                    at = next((i for i, (a, b) in enumerate(zip(wanted, text)) if a != b), min(len(wanted), len(text)))
                    print(f"  transformers {wanted[max(0, at - 40):at + 60]!r}\n  roll {text[max(0, at - 40):at + 60]!r}")
            elif args.show and outcome == "refused by transformers alone":
                print(f"{file.relative_to(args.directory)}: {name}: {outcome} {refusal}")
    for outcome in ("equal", "refused by both", "differ", "refused here alone", "refused by transformers alone"):
        print(f"{counts[outcome]:6} {outcome}")
    print(f"{len(files)} templates, {len(bad)} of them with a text that differs or is refused here alone")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
