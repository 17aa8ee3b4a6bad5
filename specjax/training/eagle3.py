"""The recipe of EAGLE-3's heads: they are trained as they are tested, several steps of drafting at a time.

References:
  Li et al. 2025 (2503.01840), sections 3.2 and 4: no state is regressed, the head's own states are fed back,
  and every step's cross-entropy is weighted 0.8 to the power of its number (released code).
"""

import dataclasses

import jax
from jaxtyping import Array, PyTree

from specjax.models.eagle import Pairs
from specjax.models.eagle3 import Eagle3
from specjax.training import heads


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest(heads.OnFrozen):
    """Cross-entropy of every step of a draft.

    Batches are those of `specjax.training.heads`, with the target's three states side by side. Labels are the
    texts' own tokens, where the released code takes the target's law: of what the target said at temperature
    0 its likeliest tokens, of texts of others what these say.

    Attributes:
      model: the head.
      steps: of drafting; the paper unrolls 5, the released code 7.
      decay: of their weights.
    """

    model: Eagle3
    steps: int = 5
    decay: float = 0.8

    frozen = ("embed_tokens",)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"at least 1 step, got {self.steps}")

    def evaluate(self, params: PyTree, batch: dict) -> dict[str, Array]:
        """Summed loss, and of every step what is its first guess and among its first five."""
        params = params | {"embed_tokens": jax.lax.stop_gradient(params["embed_tokens"])}
        states = self.model.features(params, batch["states"])
        pairs = Pairs(batch["tokens"][:, 1:], states[:, :-1])
        said = self.model.simulated(params, pairs, self.steps)
        guesses = [self.model.known_logits(params, x) for x in said]
        return heads.judged(guesses, batch, self.model.config.draft_vocab, self.decay)
