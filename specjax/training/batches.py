"""Batches from token arrays: length buckets, and an order that is a function of the position.

Nothing here keeps state: the batch at a position follows from (seed, position), so a resumed run
reads exactly what an uninterrupted one would have read.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Input and target token sequences, each ending with EOS.

    Attributes:
      inputs, targets: int32 sequences; the two have equal counts.
    """

    inputs: Sequence[np.ndarray]
    targets: Sequence[np.ndarray]

    def __post_init__(self):
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.inputs)

    def __add__(self, other: "TokenPairs") -> "TokenPairs":
        return TokenPairs([*self.inputs, *other.inputs], [*self.targets, *other.targets])

    def cut(self, limit: int | None) -> "TokenPairs":
        """Inputs of at most ``limit`` tokens; a cut one keeps its EOS."""
        if limit is None:
            return self
        cut = [x if len(x) <= limit else np.append(x[: limit - 1], x[-1]) for x in self.inputs]
        return TokenPairs(cut, self.targets)


def load_pairs(path: str) -> TokenPairs:
    """Reads an ``.npz`` of flat arrays with offsets, as scripts/build_debian.py writes them."""
    file = pathlib.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"no token arrays at {file}; build them with scripts/build_debian.py")
    with np.load(file) as data:
        return TokenPairs(*(_split(data[n], data[f"{n}_offsets"]) for n in ("inputs", "targets")))


def _split(flat: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, offsets[1:-1]) if len(offsets) > 1 else []


def save_pairs(path: str, pairs: TokenPairs) -> None:
    """Writes what `load_pairs` reads."""
    arrays = {}
    for name in ("inputs", "targets"):
        sequences = getattr(pairs, name)
        arrays[name] = np.concatenate([np.zeros(0, np.int32), *sequences]).astype(np.int32)
        arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    np.savez_compressed(path, **arrays)


def padded(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sequences as int32 rows ``[N, longest]`` padded with 0, and their lengths ``[N]``."""
    lengths = np.asarray([len(x) for x in sequences], np.int32)
    rows = np.zeros((len(sequences), int(lengths.max(initial=0))), np.int32)
    for row, x in zip(rows, sequences, strict=True):
        row[: len(x)] = x
    return rows, lengths


@dataclasses.dataclass(frozen=True)
class Seq2SeqBatches:
    """Padded batches of input/target pairs, grouped by length.

    Attributes:
      files: ``.npz`` files of token arrays.
      weights: how often each file is read per epoch (1 each by default).
      shapes: (input length, target length) of the buckets, cheapest first; an example goes to the
        first that holds it. Each shape is one compiled program.
      tokens: padded tokens per batch (inputs and targets together), which sets each bucket's rows.
      input_limits: per file, cut longer inputs to this length (keeping EOS); None cuts nothing, and
        what fits no bucket is left out.
      seed: order of the epochs.
    """

    files: tuple[str, ...]
    weights: tuple[int, ...] | None = None
    shapes: tuple[tuple[int, int], ...] = (
        (32, 16),
        (64, 16),
        (64, 32),
        (64, 64),
        (128, 128),
    )
    tokens: int = 2560
    input_limits: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(self.files))
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        for name, default in (("weights", 1), ("input_limits", None)):
            values = tuple(getattr(self, name) or (default,) * len(self.files))
            if len(values) != len(self.files):
                raise ValueError(f"{len(self.files)} files but {len(values)} {name}")
            object.__setattr__(self, name, values)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._epoch(0))

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        """The batch at a position (any non-negative integer; epochs follow one another)."""
        return self.pad(*self.members(position))

    def members(self, position: int) -> tuple[tuple[int, int], np.ndarray]:
        """The shape of the batch at a position, and indices into ``pairs`` of its examples."""
        epoch, index = divmod(position, len(self))
        return self._epoch(epoch)[index]

    @functools.cached_property
    def pairs(self) -> TokenPairs:
        """All examples, each as often as its file's weight says."""
        read = self.originals_pairs
        index = self.originals
        return TokenPairs([read.inputs[i] for i in index], [read.targets[i] for i in index])

    @functools.cached_property
    def originals_pairs(self) -> TokenPairs:
        """All examples, each once."""
        return functools.reduce(lambda a, b: a + b, self._loaded)

    @functools.cached_property
    def originals(self) -> np.ndarray:
        """For each of ``pairs`` its index in ``originals_pairs``."""
        found, start = [], 0
        for loaded, weight in zip(self._loaded, self.weights, strict=True):
            found.append(np.tile(np.arange(start, start + len(loaded)), weight))
            start += len(loaded)
        return np.concatenate(found)

    @functools.cached_property
    def _loaded(self) -> list[TokenPairs]:
        options = zip(self.files, self.input_limits, strict=True)
        return [load_pairs(file).cut(limit) for file, limit in options]

    @functools.cached_property
    def buckets(self) -> dict[tuple[int, int], np.ndarray]:
        """Indices into ``pairs`` by shape."""
        lengths = np.array([list(map(len, self.pairs.inputs)), list(map(len, self.pairs.targets))])
        fits = np.array([(lengths <= np.array(s)[:, None]).all(0) for s in self.shapes])
        first = np.where(fits.any(0), fits.argmax(0), -1)
        return {shape: np.flatnonzero(first == i) for i, shape in enumerate(self.shapes)}

    def _epoch(self, epoch: int) -> list[tuple[tuple[int, int], np.ndarray]]:
        return _epoch(self, epoch)

    def rows(self, shape: tuple[int, int]) -> int:
        return max(1, self.tokens // sum(shape))

    def pad(
        self, shape: tuple[int, int], members: np.ndarray, rows: int | None = None
    ) -> dict[str, np.ndarray]:
        """The batch of these examples, padded to a shape and to ``rows`` (as many as the shape has)."""
        rows = self.rows(shape) if rows is None else rows
        inputs = np.zeros((rows, shape[0]), np.int32)
        targets = np.zeros((rows, shape[1]), np.int32)
        weights = np.zeros(targets.shape, np.float32)
        mask = np.zeros(inputs.shape, bool)
        mask[:, 0] = True  # a softmax over nothing would be NaN; padding rows weigh nothing
        for row, member in enumerate(members):
            source, target = self.pairs.inputs[member], self.pairs.targets[member]
            inputs[row, : len(source)], mask[row, : len(source)] = source, True
            targets[row, : len(target)], weights[row, : len(target)] = target, 1.0
        start = np.zeros((len(targets), 1), np.int32)
        return {
            "inputs": inputs,
            "input_mask": mask,
            "decoder_inputs": np.concatenate([start, targets[:, :-1]], axis=1),
            "targets": targets,
            "weights": weights,
        }


@functools.lru_cache(maxsize=2)
def _epoch(source: Seq2SeqBatches, epoch: int) -> list[tuple[tuple[int, int], np.ndarray]]:
    """The epoch's batches: members shuffled within buckets, then batches shuffled."""
    rng = np.random.default_rng((source.seed, epoch))
    batches = []
    for shape, members in source.buckets.items():
        shuffled = rng.permutation(members)
        rows = source.rows(shape)
        batches += [(shape, shuffled[i : i + rows]) for i in range(0, len(shuffled), rows)]
    return [batches[i] for i in rng.permutation(len(batches))]
