"""Recipe: maximum likelihood of plain text, for decoder-only models; and text as windows by position."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from specjax import checkpoints, pretrained
from specjax.decode import devices
from specjax.models.families import Network
from specjax.training import distill, losses


@dataclasses.dataclass(frozen=True)
class CausalLm:
    """Next-token cross-entropy; see `specjax.training.loop.Recipe`.

    Attributes:
      model: what is trained.
      remat_policy: see `specjax.models.stack.run`.
    """

    model: Network
    remat_policy: str = "none"

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """What is minimised, summed, and the sums that are reported."""
        del key
        sums = self.evaluate(params, batch)
        return sums["loss"], sums

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """Summed loss, correct tokens, and how many tokens there are."""
        tokens, weights = batch["tokens"], batch["weights"]
        logits = self.model.forward(params, tokens[:, :-1], self.remat_policy)
        targets = tokens[:, 1:]
        if known := self.model.draft_vocab:
            targets = jnp.asarray(known.own)[targets]
            # Of what it cannot say it learns nothing, as EAGLE-3's heads (2503.01840).
            weights = jnp.where(targets < len(known), weights, 0.0)
            targets = jnp.minimum(targets, len(known) - 1)
        return {
            "loss": losses.cross_entropy(logits, targets, weights),
            "accuracy": losses.correct(logits, targets, weights),
            "tokens": weights.sum(),
        }


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of token files, by position; the same position always gives the same batch.

    Attributes:
      files: ``.npz`` with ``tokens``, one stream of documents with EOS between them.
      weights: how often each file is drawn from, relative to the others; all alike by default.
      length: tokens that a row predicts.
      batch_size: rows.
      batches: how many there are; None is without end (training), a number reads the files in order.
      seed: of the draw.
    """

    files: tuple[str, ...]
    weights: tuple[float, ...] = ()
    length: int = 128
    batch_size: int = 16
    batches: int | None = None
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(self.files))
        object.__setattr__(self, "weights", tuple(self.weights) or (1.0,) * len(self.files))
        if len(self.weights) != len(self.files) or not self.files:
            raise ValueError(f"{len(self.weights)} weights for {len(self.files)} files")
        for name in ("length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def __len__(self) -> int:
        return 2**31 - 1 if self.batches is None else self.batches

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        if not 0 <= position < len(self):
            raise IndexError(position)
        width = self.length + 1
        if self.batches is None:
            rng = np.random.default_rng([self.seed, position])
            share = np.asarray(self.weights) / sum(self.weights)
            which = rng.choice(len(self.files), self.batch_size, p=share)
            rows = [self._row(self._streams[i], rng.random(), width) for i in which]
        else:
            first = position * self.batch_size
            count = self.batches * self.batch_size
            rows = [
                self._row(self._streams[n % len(self.files)], n / count, width)
                for n in range(first, first + self.batch_size)
            ]
        weights = np.ones((self.batch_size, self.length), np.float32)
        return {"tokens": np.stack(rows).astype(np.int32), "weights": weights}

    def _row(self, stream: np.ndarray, at: float, width: int) -> np.ndarray:
        start = int(at * (len(stream) - width + 1))
        return stream[start : start + width]

    @functools.cached_property
    def _streams(self) -> list[np.ndarray]:
        return [stream(file, self.length + 1) for file in self.files]


def stream(file: str, least: int) -> np.ndarray:
    """The tokens of a file that holds one stream of documents.

    Raises:
      ValueError: there is none, or it has fewer than ``least`` tokens.
    """
    path = pathlib.Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"no token file {file}")
    with np.load(path) as arrays:
        if "tokens" not in arrays:
            raise ValueError(f"{file} has no array 'tokens'")
        tokens = arrays["tokens"]
    if tokens.ndim != 1 or len(tokens) < least:
        raise ValueError(f"{file} holds {tokens.shape} tokens, {least} in a row are needed")
    return tokens


def from_target(
    model: Network, target: str, seed: int = 0, shardings: PyTree | None = None
) -> PyTree:
    """A small model to start from that knows a target's pieces; all else is random.

    Its tied embedding is the target's, reduced to its width by singular vectors: pieces that the target
    takes for alike are alike, the rare ones too, of which training sees little.

    Args:
      model: the draft, tied, not wider than the target.
      target: its name or path; see `specjax.pretrained.load`.
      seed: of the rest.
      shardings: where the parameters go; None is one device.

    Raises:
      ValueError: the draft is wider, has other pieces, or is not tied.
    """
    params = model.init(jax.random.key(seed))
    _, known = checkpoints.load_any(pretrained.locate(target))
    ours, wide = model.config, known["embed_tokens"]["weight"]
    pieces = wide.shape[0]
    if vocab := model.draft_vocab:
        others = jnp.asarray(np.setdiff1d(np.arange(pieces), vocab.ids))
        other = wide[others].mean(0, keepdims=True)
        wide = jnp.concatenate([wide[jnp.asarray(vocab.ids)], other])
    if ours.vocab_size != pieces or ours.emb_dim > wide.shape[1]:
        raise ValueError("the draft must have the target's pieces, and not be wider than it")
    if not ours.tie_embeddings:
        raise ValueError("only a tied embedding can begin as the target's")
    params["embed_tokens"]["weight"] = distill.reduced(wide, params["embed_tokens"]["weight"])
    return params if shardings is None else devices.put(params, shardings)
