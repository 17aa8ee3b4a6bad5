"""Heads against their authors' own code, by what scripts/make_heads_golden.py wrote of it.

Weights are random, in the authors' files; states, logits and drafted trees must be theirs.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax import Sampling
from specjax.decode.interfaces import Block, Params, Prefilled, Prompt, Text
from specjax.drafters.eagle import EagleState
from specjax.drafters.eagle2 import Eagle2
from specjax.infer import system
from specjax.models import layers
from specjax.models.eagle import Pairs
from specjax.models.eagle3 import Eagle3
from specjax.models.llama import Llama, LlamaConfig
from tests import toys

HEADS = pathlib.Path(__file__).parents[1] / "fixtures" / "heads"
MEDUSA = ("medusa_1", "medusa_2", "medusa_2_apart")
EAGLE1 = ("eagle1", "eagle1_no_bias", "eagle1_deep")
EAGLE3 = ("eagle3", "eagle3_whole")
# Of the target the heads take only the embedding and the output layer.
TARGET = Llama(LlamaConfig(vocab_size=96, emb_dim=32, num_layers=8, num_heads=4, num_kv_heads=4))
# The authors' tree: two steps of three nodes behind the first, and seven nodes of all are kept.
STEPS, WIDE = 2, 3
SHAPE = dict(depth=1 + STEPS, expand=WIDE, nodes=7)
ATOL, CLEARLY = 1e-5, 1e-2


@functools.cache
def golden(name):
    """What the file holds: what models read and say as arrays of JAX, weights as they are stored."""
    with np.load(HEADS / f"{name}.npz") as arrays:
        stored = lambda n: n == "config" or n.startswith(("weights/", "target/"))  # noqa: E731
        return {n: x if stored(n) else jnp.asarray(x) for n, x in arrays.items()}


def under(name, prefix):
    """The arrays of a golden whose names begin so."""
    return {n.removeprefix(prefix): x for n, x in golden(name).items() if n.startswith(prefix)}


def load(name, folder, change=lambda weights: None, **said):
    """Heads from files as their authors write them, beside their target."""
    weights = under(name, "weights/")
    embedding, output = (
        weights.get("embed_tokens.weight"),
        golden(name).get("target/lm_head.weight"),
    )
    change(weights)
    file = "medusa_lm_head.safetensors" if name in MEDUSA else "model.safetensors"
    safetensors.numpy.save_file(weights, folder / file, {"format": "pt"})
    config = json.loads(str(golden(name)["config"])) | said
    (folder / "config.json").write_text(json.dumps(config))
    known = {"embed_tokens": embedding, "lm_head": output}
    known = {n: {"weight": jnp.asarray(x)} for n, x in known.items() if x is not None}
    return system.Heads(str(folder)).of(TARGET, known)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)


def apart(got, expected):
    assert np.abs(np.asarray(got) - expected).max() > CLEARLY


# Medusa.


@pytest.mark.parametrize("name", MEDUSA)
def test_medusa(name, tmp_path):
    """What every head's output layer reads, and its logits."""
    model, params = load(name, tmp_path)
    expected = golden(name)
    assert model.config.layers == (1 if name == "medusa_1" else 2) and model.config.own_output
    close(jnp.stack(model.states(params, expected["states"])), expected["read"])
    close(jnp.moveaxis(model.logits(params, expected["states"]), 2, 0), expected["logits"])


def swapped(a, b):
    """Exchanges tensors whose names begin so."""

    def change(weights):
        for n in [n for n in weights if n.startswith(a)]:
            other = b + n.removeprefix(a)
            weights[n], weights[other] = weights[other], weights[n]

    return change


@pytest.mark.parametrize("pair", [("0.0.", "0.1."), ("0.", "1.")])
def test_medusa_tells_blocks_and_heads_apart(pair, tmp_path):
    model, params = load("medusa_2_apart", tmp_path, swapped(*pair))
    expected = golden("medusa_2_apart")
    apart(jnp.moveaxis(model.logits(params, expected["states"]), 2, 0)[0], expected["logits"][0])


# EAGLE: pairs of a whole text.


def states_of(name):
    """The target's states of the text of both rounds, ``[1, n, d or 3 d]``."""
    return jnp.concatenate([golden(name)[f"round_{i}/pairs/states"] for i in (0, 1)])[None]


def outputs_of(name, what):
    return np.concatenate([golden(name)[f"round_{i}/pairs/{what}"] for i in (0, 1)])


def whole(name, model, params, shift=1):
    """The head's states of a text, read at once; the authors read it in two rounds."""
    text = golden(name)["round_1/text"]
    states = states_of(name)
    tokens = text[shift:][: states.shape[1]][None]
    return model.next_states(params, Pairs(tokens, model.features(params, states)), {})[0]


@pytest.mark.parametrize("name", EAGLE1 + EAGLE3)
def test_pairs(name, tmp_path):
    """States and logits behind every pair."""
    model, params = load(name, tmp_path)
    assert isinstance(model, Eagle3) == (name in EAGLE3)
    got = whole(name, model, params)
    close(got, outputs_of(name, "out"))
    close(model.known_logits(params, got[None])[0], outputs_of(name, "logits"))


@pytest.mark.parametrize("name", EAGLE1 + EAGLE3)
def test_what_attention_reads(name, tmp_path, monkeypatch):
    """EAGLE-1: fc of [embedding; state]. EAGLE-3: [embedding; fc of three states], both normed."""
    model, params = load(name, tmp_path)
    seen, attention = [], type(model).attention
    monkeypatch.setattr(
        type(model),
        "attention",
        lambda self, weights, y, *rest: seen.append(y) or attention(self, weights, y, *rest),
    )
    whole(name, model, params)
    expected = golden(name)
    first = len(expected["read"])
    close(seen[0][0, :first], expected["read"])
    width = model.config.emb_dim
    assert seen[0].shape[-1] == (2 * width if name in EAGLE3 else width)
    if name in EAGLE3:
        close(model.features(params, states_of(name))[0, :first], expected["fc"])
    else:
        close(seen[0][0, :first], expected["fc"])


@pytest.mark.parametrize("name", EAGLE1 + EAGLE3)
def test_tokens_are_shifted(name, tmp_path):
    """A state stands beside the token that follows it."""
    apart(whole(name, *load(name, tmp_path), shift=0), outputs_of(name, "out"))


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_norms_before_its_output_layer(name, tmp_path):
    """And its states themselves are not normed."""
    model, params = load(name, tmp_path)
    got = whole(name, model, params)
    apart(layers.linear(got, params["lm_head"]["weight"]), outputs_of(name, "logits"))
    normed = layers.rms_norm(got, params["norm"]["weight"], model.config.norm_eps)
    apart(normed, outputs_of(name, "out"))


@pytest.mark.parametrize("name", EAGLE1)
def test_eagle1_does_not_norm_before_the_output_layer(name, tmp_path):
    model, params = load(name, tmp_path)
    got = whole(name, model, params)
    normed = layers.rms_norm(got, jnp.ones(got.shape[-1]), model.config.norm_eps)
    apart(model.known_logits(params, normed[None])[0], outputs_of(name, "logits"))


def rolled(*names):
    """Turns the inputs of layers: of two halves to exchange them, of three each to the next place."""

    def change(weights):
        for name in names:
            weights[name] = np.ascontiguousarray(np.roll(weights[name], 32, axis=1))

    return change


QKV = [f"midlayer.self_attn.{n}_proj.weight" for n in "qkv"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("eagle1", lambda weights: weights.pop("fc.bias"), dict(bias=False)),
        ("eagle1", rolled("fc.weight"), {}),
        ("eagle1_no_bias", lambda weights: None, dict(rope_theta=10000.0)),
        ("eagle1_deep", lambda weights: None, dict(rope_scaling=None)),
        ("eagle3", rolled("fc.weight"), {}),
        ("eagle3", rolled(*QKV), {}),
        ("eagle3", swapped("midlayer.input_layernorm", "midlayer.hidden_norm"), {}),
        ("eagle3", lambda weights: None, dict(rope_theta=10000.0)),
    ],
)
def test_other_weights_say_something_else(name, change, said, tmp_path):
    """The bias, the order of what is joined, which norm is whose, and how positions turn."""
    apart(whole(name, *load(name, tmp_path, change, **said)), outputs_of(name, "out"))


# EAGLE: steps of drafting behind the cache.


def taps_of(name, model, length):
    """The target's states by tap; of the last token there is none yet."""
    states = states_of(name)[:, : length - 1]
    states = jnp.pad(states, [(0, 0), (0, 1), (0, 0)])
    return dict(zip(model.taps, jnp.split(states, len(model.taps), axis=-1), strict=True))


def prefilled(name, model):
    """The target's part of the first round."""
    tokens = jnp.asarray(golden(name)["round_0/text"])[None]
    length = jnp.full(1, tokens.shape[1], jnp.int32)
    taps = taps_of(name, model, tokens.shape[1])
    return Prefilled(None, Text(tokens, length), taps, Prompt(tokens, length))


def steps(model, params, cache, pairs, nodes, later=0):
    """Reads unread pairs, then the nodes: (states of the pairs, of the nodes by step, open slots)."""
    count = pairs.tokens.shape[1]
    slots = count + STEPS * WIDE
    index = jnp.arange(count, dtype=jnp.int32)[None]
    block = Block(pairs, index, jnp.tri(count, slots, dtype=bool)[None])
    first, open_ = model.read(params, cache, block, model.open(1, slots), 0)
    found = []
    for step in range(STEPS):
        mask = jnp.pad(nodes["mask"][step], [(0, 0), (count, 0)], constant_values=True)[None]
        depth = nodes["position"][step][None] - cache.length[:, None] + later
        block = Block(Pairs(nodes["tokens"][step][None], nodes["states"][step][None]), depth, mask)
        out, open_ = model.read(params, cache, block, open_, count + step * WIDE)
        found.append(out[0])
    return first[0], jnp.stack(found), open_


def unread(name, model, params):
    """The pairs of the second round."""
    pairs = under(name, "round_1/pairs/")
    states = model.features(params, jnp.asarray(pairs["states"])[None])
    return Pairs(jnp.asarray(pairs["tokens"])[None], states)


def second(name, model, params):
    """The cache at the second round: the pairs of the first one, nothing of its tree."""
    cache, state, _ = model.begin(params, prefilled(name, model), 8)
    pairs = Pairs(golden(name)["round_0/text"][None, -1:], state)
    _, _, open_ = steps(model, params, cache, pairs, under(name, "round_0/nodes/"))
    return model.commit(cache, open_, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))


@pytest.mark.parametrize("name", EAGLE1 + EAGLE3)
def test_steps_of_drafting(name, tmp_path):
    """Nodes that see their ancestors alone, and further pairs behind the cache."""
    model, params = load(name, tmp_path)
    cache, state, lag = model.begin(params, prefilled(name, model), 8)
    assert lag.tolist() == [1] and cache.length.tolist() == [8]
    first = Pairs(golden(name)["round_0/text"][None, -1:], state)
    caches, reads = (cache, second(name, model, params)), (first, unread(name, model, params))
    for i, (cache, pairs) in enumerate(zip(caches, reads, strict=True)):
        nodes, theirs = under(name, f"round_{i}/nodes/"), under(name, f"round_{i}/pairs/")
        new, found, _ = steps(model, params, cache, pairs, nodes)
        close(new, theirs["out"][-len(new) :])
        close(found, nodes["out"])
        close(model.known_logits(params, found), nodes["logits"])


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize("mistake", ["siblings", "positions"])
def test_nodes_have_their_own_places(name, mistake, tmp_path):
    """Nodes that see each other, or stand one further on, say something else."""
    model, params = load(name, tmp_path)
    nodes = under(name, "round_1/nodes/")
    read = np.arange(STEPS * WIDE) < WIDE * np.arange(1, STEPS + 1)[:, None, None]
    all_ = jnp.asarray(np.broadcast_to(read, nodes["mask"].shape))
    wrong = nodes | {"mask": all_} if mistake == "siblings" else nodes
    cache, later = second(name, model, params), int(mistake == "positions")
    _, found, _ = steps(model, params, cache, unread(name, model, params), wrong, later)
    apart(found, nodes["out"])


def paths(tokens, seen):
    """Every node of a tree as the tokens on its path, from what it sees of the tree (root first)."""
    rows = [np.flatnonzero(row)[1:] for row in seen[1:]]
    return {tuple(tokens[row].tolist()) for row in rows}


def paths_of(tree):
    words, parents, out = np.asarray(tree.tokens[0]), np.asarray(tree.parent[0]), []
    for n, parent in enumerate(parents):
        out.append((*(out[parent] if parent >= 0 else ()), int(words[n])))
    assert np.asarray(tree.valid).all()
    return set(out)


@pytest.mark.parametrize("name", EAGLE1 + EAGLE3)
def test_trees(name, tmp_path):
    """EAGLE-2's trees of two rounds, with EAGLE-1's and EAGLE-3's heads."""
    model, params = load(name, tmp_path)
    drafter, both = Eagle2(model, **SHAPE), Params(None, params)
    begun = drafter.init(both, prefilled(name, model), 8)
    pairs = unread(name, model, params)
    count = pairs.tokens.shape[1]
    states = jnp.pad(pairs.states, [(0, 0), (0, SHAPE["depth"] + 1 - count), (0, 0)])
    cache = second(name, model, params)
    later = EagleState(cache, states, jnp.full(1, count, jnp.int32), model.open(1, drafter.slots))
    for i, state in enumerate((begun, later)):
        expected = under(name, f"round_{i}/")
        tokens = jnp.asarray(expected["text"])[None]
        text = Text(tokens, jnp.full(1, tokens.shape[1], jnp.int32))
        keys = toys.row_keys(jax.random.key(0), 1)
        tree, _ = jax.jit(drafter.propose)(both, state, text, Sampling(0.0).rows(1), keys)
        theirs = paths(expected["drafted"], expected["mask"])
        assert len(theirs) == SHAPE["nodes"] and paths_of(tree) == theirs


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_says_the_targets_ids(name, tmp_path):
    """d2t is added to an id of the head: what is drafted from the first logits is read next."""
    model, _ = load(name, tmp_path)
    expected = golden(name)
    best = np.argsort(-expected["round_0/pairs/logits"][-1], kind="stable")[:WIDE]
    read = expected["round_0/nodes/tokens"][0].tolist()
    vocab = model.config.draft_vocab
    assert (vocab is None) == (name == "eagle3_whole")
    assert read == (best if vocab is None else vocab.ids[best]).tolist()
    if vocab is not None:
        assert read != best.tolist() and read != expected["weights/d2t"][best].tolist()
