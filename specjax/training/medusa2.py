"""The recipe Medusa-2: target and heads learn together.

The target then says something else than before, if not much: lossless decoding gives the trained one's text.
With ``decay`` and ``weight`` 1 this is how blockwise decoding fine-tunes its base (Stern et al. 2018,
section 6), but that all heads learn from every batch.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from specjax import checkpoints, pretrained
from specjax.decode import devices
from specjax.models import layers, medusa
from specjax.models.joint import Joint
from specjax.models.t5 import T5
from specjax.training import heads, losses, states


@dataclasses.dataclass(frozen=True)
class Medusa2:
    """Cross-entropy of the target and, weighted, of its heads, whose gradients reach the target.

    Batches are texts that answer (`specjax.training.answers.AnswerBatches`), or inputs and targets for a T5
    (`specjax.training.batches.Seq2SeqBatches`). Begin from heads that Medusa-1 trained (`from_heads`): the
    paper's first stage, without which the heads' gradients would harm the target.

    Attributes:
      model: both.
      weight: lambda_0 of the heads' loss.
      decay: from head to head.
      head_rate: their learning rate over the target's.

    References:
      Cai et al. 2024 (2401.10774), section 2.2.2 and appendix B: lambda_0 = 0.2, rates 5e-4 and 2e-3.
    """

    model: Joint
    weight: float = 0.2
    decay: float = 0.8
    head_rate: float = 4.0

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def rates(self, params: PyTree) -> PyTree:
        """The heads learn faster."""
        rate = {"target": 1.0, "heads": self.head_rate}
        return {name: jax.tree.map(lambda _, n=name: rate[n], params[name]) for name in rate}

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """What is minimised, summed, and the sums that are reported."""
        del key
        sums = self.evaluate(params, batch)
        return sums["target_loss/count"] + self.weight * sums["loss"], sums

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """Summed losses of the heads and of the target, and what each guesses."""
        target, own = self.model.target, self.model.heads
        read = states.of_t5 if isinstance(target, T5) else states.of_text
        batch = read(target, params["target"], batch)
        guesses = own.known_logits(params["heads"], batch["states"])
        guesses = [guesses[:, :, i] for i in range(own.config.heads)]
        sums = heads.judged(guesses, batch, own.config.draft_vocab, self.decay)
        wide = np.promote_types(batch["states"].dtype, np.float32)
        logits = layers.linear(batch["states"], target.output(params["target"]), wide)
        wanted, weights, _ = heads.labels(batch, 1, None, behind=1)
        entropy = losses.cross_entropy(logits, wanted, weights)
        right = losses.correct(logits, wanted, weights)
        return sums | {
            "target_loss/count": entropy,
            "target_accuracy/count": right,
            "count": weights.sum(),
        }


def from_heads(
    model: Joint, target: str, trained: str, seed: int = 0, shardings: PyTree | None = None
) -> PyTree:
    """Parameters to start from: a target, and heads that were trained on it while it was frozen.

    Args:
      model: both.
      target: name or path of the target; see `specjax.pretrained.load`.
      trained: path of the heads (a run of Medusa-1, or a folder of heads); "" for heads that say what the
        target says, as Medusa-1 begins.
      seed: of what is random then.
      shardings: where the parameters go; None is one device.

    Raises:
      ValueError: the heads are others.
    """
    _, params = checkpoints.load_any(pretrained.locate(target), model.target, "float32")
    if trained:
        stored = checkpoints.infer_config(pretrained.locate(trained))
        if stored != model.heads.config:
            raise ValueError(f"{trained} holds other heads: {stored}, not {model.heads.config}")
        own = checkpoints.load_any(pretrained.locate(trained), model.heads, "float32")[1]
    else:
        own = medusa.begun(
            model.heads, model.heads.init(jax.random.key(seed)), model.target, params
        )
    made = {"target": params, "heads": own}
    return made if shardings is None else devices.put(made, shardings)
