"""Acceptance rules that give the exact law up for longer blocks: each takes every token that is good enough.

The longest path of such tokens is accepted, and the target's first maximum comes behind it. What comes out is
neither the target's law at a temperature nor its greedy text; only greedy rows come out as they are, since
their laws have all mass on one token. `LenientSampling` is lossy too, but draws: it stands beside the rule
that it loosens (`specjax.decode.verify`).
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from specjax.decode import multi_step
from specjax.decode.interfaces import TokenTree, Verdict


class _GoodEnough:
    """A rule without any draw."""

    lossless = False

    def good(self, tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Bool[Array, "B N"]:
        """Which nodes are good enough, each under the law behind its parent."""
        raise NotImplementedError

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        """The longest path of tokens that are good enough; of equally long ones the first."""
        del u
        return multi_step.longest(tree_, log_p, self.good(tree_, log_p))

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        """`walk`, which needs no uniforms."""
        del keys
        return self.walk(tree_, log_p, jnp.zeros(tree_.tokens.shape, log_p.dtype))


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance(_GoodEnough):
    """Accept every token that is not untypical, p(x) > min(epsilon, delta exp(-H(p))).

    H is the entropy of the target's law there, in nats.

    Attributes:
      epsilon: what any token needs at most.
      delta: of a law's typical probability exp(-H).

    References:
      Cai et al. 2024 (2401.10774), section 2.3.1; epsilon .09 and delta .3 are the released code's,
      where delta is sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        if not 0 < self.epsilon < 1 or not self.delta > 0:
            raise ValueError(
                f"epsilon must lie in (0, 1) and delta above 0, got {self.epsilon}, {self.delta}"
            )

    def good(self, tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Bool[Array, "B N"]:
        entropy = -jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0).sum(-1)
        needed = jnp.minimum(math.log(self.epsilon), math.log(self.delta) - entropy)
        needed = jnp.take_along_axis(needed, tree_.parent + 1, axis=1)
        return multi_step.log_probability(tree_, log_p) > needed


@dataclasses.dataclass(frozen=True)
class TopKAcceptance(_GoodEnough):
    """Accept a token that is among the target's k likeliest. For rows that sample: a greedy law has one.

    Attributes:
      k: 1 is greedy matching.

    References:
      Stern et al. 2018 (1811.03115), section 5.1.
    """

    k: int = 2

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    def good(self, tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Bool[Array, "B N"]:
        own = multi_step.log_probability(tree_, log_p)
        law = jnp.take_along_axis(log_p, tree_.parent[..., None] + 1, axis=1)
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        equal = (law == own[..., None]) & (ids < tree_.tokens[..., None])
        before = ((law > own[..., None]) | equal).sum(-1, dtype=jnp.int32)
        return (before < self.k) & (own > -jnp.inf)


@dataclasses.dataclass(frozen=True)
class DistanceAcceptance(_GoodEnough):
    """Accept a possible token near the target's first maximum: for ids that have an order, as pixels'.

    Attributes:
      epsilon: how far ids may be apart; 0 is greedy matching.

    References:
      Stern et al. 2018 (1811.03115), section 5.2.
    """

    epsilon: int = 2

    def __post_init__(self):
        if self.epsilon < 0:
            raise ValueError(f"epsilon must not be negative, got {self.epsilon}")

    def good(self, tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Bool[Array, "B N"]:
        best = log_p.argmax(-1).astype(jnp.int32)
        best = jnp.take_along_axis(best, tree_.parent + 1, axis=1)
        possible = multi_step.log_probability(tree_, log_p) > -jnp.inf
        return (jnp.abs(best - tree_.tokens) <= self.epsilon) & possible
