"""What must hold of every decode, as far as chains from a small model go."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, stopping
from specjax.decode import sampling as laws
from specjax.decode import verify as rules
from specjax.decode.interfaces import Drafter, Model, Params, Verifier
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.toys import BATCH, MASKED, NAN, OFF_PATH, STEPS, T5, ask, decode, pair_of, play, scripted

GREEDY = [*range(5, 20)]


def rate(stats):
    return float(np.sum(stats.accepted) / np.sum(stats.drafted))


# 1, 3: greedy equality, and a draft that is the target.


@pytest.mark.parametrize("gamma, models", [(1, 20), (2, 20), (3, 200), (4, 20), (5, 20)])
def test_chains_of_each_length(gamma, models):
    """D2, D4, E2, invariants 1 and 3: equality for noisy drafts; the target itself is accepted.

    One compile serves it all, so that the parts stand in one test.
    """
    ties, rates = [], []
    for seed in range(models):
        params, prompt = toys.init(T5, seed), ask(seed)
        draft = toys.noisy(params, seed, [0.03, 0.1, 0.3, 3.0][seed % 4])
        plain, spec = decode(params, prompt), decode(params, prompt, draft, gamma=gamma)
        ties += toys.differences(T5, params, prompt, plain, spec)
        rates.append(rate(spec.stats))
    assert len(ties) <= 0.01 * models * BATCH, ties
    # Drafts of all qualities were seen, so rejections and full acceptance at every depth.
    assert min(rates) < 0.3 and max(rates) > 0.8 and 0.3 < np.mean(rates) < 0.9
    rounds = 0
    for seed in range(4):
        params, prompt = toys.init(T5, seed), ask(seed)
        for temperature in (0.0, 1.0):
            out = decode(params, prompt, params, gamma=gamma, sampling=Sampling(temperature))
            np.testing.assert_array_equal(out.stats.accepted, out.stats.drafted)
            np.testing.assert_array_equal(out.stats.tested, out.stats.drafted)
            np.testing.assert_allclose(out.stats.overlap, out.stats.drafted, rtol=1e-4)
            rounds = max(rounds, int(out.stats.rounds.max()))
    assert rounds >= 4


@pytest.mark.usefixtures("x64")
def test_greedy_equality_is_exact_in_float64():
    """Invariant 1: no near-tie is excused; log-law and q are float64 too."""
    model = toys.tiny_t5(dtype="float64")
    for seed in range(40):
        params, prompt = toys.init(model, seed), ask(seed)
        draft = toys.noisy(params, seed, [0.03, 0.1, 0.3, 3.0][seed % 4])
        plain = decode(params, prompt, model=model)
        spec = decode(params, prompt, draft, model=model)
        assert toys.emitted(plain) == toys.emitted(spec)
        np.testing.assert_array_equal(plain.finish_reason, spec.finish_reason)


def test_a_pair_of_unequal_shape_and_a_batch_of_one():
    """E11, invariant 1: a deeper, wider target of the other T5 version; B = 1."""
    target = toys.tiny_t5(
        emb_dim=24, num_decoder_layers=2, mlp_activations=("relu",), logits_via_embedding=True
    )
    ties = []
    for seed in range(20):
        params, draft, prompt = toys.init(target, seed), toys.init(T5, seed), ask(seed, batch=1)
        plain = decode(params, prompt, model=target, steps=12)
        spec = generate(
            target, params, prompt, drafter=SmallModel(T5, 2), draft_params=draft, max_decode_len=12
        )
        ties += toys.differences(target, params, prompt, plain, spec)
    assert len(ties) <= 1, ties


def test_the_near_tie_rule_excuses_no_real_difference():
    """D3: a token from the wrong row (a gap of whole nats) fails the equality test."""
    params, prompt = toys.init(T5, 0), ask(0)
    plain = decode(params, prompt)
    wrong = plain._replace(tokens=plain.tokens.at[1, 3].set((plain.tokens[1, 3] + 1) % toys.VOCAB))
    with pytest.raises(AssertionError, match="row 1"):
        toys.differences(T5, params, prompt, plain, wrong)
    short = plain._replace(lengths=plain.lengths - 1)
    with pytest.raises(AssertionError, match="cut short"):
        toys.differences(T5, params, prompt, plain, short)


def behind_the_maximum(model, params, prompt, out):
    """How far each emitted token's teacher-forced logit lies below the largest, in bfloat16 ulps."""
    logits = toys.teacher_forced(model, params, prompt, out.tokens)
    best = logits.max(-1)
    chosen = np.take_along_axis(logits, np.asarray(out.tokens)[..., None], 2)[..., 0]
    ulps = (best - chosen) / 2.0 ** (np.floor(np.log2(np.abs(best))) - 7)
    return np.where(np.arange(STEPS) < np.asarray(out.lengths)[:, None], ulps, 0)


def test_bfloat16_output_is_greedy_up_to_one_ulp():
    """D2, D3: teacher-forced, each token is within an ulp of the maximum; a wrong row is not."""
    half = toys.tiny_t5(dtype="bfloat16")
    worst = []
    for seed in range(10):
        params, prompt = toys.init(half, seed), ask(seed)
        out = decode(params, prompt, toys.noisy(params, seed, 0.1), model=half)
        worst.append(behind_the_maximum(half, params, prompt, out).max())
        wrong = out._replace(tokens=jnp.roll(out.tokens, 1, axis=1))
        assert behind_the_maximum(half, params, prompt, wrong).max() > 32
    assert max(worst) <= 1, worst


# 4: lengths and contents of the caches.


WRONG = [OFF_PATH - 1] * len(GREEDY)
# A draft that is always right, never, and wrong at outputs 1 and 4.
SAYS = [GREEDY, WRONG, [OFF_PATH - 1 if i in (1, 4) else t for i, t in enumerate(GREEDY)]]


def test_caches_hold_the_text_without_its_newest_token_and_nothing_else():
    """A10, E1, E5, invariant 4: target -1, draft -1 or -2, after every round, slot by slot."""
    rounds = toys.drive(*scripted(GREEDY, SAYS))
    lags = set()
    for _, _, state in rounds:
        length = np.asarray(state.text.length)
        np.testing.assert_array_equal(state.cache.length, length - 1)
        lag = length - np.asarray(state.drafter.cache.length)
        lags |= set(lag.tolist())
        for cache in (state.cache, state.drafter.cache):
            tokens, places = (np.asarray(x)[:, 0, :, 0] for x in cache.kv[0])
            for row, end in enumerate(np.asarray(cache.length)):
                np.testing.assert_array_equal(tokens[row, :end], state.text.tokens[row, :end])
                np.testing.assert_array_equal(places[row, :end], np.arange(end))
    assert lags == {1, 2}
    assert np.asarray(rounds[-1].after.text.length).tolist() == [9, 9, 9]


def test_rounds_driven_by_hand_are_the_loop():
    """Invariant 5: resuming after every round changes nothing, tokens and counts."""
    last = toys.drive(*scripted(GREEDY, SAYS))[-1].after
    out = play([GREEDY] * 3, [GREEDY] * 3, says=SAYS)
    np.testing.assert_array_equal(last.text.tokens[:, 1:9], out.tokens)
    for a, b in zip(jax.tree.leaves(last.stats), jax.tree.leaves(out.stats), strict=True):
        np.testing.assert_array_equal(a, b)


def test_buffers_have_room_for_a_whole_block_behind_the_last_token():
    """A10, E7: no write starts where dynamic_update_slice would shift it."""
    for steps, gamma in ((0, 1), (1, 7), (8, 3)):
        decoder = loop.Decoder(toys.Script(), steps, SmallModel(toys.Script(), gamma))
        params = Params(toys.scripts([5]), toys.scripts([5]))
        state = jax.eval_shape(
            lambda k, d=decoder, p=params: loop.start(d, p, toys.script_prompt(0), k),
            jax.random.split(jax.random.key(0), 1),
        )
        longest, block = 1 + steps, gamma + 1
        assert state.text.tokens.shape[1] >= longest + block
        assert state.log_probs.shape == state.text.tokens.shape
        for cache in (state.cache, state.drafter.cache):
            assert cache.kv[0][0].shape[2] >= longest - 1 + block


# 7: one program.


def compiled():
    return [f._cache_size() for f in (loop.jit_start, loop.jit_run, loop.jit_decoded)]


def test_one_compile_serves_a_shape():
    """Must-show 5, invariant 7: temperatures, seeds, prompts, lengths, row ids, parameters."""
    (params, draft), prompt = pair_of(5), ask(5)
    decode(params, prompt, draft)
    before = compiled()
    for temperature in (0.0, 1e-4, 0.3, 2.0, jnp.asarray([0.0, 1.0, 0.5, 2.0])):
        decode(params, prompt, draft, sampling=Sampling(temperature))
    for seed in range(3):
        decode(params, ask(seed), draft, sampling=Sampling(1.0), key=jax.random.key(seed))
    lengths = jnp.ones_like(prompt.length)
    decode(params, prompt._replace(length=lengths), draft)
    params, draft = pair_of(6)
    decode(params, prompt, draft, row_ids=jnp.asarray([9, 8, 7, 6], jnp.int32))
    assert compiled() == before
    generate(toys.Script(), toys.scripts([5]), toys.script_prompt(0), max_decode_len=3)
    assert all(now > then for now, then in zip(compiled(), before, strict=True))


def test_one_compile_serves_all_values_of_top_p():
    """Must-show 5: top_p is traced; its presence is another program, its value is not."""
    rows = [[GREEDY]] * 2
    play(*rows, sampling=Sampling(1.0, top_p=0.5))
    before = compiled()
    for top_p in (0.1, 1.0, jnp.asarray([0.3, 0.9, 0.5])):
        play(*rows, sampling=Sampling(0.7, top_p=top_p), key=jax.random.key(3))
    assert compiled() == before


HOST = ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv", "xla_python")


def lowered(function, *args):
    return function.lower(*args).as_text()


def test_the_lowered_loop_never_talks_to_the_host():
    """Invariant 7: no callback, no transfer, no custom call but known arithmetic."""
    abstract = jax.eval_shape(lambda: toys.init(T5, 0))
    both = Params(abstract, abstract)
    prompt = jax.eval_shape(lambda: ask(0))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
    sampling = jax.eval_shape(lambda: Sampling(1.0, 3, 0.9).rows(BATCH))
    for drafter in (None, SmallModel(T5, 3)):
        decoder = loop.Decoder(T5, STEPS, drafter)
        state = jax.eval_shape(lambda *x, d=decoder: loop.start(d, *x), both, prompt, keys)
        text = lowered(loop.jit_run, decoder, both, state, sampling)
        assert "stablehlo.while" in text
        assert not [word for word in HOST if word in text]
        assert set(re.findall(r"custom_call @(\w+)", text)) <= {"Sharding"}
    noisy = jax.jit(lambda x: (jax.debug.callback(lambda _: None, x), x)[1])
    assert "callback" in lowered(noisy, 1.0)


# 9, 10: broken laws, token 0, precision.


@pytest.mark.parametrize("word", [NAN, MASKED])
def test_a_broken_law_is_an_error_and_never_token_zero(word):
    """B14, invariant 9: tokens before it are plain decoding's; other rows go on."""
    early, late = [5, 6, word], [*GREEDY[:6], word]
    rows = [early, late, GREEDY]
    spec = play(rows, [GREEDY] * 3)
    plain = generate(
        toys.Script(), toys.scripts(*rows), toys.script_prompt(0, 1, 2), max_decode_len=8
    )
    for out in (spec, plain):
        assert toys.emitted(out) == [early[:2], late[:6], GREEDY[:8]]
        assert out.finish_reason.tolist() == [stopping.ERROR, stopping.ERROR, stopping.LENGTH]
        assert not np.isnan(out.log_probs).any()


def test_a_broken_law_behind_the_end_is_never_read():
    """B14: NaN behind an accepted EOS, behind a rejection or beyond the limit is no error."""
    behind_eos, beyond = [5, 1, NAN], [*GREEDY[:8], NAN]
    refused = [5, 6, *GREEDY[2:]]
    out = play([behind_eos, beyond, refused], [[5, 1, 7], GREEDY, [5, 9, 9]])
    assert toys.emitted(out) == [[5, 1], GREEDY[:8], refused[:8]]
    assert out.finish_reason.tolist() == [stopping.STOP, stopping.LENGTH, stopping.LENGTH]


def test_a_broken_draft_costs_acceptance_and_nothing_else():
    """B14: NaN in the draft's logits, at the first or at a later token."""
    says = [[NAN] * 15, [*GREEDY[:2], NAN, *GREEDY[3:]], [MASKED] * 15]
    out = play([GREEDY] * 3, [GREEDY] * 3, says=says)
    assert toys.emitted(out) == [GREEDY[:8]] * 3
    assert out.finish_reason.tolist() == [stopping.LENGTH] * 3
    assert out.stats.accepted[0] == 0 and out.stats.accepted[1] > 0
    assert np.isfinite(out.stats.overlap).all()


def test_laws_are_float32_at_least_whatever_the_model_computes_in():
    """B13, invariant 10: bfloat16 activations, float32 logits, laws and q."""
    half = toys.tiny_t5(dtype="bfloat16")
    decoder = loop.Decoder(half, STEPS, SmallModel(half, 3))
    params = jax.eval_shape(lambda: toys.init(half, 0))
    sampling = Sampling(1.0).rows(BATCH)

    def first_round(both):
        keys = toys.row_keys(jax.random.key(0), BATCH)
        state = loop.start(decoder, both, ask(0), keys)
        tree, _ = decoder.drafter.propose(both, state.drafter, state.text, sampling, keys)
        after = loop.speculative_round(decoder, both, state, sampling=sampling)
        return state.cache.kv, tree.log_q, after.log_probs

    kv, log_q, log_probs = jax.eval_shape(first_round, Params(params, params))
    assert kv[0][0].dtype == jnp.bfloat16
    assert log_q.dtype == log_probs.dtype == jnp.float32


def test_protocols_are_kept():
    """Section 3: the parts are what they claim to be."""
    assert isinstance(T5, Model) and isinstance(toys.Table(), Model)
    assert isinstance(SmallModel(T5, 2), Drafter)
    assert isinstance(rules.SpeculativeSampling(), Verifier)
    assert isinstance(rules.GreedyMatch(), Verifier)
    for model in (T5, toys.Table()):
        made, abstract = jax.eval_shape(model.init, jax.random.key(0)), model.abstract()
        assert jax.tree.structure(made) == jax.tree.structure(abstract)


def test_drafts_come_from_q():
    """B3, invariant 10: the drafted ids are the quantiles of log_q at the DRAFT uniforms."""
    decoder, both, prompt = scripted(GREEDY, SAYS)
    for tree, before, _ in toys.drive(decoder, both, prompt, Sampling(1.7), jax.random.key(4)):
        keys = laws.fold(before.keys, before.stats.rounds)
        u = laws.uniform(laws.fold(keys, rules.DRAFT), 3)
        for i in range(3):
            np.testing.assert_array_equal(tree.tokens[:, i], laws.draw(tree.log_q[:, i], u[:, i]))
        np.testing.assert_allclose(np.exp(tree.log_q).sum(-1), 1, rtol=1e-5)
