"""Which static tree to draft with, from how often a draft's guesses are right and what tokens cost.

References:
  Cai et al. 2024 (2401.10774), section 2.3.3 and appendix C: the tree is grown by the node that adds most to
  the expected length of what is accepted. Chen et al. 2024, Sequoia (2402.12374): the best tree by dynamic
  programming, and its size and depth by what they cost (the hardware-aware tree optimizer).
"""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.decode.tree import Template


def sparse(accuracy: Float[np.ndarray, "P R"], nodes: int) -> tuple[Template, float]:
    """The tree of so many nodes with the longest expected accepted path.

    A node is accepted as often as all guesses on its way are right, taken for independent: the product of
    ``accuracy[d, rank]`` over its path. A guess is in the tree only with those before it: where a later one
    is right more often than an earlier one, the tree is what grows greedily, not always the best.

    Args:
      accuracy: how often the guess of every rank is right at every depth.
      nodes: size of the tree.

    Returns:
      (the tree, tokens per step that it lets expect: 1 and the sum over its nodes).

    Raises:
      ValueError: fewer than 1 node, or more than there are guesses; accuracies outside 0 .. 1.
    """
    accuracy = _checked(accuracy, nodes)
    depth, ranks = accuracy.shape
    worth = lambda path: float(np.prod([accuracy[d, r] for d, r in enumerate(path)]))  # noqa: E731
    open_, kept, total = [(-worth((0,)), (0,))], [], 1.0
    while len(kept) < nodes:
        value, path = heapq.heappop(open_)
        kept.append(path)
        total -= value
        sibling, child = (*path[:-1], path[-1] + 1), (*path, 0)
        if sibling[-1] < ranks:
            heapq.heappush(open_, (-worth(sibling), sibling))
        if len(child) <= depth:
            heapq.heappush(open_, (-worth(child), child))
    return Template(tuple(kept)), total


class Fastest(NamedTuple):
    """The tree of most tokens per cost.

    Attributes:
      tree: None where drafting nothing is best.
      tokens: that a step lets expect, 1 and more.
      cost: of a step, in plain steps.
    """

    tree: Template | None
    tokens: float
    cost: float


def optimal(accuracy: Float[np.ndarray, "P R"], nodes: int) -> tuple[Template, float]:
    """The best of all trees of so many nodes in which a guess stands with those of lower rank.

    See `sparse` for what is asked, given and refused; where no guess is right more often than one of lower
    rank, which is usual, it finds the same.
    """
    accuracy = _checked(accuracy, nodes)
    found = _Table(accuracy, nodes)
    return found.tree(nodes), 1 + float(found.below[0][nodes])


def fastest(
    accuracy: Float[np.ndarray, "P R"],
    verify: Float[np.ndarray, " N"],
    draft: Float[np.ndarray, " D"],
) -> Fastest:
    """The size, depth and shape of most tokens per cost.

    Args:
      accuracy: see `sparse`.
      verify: cost of reading the root and 0, 1, ... nodes, in plain steps.
      draft: cost of drafting 0, 1, ... levels, in plain steps. As many levels count as both this and
        ``accuracy`` have.

    Raises:
      ValueError: a cost is not positive (of drafting: negative), or accuracies are outside 0 .. 1.
    """
    verify, draft = np.asarray(verify, np.float64), np.asarray(draft, np.float64)
    if len(verify) < 1 or len(draft) < 1 or (verify <= 0).any() or (draft < 0).any():
        raise ValueError(
            "costs of reading are positive, of drafting at least 0, and both are given"
        )
    cost = verify[0] + draft[0]
    best = Fastest(None, 1.0, float(cost))
    for levels in range(1, min(len(accuracy), len(draft) - 1) + 1):
        most = min(len(verify) - 1, _guesses(levels, np.shape(accuracy)[1]))
        if most < 1:
            continue
        found = _Table(_checked(accuracy[:levels], most), most)
        for nodes in range(1, most + 1):
            tokens, cost = 1 + float(found.below[0][nodes]), float(verify[nodes] + draft[levels])
            if tokens / cost > best.tokens / best.cost:
                best = Fastest(found.tree(nodes), tokens, cost)
    return best


class _Table:
    """What so many nodes below a node of every depth let expect at best, and how they are shared out.

    ``below[d][n]``: tokens accepted below a node of depth d that has n nodes below it, once it is accepted.
    ``first[d][k][n]``: of n nodes for the children from rank k on, how many go to child k and below it.
    """

    def __init__(self, accuracy: np.ndarray, nodes: int):
        depth, ranks = accuracy.shape
        nothing = np.full(nodes + 1, -np.inf)
        nothing[0] = 0.0
        self.below = [nothing] * (depth + 1)
        self.first = np.zeros((depth, ranks, nodes + 1), np.int64)
        for d in reversed(range(depth)):
            others = nothing
            for k in reversed(range(ranks)):
                below = self.below[d + 1][:-1]  # child k with 0, 1, ... below it
                possible = below > -np.inf
                own = accuracy[d, k] * (1 + np.where(possible, below, 0.0))
                own = np.where(possible, own, -np.inf)
                best = nothing.copy()
                for n in range(1, nodes + 1):
                    shares = own[:n] + others[n - 1 :: -1]
                    self.first[d, k, n] = shares.argmax() + 1
                    best[n] = shares.max()
                others = best
            self.below[d] = others

    def tree(self, nodes: int) -> Template:
        """The tree of so many nodes."""
        paths, open_ = [], [((), nodes)]
        while open_:
            path, left = open_.pop()
            rank = 0
            while left:
                share = int(self.first[len(path), rank, left])
                child = (*path, rank)
                paths.append(child)
                open_.append((child, share - 1))
                left, rank = left - share, rank + 1
        return Template(tuple(paths))


def _checked(accuracy: np.ndarray, nodes: int) -> np.ndarray:
    accuracy = np.asarray(accuracy, np.float64)
    if not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise ValueError("accuracies lie in 0 .. 1")
    depth, ranks = accuracy.shape
    most = _guesses(depth, ranks)
    if not 1 <= nodes <= most:
        raise ValueError(
            f"a tree of {depth} times {ranks} guesses has 1 to {most} nodes, not {nodes}"
        )
    return accuracy


def _guesses(depth: int, ranks: int) -> int:
    return sum(ranks**d for d in range(1, depth + 1))
