"""Logit processors that depend on the text: repetition penalty, minimum length, no repeated n-gram.

A processor maps logits to logits given the history of each row of a block: the committed text and,
below it, the drafted path down to the row's own node. Target and draft are processed alike, before
temperature, so both laws at a node are the ones plain decoding would have there. Without the path,
a block would be judged by laws that plain decoding never sees.

References:
  Keskar et al. 2019 (1909.05858), section 4.1 (repetition penalty); Paulus et al. 2017 (1705.04304),
  "repetition avoidance at test time" (no repeated n-gram).
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import tree
from specjax.decode.interfaces import Text, TokenTree
from specjax.decode.stopping import listed


class History(NamedTuple):
    """What has been said before each row of a block.

    Attributes:
      tokens: int32 ``[B, M, L]``: text, then the drafted path; garbage from ``length`` on.
      length: int32 ``[B, M]``.
      first: int32 ``[B]``: the first slot that counts; a start token before it does not.
      start: int32 ``[B]``: the first slot that was emitted, behind prompt and forced prefix.
    """

    tokens: Int[Array, "B M L"]
    length: Int[Array, "B M"]
    first: Int[Array, "B"]
    start: Int[Array, "B"]


class Processor(Protocol):
    """What stands in `Sampling.processors`: a pytree whose numbers may differ per row."""

    def check(self, eos_id: int | tuple[int, ...] | None) -> None:
        """Raises ValueError on values outside their range."""
        ...

    def rows(self, batch: int) -> "Processor":
        """Arrays with one value per row."""
        ...

    def __call__(self, logits: Float[Array, "B M V"], history: History) -> Float[Array, "B M V"]:
        """The logits to sample from."""
        ...


def recall(processors: tuple, text: Text) -> Text | None:
    """The text if a processor wants it, else None, which costs a compiled loop nothing."""
    return text if processors else None


def remember(past: Text | None, token: Int[Array, "B"]) -> Text | None:
    """A drafter's own past with one more token behind it."""
    if past is None:
        return None
    at = jnp.arange(past.tokens.shape[1], dtype=jnp.int32)[None] == past.length[:, None]
    return past._replace(tokens=jnp.where(at, token[:, None], past.tokens), length=past.length + 1)


def history(past: Text | None, nodes: TokenTree | None = None) -> History | None:
    """The history of each row of a block: after the text alone (M = 1), or root and nodes.

    Args:
      past: text, or None where nobody asks.
      nodes: the tree that the block holds behind the root, which is the text's newest token.
    """
    if past is None:
        return None
    if nodes is None:
        return History(past.tokens[:, None], past.length[:, None], past.first, past.start)
    path, depth = tree.paths(nodes)
    slots = jnp.arange(past.tokens.shape[1], dtype=jnp.int32)[None]
    behind = (slots - past.length[:, None])[:, None]
    at = jnp.broadcast_to(jnp.clip(behind, 0, path.shape[2] - 1), (*depth.shape, slots.size))
    drafted = jnp.take_along_axis(path, at, axis=2)
    tokens = jnp.where(behind < 0, past.tokens[:, None], drafted)
    return History(tokens, past.length[:, None] + depth, past.first, past.start)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive logits of tokens in the text by ``penalty``, multiplies negative ones.

    transformers' form of CTRL's penalty: the sign decides, how often a token occurs does not. The
    text is the decoder's: an encoder's input and the start token count for nothing.

    Attributes:
      penalty: above 0, 1 for none; one value or one per row (traced).
    """

    penalty: float | Float[Array, "*B"]

    def check(self, eos_id: int | tuple[int, ...] | None) -> None:
        del eos_id
        if not np.all(np.asarray(self.penalty) > 0):
            raise ValueError(f"a repetition penalty must be above 0, got {self.penalty}")

    def rows(self, batch: int) -> "RepetitionPenalty":
        return RepetitionPenalty(_spread(self.penalty, batch, jnp.float32))

    def __call__(self, logits: Float[Array, "B M V"], history: History) -> Float[Array, "B M V"]:
        slots = jnp.arange(history.tokens.shape[2], dtype=jnp.int32)[None, None]
        inside = (slots >= history.first[:, None, None]) & (slots < history.length[..., None])
        penalty = self.penalty.astype(logits.dtype)[:, None, None]
        scaled = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(_mark(history.tokens, inside, logits.shape[-1]), scaled, logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MinLength:
    """Forbids EOS until ``length`` tokens have been emitted (prompt and prefix do not count).

    Attributes:
      length: one value or one per row (traced).
      eos_id: the decode's own, all of them where several ids end a text (static).
    """

    length: int | Int[Array, "*B"]
    eos_id: int | tuple[int, ...] = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self):
        if isinstance(self.eos_id, list):
            object.__setattr__(self, "eos_id", tuple(self.eos_id))

    def check(self, eos_id: int | tuple[int, ...] | None) -> None:
        if np.any(np.asarray(self.length) < 0):
            raise ValueError(f"a minimum length must not be negative, got {self.length}")
        if eos_id is not None and set(listed(eos_id)) != set(listed(self.eos_id)):
            raise ValueError(f"MinLength forbids id {self.eos_id}, but text ends at id {eos_id}")

    def rows(self, batch: int) -> "MinLength":
        return MinLength(_spread(self.length, batch, jnp.int32), self.eos_id)

    def __call__(self, logits: Float[Array, "B M V"], history: History) -> Float[Array, "B M V"]:
        early = history.length - history.start[:, None] < self.length[:, None]
        is_eos = np.isin(np.arange(logits.shape[-1]), listed(self.eos_id))[None, None]
        return jnp.where(early[..., None] & is_eos, -jnp.inf, logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoRepeatNgram:
    """Forbids tokens that would complete an n-gram the text already has.

    Attributes:
      size: n, at least 1; 1 forbids every token that was said before (static).
    """

    size: int = dataclasses.field(metadata={"static": True})

    def check(self, eos_id: int | tuple[int, ...] | None) -> None:
        del eos_id
        if self.size < 1:
            raise ValueError(f"the size of an n-gram must be at least 1, got {self.size}")

    def rows(self, batch: int) -> "NoRepeatNgram":
        del batch
        return self

    def __call__(self, logits: Float[Array, "B M V"], history: History) -> Float[Array, "B M V"]:
        tokens, length = history.tokens, history.length
        slots = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None, None]
        # Slots that end an n-gram of the text; one that reaches before `first` is none.
        first = history.first[:, None, None] + self.size - 1
        ends = (slots >= first) & (slots < length[..., None])
        for k in range(1, self.size):
            newest = jnp.take_along_axis(tokens, jnp.maximum(length - k, 0)[..., None], axis=2)
            ends &= jnp.roll(tokens, k, axis=2) == newest
        return jnp.where(_mark(tokens, ends, logits.shape[-1]), -jnp.inf, logits)


def _mark(
    tokens: Int[Array, "B M L"], here: Bool[Array, "B M L"], size: int
) -> Bool[Array, "B M V"]:
    """Which of ``size`` ids stand at the slots marked in ``here``."""
    batch, rows, _ = tokens.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    m = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    ids = jnp.where(here, tokens, size)  # beyond the last id: dropped
    return jnp.zeros((batch, rows, size), bool).at[b, m, ids].set(True, mode="drop")


def _spread(value, batch: int, dtype) -> Array:
    return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
