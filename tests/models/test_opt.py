"""OPTs: learned positions and their end, norms before and behind, blocks against steps, batches,
scans, tiles, meshes; and drafts of the other family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, generate, stream
from specjax.decode import tree
from specjax.decode.interfaces import Block, TokenTree
from specjax.models import opt, stack
from specjax.models.opt import Opt, OptConfig
from specjax.partitioning import mesh as meshes
from specjax.partitioning.rules import Partitioner
from tests import toys
from tests.models import decoders
from tests.models.decoders import tiny_llama, tiny_opt

VARIANTS = {"125m": {}, "350m": dict(norm_first=False, word_dim=12)}
WIDE = dict(dtype="float64")
each_variant = pytest.mark.parametrize("name", VARIANTS)
each_layout = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])


def variant(name, **changes) -> Opt:
    return tiny_opt(**VARIANTS[name] | changes)


def pair(model, seed=1, noise=0.1):
    """Parameters, and a draft's that agree with them most of the time."""
    params = decoders.init(model, seed)
    return params, decoders.noisy(params, seed, noise)


# Configuration and parameters.


@each_layout
@each_variant
def test_init_abstract_and_axes_agree(name, scan):
    """350m projects into the model and out of it, and has no norm at the end."""
    model = variant(name, scan_layers=scan)
    made, abstract = jax.eval_shape(model.init, jax.random.key(0)), model.abstract()
    assert made == abstract
    axes = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    assert axes == jax.tree.map(lambda x: x.ndim, abstract)
    own = {"final_layer_norm"} if name == "125m" else {"project_in", "project_out"}
    layers = {"layers"} if scan else {"layers_0", "layers_1"}
    assert set(made) == own | layers | {"embed_tokens", "embed_positions"}
    assert made["embed_positions"]["weight"].shape == (64 + opt.OFFSET, 16)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="3 heads do not divide width 16"):
        tiny_opt(num_heads=3)


@each_variant
def test_norms_stand_before_or_behind(name):
    """One layer of one token against NumPy: 125m norms what a sublayer reads, 350m what it adds to."""
    model = variant(name, num_layers=1)
    c, params = model.config, jax.tree.map(np.asarray, decoders.init(model, 4))
    layer, token = params["layers_0"], 7
    norm = lambda w, x: (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w["weight"] + w["bias"]  # noqa: E731
    dense = lambda w, x: w["weight"] @ x + w.get("bias", 0)  # noqa: E731

    def attended(x):  # a token alone reads its own value
        return dense(layer["self_attn"]["out_proj"], dense(layer["self_attn"]["v_proj"], x))

    def fed(x):
        return dense(layer["fc2"], np.maximum(dense(layer["fc1"], x), 0))

    x = params["embed_tokens"]["weight"][token]
    x = dense(params["project_in"], x) if name == "350m" else x
    x = x + params["embed_positions"]["weight"][opt.OFFSET]
    first, second = layer["self_attn_layer_norm"], layer["final_layer_norm"]
    if c.norm_first:
        x = x + attended(norm(first, x))
        x = norm(params["final_layer_norm"], x + fed(norm(second, x)))
    else:
        x = norm(first, x + attended(x))
        x = dense(params["project_out"], norm(second, x + fed(x)))
    logits = decoders.forward(model, params, jnp.asarray([[token]], jnp.int32))
    np.testing.assert_allclose(logits[0, 0], params["embed_tokens"]["weight"] @ x, atol=1e-5)


# Positions and their end.


def test_a_position_is_the_row_two_below(getkey):
    """The table's first two rows stand for no position and are never read; every other one is."""
    model = tiny_opt(max_positions=9)
    params = decoders.init(model, 0)
    tokens = jnp.asarray(decoders.words(1, 9))
    logits = decoders.forward(model, params, tokens)
    table = params["embed_positions"]["weight"]
    for row in range(11):
        other = table.at[row].add(jax.random.normal(getkey(), (16,)))
        changed = decoders.forward(model, params | {"embed_positions": {"weight": other}}, tokens)
        first = max(row - opt.OFFSET, 0) if row >= opt.OFFSET else 9
        np.testing.assert_array_equal(changed[0, :first], logits[0, :first])
        assert (np.abs(changed - logits)[0, first:].max(-1) > 1e-4).all()


@pytest.mark.parametrize("call", [generate, stream])
def test_a_text_beyond_the_last_position_is_refused(call):
    """F3: position 2048 of a real OPT, never the row of position 2047."""
    model = Opt(OptConfig(emb_dim=8, word_dim=8, num_layers=1, num_heads=1, mlp_dim=8))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), model.abstract())
    ask = Prompt(jnp.zeros((2, 2000), jnp.int32), jnp.asarray([3, 1999], jnp.int32))
    with pytest.raises(
        ValueError,
        match="prompt and max_decode_len together are 2049 tokens, the model has positions for 2048",
    ):
        call(model, params, ask, max_decode_len=50)


def test_under_jit_a_prompt_is_as_long_as_its_width():
    """Lengths are unknown there: what could be too long is refused."""
    model = tiny_opt(max_positions=16)
    params, ask = decoders.init(model, 0), toys.prompt([5, 6], [7], width=6)
    decode = lambda length, steps: generate(  # noqa: E731
        model, params, ask._replace(length=length), max_decode_len=steps
    )
    inside = jax.jit(decode, static_argnums=1)
    np.testing.assert_array_equal(inside(ask.length, 10).tokens, decode(ask.length, 10).tokens)
    assert decode(ask.length, 14).tokens.shape == (2, 14)
    with pytest.raises(ValueError, match="are 17 tokens, the model has positions for 16"):
        inside(ask.length, 11)


@pytest.mark.usefixtures("x64")
def test_a_text_up_to_the_last_position():
    """The last token is read at the last position but one, and blocks that reach past the end, whose
    drafts the limit cuts, disturb nothing: prompts 6 .. 3 long, 10 tokens more, 16 positions."""
    model = tiny_opt(**WIDE, max_positions=16)
    params, draft = pair(model)
    ask = toys.ask(7)._replace(length=jnp.asarray([6, 5, 4, 3], jnp.int32))
    options = dict(steps=10, eos_id=-1)
    plain, fast = (decoders.decode(model, params, ask, d, **options) for d in (None, draft))
    assert plain.lengths.tolist() == [10] * 4
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    whole = jnp.concatenate([ask.tokens[:1], plain.tokens[:1]], axis=1)
    logits = decoders.forward(model, params, whole)  # all 16 positions
    np.testing.assert_array_equal(logits[0, 5:-1].argmax(-1), plain.tokens[0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [10, 12, 14])
def test_a_draft_with_fewer_positions_than_the_target(width):
    """F1: target 20, draft 12, gamma 3: the target's own text, of which the draft, that agrees as far as
    its table goes, drafts what comes from positions 0 .. 11 and nothing more."""
    model, small = tiny_opt(**WIDE, max_positions=20), tiny_opt(**WIDE, max_positions=12)
    params = decoders.init(model, 1)
    draft = params | {"embed_positions": {"weight": params["embed_positions"]["weight"][:14]}}
    ask = Prompt(jnp.asarray(decoders.words(3, width)), jnp.full((3,), width, jnp.int32))
    options = dict(steps=6, eos_id=-1)
    plain = decoders.decode(model, params, ask, **options)
    fast = decoders.decode(model, params, ask, draft, drafter=small, **options)
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    # Prompt 10: drafts for slots 10, 11, 12, then the bonus in 13. Prompt 12: one draft, for slot 12.
    drafted = max(0, 13 - width)
    assert fast.stats.drafted.tolist() == fast.stats.accepted.tolist() == [drafted] * 3
    plain_rounds = 6 - drafted - (drafted > 0)
    assert fast.stats.rounds_plain.tolist() == [plain_rounds] * 3
    assert fast.stats.rounds.tolist() == [plain_rounds + (drafted > 0)] * 3


# Blocks against steps, in float64.

PROMPTS, LONG = ([5, 6, 7, 8, 9], [11, 12]), 34


@functools.cache
def read_long(model, seed=1):
    """(params, cache, logits, text): prompts of 5 and 2 tokens, then 34 tokens one by one."""
    params = decoders.init(model, seed)
    ask, text = toys.prompt(*PROMPTS), jnp.asarray(decoders.words(2, LONG, seed))
    text = text.at[:, 0].set(jnp.asarray([p[-1] for p in PROMPTS], jnp.int32))  # the newest token
    cache = decoders.prefill(model, params, ask, LONG + 8).cache
    return params, *decoders.steps(model, params, cache, text), text


@pytest.mark.usefixtures("x64")
@each_layout
@each_variant
def test_blocks_equal_steps_and_the_forward_pass(name, scan):
    """Invariant 8: 8-token blocks on ragged caches."""
    model = variant(name, **WIDE, scan_layers=scan)
    params, cache, stepped, text = read_long(model)
    for row, prompt in enumerate(PROMPTS):
        whole = jnp.asarray([[*prompt[:-1], *text[row].tolist()]], jnp.int32)
        logits = decoders.forward(model, params, whole)[0, len(prompt) - 1 :]
        np.testing.assert_allclose(stepped[row], logits, atol=1e-12)
    assert stepped.dtype == jnp.float64 and stepped.std() > 0.3
    for n in (0, 1, 5, 13, 26):
        block = decoders.chain(text[:, n : n + 8])
        behind = decoders.cut_back(model, cache, [4 + n, 1 + n])
        read = decoders.extend(model, params, behind, block)
        np.testing.assert_allclose(read.logits, stepped[:, n : n + 8], atol=1e-12)
    moved = decoders.extend(model, params, behind, block._replace(depth=block.depth + 1)).logits
    assert np.abs(moved - read.logits).max() > 1e-3  # positions are not idle


@pytest.mark.usefixtures("x64")
@each_layout
@each_variant
def test_a_tree_equals_the_steps_of_each_path(name, scan):
    """C5, C7: parents [-1, -1, 0, 0, 1]; then nodes 1 and 4 are committed."""
    model = variant(name, **WIDE, scan_layers=scan)
    params, cache, _, text = read_long(model)
    nodes, n = [5, 6, 7, 8, 9], 6
    parent, tokens = (jnp.asarray([x], jnp.int32) for x in ([-1, -1, 0, 0, 1], nodes))
    valid = jnp.ones_like(parent, bool)
    drafted = TokenTree(tokens, parent, valid, valid, None, parent * 0 - 1, depth=2)
    behind = decoders.cut_back(model, jax.tree.map(lambda x: x[:1], cache), [4 + n])
    read = decoders.extend(model, params, behind, tree.block(drafted, text[:1, n]))
    paths = [[5, 0, 0], [6, 9, 2], [5, 7, 0], [5, 8, 0]]
    rows = jnp.asarray([[int(text[0, n]), *path] for path in paths], jnp.int32)
    _, stepped = decoders.steps(model, params, decoders.repeated(behind, 4), rows)
    expected = [stepped[0, 0], stepped[0, 1], stepped[1, 1], stepped[2, 2], stepped[3, 2]]
    expected.append(stepped[1, 2])
    np.testing.assert_allclose(read.logits[0], jnp.stack(expected), atol=1e-12)
    keep, count = jnp.asarray([[0, 2, 5]], jnp.int32), jnp.asarray([3], jnp.int32)
    after = jax.jit(model.commit)(behind, read.open, keep, count)
    following = decoders.extend(model, params, after, decoders.chain([[2]])).logits
    np.testing.assert_allclose(following[0, 0], stepped[1, 3], atol=1e-12)


@pytest.mark.usefixtures("x64")
@each_variant
def test_a_chain_grown_in_open_slots_equals_steps(name):
    model = variant(name, **WIDE)
    params, cache, stepped, text = read_long(model)
    n, opened = 9, model.open(2, 6)
    behind = decoders.cut_back(model, cache, [4 + n, 1 + n])
    for i in range(6):
        mask = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32) <= i, (2, 1, 6))
        block = Block(text[:, n + i : n + i + 1], jnp.full((2, 1), i, jnp.int32), mask)
        read = decoders.extend(model, params, behind, block, opened, i)
        np.testing.assert_allclose(read.logits[:, 0], stepped[:, n + i], atol=1e-12)
        opened = read.open


@pytest.mark.usefixtures("x64")
@each_variant
def test_taps(name):
    """What each layer read, in the model's width, and what stands before the output layer."""
    model, names = variant(name, **WIDE), ("layer_0", "layer_1", "final")
    params, cache, _, text = read_long(model)
    read = decoders.extend(model, params, cache, decoders.chain(text[:, :4]), taps=names)
    assert {x.shape for x in read.taps.values()} == {(2, 4, 16)}
    logits = jax.jit(model.logits)(params, read.taps["final"])
    np.testing.assert_allclose(logits, read.logits, atol=1e-12)


# Decoding.

ASK = toys.ask(7)


@pytest.mark.usefixtures("x64")
def test_speculative_greedy_text_is_the_plain_one():
    """350m; 125m's is above, up to its last position."""
    model = variant("350m", **WIDE)
    params, draft = pair(model)
    plain, fast = (decoders.decode(model, params, ASK, d) for d in (None, draft))
    for field in ("tokens", "lengths", "finish_reason"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(fast, field))
    accepted, tested = (int(x.sum()) for x in (fast.stats.accepted, fast.stats.tested))
    assert 0.1 * tested < accepted < tested
    decoders.check_counts(fast, 16)


@pytest.mark.usefixtures("x64")
def test_a_batch_of_unequal_prompts_is_its_rows():
    """H1, Must show 5: tokens and counts of each row are those it has alone."""
    model = variant("350m", **WIDE)
    params, draft = pair(model)
    temperature = jnp.asarray([0.0, 1.0, 0.7, 1.0], jnp.float32)
    whole = decoders.decode(model, params, ASK, draft, sampling=Sampling(temperature))
    for row in range(4):
        one = Prompt(ASK.tokens[row : row + 1], ASK.length[row : row + 1])
        garbage = jnp.arange(6, dtype=jnp.int32)[None] >= one.length[:, None]
        one = one._replace(tokens=jnp.where(garbage, 1, one.tokens))
        options = dict(
            sampling=Sampling(temperature[row : row + 1]), row_ids=jnp.asarray([row], jnp.int32)
        )
        alone = decoders.decode(model, params, one, draft, **options)
        decoders.same_decode(alone, jax.tree.map(lambda x, row=row: x[row : row + 1], whole))


@pytest.mark.usefixtures("x64")
def test_scanned_layers_decode_the_unrolled_text():
    model, deep = variant("350m", **WIDE), variant("350m", **WIDE, scan_layers=True)
    params, draft = pair(model)
    options = dict(sampling=Sampling(1.0), key=jax.random.key(3))
    one = decoders.decode(model, params, ASK, draft, **options)
    other = decoders.decode(deep, stack.pile(params), ASK, stack.pile(draft), **options)
    decoders.same_decode(one, other)
    assert deep.unrolled == model and model.unrolled == model


@pytest.mark.usefixtures("x64", "long_vectors")
@each_layout
@each_variant
def test_tiles_change_nothing(name, scan):
    """The tied output layer is tiled, both tables are not."""
    model = variant(name, **WIDE, scan_layers=scan)
    params = decoders.init(model, 1)
    tiled = model.tile(params)
    assert tiled["lm_head"]["weight"].shape == (1, model.config.word_dim, 32)
    assert tiled["embed_positions"]["weight"].shape == (66, 16)
    layer = tiled["layers"] if scan else tiled["layers_0"]
    assert layer["fc1"]["weight"].shape == ((2, 32, 16) if scan else (1, 16, 32))
    tokens = jnp.asarray(decoders.words(2, 5))
    logits = decoders.forward(model, params, tokens)
    np.testing.assert_allclose(decoders.forward(model, tiled, tokens), logits, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_sampling_with_a_draft():
    """Temperature 1: reproducible, of the model's own law, and counts are sane."""
    model = variant("350m", **WIDE)
    params, draft = pair(model)
    sample = lambda seed: decoders.decode(  # noqa: E731
        model, params, ASK, draft, sampling=Sampling(1.0), key=jax.random.key(seed)
    )
    one, again, other = sample(0), sample(0), sample(1)
    decoders.same_decode(one, again)
    assert (np.asarray(one.tokens) != np.asarray(other.tokens)).any()
    decoders.check_counts(one, 16)
    decoders.check_log_probs(model, params, ASK, one)
    assert 0 < one.stats.accepted.sum() < one.stats.tested.sum()


def test_a_forced_prefix_is_refused():
    ask = ASK._replace(prefix=toys.prompt([3], [4], [5], [6]))
    with pytest.raises(ValueError, match="a decoder-only model has no forced prefix"):
        generate(tiny_opt(), decoders.init(tiny_opt(), 0), ask, max_decode_len=4)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_a_mesh_decodes_the_single_device_s_tokens():
    """Two groups of devices, heads over four."""
    sizes = dict(num_heads=4, emb_dim=32, word_dim=16, mlp_dim=64, norm_first=False)
    model = tiny_opt(**sizes, **WIDE)
    params, draft = pair(model)
    ask, place = toys.ask(3, batch=8), Partitioner(meshes.make(4))
    sampling = Sampling(jnp.asarray([0.0, 1.0] * 4, jnp.float32))
    alone = decoders.decode(model, params, ask, draft, sampling=sampling)
    apart = decoders.decode(
        model,
        jax.device_put(params, place.params(model)),
        jax.device_put(ask, place.rows),
        jax.device_put(draft, place.params(model)),
        sampling=sampling,
        mesh=place.mesh,
    )
    decoders.same_decode(alone, apart)


# Drafts of the other family.


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("which", ["opt for llama", "llama for opt"])
def test_a_draft_of_the_other_family(which):
    """Greedy rows give the target's text, sampled ones report its law. Both models share a table, so
    that the draft agrees now and then."""
    models = tiny_opt(**WIDE, num_layers=1), tiny_llama(**WIDE, num_layers=1, tie_embeddings=True)
    sets = [decoders.init(model, 1) for model in models]
    sets[1]["embed_tokens"] = sets[0]["embed_tokens"]
    order = (0, 1) if which == "opt for llama" else (1, 0)
    (small, model), (draft, params) = ([x[i] for i in order] for x in (models, sets))
    rows = Sampling(jnp.asarray([0.0, 1.0, 0.0, 1.0], jnp.float32))
    options = dict(drafter=small, sampling=rows)
    fast = decoders.decode(model, params, ASK, draft, **options)
    plain = decoders.decode(model, params, ASK, sampling=rows)
    np.testing.assert_array_equal(fast.tokens[::2], plain.tokens[::2])
    decoders.check_counts(fast, 16)
    assert 0 < fast.stats.accepted.sum() < fast.stats.tested.sum()
    sampled = jax.tree.map(lambda x: x[1::2], (ASK, fast))
    decoders.check_log_probs(model, params, *sampled)
