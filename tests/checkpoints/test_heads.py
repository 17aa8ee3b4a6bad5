"""Heads in their authors' files: names, counts, biases; what is wrong is named; there and back bit by bit."""

import collections
import dataclasses
import io
import json
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax import checkpoints
from specjax.checkpoints import causal, heads, structure, torch_file
from specjax.infer import system
from specjax.models import draft_vocab
from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.llama import Rope
from specjax.models.medusa import Medusa, MedusaConfig
from tests import toys
from tests.models import decoders

TARGET = decoders.tiny_llama()
WIDTH = TARGET.config.emb_dim


def medusa(**options):
    return Medusa(MedusaConfig(toys.VOCAB, WIDTH, **dict(heads=5) | options))


def eagle(**options):
    sizes = dict(
        vocab_size=toys.VOCAB, emb_dim=WIDTH, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
    )
    return Eagle(EagleConfig(**sizes | options))


def random(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), model.abstract())


def change_config(folder, **said):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


MEDUSA_NAMES = {f"{h}.0.linear.{n}" for h in range(5) for n in ("weight", "bias")} | {
    f"{h}.1.weight" for h in range(5)
}
# SafeAILab/EAGLE, released heads of Vicuna and LLaMA 2; Llama 3's lack fc.bias.
EAGLE_NAMES = {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"}
EAGLE_NAMES |= {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
EAGLE_NAMES |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}


@pytest.mark.parametrize("options", [{}, dict(layers=2), dict(own_output=False)])
def test_medusa_there_and_back(options, tmp_path):
    model = medusa(**options)
    params = random(model)
    heads.save(params, model, tmp_path / "m", "base")
    if not options:
        assert (
            set(safetensors.numpy.load_file(tmp_path / "m" / heads.MEDUSA_FILES[0])) == MEDUSA_NAMES
        )
    config = checkpoints.infer_config(tmp_path / "m")
    assert (config.heads, config.layers, config.own_output) == (
        5,
        model.config.layers,
        model.config.own_output,
    )
    _, found = checkpoints.load_any(tmp_path / "m")
    equal(found, {n: x for n, x in params.items() if n != "output"})


@pytest.mark.parametrize(
    "options",
    [{}, dict(fc_bias=False), dict(draft_vocab=draft_vocab.of_ids(np.arange(9), toys.VOCAB))],
)
def test_eagle_there_and_back(options, tmp_path):
    """L1, L5: names and biases as released; without the target's parts, and back with them."""
    model = eagle(**options)
    params = random(model)
    heads.save(params, model, tmp_path / "e", "base")
    stored = set(safetensors.numpy.load_file(tmp_path / "e" / "model.safetensors"))
    expected = EAGLE_NAMES if model.config.fc_bias else EAGLE_NAMES - {"fc.bias"}
    assert stored == expected | {"embed_tokens.weight"}
    said = json.loads((tmp_path / "e" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"] and said["num_hidden_layers"] == 1
    assert said["bias"] == model.config.fc_bias
    config = checkpoints.infer_config(tmp_path / "e")
    assert config.alone and config.draft_vocab == model.config.draft_vocab
    _, found = checkpoints.load_any(tmp_path / "e")
    equal(found, {n: x for n, x in params.items() if n not in ("embed_tokens", "lm_head")})


# What sgl-project/SpecForge's trainer writes, and sglang/srt/models/llama_eagle3.py and
# vllm/model_executor/models/llama_eagle3.py read; vLLM makes "midlayer." its first layer.
EAGLE3_NAMES = {"fc.weight", "norm.weight", "lm_head.weight"}
EAGLE3_NAMES |= {
    f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
}
EAGLE3_NAMES |= {f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"}
EAGLE3_NAMES |= {f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}


def eagle3(**options):
    sizes = dict(
        vocab_size=toys.VOCAB, emb_dim=WIDTH, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
        reads_layers=(0, 1, 1), draft_vocab=draft_vocab.of_ids(np.asarray([1, 3, 4]), toys.VOCAB),
    )  # fmt: skip
    return Eagle3(Eagle3Config(**sizes | options))


@pytest.mark.parametrize(
    "options", [{}, dict(draft_vocab=None), dict(fc_bias=True, reads_layers=None)]
)
def test_eagle3_there_and_back(options, tmp_path):
    model = eagle3(**options)
    params = random(model)
    heads.save(params, model, tmp_path / "e", "base")
    stored = safetensors.numpy.load_file(tmp_path / "e" / "model.safetensors")
    c, expected = model.config, EAGLE3_NAMES | {"embed_tokens.weight"}
    expected |= {"fc.bias"} if c.fc_bias else set()
    assert set(stored) == expected | (set() if c.draft_vocab is None else {"d2t", "t2d"})
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * WIDTH)
    said = json.loads((tmp_path / "e" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLMEagle3"] and said["model_type"] == "llama"
    # What vLLM's and SGLang's loaders ask the configuration for.
    assert said["num_hidden_layers"] == 1 and said["tie_word_embeddings"] is False
    assert said["draft_vocab_size"] == (toys.VOCAB if c.draft_vocab is None else 3)
    found = checkpoints.infer_config(tmp_path / "e")
    assert found == dataclasses.replace(c, alone=True, rope=found.rope)
    _, weights = checkpoints.load_any(tmp_path / "e")
    equal(weights, {n: x for n, x in params.items() if n != "embed_tokens"})


def test_layers_are_counted_as_each_loader_does(tmp_path):
    """vLLM's key at the top names layers whose input is read; SGLang adds 1 to those of eagle_config."""
    model = eagle3(reads_layers=(2, 47, 91))
    heads.save(random(model), model, tmp_path, "base")
    file = tmp_path / "config.json"
    said, key = json.loads(file.read_text()), "eagle_aux_hidden_state_layer_ids"
    assert said[key] == [2, 47, 91] and said["eagle_config"][key] == [1, 46, 90]
    # As lmsys/Qwen3-235B-A22B-EAGLE3, of 94 layers, has it.
    file.write_text(json.dumps({n: x for n, x in said.items() if n != key}))
    assert checkpoints.infer_config(tmp_path).reads_layers == (2, 47, 91)
    file.write_text(json.dumps({n: x for n, x in said.items() if n not in (key, "eagle_config")}))
    assert checkpoints.infer_config(tmp_path).reads_layers is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(norm_before_residual=True), "says norm_before_residual"),
        (dict(target_hidden_size=64), f"is {WIDTH} wide, its target's states 64"),
        (dict(eagle_config=dict(use_aux_hidden_state=False)), "reads one state"),
        (dict(draft_vocab_size=7), "draft_vocab_size = 7, its maps keep 3"),
    ],
)
def test_heads_of_another_build_are_refused(change, message, tmp_path):
    model = eagle3()
    heads.save(random(model), model, tmp_path, "base")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        checkpoints.infer_config(tmp_path)


def test_maps_are_differences_and_a_mask(tmp_path):
    """L2: kept ids 1, 3, 4."""
    model = eagle3()
    heads.save(random(model), model, tmp_path, "base")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].dtype == np.int64 and stored["d2t"].tolist() == [1, 2, 2]
    assert stored["t2d"].dtype == bool and np.flatnonzero(stored["t2d"]).tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(d2t=np.arange(3)), "d2t and t2d disagree"),
        (lambda t: t.update(d2t=np.zeros(3, np.int64)), "d2t and t2d disagree"),
        (lambda t: t.pop("t2d"), "of d2t and t2d only one is stored"),
    ],
)
def test_maps_that_disagree_are_refused(change, message, tmp_path):
    """L2: filled with ids or with nothing they mean other pieces."""
    model = eagle3()
    heads.save(random(model), model, tmp_path, "base")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        checkpoints.infer_config(tmp_path)


@pytest.mark.parametrize("own", [True, False])
def test_medusa_for_vllm(own, tmp_path):
    """vllm/model_executor/models/medusa.py: names of tensors, and what it asks the configuration for."""
    vocab = draft_vocab.of_ids(np.asarray([1, 3, 4]), toys.VOCAB)
    model = medusa(heads=2, own_output=own, draft_vocab=vocab)
    params = random(model)
    heads.save(params, model, tmp_path, "base", style="vllm")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    names = {f"blocks.{h}.layers.0.{n}" for h in range(2) for n in ("weight", "bias")} | {
        "token_map"
    }
    outputs = {f"lm_heads.{h}.weight" for h in range(2)} if own else {"lm_heads.0.weight"}
    assert set(stored) == names | outputs
    assert stored["token_map"].tolist() == [1, 3, 4] and stored["token_map"].dtype == np.int64
    np.testing.assert_array_equal(
        stored["blocks.1.layers.0.weight"], params["head_1"]["layer_0"]["weight"]
    )
    said = json.loads((tmp_path / "config.json").read_text())
    asked = dict(
        model_type="medusa", architectures=["MedusaModel"], hidden_size=WIDTH, num_hidden_layers=1,
        num_heads=2, vocab_size=toys.VOCAB, truncated_vocab_size=3, original_lm_head=not own,
        medusa_fc_bias=True,
    )  # fmt: skip
    assert asked.items() <= said.items()


def test_eagle_for_vllm_and_sglang(tmp_path):
    """vllm/model_executor/models/llama_eagle.py has no fc.bias, and would leave it out; SGLang's has one."""
    model = eagle(fc_bias=False)
    heads.save(random(model), model, tmp_path, "base")
    stored = set(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
    prefixed = {f"model.{n}" for n in stored}  # as both rename them
    assert prefixed == {f"model.{n}" for n in (EAGLE_NAMES - {"fc.bias"}) | {"embed_tokens.weight"}}
    said = json.loads((tmp_path / "config.json").read_text())
    asked = {"hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"}
    asked |= {"vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings"}
    assert asked | {"tie_word_embeddings", "num_hidden_layers"} <= set(said)


@pytest.mark.usefixtures("long_vectors")
def test_heads_get_what_they_take_from_their_target(tmp_path):
    """The embedding, and the rows of the output layer that the head can say."""
    vocab = draft_vocab.of_ids(np.asarray([1, 5, 6]), toys.VOCAB)
    model, params = eagle(draft_vocab=vocab), decoders.init(TARGET, 1)
    heads.save(random(model), model, tmp_path / "e", "base")
    found, weights = system.Heads(str(tmp_path / "e")).of(TARGET, TARGET.tile(params))
    assert not found.config.alone
    equal(weights["embed_tokens"], params["embed_tokens"])
    x = jax.random.normal(jax.random.key(0), (1, 2, WIDTH))
    got = found.known_logits(weights, x)
    np.testing.assert_allclose(
        got, x @ TARGET.output(params)[jnp.asarray([1, 5, 6])].T, rtol=1e-5, atol=1e-5
    )


def test_the_number_of_heads_is_that_of_the_tensors(tmp_path, caplog):
    """L8: published configurations say 2, or nothing."""
    model = medusa()
    heads.save(random(model), model, tmp_path, "base")
    change_config(tmp_path, medusa_num_heads=2)
    assert checkpoints.infer_config(tmp_path).heads == 5
    assert "says medusa_num_heads = 2; 5 are stored, which count" in caplog.text


def test_a_bias_that_is_said_and_not_there(tmp_path):
    """L1."""
    model = eagle(fc_bias=False)
    heads.save(random(model), model, tmp_path, "base")
    change_config(tmp_path, bias=True)
    with pytest.raises(ValueError, match="says bias = True, but fc.bias is missing"):
        checkpoints.infer_config(tmp_path)


def test_eagle3_does_not_read_bias(tmp_path):
    """The authors' EAGLE-3 has no fc.bias whatever the configuration says."""
    model = eagle3()
    heads.save(random(model), model, tmp_path, "base")
    change_config(tmp_path, bias=True)
    assert not checkpoints.infer_config(tmp_path).fc_bias


def test_maps_of_a_head_that_says_all_pieces_do_not_count(tmp_path):
    """The authors leave them out, whatever they hold: their files have zeros."""
    model = eagle3(draft_vocab=None)
    params = random(model)
    heads.save(params, model, tmp_path, "base")
    file = tmp_path / "model.safetensors"
    maps = {"d2t": np.zeros(toys.VOCAB, np.int64), "t2d": np.zeros(toys.VOCAB, bool)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | maps, file)
    found, weights = checkpoints.load_any(tmp_path)
    assert found.config.draft_vocab is None
    equal(weights, {n: x for n, x in params.items() if n != "embed_tokens"})


def test_qkv_bias_is_the_authors_word(tmp_path):
    """Theirs reads no other, whatever the kind of model says; and asks for rope_scaling's type."""
    model = eagle(qkv_bias=True, rope=Rope("linear", 2.0))
    params = random(model)
    heads.save(params, model, tmp_path, "base")
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["qkv_bias"] and said["rope_scaling"]["type"] == "linear"
    change_config(tmp_path, model_type="llama", attention_bias=False)
    found, weights = checkpoints.load_any(tmp_path)
    assert found.config.qkv_bias and not found.config.out_bias
    bias = weights["layers_0"]["self_attn"]["k_proj"]["bias"]
    np.testing.assert_array_equal(bias, params["layers_0"]["self_attn"]["k_proj"]["bias"])
    change_config(tmp_path, qkv_bias=False)
    with pytest.raises(ValueError, match="says qkv_bias = False, but q_proj.bias is stored"):
        checkpoints.infer_config(tmp_path)


def test_the_bias_counts(tmp_path):
    """L1: a head whose bias is not 0 says something else without it."""
    model = eagle()
    params = random(model)
    heads.save(params, model, tmp_path, "base")
    _, found = checkpoints.load_any(tmp_path)
    assert float(jnp.abs(found["fc"]["bias"]).max()) > 0
    np.testing.assert_array_equal(found["fc"]["bias"], params["fc"]["bias"])


@pytest.mark.parametrize("change, said", [
    (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "missing: layers.0.mlp.up_proj.weight"),
    (lambda t: t.update({"norm.weight": np.ones(WIDTH, np.float32)}), "unexpected: norm.weight"),
    (lambda t: t.update({"fc.weight": np.ones((WIDTH, WIDTH), np.float32)}), r"misshapen: fc.weight"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change, said, tmp_path):
    """L5: nothing is made up, and nothing is left out."""
    model = eagle()
    heads.save(random(model), model, tmp_path, "base")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        checkpoints.load_any(tmp_path)


def test_heads_in_the_way_are_not_overwritten(tmp_path):
    model = medusa()
    heads.save(random(model), model, tmp_path, "base")
    with pytest.raises(ValueError, match="holds medusa_lm_head.safetensors already"):
        heads.save(random(model), model, tmp_path, "base")


# torch's files.


class Named:
    """Pickled as a name of another module, as torch's functions are."""

    def __init__(self, module, name, *arguments):
        self.path, self.arguments = (module, name), arguments


class Pickler(pickle._Pickler):
    """Writes what torch.save does, without torch."""

    def persistent_id(self, obj):
        return obj[1] if isinstance(obj, tuple) and obj and obj[0] == "persistent" else None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Named):
            self.write(pickle.GLOBAL + f"{obj.path[0]}\n{obj.path[1]}\n".encode())
            if obj.arguments:
                super().save(obj.arguments)
                self.write(pickle.REDUCE)
            return
        super().save(obj, save_persistent_id)


def torch_save(file, tensors):
    """A file as torch 2 writes it: a zip with a pickle of protocol 2, and every storage as a file."""
    buffer, storages, made = io.BytesIO(), {}, collections.OrderedDict()
    for i, (name, x) in enumerate(tensors.items()):
        storages[str(i)] = np.ascontiguousarray(x)
        pid = ("storage", Named("torch", "FloatStorage"), str(i), "cpu", x.size)
        strides = tuple(s // x.itemsize for s in storages[str(i)].strides)
        made[name] = Named(
            "torch._utils", "_rebuild_tensor_v2", ("persistent", pid), 0, x.shape, strides, False,
            collections.OrderedDict(),
        )  # fmt: skip
    Pickler(buffer, 2).dump(made)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        for key, x in storages.items():
            archive.writestr(f"archive/data/{key}", x.tobytes())


def test_torch_files_are_read_without_torch(tmp_path):
    model = medusa()
    params = random(model)
    heads.save(params, model, tmp_path / "a", "base")
    tensors = safetensors.numpy.load_file(tmp_path / "a" / heads.MEDUSA_FILES[0])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
    torch_save(tmp_path / "b" / "medusa_lm_head.pt", tensors)
    _, found = checkpoints.load_any(tmp_path / "b")
    equal(found, params)
    assert structure.shapes(found) == structure.shapes(model.abstract())


def test_a_torch_file_that_asks_for_more_is_refused(tmp_path):
    """Nothing in it is run."""
    file = tmp_path / "evil.pt"
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"x": Named("os", "system", f"touch {tmp_path / 'ran'}")})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
    with pytest.raises(ValueError, match="asks for os.system, which is no tensor"):
        torch_file.load(file)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_outside_of_its_storage_is_refused(tmp_path):
    file = tmp_path / "x.pt"
    torch_save(file, {"x": np.arange(8, dtype=np.float32).reshape(2, 4)})
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    for wrong in ((9, 4), (2, 9)):
        sizes = (
            [bytes(pickle.BININT1 + bytes([n])) for n in (2, 4)],
            [pickle.BININT1 + bytes([n]) for n in wrong],
        )
        changed = content["archive/data.pkl"]
        for old, new in zip(*sizes, strict=True):
            changed = changed.replace(old, new, 1)
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in (content | {"archive/data.pkl": changed}).items():
                archive.writestr(name, data)
        with pytest.raises(ValueError, match="does not lie in its storage"):
            torch_file.load(file)


def test_other_folders_are_no_heads(tmp_path):
    """Only names are read to see that, and what cannot be read is left to other readers."""
    (tmp_path / "config.json").write_text("{}")
    torch_save(tmp_path / "pytorch_model.bin", {"wte.weight": np.ones((2, 2), np.float32)})
    assert not heads.recognise(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"an older format")
    assert not heads.recognise(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint at"):
        checkpoints.load_any(tmp_path)


def test_a_model_of_its_own_is_no_head(tmp_path):
    model = decoders.tiny_llama()
    causal.save(decoders.init(model, 1), model, tmp_path / "m")
    with pytest.raises(ValueError, match="holds no heads but a Llama of its own"):
        system.Heads(str(tmp_path / "m")).of(TARGET, decoders.init(TARGET, 1))


@pytest.mark.parametrize("content", [b"", b"no zip at all"])
def test_other_files_are_refused(content, tmp_path):
    file = tmp_path / "x.pt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        torch_file.load(file)
