"""Recipe: a draft learns the target's distribution, token by token, on given text.

References:
  Zhou et al. 2023, DistillSpec (2310.08461), equation 2; Leviathan et al. 2023 (2211.17192), corollary
  3.6: the acceptance rate is the overlap sum_x min(p, q).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from specjax.decode import devices
from specjax.models.t5 import T5
from specjax.training import losses
from specjax.training.divergences import Divergence, ForwardKL
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
        return self.read(self.batches[position])

    def read(self, batch: dict) -> dict[str, np.ndarray | Array]:
        """A batch with what the target says of it."""
        return batch | self._read(self.parameters, batch)

    @functools.cached_property
    def parameters(self) -> PyTree:
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
    """A divergence between teacher and draft; see `specjax.training.loop.Recipe`.

    Attributes:
      model: the draft.
      divergence: what is minimised; `specjax.training.divergences` has them.
    """

    model: T5
    divergence: Divergence = ForwardKL()

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """The divergence, summed, and the two acceptance rates it stands for.

        The target's law comes whole (`TeacherBatches`), or for forward KL by its likeliest pieces
        (`specjax.training.features.FeatureBatches`). ``overlap`` is alpha at temperature 1 on this
        text, ``agreement`` alpha at temperature 0.

        Raises:
          ValueError: another divergence from the likeliest pieces alone.
        """
        del key
        sums = self.evaluate(params, batch)
        return sums["loss"], sums

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """The sums alone: nothing here is random."""
        return self._sums(jax.nn.log_softmax(_logits(self.model, params, batch)), batch)

    def _sums(self, log_q: Array, batch: dict) -> dict[str, Array]:
        if "teacher" in batch:
            found = _compare(log_q, batch, self.divergence)
        elif self.divergence == ForwardKL():
            found = _compare_likely(log_q, batch)
        else:
            raise ValueError(f"{self.divergence} needs the target's whole law: give TeacherBatches")
        weights = batch["weights"]
        sums = {name: (value * weights).sum() for name, value in found.items()}
        return sums | {"tokens": weights.sum()}


@dataclasses.dataclass(frozen=True)
class Supervised(Distill):
    """Cross-entropy of the texts themselves, which a draft is compared with that was distilled.

    What is reported is what `Distill` reports, its loss as ``divergence``.
    """

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        logits = _logits(self.model, params, batch)
        sums = self._sums(jax.nn.log_softmax(logits), batch)
        entropy = losses.cross_entropy(logits, batch["targets"], batch["weights"])
        return sums | {"divergence": sums["loss"], "loss": entropy}


def _logits(model: T5, params: PyTree, batch: dict) -> Array:
    inputs = (batch["inputs"], batch["input_mask"], batch["decoder_inputs"])
    return model.forward(params, *inputs, *(batch[name] for name in model.reads))


def _compare(log_q: Array, batch: dict, divergence: Divergence) -> dict[str, Array]:
    """Per token: the divergence, sum min(p, q), and whether the likeliest piece is the same."""
    log_p = batch["teacher"]
    same = log_p.argmax(-1) == log_q.argmax(-1)
    return {
        "loss": divergence(log_p, log_q),
        "overlap": jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(-1),
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
