"""Drafting with EAGLE's head: state by state, as a chain or a static tree.

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
from specjax.decode.tree import Template
from specjax.decode.verify import DRAFT
from specjax.drafters import levels
from specjax.models.eagle import Eagle, Pairs
from specjax.models.eagle_t5 import EagleT5
from specjax.models.heads import TAP


class EagleState(NamedTuple):
    """The head's own cache, and the pairs that it has not read.

    These are the last ``lag`` tokens of the text, with the states behind which the target said them: what
    the head put out itself while it drafted is never kept.

    Attributes:
      cache: keys and values of all pairs before them.
      states: ``[B, K, d]``; garbage from ``lag`` on.
      lag: int32 ``[B]``: how many; 0 where there is no pair yet, or none that is known (`EagleHead.rewind`).
      open: this round's block and tree, between `propose` and `observe`.
    """

    cache: Any
    states: Float[Array, "B K d"]
    lag: Int[Array, "B"]
    open: Any


@dataclasses.dataclass(frozen=True)
class EagleHead(levels.StaticTree):
    """A static tree whose nodes the head's laws fill, level by level.

    Where no state is known yet nothing is drafted. Logit processors shape the target's law alone.

    Attributes:
      model: the head; ``params.draft`` are its parameters.
    """

    model: Eagle | EagleT5

    @property
    def taps(self) -> tuple[str, ...]:
        return (TAP, *self.model.reads)

    @property
    def reach(self) -> int:
        """Slots past the target's: a block of pairs is as wide as a round can be long."""
        return self.depth + 1

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> EagleState:
        """Reads the prompt's pairs, as far as there are any."""
        cache, last, lag = self.model.begin(params.draft, prefilled, TAP, slots)
        unread = jnp.pad(last, ((0, 0), (0, self.depth), (0, 0)))
        return EagleState(cache, unread, lag, self.model.open(lag.shape[0], self._slots))

    @functools.cached_property
    def _levels(self) -> list["_Level"]:
        return _plan(self.template)

    @property
    def _slots(self) -> int:
        """Open slots: the unread pairs, then every node that has children."""
        return self._levels[0].mask.shape[1]

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
        states, open_ = self._unread(params, state, text)
        words, there, log_q = [], [], []
        for depth, level in enumerate(self._levels):
            if depth:
                pairs = Pairs(words[-1][:, level.drafted], states[:, level.behind])
                block = self._block(pairs, state.lag, depth, level.mask)
                states, open_ = self.model.read(params.draft, state.cache, block, open_, level.at)
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

    def _unread(self, params: Params, state: EagleState, text: Text):
        """(the state behind the root ``[B, 1, d]``, open slots with the unread pairs)."""
        index = jnp.arange(self.depth + 1, dtype=jnp.int32)[None]
        at = jnp.clip(
            text.length[:, None] - state.lag[:, None] + index, 0, text.tokens.shape[1] - 1
        )
        words = jnp.take_along_axis(text.tokens, at, axis=1)
        mask = jnp.broadcast_to(jnp.asarray(self._levels[0].mask), (*words.shape, self._slots))
        block = Block(Pairs(words, state.states), jnp.broadcast_to(index, words.shape), mask)
        states, open_ = self.model.read(params.draft, state.cache, block, state.open, 0)
        newest = jnp.maximum(state.lag - 1, 0)[:, None, None]
        return jnp.take_along_axis(states, newest, axis=1), open_

    def _block(self, pairs: Pairs, lag: Int[Array, "B"], depth: int, mask: np.ndarray) -> Block:
        """Nodes of one depth, which see the unread pairs, their ancestors and themselves."""
        unread = jnp.arange(self._slots, dtype=jnp.int32)[None] < lag[:, None]
        place = jnp.broadcast_to((lag - 1 + depth)[:, None], pairs.tokens.shape)
        return Block(pairs, place, jnp.asarray(mask)[None] | unread[:, None])

    def observe(self, params: Params, state: EagleState, outcome: Outcome) -> EagleState:
        """Commits what was read of the target's own states; the round's new states are read next."""
        del params
        went = outcome.count > 0
        slots = jnp.broadcast_to(jnp.arange(self.depth + 1, dtype=jnp.int32), outcome.keep.shape)
        cache = self.model.commit(state.cache, state.open, slots, jnp.where(went, state.lag, 0))
        seen = outcome.extended.taps[TAP]
        new = jnp.take_along_axis(seen, jnp.maximum(outcome.keep, 0)[..., None], axis=1)
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


class _Level(NamedTuple):
    """One step of drafting: nodes that are read, and the children that they get.

    Attributes:
      drafted: which of the level's nodes (in the tree's order) are read: those with children.
      behind: the parent of each of them among the nodes that were read one step before.
      at: the first open slot they are read into.
      mask: bool ``[M, W]``: the open slots they see, but for the unread pairs.
      parent: of every child, which of the nodes read.
      rank: of every child, the how-manieth child it is.
      law: of every child, which of all laws it is from.
    """

    drafted: np.ndarray
    behind: np.ndarray
    at: int
    mask: np.ndarray
    parent: np.ndarray
    rank: np.ndarray
    law: np.ndarray


def _plan(shape: Template) -> list[_Level]:
    """The levels of a tree; the first one reads the unread pairs, of which the root is the newest."""
    inner, width = set(shape.parents.tolist()), shape.depth + 1
    wide = width + len(inner - {-1})
    slot, out, read, laws_ = {}, [], [-1], 0
    for depth in range(shape.depth):
        nodes = np.flatnonzero(shape.levels == depth)
        before, drafted = read, [i for i, n in enumerate(nodes.tolist()) if n in inner]
        if depth:
            read = [int(nodes[i]) for i in drafted]
        at, mask = (width + len(slot), []) if depth else (0, np.tri(width, wide, dtype=bool))
        for n in read if depth else ():
            slot[n] = width + len(slot)
            seen = np.zeros(wide, bool)
            while n >= 0:
                seen[slot[n]], n = True, int(shape.parents[n])
            mask.append(seen)
        children = np.flatnonzero(shape.levels == depth + 1)
        parent = np.asarray([read.index(p) for p in shape.parents[children]])
        behind = np.asarray([before.index(int(shape.parents[n])) for n in read] if depth else [0])
        out.append(
            _Level(
                np.asarray(drafted, np.int32), behind, at, np.asarray(mask), parent,
                shape.ranks[children], (laws_ + parent).astype(np.int32),
            )
        )  # fmt: skip
        laws_ += len(read)
    return out
