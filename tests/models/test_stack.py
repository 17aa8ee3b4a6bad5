"""Scanned layers beside unrolled ones: same logits, same text; what the backward pass keeps."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Prompt
from specjax.checkpoints import huggingface, structure, t5x
from specjax.drafters.small_model import SmallModel
from specjax.models import layers, stack
from specjax.models.t5 import T5
from tests import toys

SIZES = dict(num_encoder_layers=3, num_decoder_layers=3)


def scanned(model: T5) -> T5:
    return T5(dataclasses.replace(model.config, scan_layers=True))


@pytest.mark.parametrize("shared", [True, False], ids=["shared bias", "a bias per layer"])
def test_scanned_layers_give_the_unrolled_logits(shared):
    model = toys.tiny_t5(**SIZES, shared_relative_bias=shared)
    params = model.init(jax.random.key(0))
    ids = jnp.asarray([[5, 6, 7, 1], [9, 1, 0, 0]], jnp.int32)
    one = model.forward(params, ids, ids > 0, ids)
    piled = stack.pile(params)
    assert structure.shapes(piled) == structure.shapes(scanned(model).abstract())
    np.testing.assert_allclose(scanned(model).forward(piled, ids, ids > 0, ids), one, atol=1e-5)
    back = stack.unpile(piled)
    assert structure.shapes(back) == structure.shapes(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_a_scanned_target_and_draft_decode_the_same_text():
    """Caches, open slots and commit of layers that lie in one array."""
    model, key = toys.tiny_t5(**SIZES), jax.random.key(3)
    params = model.init(jax.random.key(0))
    noisy = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(key, x.shape), params)
    ids = jnp.asarray([[5, 6, 7, 1], [9, 8, 1, 0]], jnp.int32)
    prompt = Prompt(ids, jnp.asarray([4, 3], jnp.int32))

    def text(model, target, draft):
        options = dict(drafter=SmallModel(model, 3), draft_params=draft, max_decode_len=12, key=key)
        out = specjax.generate(model, target, prompt, **options)
        return out.tokens, out.lengths, out.stats.accepted

    plain = text(model, params, noisy)
    deep = text(scanned(model), stack.pile(params), stack.pile(noisy))
    jax.tree.map(np.testing.assert_array_equal, plain, deep)
    assert plain[2].sum() > 0


def test_a_scanned_model_starts_as_the_unrolled_one_does():
    """Same scales per layer, and no two layers alike."""
    model = scanned(toys.tiny_t5(**SIZES))
    params = model.init(jax.random.key(0))["decoder"][stack.SCANNED]
    weight = np.asarray(params["mlp"]["wo"]["weight"])
    one = toys.tiny_t5(**SIZES).init(jax.random.key(0))["decoder"]["layers_0"]["mlp"]["wo"][
        "weight"
    ]
    assert weight.shape == (3, *one.shape)
    np.testing.assert_allclose(weight.std((1, 2)), np.std(one), rtol=0.1)
    assert not np.allclose(weight[0], weight[1])


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("policy", ["minimal", "full"])
def test_rematerialisation_changes_memory_and_not_the_gradient(policy, scan):
    model = toys.tiny_t5(**SIZES, num_heads=4, emb_dim=32)
    model = scanned(model) if scan else model
    params = model.init(jax.random.key(0))
    ids = jnp.ones((4, 64), jnp.int32)
    drop = lambda: layers.Dropout(jax.random.key(5), 0.1)  # noqa: E731

    def loss(params, policy):
        logits = model.forward(params, ids, ids > 0, ids, drop=drop(), remat_policy=policy)
        return jnp.square(logits).sum()

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    one, other = grad(params, "none"), grad(params, policy)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), one, other)
    size = lambda policy: grad.lower(params, policy).compile().memory_analysis().temp_size_in_bytes  # noqa: E731
    if policy == "full" and scan:  # the CPU compiler undoes it where layers are unrolled
        assert size("full") < 0.8 * size("none")


def test_an_unknown_policy_names_the_known_ones():
    model = toys.tiny_t5()
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(
        ValueError, match="unknown remat_policy 'most', known are none, minimal, full"
    ):
        model.forward(model.init(jax.random.key(0)), ids, ids > 0, ids, remat_policy="most")


def test_scanned_layers_do_not_all_drop_the_same():
    kept = [layers.Dropout(jax.random.key(0), 0.5).of(i)(jnp.ones((1, 2, 64))) for i in range(2)]
    assert (kept[0] != kept[1]).any()


def test_checkpoints_of_others_load_into_scanned_layers(tmp_path):
    """From a T5X file and from safetensors, leaf by leaf; and written again unrolled."""
    file = pathlib.Path(__file__).parents[1] / "fixtures" / "t5x" / "t5x_scanned"
    config = t5x.infer_config(file)
    flat = t5x.load(file, T5(config))
    deep = scanned(T5(config))
    piled = t5x.load(file, deep)
    jax.tree.map(np.testing.assert_array_equal, piled, stack.pile(flat))
    huggingface.save(piled, deep, tmp_path / "hf")
    again = huggingface.load(tmp_path / "hf", deep)
    jax.tree.map(np.testing.assert_array_equal, again, piled)
