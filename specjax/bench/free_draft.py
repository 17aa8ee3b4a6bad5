"""A drafter that costs nothing, to time the rest of a round."""

import dataclasses
import math

import jax.numpy as jnp

from specjax.decode import loop, tree


@dataclasses.dataclass(frozen=True)
class FreeDraft:
    """Proposes arbitrary tokens, as if drawn uniformly: a round is its verify block and the rest.

    Attributes:
      gamma: tokens per round.
      vocab_size: of the target.
    """

    gamma: int
    vocab_size: int

    taps = ()
    reach = 0

    @property
    def depth(self) -> int:
        return self.gamma

    nodes = depth

    def init(self, params, prefilled, slots):
        return ()

    def propose(self, params, state, text, sampling, keys):
        batch = text.length.shape[0]
        tokens = jnp.broadcast_to(loop.newest(text)[:, None], (batch, self.gamma)) ^ 1
        uniform = -math.log(self.vocab_size)
        log_q = jnp.full((batch, self.gamma, self.vocab_size), uniform, jnp.float32)
        return tree.chain(tokens, jnp.ones_like(tokens, bool), log_q), state

    def observe(self, params, state, outcome):
        return state

    def rewind(self, state, length):
        return state
