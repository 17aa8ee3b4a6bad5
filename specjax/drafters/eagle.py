"""Drafting with EAGLE's head: state by state, as a chain or a static tree.

What trees of other shapes need of it is in `Pairwise`.

References:
  Li et al. 2024 (2401.15077), sections 3.1 and 3.2 and appendix A.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax.decode import sampling as laws
from specjax.decode.interfaces import Block, Outcome, Params, Prefilled, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT
from specjax.drafters import levels
from specjax.models.eagle import Eagle, Pairs, side_by_side
from specjax.models.eagle_t5 import EagleT5


class EagleState(NamedTuple):
    """The head's own cache, and the pairs that it has not read.

    These are the last ``lag`` tokens of the text, with the states behind which the target said them: what
    the head put out itself while it drafted is never kept.

    Attributes:
      cache: keys and values of all pairs before them.
      states: ``[B, K, d]``; garbage from ``lag`` on.
      lag: int32 ``[B]``: how many; 0 where there is no pair yet, or none that is known (`Pairwise.rewind`).
      open: this round's block and tree, between `propose` and `observe`.
    """

    cache: Any
    states: Float[Array, "B K d"]
    lag: Int[Array, "B"]
    open: Any


class Pairwise:
    """What drafting with a head's states has in common, whatever the tree.

    Where no state is known yet nothing is drafted. Logit processors shape the target's law alone.
    """

    model: Eagle | EagleT5
    depth: int

    @property
    def taps(self) -> tuple[str, ...]:
        return (*self.model.taps, *self.model.reads)

    @property
    def reach(self) -> int:
        """Slots past the target's: a block of pairs is as wide as a round can be long."""
        return self.depth + 1

    @property
    def inner(self) -> int:
        """Nodes that may be read, since they may have children."""
        raise NotImplementedError

    @property
    def slots(self) -> int:
        """Open slots: the unread pairs, then every node that is read."""
        return self.depth + 1 + self.inner

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> EagleState:
        """Reads the prompt's pairs, as far as there are any."""
        cache, last, lag = self.model.begin(params.draft, prefilled, slots)
        unread = jnp.pad(last, ((0, 0), (0, self.depth), (0, 0)))
        return EagleState(cache, unread, lag, self.model.open(lag.shape[0], self.slots))

    def read_text(
        self, params: Params, state: EagleState, text: Text
    ) -> tuple[Float[Array, "B 1 d"], Any]:
        """Reads the unread pairs: (the state behind the root, open slots with them)."""
        index = jnp.arange(self.depth + 1, dtype=jnp.int32)[None]
        at = jnp.clip(
            text.length[:, None] - state.lag[:, None] + index, 0, text.tokens.shape[1] - 1
        )
        words = jnp.take_along_axis(text.tokens, at, axis=1)
        causal = jnp.asarray(np.tri(self.depth + 1, self.slots, dtype=bool))
        mask = jnp.broadcast_to(causal, (*words.shape, self.slots))
        block = Block(Pairs(words, state.states), jnp.broadcast_to(index, words.shape), mask)
        states, open_ = self.model.read(params.draft, state.cache, block, state.open, 0)
        newest = jnp.maximum(state.lag - 1, 0)[:, None, None]
        return jnp.take_along_axis(states, newest, axis=1), open_

    def read_nodes(
        self, params: Params, state: EagleState, pairs: Pairs, depth: int, mask, open_, at: int
    ) -> tuple[Float[Array, "B M d"], Any]:
        """Reads nodes of one depth.

        Args:
          params: the head's are read.
          state: before this round.
          pairs: the nodes with the states behind their parents.
          depth: theirs.
          mask: bool ``[B or 1, M, slots]``: of the open slots, their ancestors and themselves. They see the
            unread pairs too.
          open_: the open slots.
          at: the first slot they are read into.

        Returns:
          (the states behind them, the open slots with them).
        """
        unread = jnp.arange(self.slots, dtype=jnp.int32)[None] < state.lag[:, None]
        place = jnp.broadcast_to((state.lag - 1 + depth)[:, None], pairs.tokens.shape)
        block = Block(pairs, place, mask | unread[:, None])
        return self.model.read(params.draft, state.cache, block, open_, at)

    def observe(self, params: Params, state: EagleState, outcome: Outcome) -> EagleState:
        """Commits what was read of the target's own states; the round's new states are read next."""
        went = outcome.count > 0
        slots = jnp.broadcast_to(jnp.arange(self.depth + 1, dtype=jnp.int32), outcome.keep.shape)
        cache = self.model.commit(state.cache, state.open, slots, jnp.where(went, state.lag, 0))
        seen = side_by_side(outcome.extended.taps, self.model.taps)
        new = jnp.take_along_axis(seen, jnp.maximum(outcome.keep, 0)[..., None], axis=1)
        new = self.model.features(params.draft, new)
        states = jnp.where(went[:, None, None], new.astype(state.states.dtype), state.states)
        lag = jnp.where(went, outcome.count, state.lag)
        return EagleState(cache, states, lag, state.open)

    def rewind(self, state: EagleState, length: Int[Array, "B"]) -> EagleState:
        """Of an earlier text the newest state is gone, and so is its pair.

        Nothing is drafted until the target has said another token; what is read then stands one pair too
        early. The text is exact all the same.
        """
        cache = self.model.rewind(state.cache, jnp.maximum(length - 2, 0))
        return state._replace(cache=cache, lag=jnp.zeros_like(state.lag))


@dataclasses.dataclass(frozen=True)
class EagleHead(levels.StaticTree, Pairwise):
    """A static tree whose nodes the head's laws fill, level by level.

    Attributes:
      model: the head; ``params.draft`` are its parameters.
    """

    model: Eagle | EagleT5

    @functools.cached_property
    def _levels(self) -> list[levels.Level]:
        return levels.plan(self.template)

    @functools.cached_property
    def inner(self) -> int:
        return levels.inner(self.template)

    def propose(
        self,
        params: Params,
        state: EagleState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, EagleState]:
        """Reads the unread pairs, then every level's nodes that have children."""
        keys, vocab = laws.fold(keys, DRAFT), self.model.config.draft_vocab
        states, open_ = self.read_text(params, state, text)
        words, there, log_q = [], [], []
        for depth, level in enumerate(self._levels):
            if depth:
                pairs = Pairs(words[-1][:, level.drafted], states[:, level.behind])
                mask = jnp.asarray(level.mask)[None]
                states, open_ = self.read_nodes(params, state, pairs, depth, mask, open_, level.at)
            logits, width = self.model.known_logits(params.draft, states), int(level.rank.max()) + 1
            own = laws.fold(keys, depth) if self.draws else None
            found = levels.children(logits, vocab, width, sampling, own)
            words.append(found.tokens[:, level.parent, level.rank])
            there.append(found.there[:, level.parent, level.rank])
            log_q.append(found.log_q)
        there = jnp.concatenate(there, axis=1) & (state.lag > 0)[:, None]
        log_q = jnp.concatenate(log_q, axis=1) if self.draws else None
        law = np.concatenate([level.law for level in self._levels])
        tree = self.filled(jnp.concatenate(words, axis=1), there, found.drawn, log_q, law)
        return tree, state._replace(open=open_)
