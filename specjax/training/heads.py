"""Recipes for heads on a frozen target: Medusa-1 and EAGLE-1.

Position p stands for a token that the target has read. Decoding drafts from p once token p + 1 is the
newest: first from the prompt's last token but one, to say the first one of the answer. So heads learn at
every p whose token p + 2 is an answer's, and what they are to say must be of it too.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from specjax import checkpoints, pretrained
from specjax.decode import devices
from specjax.models import heads, medusa
from specjax.models.draft_vocab import DraftVocab
from specjax.models.eagle import TAKEN, Eagle, Pairs
from specjax.models.eagle3 import Eagle3
from specjax.models.eagle_t5 import EagleT5
from specjax.models.medusa import Medusa
from specjax.training import losses


def labels(
    batch: dict, ahead: int, vocab: DraftVocab | None, behind: int = 2
) -> tuple[Int[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """What heads are to say ``ahead`` tokens behind every position.

    Args:
      batch: ``tokens`` and ``weights`` (1 on tokens that answer).
      ahead: tokens.
      vocab: what they can say.
      behind: positions count whose token so far behind answers: 2 of heads, 1 of the target itself.

    Returns:
      (labels in the heads' own ids, weights, weights of the labels that they can say). Positions without
      a label have weight 0.
    """
    tokens, answers = batch["tokens"], batch["weights"]
    shift = lambda x, by: jnp.pad(x[:, by:], ((0, 0), (0, by)))  # noqa: E731
    weights = shift(answers, behind) * shift(answers, ahead)
    wanted = shift(tokens, ahead)
    if vocab is None:
        return wanted, weights, weights
    own = jnp.asarray(vocab.own)[wanted]
    known = jnp.where(own < len(vocab), weights, 0.0)
    return jnp.minimum(own, len(vocab) - 1), weights, known


def judged(
    guesses: list[Float[Array, "B T K"]], batch: dict, vocab: DraftVocab | None, decay: float
) -> dict[str, Array]:
    """Sums over what is guessed 2, 3, … tokens behind every position.

    Args:
      guesses: logits, the first of the token two behind.
      batch: of tokens and weights, of which guesses may lack the last positions.
      vocab: what they can say.
      decay: weights fall by it from guess to guess.

    Returns:
      Summed loss, and of every guess how often it is right and among the first five.
    """
    sums = {"loss": jnp.zeros(())}
    for i, logits in enumerate(guesses):
        wanted, weights, known = (x[:, : logits.shape[1]] for x in labels(batch, 2 + i, vocab))
        sums["loss"] += decay**i * losses.cross_entropy(logits, wanted, known)
        sums[f"top1_{i}/count_{i}"] = losses.correct(logits, wanted, known)
        sums[f"top5_{i}/count_{i}"] = losses.among(logits, wanted, known, 5)
        sums[f"count_{i}"] = weights.sum()
    return sums | {"tokens": sums["count_0"]}


class OnFrozen:
    """What recipes for heads on a frozen target have in common; subclasses have ``model`` and ``evaluate``.

    Attributes:
      frozen: parameters that are the target's, and stay so.
    """

    model: Any
    frozen: tuple[str, ...]

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def rates(self, params: PyTree) -> PyTree:
        """0 freezes."""
        rate = lambda path, _: 0.0 if path[0].key in self.frozen else 1.0  # noqa: E731
        return jax.tree.map_with_path(rate, params)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """What is minimised, summed, and the sums that are reported."""
        del key
        sums = self.evaluate(params, batch)
        return sums["loss"], sums


@dataclasses.dataclass(frozen=True)
class Medusa1(OnFrozen):
    """Cross-entropy of every head, weighted ``decay`` to the power of its number.

    Batches have ``tokens``, ``weights`` (1 on tokens that answer) and the target's ``states``
    (`specjax.training.states`).

    Attributes:
      model: the heads.
      decay: the paper's 0.8.

    References:
      Cai et al. 2024 (2401.10774), section 2.2.1, equation 1.
    """

    model: Medusa
    decay: float = 0.8

    frozen = ("output",)  # that heads share

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """Summed loss, and of every head what is its first guess and among its first five."""
        logits = self.model.known_logits(params, batch["states"])
        guesses = [logits[:, :, i] for i in range(self.model.config.heads)]
        return judged(guesses, batch, self.model.config.draft_vocab, self.decay)


@dataclasses.dataclass(frozen=True)
class Eagle1(OnFrozen):
    """Regression of the target's next state, and the law that it stands for.

    Batches are `Medusa1`'s. Embedding and output layer are the target's, and stay so.

    Attributes:
      model: the head.
      noise: states are read with uniform noise up to so much.
      ce: weight of the cross-entropy between the laws of the true and of the said state.

    References:
      Li et al. 2024 (2401.15077), section 3.3 (smooth L1 + 0.1 cross-entropy, noise 0.1).
    """

    model: Eagle | EagleT5
    noise: float = 0.1
    ce: float = 0.1

    frozen = TAKEN

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """What is minimised, summed, and the sums that are reported."""
        states = batch["states"]
        noise = jax.random.uniform(key, states.shape, states.dtype, -self.noise, self.noise)
        sums = self._sums(params, batch, states + noise)
        return sums["loss"], sums

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """The sums without noise."""
        return self._sums(params, batch, batch["states"])

    def _sums(self, params: PyTree, batch: dict, read: Float[Array, "B T d"]) -> dict[str, Array]:
        params = params | jax.lax.stop_gradient({name: params[name] for name in TAKEN})
        wanted, weights, known = (
            x[:, :-1] for x in labels(batch, 2, self.model.config.draft_vocab)
        )
        pairs = Pairs(batch["tokens"][:, 1:], read[:, :-1])
        said = self.model.next_states(params, pairs, batch)
        true = batch["states"][:, 1:]
        logits = self.model.known_logits(params, said)
        law = jax.nn.softmax(jax.lax.stop_gradient(self.model.known_logits(params, true)))
        cross = ((jax.nn.logsumexp(logits, axis=-1) - (law * logits).sum(-1)) * weights).sum()
        regression = losses.smooth_l1(said, true, weights)
        return {
            "loss": regression + self.ce * cross,
            "regression": regression,
            "cross_entropy": cross,
            "top1": losses.correct(logits, wanted, known),
            "top5": losses.among(logits, wanted, known, 5),
            "tokens": weights.sum(),
        }


def rank_accuracies(
    model: Medusa, params: PyTree, batches: Iterable[dict], ranks: int = 10
) -> Float[np.ndarray, "heads ranks"]:
    """How often each guess of each head is right, on held-out answers: what a tree is chosen by.

    Args:
      model: the heads.
      params: their parameters.
      batches: see `Medusa1`.
      ranks: guesses per head.

    References:
      Cai et al. 2024 (2401.10774), section 2.3.3.
    """

    @jax.jit
    def count(params, batch):
        logits, right, tokens = model.known_logits(params, batch["states"]), [], []
        for i in range(model.config.heads):
            wanted, weights, known = labels(batch, 2 + i, model.config.draft_vocab)
            at = losses.rank(logits[:, :, i], wanted)
            right.append([jnp.where(at == r, known, 0.0).sum() for r in range(ranks)])
            tokens.append(weights.sum())
        return jnp.asarray(right), jnp.asarray(tokens)

    counts = [count(params, {n: jnp.asarray(x) for n, x in batch.items()}) for batch in batches]
    right, tokens = (
        sum(np.asarray(x, np.float64) for x in part) for part in zip(*counts, strict=True)
    )
    return right / np.maximum(tokens, 1)[:, None]


def from_target(
    model: Medusa | Eagle, target: str, seed: int = 0, shardings: PyTree | None = None
) -> PyTree:
    """Parameters to start from: what heads take from their target is the target's.

    Args:
      model: the heads.
      target: its name or path; see `specjax.pretrained.load`.
      seed: of the rest.
      shardings: where the parameters go; None is one device.
    """
    network, params = checkpoints.load_any(pretrained.locate(target))
    made = model.init(jax.random.key(seed))
    if isinstance(model, Medusa):
        made = medusa.begun(model, made, network, params)
    else:
        made |= model.taken(network, params)
    if isinstance(model, Eagle3):  # its own output layer begins as the target's
        made["lm_head"] = {"weight": heads.output_rows(model.config, network, params)}
    return made if shardings is None else devices.put(made, shardings)
