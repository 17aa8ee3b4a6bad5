"""Losses on logits. All sums over tokens, so that batches of unequal size can be added up."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Summed negative log-likelihood in nats of the targets, weighted per token."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return ((jax.nn.logsumexp(logits, axis=-1) - picked) * weights).sum()


def z_loss(logits: Float[Array, "B T V"], weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """Summed squares of the logits' log-normaliser, which T5X keeps near 0 (times 1e-4)."""
    return (jnp.square(jax.nn.logsumexp(logits, axis=-1)) * weights).sum()


def correct(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Weighted count of tokens whose logit is the largest."""
    return jnp.where(logits.argmax(-1) == targets, weights, 0.0).sum()


def among(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    count: int,
) -> Float[Array, ""]:
    """Weighted count of tokens that are among the ``count`` likeliest (of equal ones the first)."""
    return jnp.where(rank(logits, targets) < count, weights, 0.0).sum()


def rank(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How many pieces are likelier than the target, or as likely and stand before it."""
    own = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    before = (logits > own) | ((logits == own) & (ids < targets[..., None]))
    return before.sum(-1, dtype=jnp.int32)


def smooth_l1(
    x: Float[Array, "B T d"], y: Float[Array, "B T d"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Summed Huber loss with threshold 1, the mean over the last axis; weighted per token."""
    gap = jnp.abs(x - y)
    each = jnp.where(gap < 1, 0.5 * gap * gap, gap - 0.5)
    return (each.mean(-1) * weights).sum()
