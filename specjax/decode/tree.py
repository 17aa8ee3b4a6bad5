"""Token trees: builders, ancestor masks, and the block a model reads."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode.interfaces import Block, TokenTree


def chain(
    tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], log_q: Float[Array, "B N V"] | None
) -> TokenTree:
    """A tree without branches: node i is the child of node i - 1.

    Args:
      tokens: drafted tokens, at least one per row.
      valid: a prefix of each row.
      log_q: the law each token was drawn from; None if they were chosen deterministically.
    """
    batch, nodes = tokens.shape
    if nodes < 1:
        raise ValueError("a chain needs at least one node; plain decoding drafts nothing")
    index = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    q_row = index if log_q is not None else jnp.full_like(index, -1)
    return TokenTree(tokens, index - 1, valid, valid, log_q, q_row, depth=nodes)


def is_chain(parent: Int[Array, "B N"], depth: int) -> bool:
    """Whether the static shape says that every node has exactly one child but the last."""
    return parent.shape[1] == depth


def ancestors(parent: Int[Array, "B N"], depth: int) -> Bool[Array, "B M M"]:
    """Which block tokens (root first, then nodes) each one descends from, itself included."""
    batch, nodes = parent.shape
    if is_chain(parent, depth):  # a constant, not a gather per level
        return jnp.broadcast_to(
            jnp.asarray(np.tri(nodes + 1, dtype=bool)), (batch, nodes + 1, nodes + 1)
        )
    up = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), parent + 1], axis=1)
    itself = jnp.broadcast_to(jnp.eye(nodes + 1, dtype=bool), (batch, nodes + 1, nodes + 1))
    seen = itself
    for _ in range(depth):
        seen = itself | jnp.take_along_axis(seen, up[:, :, None], axis=1)
    return seen


def depths(parent: Int[Array, "B N"], depth: int) -> Int[Array, "B M"]:
    """Depth of root (0) and nodes (1 and more)."""
    return ancestors(parent, depth).sum(-1, dtype=jnp.int32) - 1


def paths(tree: TokenTree) -> tuple[Int[Array, "B M P"], Int[Array, "B M"]]:
    """Drafted tokens on the way from the root to root and nodes, and their depths.

    Behind its depth a path is garbage.
    """
    batch, nodes = tree.tokens.shape
    seen = ancestors(tree.parent, tree.depth)
    depth = seen.sum(-1, dtype=jnp.int32) - 1
    if is_chain(tree.parent, tree.depth):  # every node's path is a prefix of the one there is
        return jnp.broadcast_to(tree.tokens[:, None], (batch, nodes + 1, nodes)), depth
    levels = jnp.arange(1, tree.depth + 1, dtype=jnp.int32)
    at = depth[:, 1:, None] == levels[None, None]
    on = seen[:, :, 1:, None] & at[:, None]
    return jnp.where(on, tree.tokens[:, None, :, None], 0).sum(2, dtype=jnp.int32), depth


def block(tree: TokenTree, root: Int[Array, "B"]) -> Block:
    """Root and nodes as one block; open slots are the block's own tokens."""
    mask = ancestors(tree.parent, tree.depth)
    tokens = jnp.concatenate([root[:, None], tree.tokens], axis=1)
    return Block(tokens, mask.sum(-1, dtype=jnp.int32) - 1, mask)


def limit(tree: TokenTree, remaining: Int[Array, "B"]) -> TokenTree:
    """Invalidates nodes that could only lie beyond the ``remaining`` tokens of each row."""
    deep = depths(tree.parent, tree.depth)[:, 1:]
    inside = deep <= remaining[:, None]
    return _swap(tree, valid=tree.valid & inside, judged=tree.judged & inside)


def _swap(tree: TokenTree, **changes) -> TokenTree:
    """``dataclasses.replace``; flax's method of that name is hidden by the field ``replace``."""
    return dataclasses.replace(tree, **changes)
