"""Training batches from seqio tasks and mixtures, by position; TensorFlow is imported when used."""

import atexit
import dataclasses
import functools
import gc
import importlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Examples among which each shard is shuffled once more.
APART = 256

MODULES = ("specjax.data.tasks", "specjax.data.t5_tasks")


def find(name: str, modules: tuple[str, ...] = MODULES) -> Any:
    """A registered seqio task or mixture.

    Args:
      name: as registered.
      modules: imported first, so that they register it.

    Raises:
      ValueError: there is none of this name.
    """
    import seqio

    for module in modules:
        importlib.import_module(module)
    try:
        return seqio.get_mixture_or_task(name)
    except ValueError:
        names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
        known = ", ".join(sorted(names)) or "none"
        raise ValueError(
            f"no seqio task {name!r} in {', '.join(modules)}; registered are {known}"
        ) from None


@dataclasses.dataclass(frozen=True)
class SeqioBatches:
    """Padded, unpacked batches of a task, as `specjax.training.loop.Batches` wants them.

    The order follows from the seed, so a position always holds the same batch. Positions in order
    stream; a resumed run skips what it has read, which takes as long as reading it.

    The task is read as a fixed number of seqio's shards, each of which gives as many rows that lie
    side by side. A process opens the shards of its own rows and no others, so what a row holds does
    not depend on how many processes there are. (T5X has as many shards as it has readers.)

    Attributes:
      name: a seqio task or mixture.
      lengths: ``{"inputs": …, "targets": …}`` in ids, EOS included; longer ones are cut.
      batch_size: examples per batch.
      split: which split.
      seed: of the shuffling; None reads in order.
      batches: how many are read at most, of one pass, for evaluation: a last batch that is not full
        is left out; None goes on from epoch to epoch without end.
      model: what reads the batches; the task must not have more pieces than its ``vocab_size``.
      use_cached: read the task's cached examples, from seqio's cache directories.
      modules: imported first, so that they register the task; ours and T5's by default.
      shards: a divisor of ``batch_size``, at best a multiple of the number of processes. By default
        up to 8, and 1 of a single pass, which ends with its shortest shard. Of a source with fewer
        files each shard reads all examples, and tokenises its own.
    """

    name: str
    lengths: dict[str, int] = dataclasses.field(hash=False)
    batch_size: int = 128
    split: str = "train"
    seed: int | None = 0
    batches: int | None = None
    model: Any = None
    use_cached: bool = False
    modules: tuple[str, ...] = MODULES
    shards: int | None = None

    def __post_init__(self):
        missing = {"inputs", "targets"} - set(self.lengths)
        if missing:
            raise ValueError(f"TASK_FEATURE_LENGTHS has no {' and no '.join(sorted(missing))}")
        if self.shards is None:
            shards = math.gcd(self.batch_size, 8) if self.batches is None else 1
            object.__setattr__(self, "shards", shards)
        if self.shards < 1 or self.batch_size % self.shards:
            raise ValueError(
                f"{self.name}: a batch of {self.batch_size} does not divide over {self.shards} shards"
            )

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError(f"{self.name} is read without end; set batches")
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        """How many full batches one pass has, up to ``batches``."""
        found = sum(1 for _ in self._dataset(range(self.shards)).take(self.batches))
        if not found:
            raise ValueError(
                f"{self.name}, {self.split}: fewer than the {self.batch_size} examples of one batch"
            )
        return found

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        """The batch at a position.

        Raises:
          IndexError: there are fewer.
          ValueError: the split has too few examples for one batch.
        """
        return self.part(position, np.arange(self.batch_size))

    def part(self, position: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """These rows of the batch at a position; only their shards are read.

        Args:
          position: which batch.
          rows: int ``[N]``.

        Raises:
          IndexError, ValueError: as for a whole batch.
        """
        if self.batches is not None and not 0 <= position < len(self):
            raise IndexError(f"{self.name}: batch {position} of {len(self)}")
        share = self.batch_size // self.shards
        shards = np.unique(rows // share)
        read = self._read(position, tuple(shards.tolist()))
        places = np.searchsorted(shards, rows // share) * share + rows % share
        return _model_inputs({name: x[places] for name, x in read.items()})

    def _read(self, position: int, shards: tuple[int, ...]) -> dict[str, np.ndarray]:
        """What these shards give for the batch at a position, one behind the other."""
        if shards not in self._readers:
            self._check()
            self._readers[shards] = _Reader(functools.partial(self._dataset, shards))
        try:
            return self._readers[shards].read(position)
        except StopIteration:
            raise ValueError(
                f"{self.name}, {self.split}: there is no batch {position} of {self.batch_size} "
                f"examples in {self.shards} shards"
            ) from None

    @functools.cached_property
    def _readers(self) -> dict[tuple[int, ...], "_Reader"]:
        return {}

    def _check(self) -> None:
        task = find(self.name, self.modules)
        for feature, options in task.output_features.items():
            size = options.vocabulary.vocab_size
            if self.model is not None and size > self.model.vocab_size:
                raise ValueError(
                    f"task {self.name}: its {feature} have {size} pieces, the model only "
                    f"{self.model.vocab_size} rows"
                )

    def _dataset(self, shards: Sequence[int]) -> Any:
        """Of batch after batch the rows that come from these shards.

        Built anew for every pass: one dataset shuffles differently each time it is read.
        """
        import seqio
        import tensorflow as tf

        parts, share = [self._shard(i) for i in shards], self.batch_size // self.shards
        turns = tf.data.Dataset.from_tensor_slices(np.repeat(np.arange(len(parts)), share))
        data = tf.data.Dataset.choose_from_datasets(parts, turns.repeat())
        data = seqio.EncDecFeatureConverter(pack=False)(data, self.lengths)
        return data.batch(share * len(parts), drop_remainder=True)

    def _shard(self, index: int) -> Any:
        """A shard's examples, tokenised."""
        import seqio

        data = find(self.name, self.modules).get_dataset(
            self.lengths,
            split=self.split,
            shuffle=self.seed is not None,
            num_epochs=None if self.batches is None else 1,
            use_cached=self.use_cached,
            seed=self.seed,
            shard_info=seqio.ShardInfo(index, self.shards) if self.shards > 1 else None,
        )
        if self.shards == 1 or self.seed is None:
            return data
        # The seed is the same for all shards, or they would overlap. So neighbours in the source, and
        # the turns of a mixture's tasks, would stand at the same place of all shards.
        return data.shuffle(APART, seed=self.seed + 1 + index)


class _Reader:
    """A pass through a dataset, begun anew where it is asked for something else than the next."""

    def __init__(self, dataset: Callable[[], Any]):
        self.dataset = dataset
        self.close()
        _OPEN.add(self)

    def read(self, position: int) -> dict[str, np.ndarray]:
        if position != self.next:
            self.rows = self.dataset().skip(position).as_numpy_iterator()
        self.next = position + 1
        return next(self.rows)

    def close(self) -> None:
        """Ends the pass, and with it the threads that read ahead."""
        self.next, self.rows = None, iter(())


_OPEN: "weakref.WeakSet[_Reader]" = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    """Python must not end before TensorFlow's threads that read ahead: the two wait for each other."""
    for reader in list(_OPEN):
        reader.close()
    gc.collect()


def _model_inputs(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What recipes read, from seqio's names."""
    inputs = row["encoder_input_tokens"].astype(np.int32)
    mask = inputs > 0
    mask[:, 0] = True  # a softmax over nothing would be NaN
    return {
        "inputs": inputs,
        "input_mask": mask,
        "decoder_inputs": row["decoder_input_tokens"].astype(np.int32),
        "targets": row["decoder_target_tokens"].astype(np.int32),
        "weights": row["decoder_loss_weights"].astype(np.float32),
    }
