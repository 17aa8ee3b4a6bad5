"""Decoder-only models of Hugging Face: forward pass, loop and files against transformers' own."""

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
from specjax import Prompt, Sampling, checkpoints
from specjax.checkpoints import causal, structure
from specjax.checkpoints import folder as folder_of
from specjax.decode.processors import NoRepeatNgram, RepetitionPenalty
from specjax.drafters.small_model import SmallModel
from specjax.models import families, stack
from specjax.models.llama import Llama, LlamaConfig, Rope
from specjax.models.opt import Opt, OptConfig
from tests.checkpoints.conftest import error_of

HF = pathlib.Path(__file__).parents[1] / "fixtures" / "hf"
LLAMA = LlamaConfig(
    vocab_size=48, emb_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=24,
    norm_eps=1e-5, bos_id=0, eos_id=1, max_positions=2048, rope=Rope(original_max_positions=2048),
)  # fmt: skip
OPT = OptConfig(
    vocab_size=48, emb_dim=16, word_dim=16, num_layers=2, num_heads=2, mlp_dim=40, max_positions=60
)  # fmt: skip
CONFIGS = {
    "llama2": LLAMA,
    "llama3": dataclasses.replace(
        LLAMA, num_heads=4, head_dim=6, rope_theta=16.0, tie_embeddings=True, qkv_bias=True,
        out_bias=True, mlp_bias=True, max_positions=128, other_eos_ids=(7, 9),
        rope=Rope("llama3", 4.0, 1.0, 4.0, 32),
    ),
    "llama_linear": dataclasses.replace(
        LLAMA, rope_theta=100.0, rope=Rope("linear", 2.5, original_max_positions=2048)
    ),
    "llama_dynamic": dataclasses.replace(
        LLAMA, rope_theta=100.0, rope=Rope("dynamic", 3.0, original_max_positions=16),
        max_positions=16,
    ),
    "qwen2": dataclasses.replace(
        LLAMA, num_heads=4, head_dim=4, rope_theta=1e6, qkv_bias=True, max_positions=32768,
        rope=Rope(original_max_positions=32768),
    ),
    "opt_125m": OPT,
    "opt_350m": dataclasses.replace(OPT, word_dim=12, norm_first=False),
}  # fmt: skip
NAMES = tuple(CONFIGS)
SHARDED = ("llama3", "opt_350m")
each_model = pytest.mark.parametrize("name", NAMES)


def model_of(name):
    return families.of(CONFIGS[name])


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens):
    return model.forward(params, tokens)


@functools.cache
def params_of(name):
    return causal.load(HF / name, model_of(name))


@functools.cache
def golden(name) -> dict[str, np.ndarray]:
    with np.load(HF / name / "golden.npz") as arrays:
        return dict(arrays)


def tensors_in(folder) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return functools.reduce(dict.__or__, map(safetensors.numpy.load_file, files))


def flat(params) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in structure.flatten(params).items()}


def equal_bits(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


@pytest.fixture
def edited(tmp_path):
    """A function that copies a model, as one file, with its tensors and configuration changed."""

    def edit(name, change=lambda tensors: None, **config) -> pathlib.Path:
        copy = tmp_path / "copy"
        copy.mkdir(exist_ok=True)
        tensors = tensors_in(HF / name)
        change(tensors)
        safetensors.numpy.save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        raw = json.loads((HF / name / "config.json").read_text()) | config
        (copy / "config.json").write_text(json.dumps(raw))
        return copy

    return edit


# What transformers computes.


@each_model
def test_configuration_is_read(name):
    assert causal.read_config(HF / name) == CONFIGS[name]
    assert checkpoints.infer_config(HF / name) == CONFIGS[name]


@each_model
def test_logits_are_transformers_own(name):
    """Prompts of 40, 5 and 17 tokens, each by itself: dynamic scaling goes by the length."""
    arrays, model = golden(name), model_of(name)
    assert arrays["logits"].std() > 0.5
    for row, length in enumerate(arrays["lengths"]):
        tokens = jnp.asarray(arrays["tokens"][row : row + 1, :length])
        logits = forward(model, params_of(name), tokens)
        assert logits.dtype == jnp.float32
        expected = arrays["logits"][row, :length]
        np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "llama_linear", "llama_dynamic"])
def test_the_scaling_of_these_models_is_not_idle(name):
    """Without it, or with one wave's branch for another's, the logits are others by far."""
    arrays, config = golden(name), CONFIGS[name]
    found = [dataclasses.replace(config.rope, kind="default")]
    if name == "llama3":  # the blended wave kept, then stretched; the stretched one blended
        for low, high in ((1.0, 1.5), (2.5, 4.0), (0.5, 4.0)):
            changed = dict(low_freq_factor=low, high_freq_factor=high)
            found.append(dataclasses.replace(config.rope, **changed))
    for rope in found:
        model = Llama(dataclasses.replace(config, rope=rope))
        logits = forward(model, params_of(name), jnp.asarray(arrays["tokens"][:1]))
        assert np.abs(logits[0] - arrays["logits"][0]).max() > 1e-2, rope


def decoded(name, **options):
    arrays, model = golden(name), model_of(name)
    prompt = Prompt(jnp.asarray(arrays["tokens"]), jnp.asarray(arrays["lengths"]))
    steps = arrays["greedy"].shape[1]
    return specjax.generate(model, params_of(name), prompt, max_decode_len=steps, **options)


@each_model
def test_greedy_ids_are_transformers_own(name):
    """A batch of unequal prompts, which transformers has read one by one."""
    np.testing.assert_array_equal(decoded(name).tokens, golden(name)["greedy"])


@pytest.mark.parametrize(
    ("name", "drafted"), [("llama3", True), ("llama_dynamic", False), ("opt_350m", True)]
)
def test_penalised_ids_are_transformers_own(name, drafted):
    """I1, I3: a decoder-only model's history begins with the prompt, and holds the drafted path."""
    options = dict(drafter=SmallModel(model_of("llama2"), 3), draft_params=params_of("llama2"))
    sampling = Sampling(processors=(RepetitionPenalty(1.5), NoRepeatNgram(3)))
    out = decoded(name, sampling=sampling, **(options if drafted else {}))
    np.testing.assert_array_equal(out.tokens, golden(name)["penalised"])
    assert (golden(name)["penalised"] != golden(name)["greedy"]).any()


@pytest.mark.parametrize(
    ("target", "draft"),
    [("llama3", "opt_125m"), ("opt_350m", "llama2"), ("llama_dynamic", "llama_dynamic")],
)  # fmt: skip
def test_greedy_ids_with_a_draft_are_transformers_own(target, draft):
    """Drafts of another scaling and of another family; a model as its own draft is never refused."""
    drafter = SmallModel(model_of(draft), 3)
    out = decoded(target, drafter=drafter, draft_params=params_of(draft))
    np.testing.assert_array_equal(out.tokens, golden(target)["greedy"])
    if target == draft:
        np.testing.assert_array_equal(out.stats.accepted, out.stats.tested)
        assert out.stats.accepted.sum() > out.stats.rounds.sum()


# Files.


@pytest.mark.parametrize("limit", [10**9, 4000, 1])
@each_model
def test_round_trip_is_bit_identical(tmp_path, name, limit):
    model, original = model_of(name), tensors_in(HF / name)
    stored = next(iter(original.values())).dtype
    params = causal.load(HF / name, model, stored)
    causal.save(params, model, tmp_path, limit)
    equal_bits(tensors_in(tmp_path), original)
    again = checkpoints.load_any(tmp_path, dtype=stored)
    assert again[0] == model
    equal_bits(flat(again[1]), flat(params))
    files, index = list(tmp_path.glob("*.safetensors")), tmp_path / folder_of.INDEX
    assert index.exists() == (len(files) > 1) == (limit < 10**9)
    if limit == 1:
        assert len(files) == len(original)


def test_fixtures_are_sharded_and_in_half_precision():
    """So that reading those is tested at all."""
    assert all(len(list((HF / name).glob("*.safetensors"))) > 2 for name in SHARDED)
    assert {x.dtype for x in tensors_in(HF / "qwen2").values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert not any("lm_head" in n for name in SHARDED for n in tensors_in(HF / name))


@each_model
def test_what_is_saved_says_what_transformers_asks_for(tmp_path, name):
    """All entries that a file of transformers has and that matter, with the same values."""
    causal.save(params_of(name), model_of(name), tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text())
    theirs = json.loads((HF / name / "config.json").read_text())
    rope = theirs.pop("rope_parameters", theirs.get("rope_scaling"))
    idle = {
        "attention_dropout", "dropout", "layerdrop", "init_std", "initializer_range", "use_cache",
        "pretraining_tp", "transformers_version", "_remove_final_layer_norm", "layer_types",
        "layer_norm_elementwise_affine", "max_window_layers", "sliding_window", "rope_scaling",
        "use_sliding_window", "dtype",
    }  # fmt: skip
    assert {n: ours[n] for n in theirs if n not in idle} == {
        n: x for n, x in theirs.items() if n not in idle
    }
    assert ours["torch_dtype"] == "float32"
    if name.startswith("llama_") or name == "llama3":
        said = {"rope_type": rope.get("type", rope.get("rope_type"))} | rope
        said = {n: x for n, x in said.items() if n not in ("type", "rope_theta")}
        assert ours["rope_scaling"] == said
    elif "rope_scaling" in ours:
        assert ours["rope_scaling"] is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["llama2", "opt_350m"])
def test_half_precision_files(edited, tmp_path, name, dtype):
    def change(tensors):
        tensors |= {name: x.astype(dtype) for name, x in tensors.items()}

    path, model = edited(name, change), model_of(name)
    for wanted in (jnp.float32, jnp.bfloat16):
        expected = {n: x.astype(dtype).astype(wanted) for n, x in flat(params_of(name)).items()}
        equal_bits(flat(causal.load(path, model, wanted)), expected)
    causal.save(causal.load(path, model, dtype), model, tmp_path / "again")
    equal_bits(tensors_in(tmp_path / "again"), tensors_in(path))
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert raw["torch_dtype"] == np.dtype(dtype).name


@each_model
def test_scanned_layers(tmp_path, name):
    """Loaded leaf by leaf into a scanned model, written again unrolled."""
    deep = families.of(dataclasses.replace(CONFIGS[name], scan_layers=True))
    params = causal.load(HF / name, deep)
    equal_bits(flat(params), flat(stack.pile(params_of(name))))
    causal.save(params, deep, tmp_path)
    equal_bits(tensors_in(tmp_path), {n: x.astype("f4") for n, x in tensors_in(HF / name).items()})


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["llama3", "opt_350m"])
def test_every_leaf_lands_on_its_shards(name, scan):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    axes = {"vocab": "model", "mlp": "model", "joined_kv": "model", "embed": "data"}
    model = families.of(dataclasses.replace(CONFIGS[name], scan_layers=scan))
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, P(*map(axes.get, names))),
        model.logical_axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    params = causal.load(HF / name, model, jnp.bfloat16, shardings)
    jax.tree.map(lambda x, s: pytest.fail() if x.sharding != s else None, params, shardings)
    table = params["embed_tokens"]["weight"]
    assert table.addressable_shards[0].data.shape == (table.shape[0] // 4, table.shape[1] // 2)
    equal_bits(flat(params), flat(causal.load(HF / name, model, jnp.bfloat16)))


def test_wrong_shardings_are_named_before_anything_is_read():
    mesh = jax.make_mesh((8,), ("model",))
    wrong = NamedSharding(mesh, P(None, "model"))
    said = error_of(causal.load, HF / "opt_350m", model_of("opt_350m"), jnp.float32, wrong)
    assert "not divided evenly" in said and "layers_0.fc1.bias" in said


@pytest.mark.parametrize("name", ["llama2", "opt_350m"])
def test_names_without_their_prefix(edited, name):
    """Public OPT files have ``decoder.``; models saved without their head nothing at all."""
    prefix = "model.decoder." if name == "opt_350m" else "model."
    for shorter in ("decoder.", "") if name == "opt_350m" else ("",):

        def change(tensors, shorter=shorter):
            for full in list(tensors):
                tensors[full.replace(prefix, shorter)] = tensors.pop(full)

        path = edited(name, change)
        assert not any(full.startswith(prefix) for full in tensors_in(path))
        equal_bits(flat(causal.load(path, model_of(name))), flat(params_of(name)))


def test_what_is_computed_from_the_configuration_is_ignored(edited):
    def change(tensors):
        for i in range(2):
            name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
            tensors[name] = np.zeros(4, np.float32)

    equal_bits(flat(causal.load(edited("llama2", change), model_of("llama2"))),
               flat(params_of("llama2")))  # fmt: skip


@pytest.mark.parametrize("name", ["llama3", "opt_125m", "opt_350m"])
def test_a_copy_of_the_embedding_is_allowed_and_another_table_is_not(edited, name):
    """L5: a tied model has one table, whatever its file holds."""
    embedding = (
        "model.decoder.embed_tokens.weight" if "opt" in name else "model.embed_tokens.weight"
    )

    def copy(tensors):
        tensors["lm_head.weight"] = tensors[embedding].copy()

    def differ(tensors):
        copy(tensors)
        tensors["lm_head.weight"][47, -1] += 1

    equal_bits(flat(causal.load(edited(name, copy), model_of(name))), flat(params_of(name)))
    path = edited(name, differ)
    said = error_of(causal.load, path, model_of(name))
    assert str(path) in said
    assert said.endswith("unlike the embedding, though tied: lm_head.weight")


def test_a_missing_output_layer_is_an_error(edited):
    """L5: never initialised at random."""
    path = edited("llama2", lambda tensors: tensors.pop("lm_head.weight"))
    said = error_of(causal.load, path, model_of("llama2"))
    assert said == f"{path} does not fit the model; missing: lm_head.weight"


def test_everything_wrong_is_named_at_once(edited):
    def change(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((16, 48), np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(16, np.int8)
        tensors["layers.0.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)

    path = edited("llama2", change)
    said = error_of(causal.load, path, model_of("llama2"))
    for part in (
        str(path),
        "missing: layers.1.mlp.up_proj.weight, norm.weight;",
        "unexpected: layers.0.self_attn.q_proj.bias;",
        "embed_tokens.weight is (16, 48), not (48, 16)",
        "of no float type: layers.0.input_layernorm.weight",
    ):
        assert part in said
    assert said.count("layers.0.mlp.up_proj.weight") == 1 and "there twice: " in said


def test_biases_and_layers_that_a_model_lacks_are_named():
    """L1: a bias in the file is not ignored, and one that is missing not taken for zero."""
    plain = Llama(dataclasses.replace(CONFIGS["qwen2"], qkv_bias=False))
    said = error_of(causal.load, HF / "qwen2", plain)
    assert said.count("_proj.bias") == 6 and "unexpected: layers.0.self_attn.k_proj.bias" in said
    biased = Llama(dataclasses.replace(LLAMA, mlp_bias=True))
    assert "missing: layers.0.mlp.down_proj.bias" in error_of(causal.load, HF / "llama2", biased)
    deeper = Opt(dataclasses.replace(OPT, num_layers=3))
    assert "missing: layers.2.fc1.bias" in error_of(causal.load, HF / "opt_125m", deeper)


def test_a_bias_is_read_and_used(edited):
    """L1: another bias is another answer."""

    def change(tensors):
        tensors["model.layers.0.self_attn.k_proj.bias"] += 1

    tokens = jnp.asarray(golden("qwen2")["tokens"][1:2, :5])
    params = causal.load(edited("qwen2", change), model_of("qwen2"))
    logits = forward(model_of("qwen2"), params, tokens)
    assert np.abs(logits[0] - golden("qwen2")["logits"][1, :5]).max() > 1e-2


def test_truncated_files_are_named_with_what_they_lack(tmp_path):
    """One file and one of several: the file, and the tensors behind its end."""
    for name in ("llama2", "opt_350m"):
        copy = pathlib.Path(shutil.copytree(HF / name, tmp_path / name))
        file = sorted(copy.glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:-8])
        last = {"llama2": "model.norm.weight", "opt_350m": "layers.1.self_attn_layer_norm.weight"}[
            name
        ]
        said = error_of(causal.load, copy, model_of(name))
        assert said.startswith(f"{file} is no safetensors file") and "it ends before " in said
        assert last in said.split("it ends before ")[1]
        assert "embed_tokens" not in said
        file.write_bytes(file.read_bytes()[:20])
        said = error_of(causal.load, copy, model_of(name))
        assert said.startswith(f"{file} is no safetensors file") and "it ends" not in said
        file.write_bytes(b"")
        assert f"{file} is no safetensors file" in error_of(causal.load, copy, model_of(name))


def test_incomplete_shards_are_named(tmp_path):
    copy = pathlib.Path(shutil.copytree(HF / "llama3", tmp_path / "copy"))
    files = sorted(copy.glob("*.safetensors"))
    files[1].unlink()
    assert error_of(causal.load, copy, model_of("llama3")).endswith(f"no file {files[1].name}")


def test_only_whole_models_are_saved_and_none_is_overwritten(tmp_path):
    params, model = params_of("llama2"), model_of("llama2")
    rest = {name: x for name, x in flat(params).items() if name != "norm.weight"}
    said = error_of(causal.save, structure.unflatten(rest), model, tmp_path)
    assert "missing: norm.weight" in said
    assert "at least 1" in error_of(causal.save, params, model, tmp_path, 0)
    assert not list(tmp_path.iterdir())
    causal.save(params, model, tmp_path)
    said = error_of(causal.save, params, model, tmp_path)
    assert said == f"{tmp_path} holds a model already: model.safetensors"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dataclasses.replace(LLAMA, out_bias=True), "Llama with a bias on the output"),
        (dataclasses.replace(LLAMA, qkv_bias=True, mlp_bias=True), "Qwen2 with biases"),
        (
            dataclasses.replace(LLAMA, rope=Rope("dynamic", 2.0)),
            "dynamic scaling that begins elsewhere",
        ),
        (dataclasses.replace(OPT, norm_eps=1e-6), "OPT with norm_eps 1e-06"),
    ],
)
def test_models_that_hugging_face_has_no_words_for_are_not_saved(tmp_path, config, said):
    model = families.of(config)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), model.abstract())
    assert error_of(causal.save, params, model, tmp_path).startswith(f"Hugging Face has no {said}")
    assert not list(tmp_path.iterdir())


# config.json.

MINIMAL = dict(
    model_type="llama", vocab_size=48, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24,
)  # fmt: skip
MINIMAL_OPT = dict(
    model_type="opt", vocab_size=48, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    ffn_dim=40,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mistral"}, "a sliding window of 4096 is not supported"),
        ({"model_type": "mistral", "sliding_window": 256}, "a sliding window of 256 is not"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "a sliding window of 4096"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "of 64 is not"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn' is not one of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rotary scaling 'longrope' is not one of"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary scaling 'yarn' is not one of"),
        ({"rope_scaling": {"type": "linear"}}, "rotary scaling 'linear' has no factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rotary scaling 'dynamic' has no factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' has no low_freq_factor; rotary scaling 'llama3' has no high_freq_factor",
        ),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not one of gelu_pytorch_tanh, silu, swish"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"eos_token_id": None}, "eos_token_id is None, not an id or several"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', not an id or several"),
        ({"eos_token_id": []}, "eos_token_id is [], not an id or several"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2'], not an id or several"),
        ({"num_key_value_heads": 3}, "3 key and value heads do not divide 2 heads"),
        (
            {"hidden_size": None, "vocab_size": "48"},
            "no integer vocab_size; no integer hidden_size",
        ),
        ({"intermediate_size": 24.5}, "no integer intermediate_size"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', not one of llama, mistral, qwen2, opt"),
    ],
)
def test_models_that_cannot_be_served_are_refused(tmp_path, config, said):
    """One line that names the file; what is wrong in several ways says so at once."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MINIMAL | config))
    message = error_of(causal.read_config, tmp_path)
    assert said in message and str(file) in message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"activation_function": "gelu"}, "activation_function 'gelu' is not 'relu'"),
        ({"enable_bias": False}, "enable_bias is false"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is false"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
        ({"_remove_final_layer_norm": True}, "its final layer norm was removed"),
        ({"num_attention_heads": 3}, "3 heads do not divide width 16"),
        ({"eos_token_id": [2, 3]}, "eos_token_id is [2, 3], not one id"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', not one id"),
        ({"ffn_dim": None}, "no integer ffn_dim"),
    ],
)
def test_opt_models_that_cannot_be_served_are_refused(config, said):
    message = error_of(causal.parse, MINIMAL_OPT | config, "some/config.json")
    assert said in message and message.startswith("some/config.json")


def test_all_that_is_wrong_is_said():
    config = {"hidden_act": "gelu", "eos_token_id": "x", "rope_scaling": {"type": "linear"}}
    said = error_of(causal.parse, MINIMAL | config, "f")
    assert all(part in said for part in ("'gelu'", "eos_token_id", "has no factor"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, {"rope_theta": 7.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope": Rope("linear", 2.0)}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, {"rope": Rope("linear", 2.0)}),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 9.0}},
            {"rope": Rope("linear", 2.0), "rope_theta": 9.0},
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0,
                              "original_max_position_embeddings": 77}},
            {"rope": Rope("dynamic", 2.0)},  # transformers goes by max_position_embeddings
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 77}},
            {"rope": Rope("llama3", 8.0, 1.0, 4.0, 77)},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0}},
            {"rope": Rope("llama3", 8.0, 1.0, 4.0)},
        ),
        ({"head_dim": 6}, {"head_dim": 6}),
        ({"head_dim": None, "num_key_value_heads": None}, {}),
        ({"num_key_value_heads": 1}, {"num_kv_heads": 1}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_pytorch_tanh"}),
        ({"hidden_act": "swish"}, {}),
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"eos_token_id": [5, 6, 5]}, {"eos_id": 5, "other_eos_ids": (6,)}),
        ({"bos_token_id": 4, "pad_token_id": 3}, {"bos_id": 4, "pad_id": 3}),
        ({"rms_norm_eps": 1e-5}, {"norm_eps": 1e-5}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"model_type": "qwen2"}, {"qkv_bias": True}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768},
         {"qkv_bias": True}),
        ({"sliding_window": 8}, {}),  # a Llama has none, whatever is said
    ],
)  # fmt: skip
def test_entries_of_the_configuration(config, expected):
    """L7: both spellings; without rope_theta the base is 10000, as in transformers."""
    sizes = dict(vocab_size=48, emb_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8)
    base = LlamaConfig(**sizes, mlp_dim=24, max_positions=2048, bos_id=None)
    expected = dict(rope=Rope(), rope_theta=10000.0) | expected
    if expected["rope"].original_max_positions == Rope().original_max_positions:
        expected["rope"] = dataclasses.replace(expected["rope"], original_max_positions=2048)
    assert causal.parse(MINIMAL | config, "f") == dataclasses.replace(base, **expected)


def test_ends_of_the_generation_configuration_count_too(tmp_path):
    """Llama 3 Instruct says its three ids there only."""
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | {"eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, 7]}))
    config = causal.read_config(tmp_path)
    assert (config.eos_id, config.other_eos_ids) == (9, (8, 7))
    (tmp_path / "generation_config.json").write_text("{}")
    assert causal.read_config(tmp_path).other_eos_ids == ()


# Entries that matter of public files.
PUBLIC = {
    "vicuna-7b": (
        dict(
            model_type="llama", bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096,
            intermediate_size=11008, max_position_embeddings=4096, num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=32, pad_token_id=0, rms_norm_eps=1e-5,
            rope_scaling=None, tie_word_embeddings=False, vocab_size=32000,
        ),
        LlamaConfig(norm_eps=1e-5, rope=Rope(original_max_positions=4096)),
        6_738_415_616,
    ),
    "llama-3.1-8b": (
        dict(
            model_type="llama", attention_bias=False, bos_token_id=128000, hidden_act="silu",
            eos_token_id=[128001, 128008, 128009], hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0,
            rope_scaling=dict(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                original_max_position_embeddings=8192,
            ),
            tie_word_embeddings=False, vocab_size=128256,
        ),
        LlamaConfig(
            vocab_size=128256, num_kv_heads=8, mlp_dim=14336, rope_theta=5e5, norm_eps=1e-5,
            rope=Rope("llama3", 8.0, 1.0, 4.0, 8192), max_positions=131072, bos_id=128000,
            eos_id=128001, other_eos_ids=(128008, 128009),
        ),
        8_030_261_248,
    ),
    "qwen2-0.5b": (
        dict(
            model_type="qwen2", bos_token_id=151643, eos_token_id=151643, hidden_act="silu",
            hidden_size=896, intermediate_size=4864, max_position_embeddings=131072,
            max_window_layers=24, num_attention_heads=14, num_hidden_layers=24,
            num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072,
            tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
        ),
        LlamaConfig(
            vocab_size=151936, emb_dim=896, num_layers=24, num_heads=14, num_kv_heads=2,
            head_dim=64, mlp_dim=4864, rope_theta=1e6, rope=Rope(original_max_positions=131072),
            tie_embeddings=True, qkv_bias=True, max_positions=131072, bos_id=151643, eos_id=151643,
        ),
        494_032_768,
    ),
    "opt-125m": (
        dict(
            model_type="opt", _remove_final_layer_norm=False, activation_function="relu",
            bos_token_id=2, do_layer_norm_before=True, eos_token_id=2, ffn_dim=3072,
            hidden_size=768, max_position_embeddings=2048, num_attention_heads=12,
            num_hidden_layers=12, pad_token_id=1, vocab_size=50272, word_embed_proj_dim=768,
        ),
        OptConfig(),
        125_239_296,
    ),
    "opt-350m": (
        dict(
            model_type="opt", _remove_final_layer_norm=False, activation_function="relu",
            bos_token_id=2, do_layer_norm_before=False, eos_token_id=2, ffn_dim=4096,
            hidden_size=1024, max_position_embeddings=2048, num_attention_heads=16,
            num_hidden_layers=24, pad_token_id=1, vocab_size=50272, word_embed_proj_dim=512,
        ),
        OptConfig(
            emb_dim=1024, word_dim=512, num_layers=24, num_heads=16, mlp_dim=4096, norm_first=False
        ),
        331_196_416,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_are_read_and_have_their_size(name):
    """Their configurations, and as many parameters as their model cards say."""
    raw, config, size = PUBLIC[name]
    assert causal.parse(raw, name) == config
    shapes = structure.shapes(families.of(config).abstract())
    assert sum(np.prod(shape, dtype=np.int64) for shape in shapes.values()) == size


@each_model
def test_configurations_as_json(name):
    """Of native checkpoints and int8 files: through JSON and back, tuples and scaling included."""
    said = json.loads(json.dumps(families.dump(model_of(name))))
    assert families.parse(said["model"], said["config"]) == CONFIGS[name]
    assert families.parse(said["model"], json.dumps(said["config"])) == CONFIGS[name]
