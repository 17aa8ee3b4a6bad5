"""Our own checkpoints: round trips, shards, and what is said when something is wrong."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.checkpoints import native, structure
from specjax.models.t5 import T5, T5Config
from tests.checkpoints.conftest import error_of

SIZES = dict(vocab_size=40, emb_dim=16, num_heads=2, head_dim=4, mlp_dim=24, num_encoder_layers=1)
MODEL = T5(T5Config(**SIZES, num_decoder_layers=2, max_distance=40, dtype="bfloat16"))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), MODEL.abstract())


@pytest.fixture(scope="module")
def saved(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("native") / "saved"
    native.save(folder, MODEL, params)
    return folder


def test_round_trip_is_bit_identical(saved, params):
    assert native.read_config(saved) == MODEL.config
    loaded = native.load(saved, MODEL)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_leaves_are_cast_and_land_on_their_shards(saved, params, tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    axes = {"vocab": "model", "mlp": "model", "joined_kv": "model", "embed": "data"}
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, P(*map(axes.get, names))),
        MODEL.logical_axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    loaded = native.load(saved, MODEL, jnp.bfloat16, shardings)
    jax.tree.map(lambda x, s: pytest.fail() if x.sharding != s else None, loaded, shardings)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    # What was saved from eight devices is read on one.
    native.save(tmp_path / "sharded", MODEL, loaded)
    again = native.load(tmp_path / "sharded", MODEL, jnp.bfloat16)
    assert len(again["token_embedder"]["embedding"].devices()) == 1
    jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_everything_wrong_is_named_at_once(saved):
    other = T5(dataclasses.replace(MODEL.config, num_encoder_layers=2, vocab_size=41,
                                   num_decoder_layers=1))  # fmt: skip
    said = error_of(native.load, saved, other)
    names = structure.shapes(MODEL.abstract())
    assert "missing: encoder.layers_1.attention.key.weight" in said
    assert all(name in said for name in names if name.startswith("decoder.layers_1."))
    assert "token_embedder.embedding is (40, 16), not (41, 16)" in said
    assert "decoder.logits_dense.weight is (40, 16), not (41, 16)" in said


def test_only_whole_models_are_saved_and_none_is_overwritten(saved, params, tmp_path):
    rest = structure.flatten(params)
    del rest["encoder.encoder_norm.scale"], rest["decoder.decoder_norm.scale"]
    said = error_of(native.save, tmp_path, MODEL, structure.unflatten(rest))
    assert "missing: decoder.decoder_norm.scale, encoder.encoder_norm.scale" in said
    assert not list(tmp_path.iterdir())
    assert "holds a checkpoint already" in error_of(native.save, saved, MODEL, params)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"format": "other"}, "it is ('other', 1)"),
        ({"version": 2}, "it is ('specjax.params', 2)"),
        ({"config": {"colour": 3}}, "colour"),
    ],
)
def test_other_descriptions_are_refused(saved, tmp_path, entry, said):
    content = json.loads((saved / "specjax.json").read_text()) | entry
    (tmp_path / "specjax.json").write_text(json.dumps(content))
    assert said in error_of(native.read_config, tmp_path)
    assert said in error_of(native.load, tmp_path, MODEL)


def test_files_that_are_not_there(saved, tmp_path):
    assert error_of(native.load, tmp_path, MODEL) == f"no such file: {tmp_path / 'specjax.json'}"
    shutil.copy(saved / "specjax.json", tmp_path)
    assert "params is no Orbax checkpoint" in error_of(native.load, tmp_path, MODEL)
    copy = shutil.copytree(saved, tmp_path / "copy")
    data = max(copy.glob("params/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    assert "params cannot be read" in error_of(native.load, copy, MODEL)
    (copy / "params" / "_METADATA").unlink()
    assert "params is no Orbax checkpoint" in error_of(native.load, copy, MODEL)
