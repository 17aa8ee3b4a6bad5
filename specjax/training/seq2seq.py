"""Recipe: maximum likelihood of targets given inputs, for encoder-decoders."""

import dataclasses

from jaxtyping import Array, Key, PyTree

from specjax import checkpoints
from specjax.models import layers
from specjax.models.t5 import T5
from specjax.training import losses


@dataclasses.dataclass(frozen=True)
class Seq2Seq:
    """Teacher-forced cross-entropy; see `specjax.training.loop.Recipe`.

    Attributes:
      model: what is trained.
      dropout_rate: T5X's dropout; 0.1 when fine-tuning.
      z_loss: weight of `losses.z_loss` in what is minimised (the reported loss is without it).
      remat_policy: "none", or what the backward pass computes again to save memory: "minimal" (all but
        products of matrices) or "full"; see `specjax.models.stack.REMAT_POLICIES`.
    """

    model: T5
    dropout_rate: float = 0.0
    z_loss: float = 0.0
    remat_policy: str = "none"

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """What is minimised, summed, and the sums that are reported."""
        return self._loss(params, batch, layers.Dropout(key, self.dropout_rate))

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """The same sums without dropout."""
        return self._loss(params, batch, layers.KEEP)[1]

    def _loss(self, params: PyTree, batch: dict, drop) -> tuple[Array, dict]:
        inputs = (batch["inputs"], batch["input_mask"], batch["decoder_inputs"])
        logits = self.model.forward(params, *inputs, drop=drop, remat_policy=self.remat_policy)
        targets, weights = batch["targets"], batch["weights"]
        entropy = losses.cross_entropy(logits, targets, weights)
        right = losses.correct(logits, targets, weights)
        total = entropy + self.z_loss * losses.z_loss(logits, weights) if self.z_loss else entropy
        return total, {"loss": entropy, "accuracy": right, "tokens": weights.sum()}


def pretrained(model: T5, path: str, shardings: PyTree | None = None) -> PyTree:
    """Parameters to fine-tune, in float32, from any checkpoint that `checkpoints.load_any` reads.

    Args:
      model: what they must fit.
      path: the checkpoint.
      shardings: each leaf goes straight there; None is one device.
    """
    return checkpoints.load_any(path, model, "float32", shardings)[1]
