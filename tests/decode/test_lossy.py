"""Rules that accept what is good enough: which tokens that is, on chains and trees, and that it is lossy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import tree
from specjax.decode.interfaces import TokenTree
from specjax.decode.lossy import DistanceAcceptance, TopKAcceptance, TypicalAcceptance
from specjax.decode.verify import GreedyMatch
from tests import toys
from tests.decode import test_tree_law

pytestmark = pytest.mark.usefixtures("x64")
# Laws behind the root and each of three nodes: the likeliest are 2, then 1; 0, then 3; 5, then 4; 1, 0.
LAWS = np.asarray([
    [0.05, 0.30, 0.40, 0.15, 0.05, 0.05],
    [0.50, 0.10, 0.05, 0.30, 0.03, 0.02],
    [0.05, 0.05, 0.05, 0.05, 0.20, 0.60],
    [0.24, 0.25, 0.13, 0.13, 0.13, 0.12],
])  # fmt: skip


def judged(rule, tokens):
    """(accepted, next token) of a chain of three under LAWS."""
    tokens = jnp.asarray([tokens], jnp.int32)
    chain = tree.chain(tokens, jnp.ones((1, 3), bool), None)
    verdict = rule.judge(
        chain, jnp.log(jnp.asarray(LAWS))[None], toys.row_keys(jax.random.key(0), 1)
    )
    return int(verdict.accepted[0]), int(verdict.next_token[0])


@pytest.mark.parametrize(
    ("tokens", "k", "accepted", "next_token"),
    [
        ((2, 0, 5), 1, 3, 1), ((1, 0, 5), 1, 0, 2), ((1, 3, 4), 2, 3, 1), ((1, 3, 0), 2, 2, 5),
        ((3, 3, 4), 2, 0, 2), ((3, 3, 4), 3, 3, 1),
    ],
)  # fmt: skip
def test_top_k_accepts_the_likeliest(tokens, k, accepted, next_token):
    assert judged(TopKAcceptance(k), tokens) == (accepted, next_token)


@pytest.mark.parametrize(
    ("tokens", "epsilon", "accepted", "next_token"),
    [
        ((2, 0, 5), 0, 3, 1), ((3, 1, 4), 0, 0, 2), ((3, 1, 4), 1, 3, 1), ((4, 1, 4), 1, 0, 2),
        ((4, 2, 3), 2, 3, 1), ((0, 0, 5), 2, 3, 1),
    ],
)  # fmt: skip
def test_distance_accepts_what_is_near(tokens, epsilon, accepted, next_token):
    """Stern et al. section 5.2: |token - argmax| at most epsilon."""
    assert judged(DistanceAcceptance(epsilon), tokens) == (accepted, next_token)


def test_typical_takes_less_where_the_law_is_sure():
    """The threshold is delta exp(-H): .3 exp(-H) of the first law is .070, of the last .053."""
    entropy = -(LAWS[0] * np.log(LAWS[0])).sum()
    assert judged(TypicalAcceptance(0.9, 0.3), (3, 0, 5)) == (3, 1)
    strict = TypicalAcceptance(0.9, 0.16 * np.exp(entropy))  # needs .16
    assert judged(strict, (3, 0, 5))[0] == 0 and judged(strict, (1, 0, 5))[0] > 0


@pytest.mark.parametrize("rule", [TopKAcceptance(2), DistanceAcceptance(1), TypicalAcceptance()])
def test_they_are_lossy(rule):
    """Invariant 2: the exact test of the law fails, and they say so."""
    assert not rule.lossless
    shape = test_tree_law.SHAPES["two by two"]
    assert test_tree_law.error(rule, shape, [test_tree_law.laws(1)], test_tree_law.laws(3)) > 0.05


@pytest.mark.parametrize("rule", [TopKAcceptance(1), DistanceAcceptance(0)])
def test_their_strictest_is_greedy_matching(rule):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 6, (200, 4)), jnp.int32)
    parent = jnp.broadcast_to(jnp.asarray([-1, -1, 0, 1], jnp.int32), tokens.shape)
    # no equal siblings: of two the same rule takes the first, this one the longer
    tokens = tokens.at[:, 1].set((tokens[:, 0] + 1) % 6)
    on = jnp.ones(tokens.shape, bool)
    made = TokenTree(tokens, parent, on, on, None, parent * 0 - 1, depth=2)
    log_p = jnp.log(jnp.asarray(rng.dirichlet(np.ones(6), (200, 5))))
    keys = toys.row_keys(jax.random.key(0), 200)
    ours, greedy = rule.judge(made, log_p, keys), GreedyMatch().judge(made, log_p, keys)
    np.testing.assert_array_equal(ours.path, greedy.path)
    np.testing.assert_array_equal(ours.next_token, greedy.next_token)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKAcceptance(0), "k must be at least 1"),
        (lambda: DistanceAcceptance(-1), "epsilon must not be negative"),
        (lambda: TypicalAcceptance(1.5), "epsilon must lie in"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
