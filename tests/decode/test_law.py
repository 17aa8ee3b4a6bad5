"""The law of whole outputs equals the target's: exactly by enumeration, and by Monte Carlo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, sampling
from specjax.decode.interfaces import Params
from specjax.decode.verify import GreedyMatch
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.decode.laws import (
    MUTANTS,
    ONE_ATOM,
    PRODUCTION,
    RIGHT,
    TWO_ATOMS,
    SequenceLaw,
    chain_rule,
    distance,
    log,
)

LENGTH, EXACT = 3, 1e-12
GAMMAS = pytest.mark.parametrize("gamma", [1, 2, 3])
x64 = pytest.mark.usefixtures("x64")


def laws_of(logits, options):
    """Text -> log-law under ``options`` for a table of logits, by the production `log_law`."""
    rows = Sampling(**({"temperature": 1.0} | options)).rows(1)
    table = np.asarray(_log_law(jnp.asarray(logits)[None], rows)[0])
    return lambda text: table[text[-1]]


_log_law = jax.jit(sampling.log_law)


def error(verifier, target, draft, gamma, **options):
    """Distance of the speculative law from the chain rule of the target."""
    eos_id = options.get("eos_id", -1)
    speculative = SequenceLaw(verifier, target, draft, gamma, LENGTH, **options).after((0,))
    assert sum(speculative.values()) == pytest.approx(1, abs=EXACT)
    return distance(speculative, chain_rule(target, LENGTH, eos_id))


def pair(seed, options=None, zeros=False):
    """Laws of a random target and draft table; ``zeros`` masks tokens in each of them."""
    target, draft = toys.table_pair(seed)
    if zeros:
        target[0, 1] = target[1, 2] = draft[0, 0] = draft[1, 2] = draft[2, 1] = -np.inf
    return laws_of(target, options or {}), laws_of(draft, options or {})


@x64
def test_the_enumeration_covers_all_outputs():
    """B18: 27 outputs of three tokens; with EOS the shorter ones."""
    target, draft = pair(0)
    assert len(SequenceLaw(PRODUCTION, target, draft, 2, LENGTH).after((0,))) == 27
    with_eos = SequenceLaw(PRODUCTION, target, draft, 2, LENGTH, eos_id=2).after((0,))
    assert len(with_eos) == 1 + 2 + 4 * 3 and all(2 not in text[:-1] for text in with_eos)


@x64
@GAMMAS
@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_random_tables_is_exact(gamma, seed):
    """B18, invariant 2: to 1e-12 for every output."""
    assert error(PRODUCTION, *pair(seed), gamma) < EXACT


@x64
@GAMMAS
def test_eos_inside_a_block_does_not_bend_the_law(gamma):
    """A1, B18: outputs end at EOS (id 2), be it drafted, corrected or bonus."""
    assert error(PRODUCTION, *pair(3), gamma, eos_id=2) < EXACT


@x64
@GAMMAS
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 2},
        {"top_p": 0.7},
        {"temperature": 1.3, "top_k": 2, "top_p": 0.8},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_filtered_laws_are_exact(gamma, options):
    """B8, B9: temperature, top-k and top-p go into p and q alike."""
    assert error(PRODUCTION, *pair(4, options), gamma) < EXACT


@x64
@pytest.mark.parametrize("gamma", [1, 2])
def test_a_draft_without_the_filters_is_exact_too(gamma):
    """B8: a drafter that ignores top-k loses acceptance, not exactness."""
    target, _ = pair(5, {"top_k": 2})
    _, draft = pair(5)
    assert error(PRODUCTION, target, draft, gamma) < EXACT


@x64
@GAMMAS
def test_impossible_tokens_on_either_side_are_exact(gamma):
    """B13, D5: tokens masked in p only, in q only and in both."""
    assert error(PRODUCTION, *pair(6, zeros=True), gamma) < EXACT


@x64
@GAMMAS
def test_equal_laws_are_exact(gamma):
    """B11: p = q leaves no residual."""
    target, _ = pair(7)
    assert error(PRODUCTION, target, target, gamma) < EXACT


@x64
@GAMMAS
@pytest.mark.parametrize("eos_id", [-1, 1])
def test_deterministic_drafts_are_exact(gamma, eos_id):
    """B3: without log_q a node counts as drawn from a one-hot law."""
    assert error(PRODUCTION, *pair(8), gamma, sampled=False, eos_id=eos_id) < EXACT


@x64
@pytest.mark.parametrize("p, q", [ONE_ATOM, TWO_ATOMS], ids=["one atom", "two atoms"])
@GAMMAS
def test_base_cases_hold_for_sequences(gamma, p, q):
    """B1-B8: the base laws at every position."""
    assert error(PRODUCTION, lambda text: log(p), lambda text: log(q), gamma) < EXACT


@x64
def test_the_greedy_rule_is_exact_for_greedy_laws():
    """Invariant 2: GreedyMatch, lossless at temperature 0."""
    assert error(GreedyMatch(), *pair(9, {"temperature": 0.0}), 2) < EXACT


@x64
@pytest.mark.parametrize("name", MUTANTS)
def test_lossy_rules_fail_the_same_check(name):
    """B4-B6, B16, B19, invariant 2: no wrong rule passes."""
    assert error(MUTANTS[name], *pair(0), 2) > 1e-3


@x64
def test_the_mutants_frame_passes_when_it_is_right():
    """Invariant 2: what makes mutants fail is their formulas."""
    assert error(RIGHT, *pair(0), 2) < EXACT


# Monte Carlo through the real decode.

DRAWS = 200_000


def tables(seed=0):
    target, draft = toys.table_pair(seed, spread=1.0)
    as_params = lambda x: {"logits": jnp.asarray(x, jnp.float32)}  # noqa: E731
    return Params(as_params(target), as_params(draft))


def decode_many(gamma, options, eos_id=-1):
    """`generate` with ``DRAWS`` keys; outputs as base-3 numbers."""
    model, both = toys.Table(3), tables()
    ask = toys.prompt([0])

    def one(key):
        out = generate(
            model, both.target, ask, drafter=SmallModel(model, gamma), draft_params=both.draft,
            sampling=Sampling(**options), max_decode_len=LENGTH, key=key, eos_id=eos_id,
        )  # fmt: skip
        return out.tokens[0], out.lengths[0], out.stats.accepted[0], out.stats.tested[0]

    keys = jax.random.split(jax.random.key(7), DRAWS)
    return [np.asarray(x) for x in jax.jit(jax.vmap(one))(keys)]


def test_monte_carlo_through_generate():
    """B1, B18: 2e5 decodes with EOS inside; total variation from the chain rule below .01."""
    options = {"temperature": 1.2, "top_p": 0.95}
    tokens, lengths, accepted, tested = decode_many(2, options, eos_id=2)
    outputs, counts = np.unique(
        np.concatenate([tokens, lengths[:, None]], axis=1), axis=0, return_counts=True
    )
    observed = {tuple(o[: o[-1]].tolist()): n / DRAWS for o, n in zip(outputs, counts, strict=True)}
    target = laws_of(np.asarray(tables().target["logits"]), options)
    expected = chain_rule(target, LENGTH, eos_id=2)
    variation = sum(abs(observed.get(k, 0) - expected.get(k, 0)) for k in observed | expected) / 2
    assert variation < 0.01
    assert 0.2 < accepted.sum() / tested.sum() < 0.9  # both branches were taken


def first_rounds(gamma=1):
    """(drafted token, accepted, first emitted, second emitted) of ``DRAWS`` first rounds."""
    model = toys.Table(3)
    both = Params(*({"logits": jnp.tile(jnp.log(jnp.asarray(x)), (3, 1))} for x in TWO_ATOMS))
    decoder = loop.Decoder(model, 4, SmallModel(model, gamma), eos_id=-1)
    rows = Sampling(1.0).rows(1)

    def one(key):
        state = loop.start(decoder, both, toys.prompt([0]), key[None])
        keys = sampling.fold(state.keys, state.stats.rounds)
        tree, _ = decoder.drafter.propose(both, state.drafter, state.text, rows, keys)
        state = loop.speculative_round(decoder, both, state, sampling=rows)
        return tree.tokens[0, 0], state.stats.accepted[0], *state.text.tokens[0, 1:3]

    keys = jax.random.split(jax.random.key(8), DRAWS)
    return [np.asarray(x) for x in jax.jit(jax.vmap(one))(keys)]


def test_draft_acceptance_residual_and_bonus_are_independent():
    """J5: P(accept | draft) = min(1, p/q) for each id, and what follows has its law given it."""
    draft, accepted, first, second = first_rounds()
    p, q = (np.asarray(x) for x in TWO_ATOMS)

    def follows(tokens, law):
        """Within five standard deviations at each id."""
        frequency = np.bincount(tokens, minlength=3) / len(tokens)
        return np.abs(frequency - law).max() < 5 * 0.5 / np.sqrt(len(tokens))

    assert follows(draft, q)
    for x in range(3):
        taken, refused = (draft == x) & (accepted == 1), (draft == x) & (accepted == 0)
        rate, n = taken.sum() / (draft == x).sum(), (draft == x).sum()
        assert abs(rate - min(1, p[x] / q[x])) < 5 * 0.5 / np.sqrt(n)
        assert (first[taken] == x).all() and follows(second[taken], p)
        assert refused.sum() == 0 or follows(first[refused], (0.6, 0.4, 0))
    assert (accepted == 0).sum() > 0.4 * DRAWS
