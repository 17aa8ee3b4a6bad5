"""Drafting with a small autoregressive model: gamma tokens, one after the other.

References:
  Leviathan et al. 2023 (2211.17192), algorithm 1; Chen et al. 2023 (2302.01318), algorithm 2;
  Gandhi et al. 2023, Distil-Whisper (2311.00430), for a draft that shares the target's encoder.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax.decode import processors, tree
from specjax.decode import sampling as laws
from specjax.decode.interfaces import (
    Block,
    Extended,
    Model,
    Outcome,
    Params,
    Prefilled,
    Text,
    TokenTree,
)
from specjax.decode.sampling import Sampling
from specjax.decode.verify import DRAFT


class Chain(NamedTuple):
    """A chain while it grows.

    Attributes:
      open: what the draft has read of it.
      token: int32 ``[B]``: the newest, which is not read yet.
      past: the text and the chain before ``token``, where a logit processor wants them.
    """

    open: Any
    token: Int[Array, "B"]
    past: Text | None


class Drafted(NamedTuple):
    """A chain with one more token.

    Attributes:
      chain: the chain.
      log_q: ``[B, V]``: the law the token was drawn from.
      logits: ``[B, 1, V]``: the draft's own, which that law was made from.
    """

    chain: Chain
    log_q: Float[Array, "B V"]
    logits: Float[Array, "B 1 V"]


class DraftState(NamedTuple):
    """The draft's own cache, which lags the text by one or two tokens.

    Attributes:
      cache: committed keys and values; length is text length - 1 or - 2.
      open: this round's block and chain, between `propose` and `observe`.
    """

    cache: Any
    open: Any


class GammaChain:
    """What drafters of a chain of ``gamma`` tokens from a ``model`` have in common."""

    chain = True

    def __post_init__(self):
        if self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {self.gamma}; decode plainly for 0")

    @property
    def depth(self) -> int:
        return self.gamma

    nodes = depth

    @property
    def taps(self) -> tuple[str, ...]:
        return self.model.reads


@dataclasses.dataclass(frozen=True)
class SmallModel(GammaChain):
    """A chain of ``gamma`` tokens from a small model.

    Attributes:
      model: the draft; ``params.draft`` are its parameters. An encoder-decoder reads the prompt
        with its own encoder, or shares the target's (`Model.reads`), as Distil-Whisper does.
      gamma: tokens per round, at least 1.
    """

    model: Model
    gamma: int = 5

    @property
    def reach(self) -> int:
        """Slots past the target's: the first block is two tokens wide."""
        return 2

    def init(self, params: Params, prefilled: Prefilled, slots: int) -> DraftState:
        cache = prefill(self.model, params.draft, prefilled, slots).cache
        return DraftState(cache, self.model.open(prefilled.text.length.shape[0], self.gamma + 1))

    def propose(
        self,
        params: Params,
        state: DraftState,
        text: Text,
        sampling: Sampling,
        keys: Key[Array, "B"],
    ) -> tuple[TokenTree, DraftState]:
        """Drafts a chain. Open slot 0 holds the token before the root, slot 1 the root, then drafts.

        The cache lacks the root, and after a fully accepted round also the token before it. Both
        are read in one block; where the first is cached already, its open slot is masked.
        """
        u = laws.uniform(laws.fold(keys, DRAFT), self.gamma)
        first = self.first(params, state, text, sampling, u[:, 0])

        def step(chain, inputs):
            drafted = self.next(params, state, text, sampling, chain, *inputs)
            return drafted.chain, (drafted.chain.token, drafted.log_q)

        steps = jnp.arange(self.gamma - 1, dtype=jnp.int32)
        chain, (more, log_qs) = lax.scan(step, first.chain, (steps, u[:, 1:].T))
        tokens = jnp.concatenate([first.chain.token[:, None], more.T], axis=1)
        log_q = jnp.concatenate([first.log_q[:, None], log_qs.transpose(1, 0, 2)], axis=1)
        valid = within(self.model, text, self.gamma)
        return tree.chain(tokens, valid, log_q), DraftState(state.cache, chain.open)

    def first(
        self,
        params: Params,
        state: DraftState,
        text: Text,
        sampling: Sampling,
        u: Float[Array, "B"],
    ) -> Drafted:
        """Reads what the cache lacks, and drafts token 0."""
        block = _first_block(text, text.length - state.cache.length, self.gamma)
        read = self.model.extend(params.draft, state.cache, block, logits_from=1)
        return _drafted(read, sampling, processors.recall(sampling.processors, text), u)

    def next(
        self,
        params: Params,
        state: DraftState,
        text: Text,
        sampling: Sampling,
        chain: Chain,
        i: Int[Array, ""],
        u: Float[Array, "B"],
    ) -> Drafted:
        """Reads token i of a chain, and drafts token i + 1."""
        block = _next_block(chain.token, text.length - state.cache.length, i, self.gamma)
        read = self.model.extend(params.draft, state.cache, block, chain.open, i + 2)
        return _drafted(read, sampling, processors.remember(chain.past, chain.token), u)

    def observe(self, params: Params, state: DraftState, outcome: Outcome) -> DraftState:
        """Commits what the block read and what of the chain was accepted.

        After the round the cache lacks the newest token; a row's last draft need not have been read,
        so after full acceptance it lacks one more.
        """
        del params
        old = outcome.text.length - outcome.count
        lag = old - state.cache.length
        drafted = outcome.tree.valid.sum(1, dtype=jnp.int32)
        read = lag + jnp.maximum(drafted, 1) - 1  # without a draft the root was read all the same
        count = jnp.where(outcome.count > 0, jnp.minimum(lag - 1 + outcome.count, read), 0)
        slots = jnp.arange(self.gamma + 1, dtype=jnp.int32)[None]
        keep = jnp.minimum(slots + (2 - lag)[:, None], self.gamma)
        return state._replace(cache=self.model.commit(state.cache, state.open, keep, count))

    def rewind(self, state: DraftState, length: Int[Array, "B"]) -> DraftState:
        return state._replace(cache=self.model.rewind(state.cache, length - 1))


def prefill(model: Model, params: PyTree, target: Prefilled, slots: int, taps=()) -> Prefilled:
    """A draft's own prefill, which takes from the target's what the draft shares with it."""
    shared = {name: target.taps[name] for name in model.reads}
    return model.prefill(params, target.prompt, slots, taps=taps, **shared)


def within(model: Model, text: Text, gamma: int) -> Bool[Array, "B gamma"]:
    """Which of ``gamma`` drafts come from positions that the draft model has.

    Draft i is what the model says behind token ``length - 1 + i``, which must be one of its longest
    text. Where it ends before the target's text does, the rest is decoded plainly.
    """
    index = jnp.arange(gamma, dtype=jnp.int32)[None]
    most = getattr(model, "max_positions", None)
    if most is None:
        return jnp.ones((text.length.shape[0], gamma), bool)
    return text.length[:, None] + index <= most


def _first_block(text: Text, lag: Int[Array, "B"], gamma: int) -> Block:
    """The two newest tokens; the older one is seen only where the cache lacks it (lag 2)."""
    index = text.length[:, None] - jnp.array([[2, 1]], jnp.int32)
    tokens = jnp.take_along_axis(text.tokens, jnp.maximum(index, 0), axis=1)
    depth = lag[:, None] - jnp.array([[2, 1]], jnp.int32)
    own = jnp.asarray(np.eye(2, gamma + 1, dtype=bool))[None]
    older = jnp.zeros_like(own).at[:, 1, 0].set(True)
    return Block(tokens, depth, own | (older & (lag == 2)[:, None, None]))


def _next_block(token: Int[Array, "B"], lag: Int[Array, "B"], i: Array, gamma: int) -> Block:
    """Draft i, which sees the root (slot 1), the drafts before it and itself."""
    slots = jnp.arange(gamma + 1, dtype=jnp.int32)[None, None]
    lacking = (lag == 2)[:, None, None]
    mask = (slots <= i + 2) & ((slots >= 1) | lacking)
    return Block(token[:, None], (lag + i)[:, None], mask)


def _drafted(
    read: Extended, sampling: Sampling, past: Text | None, u: Float[Array, "B"]
) -> Drafted:
    """Draws a token behind what was read."""
    log_q = laws.log_law(read.logits, sampling, processors.history(past))[:, 0]
    token = laws.draw(log_q, u.astype(log_q.dtype))
    return Drafted(Chain(read.open, token, past), log_q, read.logits)
