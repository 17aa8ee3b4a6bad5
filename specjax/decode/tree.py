"""Token trees: builders, ancestor masks, and the block a model reads.

A *chain* has no branches. A *template*'s shape is known before anything is drafted. `merge` makes one
tree of several sequences, and `prune` keeps the best part of a tree; both look at what was drafted, so
they are for deterministic proposals only: a sampled draw that is dropped or folded into its twin because
of what it is changes the law (see `specjax.decode.multi_step`).
"""

import dataclasses
import functools
import itertools

import jax
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
    return TokenTree(tokens, index - 1, valid, valid, log_q, q_row, depth=nodes, chain=True)


@dataclasses.dataclass(frozen=True)
class Template:
    """A static tree, as the list of its paths.

    Attributes:
      paths: one per node: the child ranks on the way to it from the root, (0,) the root's first child,
        (0, 2) that one's third. Any order; a node's parent and its earlier siblings must be there.

    References:
      Cai et al. 2024 (2401.10774), section 2.1.2 and appendix C, whose released trees are such lists.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        paths = tuple(tuple(int(rank) for rank in path) for path in self.paths)
        there = set(paths)
        if not paths or () in there:
            raise ValueError(
                "a tree needs at least one path, and none of length 0: the root is given"
            )
        if len(there) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise ValueError(f"path {twice} is there twice")
        for path in paths:
            if min(path) < 0:
                raise ValueError(f"path {path} has a negative rank")
            for needed in (path[:-1], (*path[:-1], path[-1] - 1)):
                if needed and needed[-1] >= 0 and needed not in there:
                    raise ValueError(f"path {path} needs path {needed}")
        object.__setattr__(self, "paths", tuple(sorted(paths, key=lambda path: (len(path), path))))

    @classmethod
    def of_widths(cls, *widths: int) -> "Template":
        """Every node of depth d - 1 has ``widths[d - 1]`` children (SpecInfer's expansion)."""
        levels = [itertools.product(*map(range, widths[:d])) for d in range(1, len(widths) + 1)]
        return cls(tuple(path for level in levels for path in level))

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @functools.cached_property
    def depth(self) -> int:
        return len(self.paths[-1])

    @functools.cached_property
    def levels(self) -> Int[np.ndarray, " N"]:
        """Depth of every node, 1 and more; nodes of a level stand together."""
        return np.asarray([len(path) for path in self.paths], np.int32)

    @functools.cached_property
    def ranks(self) -> Int[np.ndarray, " N"]:
        """Which of its parent's children every node is."""
        return np.asarray([path[-1] for path in self.paths], np.int32)

    @functools.cached_property
    def parents(self) -> Int[np.ndarray, " N"]:
        index = {path: i for i, path in enumerate(self.paths)} | {(): -1}
        return np.asarray([index[path[:-1]] for path in self.paths], np.int32)

    def chosen(self, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"]) -> TokenTree:
        """The tree of these tokens, chosen deterministically. What hangs below an invalid node is too."""
        parent = jnp.broadcast_to(jnp.asarray(self.parents), tokens.shape)
        above = ancestors(parent, self.depth)[:, 1:, 1:]
        valid = (valid[:, None] | ~above).all(-1)
        chain = self.depth == self.nodes
        return TokenTree(
            tokens,
            parent,
            valid,
            valid,
            None,
            jnp.full_like(parent, -1),
            depth=self.depth,
            chain=chain,
        )


def merge(
    sequences: Int[Array, "B M L"],
    weights: Float[Array, "B M"],
    budget: int,
    *,
    by_prefix: bool = False,
) -> TokenTree:
    """One prefix tree of several deterministic sequences, the heaviest within the budget.

    Args:
      sequences: behind the root; a sequence ends at its first -1.
      weights: at least 0. Of equal ones the first sequence is the heavier.
      budget: N, nodes of the tree.
      by_prefix: False takes the heaviest sequence whole, then the next one, until the budget is full;
        True takes the heaviest nodes, a node weighing what all sequences through it weigh together.

    Returns:
      A tree of ``budget`` nodes and depth L; where fewer are needed the last are invalid.
    """
    if budget < 1:
        raise ValueError(f"the budget must be at least 1 node, got {budget}")
    batch, count, length = sequences.shape
    order = jnp.argsort(-weights, axis=1, stable=True)
    sequences = jnp.take_along_axis(sequences, order[..., None], axis=1)
    weights = jnp.take_along_axis(weights, order, axis=1)
    there = jnp.cumprod(sequences >= 0, axis=-1, dtype=jnp.int32) > 0
    alike = (sequences[:, :, None] == sequences[:, None]) & there[:, :, None] & there[:, None]
    alike = (
        jnp.cumprod(alike, axis=-1, dtype=jnp.int32) > 0
    )  # [B, M, M, L]: the prefixes are the same
    # The first sequence through a prefix has its node, which the others share.
    owner = jnp.where(there, alike.argmax(2), 0).astype(jnp.int32)
    new = there & (owner == jnp.arange(count, dtype=jnp.int32)[None, :, None])
    if by_prefix:
        # Parents weigh as much as their children or more, and of equal ones the higher comes first.
        weight = jnp.where(alike, weights[:, None, :, None], 0).sum(2)
        key = jnp.where(new, -weight, jnp.inf).transpose(0, 2, 1).reshape(batch, -1)
        rank = jnp.argsort(jnp.argsort(key, axis=1, stable=True), axis=1).astype(jnp.int32)
        rank = rank.reshape(batch, length, count).transpose(0, 2, 1)
    else:
        rank = new.reshape(batch, -1).cumsum(1, dtype=jnp.int32).reshape(new.shape) - 1
    above = jnp.take_along_axis(rank, owner, axis=1)  # rank of the node at (m, l), whoever has it
    above = jnp.pad(above[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    flat = lambda x: x.reshape(batch, -1)  # noqa: E731
    at = jnp.where(flat(new), flat(rank), budget)
    put = jax.vmap(lambda x, at: jnp.zeros(budget, x.dtype).at[at].set(x, mode="drop"))
    valid = put(flat(new), at)
    tokens = jnp.where(valid, put(flat(sequences), at), 0)
    parent = jnp.where(valid, put(flat(above), at), -1)
    return TokenTree(
        tokens, parent, valid, valid, None, jnp.full_like(parent, -1), depth=min(length, budget)
    )


def share_repeats(tree: TokenTree) -> TokenTree:
    """Nodes of one prefix share their children; all but the first are trials only.

    For trees of several sources, drawn or chosen. A repeat is refused for sure where its first is, so the
    target need not read it; but it is a draw, so it is tried. Its children, drawn behind the same prefix,
    become the first one's youngest. Nothing is dropped or moved for what it is itself, so the law stays.
    """
    nodes = tree.tokens.shape[1]
    before = jnp.asarray(np.tri(nodes, dtype=bool))[None]
    alike = tree.judged[:, :, None] & tree.judged[:, None] & before
    alike &= tree.tokens[:, :, None] == tree.tokens[:, None]
    first = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None], tree.tokens.shape)
    above = lambda first: jnp.where(  # noqa: E731
        tree.parent < 0, -1, jnp.take_along_axis(first, jnp.clip(tree.parent, 0), axis=1)
    )
    for _ in range(tree.depth):  # a level's parents are settled before it is
        parent = above(first)
        same = alike & (parent[:, :, None] == parent[:, None])
        first = jnp.where(tree.judged, same.argmax(2).astype(jnp.int32), first)
    itself = first == jnp.arange(nodes, dtype=jnp.int32)[None]
    return _swap(tree, parent=above(first), valid=tree.valid & itself)


def prune(tree: TokenTree, score: Float[Array, "B N"], budget: int) -> TokenTree:
    """The best nodes of a deterministic tree, in their old order.

    Args:
      tree: chosen deterministically.
      score: no child's may be above its parent's; of equal ones the earlier node is the better.
      budget: nodes that stay.
    """
    if tree.log_q is not None:
        raise ValueError("only deterministic trees may be cut by looking at them")
    batch, nodes = tree.tokens.shape
    best = jnp.argsort(jnp.where(tree.valid, -score, jnp.inf), axis=1, stable=True)[:, :budget]
    kept = jnp.sort(best, axis=1).astype(jnp.int32)
    place = jnp.full((batch, nodes + 1), -1, jnp.int32)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    place = place.at[row, kept].set(jnp.arange(kept.shape[1], dtype=jnp.int32)[None])
    pick = lambda x: jnp.take_along_axis(x, kept, axis=1)  # noqa: E731
    parent = pick(tree.parent)
    parent = jnp.where(parent < 0, -1, jnp.take_along_axis(place, parent, axis=1, mode="clip"))
    return _swap(
        tree,
        tokens=pick(tree.tokens), parent=parent, valid=pick(tree.valid), judged=pick(tree.judged),
        q_row=pick(tree.q_row), depth=min(tree.depth, budget),
    )  # fmt: skip


def ancestors(parent: Int[Array, "B N"], depth: int) -> Bool[Array, "B M M"]:
    """Which block tokens (root first, then nodes) each one descends from, itself included."""
    batch, nodes = parent.shape
    up = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), parent + 1], axis=1)
    itself = jnp.broadcast_to(jnp.eye(nodes + 1, dtype=bool), (batch, nodes + 1, nodes + 1))
    seen = itself
    for _ in range(depth):
        seen = itself | jnp.take_along_axis(seen, up[:, :, None], axis=1)
    return seen


def seen(tree: TokenTree) -> Bool[Array, "B M M"]:
    """`ancestors` of a tree's nodes; of a chain a constant, not a gather per level."""
    if not tree.chain:
        return ancestors(tree.parent, tree.depth)
    batch, nodes = tree.tokens.shape
    causal = jnp.asarray(np.tri(nodes + 1, dtype=bool))
    return jnp.broadcast_to(causal, (batch, nodes + 1, nodes + 1))


def depths(parent: Int[Array, "B N"], depth: int) -> Int[Array, "B M"]:
    """Depth of root (0) and nodes (1 and more)."""
    return ancestors(parent, depth).sum(-1, dtype=jnp.int32) - 1


def paths(tree: TokenTree) -> tuple[Int[Array, "B M P"], Int[Array, "B M"]]:
    """Drafted tokens on the way from the root to root and nodes, and their depths.

    Behind its depth a path is garbage.
    """
    batch, nodes = tree.tokens.shape
    above = seen(tree)
    depth = above.sum(-1, dtype=jnp.int32) - 1
    if tree.chain:  # every node's path is a prefix of the one there is
        return jnp.broadcast_to(tree.tokens[:, None], (batch, nodes + 1, nodes)), depth
    levels = jnp.arange(1, tree.depth + 1, dtype=jnp.int32)
    at = depth[:, 1:, None] == levels[None, None]
    on = above[:, :, 1:, None] & at[:, None]
    return jnp.where(on, tree.tokens[:, None, :, None], 0).sum(2, dtype=jnp.int32), depth


def block(tree: TokenTree, root: Int[Array, "B"]) -> Block:
    """Root and nodes as one block; open slots are the block's own tokens."""
    mask = seen(tree)
    tokens = jnp.concatenate([root[:, None], tree.tokens], axis=1)
    return Block(tokens, mask.sum(-1, dtype=jnp.int32) - 1, mask)


def limit(tree: TokenTree, remaining: Int[Array, "B"]) -> TokenTree:
    """Invalidates nodes that could only lie beyond the ``remaining`` tokens of each row."""
    deep = seen(tree)[:, 1:].sum(-1, dtype=jnp.int32) - 1
    inside = deep <= remaining[:, None]
    return _swap(tree, valid=tree.valid & inside, judged=tree.judged & inside)


def _swap(tree: TokenTree, **changes) -> TokenTree:
    """``dataclasses.replace``; flax's method of that name is hidden by the field ``replace``."""
    return dataclasses.replace(tree, **changes)
