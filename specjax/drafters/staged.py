"""Staged speculation: a chain from a draft that is itself decoded by a drafter, to any depth.

The draft is a target to the drafter inside: rounds of the same loop run within a proposal until the chain is
there. They are lossless, so the chain's tokens follow the draft's law, which every round knows: the target
outside judges them as those of a small model. The drafter inside may be any, a `Staged` one too, and draft
chains or trees. Heads (Medusa's, EAGLE's) lose their newest state whenever the target has judged: their first
round inside drafts nothing, and EAGLE's cache may keep a pair of a refused token. The text stays exact.

References:
  Spector and Re 2023 (2308.04623).
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.decode import devices, loop, stopping, tree
from specjax.decode import sampling as laws
from specjax.decode import stats as counters
from specjax.decode.interfaces import (
    Drafter,
    Model,
    Outcome,
    Params,
    Prefilled,
    Text,
    TokenTree,
)
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT
from specjax.drafters.small_model import GammaChain, prefill, within

# Of a decode whose end is said by the chain's length, not by the tokens it may emit.
WITHOUT_END = 1 << 30


class StagedState(NamedTuple):
    """The draft's cache, and the state of what drafts for it. Both know the text but its newest token."""

    cache: Any
    inner: Any


@dataclasses.dataclass(frozen=True)
class Staged(GammaChain):
    """A chain of ``gamma`` tokens from a draft that another drafter decodes.

    Attributes:
      model: the draft; ``params.draft`` are `Params` of it and of what drafts for it.
      inner: drafts for the draft.
      gamma: tokens per round, at least 1.
    """

    model: Model
    inner: Drafter
    gamma: int = 5

    @property
    def reach(self) -> int:
        """The last round inside may go past the chain, and what drafts there past that."""
        return self.gamma + 1 + 2 * (self.inner.depth + 1) + self.inner.reach

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> StagedState:
        read = prefill(self.model, params.draft.target, prefilled, slots, self.inner.taps)
        return StagedState(read.cache, self.inner.init(params.draft, read, slots))

    def propose(
        self,
        params: Params,
        state: StagedState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, StagedState]:
        """Decodes ``gamma + 1`` tokens of the draft: reading the last is what caches the one before it."""
        last = self._decode(params.draft, state, text, sampling, laws.fold(keys, DRAFT))
        index = jnp.arange(self.gamma, dtype=jnp.int32)[None]
        at = text.length[:, None] + index
        tokens = jnp.take_along_axis(last.text.tokens, at, axis=1)
        there = at < last.text.length[:, None]
        valid = there & within(self.model, text, self.gamma)
        kept = last.drafter
        return tree.chain(tokens, valid, kept.log_q), StagedState(last.cache, kept.inner)

    def _decode(
        self,
        params: Params,
        state: StagedState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> loop.State:
        """Rounds of the draft until every row has the tokens; a row that has them waits."""
        batch, wanted = text.length.shape[0], self.gamma + 1
        decoder = loop.Decoder(self.model, WITHOUT_END, Recording(self.inner), eos_id=-1)
        room = wanted + decoder.block
        tokens = jnp.pad(text.tokens, ((0, 0), (0, room)))
        log_q = jnp.zeros((batch, self.gamma, self.model.vocab_size), jnp.float32)
        first = loop.State(
            text=text._replace(tokens=tokens),
            cache=state.cache,
            drafter=Kept(state.inner, text.length, log_q),
            finish=jnp.full(batch, stopping.LIVE, jnp.int32),
            log_probs=jnp.zeros(tokens.shape, jnp.float32),
            keys=keys,
            stats=counters.empty(batch, self.inner.depth),
        )

        def live(state):
            return devices.anywhere((state.finish == stopping.LIVE).any())

        def more(state):
            state = loop.speculative_round(decoder, params, state, sampling=sampling)
            enough = state.text.length - text.length >= wanted
            waits = enough & (state.finish == stopping.LIVE)
            return state._replace(finish=jnp.where(waits, stopping.LENGTH, state.finish))

        return lax.while_loop(live, more, first)

    def observe(self, params: Params, state: StagedState, outcome: Outcome) -> StagedState:
        """Forgets what the target refused: what it accepted is known already."""
        del params
        return self.rewind(state, outcome.text.length)

    def rewind(self, state: StagedState, length: Int[Array, "B"]) -> StagedState:
        return StagedState(
            self.model.rewind(state.cache, length - 1), self.inner.rewind(state.inner, length)
        )


class Kept(NamedTuple):
    """State of `Recording`.

    Attributes:
      inner: of the drafter.
      begin: int32 ``[B]``: where the chain begins in the text.
      log_q: ``[B, gamma, V]``: the draft's law of each of its tokens that is there.
    """

    inner: Any
    begin: Int[Array, "B"]
    log_q: Float[Array, "B G V"]


@dataclasses.dataclass(frozen=True)
class Recording:
    """A drafter beside which the laws of what comes out are kept."""

    drafter: Drafter

    @property
    def depth(self) -> int:
        return self.drafter.depth

    @property
    def taps(self) -> tuple[str, ...]:
        return self.drafter.taps

    def propose(self, params: Params, state: Kept, text: Text, sampling: Sampling, keys):
        proposed, inner = self.drafter.propose(params, state.inner, text, sampling, keys)
        return proposed, state._replace(inner=inner)

    def observe(self, params: Params, state: Kept, outcome: Outcome) -> Kept:
        """Token i of the round stands behind row ``keep[i]`` of the block, whose law it was drawn from.

        Each place of the chain looks for its token: gathers, where a scatter would be ragged.
        """
        before = outcome.text.length - outcome.count - state.begin
        index = jnp.arange(state.log_q.shape[1], dtype=jnp.int32)[None] - before[:, None]
        here = (index >= 0) & (index < outcome.count[:, None])
        row = jnp.take_along_axis(outcome.keep, jnp.where(here, index, 0), axis=1)
        law = jnp.take_along_axis(outcome.log_p, jnp.clip(row, 0)[..., None], axis=1)
        log_q = jnp.where(here[..., None], law.astype(state.log_q.dtype), state.log_q)
        return state._replace(inner=self.drafter.observe(params, state.inner, outcome), log_q=log_q)
