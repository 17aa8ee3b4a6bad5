"""Our forward pass, loop and files against what transformers computes and writes."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import specjax
from specjax import Prompt
from specjax.checkpoints import folder as folder_of
from specjax.checkpoints import huggingface, structure, t5x
from specjax.drafters.small_model import SmallModel
from specjax.models.t5 import T5, T5Config
from tests.checkpoints.conftest import MODELS as T5X_MODELS
from tests.checkpoints.conftest import T5X, error_of

HF = pathlib.Path(__file__).parents[1] / "fixtures" / "hf"
SIZES = dict(vocab_size=64, num_heads=2, head_dim=8, num_encoder_layers=2, num_decoder_layers=2)
CONFIGS = {
    "t5_v1_0": T5Config(
        **SIZES, emb_dim=24, mlp_dim=40, mlp_activations=("relu",), logits_via_embedding=True
    ),
    "t5_v1_1": T5Config(**SIZES | {"num_decoder_layers": 3}, emb_dim=16, mlp_dim=40),
    "flan_t5": T5Config(**SIZES, emb_dim=24, mlp_dim=32, max_distance=20),
    "mt5": T5Config(**SIZES | {"vocab_size": 96}, emb_dim=16, mlp_dim=32),
    "umt5": T5Config(
        **SIZES | {"num_decoder_layers": 3}, emb_dim=16, mlp_dim=32, shared_relative_bias=False
    ),
}
NAMES = tuple(CONFIGS)
V1_0, V1_1 = (T5(CONFIGS[name]) for name in ("t5_v1_0", "t5_v1_1"))


@functools.cache
def params_of(name):
    return huggingface.load(HF / name, T5(CONFIGS[name]))


def golden(name) -> dict[str, np.ndarray]:
    with np.load(HF / name / "golden.npz") as arrays:
        return dict(arrays)


def prompt_of(tokens) -> Prompt:
    return Prompt(jnp.asarray(tokens), jnp.asarray((tokens > 0).sum(1, dtype=np.int32)))


def tensors_in(folder) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return functools.reduce(dict.__or__, map(safetensors.numpy.load_file, files))


def equal_bits(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def flat(params) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in structure.flatten(params).items()}


@pytest.fixture
def folder(tmp_path):
    """A writable copy of t5_v1_0, and a function that changes its tensors and configuration."""
    copy = pathlib.Path(shutil.copytree(HF / "t5_v1_0", tmp_path / "copy"))

    def edit(change=lambda tensors: None, **config) -> pathlib.Path:
        tensors = tensors_in(copy)
        change(tensors)
        safetensors.numpy.save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        raw = json.loads((copy / "config.json").read_text()) | config
        (copy / "config.json").write_text(json.dumps(raw))
        return copy

    return edit


@pytest.mark.parametrize("name", NAMES)
def test_configuration_is_read(name):
    assert huggingface.read_config(HF / name) == CONFIGS[name]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers_own(name):
    arrays = golden(name)
    tokens = jnp.asarray(arrays["encoder"])
    forward = jax.jit(T5(CONFIGS[name]).forward)
    logits = forward(params_of(name), tokens, tokens > 0, jnp.asarray(arrays["decoder"]))
    assert arrays["logits"].std() > 0.1
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_transformers_own(name):
    arrays = golden(name)
    prompt, steps = prompt_of(arrays["encoder"]), arrays["greedy"].shape[1]
    model = T5(CONFIGS[name])
    out = specjax.generate(model, params_of(name), prompt, max_decode_len=steps)
    np.testing.assert_array_equal(out.tokens, arrays["greedy"])


def test_greedy_ids_with_a_draft_are_transformers_own():
    arrays = golden("t5_v1_1")
    drafting = {
        "drafter": SmallModel(V1_0, gamma=3),
        "draft_params": params_of("t5_v1_0"),
    }
    prompt = prompt_of(arrays["encoder"])
    out = specjax.generate(V1_1, params_of("t5_v1_1"), prompt, max_decode_len=16, **drafting)
    np.testing.assert_array_equal(out.tokens, arrays["greedy"])


@pytest.mark.parametrize("limit", [10**9, 9000, 1])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_bit_identical(tmp_path, name, limit):
    model = T5(CONFIGS[name])
    huggingface.save(params_of(name), model, tmp_path, limit)
    equal_bits(tensors_in(tmp_path), tensors_in(HF / name))
    equal_bits(flat(huggingface.load(tmp_path, model)), flat(params_of(name)))
    assert huggingface.read_config(tmp_path) == model.config
    files = list(tmp_path.glob("*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (limit < 10**9)
    if limit == 1:
        assert len(files) == len(flat(params_of(name)))
    if limit == 9000:
        sizes = [sum(x.nbytes for x in safetensors.numpy.load_file(f).values()) for f in files]
        assert max(sizes) <= limit and json.loads(index.read_text())["metadata"] == {
            "total_size": sum(sizes)
        }


@pytest.mark.parametrize("name", T5X_MODELS)
def test_from_t5x_and_back(tmp_path, name):
    model = T5X_MODELS[name]
    params = t5x.load(T5X / name, model)
    huggingface.save(params, model, tmp_path, 20_000)
    assert huggingface.read_config(tmp_path) == model.config
    equal_bits(flat(huggingface.load(tmp_path, model)), flat(params))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files(folder, tmp_path, dtype):
    def change(tensors):
        tensors |= {name: x.astype(dtype) for name, x in tensors.items()}

    path = folder(change)
    for wanted in (jnp.float32, jnp.bfloat16):
        expected = {
            n: x.astype(dtype).astype(wanted) for n, x in flat(params_of("t5_v1_0")).items()
        }
        equal_bits(flat(huggingface.load(path, V1_0, wanted)), expected)
    huggingface.save(huggingface.load(path, V1_0, dtype), V1_0, tmp_path / "again")
    equal_bits(tensors_in(tmp_path / "again"), tensors_in(path))
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert raw["torch_dtype"] == np.dtype(dtype).name


def test_every_leaf_lands_on_its_shards():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    axes = {"vocab": "model", "mlp": "model", "joined_kv": "model", "embed": "data"}
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, P(*map(axes.get, names))),
        V1_0.logical_axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    params = huggingface.load(HF / "t5_v1_0", V1_0, jnp.bfloat16, shardings)
    jax.tree.map(lambda x, s: pytest.fail() if x.sharding != s else None, params, shardings)
    assert params["token_embedder"]["embedding"].addressable_shards[0].data.shape == (16, 12)
    equal_bits(flat(params), flat(huggingface.load(HF / "t5_v1_0", V1_0, jnp.bfloat16)))
    one = NamedSharding(mesh, P())
    params = huggingface.load(HF / "mt5", T5(CONFIGS["mt5"]), shardings=one)
    assert {x.sharding for x in jax.tree.leaves(params)} == {one}


def test_wrong_shardings_are_named_before_anything_is_read():
    mesh = jax.make_mesh((8,), ("model",))
    said = error_of(
        huggingface.load, HF / "t5_v1_0", V1_0, jnp.float32, NamedSharding(mesh, P(None, "model"))
    )
    assert "not divided evenly" in said and "decoder.decoder_norm.scale" in said
    said = error_of(
        huggingface.load, HF / "t5_v1_0", V1_0, jnp.float32, {"x": NamedSharding(mesh, P())}
    )
    assert "unexpected: x" in said and "missing: decoder.decoder_norm.scale" in said


def test_copies_of_the_embedding_are_allowed(folder):
    def change(tensors):
        for name in (
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        ):
            tensors[name] = tensors["shared.weight"].copy()
        bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        tensors[bias] = np.ones((32, 2), np.float32)  # the first public v1.0 files have it

    equal_bits(flat(huggingface.load(folder(change), V1_0)), flat(params_of("t5_v1_0")))


def test_the_embedding_under_another_name(folder):
    def change(tensors):
        tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")

    equal_bits(flat(huggingface.load(folder(change), V1_0)), flat(params_of("t5_v1_0")))


@pytest.mark.parametrize("row", [0, 9, 10, 59, 60, 63])
def test_copies_that_differ_are_named(folder, monkeypatch, row):
    monkeypatch.setattr(folder_of, "_ROWS", 10)  # the table has 64: the last block is shorter

    def change(tensors):
        for name in ("decoder.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors["shared.weight"].copy()
            tensors[name][row, -1] += 1
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"][:-1].copy()

    said = error_of(huggingface.load, folder(change), V1_0)
    names = "decoder.embed_tokens.weight, encoder.embed_tokens.weight, lm_head.weight"
    assert said.endswith(f"unlike shared.weight: {names}")


def test_tied_without_the_factor(folder):
    """transformers 5 ties where there is no output layer, whatever the factor."""
    path = folder(scale_decoder_outputs=False)
    model = T5(huggingface.read_config(path))
    assert not model.config.logits_via_embedding
    params = huggingface.load(path, model)
    np.testing.assert_array_equal(
        params["decoder"]["logits_dense"]["weight"], params["token_embedder"]["embedding"]
    )
    folder(scale_decoder_outputs=None, tie_word_embeddings=False)
    assert "missing: lm_head.weight" in error_of(huggingface.load, path, model)


def test_everything_wrong_is_named_at_once(folder):
    def change(tensors):
        del tensors["decoder.final_layer_norm.weight"]
        del tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"]
        tensors["extra.weight"] = np.zeros(3, np.float32)
        tensors["shared.weight"] = np.zeros((24, 64), np.float32)
        tensors["encoder.final_layer_norm.weight"] = np.zeros(24, np.int8)
        name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[name] = tensors[name].T.copy()

    said = error_of(huggingface.load, folder(change), V1_0)
    for part in (
        "missing: decoder.final_layer_norm.weight, encoder.block.1.layer.1.DenseReluDense.wo.weight;",
        "unexpected: extra.weight;",
        "shared.weight is (24, 64), not (64, 24)",
        "relative_attention_bias.weight is (2, 32), not (32, 2)",
        "of no float type: encoder.final_layer_norm.weight",
    ):
        assert part in said


def test_another_model_does_not_fit():
    deeper = T5(dataclasses.replace(V1_1.config, num_decoder_layers=4, num_encoder_layers=1))
    said = error_of(huggingface.load, HF / "t5_v1_1", deeper)
    assert "missing: decoder.block.3." in said and "unexpected: encoder.block.1." in said


def test_incomplete_shards_are_named(tmp_path):
    copy = pathlib.Path(shutil.copytree(HF / "t5_v1_1", tmp_path / "copy"))
    files = sorted(copy.glob("*.safetensors"))
    files[1].unlink()
    files[3].unlink()
    said = error_of(huggingface.load, copy, V1_1)
    assert said.endswith(f"no file {files[1].name}, {files[3].name}")
    files[0].write_bytes(files[0].read_bytes()[:-8])
    shutil.copy(HF / "t5_v1_1" / files[1].name, copy)
    shutil.copy(HF / "t5_v1_1" / files[3].name, copy)
    assert f"{files[0].name} is no safetensors file" in error_of(huggingface.load, copy, V1_1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"feed_forward_proj": "gated-silu", "dense_act_fn": None}, "activation 'silu'"),
        ({"dense_act_fn": "gelu"}, "activation 'gelu' is not one of"),
        ({"model_type": "bart"}, "model_type is 'bart'"),
        ({"decoder_start_token_id": 2}, "decoder_start_token_id is 2, not 0"),
        ({"eos_token_id": [1, 2]}, "eos_token_id is [1, 2]"),
        ({"d_model": None, "d_kv": "8"}, "no integer d_model, d_kv"),
    ],
)
def test_models_that_cannot_be_served_are_refused(folder, config, said):
    assert said in error_of(huggingface.read_config, folder(**config))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"feed_forward_proj": "gated-relu"}, {"mlp_activations": ("relu", "linear")}),
        ({"dense_act_fn": "gelu_pytorch_tanh"}, {"mlp_activations": ("gelu",)}),
        ({"is_gated_act": True}, {"mlp_activations": ("relu", "linear")}),
        ({"num_decoder_layers": None}, {"num_decoder_layers": 2}),
        ({"layer_norm_epsilon": 1e-5}, {"norm_eps": 1e-5}),
        ({"relative_attention_num_buckets": 16}, {"relative_buckets": 16}),
        ({"scale_decoder_outputs": None}, {"logits_via_embedding": True}),
        ({"scale_decoder_outputs": None, "tie_word_embeddings": False},
         {"logits_via_embedding": False}),
        ({"scale_decoder_outputs": None, "model_type": "mt5"}, {"logits_via_embedding": False}),
    ],
)  # fmt: skip
def test_entries_of_the_configuration(folder, config, expected):
    if "feed_forward_proj" in config:
        config |= {"dense_act_fn": None, "is_gated_act": None}
    found = dataclasses.asdict(huggingface.read_config(folder(**config)))
    assert found == dataclasses.asdict(V1_0.config) | expected


def test_files_that_are_not_there(tmp_path):
    assert "no such file" in error_of(huggingface.read_config, tmp_path)
    shutil.copy(HF / "mt5" / "config.json", tmp_path)
    said = error_of(huggingface.load, tmp_path, T5(CONFIGS["mt5"]))
    assert said == f"no model.safetensors and no model.safetensors.index.json in {tmp_path}"
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in error_of(huggingface.read_config, tmp_path)


def test_only_whole_models_are_saved_and_none_is_overwritten(tmp_path):
    params = params_of("t5_v1_0")
    rest = {name: x for name, x in flat(params).items() if name != "encoder.encoder_norm.scale"}
    said = error_of(huggingface.save, structure.unflatten(rest), V1_0, tmp_path)
    assert "missing: encoder.encoder_norm.scale" in said
    assert "at least 1" in error_of(huggingface.save, params, V1_0, tmp_path, 0)
    assert not list(tmp_path.iterdir())
    huggingface.save(params, V1_0, tmp_path)
    said = error_of(huggingface.save, params, V1_0, tmp_path, 1)
    assert said == f"{tmp_path} holds a model already: model.safetensors"
    odd = T5(dataclasses.replace(V1_0.config, mlp_activations=("linear", "gelu")))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), odd.abstract())
    assert "Hugging Face has no T5" in error_of(huggingface.save, params, odd, tmp_path / "odd")


def test_an_index_without_its_map(tmp_path):
    copy = pathlib.Path(shutil.copytree(HF / "t5_v1_1", tmp_path / "copy"))
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = content["weight_map"].pop("encoder.final_layer_norm.weight")
    index.write_text(json.dumps(content))
    said = error_of(huggingface.load, copy, V1_1)
    assert said.endswith("missing: encoder.final_layer_norm.weight") and (copy / lost).is_file()
    index.write_text("{}")
    assert "has no weight_map" in error_of(huggingface.load, copy, V1_1)
