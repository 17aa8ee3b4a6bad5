"""Counters of a decode, and the ratios made from them.

One set of definitions. Worked example, gamma = 4, accepted per round [3, 0, 4]: ``rounds`` 3,
``drafted`` 12, ``accepted`` 7, ``emitted`` 10, ``accepted_per_drafted`` 7/12,
``accepted_per_tested`` 7/9, ``mean_accepted`` 7/3, ``block_efficiency`` 10/3 (the papers' tau, bonus
included), ``emitted_per_verified`` 10/12.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode.interfaces import Outcome, TokenTree


class Stats(NamedTuple):
    """Counts per row. D is the deepest path the drafter proposes (at least 1).

    Attributes:
      rounds: target steps in which the row was live.
      rounds_plain: those of them in which nothing was drafted.
      drafted: nodes that were read and judged, without those behind an accepted EOS. What is read
        and not judged (Lookahead's window) is no draft: none of it can be accepted.
      drafted_cut: such nodes behind an accepted EOS; they enter no ratio.
      tested: nodes on which a trial was made.
      accepted: accepted nodes that were emitted.
      emitted: tokens emitted, bonus and corrections included.
      overlap: sum over tested nodes of sum_x min(p, q), whose mean is the papers' alpha.
      drafted_at, tested_at, accepted_at: per depth 1 .. D.
      histogram: rounds by number of accepted nodes, 0 .. D.
    """

    rounds: Int[Array, "B"]
    rounds_plain: Int[Array, "B"]
    drafted: Int[Array, "B"]
    drafted_cut: Int[Array, "B"]
    tested: Int[Array, "B"]
    accepted: Int[Array, "B"]
    emitted: Int[Array, "B"]
    overlap: Float[Array, "B"]
    drafted_at: Int[Array, "B D"]
    tested_at: Int[Array, "B D"]
    accepted_at: Int[Array, "B D"]
    histogram: Int[Array, "B D1"]


def empty(batch: int, depth: int) -> Stats:
    """All zero; ``depth`` 0 (plain decoding) has arrays of length 1 that stay zero."""
    depth = max(depth, 1)
    count, by_depth = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, depth), jnp.int32)
    return Stats(
        rounds=count,
        rounds_plain=count,
        drafted=count,
        drafted_cut=count,
        tested=count,
        accepted=count,
        emitted=count,
        overlap=jnp.zeros(batch, jnp.float32),
        drafted_at=by_depth,
        tested_at=by_depth,
        accepted_at=by_depth,
        histogram=jnp.zeros((batch, depth + 1), jnp.int32),
    )


def tally_plain(stats: Stats, count: Int[Array, "B"]) -> Stats:
    """Counts a step of the plain loop."""
    live = (count > 0).astype(jnp.int32)
    return stats._replace(
        rounds=stats.rounds + live,
        rounds_plain=stats.rounds_plain + live,
        emitted=stats.emitted + count,
    )


def tally(stats: Stats, outcome: Outcome, depth: Int[Array, "B N"]) -> Stats:
    """Counts a round, after the cut.

    Args:
      stats: counts so far.
      outcome: the round.
      depth: depth of each node, 1 and more.
    """
    tree, verdict, count = outcome.tree, outcome.verdict, outcome.count
    live = count > 0
    accepted = jnp.minimum(verdict.accepted, count)
    # A round cut by an accepted EOS ends at depth `count`: deeper nodes were drafted in vain.
    ended_by_node = live & (verdict.accepted >= count)
    within = live[:, None] & (~ended_by_node[:, None] | (depth <= count[:, None]))
    drafts = tree.valid & tree.judged
    drafted = drafts & within
    tested = verdict.tested & within
    on_path = _on_path(verdict.path, accepted, tree.tokens.shape[1])
    by_depth = (
        depth[..., None]
        == jnp.arange(1, stats.drafted_at.shape[1] + 1, dtype=jnp.int32)[None, None]
    )
    some = drafted.any(1)
    length = jnp.arange(stats.histogram.shape[1], dtype=jnp.int32)[None]
    counted = (length == accepted[:, None]) & some[:, None]

    def at_depth(nodes):
        return (nodes[..., None] & by_depth).sum(1, dtype=jnp.int32)

    def number(nodes):
        return nodes.sum(1, dtype=jnp.int32)

    return Stats(
        rounds=stats.rounds + live.astype(jnp.int32),
        rounds_plain=stats.rounds_plain + (live & ~some).astype(jnp.int32),
        drafted=stats.drafted + number(drafted),
        drafted_cut=stats.drafted_cut + number(drafts & live[:, None] & ~within),
        tested=stats.tested + number(tested),
        accepted=stats.accepted + accepted,
        emitted=stats.emitted + count,
        overlap=stats.overlap + _overlap(tree, outcome.log_p, tested),
        drafted_at=stats.drafted_at + at_depth(drafted),
        tested_at=stats.tested_at + at_depth(tested),
        accepted_at=stats.accepted_at + at_depth(on_path & live[:, None]),
        histogram=stats.histogram + counted.astype(jnp.int32),
    )


def _on_path(path: Int[Array, "B P"], accepted: Int[Array, "B"], nodes: int) -> Array:
    taken = jnp.arange(path.shape[1], dtype=jnp.int32)[None] < accepted[:, None]
    ids = jnp.arange(nodes, dtype=jnp.int32)[None, None]
    return ((path[..., None] == ids) & taken[..., None]).any(1)


def _overlap(tree: TokenTree, log_p: Array, tested: Array) -> Float[Array, "B"]:
    """Sum over tested nodes of sum_x min(p, q) = 1 - TV(p, q); 2211.17192, corollary 3.6."""
    batch = jnp.arange(log_p.shape[0], dtype=jnp.int32)[:, None]
    fixed = jnp.exp(log_p[batch, tree.parent + 1, tree.tokens])
    beta = fixed
    if tree.log_q is not None:
        parents = jnp.take_along_axis(log_p, (tree.parent + 1)[..., None], axis=1)
        rows = jnp.clip(tree.q_row, 0)[..., None]
        log_q = jnp.take_along_axis(tree.log_q.astype(log_p.dtype), rows, axis=1)
        beta = jnp.where(tree.q_row < 0, fixed, jnp.exp(jnp.minimum(parents, log_q)).sum(-1))
    known = tested & ~jnp.isnan(beta)  # a draft whose q is NaN is refused for sure
    return jnp.where(known, beta, 0.0).sum(1).astype(jnp.float32)


def joined(parts: Iterable[Stats]) -> Stats:
    """The rows of several calls, one after the other (on the host)."""
    return Stats(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def summary(stats: Stats) -> dict:
    """Host-side totals over all rows and the ratios of summed counts (None where 0/0)."""
    rows = np.ndim(stats.rounds)  # 1, or 2 with several decodes per prompt
    total = {
        name: np.sum(value, axis=tuple(range(rows))) for name, value in stats._asdict().items()
    }
    ratio = lambda a, b: float(a) / float(b) if b else None  # noqa: E731
    counts = ("rounds", "rounds_plain", "drafted", "drafted_cut", "tested", "accepted", "emitted")
    out = {name: int(total[name]) for name in counts}
    speculative = out["rounds"] - out["rounds_plain"]
    marginal = [ratio(a, d) for a, d in zip(total["accepted_at"], total["drafted_at"], strict=True)]
    conditional = [
        ratio(a, t) for a, t in zip(total["accepted_at"], total["tested_at"], strict=True)
    ]
    return out | {
        "accepted_per_drafted": ratio(out["accepted"], out["drafted"]),
        "accepted_per_tested": ratio(out["accepted"], out["tested"]),
        "mean_accepted": ratio(out["accepted"], speculative),
        "block_efficiency": ratio(out["emitted"], out["rounds"]),
        "emitted_per_verified": ratio(out["emitted"], out["drafted"]),
        "drafted_per_emitted": ratio(out["drafted"], out["emitted"]),
        "acceptance_rate": ratio(total["overlap"], out["tested"]),
        "accepted_by_position": {"marginal": marginal, "conditional": conditional},
        "accepted_histogram": [int(n) for n in total["histogram"]],
    }
