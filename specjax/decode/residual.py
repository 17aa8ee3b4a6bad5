"""What is left of a law once a proposal was refused; in log space, with all the digits there are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def log_residual(log_p: Float[Array, "B V"], log_q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """log norm((p - q)+), or log p where that is zero everywhere (p = q up to rounding).

    ``log p + log(1 - q/p)`` by ``expm1`` keeps the digits that ``log(p - q)`` in the probability
    domain loses, and those that ``log1p(-exp(log q - log p))`` loses where p and q almost agree.
    """
    return normed_or(log_excess(log_p, log_q), log_p)


def log_excess(
    log_p: Float[Array, "*rows V"], log_q: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """log (p - q)+; -inf where q is no smaller."""
    # Where log_p > log_q their gap is negative, perhaps -inf; elsewhere it may be NaN, and is not used.
    return jnp.where(log_p > log_q, log_p + jnp.log(-jnp.expm1(log_q - log_p)), -jnp.inf)


def normed_or(log_x: Float[Array, "*rows V"], otherwise: Array) -> Float[Array, "*rows V"]:
    """log norm(x), or something else where x is zero everywhere."""
    total = jax.nn.logsumexp(log_x, axis=-1, keepdims=True)
    some = total > -jnp.inf
    return jnp.where(some, log_x - jnp.where(some, total, 0.0), otherwise)


def row_of(x: Float[Array, "B M V"], index: Int[Array, "B"]) -> Float[Array, "B V"]:
    """``x[b, index[b]]``."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1, mode="clip")[:, 0]
