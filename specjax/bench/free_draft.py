"""A drafter that costs nothing, to time the rest of a round."""

import dataclasses
import math

import jax.numpy as jnp

from specjax.decode import loop, tree
from specjax.decode.interfaces import TokenTree


@dataclasses.dataclass(frozen=True)
class FreeDraft:
    """Proposes arbitrary tokens in a tree of a given shape: a round is its verify block and the rest.

    Attributes:
      depth: the deepest path.
      nodes: at least as many; a chain of ``depth``, and the rest below the root.
      vocab_size: of the target.
      chain: judged as a chain.
      drawn: judged as draws, uniform ones; else as chosen.
    """

    depth: int
    nodes: int
    vocab_size: int
    chain: bool = True
    drawn: bool = True

    taps = ()
    reach = 0

    @classmethod
    def like(cls, proposed: TokenTree, vocab_size: int) -> "FreeDraft":
        """One whose trees have the shape of another drafter's."""
        nodes, drawn = proposed.tokens.shape[1], proposed.log_q is not None
        return cls(proposed.depth, nodes, vocab_size, proposed.chain, drawn)

    def init(self, params, prefilled, slots):
        return ()

    def propose(self, params, state, text, sampling, keys):
        batch = text.length.shape[0]
        tokens = jnp.broadcast_to(loop.newest(text)[:, None], (batch, self.nodes)) ^ 1
        on, log_q = jnp.ones_like(tokens, bool), None
        if self.drawn:
            uniform = -math.log(self.vocab_size)
            log_q = jnp.full((batch, self.nodes, self.vocab_size), uniform, jnp.float32)
        if self.chain:
            return tree.chain(tokens, on, log_q), state
        index = jnp.arange(self.nodes, dtype=jnp.int32)
        parent = jnp.broadcast_to(jnp.where(index < self.depth, index - 1, -1), tokens.shape)
        q_row = jnp.broadcast_to(index if self.drawn else -1, tokens.shape)
        return TokenTree(tokens, parent, on, on, log_q, q_row, depth=self.depth), state

    def observe(self, params, state, outcome):
        return state

    def rewind(self, state, length):
        return state
