"""Acceptance rules for chains.

``walk`` is the rule as a pure function of the uniforms: exact tests enumerate it.

References:
  Leviathan et al. 2023 (2211.17192), algorithm 1; Chen et al. 2023 (2302.01318), algorithm 2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from specjax.decode import sampling, tree
from specjax.decode.interfaces import TokenTree, Verdict

# What a row's key of the round is folded with; different uses never share a key.
DRAFT, ACCEPT, NEXT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SpeculativeSampling:
    """Accept a token drawn from q with probability min(1, p/q); else draw from norm((p - q)+).

    Lossless at every temperature; greedy rows are the special case of one-hot p and q, and
    deterministic nodes (``q_row`` -1) that of a one-hot q.
    """

    lossless = True

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        """Algorithm 1 of 2211.17192, vectorised over a chain; ``next_token`` is left at 0."""
        log_accept = jnp.minimum(_log_ratio(tree_, log_p), 0.0)
        # u lies in [0, 1), so the strict test accepts with probability exactly min(1, p/q).
        take = (u < jnp.exp(log_accept)) & tree_.judged & tree_.valid
        verdict = _walk_chain(tree_, log_accept, take)
        return verdict._replace(log_next=_log_next(tree_, log_p, verdict))

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        """Uniforms, walk, and the next token drawn from the residual or bonus law."""
        nodes = tree_.tokens.shape[1]
        u = sampling.uniform(sampling.fold(keys, ACCEPT), nodes, log_p.dtype)
        verdict = self.walk(tree_, log_p, u)
        u_next = sampling.uniform(sampling.fold(keys, NEXT), 1, log_p.dtype)[:, 0]
        return verdict._replace(next_token=sampling.draw(verdict.log_next, u_next))


@dataclasses.dataclass(frozen=True)
class GreedyMatch:
    """Accept while the drafted token is the target's first maximum; no randomness.

    Lossless for greedy rows only: `specjax.generate` refuses it at other temperatures.
    """

    lossless = True

    def check(self, sampling_: sampling.Sampling) -> None:
        """Raises ValueError unless every row is greedy."""
        if np.any(np.asarray(sampling_.temperature) > sampling.GREEDY_TEMPERATURE):
            raise ValueError(
                "GreedyMatch is lossless at temperature 0 only; use SpeculativeSampling"
            )

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        del u
        best = log_p.argmax(-1).astype(jnp.int32)
        take = (tree_.tokens == best[:, :-1]) & tree_.judged & tree_.valid
        verdict = _walk_chain(tree_, jnp.where(take, 0.0, -jnp.inf).astype(log_p.dtype), take)
        next_token = jnp.take_along_axis(best, verdict.accepted[:, None], axis=1)[:, 0]
        return verdict._replace(next_token=next_token, log_next=_row(log_p, verdict.accepted))

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        del keys
        return self.walk(tree_, log_p, jnp.zeros(tree_.tokens.shape, log_p.dtype))


def _log_ratio(tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Float[Array, "B N"]:
    """log p(token) - log q(token) at each node; -inf where p or q is 0 (never NaN)."""
    ids = tree_.tokens[..., None]
    log_px = jnp.take_along_axis(log_p[:, :-1], ids, axis=-1)[..., 0]
    if tree_.log_q is None:
        log_qx = jnp.zeros_like(log_px)
    else:
        row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        log_qx = tree_.log_q[row, jnp.clip(tree_.q_row, 0), tree_.tokens].astype(log_p.dtype)
        log_qx = jnp.where(tree_.q_row < 0, 0.0, log_qx)
    possible = (log_px > -jnp.inf) & (log_qx > -jnp.inf)
    return jnp.where(possible, log_px - jnp.where(possible, log_qx, 0.0), -jnp.inf)


def _walk_chain(tree_: TokenTree, log_accept: Array, take: Array) -> Verdict:
    """The accepted prefix of a chain, given each node's own trial."""
    if not tree.is_chain(tree_.parent, tree_.depth):
        raise ValueError("this verifier judges chains; the tree has branches")
    run = jnp.cumprod(take, axis=1, dtype=jnp.int32)
    accepted = run.sum(1, dtype=jnp.int32)
    index = jnp.arange(take.shape[1], dtype=jnp.int32)[None]
    tested = (index <= accepted[:, None]) & tree_.judged & tree_.valid
    path = jnp.where(run > 0, index, -1)
    return Verdict(path, accepted, jnp.zeros_like(accepted), log_accept, log_accept, tested)


def _log_next(tree_: TokenTree, log_p: Array, verdict: Verdict) -> Float[Array, "B V"]:
    """Law of the next token: the residual after a rejection, else the target's own law."""
    log_target = _row(log_p, verdict.accepted)
    refused = verdict.tested.sum(1, dtype=jnp.int32) > verdict.accepted
    node = jnp.minimum(verdict.accepted, tree_.tokens.shape[1] - 1)[:, None]
    token = jnp.take_along_axis(tree_.tokens, node, axis=1)
    row = jnp.take_along_axis(tree_.q_row, node, axis=1)
    if tree_.log_q is None:
        log_q = jnp.full_like(log_target, -jnp.inf)
    else:
        log_q = _row(tree_.log_q.astype(log_p.dtype), jnp.clip(row[:, 0], 0))
    fixed = row < 0
    ids = jnp.arange(log_p.shape[-1], dtype=token.dtype)[None]
    log_q = jnp.where(fixed, jnp.where(ids == token, 0.0, -jnp.inf), log_q)
    return jnp.where(refused[:, None], log_residual(log_target, log_q), log_target)


def log_residual(log_p: Float[Array, "B V"], log_q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """log norm((p - q)+), or log p where that is zero everywhere (p = q up to rounding).

    ``log p + log(1 - q/p)`` by ``expm1`` keeps the digits that ``log(p - q)`` in the probability
    domain loses, and those that ``log1p(-exp(log q - log p))`` loses where p and q almost agree.
    """
    # Where log_p > log_q their gap is negative, perhaps -inf; elsewhere it may be NaN, and is not used.
    excess = jnp.where(log_p > log_q, log_p + jnp.log(-jnp.expm1(log_q - log_p)), -jnp.inf)
    total = jax.nn.logsumexp(excess, axis=-1, keepdims=True)
    some = total > -jnp.inf
    return jnp.where(some, excess - jnp.where(some, total, 0.0), log_p)


def _row(x: Float[Array, "B M V"], index: Array) -> Float[Array, "B V"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1, mode="clip")[:, 0]
