"""Acceptance rules.

``walk`` is the rule as a pure function of the uniforms: exact tests enumerate it. Chains are judged here,
all nodes at once; how a tree is walked is in `multi_step`.

References:
  Leviathan et al. 2023 (2211.17192), algorithm 1; Chen et al. 2023 (2302.01318), algorithm 2;
  Sun et al. 2025 (2403.10444), block verification.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.decode import multi_step, sampling
from specjax.decode.interfaces import TokenTree, Verdict
from specjax.decode.residual import log_excess, log_residual, row_of

# What a row's key of the round is folded with; different uses never share a key.
DRAFT, ACCEPT, NEXT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SpeculativeSampling:
    """Accept a token drawn from q with probability min(1, p/q); else draw from norm((p - q)+).

    In a tree that residual is what the next sibling is tried against (multi-step speculative sampling).
    Lossless at every temperature; greedy rows are the special case of one-hot p and q, and
    deterministic nodes (``q_row`` -1) that of a one-hot q.
    """

    lossless = True

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        """Algorithm 1 of 2211.17192 over a chain, 2 of 2305.09781 over a tree; no ``next_token`` yet."""
        if not tree_.chain:
            walk = multi_step.chosen if tree_.log_q is None else multi_step.drawn
            return walk(tree_, log_p, u)
        return _walk_by_ratio(tree_, log_p, u, _log_ratio(tree_, log_p))

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        """Uniforms, walk, and the next token drawn from the residual or bonus law."""
        return _judge(self, tree_, log_p, keys)


@dataclasses.dataclass(frozen=True)
class LenientSampling:
    """Lossy for lenience below 1: accept with probability min(1, f(p) / q), f(p) = p / lenience.

    Appendix A.5 multiplies q by the lenience l in (0, 1] before it is compared with p; DistillSpec has
    two more forms. The acceptance rate is sum_x min(f(p), q). Only the comparison is lenient: a refused
    token is replaced from norm((p - q)+) as in algorithm 1. So no token is emitted with more than
    f(p). At l = 1 this is `SpeculativeSampling`. One-hot laws leave nothing to be lenient about:
    greedy rows stay exact (the paper's own criterion for T = 0 looks at laws before that, and is
    not this one). `Stats.overlap` stays the strict sum_x min(p, q).

    Attributes:
      lenience: l (static); DistillSpec's epsilon.
      form: f(p): "linear" p / l, "square" p / l^2, "power" p^l, which is lenient where p is small.

    Raises:
      ValueError: another lenience or form.

    References:
      Leviathan et al. 2023 (2211.17192), appendix A.5, table 5; Zhou et al. 2023, DistillSpec
      (2310.08461), lossy speculative decoding: f_lin, f_sq, f_exp.
    """

    lenience: float = 1.0
    form: str = "linear"

    chains_only = True

    def __post_init__(self):
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience must lie in (0, 1], got {self.lenience}")
        if self.form not in ("linear", "square", "power"):
            raise ValueError(f"form must be linear, square or power, got {self.form!r}")

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        """`SpeculativeSampling.walk` with a lenient ratio."""
        if self.form == "power":
            ratio = _log_ratio(tree_, log_p * jnp.asarray(self.lenience, log_p.dtype))
        else:
            times = {"linear": 1, "square": 2}[self.form]
            ratio = _log_ratio(tree_, log_p) - times * math.log(self.lenience)
        return _walk_by_ratio(tree_, log_p, u, ratio)

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        return _judge(self, tree_, log_p, keys)


@dataclasses.dataclass(frozen=True)
class BlockVerification:
    """Judges a chain as a whole: lossless, and never fewer accepted tokens in expectation.

    With p_0 = 1 and p_i = min(p_{i-1} Mb(x_i) / Ms(x_i), 1), a trial is made at every node i, with
    success probability h_i = A_i / (A_i + 1 - p_i), A_i = sum_x (p_i Mb(x) - Ms(x))+ after
    x_1..x_i, and h_i = p_i at the last node; 0/0 is 0. The longest successful prefix is accepted,
    whatever failed before. The next token comes from norm((p_i Mb - Ms)+), or from Mb behind the
    last node.

    ``log_accept`` of a verdict is log h. ``tested`` are the accepted nodes and the one that the
    next token replaced, as for token verification: so statistics mean the same, though behind them
    trials were made too. Greedy rows accept what token verification accepts.

    References:
      Sun et al. 2025 (2403.10444), the algorithm called block verification there.
    """

    lossless, chains_only = True, True

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        """The rule; ``next_token`` is left at 0."""
        tree_ = _end_at_broken_laws(tree_, log_p)
        drawn = tree_.judged & tree_.valid
        log_weight = _log_weights(jnp.where(drawn, _log_ratio(tree_, log_p), -jnp.inf))
        log_accept = _log_block_accept(tree_, log_p, log_weight, drawn)
        index = jnp.arange(u.shape[1], dtype=jnp.int32)[None]
        taken = jnp.where((u < jnp.exp(log_accept)) & drawn, index + 1, 0).max(1)
        verdict = _walk_chain(tree_, log_accept, index < taken[:, None])
        weight = jnp.concatenate([jnp.zeros_like(log_weight[:, :1]), log_weight], axis=1)
        log_scale = jnp.take_along_axis(weight, verdict.accepted[:, None], axis=1)
        return verdict._replace(log_next=_log_next(tree_, log_p, verdict, log_scale))

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        return _judge(self, tree_, log_p, keys)


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
        if not tree_.chain:
            return multi_step.matching(tree_, log_p)
        best = log_p.argmax(-1).astype(jnp.int32)
        take = (tree_.tokens == best[:, :-1]) & tree_.judged & tree_.valid
        verdict = _walk_chain(tree_, jnp.where(take, 0.0, -jnp.inf).astype(log_p.dtype), take)
        next_token = jnp.take_along_axis(best, verdict.accepted[:, None], axis=1)[:, 0]
        return verdict._replace(next_token=next_token, log_next=row_of(log_p, verdict.accepted))

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        del keys
        return self.walk(tree_, log_p, jnp.zeros(tree_.tokens.shape, log_p.dtype))


@dataclasses.dataclass(frozen=True)
class NaiveSampling:
    """Draw the next token from p; where a child says the same, go there, else it is the next token.

    Lossless whatever the children are, since it does not ask how they were drawn. What speculative
    sampling gains over it is what knowing q is worth: SpecInfer's ablation.

    References:
      Miao et al. 2024 (2305.09781), section 4.3 and table 3 ("naive sampling").
    """

    lossless = True

    def walk(
        self, tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]
    ) -> Verdict:
        """Child by child: the draw is this one, given that it is none of the earlier ones."""
        return multi_step.chosen(tree_, log_p, u)

    def judge(self, tree_: TokenTree, log_p: Float[Array, "B M V"], keys: Key[Array, "B"]):
        return _judge(self, tree_, log_p, keys)


def _judge(verifier, tree_: TokenTree, log_p: Array, keys: Key[Array, "B"]) -> Verdict:
    nodes = tree_.tokens.shape[1]
    u = sampling.uniform(sampling.fold(keys, ACCEPT), nodes, log_p.dtype)
    verdict = verifier.walk(tree_, log_p, u)
    u_next = sampling.uniform(sampling.fold(keys, NEXT), 1, log_p.dtype)[:, 0]
    return verdict._replace(next_token=sampling.draw(verdict.log_next, u_next))


def _end_at_broken_laws(tree_: TokenTree, log_p: Array) -> TokenTree:
    """Ends a chain before the first node whose p or q is no law.

    Exact, since it depends on no draw from there on; what is no law of the target is then met as
    the next token's, as in plain decoding.
    """
    sound = ~sampling.broken(log_p[:, :-1])
    if tree_.log_q is not None:
        nan = jnp.isnan(tree_.log_q).any(-1)
        nan = jnp.take_along_axis(nan, jnp.clip(tree_.q_row, 0), axis=1) & (tree_.q_row >= 0)
        sound &= ~nan
    sound = jnp.cumprod(sound, axis=1, dtype=jnp.int32) > 0
    return dataclasses.replace(tree_, valid=tree_.valid & sound, judged=tree_.judged & sound)


def _log_weights(log_ratio: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """log p_i = min(log p_{i-1} + log ratio_i, 0)."""

    def step(log_weight, ratio):
        log_weight = jnp.minimum(log_weight + ratio, 0.0)
        return log_weight, log_weight

    return lax.scan(step, jnp.zeros_like(log_ratio[:, 0]), log_ratio.T)[1].T


def _log_block_accept(
    tree_: TokenTree, log_p: Array, log_weight: Float[Array, "B N"], drawn: Array
) -> Float[Array, "B N"]:
    """log h_i: from the law of what was drawn after node i, or p_i behind the last node drawn."""
    last = drawn & ~jnp.pad(drawn[:, 1:], ((0, 0), (0, 1)))
    if drawn.shape[1] == 1:
        return log_weight
    log_q = jnp.stack([_log_q(tree_, log_p, i) for i in range(1, drawn.shape[1])], axis=1)
    excess = log_excess(log_weight[:, :-1, None] + log_p[:, 1:-1], log_q)
    total = jnp.exp(jax.nn.logsumexp(excess, axis=-1))
    below = total - jnp.expm1(log_weight[:, :-1])  # A + 1 - p
    accept = jnp.log(total / jnp.where(below > 0, below, 1.0))
    return jnp.where(last, log_weight, jnp.pad(accept, ((0, 0), (0, 1))))


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


def _walk_by_ratio(
    tree_: TokenTree, log_p: Array, u: Float[Array, "B N"], log_ratio: Float[Array, "B N"]
) -> Verdict:
    """A trial at each node, with probability min(1, ratio), until one fails."""
    log_accept = jnp.minimum(log_ratio, 0.0)
    # u lies in [0, 1), so the strict test accepts with exactly that probability.
    take = (u < jnp.exp(log_accept)) & tree_.judged & tree_.valid
    verdict = _walk_chain(tree_, log_accept, take)
    return verdict._replace(log_next=_log_next(tree_, log_p, verdict))


def _walk_chain(tree_: TokenTree, log_accept: Array, take: Array) -> Verdict:
    """The accepted prefix of a chain, given each node's own trial."""
    if not tree_.chain:
        raise ValueError("this verifier judges chains only, and was given a tree")
    run = jnp.cumprod(take, axis=1, dtype=jnp.int32)
    accepted = run.sum(1, dtype=jnp.int32)
    index = jnp.arange(take.shape[1], dtype=jnp.int32)[None]
    tested = (index <= accepted[:, None]) & tree_.judged & tree_.valid
    path = jnp.where(run > 0, index, -1)
    return Verdict(path, accepted, jnp.zeros_like(accepted), log_accept, log_accept, tested)


def _log_next(
    tree_: TokenTree, log_p: Array, verdict: Verdict, log_scale: Float[Array, "B 1"] | None = None
) -> Float[Array, "B V"]:
    """Law of the next token: the residual after a rejection, else the target's own law.

    ``log_scale`` multiplies p in the residual (block verification).
    """
    log_target = row_of(log_p, verdict.accepted)
    refused = verdict.tested.sum(1, dtype=jnp.int32) > verdict.accepted
    log_q = _log_q(tree_, log_p, jnp.minimum(verdict.accepted, tree_.tokens.shape[1] - 1))
    scaled = log_target if log_scale is None else log_target + log_scale
    return jnp.where(refused[:, None], log_residual(scaled, log_q), log_target)


def _log_q(tree_: TokenTree, log_p: Array, node: Int[Array, "B"] | int) -> Float[Array, "B V"]:
    """The law that one node of each row was drawn from; one-hot where it was chosen."""
    node = jnp.broadcast_to(jnp.asarray(node, jnp.int32), tree_.tokens.shape[:1])[:, None]
    token = jnp.take_along_axis(tree_.tokens, node, axis=1)
    row = jnp.take_along_axis(tree_.q_row, node, axis=1)
    ids = jnp.arange(log_p.shape[-1], dtype=token.dtype)[None]
    chosen = jnp.where(ids == token, 0.0, -jnp.inf).astype(log_p.dtype)
    if tree_.log_q is None:
        return chosen
    log_q = row_of(tree_.log_q.astype(log_p.dtype), jnp.clip(row[:, 0], 0))
    return jnp.where(row < 0, chosen, log_q)
