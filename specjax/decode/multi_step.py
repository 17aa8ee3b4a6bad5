"""Walks down a tree: multi-step speculative sampling.

At every accepted node its children are tried in the order they were drawn. One that is refused leaves
the residual law, against which the next one is tried; where all are refused the next token is drawn from
what is left. A walk is pure: it looks at nothing but tree, laws and uniforms.

Siblings may be independent draws from one law, draws without replacement, deterministic choices, or any
mixture of these. The proposal that a child is tried against is the law it was drawn from; of draws without
replacement that law without the earlier siblings; and all mass on the child itself where it was chosen.
Exact as long as no draw was dropped, folded or moved for what it is.

References:
  Miao et al. 2024, SpecInfer (2305.09781), algorithm 2; Chen et al. 2024, Sequoia (2402.12374), algorithm 2
  (without replacement); Jeon et al. 2024 (2402.14160), theorem 3.1.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import devices, tree
from specjax.decode.interfaces import TokenTree, Verdict
from specjax.decode.residual import log_residual, normed_or, row_of


def drawn(tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]) -> Verdict:
    """Any tree: one scan over its nodes, each tried where its parent is the last one accepted."""
    batch, nodes = tree_.tokens.shape
    rows = jnp.arange(batch, dtype=jnp.int32)

    def trial(carry, i):
        tested = (tree_.parent[:, i] == carry[0]) & tree_.judged[:, i]
        # V numbers for every node would cost more than the rest of a walk; few nodes are tested.
        return lax.cond(
            devices.anywhere(tested.any()),
            test,
            lambda carry, *_: (carry, untested),
            carry,
            i,
            tested,
        )

    def test(carry, i, tested):
        at, log_rest = carry  # the last accepted node, and what is left of the law behind it
        token = tree_.tokens[:, i]
        log_q = _proposal(tree_, i, log_p)
        log_px, log_qx = log_rest[rows, token], log_q[rows, token]
        possible = (log_px > -jnp.inf) & (log_qx > -jnp.inf)
        log_accept = jnp.where(possible, log_px - jnp.where(possible, log_qx, 0.0), -jnp.inf)
        log_accept = jnp.minimum(log_accept, 0.0)
        # A repeat of a refused draw is tried and never fed: nothing is left of it to be accepted.
        take = tested & tree_.valid[:, i] & (u[:, i] < jnp.exp(log_accept))
        log_rest = jnp.where((tested & ~take)[:, None], log_residual(log_rest, log_q), log_rest)
        log_rest = jnp.where(take[:, None], row_of(log_p, at * 0 + i + 1), log_rest)
        log_accept = jnp.where(tested, log_accept, -jnp.inf)
        return (jnp.where(take, i, at), log_rest), (take, tested, log_accept)

    none = jnp.zeros(batch, bool)
    untested = none, none, jnp.full(batch, -jnp.inf, log_p.dtype)
    first = jnp.full(batch, -1, jnp.int32), log_p[:, 0]
    (_, log_next), outs = lax.scan(trial, first, jnp.arange(nodes, dtype=jnp.int32))
    on, tested, log_accept = (x.T for x in outs)
    return _verdict(tree_, on, tested, log_accept, log_next)


def chosen(tree_: TokenTree, log_p: Float[Array, "B M V"], u: Float[Array, "B N"]) -> Verdict:
    """The same for a tree without any draw, at once and without V numbers for every node.

    A child is accepted with what the target gives it, once that of its earlier siblings is gone.
    """
    before = _earlier_siblings(tree_) & tree_.judged[:, None]
    again = (before & (tree_.tokens[:, :, None] == tree_.tokens[:, None])).any(-1)
    mass = jnp.where(again, 0.0, jnp.exp(log_probability(tree_, log_p)))
    left = 1 - jnp.where(before, mass[:, None], 0.0).sum(-1)
    accept = jnp.where(mass > 0, jnp.minimum(mass / jnp.where(left > 0, left, 1.0), 1.0), 0.0)
    on, tested = first_taken(tree_, u < accept)
    log_law, last = behind(tree_, log_p, on)
    refused = tested & (tree_.parent == last[:, None])
    log_next = normed_or(_without(log_law, tree_.tokens, refused), log_law)
    return _verdict(tree_, on, tested, jnp.log(accept), log_next)


def matching(tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Verdict:
    """The path of the target's own first maxima, and the one behind it as next token."""
    best = log_p.argmax(-1).astype(jnp.int32)
    take = tree_.tokens == jnp.take_along_axis(best, tree_.parent + 1, axis=1)
    on, tested = first_taken(tree_, take)
    log_law, last = behind(tree_, log_p, on)
    log_accept = jnp.where(take, 0.0, -jnp.inf).astype(log_p.dtype)
    verdict = _verdict(tree_, on, tested, log_accept, log_law)
    return verdict._replace(next_token=jnp.take_along_axis(best, last[:, None] + 1, axis=1)[:, 0])


def longest(tree_: TokenTree, log_p: Float[Array, "B M V"], take: Bool[Array, "B N"]) -> Verdict:
    """The longest path whose nodes are all taken; of equally long ones the first.

    The next token is the target's first maximum.
    """
    take = take & tree_.judged & tree_.valid
    above = tree.seen(tree_)[:, 1:, 1:]
    whole = (take[:, None] | ~above).all(-1)
    length = jnp.where(whole, above.sum(-1, dtype=jnp.int32), 0)
    end = length.argmax(-1)[:, None, None]
    on = jnp.take_along_axis(above, end, axis=1)[:, 0] & (length.max(-1) > 0)[:, None]
    tested = tree_.judged & tree_.valid & _below(tree_, on)
    log_law, last = behind(tree_, log_p, on)
    best = log_law.argmax(-1).astype(jnp.int32)
    log_accept = jnp.where(take, 0.0, -jnp.inf).astype(log_p.dtype)
    return _verdict(tree_, on, tested, log_accept, log_law)._replace(next_token=best)


def first_taken(
    tree_: TokenTree, take: Bool[Array, "B N"]
) -> tuple[Bool[Array, "B N"], Bool[Array, "B N"]]:
    """(nodes on the path of the first child that is taken at each node, nodes tested on the way)."""
    take = take & tree_.judged & tree_.valid
    open_ = ~(_earlier_siblings(tree_) & take[:, None]).any(-1)
    above = tree.seen(tree_)[:, 1:, 1:]
    on = ((take & open_)[:, None] | ~above).all(-1)
    return on, tree_.judged & open_ & _below(tree_, on)


def behind(
    tree_: TokenTree, log_p: Float[Array, "B M V"], on: Bool[Array, "B N"]
) -> tuple[Float[Array, "B V"], Int[Array, "B"]]:
    """(the target's law behind a path, the path's last node; -1 is the root)."""
    index = jnp.arange(on.shape[1], dtype=jnp.int32)[None]
    last = jnp.where(on, index, -1).max(-1)  # parents stand before their children
    return row_of(log_p, last + 1), last


def _verdict(tree_: TokenTree, on, tested, log_accept, log_next) -> Verdict:
    index = jnp.arange(on.shape[1], dtype=jnp.int32)[None]
    step = on.cumsum(1, dtype=jnp.int32)[..., None]  # how many of the path's nodes stand up to here
    levels = jnp.arange(1, tree_.depth + 1, dtype=jnp.int32)[None, None]
    path = jnp.where(on[..., None] & (step == levels), index[..., None], -1).max(1)
    accepted = on.sum(1, dtype=jnp.int32)
    return Verdict(path, accepted, jnp.zeros_like(accepted), log_next, log_accept, tested)


def _below(tree_: TokenTree, on: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """Nodes whose parent is on the path, or the root."""
    parent = jnp.take_along_axis(on, jnp.clip(tree_.parent, 0), axis=1)
    return parent | (tree_.parent < 0)


def _earlier_siblings(tree_: TokenTree) -> Bool[Array, "B N N"]:
    """Which nodes (last axis) are siblings that were drawn before a node."""
    before = jnp.asarray(np.tri(tree_.parent.shape[1], k=-1, dtype=bool))
    return (tree_.parent[:, :, None] == tree_.parent[:, None]) & before[None]


def log_probability(tree_: TokenTree, log_p: Float[Array, "B M V"]) -> Float[Array, "B N"]:
    """What the target gives every node behind its parent."""
    rows = jnp.arange(log_p.shape[0], dtype=jnp.int32)[:, None]
    return log_p[rows, tree_.parent + 1, tree_.tokens]


def _without(
    log_law: Float[Array, "B V"], tokens: Int[Array, "B N"], out: Bool[Array, "B N"]
) -> Float[Array, "B V"]:
    """The law with some tokens' mass taken away."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    ceiling = jnp.where(out, -jnp.inf, jnp.inf).astype(log_law.dtype)
    return log_law.at[rows, tokens].min(ceiling)


def _proposal(tree_: TokenTree, i: Int[Array, ""], log_p: Array) -> Float[Array, "B V"]:
    """The law that node i of each row was drawn from; one-hot where it was chosen."""
    token, row = tree_.tokens[:, i], tree_.q_row[:, i]
    ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None]
    one_hot = jnp.where(ids == token[:, None], 0.0, -jnp.inf).astype(log_p.dtype)
    if tree_.log_q is None:
        return one_hot
    log_q = row_of(tree_.log_q.astype(log_p.dtype), jnp.clip(row, 0))
    if not tree_.replace:
        index = jnp.arange(tree_.tokens.shape[1], dtype=jnp.int32)[None]
        alike = (tree_.parent == tree_.parent[:, i, None]) & (tree_.q_row == row[:, None])
        earlier = alike & tree_.judged & (index < i)
        rest = normed_or(_without(log_q, tree_.tokens, earlier), jnp.full_like(log_q, -jnp.inf))
        log_q = jnp.where(earlier.any(1, keepdims=True), rest, log_q)  # a first draw's to the bit
    return jnp.where(row[:, None] < 0, one_hot, log_q)
