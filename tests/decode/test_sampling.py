"""From logits to the law, and draws from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import sampling
from specjax.decode.sampling import Sampling

LAST_U = 1 - 2**-24


def law(logits, **options):
    """The law of one row of logits under these options, as probabilities."""
    logits = jnp.asarray(logits)[None, None]
    return np.exp(np.asarray(sampling.log_law(logits, Sampling(**options).rows(1))[0, 0]))


def log(p, dtype=jnp.float32):
    return jnp.log(jnp.asarray(p, dtype))


# The order of the filters.


def test_top_p_follows_temperature():
    """Temperature comes first: at temperature 2 the filter reads the flattened law."""
    p = np.array([0.64, 0.32, 0.04])
    flat = np.sqrt(p) / np.sqrt(p).sum()  # [.511, .361, .128]
    assert flat[0] < 0.6 < p[0]
    np.testing.assert_allclose(law(log(p), temperature=1.0, top_p=0.6), [1, 0, 0], atol=1e-6)
    kept = [*(flat[:2] / flat[:2].sum()), 0]
    np.testing.assert_allclose(law(log(p), temperature=2.0, top_p=0.6), kept, atol=1e-6)


def test_top_p_follows_top_k():
    """top-k comes first: the mass that top-p counts is that of the k kept tokens."""
    p = [0.4, 0.3, 0.2, 0.1]
    # Of k = 2 the first holds 4/7 > .5; of all four it holds .4 < .5.
    np.testing.assert_allclose(law(log(p), temperature=1.0, top_k=2, top_p=0.5), [1, 0, 0, 0])
    kept = law(log(p), temperature=1.0, top_p=0.5)
    np.testing.assert_allclose(kept, [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_top_p_keeps_the_smallest_set_with_the_mass():
    """B8: top-p .7 of [.5, .3, .15, .05] is [.625, .375, 0, 0]."""
    kept = law(log([0.5, 0.3, 0.15, 0.05]), temperature=1.0, top_p=0.7)
    np.testing.assert_allclose(kept, [0.625, 0.375, 0, 0], atol=1e-6)


def test_top_p_always_keeps_the_likeliest_token():
    """B11: no filter leaves nothing."""
    kept = law(log([0.2, 0.5, 0.3]), temperature=1.0, top_p=1e-6)
    np.testing.assert_allclose(kept, [0, 1, 0], atol=1e-6)


def test_top_p_of_one_keeps_everything():
    """Rows with top_p 1 in a filtered batch have the law of unfiltered rows, bit for bit."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 1, 5000)) * 3, jnp.float32)
    plain = sampling.log_law(logits, Sampling(1.0).rows(4))
    filtered = sampling.log_law(logits, Sampling(1.0, top_p=1.0).rows(4))
    np.testing.assert_array_equal(filtered, plain)


def test_top_k_keeps_k_tokens_and_more_than_the_vocabulary_keeps_all():
    """top-k renormalises over the k likeliest."""
    p = [0.1, 0.4, 0.3, 0.2]
    kept = law(log(p), temperature=1.0, top_k=2)
    np.testing.assert_allclose(kept, [0, 4 / 7, 3 / 7, 0], atol=1e-6)
    np.testing.assert_allclose(law(log(p), temperature=1.0, top_k=9), p, atol=1e-6)


# Greedy.


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-4])
def test_greedy_is_one_hot_at_the_first_maximum(temperature):
    """D1, B9: logits [0, 1, 1] give id 1 with probability 1, whatever the filters."""
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}):
        got = law(jnp.asarray([0.0, 1.0, 1.0]), temperature=temperature, **options)
        np.testing.assert_array_equal(got, [0, 1, 0])


def test_low_temperatures_approach_the_greedy_law():
    """B9: the limit of small temperatures is the greedy law, without overflow."""
    got = law(jnp.asarray([-80.0, 90.0, 89.0]), temperature=2e-4)
    np.testing.assert_allclose(got, [0, 1, 0], atol=1e-6)


def test_rows_have_their_own_temperature_and_top_p():
    """Invariant 5: a row's law is its law alone."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 9)), jnp.float32)
    temperature, top_p = [0.0, 1.0, 0.7], [1.0, 0.6, 0.9]
    mixed = Sampling(jnp.asarray(temperature), 0, jnp.asarray(top_p))
    together = sampling.log_law(logits, mixed.rows(3))
    for row in range(3):
        options = Sampling(temperature[row], 0, top_p[row]).rows(1)
        alone = sampling.log_law(logits[row : row + 1], options)
        np.testing.assert_array_equal(together[row], alone[0])


# Precision and broken rows.


def test_half_precision_logits_give_a_float32_law():
    """B13, invariant 10: a probability of 1e-8, which float16 flushes to 0, survives."""
    logits = jnp.asarray([18.421875, 0.0, -jnp.inf], jnp.float16)
    got = sampling.log_law(logits[None, None], Sampling(1.0).rows(1))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[0, 0, 1], -18.421875, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_a_row_without_a_law_is_recognised(value, temperature, options):
    """B14: an all-NaN or all-masked row is broken, a masked token is not."""
    logits = jnp.asarray([[[value] * 4, [0.0, -np.inf, 1.0, 2.0]]], jnp.float32)
    log_p = sampling.log_law(logits, Sampling(temperature, **options).rows(1))
    np.testing.assert_array_equal(sampling.broken(log_p), [[True, False]])


def test_one_nan_among_finite_logits_is_recognised():
    """B14: greedy or not, a single NaN breaks the row."""
    logits = jnp.asarray([[[0.0, np.nan, 1.0]]] * 2, jnp.float32)
    log_p = sampling.log_law(logits, Sampling(jnp.asarray([0.0, 1.0])).rows(2))
    assert sampling.broken(log_p).all()


# Draws.


def test_draw_never_yields_a_token_of_probability_zero():
    """Zeros at both ends of the vocabulary, of blocks and between; u at both ends and between."""
    rng = np.random.default_rng(2)
    draw = jax.jit(sampling.draw)
    for size in (3, 8, 9, 64, 1000):
        p = rng.dirichlet(np.full(size, 0.3), size=500)
        p[rng.random(p.shape) < 0.6] = 0
        p[:, :2], p[:, 1 + size // 2 :] = 0, 0
        p[np.arange(500), rng.integers(2, 1 + max(2, size // 2), size=500) % size] += 1e-3
        log_p = log(p / p.sum(1, keepdims=True))
        for u in (0.0, 2**-24, LAST_U, rng.random(500)):
            token = draw(log_p, jnp.broadcast_to(jnp.asarray(u, jnp.float32), (500,)))
            assert (p[np.arange(500), token] > 0).all()


def test_draw_survives_a_cumulative_sum_that_rises_where_no_mass_is():
    """Sums made in parallel round differently at indices without mass; u near 1 meets them."""
    rng = np.random.default_rng(0)
    mass = rng.random((300, 1024)).astype(np.float32)
    mass[:, 512:] = 0
    index, _ = jax.jit(sampling._pick)(mass, jnp.full(300, LAST_U, jnp.float32))
    assert int(index.max()) < 512


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [3, 8, 13, 100])
def test_draw_is_the_inverse_of_the_cumulative_distribution(size):
    """The token at u is the first whose cumulative probability exceeds u; each token's measure."""
    rng = np.random.default_rng(size)
    p = rng.dirichlet(np.full(size, 0.4))
    p[size // 2] = 0
    p /= p.sum()
    steps = 20_000
    u = (np.arange(steps) + 0.5) / steps
    log_p = jnp.broadcast_to(log(p, jnp.float64), (steps, size))
    token = np.asarray(jax.jit(sampling.draw)(log_p, jnp.asarray(u)))
    upto = np.cumsum(p)
    away_from_edges = np.abs(upto[:, None] - u).min(0) > 1e-12
    expected = (upto[:, None] <= u).sum(0)
    np.testing.assert_array_equal(token[away_from_edges], expected[away_from_edges])
    assert np.abs(np.bincount(token, minlength=size) / steps - p).max() <= (1 + 1e-3) / steps


def test_draw_of_one_hot_laws_ignores_u():
    """Greedy rows need no special case."""
    log_p = sampling.log_law(jnp.asarray([[[1.0, 3.0, 3.0, 2.0]]] * 3), Sampling().rows(3))[:, 0]
    token = sampling.draw(log_p, jnp.asarray([0.0, 0.5, LAST_U], jnp.float32))
    np.testing.assert_array_equal(token, [1, 1, 1])


def test_uniforms_depend_on_the_row_key_alone_and_never_reach_one():
    """J1, J2, invariant 5: same key, same number; other rows' keys do not matter."""
    keys = jax.random.split(jax.random.key(0), 4)
    u = sampling.uniform(keys, 1000)
    assert 0 <= u.min() and u.max() < 1
    np.testing.assert_array_equal(sampling.uniform(keys[2:3], 1000)[0], u[2])
    assert len(np.unique(np.asarray(u)[:, 0])) == 4


def test_fold_by_number_and_by_row_differ_by_number():
    """Invariant 5: keys are folded per row by a number of its own."""
    keys = jnp.broadcast_to(jax.random.key(3), (3,))
    data = jax.random.key_data(sampling.fold(keys, jnp.asarray([5, 6, 5], jnp.int32)))
    np.testing.assert_array_equal(data[0], data[2])
    assert (data[0] != data[1]).any()
    same = jax.random.key_data(sampling.fold(keys, 5))
    np.testing.assert_array_equal(same[1], data[0])


# Values out of range.


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": jnp.asarray([1.0, -1.0])}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": jnp.asarray([0.5, -0.5])}, "top_p"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(options, name):
    """H5: negative temperatures and the like are refused on the host."""
    with pytest.raises(ValueError, match=name):
        Sampling(**options).check()


def test_values_in_range_pass():
    """H5: the ends of the ranges are allowed."""
    Sampling(0.0, 0, None).check()
    Sampling(jnp.asarray([0.0, 2.0]), 3, jnp.asarray([1e-3, 1.0])).check()
