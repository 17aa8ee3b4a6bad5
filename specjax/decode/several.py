"""Several decodes of each prompt: rows repeated behind the prefill, and sorted at the end."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from specjax.decode import sampling as laws


def repeat(tree: PyTree, decodes: int) -> PyTree:
    """Every row ``decodes`` times, decodes of a row side by side (T5X's order)."""
    return jax.tree.map(lambda x: jnp.repeat(x, decodes, axis=0), tree)


def expand(state: Any, decodes: int) -> Any:
    """A freshly started `loop.State` with ``decodes`` rows for each of its rows."""
    return repeat(state._replace(keys=()), decodes)._replace(keys=streams(state.keys, decodes))


def streams(keys: Key[Array, "B"], decodes: int) -> Key[Array, "BN"]:
    """A key for each decode of each row.

    A row's key is folded with the round too, so decodes count down from -1, the largest number.
    """
    rows, index = np.divmod(np.arange(keys.shape[0] * decodes), decodes)
    return laws.fold(keys[rows], jnp.asarray(-1 - index, jnp.int32))


def best_last(out: Any, decodes: int) -> Any:
    """`loop.Decoded` of repeated rows as ``[B, decodes, ...]``, in rising order of the scores."""
    apart = jax.tree.map(lambda x: x.reshape(-1, decodes, *x.shape[1:]), out)
    order = jnp.argsort(apart.scores, axis=1)

    def ordered(x):
        index = order.reshape(*order.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    return jax.tree.map(ordered, apart)
