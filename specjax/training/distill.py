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

from specjax.models.t5 import T5
from specjax.training.loop import Batches
from specjax.training.teacher import load_target


@dataclasses.dataclass(frozen=True)
class TeacherBatches:
    """Adds the target's log-probabilities to another source's batches.

    Attributes:
      batches: where inputs and targets come from.
      teacher: the target.
      path: where its parameters are, as `specjax.training.teacher.load_target` reads them.
      params: the parameters themselves, instead of ``path``.
    """

    batches: Batches
    teacher: T5
    path: str | None = None
    params: PyTree = None

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: int) -> dict[str, np.ndarray | Array]:
        batch = self.batches[position]
        return batch | {"teacher": self._log_probs(self._params, batch)}

    @functools.cached_property
    def _params(self) -> PyTree:
        return self.params if self.path is None else load_target(self.teacher, self.path)

    @functools.cached_property
    def _log_probs(self):
        def log_probs(params, batch):
            inputs = (batch["inputs"], batch["input_mask"], batch["decoder_inputs"])
            return jax.nn.log_softmax(self.teacher.forward(params, *inputs))

        return jax.jit(log_probs)


@dataclasses.dataclass(frozen=True)
class Distill:
    """Forward KL from teacher to draft; see `specjax.training.loop.Recipe`."""

    model: T5

    def init(self, key: Key[Array, ""]) -> PyTree:
        return self.model.init(key)

    def loss(self, params: PyTree, batch: dict, key: Key[Array, ""]) -> tuple[Array, dict]:
        """Summed KL(p || q) in nats, and the two acceptance rates it stands for.

        ``overlap`` is alpha at temperature 1 on this text, ``agreement`` alpha at temperature 0.
        """
        del key
        inputs = (batch["inputs"], batch["input_mask"], batch["decoder_inputs"])
        logits = self.model.forward(params, *inputs)
        log_q, log_p, weights = jax.nn.log_softmax(logits), batch["teacher"], batch["weights"]
        p = jnp.exp(log_p)
        kl = (p * (log_p - log_q)).sum(-1)
        overlap = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
        agreement = log_p.argmax(-1) == log_q.argmax(-1)
        total = (kl * weights).sum()
        return total, {
            "loss": total,
            "overlap": (overlap * weights).sum(),
            "agreement": jnp.where(agreement, weights, 0.0).sum(),
            "tokens": weights.sum(),
        }
