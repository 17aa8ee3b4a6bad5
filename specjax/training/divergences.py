"""Divergences of a draft's law q from a target's p: what DistillSpec minimises, token by token.

Each is a function of log-probabilities over the whole vocabulary, ``[..., V]``, that returns ``[...]``.
Pieces of probability 0 (log-probability -inf) add what the limit is, and no gradient that is no number.

References:
  Zhou et al. 2023, DistillSpec (2310.08461), equation 2 (the divergence is a choice); Agarwal et al. 2023
  (2306.13649) for the generalised JSD; Leviathan et al. 2023 (2211.17192), corollary 3.6: total variation
  is 1 - alpha.
"""

import dataclasses
import math
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float


class Divergence(Protocol):
    """0 where both laws are the same, positive elsewhere."""

    def __call__(
        self, log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
    ) -> Float[Array, "*B"]: ...


@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """KL(p || q) in nats: the draft must cover what the target says; infinite where it does not."""

    def __call__(
        self, log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
    ) -> Float[Array, "*B"]:
        return kl(log_p, log_q)


@dataclasses.dataclass(frozen=True)
class ReverseKL:
    """KL(q || p) in nats: the draft must not say what the target would not."""

    def __call__(
        self, log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
    ) -> Float[Array, "*B"]:
        return kl(log_q, log_p)


@dataclasses.dataclass(frozen=True)
class JensenShannon:
    """beta KL(p || m) + (1 - beta) KL(q || m) of the mixture m = beta p + (1 - beta) q, in nats; bounded.

    Over beta it tends to `ForwardKL` where beta is small, over 1 - beta to `ReverseKL` where it is near 1.

    Attributes:
      beta: the target's share of the mixture, in (0, 1).
    """

    beta: float = 0.5

    def __post_init__(self):
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must lie in (0, 1), got {self.beta}")

    def __call__(
        self, log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
    ) -> Float[Array, "*B"]:
        shares = math.log(self.beta), math.log1p(-self.beta)
        mixed = jnp.logaddexp(_finite(log_p) + shares[0], _finite(log_q) + shares[1])
        return self.beta * kl(log_p, mixed) + (1 - self.beta) * kl(log_q, mixed)


@dataclasses.dataclass(frozen=True)
class TotalVariation:
    """Half of sum |p - q|, which is 1 - alpha at temperature 1."""

    def __call__(
        self, log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
    ) -> Float[Array, "*B"]:
        return 0.5 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1)


def kl(log_a: Float[Array, "*B V"], log_b: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(a || b) in nats."""
    there = log_a > -jnp.inf
    log_a = jnp.where(there, log_a, 0.0)
    return jnp.where(there, jnp.exp(log_a) * (log_a - jnp.where(there, log_b, 0.0)), 0.0).sum(-1)


def _finite(log_x: Array) -> Array:
    """Log-probabilities of which none is -inf: `logaddexp` of two of these has no gradient."""
    return jnp.maximum(log_x, jnp.finfo(log_x.dtype).min / 2)
