"""Prompt lookup: what followed the newest tokens before is copied.

References:
  Yang et al. 2023, LLMA (2304.04487), section 2; Saxena 2023, prompt lookup decoding
  (github.com/apoorvumang/prompt-lookup-decoding).
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Key

from specjax.decode import tree
from specjax.decode.interfaces import Params, Prefilled, Prompt, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.drafters import suffixes
from specjax.drafters.stateless import Stateless

FIRST, LAST = "first", "last"


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Copies the tokens behind the longest match of the newest ones; a chain, or a tree of several.

    Searched are, in this order, the prompt of an encoder-decoder and the text: start token and padding
    apart, all of it. Of matches of different lengths the longest is best, of equally long ones the
    ``tie`` says which; so a long match in the output beats a short one in the prompt. A copy ends where
    the text does, and with an EOS. Where nothing matches nothing is drafted: a plain round. It has no
    parameters, and drafts the same whatever the sampling.

    Prompt lookup decoding is the default. LLMA is ``PromptLookup(max_match=5, copy=19, output=False)``:
    its trigger length n = 1 is ``min_match``, its reference is the prompt, and its copied block of k = 20
    counts the newest token.

    Attributes:
      max_match: the most newest tokens that are looked for.
      min_match: the fewest that make a match.
      copy: tokens behind a match that are proposed (gamma).
      spans: matches that are looked at, the best ones; of several the copies are merged.
      budget: nodes of that tree; None is room for all copies. Better matches come first.
      tie: "first" is the leftmost of equally long matches (both papers' code), "last" the newest.
      output: whether what was emitted is searched too, or only what was given.
      eos_id: the target's, one or several; -1 for none.
    """

    max_match: int = 3
    min_match: int = 1
    copy: int = 10
    spans: int = 1
    budget: int | None = None
    tie: str = FIRST
    output: bool = True
    eos_id: int | tuple[int, ...] = 1

    def __post_init__(self):
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"matches of {self.min_match} to {self.max_match} tokens: they must rise from 1"
            )
        for name in ("copy", "spans", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tie not in (FIRST, LAST):
            raise ValueError(f"tie must be {FIRST!r} or {LAST!r}, got {self.tie!r}")

    @property
    def nodes(self) -> int:
        room = self.copy * self.spans
        return room if self.budget is None else min(self.budget, room)

    @property
    def chain(self) -> bool:
        return self.spans == 1

    @property
    def depth(self) -> int:
        return min(self.copy, self.nodes)

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> Prompt | tuple[()]:
        """The encoder's input; a decoder-only model's prompt stands in the text."""
        del params, slots
        return suffixes.reference(prefilled)

    def propose(
        self,
        params: Params,
        state: Prompt | tuple[()],
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, Prompt | tuple[()]]:
        """The best spans, as far as there are any."""
        del params, sampling, keys
        tokens, emitted = suffixes.buffer(state, text)
        if not self.output:
            tokens = jnp.where(emitted, suffixes.NOTHING, tokens)
        length = suffixes.matches(tokens, suffixes.newest(text, self.max_match), self.eos_id)
        first = self.tie == FIRST
        length, at = suffixes.longest(length, self.max_match, self.spans, first=first)
        spans = suffixes.behind(tokens, at, self.depth, self.eos_id)
        spans = jnp.where((length >= self.min_match)[..., None], spans, suffixes.NOTHING)
        if self.spans == 1:
            valid = spans[:, 0] >= 0
            return tree.chain(jnp.where(valid, spans[:, 0], 0), valid, None), state
        return tree.merge(spans, jnp.zeros(at.shape, jnp.float32), self.nodes), state
