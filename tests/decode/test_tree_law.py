"""Exact laws of trees, by enumeration: every draw, every outcome of every trial, in float64.

A round over a tree emits a path and a next token; what follows is the target's. So over all draws and
trials the first P + 1 tokens must have the target's law, whatever the tree looks like.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import multi_step, tree
from specjax.decode.interfaces import TokenTree
from specjax.decode.lossy import TypicalAcceptance
from specjax.decode.verify import GreedyMatch, NaiveSampling, SpeculativeSampling
from tests.decode.laws import ONE_ATOM, TWO_ATOMS

pytestmark = pytest.mark.usefixtures("x64")
V = 3


def laws(seed):
    """A law for every prefix; the same for the same prefix."""

    @functools.cache
    def law(prefix):
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        return rng.dirichlet(np.ones(V))

    return law


def always(p):
    return lambda prefix: np.asarray(p, np.float64)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tree before it is drawn: every node's parent, and where its token comes from.

    A source is a number, the draft that the token is drawn from, or a function of the prefix and the
    earlier siblings' tokens that chooses it.
    """

    parents: tuple[int, ...]
    sources: tuple
    replace: bool = True

    @property
    def depth(self):
        return max(len(self.above(n)) for n in range(len(self.parents)))

    def above(self, node):
        """A node's way from the root, itself included."""
        return [] if node < 0 else [*self.above(self.parents[node]), node]

    def drawn(self, drafts):
        """All that can be drawn: (tokens ``[R, N]``, chance ``[R]``, log_q ``[R, Q, V]``, q_row)."""
        pairs = [
            (p, s) if isinstance(s, int) else None
            for p, s in zip(self.parents, self.sources, strict=True)
        ]
        rows = sorted({pair for pair in pairs if pair is not None})
        q_row = np.asarray([-1 if pair is None else rows.index(pair) for pair in pairs], np.int32)
        out = []
        for tokens in itertools.product(range(V), repeat=len(self.parents)):
            chance = self._chance(tokens, drafts)
            if chance > 0:
                q = [drafts[k](self._prefix(tokens, parent)) for parent, k in rows]
                out.append((tokens, chance, q))
        tokens, chance, q = (np.asarray(x) for x in zip(*out, strict=True))
        with np.errstate(divide="ignore"):
            log_q = np.log(q) if rows else None
        return tokens.astype(np.int32), chance, log_q, q_row

    def _prefix(self, tokens, node):
        return tuple(tokens[n] for n in self.above(node))

    def _chance(self, tokens, drafts):
        chance = 1.0
        for n, (parent, source) in enumerate(zip(self.parents, self.sources, strict=True)):
            prefix = self._prefix(tokens, parent)
            siblings = [m for m in range(n) if self.parents[m] == parent]
            if not isinstance(source, int):
                chance *= tokens[n] == source(prefix, [tokens[m] for m in siblings])
                continue
            q = drafts[source](prefix).copy()
            if not self.replace:
                q[[tokens[m] for m in siblings if self.sources[m] == source]] = 0
                q = q / q.sum() if q.sum() else q
            chance *= q[tokens[n]]
        return chance


def token_trees(shape, drafts):
    """(every tree that may be drawn as rows of one `TokenTree`, their chances)."""
    tokens, chance, log_q, q_row = shape.drawn(drafts)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), tokens.shape)  # noqa: E731
    on = jnp.ones(tokens.shape, bool)
    log_q = None if log_q is None else jnp.asarray(log_q)
    made = TokenTree(
        jnp.asarray(tokens), wide(shape.parents), on, on, log_q, wide(q_row),
        depth=shape.depth, replace=shape.replace,
    )  # fmt: skip
    return made, chance


def log_laws(shape, tokens, target):
    """The target's law behind root and nodes ``[R, M, V]``."""
    rows = [
        [target(tuple(row[n] for n in shape.above(node))) for node in range(-1, len(row))]
        for row in tokens
    ]
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(rows))


@functools.partial(jax.jit, static_argnums=0)
def _walk(verifier, made, log_p, u):
    return verifier.walk(made, log_p, u)


def law_of(verifier, shape, drafts, target, change=lambda made: made):
    """The law of the first P + 1 tokens of a round and what the target says behind it.

    ``change`` does to the drawn tree what a wrong (or right) drafter might.
    """
    made, chance = token_trees(shape, drafts)
    log_p = log_laws(shape, np.asarray(made.tokens), target)
    made = change(made)
    nodes, out = made.tokens.shape[1], np.zeros((V,) * (shape.depth + 1))
    total = np.zeros(len(chance))
    for outcome in itertools.product((0.0, np.nextafter(1.0, 0.0)), repeat=nodes):
        u = jnp.broadcast_to(jnp.asarray(outcome), made.tokens.shape)
        verdict = _walk(verifier, made, log_p, u)
        accept = np.exp(np.asarray(verdict.log_accept))
        # Repeats are tried, and refused for sure; what is no law's may not be accepted.
        trial = np.asarray(verdict.tested)
        each = np.where(np.asarray(outcome) == 0, accept, 1 - accept)
        weight = np.where(trial, each, 0.5).prod(
            1
        )  # either outcome of what is not tried is this one
        total += weight
        for r in np.flatnonzero(chance * weight):
            path = np.asarray(verdict.path[r])
            words = tuple(int(made.tokens[r, n]) for n in path[: int(verdict.accepted[r])])
            law = np.exp(np.asarray(verdict.log_next[r]))
            if not verifier.lossless:
                law = np.eye(V)[int(verdict.next_token[r])]
            _spread(out, words, law, chance[r] * weight[r], target)
    np.testing.assert_allclose(total, 1, atol=1e-12)
    return out


def _spread(out, words, law, weight, target):
    """Adds what follows ``words``: one token of ``law``, then the target's."""
    for token in range(V):
        _follow(out, (*words, token), weight * law[token], target)


def _follow(out, words, weight, target):
    if weight == 0:
        return
    if len(words) == out.ndim:
        out[words] += weight
        return
    for token, p in enumerate(target(words)):
        _follow(out, (*words, token), weight * p, target)


def law_of_target(target, length):
    out = np.zeros((V,) * length)
    _follow(out, (), 1.0, target)
    return out


def error(verifier, shape, drafts, target, change=lambda made: made):
    got = law_of(verifier, shape, drafts, target, change)
    return np.abs(got - law_of_target(target, shape.depth + 1)).max()


def likeliest(prefix, earlier):
    """A deterministic choice that does not repeat itself."""
    return min(set(range(V)) - set(earlier), default=0)


def same(prefix, earlier):
    return (sum(prefix) + 1) % V


TWO_DRAWS = Shape((-1, -1), (0, 0))
SHAPES = {
    "two draws": TWO_DRAWS,
    "three draws": Shape((-1, -1, -1), (0, 0, 0)),
    "two by two": Shape((-1, -1, 0, 0, 1), (0, 0, 0, 0, 0)),
    "two by one, children first": Shape((-1, 0, -1, 2), (0, 0, 0, 0)),
    "two drafts": Shape((-1, -1, 0, 1), (0, 1, 0, 1)),
    "two drafts, in turns": Shape((-1, -1, -1, -1), (0, 1, 0, 1)),
    "without replacement": Shape((-1, -1, 0, 0), (0, 0, 0, 0), replace=False),
    "all of them without replacement": Shape((-1, -1, -1), (0, 0, 0), replace=False),
    "two drafts, without replacement": Shape((-1, -1, -1, -1), (0, 1, 0, 1), replace=False),
    "chosen": Shape((-1, -1, 0, 0, 1), (likeliest,) * 5),
    "chosen twice": Shape((-1, -1, 0, 1), (same,) * 4),
    "all of them chosen": Shape((-1, -1, -1), (likeliest,) * 3),
    "chosen, then drawn": Shape((-1, -1, -1, 0, 1), (likeliest, 0, 0, 0, likeliest)),
    "drawn, then chosen": Shape((-1, -1, -1, 0), (0, same, 1, same)),
    "chosen beside draws without replacement": Shape((-1, -1, -1), (0, same, 0), replace=False),
}  # fmt: skip
LOSSLESS = [SpeculativeSampling(), NaiveSampling()]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("verifier", LOSSLESS, ids=lambda v: type(v).__name__)
def test_lossless_rules_have_the_law_of_the_target(name, verifier):
    """Invariant 2, for every kind of tree: sampled, chosen, and mixed ones; two drafts of different q."""
    assert error(verifier, SHAPES[name], [laws(1), laws(2)], laws(3)) < 1e-14


@pytest.mark.parametrize("p, q", [ONE_ATOM, TWO_ATOMS])
@pytest.mark.parametrize("name", ["two draws", "without replacement", "two drafts, in turns"])
def test_both_base_cases(name, p, q):
    """B: the laws on which wrong rules differ most."""
    other = always((0.5, 0.2, 0.3))
    assert error(SpeculativeSampling(), SHAPES[name], [always(q), other], always(p)) < 1e-14


@pytest.mark.parametrize("name", ["two draws", "two by two", "without replacement"])
def test_a_draft_that_is_the_target_accepts_its_first_child(name):
    """Invariant 3; and the residual that is zero everywhere is never drawn from."""
    law = laws(4)
    assert error(SpeculativeSampling(), SHAPES[name], [law, law], law) < 1e-14
    made, _ = token_trees(SHAPES[name], [law, law])
    log_p = log_laws(SHAPES[name], np.asarray(made.tokens), law)
    last = jnp.full(made.tokens.shape, np.nextafter(1.0, 0.0))
    verdict = _walk(SpeculativeSampling(), made, log_p, last)
    assert (verdict.accepted == SHAPES[name].depth).all()


@pytest.mark.parametrize("zeros", [(0,), (1, 2)])
def test_laws_with_impossible_tokens(zeros):
    """What the target never says, and what the draft never draws."""
    p, q = np.full(V, 1.0), np.full(V, 1.0)
    p[list(zeros)], q[0] = 0, 0
    p, q = p / p.sum(), q / q.sum()
    for name in ("two draws", "two by two", "without replacement"):
        assert error(SpeculativeSampling(), SHAPES[name], [always(q)] * 2, always(p)) < 1e-14


# What a drafter must not do to its draws.


def folded(made):
    """Equal siblings as one trial."""
    same = (made.tokens[:, 1] == made.tokens[:, 0])[:, None] & (jnp.arange(2)[None] == 1)
    return tree._swap(made, valid=made.valid & ~same, judged=made.judged & ~same)


def sorted_by_q(made):
    """Siblings with the likelier first."""
    q = jnp.take_along_axis(made.log_q[:, 0], made.tokens, axis=1)
    order = jnp.argsort(-q, axis=1, stable=True)
    return tree._swap(made, tokens=jnp.take_along_axis(made.tokens, order, axis=1))


def only_the_larger_id(made):
    """One of two draws, chosen for what it is."""
    return tree._swap(made, tokens=made.tokens.max(1, keepdims=True).repeat(2, 1),
                      judged=made.judged & (jnp.arange(2)[None] == 0))  # fmt: skip


def test_equal_draws_stay_two_trials():
    """DESIGN 3's example: kept, the law is p; folded into one it is (.36, .44, .20)."""
    p, q = TWO_ATOMS
    drafts, target = [always(q)], always(p)
    kept = law_of(SpeculativeSampling(), TWO_DRAWS, drafts, target).sum(1)
    np.testing.assert_allclose(kept, (0.4, 0.4, 0.2), atol=1e-15)
    wrong = law_of(SpeculativeSampling(), TWO_DRAWS, drafts, target, folded).sum(1)
    np.testing.assert_allclose(wrong, (0.36, 0.44, 0.20), atol=1e-12)


def test_a_repeat_is_tried_and_need_not_be_fed():
    """C: the second of two equal draws is refused for sure, and its residual still counts."""

    def unfed(made):
        again = (made.tokens[:, 1] == made.tokens[:, 0])[:, None] & (jnp.arange(2)[None] == 1)
        return tree._swap(made, valid=made.valid & ~again)

    drafts, target = [laws(1)], laws(2)
    assert error(SpeculativeSampling(), TWO_DRAWS, drafts, target, unfed) < 1e-14


SHARED = {
    "two chains": Shape((-1, 0, -1, 2), (0, 0, 1, 1)),
    "two chains of one draft": Shape((-1, 0, -1, 2), (0, 0, 0, 0)),
    "three chains": Shape((-1, 0, -1, 2, -1, 4), (0, 0, 1, 1, 0, 0)),
    "two trees without replacement": Shape((-1, -1, 0, -1, -1, 3), (0, 0, 0, 1, 1, 1), False),
    "chosen beside drawn": Shape((-1, 0, -1, 2), (same, same, 1, 1)),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("verifier", LOSSLESS, ids=lambda v: type(v).__name__)
def test_what_is_behind_repeats_may_be_shared(name, verifier):
    """SpecInfer's merged trees: children of one prefix together, repeats tried and not read."""
    shape, drafts = SHARED[name], [laws(1), laws(2)]
    assert error(verifier, shape, drafts, laws(3), tree.share_repeats) < 1e-14
    made, _ = token_trees(shape, drafts)
    shared = tree.share_repeats(made)
    assert (shared.parent != made.parent).any() and not shared.valid.all()
    assert (shared.judged == made.judged).all() and (
        np.asarray(shared.parent) < np.arange(len(shape.parents))
    ).all()


@pytest.mark.parametrize("p, q", [ONE_ATOM, TWO_ATOMS])
@pytest.mark.parametrize("name", ["two chains", "two trees without replacement"])
def test_both_base_cases_of_merged_trees(name, p, q):
    """Two drafts of different q; and sharing is worth something: more is accepted than apart."""
    drafts, target = [always(q), always((0.5, 0.2, 0.3))], always(p)
    assert error(SpeculativeSampling(), SHARED[name], drafts, target, tree.share_repeats) < 1e-14
    apart = accepted(SHARED[name], drafts, target, lambda made: made)
    assert accepted(SHARED[name], drafts, target, tree.share_repeats) > apart + 1e-3


def accepted(shape, drafts, target, change):
    """Nodes that are accepted on average, over draws and (equally likely) uniforms on a grid."""
    made, chance = token_trees(shape, drafts)
    log_p, made = log_laws(shape, np.asarray(made.tokens), target), change(made)
    rng, total = np.random.default_rng(0), 0.0
    for _ in range(200):
        u = jnp.broadcast_to(jnp.asarray(rng.uniform(size=len(shape.parents))), made.tokens.shape)
        total += float(chance @ np.asarray(_walk(SpeculativeSampling(), made, log_p, u).accepted))
    return total / 200


def test_dropping_a_repeat_s_trial_changes_the_law():
    """What `share_repeats` must not do: without the repeat's trial its residual is missing."""
    p, q = TWO_ATOMS

    def dropped(made):
        shared = tree.share_repeats(made)
        return tree._swap(shared, judged=shared.valid)

    assert (
        error(SpeculativeSampling(), SHARED["two chains"], [always(q)] * 2, always(p), dropped)
        > 0.005
    )


@pytest.mark.parametrize("change", [folded, sorted_by_q, only_the_larger_id])
def test_draws_that_were_looked_at_change_the_law(change):
    p, q = TWO_ATOMS
    assert error(SpeculativeSampling(), TWO_DRAWS, [always(q)], always(p), change) > 0.01


def test_draws_judged_as_the_other_kind_change_the_law():
    """Without replacement judged as with it, and the other way round."""
    p, q = TWO_ATOMS
    for replace in (True, False):
        shape = Shape((-1, -1), (0, 0), replace=replace)
        turn = lambda made: tree._swap(made, replace=not made.replace)  # noqa: E731
        assert error(SpeculativeSampling(), shape, [always(q)], always(p), turn) > 0.01


def test_typical_acceptance_is_lossy():
    """Invariant 2: lossy rules fail the same test."""
    assert not TypicalAcceptance.lossless
    assert error(TypicalAcceptance(), SHAPES["two by two"], [laws(1)], laws(3)) > 0.05


# The two walks are one rule.


@pytest.mark.parametrize("name", ["chosen", "chosen twice", "all of them chosen"])
def test_the_quick_walk_of_chosen_nodes_is_the_scan(name):
    made, _ = token_trees(SHAPES[name], [])
    rng = np.random.default_rng(0)
    many = 200
    rows = jnp.asarray(rng.integers(0, V, (many, made.tokens.shape[1])), jnp.int32)
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (many, *x.shape[1:])), made)
    wide = tree._swap(wide, tokens=rows)
    log_p = jnp.log(jnp.asarray(rng.dirichlet(np.ones(V), (many, rows.shape[1] + 1))))
    u = jnp.asarray(rng.random(rows.shape))
    quick, scan = (jax.jit(walk)(wide, log_p, u) for walk in (multi_step.chosen, multi_step.drawn))
    for field in ("path", "accepted", "tested"):
        np.testing.assert_array_equal(getattr(quick, field), getattr(scan, field))
    np.testing.assert_allclose(np.exp(quick.log_next), np.exp(scan.log_next), atol=1e-12)
    on = np.asarray(quick.tested)
    np.testing.assert_allclose(
        np.exp(quick.log_accept)[on], np.exp(scan.log_accept)[on], atol=1e-12
    )


def test_greedy_rows_are_matched_by_every_rule():
    """Invariant 1: with one-hot laws sampling, matching and typical acceptance go the same way."""
    rng = np.random.default_rng(1)
    parents = np.asarray([-1, -1, 0, 0, 1, 2, 2], np.int32)
    tokens = rng.integers(0, V, (300, 7))
    for second, first in (
        (1, 0),
        (3, 2),
        (6, 5),
    ):  # no equal siblings, of which typical takes the longer
        tokens[:, second] = (tokens[:, first] + 1) % V
    tokens = jnp.asarray(tokens, jnp.int32)
    wide = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)
    on = jnp.ones(tokens.shape, bool)
    made = TokenTree(tokens, wide, on, on, None, wide * 0 - 1, depth=3)
    best = rng.integers(0, V, (300, 8))
    log_p = jnp.log(jnp.asarray(np.eye(V)[best]))
    u = jnp.asarray(rng.random(tokens.shape))
    rules = [GreedyMatch(), SpeculativeSampling(), NaiveSampling()]
    verdicts = [_walk(rule, made, log_p, u) for rule in rules]
    for verdict in verdicts[1:]:
        np.testing.assert_array_equal(verdict.path, verdicts[0].path)
        np.testing.assert_array_equal(verdict.log_next, verdicts[0].log_next)
    typical = _walk(TypicalAcceptance(), made, log_p, u)
    np.testing.assert_array_equal(typical.accepted, verdicts[0].accepted)
    np.testing.assert_array_equal(typical.next_token, verdicts[0].next_token)
    assert set(np.asarray(verdicts[0].accepted)) == {0, 1, 2, 3}


def test_equal_siblings_give_a_path_of_parents_and_children():
    """C: of two equal children the first is taken, and only what hangs below it follows."""
    parents, tokens = (-1, -1, 0, 1), (5, 5, 6, 7)
    made = TokenTree(
        jnp.asarray([tokens], jnp.int32), jnp.asarray([parents], jnp.int32),
        jnp.ones((1, 4), bool), jnp.ones((1, 4), bool), None, jnp.full((1, 4), -1, jnp.int32),
        depth=2,
    )  # fmt: skip
    log_p = jnp.log(jnp.eye(8)[jnp.asarray([[5, 7, 7, 0, 0]])])
    for rule in (GreedyMatch(), SpeculativeSampling()):
        verdict = rule.walk(made, log_p, jnp.zeros((1, 4)))
        # Node 0 says 5; the target then says 7, which hangs below the other 5 only.
        assert verdict.path.tolist() == [[0, -1]] and verdict.accepted.tolist() == [1]


@pytest.mark.parametrize("broken", [np.nan, -np.inf])
def test_nothing_is_accepted_behind_a_broken_law(broken):
    """A law that is NaN, or has everything masked, accepts nothing and is left as it is."""
    made, _ = token_trees(Shape((-1, -1), (likeliest,) * 2), [])
    log_p = jnp.full((1, 3, V), broken)
    for walk in (multi_step.chosen, multi_step.drawn):
        verdict = jax.jit(walk)(made, log_p, jnp.zeros((1, 2)))
        assert verdict.accepted.tolist() == [0]
        assert not (verdict.log_next > -jnp.inf).any()
