"""Where a sequence ends: the one place that cuts a block."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.decode.interfaces import Model, Text

# Codes of `Decoded.finish_reason`.
LIVE, STOP, LENGTH, ERROR = 0, 1, 2, 3


class Stops(NamedTuple):
    """Token sequences that end a text, themselves included.

    Attributes:
      tokens: int32 ``[S, W]``; beyond ``length`` padding that is never read.
      length: int32 ``[S]``; a sequence of length 0 is none.
    """

    tokens: Int[Array, "S W"]
    length: Int[Array, "S"]


def stops(sequences: Stops | Sequence[Sequence[int]]) -> Stops | None:
    """Stop sequences as arrays, so that their ids cost no compile; None if there are none.

    Raises:
      ValueError: an empty sequence, or an id below 0.
    """
    if isinstance(sequences, Stops) or not len(sequences):
        return sequences if isinstance(sequences, Stops) else None
    rows = [[int(token) for token in sequence] for sequence in sequences]
    if not all(rows) or min(min(row) for row in rows) < 0:
        raise ValueError(f"a stop sequence needs at least one id, none below 0, got {sequences}")
    padded = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)] = row
    return Stops(jnp.asarray(padded), jnp.asarray([len(row) for row in rows], jnp.int32))


def end_ids(model: Model) -> int | tuple[int, ...]:
    """Each id that ends a text of the model: one, or several (Llama 3 has three)."""
    ids = (model.eos_id, *getattr(model, "other_eos_ids", ()))
    return ids[0] if len(ids) == 1 else ids


def listed(eos_id: int | Sequence[int]) -> tuple[int, ...]:
    """One id or several, as a tuple."""
    return (int(eos_id),) if np.ndim(eos_id) == 0 else tuple(int(i) for i in eos_id)


class Cut(NamedTuple):
    """How much of a block survives.

    Attributes:
      count: int32 ``[B]`` tokens kept, EOS or stop sequence included.
      finish: int32 ``[B]`` finish code after the block.
    """

    count: Int[Array, "B"]
    finish: Int[Array, "B"]


def cut(
    tokens: Int[Array, "B K"],
    count: Int[Array, "B"],
    remaining: Int[Array, "B"],
    finish: Int[Array, "B"],
    eos_id: int | tuple[int, ...],
    broken: Bool[Array, "B"] | bool = False,
    stops: Stops | None = None,
    text: Text | None = None,
) -> Cut:
    """Cuts a block at its first EOS or stop sequence, at the length limit and at a broken law.

    Args:
      tokens: the block; ``count`` of them are meant.
      count: tokens the round wants to emit.
      remaining: tokens the row may still emit.
      finish: finish codes before the block; rows that are not `LIVE` keep nothing.
      eos_id: end of sequence; -1 for none, or several ids of which each is one.
      broken: whether the law behind the ``count`` tokens is none; an error unless the row ends
        before.
      stops: sequences that end the text.
      text: the text before the block; a stop sequence may have begun there.

    Returns:
      What is left. An end at the last permitted token is a stop, not a length limit.
    """
    wide = tokens.shape[1]
    index = jnp.arange(wide, dtype=jnp.int32)[None]
    ends = jnp.zeros(tokens.shape, bool)
    for end in listed(eos_id):
        ends |= tokens == end
    if stops is not None:
        ends |= completed(stops, text, tokens)
    upto_end = jnp.where(ends & (index < count[:, None]), index + 1, wide + 1).min(1)
    kept = jnp.minimum(jnp.minimum(count, upto_end), remaining)
    kept = jnp.where(finish == LIVE, kept, 0)
    on = jnp.where(broken, ERROR, LIVE)
    stopped = jnp.where(upto_end <= kept, STOP, jnp.where(kept >= remaining, LENGTH, on))
    return Cut(kept, jnp.where(finish == LIVE, stopped, finish).astype(jnp.int32))


def completed(stops: Stops, text: Text, tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
    """Which block tokens complete a stop sequence, wherever it began among the emitted tokens.

    Start token, prompt and forced prefix were not emitted, and are no part of one.
    """
    width, wide = stops.tokens.shape[1], tokens.shape[1]
    back = jnp.arange(width, dtype=jnp.int32)  # 0 is a sequence's last token
    recent = text.length[:, None] - back[None, :0:-1]
    before = jnp.take_along_axis(text.tokens, jnp.maximum(recent, 0), axis=1)
    joined = jnp.concatenate([before, tokens], axis=1)
    index = jnp.arange(wide, dtype=jnp.int32)
    window = joined[:, index[:, None] + (width - 1) - back[None]]  # [B, K, W], newest first
    length = stops.length
    newest_first = jnp.take_along_axis(
        stops.tokens, jnp.maximum(length[:, None] - 1 - back[None], 0), axis=1
    )
    beyond = back[None] >= length[:, None]
    same = (window[:, :, None] == newest_first[None, None]) | beyond[None, None]
    emitted = (text.length - text.start)[:, None] + index[None] + 1
    whole = same.all(-1) & (length > 0)[None, None] & (length[None, None] <= emitted[..., None])
    return whole.any(-1)
