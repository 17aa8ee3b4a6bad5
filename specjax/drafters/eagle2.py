"""EAGLE-2: a tree that grows where the head is confident, anew in every round.

References:
  Li et al. 2024 (2406.16858), section 4: expansion (4.1) and reranking (4.2).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from specjax.decode import tree
from specjax.decode.interfaces import Params, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.drafters.eagle import EagleState, Pairwise
from specjax.models.eagle import Eagle, Pairs
from specjax.models.eagle_t5 import EagleT5


@dataclasses.dataclass(frozen=True)
class Eagle2(Pairwise):
    """A dynamic tree of EAGLE-1's head: of every level the most valuable nodes get children.

    A node's value is the product of the head's probabilities on its path. Of each level the ``expand`` most
    valuable nodes are read and get ``expand`` children each; of all nodes the ``nodes`` most valuable ones
    are verified. They are the likeliest tokens at every temperature, chosen and not drawn: lossless.

    Attributes:
      model: the head; ``params.draft`` are its parameters.
      depth: levels, each a forward pass of the head.
      expand: k.
      nodes: m. The paper's values are 6, 10 and 60; where verified tokens cost, take fewer.
    """

    model: Eagle | EagleT5
    depth: int = 6
    expand: int = 10
    nodes: int = 60

    def __post_init__(self):
        for name in ("depth", "expand", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.nodes < self.depth:
            raise ValueError(f"{self.nodes} nodes are too few for a path of {self.depth}")
        grown = self.expand + (self.depth - 1) * self.expand**2
        if self.nodes > grown:
            raise ValueError(f"{self.nodes} nodes of a tree that grows {grown}")

    @property
    def inner(self) -> int:
        return (self.depth - 1) * self.expand

    def propose(
        self,
        params: Params,
        state: EagleState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, EagleState]:
        """Expands level by level, then keeps the best of all."""
        del sampling, keys
        k, batch = self.expand, state.lag.shape[0]
        states, open_ = self.read_text(params, state, text)
        wide = np.promote_types(states.dtype, np.float32)  # sums of a path's logarithms
        words, values = self._children(params, states, jnp.zeros((batch, 1), wide))
        mask = jnp.zeros((batch, k, self.slots), bool)
        parent = jnp.full((batch, k), -1, jnp.int32)
        grown = [(words, values, parent)]
        pick = lambda x, at: jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), 1)  # noqa: E731
        for depth in range(1, self.depth):
            # Of the level before, where every k nodes are siblings.
            best = jax.lax.top_k(values, k)[1].astype(jnp.int32)
            first = sum(level[0].shape[1] for level in grown[:-1])
            at = self.depth + 1 + (depth - 1) * k
            pairs = Pairs(pick(words, best), pick(states, best // k))
            own = jax.nn.one_hot(at + jnp.arange(k), self.slots, dtype=bool)[None]
            mask = (pick(mask, best // k) if depth > 1 else mask) | own
            states, open_ = self.read_nodes(params, state, pairs, depth, mask, open_, at)
            words, values = self._children(params, states, pick(values, best))
            grown.append((words, values, jnp.repeat(first + best, k, axis=1)))
        words, values, parent = (jnp.concatenate(x, axis=1) for x in zip(*grown, strict=True))
        there = jnp.broadcast_to((state.lag > 0)[:, None], words.shape)
        whole = TokenTree(
            words, parent, there, there, None, jnp.full_like(parent, -1), depth=self.depth
        )
        return tree.prune(whole, values, self.nodes), state._replace(open=open_)

    def _children(self, params: Params, states, values):
        """(tokens, log of their values): ``expand`` of every node, siblings together ``[B, M * k]``."""
        vocab = self.model.config.draft_vocab
        log_q = jax.nn.log_softmax(self.model.known_logits(params.draft, states))
        best, words = jax.lax.top_k(log_q, self.expand)
        words = words.astype(jnp.int32)
        words = words if vocab is None else jnp.asarray(vocab.ids)[words]
        flat = lambda x: x.reshape(len(x), -1)  # noqa: E731
        return flat(words), flat(values[..., None] + best.astype(values.dtype))
