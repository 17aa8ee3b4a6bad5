"""Block verification: exact, never worse than token by token; lenience: lossy, and says so."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling
from specjax.decode import stopping, tree
from specjax.decode.interfaces import Verifier
from specjax.decode.verify import BlockVerification, LenientSampling
from tests import toys
from tests.decode.laws import (
    ONE_ATOM,
    PRODUCTION,
    TWO_ATOMS,
    block_outcomes,
    log,
    one_token_law,
    outcomes,
)
from tests.decode.test_law import EXACT, GAMMAS, error, pair, x64

BLOCK = BlockVerification()


@x64
@GAMMAS
@pytest.mark.parametrize("seed", range(3))
def test_the_law_is_exact(gamma, seed):
    """B18, invariant 2: whole outputs, to 1e-12, with EOS inside blocks too."""
    assert error(BLOCK, *pair(seed), gamma) < EXACT
    assert error(BLOCK, *pair(seed), gamma, eos_id=2) < EXACT


@x64
@GAMMAS
def test_special_laws_are_exact(gamma):
    """B3, B11, B13: equal laws (0/0), masked tokens, greedy rows, filters, deterministic drafts."""
    target, _ = pair(7)
    assert error(BLOCK, target, target, gamma) < EXACT
    assert error(BLOCK, *pair(6, zeros=True), gamma) < EXACT
    assert error(BLOCK, *pair(9, {"temperature": 0.0}), gamma) < EXACT
    assert error(BLOCK, *pair(4, {"temperature": 1.7, "top_k": 2}), gamma) < EXACT
    assert error(BLOCK, *pair(8), gamma, sampled=False) < EXACT
    for p, q in (ONE_ATOM, TWO_ATOMS):
        assert error(BLOCK, lambda text, p=p: log(p), lambda text, q=q: log(q), gamma) < EXACT


def expected_accepted(verifier, p, q, gamma, judge):
    """Mean accepted tokens of a chain of ``gamma`` drafts from tables of log-laws."""
    rows = np.asarray(list(itertools.product(range(len(p)), repeat=gamma)))
    before = np.concatenate([np.zeros((len(rows), 1), int), rows], axis=1)
    log_q = q[before[:, :-1]]
    chance = np.exp(np.take_along_axis(log_q, rows[..., None], 2)[..., 0].sum(1))
    tokens = jnp.asarray(rows, jnp.int32)
    chain = tree.chain(tokens, jnp.ones_like(tokens, bool), jnp.asarray(log_q))
    log_p = jnp.asarray(p[before])
    return sum(
        float((chance * weight * accepted).sum())
        for accepted, weight, _ in judge(verifier, chain, log_p)
    )


def by_formula(p, q, gamma):
    """(mean accepted tokens, the bound no rule for blocks can pass), in plain probabilities.

    A prefix survives with probability p_l, so the mean is sum_l E[p_l]; the bound is sum_l of the
    overlap of the two joint laws, which a rule that knew all of both could reach.
    """
    mean, bound = 0.0, 0.0
    for length in range(1, gamma + 1):
        for words in itertools.product(range(len(p)), repeat=length):
            way, weight = list(zip((0, *words), words, strict=False)), 1.0
            for a, b in way:
                weight = min(weight * np.exp(p[a, b] - q[a, b]), 1.0)
            joint = [np.exp(sum(m[a, b] for a, b in way)) for m in (p, q)]
            mean, bound = mean + joint[1] * weight, bound + min(joint)
    return mean, bound


@x64
def test_it_never_accepts_less_than_token_verification():
    """2403.10444: on random tables, strictly more on most of them."""
    gains = []
    for seed in range(20):
        p, q = (log(np.exp(x) / np.exp(x).sum(1, keepdims=True)) for x in toys.table_pair(seed))
        block = expected_accepted(BLOCK, p, q, 3, block_outcomes)
        token = expected_accepted(PRODUCTION, p, q, 3, outcomes)
        mean, bound = by_formula(p, q, 3)
        assert block == pytest.approx(mean, abs=1e-9)
        assert token - 1e-12 <= block <= bound + 1e-12
        gains.append(block - token)
    assert np.mean(np.asarray(gains) > 1e-3) > 0.5


@x64
def test_the_paper_s_example():
    """2403.10444: Mb = (1/3, 2/3), Ms = (2/3, 1/3), two drafts: 10/9, 11/9; at most 12/9."""
    p, q = log([[1 / 3, 2 / 3]] * 2), log([[2 / 3, 1 / 3]] * 2)
    assert expected_accepted(PRODUCTION, p, q, 2, outcomes) == pytest.approx(10 / 9)
    assert expected_accepted(BLOCK, p, q, 2, block_outcomes) == pytest.approx(11 / 9)
    assert by_formula(p, q, 2) == pytest.approx((11 / 9, 12 / 9))


@jax.jit
def walk(chain, log_p, u):
    return BLOCK.walk(chain, log_p, u)


def test_a_later_success_outweighs_earlier_failures():
    """The rule's heart: the longest successful prefix, not the first failure."""
    p, q = (jnp.log(jnp.asarray(x)) for x in TWO_ATOMS)
    tokens = jnp.asarray([[0, 2, 0]], jnp.int32)
    chain = tree.chain(tokens, tokens >= 0, jnp.broadcast_to(q, (1, 3, 3)))
    log_p = jnp.broadcast_to(p, (1, 4, 3))
    verdict = walk(chain, log_p, jnp.asarray([[0.999, 0.999, 0.0]]))
    assert verdict.accepted.tolist() == [3] and verdict.path.tolist() == [[0, 1, 2]]
    verdict = walk(chain, log_p, jnp.asarray([[0.0, 0.999, 0.999999]]))
    assert verdict.accepted.tolist() in ([1], [3]) and not np.isnan(verdict.log_next).any()


def test_broken_laws_end_the_chain_before_them():
    """B14: NaN in q costs acceptance behind it; NaN in p is met as in plain decoding."""
    p, q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in TWO_ATOMS)
    tokens, zero = jnp.asarray([[0, 0]], jnp.int32), jnp.zeros((1, 2))
    log_q = jnp.stack([q, jnp.full(3, jnp.nan)])[None]
    verdict = walk(tree.chain(tokens, tokens >= 0, log_q), jnp.broadcast_to(p, (1, 3, 3)), zero)
    assert verdict.accepted.tolist() == [1]
    np.testing.assert_allclose(np.exp(verdict.log_next[0]), TWO_ATOMS[0], rtol=1e-6)
    log_p = jnp.stack([p, jnp.full(3, jnp.nan), p])[None]
    chain = tree.chain(tokens, tokens >= 0, jnp.broadcast_to(q, (1, 2, 3)))
    verdict = walk(chain, log_p, zero)
    assert verdict.accepted.tolist() == [1] and np.isnan(verdict.log_next).all()


def test_greedy_decoding_through_the_loop():
    """Invariant 1: tokens and accepted counts are those of token verification."""
    rows = [[*range(5, 20)], [5, 6, 7, 1], [5, 6, 1]]
    says = [[5, 6, 9, *range(8, 20)], [5, 6, 7, 9], [5, 1, 1]]
    block = toys.play(rows, rows, says=says, verifier=BLOCK)
    token = toys.play(rows, rows, says=says)
    assert toys.emitted(block) == toys.emitted(token) == [rows[0][:8], rows[1], rows[2]]
    np.testing.assert_array_equal(block.stats.accepted, token.stats.accepted)
    np.testing.assert_array_equal(block.stats.tested, token.stats.tested)


def test_sampling_through_the_loop_accepts_more():
    """A noisy draft at temperature 1; a draft that is the target is accepted whole."""
    (params, draft), prompt = toys.pair_of(0), toys.ask(0)
    one = Sampling(1.0)
    accepted = {}
    for rule in (BLOCK, PRODUCTION):
        outs = [
            toys.decode(
                params, prompt, draft, verifier=rule, sampling=one, key=jax.random.key(i), eos_id=-1
            )
            for i in range(12)
        ]
        accepted[rule] = np.mean(
            [float(o.stats.emitted.sum() / o.stats.rounds.sum()) for o in outs]
        )
    assert accepted[BLOCK] > accepted[PRODUCTION] - 0.05
    same = toys.decode(params, prompt, params, verifier=BLOCK, sampling=one, eos_id=-1)
    assert float(same.stats.accepted.sum() / same.stats.drafted.sum()) > 0.97
    assert (same.finish_reason == stopping.LENGTH).all()


# Lenience.

LENIENT = {
    "linear": lambda p, lenience: p / lenience,
    "square": lambda p, lenience: p / lenience**2,
    "power": lambda p, lenience: p**lenience,
}


@x64
def test_lenience_below_one_is_lossy_and_one_is_not():
    """Invariant 2, B16: the exact test fails below 1 and passes at 1, where it is algorithm 1."""
    assert LenientSampling().lossless and not LenientSampling(0.5).lossless
    assert error(LenientSampling(1.0), *pair(0), 2) < EXACT
    for form in LENIENT:
        assert error(LenientSampling(1.0, form), *pair(0), 2) < EXACT
        for lenience in (0.9, 0.5, 0.1):
            assert error(LenientSampling(lenience, form), *pair(0), 2) > 1e-3
        assert error(LenientSampling(0.1, form), *pair(9, {"temperature": 0.0}), 2) < EXACT


@x64
@pytest.mark.parametrize("p, q", [ONE_ATOM, TWO_ATOMS])
@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
@pytest.mark.parametrize("form", LENIENT)
def test_lenience_keeps_the_papers_promises(p, q, lenience, form):
    """A.5 and DistillSpec: acceptance is sum_x min(f(p), q), and no token has more than f(p)."""
    law, accepted = one_token_law(LenientSampling(lenience, form), p, q)
    most = LENIENT[form](np.asarray(p), lenience)
    assert accepted == pytest.approx(np.minimum(most, q).sum(), abs=EXACT)
    assert (law <= most + EXACT).all() and law.sum() == pytest.approx(1)


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.5])
def test_lenience_out_of_range_is_refused(lenience):
    """By name."""
    with pytest.raises(ValueError, match="lenience"):
        LenientSampling(lenience)
    with pytest.raises(ValueError, match="form"):
        LenientSampling(0.5, "cubic")


def test_both_are_verifiers():
    """Section 3."""
    assert isinstance(BLOCK, Verifier) and isinstance(LenientSampling(0.5), Verifier)
    assert hash(BLOCK) == hash(BlockVerification())
