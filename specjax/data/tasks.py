"""seqio tasks on the Debian corpora; importing this module imports TensorFlow.

`debian_ende_v001` and `debian_synopsis_v001` read what scripts/build_debian.py has built, from
the directory named by the environment variable SPECJAX_DATA_DIR, or from its default place.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import pathlib
from collections.abc import Callable, Iterator

import seqio
import tensorflow as tf

from specjax.data import metrics, splits

DEFAULT_DATA_DIR = "~/.cache/specjax/debian_v001"


def data_dir() -> pathlib.Path:
    """Where the built corpora lie; the environment is read anew at each call."""
    return pathlib.Path(os.environ.get("SPECJAX_DATA_DIR") or DEFAULT_DATA_DIR).expanduser()


def vocabulary_path() -> str:
    """The shipped SentencePiece model."""
    assets = importlib.resources.files("specjax") / "assets" / "debian"
    return str(assets / "sentencepiece.model")


def examples(
    split: str, shuffle_files: bool = False, seed: int | None = None, *, corpus: str
) -> tf.data.Dataset:
    """Raw text examples of a corpus, in file order (which is a stable shuffle already).

    Args:
      split: "train", "validation" or "test".
      shuffle_files: Ignored, there is one file; seqio shuffles what it reads.
      seed: Ignored, for the same reason.
      corpus: "ende" or "synopsis".

    Returns:
      Examples with the strings `inputs` and `targets`.

    Raises:
      FileNotFoundError: The corpus has not been built.
    """
    del shuffle_files, seed
    path = data_dir() / f"{corpus}-{split}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path}: run scripts/build_debian.py, or set SPECJAX_DATA_DIR to where it wrote"
        )

    def rows() -> Iterator[dict[str, str]]:
        with path.open(encoding="utf-8") as file:
            for row in map(json.loads, file):
                yield {"inputs": row["inputs"], "targets": row["targets"]}

    text = tf.TensorSpec((), tf.string)
    return tf.data.Dataset.from_generator(rows, output_signature={"inputs": text, "targets": text})


def _add(corpus: str, metric_fns: list[Callable]) -> None:
    vocabulary = seqio.SentencePieceVocabulary(vocabulary_path(), extra_ids=0)
    feature = seqio.Feature(vocabulary, add_eos=True)
    seqio.TaskRegistry.add(
        f"debian_{corpus}_v001",
        source=seqio.FunctionDataSource(
            functools.partial(examples, corpus=corpus), splits=splits.SPLITS
        ),
        preprocessors=[
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=metric_fns,
    )


_add("ende", [metrics.bleu])
_add("synopsis", [metrics.rouge])
