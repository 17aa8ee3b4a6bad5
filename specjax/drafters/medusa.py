"""Drafting with Medusa's heads: all of a tree at once, from the target's last hidden state.

References:
  Cai et al. 2024 (2401.10774), sections 2.1.2 (trees) and 2.3.1 (acceptance); Stern et al. 2018
  (1811.03115), whose blockwise decoding is the tree of one path.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode import sampling as laws
from specjax.decode.interfaces import Outcome, Params, Prefilled, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT
from specjax.drafters import levels
from specjax.models.heads import TAP
from specjax.models.medusa import Medusa


class MedusaState(NamedTuple):
    """What the heads read next.

    Attributes:
      hidden: ``[B, d]``: the target's state behind which it said the newest token.
      known: ``[B]``: whether there is one. An encoder-decoder has none before its first token.
    """

    hidden: Float[Array, "B d"]
    known: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True)
class MedusaHeads(levels.StaticTree):
    """A static tree whose level i + 1 head i fills: every node there has the same children.

    A round whose drafts come from a state before the text's (the first one of an encoder-decoder) drafts
    nothing. Logit processors shape the target's law alone: heads do not know the path they stand on.

    Attributes:
      model: the heads; ``params.draft`` are their parameters. ``widths`` are here the Cartesian product of so
        many likeliest tokens of each head.
    """

    model: Medusa

    def __post_init__(self):
        super().__post_init__()
        heads = self.model.config.heads
        if self.depth > heads:
            raise ValueError(f"a tree of depth {self.depth} from {heads} heads")

    taps = (TAP,)
    reach = 0

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> MedusaState:
        del params, slots
        batch, width = prefilled.text.length.shape[0], self.model.config.emb_dim
        states = prefilled.taps.get(TAP)
        if states is None:
            nothing = jnp.zeros((batch, width), self.model.config.dtype)
            return MedusaState(nothing, jnp.zeros(batch, bool))
        last = prefilled.text.length - 2  # behind it stands the newest token
        hidden = jnp.take_along_axis(states, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
        return MedusaState(hidden, last >= 0)

    def propose(
        self,
        params: Params,
        state: MedusaState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, MedusaState]:
        """One pass of the heads."""
        del text
        shape = self.template
        logits = self.model.known_logits(params.draft, state.hidden[:, None])[:, 0, : shape.depth]
        keys = laws.fold(keys, DRAFT) if self.draws else None
        vocab, width = self.model.config.draft_vocab, int(shape.ranks.max()) + 1
        found = levels.children(logits, vocab, width, sampling, keys)
        level = shape.levels - 1
        pick = lambda x: x[:, jnp.asarray(level), jnp.asarray(shape.ranks)]  # noqa: E731
        there = pick(found.there) & state.known[:, None]
        return self.filled(pick(found.tokens), there, found.drawn, found.log_q, level), state

    def observe(self, params: Params, state: MedusaState, outcome: Outcome) -> MedusaState:
        """Takes the state that said the newest token."""
        del params
        last = jnp.maximum(outcome.count - 1, 0)[:, None]
        at = jnp.take_along_axis(outcome.keep, last, axis=1)
        hidden = jnp.take_along_axis(outcome.extended.taps[TAP], at[..., None], axis=1)[:, 0]
        went = outcome.count > 0
        hidden = hidden.astype(state.hidden.dtype)
        return MedusaState(jnp.where(went[:, None], hidden, state.hidden), state.known | went)

    def rewind(self, state: MedusaState, length: Int[Array, "B"]) -> MedusaState:
        """Of an earlier text the state is gone."""
        del length
        return state._replace(known=jnp.zeros_like(state.known))
