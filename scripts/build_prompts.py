"""Prompts whose answers by SmolLM2 heads are trained on: beginnings of functions, and questions in chats.

  python scripts/build_prompts.py [--out=~/.cache/specjax/smollm2] [--spec_bench=question.jsonl]

Writes {code,chat}-prompts.jsonl: lines with `prompt`, and `split` ("train" or "validation", by a hash of
the prompt). Functions come from Python files of installed packages, everything else from sentences and
descriptions of Debian packages (scripts/build_debian.py), put into questions as people ask them: to
summarise, translate, explain, write, answer from passages, calculate. What repeats a prompt of HumanEval or
of Spec-Bench (given its file) is left out: they are for measuring only.
"""

import argparse
import ast
import hashlib
import json
import pathlib
import random
from collections.abc import Iterator

from build_text import DEBIAN, code
from rich.progress import track

from specjax.data import prompts

HELD_OUT = 8  # of 256 prompts

ASKED = (
    "What is {it}?",
    "What is {it} used for?",
    "Explain {it} to somebody who has never heard of it.",
    "Who would need {it}, and why?",
    "Name three advantages of {it}.",
    "What should I know before I use {it}?",
    "How does {it} work?",
    "Where can I learn more about {it}?",
)  # fmt: skip
WRITTEN = (
    "Write a short blog post about {it}.",
    "Write an email to a colleague recommending {it}.",
    "Imagine you are a teacher. Introduce {it} to your class.",
    "Write a product review of {it} for a magazine.",
    "Compose a poem about {it}.",
    "Write a Python program that could be described as: {it}.",
    "Give me five ideas for a project with {it}.",
    "Tell a story in which somebody discovers {it}.",
    "Compare {it} with {other}. Which one is better?",
    "Draft a list of questions for an interview about {it}.",
)  # fmt: skip
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Kim", "Luis",
    "Mona", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip
THINGS = (
    "apples", "books", "tickets", "chairs", "pencils", "bottles", "stamps", "eggs", "cards", "bricks",
    "flowers", "loaves of bread", "shirts", "candles", "coins", "plates",
)  # fmt: skip
SUMS = (
    "{n} buys {a} boxes of {t}. Each box holds {b} {t} and costs {c} dollars. How many {t} does {n} have,"
    " and what did they cost together?",
    "{n} has {a} {t} and gives {b} percent of them to {m}. {m} already had {c} {t}. How many {t} does {m}"
    " have now?",
    "A shop sells {a} {t} on Monday, twice as many on Tuesday and {b} fewer than on Tuesday on Wednesday."
    " How many {t} did it sell in these three days?",
    "{n} can make {a} {t} in an hour, {m} can make {b}. How many {t} do they make together in {c} hours?",
    "It takes {n} {a} minutes to walk to school and {m} {b} minutes longer. How many hours do both spend"
    " walking to school and back in {c} days?",
    "{n} saves {a} dollars every week. After {c} weeks {n} buys {t} for {b} dollars. How much money is left?",
    "There are {a} rows of {b} seats in a hall. {c} seats are empty. How many people are sitting?",
    "{n} is {a} years old. {m} is {b} years older. How old will {m} be when {n} is {c} years older than now?",
)  # fmt: skip


def functions(text: str) -> Iterator[str]:
    """Documented functions of a module up to the end of their docstring, with its imports."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    imports = [ast.get_source_segment(text, n) for n in module.body if isinstance(n, ast.Import)]
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        if len(node.body) < 2 or node.decorator_list:
            continue
        head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
        if 80 < len(head) < 900:
            yield "\n".join(imports[:2]) + "\n\n\n" * bool(imports) + head + "\n"


def chats(random_: random.Random) -> Iterator[str]:
    """Questions, one after the other, as they come."""
    read = lambda name: [json.loads(x) for x in (DEBIAN / name).read_text("utf-8").splitlines()]  # noqa: E731
    if not (DEBIAN / "synopsis-train.jsonl").is_file():
        raise SystemExit(f"no {DEBIAN}: run scripts/build_debian.py first")
    described, translated = read("synopsis-train.jsonl"), read("ende-train.jsonl")
    text = lambda row: row["inputs"].split(": ", 1)[1]  # noqa: E731
    while True:
        row, other, third = random_.sample(described, 3)
        pair = random_.choice(translated)
        passages = "\n\n".join(random_.sample([text(row), text(other), text(third)], 3))
        numbers = {k: random_.randint(2, 60) for k in "abc"}
        n, m = random_.sample(NAMES, 2)
        fill = dict(it=row["targets"], other=other["targets"])
        yield random_.choice((
            f"Summarize: {' '.join(text(r) for r in (row, other, third))}" if random_.random() < 0.3
            else f"Summarize: {text(row)}",
            f"Translate German to English: {pair['targets']}",
            random_.choice(ASKED).format(**fill),
            random_.choice(WRITTEN).format(**fill),
            f"{passages}\n\n{random_.choice(ASKED).format(**fill)}",
            random_.choice(SUMS).format(n=n, m=m, t=random_.choice(THINGS), **numbers),
        ))  # fmt: skip


def programs() -> Iterator[str]:
    for text in code():
        yield from functions(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="~/.cache/specjax/smollm2")
    parser.add_argument("--count", type=int, default=20_000, help="prompts of a kind at most")
    parser.add_argument("--spec_bench", help="Spec-Bench's question.jsonl")
    options = parser.parse_args()
    folder = pathlib.Path(options.out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    sets = [prompts.HumanEval()]
    sets += [prompts.SpecBench(options.spec_bench)] if options.spec_bench else []
    forbidden = prompts.excluded(*sets)
    for kind, found in (("code", list(programs())), ("chat", chats(random.Random(0)))):
        if isinstance(found, list):
            random.Random(0).shuffle(found)
        kept, left_out = {}, 0
        for prompt in track(found, f"{kind}: reading", total=options.count):
            if len(kept) == options.count:
                break
            if forbidden.touches(prompt):
                left_out += 1
            elif len(prompt) < 2500:
                kept[prompt] = hashlib.sha256(prompt.encode()).digest()[0] < HELD_OUT
        with open(folder / f"{kind}-prompts.jsonl", "w", encoding="utf-8") as file:
            for prompt, held_out in kept.items():
                split = "validation" if held_out else "train"
                file.write(json.dumps({"prompt": prompt, "split": split}) + "\n")
        print(
            f"{kind}: {len(kept)} prompts, {left_out} left out that repeat a prompt of a benchmark"
        )


if __name__ == "__main__":
    main()
