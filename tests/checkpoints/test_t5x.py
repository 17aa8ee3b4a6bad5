"""Our forward pass and our loop against T5X's own results, on checkpoints it wrote."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import specjax
from specjax.checkpoints import structure, t5x
from specjax.drafters.small_model import SmallModel
from tests.checkpoints.conftest import MODELS, T5X, read_golden

STEPS = 16


@functools.cache
def params_of(name):
    return t5x.load(T5X / name, MODELS[name])


def greedy(name, **drafting):
    golden = read_golden(name)
    out = specjax.generate(
        MODELS[name], params_of(name), golden.prompt, max_decode_len=STEPS, **drafting
    )
    return np.asarray(out.tokens), golden.greedy, out


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_t5x_own(name):
    golden = read_golden(name)
    tokens = golden.prompt.tokens
    logits = jax.jit(MODELS[name].forward)(
        params_of(name), tokens, tokens > 0, jnp.asarray(golden.decoder_inputs)
    )
    # T5X also masks padding in the decoder's targets, after which nothing is ever decoded.
    real = golden.weights > 0
    np.testing.assert_allclose(logits[real], golden.logits[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_are_t5x_own(name):
    tokens, expected, _ = greedy(name)
    np.testing.assert_array_equal(tokens, expected)


def test_greedy_ids_with_a_draft_are_t5x_own():
    drafter = SmallModel(MODELS["t5x_tiny_draft"], gamma=3)
    tokens, expected, _ = greedy(
        "t5x_tiny", drafter=drafter, draft_params=params_of("t5x_tiny_draft")
    )
    np.testing.assert_array_equal(tokens, expected)


def test_greedy_ids_with_itself_as_draft_are_t5x_own():
    drafter = SmallModel(MODELS["t5x_scanned"], gamma=3)
    tokens, expected, out = greedy(
        "t5x_scanned", drafter=drafter, draft_params=params_of("t5x_scanned")
    )
    np.testing.assert_array_equal(tokens, expected)
    assert out.stats.rounds.tolist() == [STEPS / 4] * len(expected)


@pytest.mark.parametrize("name", MODELS)
def test_configuration_is_told_by_the_shapes(name):
    assert t5x.infer_config(T5X / name) == MODELS[name].config


@pytest.mark.parametrize("name", MODELS)
def test_tree_is_the_model_s(name):
    abstract = MODELS[name].abstract(jnp.bfloat16)
    loaded = t5x.load(T5X / name, MODELS[name], jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )


def test_read_gives_the_file_s_own_names_and_shapes():
    scanned = t5x.read(T5X / "t5x_scanned")
    shapes = {name: x.shape for name, x in scanned.items()}
    assert shapes["encoder.encoder.attention.query.kernel"] == (24, 3, 3, 8)
    assert shapes["decoder.decoder.self_attention.out.kernel"] == (3, 3, 8, 24)
    assert shapes["decoder.decoder.relpos_bias.rel_embedding"] == (3, 3, 32)
    assert not any("param_states" in name for name in shapes)


def test_unrolling_keeps_layers_and_heads_apart():
    """Layer, head and head position land where the two-dimensional kernels have them."""
    query = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)  # embed, layers, heads, head_dim
    out = np.arange(4 * 3 * 5 * 2).reshape(4, 3, 5, 2)  # heads, layers, head_dim, embed
    flat = t5x.unroll(
        {
            "encoder.encoder.attention.query.kernel": query,
            "encoder.encoder.attention.out.kernel": out,
            "encoder.encoder_norm.scale": np.zeros(2),
        }
    )
    assert len(flat) == 7 and "encoder.encoder_norm.scale" in flat
    ours = flat["encoder.layers_1.attention.query.kernel"]
    assert ours.shape == (2, 20) and ours[1, 3 * 5 + 2] == query[1, 1, 3, 2]
    ours = flat["encoder.layers_2.attention.out.kernel"]
    assert ours.shape == (20, 2) and ours[3 * 5 + 2, 1] == out[3, 2, 2, 1]


def test_weights_are_transposed_kernels():
    raw = t5x.read(T5X / "t5x_tiny")
    flat = structure.flatten(params_of("t5x_tiny"))
    for name, x in raw.items():
        ours = flat[name.replace(".kernel", ".weight")]
        np.testing.assert_array_equal(ours, x.T if name.endswith(".kernel") else x)
    assert len(raw) == len(flat)


@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_lands_on_its_shards(name):
    """Of the scanned model a shard's part of the joined heads begins inside a head."""
    params = t5x.load(T5X / name, MODELS[name], jnp.bfloat16, shardings(MODELS[name]))
    jax.tree.map(lambda x, s: pytest.fail() if x.sharding != s else None, params,
                 shardings(MODELS[name]))  # fmt: skip
    whole = t5x.load(T5X / name, MODELS[name], jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, params, whole)


def test_a_shard_is_read_without_the_rest(monkeypatch):
    read, values = [], t5x._values
    monkeypatch.setattr(t5x, "_values", lambda x: read.append(x.shape) or values(x))
    t5x.load(T5X / "t5x_tiny", MODELS["t5x_tiny"], shardings=shardings(MODELS["t5x_tiny"]))
    assert (16, 16) in read and (64, 32) not in read
    assert max(map(np.prod, read)) <= 64 * 32 // 8
    read.clear()
    t5x.load(T5X / "t5x_scanned", MODELS["t5x_scanned"], shardings=shardings(MODELS["t5x_scanned"]))
    assert (12, 1, 8) in read and (12, 3, 8) not in read  # one head, or none but the two it touches


def shardings(model):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    axes = {"vocab": "model", "mlp": "model", "joined_kv": "model", "embed": "data"}
    return jax.tree.map(
        lambda names: NamedSharding(mesh, P(*map(axes.get, names))),
        model.logical_axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
