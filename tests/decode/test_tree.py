"""Token trees: chains, and the general path that branching trees take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import tree
from specjax.decode.interfaces import TokenTree

# C7's example: nodes 0, 1 below the root, 2, 3 below node 0, 4 below node 1.
PARENTS = (-1, -1, 0, 0, 1)


def branching(parents=PARENTS, depth=2, batch=1):
    """A tree of these parents, all nodes valid, tokens 5, 6, ..."""
    parent = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (batch, len(parents)))
    tokens = parent * 0 + jnp.arange(5, 5 + len(parents), dtype=jnp.int32)[None]
    valid = jnp.ones_like(tokens, bool)
    return TokenTree(tokens, parent, valid, valid, None, parent * 0 - 1, depth=depth)


def naive_ancestors(parents):
    """Root first, then nodes; each with itself and all above it."""
    seen = np.eye(len(parents) + 1, dtype=bool)
    for node, parent in enumerate(parents):
        seen[node + 1] |= seen[parent + 1]
    return seen


def test_a_chain_links_each_node_to_the_one_before():
    """Invariant 8: parents -1, 0, 1; depth the number of nodes; one row of q per node."""
    tokens = jnp.asarray([[7, 8, 9]], jnp.int32)
    chain = tree.chain(tokens, tokens > 0, jnp.zeros((1, 3, 32)))
    assert chain.parent[0].tolist() == [-1, 0, 1] and chain.q_row[0].tolist() == [0, 1, 2]
    assert chain.depth == 3 and chain.replace
    assert tree.chain(tokens, tokens > 0, None).q_row[0].tolist() == [-1, -1, -1]


def test_an_empty_chain_is_refused():
    """G2: drafting nothing is plain decoding, not a chain of no nodes."""
    with pytest.raises(ValueError, match="at least one node"):
        tree.chain(jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), bool), None)


def test_a_block_of_a_chain_is_causal():
    """Invariant 8: root first, depths 0 .. n, each token sees those before it and itself."""
    tokens = jnp.asarray([[7, 8, 9], [1, 2, 3]], jnp.int32)
    block = tree.block(tree.chain(tokens, tokens > 0, None), jnp.asarray([4, 5], jnp.int32))
    assert block.tokens.tolist() == [[4, 7, 8, 9], [5, 1, 2, 3]]
    assert block.depth.tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_array_equal(block.mask, np.tri(4, dtype=bool)[None].repeat(2, 0))


def test_depth_is_the_way_to_the_root_not_the_index():
    """C7: parents [-1, -1, 0, 0, 1] have depths 1, 1, 2, 2, 2 below the root."""
    depth = tree.depths(branching().parent, 2)
    assert depth[0].tolist() == [0, 1, 1, 2, 2, 2]


def test_a_node_sees_its_ancestors_and_no_sibling():
    """C7: node 4 sees the root, node 1 and itself."""
    block = tree.block(branching(), jnp.asarray([4], jnp.int32))
    assert np.flatnonzero(block.mask[0, 5]).tolist() == [0, 2, 5]
    np.testing.assert_array_equal(block.mask[0], naive_ancestors(PARENTS))


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_have_the_masks_of_a_walk_up_the_tree(seed):
    """C7: rows of one batch with different parents; depth may be a loose upper bound."""
    rng = np.random.default_rng(seed)
    rows = [[int(rng.integers(-1, i)) for i in range(7)] for _ in range(3)]
    expected = np.stack([naive_ancestors(row) for row in rows])
    deepest = int(expected.sum(-1).max()) - 1
    parent = jnp.asarray(rows, jnp.int32)
    for depth in {deepest, min(deepest + 1, 6)}:
        np.testing.assert_array_equal(tree.ancestors(parent, depth), expected)
        np.testing.assert_array_equal(tree.depths(parent, depth), expected.sum(-1) - 1)


def test_degenerate_trees():
    """C8: only children of the root, and a tree of one node."""
    flat = branching((-1, -1, -1), depth=1)
    np.testing.assert_array_equal(
        tree.ancestors(flat.parent, 1)[0], np.eye(4, dtype=bool) | (np.arange(4) == 0)
    )
    assert tree.depths(branching((-1,), depth=1).parent, 1)[0].tolist() == [0, 1]


def test_a_chain_has_the_mask_of_the_general_path():
    """Invariant 8: the constant for chains equals what walking up gives."""
    tokens = jnp.ones((2, 4), jnp.int32)
    chain = tree.chain(tokens, tokens > 0, None)
    assert chain.chain
    np.testing.assert_array_equal(tree.seen(chain), tree.ancestors(chain.parent, 4))
    np.testing.assert_array_equal(tree.seen(chain)[0], naive_ancestors((-1, 0, 1, 2)))


def test_limit_invalidates_what_lies_beyond_the_length():
    """Invariant 6: by depth, per row; 0 left leaves no node."""
    cut = tree.limit(branching(batch=3), jnp.asarray([0, 1, 2], jnp.int32))
    expected = [[False] * 5, [True, True, False, False, False], [True] * 5]
    assert cut.valid.tolist() == expected and cut.judged.tolist() == expected
    chain = tree.chain(jnp.ones((1, 3), jnp.int32), jnp.ones((1, 3), bool), None)
    assert tree.limit(chain, jnp.asarray([2], jnp.int32)).valid.tolist() == [[True, True, False]]


def test_limit_revives_nothing():
    """Invariant 6: what a drafter left invalid stays so."""
    nothing = tree.chain(jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 2), bool), None)
    assert not tree.limit(nothing, jnp.asarray([9], jnp.int32)).valid.any()


# Templates.


def test_a_template_orders_its_paths_and_knows_its_shape():
    """Levels stand together, siblings in the order of their ranks."""
    shape = tree.Template(((0, 0), (1,), (0,), (1, 0), (0, 1), (0, 1, 0)))
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert shape.parents.tolist() == [-1, -1, 0, 0, 1, 3]
    assert shape.levels.tolist() == [1, 1, 2, 2, 2, 3] and shape.ranks.tolist() == [
        0,
        1,
        0,
        1,
        0,
        0,
    ]
    assert (shape.nodes, shape.depth) == (6, 3)


def test_widths_give_every_node_as_many_children():
    """3, 5, 7 children are 3 + 15 + 105 = 123 nodes, Medusa's Cartesian tree."""
    shape = tree.Template.of_widths(3, 5, 7)
    assert shape.nodes == 123 and (shape.levels == 3).sum() == 105
    assert tree.Template.of_widths(2, 1).parents.tolist() == [-1, -1, 0, 1]


@pytest.mark.parametrize(
    "paths, match",
    [
        ((), "at least one path"),
        (((),), "none of length 0"),
        (((0,), (0,)), r"path \(0,\) is there twice"),
        (((-1,),), "negative rank"),
        (((0,), (0, 1)), r"path \(0, 1\) needs path \(0, 0\)"),
        (((0, 0),), r"path \(0, 0\) needs path \(0,\)"),
    ],
)
def test_lists_that_are_no_tree_are_refused(paths, match):
    with pytest.raises(ValueError, match=match):
        tree.Template(paths)


def test_what_hangs_below_an_invalid_node_is_invalid():
    shape = tree.Template(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
    valid = jnp.asarray([[False, True, True, True, True]])
    made = shape.chosen(jnp.ones((1, 5), jnp.int32), valid)
    assert made.valid[0].tolist() == [False, True, False, True, False]
    assert made.log_q is None and not made.chain


# Merging.


def naive_merge(sequences, weights, budget, by_prefix):
    """{prefix: weight} of the nodes that are kept, in their order."""
    order = sorted(range(len(weights)), key=lambda m: -weights[m])
    weight, found = {}, []
    for m in order:
        for end in range(1, len(sequences[m]) + 1):
            prefix = tuple(sequences[m][:end])
            if -1 in prefix:
                break
            found += [] if prefix in weight else [prefix]
            weight[prefix] = weight.get(prefix, 0) + weights[m]
    if by_prefix:
        first = {prefix: order_of for order_of, prefix in enumerate(found)}
        found.sort(key=lambda prefix: (-weight[prefix], len(prefix), first[prefix]))
    return found[:budget]


def prefixes(made, row):
    """Every valid node's path as tokens, in the order of the nodes."""
    out = []
    for node in np.flatnonzero(made.valid[row]):
        parent = int(made.parent[row, node])
        above = () if parent < 0 else out[parent]
        out.append((*above, int(made.tokens[row, node])))
    return out


merge = jax.jit(tree.merge, static_argnums=2, static_argnames="by_prefix")


@pytest.mark.parametrize("by_prefix", [False, True])
@pytest.mark.parametrize("budget", [1, 4, 9, 40])
def test_merged_sequences_are_the_prefix_tree_of_the_heaviest(budget, by_prefix):
    """C: no prefix twice, parents before children, the heaviest within the budget, ties stable."""
    rng = np.random.default_rng(budget)
    sequences = rng.integers(-1, 3, (6, 5, 4))
    weights = rng.integers(0, 4, (6, 5)).astype(np.float32)
    args = jnp.asarray(sequences, jnp.int32), jnp.asarray(weights), budget
    made = merge(*args, by_prefix=by_prefix)
    assert made.tokens.shape == (6, budget) and made.depth == min(4, budget)
    assert (made.parent < jnp.arange(budget)[None]).all()
    for row in range(6):
        expected = naive_merge(sequences[row].tolist(), weights[row].tolist(), budget, by_prefix)
        assert prefixes(made, row) == expected
        assert made.valid[row].tolist() == [i < len(expected) for i in range(budget)]


def test_equal_sequences_are_one_and_nothing_is_none():
    """C: duplicates fold; -1 from the start is no sequence, and then there is no valid node."""
    rows = jnp.asarray([[[5, 6], [5, 6], [5, 7]], [[-1, 5], [-1, -1], [-1, -1]]], jnp.int32)
    made = merge(rows, jnp.ones((2, 3)), 4)
    assert prefixes(made, 0) == [(5,), (5, 6), (5, 7)] and prefixes(made, 1) == []


def test_token_zero_is_a_token():
    """Invariant 9: padding is -1, never an id."""
    made = merge(jnp.asarray([[[0, 0, -1]]], jnp.int32), jnp.ones((1, 1)), 3)
    assert prefixes(made, 0) == [(0,), (0, 0)]


def test_pruning_keeps_the_best_nodes_in_their_order():
    """The highest scores, earlier nodes of equal ones; parents are found again."""
    shape = tree.Template(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))
    made = shape.chosen(jnp.asarray([[5, 6, 7, 8, 9, 10]], jnp.int32), jnp.ones((1, 6), bool))
    score = jnp.asarray([[0.3, 0.7, 0.1, 0.5, 0.3, 0.4]])
    kept = tree.prune(made, score, 4)
    assert kept.tokens[0].tolist() == [5, 6, 8, 10] and kept.parent[0].tolist() == [-1, -1, 1, 2]
    assert prefixes(kept, 0) == [(5,), (6,), (6, 8), (6, 8, 10)]


def test_drawn_trees_are_not_pruned():
    drawn = tree._swap(branching(), log_q=jnp.zeros((1, 1, 3)))
    with pytest.raises(ValueError, match="only deterministic trees"):
        tree.prune(drawn, jnp.zeros((1, 5)), 2)
