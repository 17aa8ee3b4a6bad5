"""The target's hidden states, for heads to learn from.

A head's step costs a fraction of a large target's forward pass: its states of fixed texts are computed once
and kept on disk, in half precision (`StateBatches`). A T5's are computed anew for every batch
(`T5StateBatches`).
"""

import dataclasses
import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree
from rich import progress

from specjax import pretrained, runs
from specjax.checkpoints import structure
from specjax.models.causal import Causal
from specjax.models.eagle import side_by_side
from specjax.models.heads import TAP
from specjax.models.t5 import T5
from specjax.training.answers import AnswerBatches
from specjax.training.loop import Batches
from specjax.training.teacher import load_target

# How many texts' batches are in the array.
MARKER = "done.json"


@dataclasses.dataclass(frozen=True)
class StateBatches:
    """The batches of a source with the target's states: ``states`` float32 ``[B, T, n d]`` beside them.

    Attributes:
      batches: texts and answers.
      target: name or path of a decoder-only target (`specjax.pretrained.load`).
      taps: which states, side by side: an EAGLE-3 head's are its own (`specjax.models.eagle3`).
      folder: where they are kept; those of other texts or another target get another folder in it. A
        stopped computation goes on where it was.
    """

    batches: AnswerBatches
    target: str
    taps: tuple[str, ...] = (TAP,)
    folder: str = "~/.cache/specjax/states"

    def __len__(self) -> int:
        return len(self.batches)

    def prepare(self) -> None:
        """Computes what is not on disk yet."""
        _ = self._kept

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        length, members = self.batches.members(position)
        batch = self.batches.pad(length, members)
        starts, kept = self._kept
        states = np.zeros((*batch["tokens"].shape, kept.shape[1]), np.float32)
        for row, member in enumerate(members):
            begin, end = starts[member], starts[member + 1]
            states[row, : end - begin] = kept[begin:end]
        return batch | {"states": states}

    @functools.cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        """(where each text's states begin, states ``[tokens, d]``)."""
        texts = self.batches.texts.tokens
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        model, params, _ = pretrained.load(self.target)
        plan = list(self.batches.once())
        # what the number of finished batches means hangs on all of them
        batches = [(length, members.tolist()) for length, members in plan]
        what = [structure.fingerprint(params), *self.taps, batches]
        digest = hashlib.sha256(repr(what).encode())
        for text in texts:
            digest.update(text.astype(np.int32).tobytes() + b"|")
        place = pathlib.Path(self.folder).expanduser() / digest.hexdigest()[:16]
        place.mkdir(parents=True, exist_ok=True)
        kept = _array(
            place / "states.npy", (int(starts[-1]), len(self.taps) * model.config.emb_dim)
        )
        marker = place / MARKER
        done = json.loads(marker.read_text()) if marker.exists() else 0
        read = _read(model, tuple(self.taps))
        left = range(done, len(plan))
        for number in progress.track(left, description="reading the target") if left else ():
            length, members = plan[number]
            states = np.asarray(read(params, self.batches.pad(length, members)["tokens"]))
            for row, member in enumerate(members):
                begin, end = starts[member], starts[member + 1]
                kept[begin:end] = states[row, : end - begin]
                if not np.isfinite(kept[begin:end]).all():
                    raise ValueError(
                        f"{self.target}: states of {self.taps} do not fit half precision"
                    )
            if number % 20 == 19 or number == len(plan) - 1:
                kept.flush()
                runs.write_whole(marker, json.dumps(number + 1))
        return starts, kept


def _array(file: pathlib.Path, shape: tuple[int, int]) -> np.ndarray:
    if file.exists():
        return np.load(file, mmap_mode="r+")
    (file.parent / MARKER).unlink(missing_ok=True)  # what is made anew is empty
    return np.lib.format.open_memmap(file, "w+", np.float16, shape)


def _read(model: Causal, taps: tuple[str, ...]):
    """Compiled: states of right-padded texts, in half precision."""

    def read(params, tokens):
        return side_by_side(model.states(params, tokens, taps), taps).astype(jnp.float16)

    return jax.jit(read)


@dataclasses.dataclass(frozen=True)
class T5StateBatches:
    """Batches of inputs and targets as texts that answer, with a T5's states.

    ``tokens`` int32 ``[B, T + 1]`` are the start token and the targets, ``weights`` 1 on targets,
    ``states`` ``[B, T + 1, d]`` (nothing is known behind the last token: zeros). ``encoded`` and
    ``input_mask`` are what a head's cross-attention reads.

    Attributes:
      batches: `specjax.training.batches.Seq2SeqBatches`, or alike.
      teacher: the target.
      path: where its parameters are, as `specjax.training.teacher.load_target` reads them.
    """

    batches: Batches
    teacher: T5
    path: str

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[str, np.ndarray | Array]:
        return self._read(self._params, self.batches[position])

    @functools.cached_property
    def _params(self) -> PyTree:
        return load_target(self.teacher, self.path)

    @functools.cached_property
    def _read(self):
        return jax.jit(functools.partial(of_t5, self.teacher))


def of_t5(model: T5, params: PyTree, batch: dict) -> dict[str, Array]:
    """Inputs and targets as a text that answers, with the states; see `T5StateBatches`."""
    mask, words = batch["input_mask"], batch["decoder_inputs"]
    encoded = model.encode(params, batch["inputs"], mask)
    seen = model.states(params, encoded, mask, words, (TAP,))[TAP]
    wide = lambda x, *sides: jnp.pad(x, ((0, 0), sides, *[(0, 0)] * (x.ndim - 2)))  # noqa: E731
    return {
        "tokens": jnp.concatenate([words[:, :1], batch["targets"]], axis=1),
        "weights": wide(batch["weights"], 1, 0),
        "states": wide(seen, 0, 1),
        "encoded": encoded,
        "input_mask": mask,
    }


def of_text(model: Causal, params: PyTree, batch: dict) -> dict[str, Array]:
    """A text that answers with the states."""
    return batch | {"states": model.states(params, batch["tokens"], (TAP,))[TAP]}
