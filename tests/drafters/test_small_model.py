"""Chains from a small model: its cache, its proposals, its parting from the target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling
from specjax.decode import loop, stopping
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Params, Text
from specjax.decode.verify import DRAFT
from specjax.drafters.small_model import SmallModel
from specjax.models import t5
from tests import toys
from tests.toys import OFF_PATH

GAMMA, BATCH, STEPS = 3, 4, 20
TARGET, DRAFT_MODEL = toys.tiny_t5(num_decoder_layers=2), toys.tiny_t5()
DECODER = loop.Decoder(TARGET, STEPS, SmallModel(DRAFT_MODEL, GAMMA), eos_id=-1)
PROMPT = toys.prompt([5, 6, 7, 8, 1], [9, 10, 1], [11, 1], [20, 21, 22, 1])
SCRIPT = [*range(5, 20)]


def pair(seed, noise=0.15):
    """A target of two decoder layers, the second a whisper, and a noisy draft of the first."""
    target = toys.init(TARGET, seed)
    layers = dict(target["decoder"])
    layers["layers_1"] = jax.tree.map(lambda x: 0.3 * x, layers["layers_1"])
    target = target | {"decoder": layers}
    first = target | {"decoder": {k: v for k, v in layers.items() if k != "layers_1"}}
    return Params(target, toys.noisy(first, seed, noise))


@functools.cache
def driven(seed, temperature):
    """(parameters, rounds) of a decode driven by hand; computed once."""
    both = pair(seed)
    sampling, key = Sampling(temperature, 0, 0.9), jax.random.key(seed)
    return both, toys.drive(DECODER, both, PROMPT, sampling, key)


DECODES = [(0, 1.0), (1, 1.0), (2, 0.0), (3, 0.0)]
each_decode = pytest.mark.parametrize("seed, temperature", DECODES)


def live(state):
    return np.asarray(state.finish) == stopping.LIVE


def accepted_in(rounds):
    """Accepted drafts ``[round, row]``."""
    return np.stack([np.asarray(r.after.stats.accepted - r.before.stats.accepted) for r in rounds])


# Proposals.


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, state, text, sampling, keys):
    return drafter.propose(params, state, text, sampling, keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def recompute(model, gamma, params, prompt, text, sampling, keys):
    """(tokens, log_q) of a drafter without a cache: it reads the whole text for every token."""
    u = laws.uniform(laws.fold(keys, DRAFT), gamma)
    mask = jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)[None] < prompt.length[:, None]
    write = jax.vmap(lambda row, token, at: row.at[at].set(token))
    buffer, drafts = text.tokens, []
    for i in range(gamma):
        logits = model.forward(params, prompt.tokens, mask, buffer)
        at = (text.length - 1 + i)[:, None, None]
        log_q = laws.log_law(jnp.take_along_axis(logits, at, axis=1), sampling)[:, 0]
        token = laws.draw(log_q, u[:, i])
        buffer = write(buffer, token, text.length + i)
        drafts.append((token, log_q))
    return tuple(jnp.stack(x, axis=1) for x in zip(*drafts, strict=True))


def compare(tree, expected, rows):
    """A tree against a recomputed one, on these rows."""
    tokens, log_q = (np.asarray(x)[rows] for x in expected)
    np.testing.assert_array_equal(np.asarray(tree.tokens)[rows], tokens)
    np.testing.assert_allclose(np.exp(np.asarray(tree.log_q)[rows]), np.exp(log_q), atol=2e-5)


@each_decode
def test_every_round_proposes_what_a_recomputing_drafter_does(seed, temperature):
    """E2, E4, invariant 10: no hole, no stale slot, the right q, whatever was accepted before."""
    both, rounds = driven(seed, temperature)
    sampling = Sampling(temperature, 0, 0.9).rows(BATCH)
    for tree, before, _ in rounds:
        keys = laws.fold(before.keys, before.stats.rounds)
        fresh = recompute(DRAFT_MODEL, GAMMA, both.draft, PROMPT, before.text, sampling, keys)
        compare(tree, fresh, live(before))


def test_the_decodes_of_this_file_take_every_branch():
    """E1: full acceptance, partial acceptance and none, in the middle of decodes."""
    taken = np.concatenate([accepted_in(driven(*d)[1])[:-1].ravel() for d in DECODES])
    assert set(taken.tolist()) == set(range(GAMMA + 1))
    for decode in DECODES:
        assert len(driven(*decode)[1]) >= 5


def test_proposals_are_judged_chains_of_gamma_tokens():
    """Section 3: a chain with one row of q per node, drawn anew; it writes no cache."""
    both, rounds = driven(0, 1.0)
    tree, before, _ = rounds[2]
    drafter = DECODER.drafter
    assert (drafter.depth, drafter.nodes, drafter.taps) == (GAMMA, GAMMA, ())
    assert tree.tokens.shape == (BATCH, GAMMA) and tree.log_q.shape == (BATCH, GAMMA, toys.VOCAB)
    assert tree.valid.all() and tree.judged.all() and tree.replace
    keys = laws.fold(before.keys, before.stats.rounds)
    sampling = Sampling(1.0, 0, 0.9).rows(BATCH)
    _, state = propose(drafter, both, before.drafter, before.text, sampling, keys)
    for a, b in zip(
        jax.tree.leaves(state.cache), jax.tree.leaves(before.drafter.cache), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("gamma", [0, -1])
def test_gamma_below_one_is_refused(gamma):
    """G2: drafting nothing is plain decoding."""
    with pytest.raises(ValueError, match="gamma"):
        SmallModel(DRAFT_MODEL, gamma)


class Short(toys.Script):
    """A model whose longest text has 6 tokens."""

    max_positions = 6


def test_nothing_is_drafted_behind_the_draft_s_longest_text():
    """F1: text tokens 1 .. 6 come from positions that a draft of 6 has; the target has no such end."""
    decoder = loop.Decoder(toys.Script(), 12, SmallModel(Short(), GAMMA))
    says = [
        [OFF_PATH - 1 if i in wrong else t for i, t in enumerate(SCRIPT)] for wrong in ((), (1, 4))
    ]
    both = Params(toys.scripts(SCRIPT, SCRIPT), toys.scripts(SCRIPT, SCRIPT, says=says))
    rounds = toys.drive(decoder, both, toys.script_prompt(0, 1))
    for tree, before, after in rounds:
        slot = np.asarray(before.text.length)[:, None] + np.arange(GAMMA)
        np.testing.assert_array_equal(tree.valid, slot <= 6)
        lag = np.asarray(after.text.length - after.drafter.cache.length)
        assert np.isin(lag[live(before)], (1, 2)).all()
    last = rounds[-1].after
    assert last.text.tokens[:, 1:13].tolist() == [SCRIPT[:12]] * 2
    # Row 0: 3 drafts, then 2 of 3. Row 1: 2 refused, 3 drafted behind text 3, the last one refused.
    assert last.stats.drafted.tolist() == [3 + 2, 3 + 3 + 1]
    assert last.stats.accepted.tolist() == [3 + 2, 1 + 2 + 1]


# Caches.


def test_trims_after_one_three_and_four_of_four():
    """E1: k = 4; a = 1: target 3, draft 2 back; a = 3: 1 and 0; a = 4: 0, and the draft lacks one."""
    says = [[OFF_PATH - 1 if i == a else t for i, t in enumerate(SCRIPT)] for a in (1, 3, 4)]
    model = toys.Script()
    decoder = loop.Decoder(model, 12, SmallModel(model, 4))
    both = Params(toys.scripts(*[SCRIPT] * 3), toys.scripts(*[SCRIPT] * 3, says=says))
    first = toys.drive(decoder, both, toys.script_prompt(0, 1, 2))[0]
    assert first.after.stats.accepted.tolist() == [1, 3, 4]
    read_by_target = np.asarray(first.before.cache.length) + 5
    read_by_draft = np.asarray(first.before.drafter.cache.length) + 4
    assert (read_by_target - np.asarray(first.after.cache.length)).tolist() == [3, 1, 0]
    assert (read_by_draft - np.asarray(first.after.drafter.cache.length)).tolist() == [2, 0, 0]
    lag = first.after.text.length - first.after.drafter.cache.length
    assert lag.tolist() == [1, 1, 2]


@each_decode
def test_lengths_follow_the_text(seed, temperature):
    """E5, invariant 4: target -1, draft -1, or -2 after full acceptance; frozen rows stay."""
    _, rounds = driven(seed, temperature)
    accepted = accepted_in(rounds)
    for i, (_, before, after) in enumerate(rounds):
        length, on = np.asarray(after.text.length), live(before)
        np.testing.assert_array_equal(after.cache.length, length - 1)
        emitted = length - np.asarray(before.text.length)
        whole = on & (accepted[i] == GAMMA) & (emitted == GAMMA + 1)
        lag = length - np.asarray(after.drafter.cache.length)
        np.testing.assert_array_equal(lag[on], 1 + whole[on])
        for cache in ("cache", "drafter"):
            a, b = (getattr(x, cache) for x in (before, after))
            a, b = (x.cache if cache == "drafter" else x for x in (a, b))
            np.testing.assert_array_equal(a.length[~on], b.length[~on])


@each_decode
def test_keys_and_values_are_those_of_a_fresh_read_of_the_text(seed, temperature):
    """A10, E4, E7: both caches, up to their lengths, at the end of a decode that filled them."""
    both, rounds = driven(seed, temperature)
    last = rounds[-1].after
    assert last.text.length.tolist() == [STEPS + 1] * BATCH
    for model, params, cache in (
        (TARGET, both.target, last.cache),
        (DRAFT_MODEL, both.draft, last.drafter.cache),
    ):
        fresh = read_afresh(model, params, PROMPT, last.text.tokens[:, : STEPS + 1])
        for layer, expected in zip(cache.kv, fresh, strict=True):
            for x, y in zip(layer, expected, strict=True):
                for row, end in enumerate(np.asarray(cache.length)):
                    np.testing.assert_allclose(x[row, :, :end], y[row, :, :end], atol=2e-5)


@functools.partial(jax.jit, static_argnums=0)
def read_afresh(model, params, prompt, tokens):
    """Keys and values of a text read as one block behind an empty cache."""
    batch, steps = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), tokens.shape)
    mask = jnp.broadcast_to(jnp.asarray(np.tri(steps, dtype=bool)), (batch, steps, steps))
    cache = model.prefill(params, prompt, steps).cache
    return model.extend(params, cache, loop.Block(tokens, depth, mask)).open.kv


def test_the_encoder_s_keys_and_values_are_never_touched():
    """E11, E12: unequal depths, many rejections, then a rewind: cross K/V bit for bit."""
    _, rounds = driven(1, 1.0)
    first, last = rounds[0].before, rounds[-1].after
    assert (accepted_in(rounds) < GAMMA).sum() >= 3
    assert len(first.cache.cross) == 2 and len(first.drafter.cache.cross) == 1
    back = DECODER.drafter.rewind(last.drafter, jnp.full(BATCH, 5, jnp.int32))
    target_back = TARGET.rewind(last.cache, jnp.full(BATCH, 5, jnp.int32))
    for before, after in (
        (first.cache, last.cache),
        (first.cache, target_back),
        (first.drafter.cache, last.drafter.cache),
        (first.drafter.cache, back.cache),
    ):
        assert after.cross[0][0].shape[2] == PROMPT.tokens.shape[1]
        np.testing.assert_array_equal(after.cross_mask, before.cross_mask)
        for x, y in zip(jax.tree.leaves(before.cross), jax.tree.leaves(after.cross), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("back", [1, 3, 6])
def test_rewind_forgets_what_lies_behind(back):
    """E4, E5: after a rewind the proposal is that of a fresh drafter over the shorter text."""
    both, rounds = driven(0, 1.0)
    state = rounds[-2].before
    shorter = Text(state.text.tokens, jnp.maximum(state.text.length - back, 1))
    rewound = DECODER.drafter.rewind(state.drafter, shorter.length)
    assert (shorter.length - rewound.cache.length).tolist() == [1] * BATCH
    sampling = Sampling(1.0, 0, 0.9).rows(BATCH)
    tree, _ = propose(DECODER.drafter, both, rewound, shorter, sampling, state.keys)
    fresh = recompute(DRAFT_MODEL, GAMMA, both.draft, PROMPT, shorter, sampling, state.keys)
    compare(tree, fresh, np.ones(BATCH, bool))
    raised = DECODER.drafter.rewind(state.drafter, state.text.length + 5)
    np.testing.assert_array_equal(raised.cache.length, state.drafter.cache.length)


# A draft that shares the target's encoder.


def sharing(model, params):
    """The model and its parameters without the encoder."""
    sizes = dict(num_encoder_layers=0, encoded_dim=model.config.emb_dim)
    bare = t5.T5(dataclasses.replace(model.config, **sizes))
    return bare, {name: x for name, x in params.items() if name != "encoder"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_on_its_own_encoder_output_is_accepted_whole(temperature):
    """Invariant 3 with nothing but the decoder drafting."""
    params = toys.init(TARGET, 0)
    model, draft = sharing(TARGET, params)
    drafter = SmallModel(model, GAMMA)
    assert drafter.taps == ("encoded",)
    out = toys.generate(
        TARGET,
        params,
        PROMPT,
        drafter=drafter,
        draft_params=draft,
        sampling=Sampling(temperature),
        max_decode_len=STEPS,
        eos_id=-1,
    )
    assert out.stats.accepted.tolist() == out.stats.drafted.tolist()
    assert out.stats.rounds.tolist() == [STEPS // (GAMMA + 1)] * BATCH


@each_decode
def test_sharing_the_encoder_drafts_what_a_copy_of_it_would(seed, temperature):
    both = pair(seed)
    encoder = {name: both.target[name] for name in ("encoder", "token_embedder")}
    whole = both._replace(draft=both.draft | encoder)
    model, draft = sharing(DRAFT_MODEL, whole.draft)
    key = jax.random.key(seed)
    sampling = Sampling(temperature, 0, 0.9)
    own = toys.drive(DECODER, whole, PROMPT, sampling, key)
    bare = dataclasses.replace(DECODER, drafter=SmallModel(model, GAMMA))
    shared = toys.drive(bare, whole._replace(draft=draft), PROMPT, sampling, key)
    assert len(own) == len(shared) > 4
    for a, b in zip(own, shared, strict=True):
        np.testing.assert_array_equal(a.tree.tokens, b.tree.tokens)
        np.testing.assert_array_equal(a.after.text.tokens, b.after.text.tokens)
