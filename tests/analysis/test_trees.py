"""Trees from accuracies: as good as the best of all trees, where guesses fall."""

import itertools

import numpy as np
import pytest

from specjax.analysis import trees


def stands(path, there):
    """Whether a node's parent and its earlier sibling are there."""
    needed = (path[:-1], (*path[:-1], path[-1] - 1))
    return all(p in there for p in needed if p and p[-1] >= 0)


def every_tree(depth, ranks, nodes):
    """All trees of so many nodes."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=d)]
    every = itertools.combinations(paths, nodes)
    return (some for some in every if all(stands(p, set(some)) for p in some))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_no_tree_is_expected_to_do_better(nodes):
    accuracy = np.asarray([[0.6, 0.2, 0.1], [0.5, 0.25, 0.05]])
    found, expected = trees.sparse(accuracy, nodes)
    worth = lambda some: 1 + sum(np.prod([accuracy[d, r] for d, r in enumerate(p)]) for p in some)  # noqa: E731
    assert found.nodes == nodes
    np.testing.assert_allclose(expected, worth(found.paths))
    np.testing.assert_allclose(expected, max(map(worth, every_tree(2, 3, nodes))))


def test_a_sure_first_guess_makes_a_chain():
    found, expected = trees.sparse(np.asarray([[1.0, 0.0]] * 3), 3)
    assert found.paths == ((0,), (0, 0), (0, 0, 0)) and expected == 4


@pytest.mark.parametrize("nodes", [0, 7])
def test_what_cannot_be_is_said(nodes):
    with pytest.raises(ValueError, match="has 1 to 6 nodes"):
        trees.sparse(np.full((2, 2), 0.5), nodes)
    with pytest.raises(ValueError, match="0 .. 1"):
        trees.sparse(np.full((2, 2), 1.5), 1)
