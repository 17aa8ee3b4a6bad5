"""Divergences: their definitions in NumPy, their limits, and gradients at pieces of probability 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import divergences
from specjax.training.divergences import ForwardKL, JensenShannon, ReverseKL, TotalVariation

ALL = [ForwardKL(), ReverseKL(), JensenShannon(), JensenShannon(0.1), TotalVariation()]
pytestmark = pytest.mark.usefixtures("x64")


def laws(seed: int, pieces: int = 5, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(pieces), rows)


def plain(divergence, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The definitions, where no probability is 0."""
    kl = lambda a, b: (a * np.log(a / b)).sum(-1)  # noqa: E731
    match divergence:
        case ForwardKL():
            return kl(p, q)
        case ReverseKL():
            return kl(q, p)
        case JensenShannon(beta):
            m = beta * p + (1 - beta) * q
            return beta * kl(p, m) + (1 - beta) * kl(q, m)
        case TotalVariation():
            return 1 - np.minimum(p, q).sum(-1)


@pytest.mark.parametrize("divergence", ALL, ids=str)
def test_each_is_its_definition(divergence):
    p, q = laws(0), laws(1)
    got = divergence(jnp.log(p), jnp.log(q))
    np.testing.assert_allclose(got, plain(divergence, p, q), rtol=1e-12)
    assert (got > 0).all()
    np.testing.assert_allclose(divergence(jnp.log(p), jnp.log(p)), 0, atol=1e-15)


def test_the_mixture_s_limits_are_both_directions():
    p, q = jnp.log(laws(2)), jnp.log(laws(3))
    small = 1e-7
    np.testing.assert_allclose(JensenShannon(small)(p, q) / small, ForwardKL()(p, q), rtol=1e-5)
    np.testing.assert_allclose(JensenShannon(1 - small)(p, q) / small, ReverseKL()(p, q), rtol=1e-5)
    np.testing.assert_allclose(JensenShannon()(p, q), JensenShannon()(q, p), rtol=1e-12)


def test_apart_laws():
    """Nothing in common: both KL are infinite, the others at their largest values."""
    p, q = jnp.log(jnp.asarray([[1.0, 0.0]])), jnp.log(jnp.asarray([[0.0, 1.0]]))
    assert jnp.isposinf(ForwardKL()(p, q)).all() and jnp.isposinf(ReverseKL()(p, q)).all()
    np.testing.assert_allclose(JensenShannon()(p, q), np.log(2), rtol=1e-12)
    np.testing.assert_allclose(TotalVariation()(p, q), 1)


@pytest.mark.parametrize("divergence", ALL, ids=str)
def test_gradients_are_numbers_where_pieces_are_impossible(divergence):
    """A target with a top-k law, and a draft that knows all pieces; and a piece that neither says."""
    p = jnp.asarray([[0.5, 0.5, 0.0, 0.0]])
    logits = jnp.asarray([[1.0, -1.0, 0.5, -jnp.inf]])
    if isinstance(
        divergence, ReverseKL
    ):  # infinite there: the draft says what the target never does
        logits = logits.at[0, 2].set(-jnp.inf)

    def loss(x):
        return divergence(jnp.log(p), jax.nn.log_softmax(x)).sum()

    value, slope = jax.value_and_grad(loss)(logits)
    assert jnp.isfinite(value) and jnp.isfinite(slope).all()
    step = 1e-6
    for i in (0, 1):
        nudge = jnp.zeros_like(logits).at[0, i].set(step)
        measured = (loss(logits + nudge) - loss(logits - nudge)) / (2 * step)
        np.testing.assert_allclose(slope[0, i], measured, atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 1.0, -1.0])
def test_a_mixture_has_two_parts(beta):
    with pytest.raises(ValueError, match="beta"):
        JensenShannon(beta)


def test_types_are_kept():
    p = jnp.log(jnp.asarray(laws(4), jnp.float32))
    assert all(d(p, p).dtype == jnp.float32 for d in ALL)
    assert divergences.kl(p, p).shape == (4,)
