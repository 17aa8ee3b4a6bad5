"""Training batches from seqio tasks and mixtures, by position; TensorFlow is imported when used."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

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

    def __post_init__(self):
        missing = {"inputs", "targets"} - set(self.lengths)
        if missing:
            raise ValueError(f"TASK_FEATURE_LENGTHS has no {' and no '.join(sorted(missing))}")

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError(f"{self.name} is read without end; set batches")
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        """How many full batches one pass has, up to ``batches``."""
        found = sum(1 for _ in self._dataset().take(self.batches))
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
        if self.batches is not None and not 0 <= position < len(self):
            raise IndexError(f"{self.name}: batch {position} of {len(self)}")
        return self._read(position)

    def _read(self, position: int) -> dict[str, np.ndarray]:
        try:
            return _model_inputs(self._reader.read(position))
        except StopIteration:
            raise ValueError(
                f"{self.name}, {self.split}: there is no batch {position} of {self.batch_size} examples"
            ) from None

    @functools.cached_property
    def _reader(self) -> "_Reader":
        self._check()
        return _Reader(self._dataset)

    def _check(self) -> None:
        task = find(self.name, self.modules)
        for feature, options in task.output_features.items():
            size = options.vocabulary.vocab_size
            if self.model is not None and size > self.model.vocab_size:
                raise ValueError(
                    f"task {self.name}: its {feature} have {size} pieces, the model only "
                    f"{self.model.vocab_size} rows"
                )

    def _dataset(self) -> Any:
        """Built anew for every pass: one dataset shuffles differently each time it is read."""
        import seqio

        data = seqio.get_dataset(
            self.name,
            self.lengths,
            dataset_split=self.split,
            shuffle=self.seed is not None,
            num_epochs=None if self.batches is None else 1,
            feature_converter=seqio.EncDecFeatureConverter(pack=False),
            use_cached=self.use_cached,
            seed=self.seed,
        )
        return data.batch(self.batch_size, drop_remainder=True)


class _Reader:
    """A pass through a dataset, begun anew where it is asked for something else than the next."""

    def __init__(self, dataset: Callable[[], Any]):
        self.dataset, self.next, self.rows = dataset, None, iter(())

    def read(self, position: int) -> dict[str, np.ndarray]:
        if position != self.next:
            self.rows = self.dataset().skip(position).as_numpy_iterator()
        self.next = position + 1
        return next(self.rows)


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
