"""Llamas: rotary positions and their scaling, blocks against steps, batches, scans, tiles, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from specjax import Prompt, Sampling, generate
from specjax.decode import tree
from specjax.decode.interfaces import Block, TokenTree
from specjax.models import layers, llama, stack
from specjax.models.causal import Places
from specjax.models.llama import LlamaConfig, Rope
from specjax.partitioning import mesh as meshes
from specjax.partitioning import rules
from specjax.partitioning.rules import Partitioner
from tests import toys
from tests.models import decoders
from tests.models.decoders import tiny_llama

DYNAMIC = dict(rope=Rope("dynamic", 3.0, original_max_positions=16), max_positions=16)
VARIANTS = {
    "llama2": dict(num_kv_heads=4, head_dim=4),
    "llama3": dict(
        rope_theta=16.0, rope=Rope("llama3", 4.0, 1.0, 4.0, 32), tie_embeddings=True,
        qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "linear": dict(rope=Rope("linear", 2.5), activation="gelu_pytorch_tanh"),
    "dynamic": DYNAMIC,
    "qwen2": dict(qkv_bias=True, num_kv_heads=1),
}  # fmt: skip
WIDE = dict(dtype="float64")
each_variant = pytest.mark.parametrize("name", VARIANTS)
unrolled_and_two_scanned = pytest.mark.parametrize(
    ("name", "scan"), [*((name, False) for name in VARIANTS), ("llama3", True), ("dynamic", True)]
)


def variant(name, **changes):
    return tiny_llama(**VARIANTS[name] | changes)


# Configuration and parameters.


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@each_variant
def test_init_abstract_and_axes_agree(name, scan):
    model = variant(name, scan_layers=scan)
    made, abstract = jax.eval_shape(model.init, jax.random.key(0)), model.abstract()
    assert made == abstract
    axes = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    assert axes == jax.tree.map(lambda x: x.ndim, abstract)
    assert ("lm_head" in made) != model.config.tie_embeddings
    layer = made["layers"] if scan else made["layers_0"]
    biased = {
        path[-2].key for path, _ in jax.tree.leaves_with_path(layer) if path[-1].key == "bias"
    }
    c = model.config
    expected = {"q_proj", "k_proj", "v_proj"} if c.qkv_bias else set()
    expected |= {"o_proj"} if c.out_bias else set()
    assert biased == expected | ({"gate_proj", "up_proj", "down_proj"} if c.mlp_bias else set())


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 key and value heads do not divide 4 heads"):
        tiny_llama(num_kv_heads=3)
    with pytest.raises(ValueError, match="activation 'relu' is not one of silu"):
        tiny_llama(activation="relu")
    with pytest.raises(ValueError, match="'yarn' is not one of default, linear, dynamic, llama3"):
        Rope("yarn")


def test_a_model_starts_at_a_loss_near_that_of_chance():
    """Fresh parameters of a wider model, scanned or not, give almost flat laws."""
    for scan in (False, True):
        model = tiny_llama(emb_dim=64, num_layers=3, scan_layers=scan)
        params = jax.jit(model.init)(jax.random.key(0))
        law = jax.nn.log_softmax(decoders.forward(model, params, decoders.words(2, 9)), axis=-1)
        assert 0 < np.abs(law + np.log(toys.VOCAB)).max() < 1.5


# Rotary positions.


def turned(config, position, span, vector):
    """A head's vector at a position, by complex numbers, from the definition."""
    half = config.head_dim // 2
    base = config.rope_theta
    rope = config.rope
    if rope.kind == "dynamic" and span > rope.original_max_positions:
        grown = rope.factor * span / rope.original_max_positions - (rope.factor - 1)
        base *= grown ** (config.head_dim / (config.head_dim - 2))
    out = np.zeros(config.head_dim)
    for i in range(half):
        frequency = base ** (-2 * i / config.head_dim)
        if rope.kind == "linear":
            frequency /= rope.factor
        if rope.kind == "llama3":
            wave, longest = 2 * np.pi / frequency, rope.original_max_positions
            if wave > longest / rope.low_freq_factor:
                frequency /= rope.factor
            elif wave > longest / rope.high_freq_factor:
                smooth = longest / wave - rope.low_freq_factor
                smooth /= rope.high_freq_factor - rope.low_freq_factor
                frequency *= (1 - smooth) / rope.factor + smooth
        pair = complex(vector[i], vector[i + half]) * np.exp(1j * position * frequency)
        out[i], out[i + half] = pair.real, pair.imag
    return out


@pytest.mark.usefixtures("x64")
@each_variant
def test_rotation_is_that_of_the_definition(name):
    """Every position 0 .. 79, pairs (i, i + D/2), in float64."""
    config = variant(name, **WIDE).config
    position = jnp.arange(80, dtype=jnp.int32)[None]
    vectors = np.random.default_rng(0).normal(size=(80, config.head_dim))
    cos, sin = llama.rotary(config, Places(position, position + 1))
    found = llama.rotate(jnp.asarray(vectors)[None, None], cos, sin)[0, 0]
    expected = [turned(config, p, p + 1, vectors[p]) for p in range(80)]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_wave_is_kept_blended_or_stretched():
    """Llama 3.1's own numbers: of 64 waves the short ones are kept, the long ones divided by 8."""
    config = LlamaConfig(rope_theta=5e5, rope=Rope("llama3", 8.0, 1.0, 4.0, 8192))
    plain = llama._frequencies(dataclasses.replace(config, rope=Rope()))
    ratio = llama._frequencies(config) / plain
    wave = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wave < 2048], 1)
    np.testing.assert_allclose(ratio[wave > 8192], 1 / 8)
    between = (wave > 2048) & (wave < 8192)
    assert between.sum() == 6 and (wave < 2048).sum() == 29
    assert (ratio[between] > 1 / 8).all() and (ratio[between] < 1).all()
    assert (np.diff(ratio[between]) < 0).all()


def test_dynamic_scaling_begins_beyond_the_longest_text_and_goes_by_its_span():
    config = tiny_llama(**DYNAMIC).config
    plain = dataclasses.replace(config, rope=Rope())
    position = jnp.full((1, 4), 5, jnp.int32)
    span = jnp.asarray([[6, 16, 17, 40]], jnp.int32)
    found = np.arctan2(*llama.rotary(config, Places(position, span))[::-1])[0, 0, :, 1]
    still = np.arctan2(*llama.rotary(plain, Places(position, span))[::-1])[0, 0, :, 1]
    np.testing.assert_allclose(found[:2], still[:2], rtol=1e-6)
    assert still[2] > found[2] * 1.01 > found[3]


# Blocks against steps. All in float64, where a wrong position or mask cannot hide.

PROMPTS, LONG = ([5, 6, 7, 8, 9], [11, 12]), 34


@functools.cache
def read_long(model, seed=1):
    """(params, cache, logits, text): prompts of 5 and 2 tokens, then 34 tokens one by one."""
    params = decoders.init(model, seed)
    ask, text = toys.prompt(*PROMPTS), jnp.asarray(decoders.words(2, LONG, seed))
    text = text.at[:, 0].set(jnp.asarray([p[-1] for p in PROMPTS], jnp.int32))  # the newest token
    cache = decoders.prefill(model, params, ask, LONG + 8).cache
    assert cache.length.tolist() == [4, 1]
    return params, *decoders.steps(model, params, cache, text), text


@pytest.mark.usefixtures("x64")
@each_variant
def test_steps_equal_the_forward_pass(name):
    """Whole texts in one pass; with dynamic scaling as far as it is not in use."""
    model = variant(name, **WIDE)
    params, _, stepped, text = read_long(model)
    for row, prompt in enumerate(PROMPTS):
        whole = jnp.asarray([[*prompt[:-1], *text[row].tolist()]], jnp.int32)
        if name == "dynamic":
            whole = whole[:, :16]
        logits = decoders.forward(model, params, whole)[0, len(prompt) - 1 :]
        np.testing.assert_allclose(stepped[row, : logits.shape[0]], logits, atol=1e-12)
    assert stepped.dtype == jnp.float64 and stepped.std() > 0.3


@pytest.mark.usefixtures("x64")
@unrolled_and_two_scanned
def test_blocks_equal_steps(name, scan):
    """Invariant 8: 8-token blocks on ragged caches, everywhere across dynamic scaling's edge at 16
    and the waves of the others."""
    model = variant(name, **WIDE, scan_layers=scan)
    params, cache, stepped, text = read_long(model)
    for n in [0, 1, *range(4, 16), 20, 26]:
        block = decoders.chain(text[:, n : n + 8])
        behind = decoders.cut_back(model, cache, [4 + n, 1 + n])
        read = decoders.extend(model, params, behind, block)
        np.testing.assert_allclose(read.logits, stepped[:, n : n + 8], atol=1e-12)
        assert read.open.position.tolist() == [[b + n + i for i in range(8)] for b in (4, 1)]
    moved = decoders.extend(model, params, behind, block._replace(depth=block.depth * 2)).logits
    assert np.abs(moved - read.logits)[:, 1:].max() > 1e-3  # positions are not idle


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_a_chain_grown_in_open_slots_equals_steps(name, scan):
    """As a draft is made: tokens see uncommitted ones through open slots."""
    model = variant(name, **WIDE, scan_layers=scan)
    params, cache, stepped, text = read_long(model)
    n, opened = 9, model.open(2, 6)
    behind = decoders.cut_back(model, cache, [4 + n, 1 + n])
    for i in range(6):
        mask = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32) <= i, (2, 1, 6))
        block = Block(text[:, n + i : n + i + 1], jnp.full((2, 1), i, jnp.int32), mask)
        read = decoders.extend(model, params, behind, block, opened, i)
        np.testing.assert_allclose(read.logits[:, 0], stepped[:, n + i], atol=1e-12)
        opened = read.open


# Siblings, cousins, a node deeper than its neighbours, equal tokens in different branches.
PARENTS = [-1, -1, 0, 0, 1, 2, 5, 1, 4]
NODES = [5, 6, 7, 8, 7, 5, 9, 7, 30]


def node_paths():
    """Tokens from the root's first child down to each node."""
    paths = []
    for i, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), NODES[i]])
    return paths


@pytest.mark.usefixtures("x64")
@unrolled_and_two_scanned
def test_a_tree_equals_the_steps_of_each_path(name, scan):
    """C5, C7: siblings share a position and do not see each other; then one path is committed."""
    model = variant(name, **WIDE, scan_layers=scan)
    params, cache, _, text = read_long(model)
    parent, tokens = (jnp.asarray([x], jnp.int32) for x in (PARENTS, NODES))
    valid, paths = jnp.ones_like(parent, bool), node_paths()
    depth = max(map(len, paths))
    drafted = TokenTree(tokens, parent, valid, valid, None, parent * 0 - 1, depth=depth)
    n = 10  # the root stands at 14: the tree reaches over dynamic scaling's edge
    one = jax.tree.map(lambda x: x[:1], cache)
    behind = decoders.cut_back(model, one, [4 + n])
    read = decoders.extend(model, params, behind, tree.block(drafted, text[:1, n]))
    root = int(text[0, n])
    rows = jnp.asarray([[root, *path, *[2] * (depth - len(path))] for path in paths], jnp.int32)
    rows = jnp.pad(rows, ((0, 0), (0, 1)), constant_values=3)
    _, stepped = decoders.steps(model, params, decoders.repeated(behind, len(paths)), rows)
    expected = [stepped[0, 0], *[stepped[i, len(path)] for i, path in enumerate(paths)]]
    np.testing.assert_allclose(read.logits[0], jnp.stack(expected), atol=1e-12)
    # Nodes 0, 2, 5, 6 stand in open slots 1, 3, 6, 7: compacted behind the root.
    keep = jnp.asarray([[0, 1, 3, 6, 7]], jnp.int32)
    after = jax.jit(model.commit)(behind, read.open, keep, jnp.asarray([5], jnp.int32))
    assert paths[6] == [5, 7, 5, 9] and after.length.tolist() == [4 + n + 5]
    following = decoders.extend(model, params, after, decoders.chain([[3]])).logits
    np.testing.assert_allclose(following[0, 0], stepped[6, 5], atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_taps_of_a_block_are_those_of_the_prompt(scan):
    """What a layer read, and what the output layer reads; given only where they are asked for."""
    model = variant("llama3", **WIDE, scan_layers=scan)
    params, names = decoders.init(model, 2), ("layer_0", "layer_1", "final")
    text = decoders.words(1, 9)
    whole = decoders.prefill(model, params, toys.prompt(text[0].tolist()), 1, taps=names)
    assert set(whole.taps) == set(names)
    cache = decoders.prefill(model, params, toys.prompt(text[0, :5].tolist()), 9).cache
    read = decoders.extend(model, params, cache, decoders.chain(text[:, 4:]), taps=names)
    for name in names:
        np.testing.assert_allclose(read.taps[name], whole.taps[name][:, 4:], atol=1e-12)
    np.testing.assert_array_equal(
        read.taps["layer_0"], params["embed_tokens"]["weight"][text[:, 4:]]
    )
    logits = jax.jit(model.logits)(params, read.taps["final"])
    np.testing.assert_allclose(logits, read.logits, atol=1e-12)
    spared = decoders.extend(model, params, cache, decoders.chain(text[:, 4:]), logits_from=3)
    np.testing.assert_allclose(spared.logits, read.logits[:, 3:], atol=1e-12)
    assert spared.taps == {} and decoders.prefill(model, params, toys.prompt([5]), 2).taps == {}


def test_grouped_queries_are_repeated_keys():
    """Ainslie et al.: each key and value head serves its group of neighbouring query heads."""
    make = lambda seed, heads: jax.random.normal(jax.random.key(seed), (2, heads, 5, 4))  # noqa: E731
    query, key, value = make(0, 6), make(1, 2), make(2, 2)
    bias = layers.mask_bias(jnp.asarray(np.tri(5, dtype=bool)))[None, None]
    found = layers.attend_grouped(query, [(key, value, bias)])
    wide = [jnp.repeat(x, 3, axis=1) for x in (key, value)]
    np.testing.assert_allclose(found, layers.attend(query, [(*wide, bias)]), atol=1e-6)


# Decoding.

ASK = toys.ask(7)


def pair(model, seed=1, noise=0.1):
    """Parameters, and a draft's that agree with them most of the time."""
    params = decoders.init(model, seed)
    return params, decoders.noisy(params, seed, noise)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_speculative_greedy_text_is_the_plain_one(name):
    """Gamma 3 against a noisy copy: some drafts are accepted, some not."""
    model = variant(name, **WIDE)
    params, draft = pair(model)
    plain, fast = (decoders.decode(model, params, ASK, d) for d in (None, draft))
    for field in ("tokens", "lengths", "finish_reason"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(fast, field))
    accepted, tested = (int(x.sum()) for x in (fast.stats.accepted, fast.stats.tested))
    assert 0.1 * tested < accepted < tested
    decoders.check_counts(fast, 16)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_a_batch_of_unequal_prompts_is_its_rows(name):
    """H1, Must show 5: tokens and counts of each row, sampled and greedy, are those it has alone;
    what stands behind a prompt is never read."""
    model = variant(name, **WIDE)
    params, draft = pair(model)
    rows = dict(temperature=jnp.asarray([0.0, 1.0, 0.7, 1.0], jnp.float32))
    whole = decoders.decode(model, params, ASK, draft, sampling=Sampling(**rows))
    assert len(set(ASK.length.tolist())) == 4
    for row in range(4):
        one = Prompt(ASK.tokens[row : row + 1], ASK.length[row : row + 1])
        garbage = jnp.arange(6, dtype=jnp.int32)[None] >= one.length[:, None]
        one = one._replace(tokens=jnp.where(garbage, 1, one.tokens))
        sampling = Sampling(temperature=rows["temperature"][row : row + 1])
        ids = jnp.asarray([row], jnp.int32)
        alone = decoders.decode(model, params, one, draft, sampling=sampling, row_ids=ids)
        decoders.same_decode(alone, jax.tree.map(lambda x, row=row: x[row : row + 1], whole))
    if name == "llama3":
        return  # one more program would tell nothing new
    exact = toys.prompt(ASK.tokens[1, : int(ASK.length[1])].tolist())
    assert exact.tokens.shape[1] < 6
    ids, sampling = jnp.asarray([1], jnp.int32), Sampling(1.0)
    alone = decoders.decode(model, params, exact, draft, sampling=sampling, row_ids=ids)
    decoders.same_decode(alone, jax.tree.map(lambda x: x[1:2], whole))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_scanned_layers_decode_the_unrolled_text(name):
    """The same parameters in one array per kind: logits to rounding, text and counts exactly."""
    model, deep = variant(name, **WIDE), variant(name, **WIDE, scan_layers=True)
    params, draft = pair(model)
    tokens = jnp.asarray(decoders.words(2, 20))
    logits = decoders.forward(model, params, tokens)
    scanned = decoders.forward(deep, stack.pile(params), tokens)
    np.testing.assert_allclose(scanned, logits, atol=1e-12)
    options = dict(sampling=Sampling(1.0), key=jax.random.key(3))
    one = decoders.decode(model, params, ASK, draft, **options)
    other = decoders.decode(deep, stack.pile(params), ASK, stack.pile(draft), **options)
    decoders.same_decode(one, other)
    assert deep.unrolled == model and model.unrolled == model


@pytest.mark.usefixtures("x64", "long_vectors")
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_tiles_change_nothing(name, scan):
    """Untied and tied: the output layer is tiled, the table is not, and neither are scanned layers."""
    model = variant(name, **WIDE, scan_layers=scan)
    params, draft = pair(model)
    tiled = model.tile(params)
    assert tiled["lm_head"]["weight"].shape == (1, 16, 32)
    assert tiled["embed_tokens"]["weight"].shape == (32, 16)
    layer = tiled["layers"] if scan else tiled["layers_0"]
    assert layer["mlp"]["up_proj"]["weight"].shape == ((2, 32, 16) if scan else (1, 16, 32))
    tokens = jnp.asarray(decoders.words(2, 5))
    logits = decoders.forward(model, params, tokens)
    np.testing.assert_allclose(decoders.forward(model, tiled, tokens), logits, atol=1e-12)
    if not scan and name == "llama2":
        one = decoders.decode(model, params, ASK, draft)
        decoders.same_decode(one, decoders.decode(model, tiled, ASK, model.tile(draft)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_sampling_with_a_draft(name):
    """Temperature 1: the same key gives the same text, another one another; the reported law is that
    of the model read token by token; counts are sane."""
    model = variant(name, **WIDE)
    params, draft = pair(model)
    sample = lambda seed: decoders.decode(  # noqa: E731
        model, params, ASK, draft, sampling=Sampling(1.0), key=jax.random.key(seed)
    )
    one, again, other = sample(0), sample(0), sample(1)
    decoders.same_decode(one, again)
    assert (np.asarray(one.tokens) != np.asarray(other.tokens)).any()
    decoders.check_counts(one, 16)
    decoders.check_log_probs(model, params, ASK, one)
    accepted, tested, overlap = (
        float(x.sum()) for x in (one.stats.accepted, one.stats.tested, one.stats.overlap)
    )
    assert 0.3 < accepted / tested < 1 and abs(accepted - overlap) < 0.25 * tested


def test_bfloat16_activations_and_their_cache():
    """Logits stay float32, keys and values are bfloat16."""
    model = tiny_llama(dtype="bfloat16")
    params = decoders.init(tiny_llama(), 1)
    read = decoders.prefill(model, params, ASK, 4)
    assert {x.dtype for x in jax.tree.leaves(read.cache.kv)} == {jnp.dtype("bfloat16")}
    logits = decoders.forward(model, params, ASK.tokens)
    assert logits.dtype == jnp.float32
    exact = decoders.forward(tiny_llama(), params, ASK.tokens)
    assert 0 < np.abs(logits - exact).max() < 0.5


def test_a_forced_prefix_is_refused():
    model = tiny_llama()
    ask = ASK._replace(prefix=toys.prompt([3], [4], [5], [6]))
    with pytest.raises(ValueError, match="a decoder-only model has no forced prefix"):
        generate(model, decoders.init(model, 0), ask, max_decode_len=4)


def test_texts_may_grow_beyond_what_a_llama_was_trained_for():
    model = tiny_llama(max_positions=8)
    assert model.max_positions is None
    out = decoders.decode(model, decoders.init(model, 0), ASK, eos_id=-1)
    assert out.lengths.tolist() == [16] * 4


def test_the_output_holds_nothing_of_the_prompt():
    """K4: tokens of the prompt are not given back, and an EOS in it ends nothing."""
    model = tiny_llama()
    params = decoders.init(model, 3)
    ask = toys.prompt([0, 1, 5, 1], [7, 1, 1])
    out = decoders.decode(model, params, ask, steps=5)
    first = decoders.forward(model, params, ask.tokens)
    expected = [int(first[0, 3].argmax()), int(first[1, 2].argmax())]
    assert out.tokens[:, 0].tolist() == expected and (out.lengths > 0).all()


# Meshes.

HEADS = dict(num_heads=8, emb_dim=32, mlp_dim=64, head_dim=6, qkv_bias=True)


@pytest.mark.parametrize(
    ("kv_heads", "parts", "spec"),
    [(2, 4, P()), (2, 2, P("model")), (4, 4, P("model")), (1, 8, P())],
)
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_keys_and_values_are_split_by_whole_heads_or_not_at_all(kv_heads, parts, spec, scan):
    model = tiny_llama(**HEADS, num_kv_heads=kv_heads, scan_layers=scan)
    place = Partitioner(meshes.make(parts)).params(model)
    attention = (place["layers"] if scan else place["layers_1"])["self_attn"]
    layered = lambda spec: P(None, *spec) if scan and spec else spec  # noqa: E731
    assert attention["q_proj"]["weight"].spec == layered(P("model"))
    assert attention["q_proj"]["bias"].spec == layered(P("model"))
    assert attention["o_proj"]["weight"].spec == layered(P(None, "model"))
    for name in ("k_proj", "v_proj"):
        assert attention[name]["weight"].spec == layered(spec)
        assert attention[name]["bias"].spec == layered(spec)


def test_a_rule_for_grouped_heads_stands_among_t5x_s():
    assert ("grouped_kv", "model") in rules.standard()
    mesh = meshes.make(4)
    assert rules.spec(("grouped_kv", "embed"), (24, 16), rules.standard(), mesh) == P("model")


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("parts", "kv_heads", "scan"), [(4, 2, False), (8, 2, False), (4, 4, True)]
)
def test_every_mesh_decodes_the_single_device_s_tokens(parts, kv_heads, scan):
    """Float64, exactly, also where the mesh divides no key and value heads; temperatures 0 and 1."""
    model = tiny_llama(**HEADS, **WIDE, num_kv_heads=kv_heads, scan_layers=scan)
    params, draft = pair(model)
    ask = toys.ask(3, batch=8)
    sampling = Sampling(jnp.asarray([0.0, 1.0] * 4, jnp.float32))
    alone = decoders.decode(model, params, ask, draft, sampling=sampling)
    place = Partitioner(meshes.make(parts))
    apart = decoders.decode(
        model,
        jax.device_put(params, place.params(model)),
        jax.device_put(ask, place.rows),
        jax.device_put(draft, place.params(model)),
        sampling=sampling,
        mesh=place.mesh,
    )
    decoders.same_decode(alone, apart)
    assert alone.stats.accepted.sum() > 0
