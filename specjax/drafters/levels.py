"""What heads that draft a static tree share: its shape, and the children of its nodes.

Children are drawn from a law without replacement, or they are its likeliest tokens. A greedy row's are always
the likeliest ones: what a draft would draw at temperature 0 is one token, and the target's own is more often
among several.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode import sampling as laws
from specjax.decode.interfaces import TokenTree
from specjax.decode.sampling import Sampling
from specjax.decode.tree import Template
from specjax.models.draft_vocab import DraftVocab


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticTree:
    """A drafter's tree, known before anything is drafted.

    Attributes:
      paths: the tree, as lists of child ranks (see `specjax.decode.tree.Template`).
      widths: where there are no ``paths``: children of every node by depth, (1, 1, 1) a chain.
      draws: sample the children of rows that sample, without replacement; False takes the likeliest ones
        at every temperature. Lossless both.
    """

    paths: tuple[tuple[int, ...], ...] = ()
    widths: tuple[int, ...] = (1, 1, 1)
    draws: bool = False

    def __post_init__(self):
        object.__setattr__(self, "paths", tuple(tuple(path) for path in self.paths))
        object.__setattr__(self, "widths", tuple(self.widths))
        _ = self.template  # which refuses what is no tree

    @functools.cached_property
    def template(self) -> Template:
        return Template(self.paths) if self.paths else Template.of_widths(*self.widths)

    @property
    def depth(self) -> int:
        return self.template.depth

    @property
    def nodes(self) -> int:
        return self.template.nodes

    @property
    def chain(self) -> bool:
        return self.depth == self.nodes

    def filled(
        self,
        tokens: Int[Array, "B N"],
        there: Bool[Array, "B N"],
        drawn: Bool[Array, "B"],
        log_q: Float[Array, "B L V"] | None,
        law: Int[Array, " N"],
    ) -> TokenTree:
        """The tree of these tokens.

        Args:
          tokens: of every node.
          there: which exist.
          drawn: rows whose tokens are draws.
          log_q: what they are drawn from; None where no row's are.
          law: which of ``log_q`` every node is from.
        """
        tree = self.template.chosen(tokens, there)
        if log_q is None:
            return tree
        q_row = jnp.where(drawn[:, None], jnp.asarray(law, jnp.int32)[None], -1)
        return dataclasses.replace(tree, log_q=log_q, q_row=q_row, replace=False)


class Children(NamedTuple):
    """Children of R nodes, W of each, in the order in which they are tried.

    Attributes:
      tokens: int32 ``[B, R, W]``.
      there: which of them exist: a law may have fewer possible tokens.
      drawn: ``[B]``: rows whose children are draws from ``log_q``; others' are chosen.
      log_q: ``[B, R, V]``: the laws that they are drawn from; None where all are chosen.
    """

    tokens: Int[Array, "B R W"]
    there: Bool[Array, "B R W"]
    drawn: Bool[Array, "B"]
    log_q: Float[Array, "B R V"] | None


def children(
    logits: Float[Array, "B R K"],
    vocab: DraftVocab | None,
    width: int,
    sampling: Sampling,
    keys: Key[Array, "B"] | None,
) -> Children:
    """Children of every node.

    Args:
      logits: the draft's, of the pieces that it knows.
      vocab: which these are; None for all V.
      width: how many, W.
      sampling: of the rows. Its logit processors shape the target's law alone.
      keys: to draw with, one per row; None chooses the likeliest in all rows.

    Returns:
      Draws without replacement are the ``width`` largest of ``log_q`` with Gumbel noise (Kool et al. 2019,
      1903.06059, section 3), in falling order: the order in which they would be drawn one after the other.
    """
    greedy = sampling.temperature <= laws.GREEDY_TEMPERATURE
    drawn, score, log_q = jnp.zeros_like(greedy), logits, None
    if keys is not None:
        log_q = laws.log_law(logits, dataclasses.replace(sampling, processors=()))
        noise = gumbel(keys, log_q.shape[1:], log_q.dtype)
        drawn, score = ~greedy, jnp.where(greedy[:, None, None], logits, log_q + noise)
    best, tokens = jax.lax.top_k(score, width)
    tokens = tokens.astype(jnp.int32)
    if vocab is not None:
        tokens = jnp.asarray(vocab.ids)[tokens]
        log_q = None if log_q is None else vocab.whole(log_q)
    return Children(tokens, best > -jnp.inf, drawn, log_q)


def gumbel(keys: Key[Array, "B"], shape: tuple[int, ...], dtype) -> Float[Array, "B *S"]:
    """Gumbel noise for every row, with all its digits where it is large.

    From float32 uniforms it would end at 16: of 49,152 tokens all but one of which make up a percent together
    those would be drawn a quarter too seldom.
    """
    return jax.vmap(lambda key: jax.random.gumbel(key, shape, dtype, mode="high"))(keys)


def inner(shape: Template) -> int:
    """How many nodes have children: those that are read while a tree is drafted."""
    return len(set(shape.parents.tolist()) - {-1})


class Level(NamedTuple):
    """One step of drafting: nodes that are read, and the children that they get.

    Attributes:
      drafted: which of the level's nodes (in the tree's order) are read: those with children.
      behind: the parent of each of them among the nodes that were read one step before.
      at: the first open slot they are read into.
      mask: bool ``[M, W]``: the open slots they see, but for the unread pairs.
      parent: of every child, which of the nodes read.
      rank: of every child, the how-manieth child it is.
      law: of every child, which of all laws it is from.
    """

    drafted: np.ndarray
    behind: np.ndarray
    at: int
    mask: np.ndarray
    parent: np.ndarray
    rank: np.ndarray
    law: np.ndarray


def plan(shape: Template) -> list[Level]:
    """The levels of a tree; the first one reads nothing: behind the root stands the newest unread pair."""
    parents, width = set(shape.parents.tolist()), shape.depth + 1
    wide = width + inner(shape)
    slot, out, read, laws_ = {}, [], [-1], 0
    for depth in range(shape.depth):
        nodes = np.flatnonzero(shape.levels == depth)
        before, drafted = read, [i for i, n in enumerate(nodes.tolist()) if n in parents]
        if depth:
            read = [int(nodes[i]) for i in drafted]
        at, mask = width + len(slot), []
        for n in read if depth else ():
            slot[n] = width + len(slot)
            seen = np.zeros(wide, bool)
            while n >= 0:
                seen[slot[n]], n = True, int(shape.parents[n])
            mask.append(seen)
        children = np.flatnonzero(shape.levels == depth + 1)
        parent = np.asarray([read.index(p) for p in shape.parents[children]])
        behind = np.asarray([before.index(int(shape.parents[n])) for n in read] if depth else [0])
        out.append(
            Level(
                np.asarray(drafted, np.int32), behind, at, np.asarray(mask), parent,
                shape.ranks[children], (laws_ + parent).astype(np.int32),
            )
        )  # fmt: skip
        laws_ += len(read)
    return out
