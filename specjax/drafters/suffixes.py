"""Where the newest tokens of a text stand elsewhere, and what stands behind them there.

What is searched is a buffer of tokens per row in which -1 is no token: padding, a start token, the gap
between two texts. EOS is found behind a match but is no part of one, and nothing is read behind it: so
neither a match nor what is copied ever joins two texts.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax.decode import stopping
from specjax.decode.interfaces import Prefilled, Prompt, Text

NOTHING = -1


def reference(prefilled: Prefilled) -> Prompt | tuple[()]:
    """The prompt of an encoder-decoder, its padding `NOTHING`; () where the text begins with it.

    That is where the model says nothing of `Text.first`: behind a start token stands no prompt.
    """
    if prefilled.text.first is None:
        return ()
    tokens, length, _ = prefilled.prompt
    inside = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < length[:, None]
    return Prompt(jnp.where(inside, tokens, NOTHING), length)


def buffer(given: Prompt | tuple[()], text: Text) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """What a row may be searched for: its reference, a gap, its text; and which of it was emitted."""
    index = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None]
    first = jnp.zeros_like(text.length) if text.first is None else text.first
    start = text.length if text.start is None else text.start
    inside = (index >= first[:, None]) & (index < text.length[:, None])
    tokens, emitted = jnp.where(inside, text.tokens, NOTHING), index >= start[:, None]
    if not given:
        return tokens, emitted
    before = jnp.pad(given.tokens, ((0, 0), (0, 1)), constant_values=NOTHING)
    join = lambda a, b: jnp.concatenate([a, b], axis=1)  # noqa: E731
    return join(before, tokens), join(jnp.zeros_like(before, bool), emitted)


def newest(text: Text, count: int) -> Int[Array, "B n"]:
    """The last ``count`` tokens of each row, the newest first; `NOTHING` before its first one."""
    first = jnp.zeros_like(text.length) if text.first is None else text.first
    index = text.length[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(text.tokens, jnp.maximum(index, 0), axis=1)
    return jnp.where(index >= first[:, None], tokens, NOTHING)


def ends(tokens: Int[Array, "*B"], eos_id: int | tuple[int, ...]) -> Bool[Array, "*B"]:
    """Which tokens end a text; a model may have several such ids."""
    return functools.reduce(jnp.logical_or, [tokens == i for i in stopping.listed(eos_id)])


def matches(
    tokens: Int[Array, "B S"], query: Int[Array, "B n"], eos_id: int | tuple[int, ...]
) -> Int[Array, "B S"]:
    """How many of the newest tokens (`newest`) end at each slot, if any token stands behind them."""
    slots = tokens.shape[1]
    run = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=NOTHING)[:, 1:] != NOTHING
    count = jnp.zeros_like(tokens)
    for back in range(query.shape[1]):
        word = query[:, back, None]
        there = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=NOTHING)[:, :slots]
        run &= (there == word) & (word != NOTHING) & ~ends(word, eos_id)
        count += run.astype(jnp.int32)
    return count


def behind(
    tokens: Int[Array, "B S"], at: Int[Array, "B M"], length: int, eos_id: int | tuple[int, ...]
) -> Int[Array, "B M L"]:
    """The ``length`` tokens behind these slots; `NOTHING` behind a gap, the end, or an EOS."""
    room = jnp.pad(tokens, ((0, 0), (0, length)), constant_values=NOTHING)
    index = at[..., None] + 1 + jnp.arange(length, dtype=jnp.int32)[None, None]
    found = jnp.take_along_axis(room[:, None], index, axis=2)
    goes_on = (found != NOTHING) & ~ends(found, eos_id)
    goes_on = jnp.pad(goes_on[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True)
    return jnp.where(jnp.cumprod(goes_on, axis=2, dtype=jnp.int32) > 0, found, NOTHING)


def longest(
    length: Int[Array, "B S"], most: int, count: int, *, first: bool = False
) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """The longest matches and their slots, the best first; as many as there are slots at most.

    Args:
      length: from `matches`.
      most: no length is above it.
      count: M.
      first: whether of equally long ones the leftmost comes first, or the last.
    """
    slots = length.shape[1]
    place = jnp.arange(slots, dtype=jnp.int32)[None]
    rank = length * slots + (slots - 1 - place if first else place)
    # In float32, which holds these numbers exactly, a CPU finds the largest 14 times as fast.
    exact = slots * (most + 1) < 2**24
    _, at = lax.top_k(rank.astype(jnp.float32) if exact else rank, min(count, slots))
    return jnp.take_along_axis(length, at, axis=1), at
