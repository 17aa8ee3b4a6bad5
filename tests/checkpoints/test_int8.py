"""int8 files: rounding, round trips, bytes, and what is said when something is wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import int8, structure
from specjax.models.t5 import T5, T5Config
from tests.checkpoints.conftest import error_of

SIZES = dict(vocab_size=40, emb_dim=16, num_heads=2, head_dim=4, mlp_dim=24, num_encoder_layers=1)
MODELS = {
    "v1_1": T5(T5Config(**SIZES, num_decoder_layers=2)),
    "v1_0": T5(
        T5Config(
            **SIZES,
            num_decoder_layers=1,
            mlp_activations=("relu",),
            logits_via_embedding=True,
            shared_relative_bias=False,
        )
    ),
}
MODEL = MODELS["v1_1"]


def random(model, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, model.abstract())


@pytest.fixture
def saved(tmp_path):
    params = random(MODEL)
    int8.save(tmp_path / "a.safetensors", MODEL, params)
    return tmp_path / "a.safetensors", params


def rewrite(path, change) -> None:
    """Changes tensors and metadata of a file."""
    with safetensors.safe_open(path, framework="np") as file:
        tensors, metadata = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()
    change(tensors, metadata)
    safetensors.numpy.save_file(tensors, path, metadata)


def rows(seed: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(500, 40)).astype(np.float32) * np.float32(scale)


def test_halves_go_to_even():
    weight = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    steps, scale = int8.quantise(weight)
    assert steps.dtype == np.int8 and scale.dtype == np.float32 and scale.tolist() == [1.0]
    assert steps.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_scales_are_per_row_and_symmetric():
    weight = rows(0)
    steps, scale = int8.quantise(weight)
    np.testing.assert_array_equal(scale, np.abs(weight).max(1) / np.float32(127))
    assert (np.abs(steps).max(1) == 127).all() and steps.min() >= -127
    np.testing.assert_array_equal(int8.quantise(-weight)[0], -steps)
    error = np.abs(int8.dequantise(steps, scale) - weight)
    assert (error <= scale[:, None] * np.float32(0.5001)).all()


def test_rows_of_zeros_stay_zeros():
    weight = rows(1)[:3]
    weight[1] = 0
    steps, scale = int8.quantise(weight)
    assert scale[1] == 0 and not steps[1].any() and scale[0] > 0
    assert not int8.dequantise(steps, scale)[1].any()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-38, 1e-43, 1e36])
def test_quantising_twice_changes_nothing(scale):
    first = int8.quantise(rows(2, scale))
    again = int8.quantise(int8.dequantise(*first))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])


def test_quantising_twice_keeps_every_scale():
    """All float32 maxima of one binade, of which every other is a multiple by a power of two."""
    for start in range(0, 2**23, 2**21):
        bits = np.arange(start, start + 2**21, dtype=np.uint32) + np.uint32(0x3F800000)
        steps, scale = int8.quantise(bits.view(np.float32)[:, None])
        assert (steps == 127).all()
        np.testing.assert_array_equal(int8.quantise(int8.dequantise(steps, scale))[1], scale)


@pytest.mark.parametrize("name", MODELS)
def test_file_round_trip(tmp_path, name):
    model, file, copy = MODELS[name], tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    params = random(model)
    int8.save(file, model, params, {"step": "7"})
    found, loaded = int8.load_model(file)
    assert found == model and int8.read_metadata(file)["step"] == "7"
    assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model.abstract()
    )
    flat, before = structure.flatten(loaded), structure.flatten(params)
    for name, x in flat.items():
        if name.endswith((".scale", ".rel_embedding")):
            np.testing.assert_array_equal(x, before[name])
        else:
            np.testing.assert_array_equal(x, int8.dequantise(*int8.quantise(before[name])))
    int8.save(copy, model, loaded, {"step": "7"})
    assert file.read_bytes() == copy.read_bytes()
    jax.tree.map(np.testing.assert_array_equal, int8.load(copy, model), loaded)


def test_names_in_the_file(saved):
    with safetensors.safe_open(saved[0], framework="np") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert {"token_embedder.embedding.int8", "token_embedder.embedding.scale"} <= names
    assert {"encoder.encoder_norm.scale", "decoder.relpos_bias.rel_embedding"} <= names
    assert metadata["format"] == "specjax.int8" and metadata["format_version"] == "1"
    assert json.loads(metadata["config"])["vocab_size"] == 40


def test_bytes_depend_on_content_alone(saved, tmp_path):
    path, params = saved
    entries = {"b": "2", "a": "1", "c": "ü"}
    int8.save(tmp_path / "x", MODEL, params, entries)
    int8.save(tmp_path / "y", MODEL, params, dict(reversed(entries.items())))
    content = (tmp_path / "x").read_bytes()
    assert content == (tmp_path / "y").read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    # safetensors itself would write these in an order that changes from run to run.
    assert list(json.loads(header)["__metadata__"]) == sorted([*entries, *int8.read_metadata(path)])
    assert len(header) % 8 == 0
    assert int8.read_metadata(tmp_path / "x")["c"] == "ü"


def test_everything_wrong_is_named_at_once(saved):
    path, _ = saved

    def change(tensors, metadata):
        del tensors["decoder.decoder_norm.scale"], tensors["token_embedder.embedding.scale"]
        tensors["extra"] = np.zeros(3, np.float32)
        tensors["encoder.encoder_norm.scale"] = np.zeros(8, np.float32)
        tensors["decoder.logits_dense.weight.int8"] = np.zeros((40, 16), np.float32)

    rewrite(path, change)
    said = error_of(int8.load_model, path)
    for part in (
        "missing: decoder.decoder_norm.scale, token_embedder.embedding.scale;",
        "unexpected: extra;",
        "decoder.logits_dense.weight.int8 is F32[40, 16], not I8[40, 16]",
        "encoder.encoder_norm.scale is F32[8], not F32[16]",
    ):
        assert part in said


def test_another_model_does_not_fit(saved):
    other = T5(dataclasses.replace(MODEL.config, num_decoder_layers=3, vocab_size=41))
    said = error_of(int8.load, saved[0], other)
    assert "missing: decoder.layers_2." in said and "I8[40, 16], not I8[41, 16]" in said


def test_other_files_are_refused(tmp_path):
    assert error_of(int8.load, tmp_path / "none", MODEL) == f"no such file: {tmp_path / 'none'}"
    (tmp_path / "text").write_text("hello")
    assert "no safetensors file" in error_of(int8.load_model, tmp_path / "text")
    safetensors.numpy.save_file({"x": np.zeros(2)}, tmp_path / "plain")
    assert "has format (None, None)" in error_of(int8.load_model, tmp_path / "plain")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"format_version": "2"}, "has format ('specjax.int8', '2')"),
        ({"model": "other"}, "no model family 'other'"),
        ({"config": '{"colour": 3}'}, "colour"),
        ({"config": "{"}, "describes no model"),
    ],
)
def test_unknown_descriptions_are_refused(saved, entry, said):
    rewrite(saved[0], lambda tensors, metadata: metadata.update(entry))
    assert said in error_of(int8.load_model, saved[0])


def test_only_whole_and_finite_models_are_saved(saved, tmp_path):
    flat = structure.flatten(saved[1])
    path = tmp_path / "b.safetensors"
    rest = {n: x for n, x in flat.items() if n != "encoder.encoder_norm.scale"}
    said = error_of(int8.save, path, MODEL, structure.unflatten(rest))
    assert "missing: encoder.encoder_norm.scale" in said
    name, other = "decoder.logits_dense.weight", "decoder.decoder_norm.scale"
    spoilt = flat | {n: flat[n].at[(0,) * flat[n].ndim].set(v) for n, v in
                     ((name, np.nan), (other, np.inf))}  # fmt: skip
    said = error_of(int8.save, path, MODEL, structure.unflatten(spoilt))
    assert said == f"not finite: {other}, {name}"
    assert "reserved" in error_of(int8.save, path, MODEL, saved[1], {"format": "x"})
    assert not path.exists() and len(list(tmp_path.iterdir())) == 1
