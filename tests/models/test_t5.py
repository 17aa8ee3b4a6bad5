"""T5: parameters, the two ways to the same logits, positions, and the layers below."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import tree
from specjax.decode.interfaces import Block, Open, TokenTree
from specjax.models import cache as caches
from specjax.models import layers, t5
from specjax.models.cache import Cache
from specjax.models.t5 import T5Config
from tests import toys

V1_0 = dict(mlp_activations=("relu",), logits_via_embedding=True)
VARIANTS = {
    "v1.1": {},
    "v1.0": V1_0,
    "per-layer bias, unequal depths": dict(shared_relative_bias=False, num_decoder_layers=2),
}
each_variant = pytest.mark.parametrize("name", VARIANTS)
PROMPT = toys.prompt([5, 6, 7, 8, 1], [9, 10, 1])


@functools.partial(jax.jit, static_argnums=(0, 3))
def prefill(model, params, ask, slots):
    return model.prefill(params, ask, slots).cache


@functools.partial(jax.jit, static_argnums=0)
def extend(model, params, cache, block, open=None, at=0):
    return model.extend(params, cache, block, open, at)


@functools.partial(jax.jit, static_argnums=0)
def commit(model, cache, open, keep, count):
    return model.commit(cache, open, keep, count)


def chain_block(tokens):
    """A causal block of these tokens ``[B, M]``."""
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, width = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    mask = jnp.broadcast_to(jnp.asarray(np.tri(width, dtype=bool)), (batch, width, width))
    return Block(tokens, depth, mask)


def words(batch, steps, seed=0):
    """Random outputs ``[B, T]``."""
    return np.random.default_rng(seed).integers(2, toys.VOCAB, (batch, steps)).astype(np.int32)


def text_of(outputs):
    """What a decoder reads: the start token, then all outputs but the last."""
    return np.concatenate([np.zeros_like(outputs[:, :1]), outputs[:, :-1]], axis=1)


def committed(model, params, ask, text, count, slots):
    """A cache that holds the first ``count[b]`` tokens of ``text``; any count, one program."""
    cache = prefill(model, params, ask, slots)
    read = extend(model, params, cache, chain_block(text))
    keep = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32), text.shape)
    return commit(model, cache, read.open, keep, jnp.asarray(count, jnp.int32))


# Parameters.


@each_variant
def test_init_abstract_and_axes_agree(name):
    """K2, L10: one structure and one shape; an axis name per dimension; tied models lack a head."""
    model = toys.tiny_t5(**VARIANTS[name])
    made, abstract = jax.eval_shape(model.init, jax.random.key(0)), model.abstract()
    assert made == abstract
    axes = model.logical_axes()
    ranks = jax.tree.map(lambda x: x.ndim, abstract)
    assert ranks == jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert ("logits_dense" in made["decoder"]) != model.config.logits_via_embedding
    assert model.abstract(jnp.bfloat16)["token_embedder"]["embedding"].dtype == jnp.bfloat16


def test_depths_and_bias_owners_follow_the_config():
    """L9: encoder and decoder depths are their own; one bias per stack, or one per layer."""
    shared = toys.tiny_t5(num_encoder_layers=2, num_decoder_layers=3).abstract()
    count = lambda stack: sum(name.startswith("layers_") for name in stack)  # noqa: E731
    assert (count(shared["encoder"]), count(shared["decoder"])) == (2, 3)
    assert "relpos_bias" in shared["decoder"]
    assert "relpos_bias" not in shared["decoder"]["layers_0"]
    own = toys.tiny_t5(num_decoder_layers=3, shared_relative_bias=False).abstract()
    assert "relpos_bias" not in own["decoder"]
    assert all("relpos_bias" in own["decoder"][f"layers_{i}"] for i in range(3))


def test_unknown_activations_are_named():
    """L9: refused when the config is made."""
    with pytest.raises(ValueError, match="swish"):
        T5Config(mlp_activations=("swish",))
    assert T5Config(mlp_activations=["gelu", "linear"]).mlp_activations == ("gelu", "linear")


@pytest.mark.parametrize("tied, factor", [(True, 16**-0.5), (False, 1)])
def test_tied_logits_are_scaled(tied, factor):
    """L10: logits = (h d^-1/2) E^T in v1.0; a head of its own, unscaled, in v1.1."""
    config = toys.tiny_t5(logits_via_embedding=tied).config
    table, head = (jax.random.normal(jax.random.key(i), (32, 16)) for i in (1, 2))
    params = {
        "token_embedder": {"embedding": table},
        "decoder": {"logits_dense": {"weight": head}},
    }
    hidden = jax.random.normal(jax.random.key(3), (2, 3, 16))
    expected = factor * np.asarray(hidden) @ np.asarray(table if tied else head).T
    np.testing.assert_allclose(t5.project_logits(config, params, hidden), expected, atol=1e-5)


# Forward, steps and blocks.


@functools.partial(jax.jit, static_argnums=0)
def read_in_every_way(model, params, ask, text):
    """Logits of the text read token by token, and of 4-token blocks behind 5 and 2 tokens of it."""
    one, steps = jnp.ones(2, jnp.int32), text.shape[1]

    def step(cache, token):
        read = model.extend(params, cache, chain_block(token[:, None]))
        return model.commit(cache, read.open, 0 * one[:, None], one), read.logits[:, 0]

    cache = model.prefill(params, ask, steps + 4).cache
    cache, stepped = jax.lax.scan(step, cache, text.T)
    cache = model.rewind(cache, jnp.asarray([5, 2], jnp.int32))
    block = chain_block(jnp.stack([text[0, 5:9], text[1, 2:6]]))
    whole = model.extend(params, cache, block).logits
    spared = model.extend(params, cache, block, logits_from=1).logits
    return stepped.transpose(1, 0, 2), whole, spared


@each_variant
def test_steps_and_blocks_equal_the_teacher_forced_forward(name):
    """Invariant 8: one token at a time, then a block on a ragged cache; logits to 1e-5."""
    model = toys.tiny_t5(**VARIANTS[name])
    params, outputs = toys.init(model, 1), words(2, 9)
    expected = toys.teacher_forced(model, params, PROMPT, outputs)
    stepped, whole, spared = read_in_every_way(model, params, PROMPT, text_of(outputs))
    np.testing.assert_allclose(stepped, expected, atol=1e-5)
    np.testing.assert_allclose(whole[0], expected[0, 5:9], atol=1e-5)
    np.testing.assert_allclose(whole[1], expected[1, 2:6], atol=1e-5)
    np.testing.assert_allclose(spared, whole[:, 1:], atol=1e-6)


# Long enough for every bucket of 32 up to distance 128 and beyond.
LONG, WIDTH = 142, 8
EDGES = sorted({n + d for n in (0, 8, 16, 32, 64, 128) for d in (-3, -1, 0, 1)} - {-3, -1})


@pytest.fixture(scope="module")
def long_decode():
    """(model, params, text, teacher-forced logits) of one row of 142 tokens."""
    model = toys.tiny_t5(emb_dim=8, head_dim=4, mlp_dim=8)
    params, outputs = toys.init(model, 2), words(1, LONG, seed=1)
    ask = toys.prompt([5, 6, 1])
    return model, params, ask, text_of(outputs), toys.teacher_forced(model, params, ask, outputs)


def test_blocks_at_bucket_edges_have_the_positions_of_their_depth(long_decode):
    """Invariant 8, C7: an 8-token block behind 0 .. 130 committed tokens equals the forward."""
    model, params, ask, text, expected = long_decode
    for n in [*EDGES, 125, 130]:
        cache = committed(model, params, ask, text, [n], slots=2 * LONG)
        read = extend(model, params, cache, chain_block(text[:, n : n + WIDTH]))
        np.testing.assert_allclose(read.logits[0], expected[0, n : n + WIDTH], atol=1e-5)
    # Another position is another answer: the bias is not idle.
    moved = chain_block(text[:, n : n + WIDTH])
    moved = moved._replace(depth=moved.depth * 3)
    wrong = extend(model, params, cache, moved).logits
    assert np.abs(wrong - read.logits)[0, 1:].max() > 1e-3


def test_a_chain_grown_in_open_slots_equals_committed_steps(long_decode):
    """Invariant 8: tokens that see uncommitted ones through open slots, across edge 16 and 32."""
    model, params, ask, text, expected = long_decode
    for n in (13, 29):
        cache = committed(model, params, ask, text, [n], slots=2 * LONG)
        opened = model.open(1, WIDTH)
        for i in range(WIDTH):
            token = jnp.asarray(text[:, n + i : n + i + 1])
            mask = jnp.arange(WIDTH, dtype=jnp.int32)[None, None] <= i
            read = extend(
                model, params, cache, Block(token, jnp.full((1, 1), i, jnp.int32), mask), opened, i
            )
            np.testing.assert_allclose(read.logits[0, 0], expected[0, n + i], atol=1e-5)
            opened = read.open
        assert opened.position[0].tolist() == list(range(n, n + WIDTH))


def test_a_branching_block_equals_the_forward_of_each_path():
    """C5, C7: parents [-1, -1, 0, 0, 1] behind 4 tokens; then nodes 1 and 4 are committed."""
    model = toys.tiny_t5()
    params, ask = toys.init(model, 3), toys.prompt([5, 6, 7, 1])
    prefix, root, nodes = [0, 4, 9, 12], 3, [5, 6, 7, 8, 9]
    parent = jnp.asarray([[-1, -1, 0, 0, 1]], jnp.int32)
    valid = jnp.ones((1, 5), bool)
    tokens = jnp.asarray([nodes], jnp.int32)
    drafted = TokenTree(tokens, parent, valid, valid, None, parent * 0 - 1, depth=2)
    block = tree.block(drafted, jnp.asarray([root], jnp.int32))
    cache = committed(model, params, ask, np.asarray([prefix]), [4], slots=16)
    read = extend(model, params, cache, block)
    assert (block.depth[0] + 4).tolist() == [4, 5, 5, 6, 6, 6]
    assert read.open.position[0].tolist() == [4, 5, 5, 6, 6, 6]
    paths = [[], [5], [6], [5, 7], [5, 8], [6, 9]]
    outputs = [[*prefix[1:], root, *path] for path in paths] + [[*prefix[1:], root, 6, 9, 2]]
    forward = [
        toys.teacher_forced(model, params, ask, np.asarray([[*x, *[0] * (8 - len(x))]]))[0, len(x)]
        for x in outputs
    ]
    np.testing.assert_allclose(read.logits[0], np.stack(forward[:-1]), atol=1e-5)
    # Root, node 1 and node 4 stand in block slots 0, 2 and 5: compacted, not left where they lay.
    keep = jnp.asarray([[0, 2, 5]], jnp.int32)
    after = commit(model, cache, read.open, keep, jnp.asarray([3], jnp.int32))
    stepped = extend(model, params, after, chain_block([[2]])).logits
    np.testing.assert_allclose(stepped[0, 0], forward[-1], atol=1e-5)


def test_padding_in_the_encoder_changes_nothing():
    """O3: 5 and 3 tokens padded to 9 with ids of real tokens: the same logits."""
    model = toys.tiny_t5()
    params, outputs = toys.init(model, 4), words(2, 9)
    garbage = jnp.arange(9, dtype=jnp.int32)[None] >= PROMPT.length[:, None]
    tokens = jnp.where(garbage, 17, jnp.pad(PROMPT.tokens, ((0, 0), (0, 4))))
    padded = toys.teacher_forced(model, params, PROMPT._replace(tokens=tokens), outputs)
    expected = toys.teacher_forced(model, params, PROMPT, outputs)
    np.testing.assert_allclose(padded, expected, atol=1e-5)
    longer = PROMPT._replace(tokens=tokens, length=PROMPT.length + 1)
    seen = toys.teacher_forced(model, params, longer, outputs)
    assert np.abs(seen - expected).max() > 1e-2  # one more token is seen


# The cache.


def test_lengths_are_ragged_and_rows_write_where_they_end():
    """E6: rows of different lengths write to different slots; a rewritten slot holds the new."""
    cache = Cache(caches.empty_kv(1, (2, 1, 9, 1), jnp.float32), jnp.asarray([5, 2], jnp.int32))
    model, slots = toys.tiny_t5(), jnp.zeros((2, 1), jnp.int32)

    def write(cache, value):
        kv = jnp.full((2, 1, 1, 1), value, jnp.float32)
        return commit(model, cache, Open(((kv, kv),), slots), slots, jnp.ones(2, jnp.int32))

    once = write(cache, 1)
    again = write(model.rewind(once, jnp.asarray([5, 2], jnp.int32)), 2)
    key = np.asarray(again.kv[0][0])[:, 0, :, 0]
    assert key[0].tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0]
    assert key[1].tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert again.length.tolist() == [6, 3]


def test_count_zero_freezes_a_row_and_rewind_never_raises():
    """E1, H4: nothing of a frozen row below its length changes; rewind only lowers."""
    kv = jax.random.normal(jax.random.key(0), (2, 1, 9, 1))
    cache = Cache(((kv, kv),), jnp.asarray([4, 4], jnp.int32))
    fresh = jnp.ones((2, 1, 3, 1))
    keep = jnp.asarray([[0, 2, 1]] * 2, jnp.int32)
    opened = Open(((fresh, fresh),), keep)
    after = caches.commit(cache, opened, keep, jnp.asarray([0, 2], jnp.int32))
    assert after.length.tolist() == [4, 6]
    np.testing.assert_array_equal(after.kv[0][0][:, :, :4], kv[:, :, :4])
    lower = caches.rewind(after, jnp.asarray([9, 5], jnp.int32))
    assert lower.length.tolist() == [4, 5]


def test_dynamic_update_slice_shifts_a_write_that_does_not_fit():
    """E7: the fact behind the room that every buffer has."""
    buffer = jax.lax.dynamic_update_slice(jnp.arange(5), -jnp.arange(1, 4), (4,))
    assert buffer.tolist() == [0, 1, -1, -2, -3]


# Layers.


def t5x_bucket(relative_position, bidirectional, num_buckets=32, max_distance=128):
    """T5X's formula, in float32 as XLA evaluates it."""
    ret, n = 0, -relative_position
    if bidirectional:
        num_buckets //= 2
        ret += (n < 0).astype(np.int32) * num_buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    max_exact = num_buckets // 2
    is_small = n < max_exact
    with np.errstate(divide="ignore"):
        large = max_exact + (
            np.log(n.astype(np.float32) / np.float32(max_exact) + np.finfo(np.float32).eps)
            / np.float32(np.log(max_distance / max_exact))
            * np.float32(num_buckets - max_exact)
        ).astype(np.int32)
    return ret + np.where(is_small, n, np.minimum(large, num_buckets - 1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, farthest", [(32, 128), (32, 64), (16, 128)])
def test_relative_buckets_are_t5x_s(bidirectional, buckets, farthest):
    """L9, invariant 8: every distance 0 .. 599 in both directions."""
    relative = np.arange(-599, 600, dtype=np.int32)
    got = layers.relative_buckets(jnp.asarray(relative), buckets, farthest, bidirectional)
    expected = t5x_bucket(relative, bidirectional, buckets, farthest)
    np.testing.assert_array_equal(got, expected)
    assert len(set(expected.tolist())) == (buckets if not bidirectional else buckets - 1)


def test_relative_buckets_at_known_distances():
    """L9: values worked out from the paper's rule, causal, 32 buckets, 128 positions."""
    far = -jnp.asarray([0, 1, 15, 16, 18, 19, 127, 128, 500], jnp.int32)
    got = layers.relative_buckets(far, 32, 128, bidirectional=False)
    assert got.tolist() == [0, 1, 15, 16, 16, 17, 31, 31, 31]
    assert layers.relative_buckets(jnp.asarray([1, 9], jnp.int32), 32, 128, False).tolist() == [
        0,
        0,
    ]


@pytest.mark.parametrize("rows", [*range(1, 21)])
def test_linear_is_the_product_for_every_row_count(rows):
    """D2: fused on this CPU for some row counts, a dot for others; the same numbers."""
    x = jax.random.normal(jax.random.key(rows), (rows, 12))
    weight = jax.random.normal(jax.random.key(0), (7, 12))
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got = jax.jit(layers.linear)(x, weight)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 64, 65])
@pytest.mark.parametrize("outputs, width", [(64, 64), (96, 32), (48, 16), (24, None)])
def test_linear_takes_tiled_weights(rows, outputs, width):
    """D2: the layout changes no number; outputs that no tile divides stay as they are."""
    x = jax.random.normal(jax.random.key(rows), (rows, 1, 12))
    weight = jax.random.normal(jax.random.key(0), (outputs, 12))
    tiled = layers.in_tiles(weight)
    assert tiled.shape == ((outputs // width, 12, width) if width else weight.shape)
    got = jax.jit(layers.linear)(x, tiled)
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(weight).T, atol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3), (16,), (17,), (1, 8)])
def test_linear_keeps_leading_axes_and_float64(shape):
    """Invariant 10: float64 in, float64 out, to its precision."""
    x = jax.random.normal(jax.random.key(1), (*shape, 12), jnp.float64)
    weight = jax.random.normal(jax.random.key(2), (7, 12), jnp.float64)
    got = jax.jit(layers.linear)(x, weight)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(weight).T, atol=1e-13)


def test_linear_accumulates_in_the_type_asked_for():
    """Invariant 10: bfloat16 operands, float32 logits, fused or not."""
    for rows in (1, 4, 20):
        x = jax.random.normal(jax.random.key(3), (rows, 64)).astype(jnp.bfloat16)
        weight = jax.random.normal(jax.random.key(4), (5, 64)).astype(jnp.bfloat16)
        got = jax.jit(functools.partial(layers.linear, dtype=jnp.float32))(x, weight)
        expected = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_attention_over_two_sources_is_one_softmax():
    """Section 3: cache and open slots together equal their concatenation; masked slots nothing."""
    keys = jax.random.split(jax.random.key(5), 3)
    query, key, value = (jax.random.normal(k, (2, 2, 7, 4)) for k in keys)
    bias = layers.mask_bias(jnp.asarray(np.tri(7, dtype=bool)))[None, None]
    whole = layers.attend(query, [(key, value, bias)])
    cut = [(key[:, :, a:b], value[:, :, a:b], bias[..., a:b]) for a, b in ((0, 4), (4, 7))]
    np.testing.assert_allclose(layers.attend(query, cut), whole, atol=1e-6)
    first = layers.attend(query, cut)[:, :, 0]
    np.testing.assert_allclose(first, value[:, :, 0], atol=1e-6)


# A decoder without an encoder of its own.

SHARING = dict(num_encoder_layers=0, encoded_dim=16)


def test_a_decoder_on_its_own_encoder_output_is_the_whole_model():
    """The encoder's output taken out by a tap and given back changes nothing."""
    whole = toys.tiny_t5()
    half = toys.tiny_t5(num_encoder_layers=0, encoded_dim=whole.config.emb_dim)
    params = toys.init(whole, 0)
    rest = {name: params[name] for name in ("token_embedder", "decoder")}
    assert jax.tree.structure(half.abstract()) == jax.tree.structure(rest)
    outputs = words(2, 5)
    read = whole.prefill(params, PROMPT, 8, taps=("encoded",))
    own = half.prefill(rest, PROMPT, 8, encoded=read.taps["encoded"])
    for a, b in zip(jax.tree.leaves(read.cache), jax.tree.leaves(own.cache), strict=True):
        np.testing.assert_array_equal(a, b)
    mask = jnp.arange(PROMPT.tokens.shape[1], dtype=jnp.int32)[None] < PROMPT.length[:, None]
    inputs = (PROMPT.tokens, mask, jnp.asarray(text_of(outputs)))
    np.testing.assert_array_equal(
        half.forward(rest, *inputs, read.taps["encoded"]), whole.forward(params, *inputs)
    )


def test_a_prefill_gives_only_the_taps_asked_for():
    model = toys.tiny_t5()
    params = toys.init(model, 0)
    assert model.prefill(params, PROMPT, 8).taps == {}
    chain = chain_block(words(2, 3))
    cache = model.prefill(params, PROMPT, 8).cache
    read = model.extend(params, cache, chain, taps=("encoded", "final"))
    assert set(read.taps) == {"final"}  # the encoder's output came with the prefill


def test_a_decoder_without_encoder_says_what_it_lacks():
    model = toys.tiny_t5(**SHARING)
    params = toys.init(model, 0)
    with pytest.raises(ValueError, match="no encoder"):
        model.prefill(params, PROMPT, 8)
    with pytest.raises(ValueError, match="width 16 .*the target's has 8"):
        model.prefill(params, PROMPT, 8, encoded=jnp.zeros((2, 5, 8)))
    with pytest.raises(ValueError, match="encoder layers"):
        T5Config(num_encoder_layers=1, encoded_dim=16)
