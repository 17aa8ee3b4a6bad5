"""Drafting as in "assisted generation": as many tokens as lately proved worth it, while the draft is sure.

References:
  J. Gante, Assisted Generation (2023), https://huggingface.co/blog/assisted-generation;
  J. Mamou et al., Faster Assisted Generation with Dynamic Speculation (2024),
  https://huggingface.co/blog/dynamic_speculation_lookahead; transformers'
  ``generation/candidate_generator.py`` and ``ConfidenceCriteria`` in ``stopping_criteria.py``.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode import devices, processors, tree
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Outcome, Params, Prefilled, Text, TokenTree
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT
from specjax.drafters.small_model import Chain, Drafted, SmallModel, within


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many tokens to draft next: transformers' "heuristic".

    Attributes:
      start: in a row's first round.
      up: how many more after a round in which all that was drafted was accepted.
      down: how many less after any other round; 1 is drafted at least.
    """

    start: int = 5
    up: int = 2
    down: int = 1

    def __post_init__(self):
        if self.start < 1 or self.up < 0 or self.down < 0:
            raise ValueError(
                f"a schedule starts at 1 or more and has steps of 0 or more, got {self}"
            )

    def after(
        self, gamma: Int[Array, "B"], drafted: Int[Array, "B"], accepted: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """The next round's number; a round without a draft says nothing, and leaves it as it is."""
        moved = jnp.where(accepted == drafted, gamma + self.up, jnp.maximum(gamma - self.down, 1))
        return jnp.where(drafted > 0, moved, gamma)


class AssistedState(NamedTuple):
    """A `DraftState` and what the schedule knows.

    Attributes:
      cache, open: see `DraftState`.
      gamma: int32 ``[B]``: tokens to draft in the next round at most.
      live: bool ``[B]``: whether the last round emitted anything. What has ended drafts one token a
        round, so that it does not keep the others waiting.
    """

    cache: Any
    open: Any
    gamma: Int[Array, "B"]
    live: Bool[Array, "B"]


class Drafts(NamedTuple):
    """A round's chains while they grow.

    Attributes:
      chain: what the draft carries from token to token.
      tokens: int32 ``[B, gamma]``.
      log_q: ``[B, gamma, V]``.
      length: int32 ``[B]``: how many of them are the row's own.
      on: bool ``[B]``: which rows go on.
      step: int32: how many tokens all rows have, beside the first.
    """

    chain: Chain
    tokens: Int[Array, "B N"]
    log_q: Float[Array, "B N V"]
    length: Int[Array, "B"]
    on: Bool[Array, "B"]
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Assisted(SmallModel):
    """A chain from a small model, of a length that each row finds for itself, round by round.

    A row drafts what its ``schedule`` says at most, and stops behind a token of which the draft was
    less sure than ``confidence``. That token stays in the block: left out, what is emitted would
    depend on how it was drawn, and no longer have the target's law. So it is exact with every lossless
    verifier for chains.

    Drafting ends when all rows have stopped: one row costs no draft step more than it has tokens. Of
    several rows the slowest decides. What is computed for the others meanwhile is thrown away: it
    counts nowhere (`Stats.drafted` counts a row's own tokens), and costs only where the draft is not
    bound by its weights' bytes. The target reads ``gamma`` + 1 tokens in every round, whatever was
    drafted, for its shapes are static.

    Like transformers' ``generate(assistant_model=...)``, a text with its ``heuristic_transient``
    schedule, but for this:

    - ``gamma`` bounds the schedule; there it grows as long as all is accepted. The schedule from 5 was
      transformers' default once; it is a constant 20 now (``schedule=None, gamma=20``).
    - Accepted is compared with what was drafted, as there today; older versions compared it with what
      the schedule allowed, so that a confidence stop lowered it even where all was accepted.
    - ``confidence`` stays what it is; with scikit-learn installed, transformers fits it to the rounds
      so far.
    - A drafted EOS does not stop the chain. It costs draft steps, no tokens: behind a refused EOS the
      schedule falls either way, behind an accepted one the text ends.
    - The last rounds may draft up to the length limit, there up to one token less.

    As there, a greedy row's confidence is the softmax of the processed logits, without temperature or
    filters, and that of a sampling row is the law that its token was drawn from.

    Attributes:
      gamma: tokens per round at most.
      schedule: of the number of tokens; None drafts ``gamma``.
      confidence: the draft stops behind a token less probable than this; None for no such stop.
    """

    gamma: int = 15
    schedule: Schedule | None = Schedule()
    confidence: float | None = 0.4

    def __post_init__(self):
        super().__post_init__()
        if self.schedule is not None and self.schedule.start > self.gamma:
            raise ValueError(
                f"the schedule starts at {self.schedule.start}, above gamma {self.gamma}"
            )
        if self.confidence is not None and not 0 < self.confidence <= 1:
            raise ValueError(f"confidence must lie in (0, 1], or be None, got {self.confidence}")

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> AssistedState:
        rows = prefilled.text.length.shape
        start = self.gamma if self.schedule is None else self.schedule.start
        small = super().init(params, prefilled, slots)
        return AssistedState(*small, jnp.full(rows, start, jnp.int32), jnp.ones(rows, bool))

    def propose(
        self,
        params: Params,
        state: AssistedState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, AssistedState]:
        """Drafts a chain (`SmallModel.propose`) until every row has stopped."""
        u = laws.uniform(laws.fold(keys, DRAFT), self.gamma)
        room = within(self.model, text, self.gamma)
        most = jnp.minimum(state.gamma, room.sum(1, dtype=jnp.int32))
        most = jnp.where(state.live, most, 1)

        def more(drafts: Drafts) -> Bool[Array, ""]:
            return devices.anywhere(drafts.on.any())

        def step(drafts: Drafts) -> Drafts:
            i = drafts.step
            u_i = lax.dynamic_index_in_dim(u, i + 1, axis=1, keepdims=False)
            drafted = self.next(params, state, text, sampling, drafts.chain, i, u_i)
            return self._add(drafts, drafted, sampling, most)

        first = self.first(params, state, text, sampling, u[:, 0])
        drafts = lax.while_loop(more, step, self._add(self._none(first), first, sampling, most))
        index = jnp.arange(self.gamma, dtype=jnp.int32)[None]
        valid = (index < drafts.length[:, None]) & room
        nodes = tree.chain(drafts.tokens, valid, drafts.log_q)
        return nodes, state._replace(open=drafts.chain.open)

    def observe(self, params: Params, state: AssistedState, outcome: Outcome) -> AssistedState:
        """As `SmallModel.observe`, and moves the schedule."""
        state = super().observe(params, state, outcome)
        live = outcome.count > 0
        drafted = outcome.tree.valid.sum(1, dtype=jnp.int32)
        moved = self.moved(state.gamma, drafted, outcome.verdict.accepted)
        return state._replace(gamma=jnp.where(live, moved, state.gamma), live=live)

    def moved(
        self, gamma: Int[Array, "B"], drafted: Int[Array, "B"], accepted: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """Tokens to draft after a round in which ``accepted`` of ``drafted`` were accepted."""
        if self.schedule is None:
            return gamma
        return jnp.minimum(self.schedule.after(gamma, drafted, accepted), self.gamma)

    def _none(self, first: Drafted) -> Drafts:
        """Chains without a token."""
        (rows, size), zero = first.log_q.shape, jnp.zeros((), jnp.int32)
        return Drafts(
            chain=first.chain,
            tokens=jnp.zeros((rows, self.gamma), jnp.int32),
            log_q=jnp.zeros((rows, self.gamma, size), first.log_q.dtype),
            length=jnp.zeros(rows, jnp.int32),
            on=jnp.ones(rows, bool),
            step=zero - 1,
        )

    def _add(
        self, drafts: Drafts, drafted: Drafted, sampling: Sampling, most: Int[Array, "B"]
    ) -> Drafts:
        """Adds a token, and stops the rows that have enough or were not sure of it."""
        at, (zero, token) = drafts.step + 1, (jnp.zeros((), jnp.int32), drafted.chain.token)
        length = drafts.length + drafts.on.astype(jnp.int32)
        return Drafts(
            drafted.chain,
            lax.dynamic_update_slice(drafts.tokens, token[:, None], (zero, at)),
            lax.dynamic_update_slice(drafts.log_q, drafted.log_q[:, None], (zero, at, zero)),
            length,
            drafts.on & (length < most) & self._sure(drafted, sampling),
            at,
        )

    def _sure(self, drafted: Drafted, sampling: Sampling) -> Bool[Array, "B"]:
        """Whether the draft gave its token at least ``confidence``; never where its law is none."""
        token = drafted.chain.token[:, None]
        if self.confidence is None:
            return jnp.ones(token.shape[0], bool)
        history = processors.history(drafted.chain.past)
        logits = laws.processed(drafted.logits, sampling, history)[:, 0]
        greedy = sampling.temperature <= laws.GREEDY_TEMPERATURE
        pick = lambda x: jnp.take_along_axis(x, token, axis=1)[:, 0]  # noqa: E731
        softmax = pick(logits) - jax.nn.logsumexp(logits, axis=1)
        return jnp.where(greedy, softmax, pick(drafted.log_q)) >= math.log(self.confidence)
