"""The acceptance rule on single blocks, against values worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import residual as residuals
from specjax.decode import sampling, tree, verify
from specjax.decode.sampling import Sampling
from specjax.decode.verify import GreedyMatch, SpeculativeSampling
from tests.decode import laws
from tests.decode.laws import MUTANTS, ONE_ATOM, PRODUCTION, RIGHT, TWO_ATOMS, one_token_law

LAST_U = 1 - 2**-24
CASES = pytest.mark.parametrize("p, q", [ONE_ATOM, TWO_ATOMS], ids=["one atom", "two atoms"])


@functools.partial(jax.jit, static_argnums=0)
def judge(rule, tree_, log_p, keys):
    return rule.judge(tree_, log_p, keys)


@jax.jit
def walk(tree_, log_p, u):
    return PRODUCTION.walk(tree_, log_p, u)


residual = jax.jit(residuals.log_residual)
law = jax.jit(sampling.log_law)


def chain(tokens, log_q=None, valid=None):
    """A chain for one row."""
    tokens = jnp.asarray([tokens], jnp.int32)
    valid = jnp.ones_like(tokens, bool) if valid is None else jnp.asarray([valid])
    return tree.chain(tokens, valid, None if log_q is None else jnp.asarray(log_q)[None])


def one_hots(*ids, size=32):
    """Log-law rows of a target that says these ids, for one row."""
    return jnp.log(jax.nn.one_hot(jnp.asarray([ids], jnp.int32), size))


def emitted(verdict, nodes):
    """Accepted tokens, then the next one."""
    accepted = int(verdict.accepted[0])
    assert verdict.path[0].tolist() == [*range(accepted), *[-1] * (len(nodes) - accepted)]
    return [*nodes[:accepted], int(verdict.next_token[0])]


# Base cases, exactly.


@pytest.mark.usefixtures("x64")
@CASES
def test_the_output_law_is_the_target_and_acceptance_is_the_overlap(p, q):
    """B1-B8: output p, acceptance sum min(p, q) = .5, for both base cases."""
    out, acceptance = one_token_law(PRODUCTION, p, q)
    np.testing.assert_allclose(out, p, atol=1e-15)
    assert acceptance == pytest.approx(0.5, abs=1e-15)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "mutant, case, wrong, acceptance",
    [
        ("from p after a rejection", ONE_ATOM, (0.40, 0.45, 0.15), 0.5),
        ("only the refused id subtracted", ONE_ATOM, (0.433, 0.467, 0.100), 0.5),
        ("p over max p", ONE_ATOM, (0.75, 0.15, 0.10), 0.35),
        ("swapped ratio", ONE_ATOM, (0.1, 0.3, 0.6), None),
        ("equality, then p", ONE_ATOM, None, 0.21),
        ("equality, then p", TWO_ATOMS, None, 0.26),
        ("argmax of the target", ONE_ATOM, (1.0, 0.0, 0.0), 0.1),
        ("accept always", ONE_ATOM, (0.1, 0.3, 0.6), 1.0),
    ],
)
def test_the_check_sees_published_mistakes(mutant, case, wrong, acceptance):
    """B4, B5, B6, B16, B19: each wrong rule has its documented wrong law in the same check."""
    p, q = case
    out, accepted = one_token_law(MUTANTS[mutant], p, q)
    assert np.abs(out - p).max() > 0.01
    if wrong is not None and mutant != "swapped ratio":
        np.testing.assert_allclose(out, wrong, atol=5e-4)
    if acceptance is not None:
        assert accepted == pytest.approx(acceptance, abs=1e-12)


@pytest.mark.usefixtures("x64")
@CASES
def test_the_check_passes_a_right_rule_written_anew(p, q):
    """B16: the mutants' frame itself is right when both formulas are."""
    np.testing.assert_allclose(one_token_law(RIGHT, p, q)[0], p, atol=1e-15)


@pytest.mark.usefixtures("x64")
@CASES
def test_a_deterministic_draft_is_judged_as_one_hot(p, q):
    """B3: drafting argmax q is exact without log_q; claiming q for it gives [.833, 0, .167]."""
    best = int(np.argmax(q))
    out, acceptance = one_token_law(PRODUCTION, p, q, draft=best)
    np.testing.assert_allclose(out, p, atol=1e-15)
    assert acceptance == pytest.approx(p[best], abs=1e-15)
    if (p, q) == ONE_ATOM:
        judged = chain([best], laws.log(q)[None])
        log_p = jnp.broadcast_to(laws.log(p), (1, 2, 3))
        (_, refused, after), (_, taken, _) = laws.outcomes(PRODUCTION, judged, log_p)
        claimed = refused[0] * after[0] + taken[0] * np.eye(3)[best]
        np.testing.assert_allclose(claimed, [0.833, 0, 0.167], atol=5e-4)


@pytest.mark.usefixtures("x64")
def test_unfiltered_drafts_cost_acceptance_and_no_exactness():
    """B8: target after top-p .7; a uniform q accepts .5, the filtered one .875; 2, 3 never."""
    p = (0.625, 0.375, 0, 0)
    for q, acceptance in [((0.25,) * 4, 0.5), ((0.5, 0.5, 0, 0), 0.875)]:
        out, accepted = one_token_law(PRODUCTION, p, q)
        np.testing.assert_allclose(out, p, atol=1e-15)
        assert accepted == pytest.approx(acceptance, abs=1e-15)


def test_temperature_zero_tempers_both_laws():
    """B9: raw target [.3, .5, .2], draft 0: rejected for sure, 1 emitted, by both rules."""
    logits = jnp.log(jnp.asarray([[[0.3, 0.5, 0.2]] * 2]))
    log_p = law(logits, Sampling().rows(1))
    log_q = law(jnp.asarray([[[2.0, 1.0, 0.0]]]), Sampling().rows(1))[0]
    keys = jax.random.split(jax.random.key(0), 1)
    for rule in (SpeculativeSampling(), GreedyMatch()):
        assert emitted(judge(rule, chain([0], log_q), log_p, keys), [0]) == [1]


# Which row is read.


@pytest.mark.parametrize("rule", [SpeculativeSampling(), GreedyMatch()], ids=str)
@pytest.mark.parametrize(
    "target, draft, out",
    [
        ((5, 6, 7, 8), (9, 9, 9), [5]),
        ((5, 6, 7, 8), (5, 9, 7), [5, 6]),
        ((5, 6, 7, 8), (5, 6, 9), [5, 6, 7]),
        ((5, 6, 7, 8), (5, 6, 7), [5, 6, 7, 8]),
        ((5, 6, 0, 0), (5, 0, 0), [5, 6]),
    ],
)
def test_correction_and_bonus_come_from_the_row_after_the_last_accepted(rule, target, draft, out):
    """B1, B2: the first disagreement ends the walk, later agreement counts for nothing."""
    keys = jax.random.split(jax.random.key(1), 1)
    verdict = judge(rule, chain(draft), one_hots(*target), keys)
    assert emitted(verdict, list(draft)) == out
    tested = min(len(out), len(draft))
    assert verdict.tested[0].tolist() == [True] * tested + [False] * (len(draft) - tested)


def test_invalid_and_unjudged_nodes_are_never_accepted():
    """Invariant 6: the walk ends before an invalid node, with the target's own law, no test."""
    keys = jax.random.split(jax.random.key(1), 1)
    for rule in (SpeculativeSampling(), GreedyMatch()):
        verdict = judge(
            rule, chain([5, 6, 7], valid=[True, False, False]), one_hots(5, 6, 7, 8), keys
        )
        assert emitted(verdict, [5, 6, 7]) == [5, 6]
        assert verdict.tested[0].tolist() == [True, False, False]


def test_an_invalid_node_leaves_the_bonus_law_alone():
    """N4: where nothing was tested nothing is subtracted from the target's law."""
    p, q = (np.asarray(x, np.float32) for x in TWO_ATOMS)
    nothing = chain([2], jnp.log(q)[None], valid=[False])
    verdict = walk(nothing, jnp.log(p)[None, None].repeat(2, 1), jnp.zeros((1, 1)))
    np.testing.assert_allclose(np.exp(verdict.log_next[0]), p, rtol=1e-6)
    assert not verdict.tested.any() and verdict.accepted[0] == 0


def test_chain_rules_refuse_branches():
    """B2: a rule for chains that meets a tree says so."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    branching = tree.Template(((0,), (1,))).chosen(tokens, tokens == 0)
    for rule in (verify.BlockVerification(), verify.LenientSampling(0.5)):
        with pytest.raises(ValueError, match="judges chains only"):
            rule.walk(branching, one_hots(5, 6, 7), jnp.zeros((1, 2)))


# Corners of arithmetic.


@pytest.mark.parametrize("excess", [0.0, 1e-7])
def test_a_rejection_where_p_equals_q_falls_back_on_p(excess):
    """B11: the residual is empty; the next token has law p, never NaN, never id 0."""
    log_p = jnp.log(jnp.asarray([0.0, 0.5, 0.5]))
    log_q = log_p + excess
    np.testing.assert_array_equal(residual(log_p[None], log_q[None])[0], log_p)
    u = jnp.asarray([[LAST_U]])
    log_p = log_p[None, None].repeat(2, 1)
    for token in (1, 2):
        verdict = walk(chain([token], log_q[None] + 1e-6), log_p, u)
        assert verdict.accepted[0] == 0
        np.testing.assert_allclose(np.exp(verdict.log_next[0]), [0, 0.5, 0.5])
        for u_next in (0.0, 0.3, LAST_U):
            assert sampling.draw(verdict.log_next, jnp.asarray([u_next]))[0] in (1, 2)


def test_log1p_keeps_what_log_loses():
    """B12: the fact the residual rests on, in float32."""
    tiny = jnp.float32(1e-9)
    assert jnp.log(1 - tiny) == 0 and jnp.log1p(-tiny) == -tiny


def residual_in_float64(log_p, log_q):
    log_p, log_q = (np.asarray(x, np.float64) for x in (log_p, log_q))
    with np.errstate(invalid="ignore"):
        excess = np.where(log_p > log_q, np.exp(log_p) * -np.expm1(log_q - log_p), 0.0)
    return excess / excess.sum(-1, keepdims=True)


@pytest.mark.parametrize("closeness", [1.0, 1e-2, 1e-4, 1e-6])
def test_the_residual_in_float32_matches_float64(closeness):
    """B12: from the same float32 log-probabilities, to 1e-6, also where p and q almost agree."""
    rng = np.random.default_rng(0)
    log_p = np.float32(np.log(rng.dirichlet(np.full(9, 0.5), size=200)))
    log_q = log_p + np.float32(closeness * rng.normal(size=log_p.shape))
    some = (log_p > log_q).any(1)
    log_p, log_q = log_p[some], log_q[some]
    got = np.exp(np.asarray(residual(jnp.asarray(log_p), jnp.asarray(log_q))))
    np.testing.assert_allclose(got, residual_in_float64(log_p, log_q), atol=1e-6)


def test_the_residual_keeps_a_difference_below_one_ulp_of_a_probability():
    """B12: p = 1 - 3e-9 against q = 1 - 4e-9; half of the residual lies there."""
    log_p = jnp.asarray([[-3e-9, np.log(2e-9), np.log(1e-9)]], jnp.float32)
    log_q = jnp.asarray([[-4e-9, np.log(1e-9), np.log(3e-9)]], jnp.float32)
    np.testing.assert_allclose(
        np.exp(residual(log_p, log_q)), residual_in_float64(log_p, log_q), atol=1e-6
    )
    np.testing.assert_allclose(residual_in_float64(log_p, log_q), [[0.5, 0.5, 0]], atol=1e-5)


def test_probabilities_below_float16_keep_their_ratio():
    """B13: p(x) = 1e-8, q(x) = 2e-8 is accepted with probability .5."""
    log_p = jnp.log(jnp.asarray([1e-8, 1 - 1e-8]))
    log_q = jnp.log(jnp.asarray([2e-8, 1 - 2e-8]))
    verdict = walk(chain([0], log_q[None]), log_p[None, None].repeat(2, 1), jnp.zeros((1, 1)))
    np.testing.assert_allclose(np.exp(verdict.log_accept[0, 0]), 0.5, rtol=1e-5)
    assert np.float16(1e-8) == 0


@pytest.mark.parametrize("p_x, q_x", [(0.0, 0.0), (0.0, 0.5), (0.5, 0.0)])
def test_impossible_tokens_are_refused_without_nan(p_x, q_x):
    """B13, D5: masked in p, in q or in both, token 7 is refused; nothing is NaN."""
    row = lambda x: jnp.log(jnp.asarray([x, *[(1 - x) / 7] * 7], jnp.float32)[::-1])  # noqa: E731
    log_p, log_q = row(p_x)[None, None].repeat(2, 1), row(q_x)[None]
    verdict = walk(chain([7], log_q), log_p, jnp.zeros((1, 1)))
    assert verdict.log_accept[0, 0] == -np.inf and verdict.accepted[0] == 0
    assert not np.isnan(np.exp(verdict.log_next)).any()
    np.testing.assert_allclose(np.exp(verdict.log_next).sum(), 1, rtol=1e-5)
    if p_x == 0:
        assert verdict.log_next[0, 7] == -np.inf


def test_a_draft_that_is_nan_costs_acceptance_and_nothing_else():
    """B14: NaN in q refuses the draft, and the next token has the target's law."""
    p = jnp.log(jnp.asarray(ONE_ATOM[0]))[None, None].repeat(2, 1)
    verdict = walk(chain([0], jnp.full((1, 3), jnp.nan)), p, jnp.zeros((1, 1)))
    assert verdict.accepted[0] == 0
    np.testing.assert_allclose(np.exp(verdict.log_next[0]), ONE_ATOM[0], rtol=1e-6)


def test_categorical_says_nothing_about_nan():
    """B14: the fact that makes an error flag necessary."""
    for value in (jnp.nan, -jnp.inf):
        assert jax.random.categorical(jax.random.key(0), jnp.full(4, value)) == 0


def test_the_acceptance_test_is_strict():
    """B13: u = 0 does not accept a token of probability 0, and u just below p/q accepts."""
    log_p = jnp.log(jnp.asarray([0.25, 0.75]))[None, None].repeat(2, 1)
    log_q = jnp.log(jnp.asarray([[0.5, 0.5]]))
    accepted = [
        int(walk(chain([0], log_q), log_p, jnp.asarray([[u]])).accepted[0])
        for u in (0.0, 0.49999, 0.50001, LAST_U)
    ]
    assert accepted == [1, 1, 0, 0]


def test_ties_go_to_the_first_maximum():
    """D1: logits [0, 1, 1] give 1 as verdict, as bonus and as correction."""
    keys = jax.random.split(jax.random.key(2), 1)
    log_p = law(jnp.asarray([[[0.0, 1.0, 1.0]] * 3]), Sampling().rows(1))
    raw = jnp.asarray([[[0.0, 1.0, 1.0]] * 3])
    for rule, rows in (
        (SpeculativeSampling(), log_p),
        (GreedyMatch(), log_p),
        (GreedyMatch(), raw),
    ):
        assert emitted(judge(rule, chain([1, 1]), rows, keys), [1, 1]) == [1, 1, 1]
        assert emitted(judge(rule, chain([1, 2]), rows, keys), [1, 2]) == [1, 1]


def test_greedy_match_refuses_other_temperatures():
    """B16: argmax verification at temperature 1 changes the law, so it is refused."""
    GreedyMatch().check(Sampling())
    with pytest.raises(ValueError, match="temperature 0"):
        GreedyMatch().check(Sampling(jnp.asarray([0.0, 1.0])))


def test_acceptance_and_next_token_use_different_randomness():
    """J5: the uniforms of judge are those of its keys folded by use, each use its own."""
    uses = (verify.DRAFT, verify.ACCEPT, verify.NEXT)
    assert len(set(uses)) == 3
    keys = jax.random.split(jax.random.key(3), 400)
    p, q = (jnp.log(jnp.asarray(x)) for x in TWO_ATOMS)
    tokens = jnp.full((400, 1), 2, jnp.int32)
    judged = tree.chain(tokens, tokens > 0, jnp.broadcast_to(q, (400, 1, 3)))
    log_p = jnp.broadcast_to(p, (400, 2, 3))
    verdict = judge(PRODUCTION, judged, log_p, keys)
    u = sampling.uniform(sampling.fold(keys, verify.ACCEPT), 1)
    np.testing.assert_array_equal(verdict.accepted, (u[:, 0] < 2 / 7).astype(jnp.int32))
    u_next = sampling.uniform(sampling.fold(keys, verify.NEXT), 1)[:, 0]
    np.testing.assert_array_equal(verdict.next_token, sampling.draw(verdict.log_next, u_next))
