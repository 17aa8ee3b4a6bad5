"""Where a sequence ends: the one place that cuts a block."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Codes of `Decoded.finish_reason`.
LIVE, STOP, LENGTH, ERROR = 0, 1, 2, 3


class Cut(NamedTuple):
    """How much of a block survives.

    Attributes:
      count: int32 ``[B]`` tokens kept, EOS included.
      finish: int32 ``[B]`` finish code after the block.
    """

    count: Int[Array, "B"]
    finish: Int[Array, "B"]


def cut(
    tokens: Int[Array, "B K"],
    count: Int[Array, "B"],
    remaining: Int[Array, "B"],
    finish: Int[Array, "B"],
    eos_id: int,
    broken: Bool[Array, "B"] | bool = False,
) -> Cut:
    """Cuts a block at its first EOS, at the length limit and where the model says nothing.

    Args:
      tokens: the block; ``count`` of them are meant.
      count: tokens the round wants to emit.
      remaining: tokens the row may still emit.
      finish: finish codes before the block; rows that are not `LIVE` keep nothing.
      eos_id: end of sequence; -1 for none.
      broken: whether the law behind the ``count`` tokens is none; an error unless the row ends
        before.

    Returns:
      What is left. EOS as the last permitted token is a stop, not a length limit.
    """
    wide = tokens.shape[1]
    index = jnp.arange(wide, dtype=jnp.int32)[None]
    is_eos = (tokens == eos_id) & (index < count[:, None])
    upto_eos = jnp.where(is_eos, index + 1, wide + 1).min(1)
    kept = jnp.minimum(jnp.minimum(count, upto_eos), remaining)
    kept = jnp.where(finish == LIVE, kept, 0)
    on = jnp.where(broken, ERROR, LIVE)
    stopped = jnp.where(upto_eos <= kept, STOP, jnp.where(kept >= remaining, LENGTH, on))
    return Cut(kept, jnp.where(finish == LIVE, stopped, finish).astype(jnp.int32))
