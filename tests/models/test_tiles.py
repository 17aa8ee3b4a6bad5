"""Weights in tiles or in halves: the same numbers from another layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, generate
from specjax.models import layers
from specjax.models.t5 import T5, T5Config

pytestmark = pytest.mark.usefixtures("long_vectors")


def test_short_vectors_leave_weights_as_they_are(monkeypatch):
    """Without AVX-512 the forms for plain weights are faster."""
    monkeypatch.setattr(layers, "long_vectors", lambda: False)
    weight = jnp.zeros((64, 8))
    assert layers.tile(weight) is weight


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 100, 1025])
@pytest.mark.parametrize("outputs", [64, 96, 16])
def test_linear_takes_either_layout(rows, outputs, getkey):
    """Few rows (fused), over a thousand (a dot per tile), and all tile widths equal the plain product."""
    weight = jax.random.normal(getkey(), (outputs, 24))
    x = jax.random.normal(getkey(), (rows, 24))
    tiled = layers.tile(weight)
    assert tiled.ndim == 3 and tiled.size == weight.size
    got = jax.jit(layers.linear)(x, tiled)
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(weight).T, atol=2e-5)


@pytest.mark.parametrize("rows, parts", [(3, 1), (4, 16), (8, 8), (31, 4), (256, 2), (257, 1)])
def test_few_rows_are_multiplied_in_parts(rows, parts, getkey):
    """XLA gives a product of enough results to all cores; the parts' sum is the product."""
    weight = jax.random.normal(getkey(), (1024, 32))
    x = jax.random.normal(getkey(), (rows, 32))
    tiled = layers.tile(weight)
    assert layers._parts(rows, tiled.shape) == parts
    lowered = jax.jit(layers.linear).lower(x, tiled).as_text()
    assert (f"tensor<16x{parts}x{rows}x64xf32>" in lowered) == (parts > 1)
    got = jax.jit(layers.linear)(x, tiled)
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(weight).T, atol=2e-5)


def test_small_or_odd_products_are_not_split():
    assert layers._parts(8, (1, 512, 64)) == 1  # 16 parts would have too few results too
    assert layers._parts(8, (16, 20, 64)) == 1  # 8 does not divide 20
    assert layers._parts(8, (16, 24, 64)) == 8


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 17, 64, 65])
@pytest.mark.parametrize("outputs", [48, 33])
def test_few_rows_are_multiplied_by_halves_of_a_plain_weight(rows, outputs, getkey):
    """Up to 64 rows, where the outputs can be halved; what fills the rows up is not seen."""
    weight = jax.random.normal(getkey(), (outputs, 24))
    x = jax.random.normal(getkey(), (rows, 24))
    lowered = jax.jit(layers.linear).lower(x, weight).as_text()
    assert ("tensor<2x24x24xf32>" in lowered) == (rows <= 64 and outputs == 48)
    got = jax.jit(layers.linear)(x[None], weight)
    np.testing.assert_allclose(got[0], np.asarray(x) @ np.asarray(weight).T, atol=2e-5)


def test_leading_axes_are_kept(getkey):
    weight = layers.tile(jax.random.normal(getkey(), (32, 8)))
    assert layers.linear(jax.random.normal(getkey(), (2, 3, 8)), weight).shape == (2, 3, 32)


def test_what_no_tile_divides_stays_as_it_is(getkey):
    weight = jax.random.normal(getkey(), (20, 8))
    assert layers.tile(weight) is weight


def test_tiles_hold_the_outputs_side_by_side():
    weight = jnp.arange(64 * 2, dtype=jnp.float32).reshape(64, 2)
    np.testing.assert_array_equal(layers.tile(weight)[0, 1], weight[:, 1])


def test_a_tiled_model_decodes_the_same_tokens():
    config = T5Config(
        vocab_size=64, emb_dim=32, num_heads=2, head_dim=16, mlp_dim=48,
        num_encoder_layers=1, num_decoder_layers=2,
    )  # fmt: skip
    model = T5(config)
    params = model.init(jax.random.key(0))
    prompt = Prompt(jnp.asarray([[5, 9, 33, 1], [7, 1, 0, 0]]), jnp.asarray([4, 2]))
    plain = generate(model, params, prompt, max_decode_len=12)
    tiled = generate(model, model.tile(params), prompt, max_decode_len=12)
    np.testing.assert_array_equal(plain.tokens, tiled.tokens)
    np.testing.assert_allclose(plain.log_probs, tiled.log_probs, atol=1e-5)


def test_what_reads_whole_prompts_is_not_tiled():
    """The encoder and the keys and values of cross-attention see many rows at once, never few."""
    model = T5(T5Config(64, 32, 2, 16, 64, 1, 1))
    tiled = model.tile(model.init(jax.random.key(0)))
    decoder = tiled["decoder"]["layers_0"]
    assert tiled["encoder"]["layers_0"]["attention"]["query"]["weight"].ndim == 2
    cross = {n: w["weight"].ndim for n, w in decoder["encoder_decoder_attention"].items()}
    assert cross == {"query": 3, "key": 2, "value": 2, "out": 3}
    assert decoder["self_attention"]["key"]["weight"].ndim == 3
