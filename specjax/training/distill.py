"""Recipe: a draft learns the target's distribution, token by token, on given text.

References:
  Zhou et al. 2023, DistillSpec (2310.08461), equation 2 with the forward KL divergence; Leviathan et
  al. 2023 (2211.17192), corollary 3.6: the acceptance rate is the overlap sum_x min(p, q).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from specjax.decode import devices
from specjax.models.t5 import T5
from specjax.training.loop import Batches
from specjax.training.teacher import load_target


@dataclasses.dataclass(frozen=True)
class TeacherBatches:
    """Adds the target's log-probabilities, and its encoder's output, to another source's batches.

    Attributes:
      batches: where inputs and targets come from.
      teacher: the target.
      path: where its parameters are, as `specjax.training.teacher.load_target` reads them.
      params: the parameters themselves, instead of ``path``.
    """

    batches: Batches
    teacher: T5
    path: str | None = None
    params: PyTree = dataclasses.field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[str, np.ndarray | Array]:
        batch = self.batches[position]
        return batch | self._read(self._params, batch)

    @functools.cached_property
    def _params(self) -> PyTree:
        return self.params if self.path is None else load_target(self.teacher, self.path)

    @functools.cached_property
    def _read(self):
        def read(params, batch):
            inputs, mask = batch["inputs"], batch["input_mask"]
            encoded = self.teacher.encode(params, inputs, mask)
            logits = self.teacher.forward(params, inputs, mask, batch["decoder_inputs"], encoded)
            return {"teacher": jax.nn.log_softmax(logits), "encoded": encoded}

        return jax.jit(read)


def from_teacher(
    model: T5, teacher: T5, path: str, seed: int = 0, shardings: PyTree | None = None
) -> PyTree:
    """A draft to start from that knows the target's pieces; all else is random.

    Its embedding and output layer are the target's, reduced to the draft's width by their singular
    vectors: pieces that the target takes for alike are alike, the rare ones too, of which training
    sees little.

    Args:
      model: the draft, not wider than the target.
      teacher: the target, with the same vocabulary; neither has tied embeddings.
      path: its parameters, as `load_target` reads them.
      seed: of the rest.
      shardings: where the draft's parameters go; None is one device.

    Raises:
      ValueError: the draft is wider, has other pieces, or has tied embeddings.
    """
    ours, theirs = model.config, teacher.config
    if ours.emb_dim > theirs.emb_dim or ours.vocab_size != theirs.vocab_size:
        raise ValueError("the draft must have the target's pieces, and not be wider than it")
    if ours.logits_via_embedding or theirs.logits_via_embedding:
        raise ValueError("tied embeddings have no output layer to reduce")
    params, known = model.init(jax.random.key(seed)), load_target(teacher, path)
    pieces, output = params["token_embedder"], params["decoder"]["logits_dense"]
    pieces["embedding"] = reduced(known["token_embedder"]["embedding"], pieces["embedding"])
    output["weight"] = reduced(known["decoder"]["logits_dense"]["weight"], output["weight"])
    return params if shardings is None else devices.put(params, shardings)


def reduced(wide: Array, narrow: Array) -> Array:
    """The best ``[V, d]`` for the inner products of ``wide``'s rows, scaled as ``narrow`` is: pieces that
    a target takes for alike stay alike."""
    left, strength, _ = np.linalg.svd(np.asarray(wide, np.float64), full_matrices=False)
    rows = left[:, : narrow.shape[1]] * strength[: narrow.shape[1]]
    rows *= np.sqrt(np.mean(np.square(narrow)) / np.mean(np.square(rows)))
    return jnp.asarray(rows, narrow.dtype)


@dataclasses.dataclass(frozen=True)
class Distill:
    """Forward KL from teacher to draft; see `specjax.training.loop.Recipe`."""

    model: T5

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """Summed KL(p || q) in nats, and the two acceptance rates it stands for.

        The target's law comes whole (`TeacherBatches`) or by its likeliest pieces
        (`specjax.training.features.FeatureBatches`). ``overlap`` is alpha at temperature 1 on this
        text, ``agreement`` alpha at temperature 0.
        """
        del key
        sums = self.evaluate(params, batch)
        return sums["loss"], sums

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """The sums alone: nothing here is random."""
        inputs = (batch["inputs"], batch["input_mask"], batch["decoder_inputs"])
        logits = self.model.forward(params, *inputs, *(batch[name] for name in self.model.reads))
        compare = _compare if "teacher" in batch else _compare_likely
        weights, found = batch["weights"], compare(jax.nn.log_softmax(logits), batch)
        sums = {name: (value * weights).sum() for name, value in found.items()}
        return sums | {"tokens": weights.sum()}


def _compare(log_q: Array, batch: dict) -> dict[str, Array]:
    """Per token: KL(p || q), sum min(p, q), and whether the likeliest piece is the same."""
    log_p = batch["teacher"]
    p, same = jnp.exp(log_p), log_p.argmax(-1) == log_q.argmax(-1)
    return {
        "loss": (p * (log_p - log_q)).sum(-1),
        "overlap": jnp.minimum(p, jnp.exp(log_q)).sum(-1),
        "agreement": same.astype(log_q.dtype),
    }


def _compare_likely(log_q: Array, batch: dict) -> dict[str, Array]:
    """The same from the target's likeliest pieces; all others count as one (a lower bound of KL)."""
    ids, log_p = batch["teacher_ids"], batch["teacher_log_probs"]
    own = jnp.take_along_axis(log_q, ids, axis=-1)
    p, q = jnp.exp(log_p), jnp.exp(own)
    least = jnp.asarray(1e-6, log_q.dtype)
    others_p, others_q = (jnp.maximum(1 - x.sum(-1), least) for x in (p, q))
    others = others_p * (jnp.log(others_p) - jnp.log(others_q))
    same = ids[..., 0] == log_q.argmax(-1)
    return {
        "loss": (p * (log_p - own)).sum(-1) + others,
        "overlap": jnp.minimum(p, q).sum(-1) + jnp.minimum(others_p, others_q),
        "agreement": same.astype(log_q.dtype),
    }
