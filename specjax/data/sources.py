"""What `infer` and `eval` read: text files, seqio tasks, the shipped held-out sample.

A source says which examples there are; `read` turns them into ids. seqio is imported only when a
seqio task is used.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from etils import epath

from specjax.data import metrics, samples, seqio_batches
from specjax.data.vocabulary import Vocabulary, keep_eos

METRICS = {"bleu": metrics.bleu, "rouge": metrics.rouge}
SCORES = {"debian_ende": metrics.bleu, "debian_synopsis": metrics.rouge}


class Example(NamedTuple):
    """An input.

    Attributes:
      number: its place in the source.
      inputs: int32 ids, EOS included.
      text: the texts it was made from, as T5X writes them: ``inputs_pretokenized`` and, where there
        is a reference, ``targets_pretokenized``.
    """

    number: int
    inputs: np.ndarray
    text: dict[str, str]


class Source(Protocol):
    """Where examples come from."""

    @property
    def name(self) -> str:
        """The task's name, of which output files are called."""
        ...

    def read(self, vocabulary: Vocabulary) -> list[Example]:
        """All examples, in order."""
        ...

    def check_scorable(self) -> None:
        """Raises ValueError where `score` could only fail: no metric, or no references."""
        ...

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        """The task's metrics.

        Raises:
          ValueError: there are no references, or no metric.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A text file with one input per line, or a JSONL file.

    Attributes:
      path: local or ``gs://``; ``.jsonl`` (or ``.json``) is read as JSON lines, anything else as text.
        An empty line is an empty input, which is EOS alone.
      inputs, targets: names of the JSON fields; ``targets`` need not be there.
      prefix: put before every input, such as ``"translate English to German: "``.
      task: name of the outputs; the file's by default.
      metric: "bleu" or "rouge", for `eval`.
      limit: only the first so many; None reads all.
    """

    path: str
    inputs: str = "inputs"
    targets: str = "targets"
    prefix: str = ""
    task: str = ""
    metric: str = "bleu"
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.task or epath.Path(self.path).name.split(".")[0]

    def __post_init__(self):
        if self.metric not in METRICS:
            raise ValueError(f"unknown metric {self.metric!r}, known are {', '.join(METRICS)}")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit must not be negative, got {self.limit}")

    def read(self, vocabulary: Vocabulary) -> list[Example]:
        pairs = [(self.prefix + row[self.inputs], row.get(self.targets)) for row in self._rows()]
        return [_example(vocabulary, i, *pair) for i, pair in enumerate(pairs)]

    def check_scorable(self) -> None:
        rows = self._rows()
        bare = [i for i, row in enumerate(rows) if row.get(self.targets) is None]
        if bare:
            raise ValueError(
                f"{self.path}: {len(bare)} of {len(rows)} inputs have no {self.targets!r} to score "
                f"against (the first is number {bare[0]})"
            )

    def _rows(self) -> list[dict[str, Any]]:
        path = epath.Path(self.path).expanduser()
        if not path.exists():
            raise ValueError(f"no input file {self.path}")
        lines = read_lines(path)[: self.limit]
        jsonl = path.suffix in (".jsonl", ".json")
        return [
            self._row(i, line) if jsonl else {self.inputs: line} for i, line in enumerate(lines)
        ]

    def _row(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path} line {number + 1} is no JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(self.inputs), str):
            raise ValueError(f"{self.path} line {number + 1} has no text field {self.inputs!r}")
        if not isinstance(row.get(self.targets, ""), str | None):
            raise ValueError(f"{self.path} line {number + 1}: {self.targets!r} is no text")
        return row

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        return METRICS[self.metric](_references(self.name, examples), predictions)


@dataclasses.dataclass(frozen=True)
class Heldout:
    """The held-out sample that ships with the package.

    Attributes:
      task: "debian_ende" or "debian_synopsis".
      half: "report", "calibration", or None for both.
      limit: only the first so many; None reads all.
    """

    task: str = "debian_ende"
    half: str | None = "report"
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.task

    def read(self, vocabulary: Vocabulary) -> list[Example]:
        found = samples.load_heldout(self.task, self.half)[: self.limit]
        return [_example(vocabulary, i, e.inputs, e.targets) for i, e in enumerate(found)]

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        return SCORES[self.task](_references(self.task, examples), predictions)

    def check_scorable(self) -> None:
        samples.load_heldout(self.task, self.half)


@dataclasses.dataclass(frozen=True)
class SeqioTask:
    """A registered seqio task (its own vocabulary makes the ids).

    Attributes:
      name: as registered.
      split: which split.
      modules: imported first, so that they register the task; ours and T5's by default.
      use_cached: read the task's cached examples, from seqio's cache directories.
      limit: only the first so many; None reads all.
    """

    name: str
    split: str = "test"
    modules: tuple[str, ...] = seqio_batches.MODULES
    use_cached: bool = False
    limit: int | None = None

    @functools.cached_property
    def _task(self) -> Any:
        found = seqio_batches.find(self.name, self.modules)
        if not hasattr(found, "predict_metric_fns"):
            raise ValueError(f"{self.name} is a mixture; name one of its tasks")
        return found

    def read(self, vocabulary: Vocabulary) -> list[Example]:
        theirs = self._task.output_features["targets"].vocabulary
        if theirs.vocab_size != vocabulary.size:
            raise ValueError(
                f"task {self.name} has {theirs.vocab_size} pieces, the model's vocabulary has "
                f"{vocabulary.size}"
            )
        data = self._task.get_dataset(
            None, self.split, use_cached=self.use_cached, shuffle=False, num_epochs=1
        )
        rows = data.take(-1 if self.limit is None else self.limit).as_numpy_iterator()
        return [_of_seqio(i, row) for i, row in enumerate(rows)]

    def score(self, examples: Sequence[Example], predictions: Sequence[str]) -> dict[str, float]:
        process = self._task.postprocess_fn
        references = _references(self.name, examples)
        texts = [e.text for e in examples]
        pairs = zip(references, texts, strict=True)
        targets = [process(t, example=x, is_target=True) for t, x in pairs]
        pairs = zip(predictions, texts, strict=True)
        outputs = [process(p, example=x, is_target=False) for p, x in pairs]
        found = {}
        for metric in self._task.predict_metric_fns:
            found |= metric(targets, outputs)
        return {name: float(value) for name, value in found.items()}

    def check_scorable(self) -> None:
        if not self._task.predict_metric_fns:
            raise ValueError(f"task {self.name} has no metric of predictions")


def read_lines(path: epath.Path) -> list[str]:
    r"""Lines of a UTF-8 text file, ended by ``\n`` or ``\r\n`` and by nothing else.

    ``str.splitlines`` also splits at U+2028 and others, which JSON leaves unescaped in strings.
    """
    text = path.read_bytes().decode("utf-8").removesuffix("\n")
    return [line.removesuffix("\r") for line in text.split("\n")] if text else []


def cut(
    examples: Sequence[Example],
    length: int,
    truncate: bool,
    shorten: Callable[[np.ndarray, int], np.ndarray] = keep_eos,
) -> list[Example]:
    """Examples that fit ``length`` ids.

    Args:
      examples: any.
      length: ids at most, EOS included.
      truncate: cut longer ones.
      shorten: how; the vocabulary's own (`Base.shorten`).

    Raises:
      ValueError: one is longer, and ``truncate`` is off; all are counted, the first is named.
    """
    long = [e for e in examples if len(e.inputs) > length]
    if long and not truncate:
        raise ValueError(
            f"{len(long)} of {len(examples)} inputs are longer than {length} ids with EOS (the first "
            f"is number {long[0].number} with {len(long[0].inputs)}); raise the input length, or set "
            "truncate to cut them"
        )
    return [e._replace(inputs=shorten(e.inputs, length)) for e in examples]


def _example(vocabulary: Vocabulary, number: int, inputs: str, targets: str | None) -> Example:
    ids = np.asarray(vocabulary.inputs(inputs), np.int32)
    text = {"inputs_pretokenized": inputs}
    return Example(
        number, ids, text if targets is None else text | {"targets_pretokenized": targets}
    )


def _of_seqio(number: int, row: dict[str, np.ndarray]) -> Example:
    text = {k: row[k].decode() for k in row if k.endswith("_pretokenized")}
    return Example(number, row["inputs"].astype(np.int32), text)


def _references(name: str, examples: Sequence[Example]) -> list[str]:
    found = [e.text.get("targets_pretokenized") for e in examples]
    if None in found:
        raise ValueError(f"{name}: input {found.index(None)} has no reference to score against")
    return found
