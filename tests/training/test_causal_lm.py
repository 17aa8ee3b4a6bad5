"""Plain text: the recipe's sums, windows by position, and a draft that begins with its target's pieces."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.checkpoints import native
from specjax.models.llama import Llama, LlamaConfig
from specjax.training import causal_lm, loop

MODEL = Llama(
    LlamaConfig(
        vocab_size=32, emb_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32,
        tie_embeddings=True,
    )
)  # fmt: skip


@pytest.fixture
def files(tmp_path):
    for name, tokens in {"a": np.arange(100) % 32, "b": np.full(50, 7)}.items():
        np.savez(tmp_path / f"{name}.npz", tokens=tokens.astype(np.uint16))
    return tuple(str(tmp_path / f"{name}.npz") for name in "ab")


def test_the_loss_is_the_next_tokens_surprise():
    params = MODEL.init(jax.random.key(0))
    tokens = jnp.asarray([[3, 5, 7, 9], [4, 6, 8, 2]], jnp.int32)
    weights = jnp.asarray([[1, 1, 1], [1, 0, 0]], jnp.float32)
    sums = causal_lm.CausalLm(MODEL).evaluate(params, {"tokens": tokens, "weights": weights})
    log_p = jax.nn.log_softmax(MODEL.forward(params, tokens))
    rows = [(0, 0, 5), (0, 1, 7), (0, 2, 9), (1, 0, 6)]
    expected = -sum(float(log_p[row, at, token]) for row, at, token in rows)
    assert float(sums["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(sums["tokens"]) == 4


def test_training_windows_follow_from_their_position_alone(files):
    windows = causal_lm.Windows(files, length=9, batch_size=4, seed=1)
    again = dataclasses.replace(windows)
    for position in (0, 5):
        jax.tree.map(np.testing.assert_array_equal, windows[position], again[position])
    assert (windows[0]["tokens"] != windows[1]["tokens"]).any()
    batch = windows[3]
    assert batch["tokens"].shape == (4, 10) and batch["tokens"].dtype == np.int32
    steps = np.diff(batch["tokens"], axis=1) % 32
    assert ((steps == 1) | (steps == 0)).all()  # every row is a window of one of the files
    only = causal_lm.Windows(files, weights=(0, 1), length=9, batch_size=8)
    assert (only[0]["tokens"] == 7).all()


def test_validation_windows_cover_the_files_in_order_and_end(files):
    windows = causal_lm.Windows(files[:1], length=9, batch_size=3, batches=3)
    assert len(windows) == 3
    first = np.concatenate([windows[i]["tokens"][:, 0] for i in range(3)])
    assert (np.diff(first.astype(int) % 100)[:2] > 0).all()
    with pytest.raises(IndexError):
        windows[3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": ("no.npz",)}, "no token file no.npz"),
        ({"length": 200}, "201 in a row are needed"),
    ],
)
def test_files_that_will_not_do_are_one_line(files, change, said):
    windows = causal_lm.Windows(**({"files": files, "length": 9} | change))
    with pytest.raises(ValueError, match=said):
        windows[0]


def test_numbers_out_of_range_are_one_line(files):
    with pytest.raises(ValueError, match="1 weights for 2 files"):
        causal_lm.Windows(files, weights=(1,))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        causal_lm.Windows(files, batch_size=0)


def test_a_draft_begins_with_its_targets_pieces(tmp_path):
    """Inner products of pieces are the target's, as far as so few dimensions hold them."""
    target = Llama(dataclasses.replace(MODEL.config, emb_dim=24, num_layers=1))
    params = target.init(jax.random.key(1))
    low = np.random.default_rng(0).normal(size=(32, 16)) @ np.random.default_rng(1).normal(
        size=(16, 24)
    )
    params["embed_tokens"]["weight"] = jnp.asarray(low, jnp.float32)
    native.save(tmp_path / "target", target, params)
    start = causal_lm.from_target(MODEL, str(tmp_path / "target"))
    table = np.asarray(start["embed_tokens"]["weight"], np.float64)
    wanted, got = low @ low.T, table @ table.T
    np.testing.assert_allclose(got / got[0, 0], wanted / wanted[0, 0], atol=1e-3)
    with pytest.raises(ValueError, match="not be wider"):
        wide = Llama(dataclasses.replace(MODEL.config, emb_dim=32))
        causal_lm.from_target(wide, str(tmp_path / "target"))


def test_a_text_is_learnt_by_heart(files):
    """Training loss and decoding agree: what was learnt is what comes out."""
    recipe, batches = (
        causal_lm.CausalLm(MODEL),
        causal_lm.Windows(files[:1], length=16, batch_size=4),
    )
    update = optax.adam(1e-2)
    params = recipe.init(jax.random.key(0))
    state = loop.TrainState(
        params,
        update.init(params),
        jnp.zeros((), jnp.int32),
        jax.random.key_data(jax.random.key(1)),
    )
    step = loop.make_step(recipe, update)
    for position in range(150):
        state, sums = step(state, batches[position])
    assert float(sums["accuracy"] / sums["tokens"]) > 0.9
    said = MODEL.forward(state.params, jnp.asarray([[4, 5, 6, 7]], jnp.int32))[0, -1].argmax()
    assert int(said) == 8
