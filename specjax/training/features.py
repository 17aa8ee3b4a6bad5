"""What a target says of fixed examples, computed once and kept on disk for a draft to learn from.

A small draft's step costs a fraction of the target's forward pass that it learns from. Read once and
kept (encoder outputs in half precision, the most likely pieces with their log-probabilities), the
target costs one pass over the examples instead of one per epoch.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, PyTree
from rich import progress

from specjax import runs
from specjax.checkpoints import structure
from specjax.models.t5 import T5
from specjax.training.batches import Seq2SeqBatches
from specjax.training.teacher import load_target

# How many batches of the plan are in the arrays.
MARKER = "done.json"
# Padded tokens the target reads at a time, whatever the size of the batches that are trained on.
PADDED = 2560


@dataclasses.dataclass(frozen=True)
class FeatureBatches:
    """The batches of a source with the target's features from a file.

    Each batch has ``encoded`` ``[B, L, d]``, ``teacher_ids`` and ``teacher_log_probs`` ``[B, T, k]``
    besides what the source gives; `specjax.training.distill.Distill` learns from them.

    Attributes:
      batches: inputs and targets.
      teacher: the target.
      path: where its parameters are, as `load_target` reads them.
      folder: where features are kept; those of other examples or another target get another folder
        in it. A stopped computation goes on where it was.
      top: how many pieces are kept per token.
    """

    batches: Seq2SeqBatches
    teacher: T5
    path: str
    folder: str = "~/.cache/specjax/features"
    top: int = 64

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        shape, members = self.batches.members(position)
        batch = self.batches.pad(shape, members)
        rows, (length, steps) = len(batch["inputs"]), shape
        encoded = np.zeros((rows, length, self.teacher.config.emb_dim), np.float32)
        ids = np.zeros((rows, steps, self.top), np.int32)
        log_probs = np.full((rows, steps, self.top), -np.log(self.top), np.float32)
        store = self._store
        for row, member in enumerate(self.batches.originals[members]):
            source, target = store.span(member)
            encoded[row, : source.stop - source.start] = store.encoded[source]
            ids[row, : target.stop - target.start] = store.ids[target]
            log_probs[row, : target.stop - target.start] = store.log_probs[target]
        return batch | {"encoded": encoded, "teacher_ids": ids, "teacher_log_probs": log_probs}

    @functools.cached_property
    def _store(self) -> "_Store":
        params = load_target(self.teacher, self.path)
        pairs = self.batches.originals_pairs
        examples = _digest(pairs.inputs, pairs.targets)
        what = (structure.fingerprint(params), self.top, examples, self.batches.shapes, PADDED)
        place = pathlib.Path(self.folder).expanduser() / _digest([repr(what).encode()])
        store = _Store.open(place, pairs, self.teacher.config.emb_dim, self.top)
        store.fill(self.batches, functools.partial(_read(self.teacher, self.top), params))
        return store


def _digest(*parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for item in part:
            digest.update(item if isinstance(item, bytes) else np.asarray(item, np.int32).tobytes())
            digest.update(b"|")
    return digest.hexdigest()[:16]


def _read(teacher: T5, top: int):
    """Compiled: (encoder output, most likely ids, their log-probabilities) of a batch."""

    @jax.jit
    def read(params: PyTree, batch: dict) -> tuple[Array, Array, Array]:
        inputs, mask = batch["inputs"], batch["input_mask"]
        encoded = teacher.encode(params, inputs, mask)
        logits = teacher.forward(params, inputs, mask, batch["decoder_inputs"], encoded)
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(logits), top)
        half = jnp.float16
        return encoded.astype(half), ids.astype(jnp.int32), log_probs.astype(half)

    return read


@dataclasses.dataclass(frozen=True)
class _Store:
    """Features of all examples, flat, memory-mapped.

    Attributes:
      folder: where the arrays lie, with ``done.json``: how many batches of the plan are in them.
      starts: where each example's input and target tokens begin, ``[N + 1, 2]``.
      encoded: float16 ``[input tokens, d]``.
      ids: int32 ``[target tokens, k]``.
      log_probs: float16 ``[target tokens, k]``.
    """

    folder: pathlib.Path
    starts: np.ndarray
    encoded: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray

    @classmethod
    def open(cls, folder: pathlib.Path, pairs, width: int, top: int) -> "_Store":
        folder.mkdir(parents=True, exist_ok=True)
        if any(not (folder / f"{name}.npy").exists() for name in ("encoded", "ids", "log_probs")):
            (folder / MARKER).unlink(missing_ok=True)  # what is made anew is empty
        lengths = [[len(x) for x in pairs.inputs], [len(x) for x in pairs.targets]]
        starts = np.concatenate([[[0, 0]], np.cumsum(np.array(lengths, np.int64).T, axis=0)])
        sources, targets = starts[-1].tolist()

        def array(name: str, shape: tuple, dtype) -> np.ndarray:
            file = folder / f"{name}.npy"
            if file.exists():
                return np.load(file, mmap_mode="r+")
            return np.lib.format.open_memmap(file, "w+", dtype, shape)

        return cls(
            folder,
            starts,
            array("encoded", (sources, width), np.float16),
            array("ids", (targets, top), np.int32),
            array("log_probs", (targets, top), np.float16),
        )

    def span(self, member: int) -> tuple[slice, slice]:
        begin, end = self.starts[member], self.starts[member + 1]
        return slice(begin[0], end[0]), slice(begin[1], end[1])

    def fill(self, batches: Seq2SeqBatches, read) -> None:
        """Computes what is not there yet."""
        plan, marker = list(_plan(batches)), epath.Path(self.folder / MARKER)
        done = json.loads(marker.read_text()) if marker.exists() else 0
        left = range(done, len(plan))
        for number in progress.track(left, description="reading the target") if left else ():
            shape, members = plan[number]
            found = jax.device_get(read(batches.pad(shape, members, _rows(shape))))
            for row, member in enumerate(batches.originals[members]):
                source, target = self.span(member)
                self.encoded[source] = found[0][row, : source.stop - source.start]
                self.ids[target] = found[1][row, : target.stop - target.start]
                self.log_probs[target] = found[2][row, : target.stop - target.start]
            if number % 50 == 49 or number == len(plan) - 1:
                for array in (self.encoded, self.ids, self.log_probs):
                    array.flush()
                runs.write_whole(marker, json.dumps(number + 1))


def _rows(shape: tuple[int, int]) -> int:
    return max(1, PADDED // sum(shape))


def _plan(batches: Seq2SeqBatches) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Every example once, in batches of like size."""
    for shape, members in batches.buckets.items():
        _, first = np.unique(batches.originals[members], return_index=True)
        rows, once = _rows(shape), members[first]
        yield from ((shape, once[i : i + rows]) for i in range(0, len(once), rows))
