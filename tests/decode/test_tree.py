"""Token trees: chains, and the general path that branching trees take."""

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
