"""Recipe: maximum likelihood of targets given inputs, for encoder-decoders."""

import dataclasses

from jaxtyping import Array, Key, PyTree

from specjax.models.t5 import T5
from specjax.training import losses


@dataclasses.dataclass(frozen=True)
class Seq2Seq:
    """Teacher-forced cross-entropy; see `specjax.training.loop.Recipe`."""

    model: T5

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """Summed loss and the sums it is reported by."""
        del key  # no dropout, no noise
        logits = self.model.forward(
            params, batch["inputs"], batch["input_mask"], batch["decoder_inputs"]
        )
        targets, weights = batch["targets"], batch["weights"]
        total = losses.cross_entropy(logits, targets, weights)
        right = losses.correct(logits, targets, weights)
        return total, {"loss": total, "accuracy": right, "tokens": weights.sum()}
