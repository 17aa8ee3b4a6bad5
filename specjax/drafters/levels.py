"""Children of a tree's nodes from a draft's laws: drawn without replacement, or the likeliest ones.

A greedy row's children are always the likeliest ones: what a draft would draw at temperature 0 is one
token, and the target's own is more often among several.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode import sampling as laws
from specjax.decode.sampling import Sampling


class Children(NamedTuple):
    """Children of R nodes, W of each, in the order in which they are tried.

    Attributes:
      tokens: int32 ``[B, R, W]``.
      there: which of them exist: a law may have fewer possible tokens.
      drawn: ``[B]``: rows whose children are draws from ``log_q``; others' are chosen.
      log_q: ``[B, R, V]``: the laws that they are drawn from.
    """

    tokens: Int[Array, "B R W"]
    there: Bool[Array, "B R W"]
    drawn: Bool[Array, "B"]
    log_q: Float[Array, "B R V"]


def children(
    logits: Float[Array, "B R V"],
    log_q: Float[Array, "B R V"],
    width: int,
    sampling: Sampling,
    keys: Key[Array, "B"] | None,
) -> Children:
    """Children of every node.

    Args:
      logits: the draft's, after processors: what the likeliest are the likeliest of.
      log_q: their laws under ``sampling``.
      width: how many, W.
      sampling: whose rows are greedy.
      keys: to draw with, one per row; None chooses the likeliest in all rows.

    Returns:
      Draws without replacement are the ``width`` largest of ``log_q`` with Gumbel noise (Kool et al. 2019,
      1903.06059, section 3), in falling order: the order in which they would be drawn one after the other.
    """
    greedy = sampling.temperature <= laws.GREEDY_TEMPERATURE
    drawn = jnp.zeros_like(greedy) if keys is None else ~greedy
    score = logits
    if keys is not None:
        noise = gumbel(keys, log_q.shape[1:], log_q.dtype)
        score = jnp.where(drawn[:, None, None], log_q + noise, logits)
    best, tokens = jax.lax.top_k(score, width)
    return Children(tokens.astype(jnp.int32), best > -jnp.inf, drawn, log_q)


def gumbel(keys: Key[Array, "B"], shape: tuple[int, ...], dtype) -> Float[Array, "B *S"]:
    """Gumbel noise for every row, with all its digits where it is large.

    From float32 uniforms it would end at 16: of 49,152 tokens all but one of which make up a percent together
    those would be drawn a quarter too seldom.
    """
    return jax.vmap(lambda key: jax.random.gumbel(key, shape, dtype, mode="high"))(keys)
