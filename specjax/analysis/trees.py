"""Which static tree to draft with, from how often a draft's guesses are right.

References:
  Cai et al. 2024 (2401.10774), section 2.3.3 and appendix C: the tree is grown by the node that adds most to
  the expected length of what is accepted.
"""

import heapq

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
    accuracy = np.asarray(accuracy, np.float64)
    depth, ranks = accuracy.shape
    if not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise ValueError("accuracies lie in 0 .. 1")
    most = sum(ranks**d for d in range(1, depth + 1))
    if not 1 <= nodes <= most:
        raise ValueError(
            f"a tree of {depth} times {ranks} guesses has 1 to {most} nodes, not {nodes}"
        )
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
