"""Texts in which some tokens are a model's answers, as batches by position.

What heads and drafts learn is what a target says, not what it is asked: weights follow the answers.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specjax.training import causal_lm


class Answered(NamedTuple):
    """Texts as ids.

    Attributes:
      tokens: int32 ``[L]`` of each.
      answers: bool ``[L]`` of each: which of its tokens answer.
    """

    tokens: list[np.ndarray]
    answers: list[np.ndarray]


def save(path: str | pathlib.Path, texts: Answered) -> None:
    """Writes what `load` reads."""
    offsets = np.cumsum([0, *map(len, texts.tokens)], dtype=np.int64)
    flat = np.concatenate([np.zeros(0, np.int32), *texts.tokens]).astype(np.int32)
    answers = np.concatenate([np.zeros(0, bool), *texts.answers])
    np.savez_compressed(path, tokens=flat, answers=answers, offsets=offsets)


def load(path: str) -> Answered:
    """Reads an ``.npz`` of flat arrays with offsets.

    Raises:
      ValueError: there is none.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"no answers at {file}; scripts/build_answers.py makes them")
    with np.load(file) as arrays:
        cuts = arrays["offsets"][1:-1]
        return Answered(*(np.split(arrays[name], cuts) for name in ("tokens", "answers")))


@dataclasses.dataclass(frozen=True)
class AnswerBatches:
    """Right-padded batches of texts, grouped by length; an epoch reads every text once.

    Attributes:
      files: ``.npz`` of `save`.
      lengths: of the buckets; a text goes into the first that holds it, and longer ones lose their
        beginning.
      tokens: padded tokens per batch.
      seed: order of the epochs, and which windows there are.
      streams: token files without answers, as `specjax.training.causal_lm.Windows` reads them; ``windows`` of
        each, of ``window`` tokens that all answer, are further texts.
      windows: see ``streams``.
      window: see ``streams``.
    """

    files: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (128, 192, 256, 384)
    tokens: int = 2048
    seed: int = 0
    streams: tuple[str, ...] = ()
    windows: int = 1000
    window: int = 192

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(self.files))
        object.__setattr__(self, "streams", tuple(self.streams))
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))
        if not self.files and not self.streams:
            raise ValueError("texts need files or streams")

    def __len__(self) -> int:
        """Batches per epoch."""
        return sum(-(-len(m) // self.rows(n)) for n, m in self.buckets.items())

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        """The batch at a position (any non-negative integer; epochs follow one another)."""
        return self.pad(*self.members(position))

    def rows(self, length: int) -> int:
        return max(1, self.tokens // length)

    def members(self, position: int) -> tuple[int, np.ndarray]:
        """(length, which texts) of the batch at a position."""
        epoch, index = divmod(position, len(self))
        return _epoch(self, epoch)[index]

    @functools.cached_property
    def texts(self) -> Answered:
        """All texts, none longer than the longest bucket.

        Raises:
          ValueError: nothing in them answers, so there is nothing to learn, or to measure.
        """
        read, most = [load(file) for file in self.files], self.lengths[-1]
        read += [_cut(file, self.window, self.windows, self.seed) for file in self.streams]
        cut = lambda name: [x[-most:] for part in read for x in getattr(part, name)]  # noqa: E731
        texts = Answered(cut("tokens"), cut("answers"))
        if not any(answers.any() for answers in texts.answers):
            raise ValueError(
                f"no token answers in {', '.join(map(str, self.files + self.streams))}"
            )
        return texts

    @functools.cached_property
    def buckets(self) -> dict[int, np.ndarray]:
        """Indices of texts by the length that they are padded to."""
        sizes = np.asarray([len(x) for x in self.texts.tokens], np.int64)
        which = np.searchsorted(self.lengths, sizes)
        return {n: np.flatnonzero(which == i) for i, n in enumerate(self.lengths)}

    def pad(self, length: int, members: np.ndarray) -> dict[str, np.ndarray]:
        """``tokens`` int32 and ``weights`` ``[B, length]`` of these texts: 1 on tokens that answer."""
        tokens = np.zeros((self.rows(length), length), np.int32)
        weights = np.zeros(tokens.shape, np.float32)
        for row, member in enumerate(members):
            text = self.texts.tokens[member]
            tokens[row, : len(text)] = text
            weights[row, : len(text)] = self.texts.answers[member]
        return {"tokens": tokens, "weights": weights}

    def once(self) -> Iterator[tuple[int, np.ndarray]]:
        """Every text once, in batches of one length, in an order that does not change."""
        for length, members in self.buckets.items():
            rows = self.rows(length)
            yield from ((length, members[i : i + rows]) for i in range(0, len(members), rows))


def _cut(path: str, window: int, count: int, seed: int) -> Answered:
    """So many of a stream's windows (all, if there are no more), which do not overlap."""
    stream = causal_lm.stream(path, window)
    starts = np.arange(0, len(stream) - window + 1, window)
    chosen = np.sort(np.random.default_rng(seed).permutation(starts)[:count])
    tokens = [stream[i : i + window].astype(np.int32) for i in chosen]
    return Answered(tokens, [np.ones(window, bool) for _ in tokens])


@functools.lru_cache(maxsize=2)
def _epoch(source: AnswerBatches, epoch: int) -> list[tuple[int, np.ndarray]]:
    """The epoch's batches: texts shuffled within buckets, then batches shuffled."""
    rng, batches = np.random.default_rng((source.seed, epoch)), []
    for length, members in source.buckets.items():
        shuffled, rows = rng.permutation(members), source.rows(length)
        batches += [(length, shuffled[i : i + rows]) for i in range(0, len(shuffled), rows)]
    return [batches[i] for i in rng.permutation(len(batches))]
