"""Trees from accuracies: as good as the best of all trees, where guesses fall."""

import numpy as np
import pytest

from specjax.analysis import trees


def every_tree(nodes: int, depth: int, ranks: int) -> set[tuple]:
    """All trees of so many nodes, as sorted tuples of paths."""
    grown = {((),)}
    for _ in range(nodes):
        more = set()
        for paths in grown:
            for at in paths:
                rank = sum(path[:-1] == at for path in paths if path)
                if len(at) < depth and rank < ranks:
                    more.add(tuple(sorted((*paths, (*at, rank)))))
        grown = more
    return {tuple(path for path in paths if path) for paths in grown}


def expected(accuracy, paths) -> float:
    return 1 + sum(np.prod([accuracy[d, r] for d, r in enumerate(path)]) for path in paths)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_no_tree_is_expected_to_do_better(nodes):
    accuracy = np.asarray([[0.6, 0.2, 0.1], [0.5, 0.25, 0.05]])
    found, tokens = trees.sparse(accuracy, nodes)
    assert found.nodes == nodes
    np.testing.assert_allclose(tokens, expected(accuracy, found.paths))
    best = max(expected(accuracy, paths) for paths in every_tree(nodes, 2, 3))
    np.testing.assert_allclose(tokens, best)


def test_a_sure_first_guess_makes_a_chain():
    found, tokens = trees.sparse(np.asarray([[1.0, 0.0]] * 3), 3)
    assert found.paths == ((0,), (0, 0), (0, 0, 0)) and tokens == 4


@pytest.mark.parametrize("nodes", [0, 7])
def test_what_cannot_be_is_said(nodes):
    with pytest.raises(ValueError, match="has 1 to 6 nodes"):
        trees.sparse(np.full((2, 2), 0.5), nodes)
    with pytest.raises(ValueError, match="0 .. 1"):
        trees.sparse(np.full((2, 2), 1.5), 1)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", range(4))
def test_dynamic_programming_finds_the_best_of_all_trees(nodes, seed):
    """Also where a later guess is right more often than an earlier one."""
    accuracy = np.random.default_rng(seed).uniform(size=(3, 3))
    tree, tokens = trees.optimal(accuracy, nodes)
    assert tree.nodes == nodes
    assert tokens == pytest.approx(expected(accuracy, tree.paths))
    best = max(expected(accuracy, paths) for paths in every_tree(nodes, 3, 3))
    assert tokens == pytest.approx(best, rel=1e-12)


def test_growing_is_as_good_where_guesses_get_worse():
    accuracy = -np.sort(-np.random.default_rng(5).uniform(size=(4, 6)), axis=1)
    for nodes in (1, 8, 40):
        assert trees.optimal(accuracy, nodes)[1] == pytest.approx(trees.sparse(accuracy, nodes)[1])


def test_a_guess_that_is_never_right_may_be_needed():
    """The second is: the first is taken for its sake."""
    tree, tokens = trees.optimal(np.asarray([[0.0, 0.9]]), 2)
    assert tree.paths == ((0,), (1,)) and tokens == pytest.approx(1.9)
    assert trees.optimal(np.asarray([[0.0, 0.9]]), 1)[1] == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_tree_of_all_sizes_and_depths(seed):
    rng = np.random.default_rng(seed)
    accuracy = rng.uniform(size=(3, 2))
    verify, draft = 1 + np.arange(7) * rng.uniform(0, 0.3), np.asarray([0, 0.1, 0.3, 0.4])
    found = trees.fastest(accuracy, verify, draft)
    rates = [1 / verify[0]]
    for nodes in range(1, 7):
        for paths in every_tree(nodes, 3, 2):
            levels = max(map(len, paths))
            rates.append(expected(accuracy, paths) / (verify[nodes] + draft[levels]))
    assert found.tokens / found.cost == pytest.approx(max(rates), rel=1e-12)
    if found.tree is not None:
        assert found.tokens == pytest.approx(expected(accuracy, found.tree.paths))


def test_where_tokens_cost_too_much_nothing_is_drafted():
    found = trees.fastest(np.full((2, 2), 0.4), np.asarray([1.0, 2.0, 3.0]), np.asarray([0, 0.1]))
    assert found == trees.Fastest(None, 1.0, 1.0)
    for verify, draft in (([0.0, 1.0], [0.0]), ([1.0], [-1.0]), ([], [0.0])):
        with pytest.raises(ValueError, match="costs"):
            trees.fastest(np.full((1, 1), 0.5), np.asarray(verify), np.asarray(draft))
