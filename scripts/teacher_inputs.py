"""Inputs without references, for a target to answer and a draft to learn from.

  python scripts/teacher_inputs.py

A target half remembers the references it was trained on; a draft that learns from its answers to those
inputs learns what does not carry over to new text. So this cuts the training descriptions into single
sentences and pairs of them, which the target has not seen as inputs of either task, and writes
``tokens/ende-unlabelled.npz`` and ``tokens/synopsis-unlabelled.npz`` beside the corpora. Text of
validation and test is dropped. The "targets" are only as long as an answer may be expected to be:
scripts/teacher_outputs.py reads no more of them.
"""

import json
import pathlib
import re
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from specjax.assets import folder
from specjax.data import splits
from specjax.data.vocabulary import Vocabulary
from specjax.training.batches import TokenPairs, save_pairs

FLAGS = flags.FLAGS
flags.DEFINE_string("data_dir", "~/.cache/specjax/debian_v001", "What build_debian.py wrote.")
flags.DEFINE_integer("input_limit", 64, "Ids of an input at most.")
flags.DEFINE_integer("shortest", 8, "Words of an input at least.")

PREFIXES = {"ende": "translate English to German: ", "synopsis": "summarize: "}
# Half of what an answer may take, as teacher_outputs.py counts: 64 and 32 pieces.
ANSWER = {"ende": 32, "synopsis": 16}


def texts(path: pathlib.Path, prefix: str) -> Iterator[str]:
    """Inputs of a corpus file without their prefix."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["inputs"].removeprefix(prefix)


def chunks(description: str) -> Iterator[str]:
    """Single sentences and neighbouring pairs; not the whole description."""
    parts = sentences(description)
    pairs = [f"{a} {b}" for a, b in zip(parts, parts[1:], strict=False)]
    yield from (text for text in [*parts, *pairs] if text != description)


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) (?=[A-Z])", text)


def taken(data: pathlib.Path) -> set[bytes]:
    """Digests of all inputs of both tasks, and of all parts of held-out ones."""
    found = set()
    for task, prefix in PREFIXES.items():
        for split in splits.SPLITS:
            for text in texts(data / f"{task}-{split}.jsonl", prefix):
                parts = chunks(text) if split != "train" else ()
                found |= {splits.digest(part) for part in (text, *parts)}
    return found


def fresh(description: str, seen: set[bytes]) -> Iterator[str]:
    """Parts of a training description of which no sentence is known, nor they themselves."""
    for text in chunks(description):
        if all(splits.digest(part) not in seen for part in (text, *sentences(text))):
            yield text


def main(_) -> None:
    data = pathlib.Path(FLAGS.data_dir).expanduser()
    vocabulary, seen = Vocabulary.load(folder() / "sentencepiece.model"), taken(data)
    kept: dict[bytes, str] = {}
    for description in texts(data / "synopsis-train.jsonl", PREFIXES["synopsis"]):
        for text in fresh(description, seen):
            if len(text.split()) >= FLAGS.shortest:
                kept.setdefault(splits.digest(text), text)
    ordered = [kept[digest] for digest in sorted(kept)]  # a stable shuffle
    for i, (task, prefix) in enumerate(PREFIXES.items()):
        ids = [[*vocabulary.encode(prefix + text), vocabulary.eos_id] for text in ordered[i::2]]
        inputs = [np.asarray(x, np.int32) for x in ids if len(x) <= FLAGS.input_limit]
        answers = [np.full(ANSWER[task], vocabulary.eos_id, np.int32)] * len(inputs)
        path = data / "tokens" / f"{task}-unlabelled.npz"
        save_pairs(path, TokenPairs(inputs, answers))
        print(f"{len(inputs)} inputs in {path}")


if __name__ == "__main__":
    app.run(main)
