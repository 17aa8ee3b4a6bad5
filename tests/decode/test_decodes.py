"""Several decodes per prompt, T5X's scores, and streaming."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, generate, stream
from specjax.decode import api, loop, several, stopping
from specjax.decode.interfaces import Params
from specjax.decode.processors import MinLength
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.toys import BATCH, T5, ask, decode, pair_of, play

LONG = [*range(5, 20)]


# Several decodes.


def test_decodes_are_independent_and_the_best_is_last():
    """J2, CONVENTIONS 4: [B, n, L], rising scores, streams of their own, reproducible."""
    (params, draft), prompt = pair_of(0), ask(0)
    options = dict(sampling=Sampling(1.0), num_decodes=3, steps=8, eos_id=-1)
    out = decode(params, prompt, draft, **options)
    assert out.tokens.shape == out.log_probs.shape == (BATCH, 3, 8)
    assert out.scores.shape == out.lengths.shape == out.stats.rounds.shape == (BATCH, 3)
    assert (np.diff(out.scores, axis=1) >= 0).all()
    np.testing.assert_allclose(out.scores, out.log_probs.sum(-1), rtol=1e-5)
    for row in np.asarray(out.tokens):
        assert len({tuple(words) for words in row.tolist()}) == 3
    again = decode(params, prompt, draft, **options)
    np.testing.assert_array_equal(out.tokens, again.tokens)
    plain = decode(params, prompt, **options)
    assert plain.tokens.shape == out.tokens.shape
    alone = decode(params, Prompt(prompt.tokens[1:2], prompt.length[1:2]), draft, **options,
                   row_ids=jnp.asarray([1], jnp.int32))  # fmt: skip
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[1])


def test_options_per_row_are_repeated_and_greedy_decodes_are_equal():
    """CONVENTIONS 4: temperatures of rows, as T5X repeats them; no other axis moves."""
    prompt = toys.script_prompt(0, 1, 2)
    params = toys.scripts(LONG, [5, 6, 1], [7, 8, 9, 1])
    options = Sampling(
        jnp.asarray([0.0, 50.0, 0.0]), processors=(MinLength(jnp.asarray([0, 9, 0])),)
    )
    out = generate(
        toys.Script(), params, prompt, drafter=SmallModel(toys.Script(), 3), draft_params=params,
        sampling=options, num_decodes=2, max_decode_len=8, stop=[[10, 11]],
    )  # fmt: skip
    words = toys.emitted(jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), out))
    rows = [words[i : i + 2] for i in (0, 2, 4)]
    assert rows[0] == [LONG[:7]] * 2 and rows[2] == [[7, 8, 9, 1]] * 2
    assert rows[1][0] != rows[1][1] and [1 in row for row in rows[1]] == [False] * 2


def test_one_decode_has_an_axis_only_if_it_is_asked_for():
    """T5X returns [B, 1, L] for one; `generate` without the option has no such axis."""
    one = play([LONG], [LONG], num_decodes=None)
    assert one.tokens.shape == (1, 8) and one.scores.shape == (1,)
    with pytest.raises(ValueError, match="num_decodes"):
        play([LONG], [LONG], num_decodes=0)


def test_the_encoder_runs_once_per_prompt():
    """Rows are repeated behind the prefill: it sees B rows, the loop B x n."""
    seen = []

    class Counting(toys.Script):
        def prefill(self, params, prompt, slots, *, taps=()):
            seen.append(prompt.tokens.shape[0])
            return super().prefill(params, prompt, slots, taps=taps)

    model = Counting()
    decoder = loop.Decoder(model, 4, SmallModel(model, 2), num_decodes=5)
    both = Params(toys.scripts(LONG, LONG), toys.scripts(LONG, LONG))
    keys = toys.row_keys(jax.random.key(0), 2)
    state = jax.eval_shape(lambda: loop.start(decoder, both, toys.script_prompt(0, 1), keys))
    assert seen == [2, 2]  # target and draft
    assert state.cache.length.shape == state.drafter.cache.length.shape == (10,)


def test_streams_of_decodes_are_those_of_no_round():
    """J2, J5: decode keys differ from each other and from every round's."""
    keys = toys.row_keys(jax.random.key(0), 2)
    made = several.streams(keys, 3)
    rounds = [loop.laws.fold(keys, r) for r in range(50)]
    data = lambda k: {tuple(x) for x in np.asarray(jax.random.key_data(k)).tolist()}  # noqa: E731
    assert len(data(made)) == 6 and not data(made) & set().union(*map(data, rounds))


# Scores.


def t5x_log_probs(params, prompt, out, temperature, top_k, rescale):
    """T5X's temperature_sample, restated on teacher-forced logits: NumPy, mask value -1e7."""
    logits = np.asarray(toys.teacher_forced(T5, params, prompt, out.tokens), np.float64)
    if rescale and temperature <= 1e-4:
        return np.zeros(logits.shape[:2])
    if rescale:
        logits = logits / temperature
        if top_k:
            kth = np.sort(logits, axis=-1)[..., -top_k][..., None]
            logits = np.where(logits < kth, -1e7, logits)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, np.asarray(out.tokens)[..., None], 2)[..., 0]


@pytest.mark.parametrize("rescale", [True, False])
def test_log_probs_are_t5x_s(rescale):
    """CONVENTIONS 4: temperature and top-k are in them, or not; EOS counts."""
    (params, draft), prompt = pair_of(3), ask(3)
    for temperature, top_k in ((0.0, 0), (0.7, 0)) if not rescale else ((0.0, 5), (0.7, 5)):
        options = dict(sampling=Sampling(temperature, top_k), rescale_log_probs=rescale, steps=12)
        for out in (decode(params, prompt, draft, **options), decode(params, prompt, **options)):
            expected = t5x_log_probs(params, prompt, out, temperature, top_k, rescale)
            inside = np.arange(12) < np.asarray(out.lengths)[:, None]
            np.testing.assert_allclose(out.log_probs, np.where(inside, expected, 0), atol=2e-4)
            np.testing.assert_allclose(out.scores, np.where(inside, expected, 0).sum(1), atol=1e-3)


# Streaming.


def collected(pieces, batch):
    """(rows of tokens, what the generator returned) of a stream."""
    rows, pieces = [[] for _ in range(batch)], iter(pieces)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return rows, end.value
        for row, words, n in zip(rows, piece.tokens, piece.count, strict=True):
            row.extend(words[:n].tolist())
            assert not words[n:].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_is_the_same_decode(temperature):
    """A1, invariant 5: tokens, counts and reasons of `generate`, bit for bit."""
    (params, draft), prompt = pair_of(5), ask(5)
    common = dict(sampling=Sampling(temperature), key=jax.random.key(2), max_decode_len=24)
    both = dict(drafter=SmallModel(T5, 3), draft_params=draft)
    for extra in (both, {}):
        out = generate(T5, params, prompt, **common, **extra)
        rows, last = collected(stream(T5, params, prompt, **common, **extra), BATCH)
        assert rows == toys.emitted(out) == toys.emitted(last)
        np.testing.assert_array_equal(out.finish_reason, last.finish_reason)
        np.testing.assert_array_equal(out.stats.rounds, last.stats.rounds)


def test_a_stream_ends_where_rows_end_and_compiles_once():
    """A1, A7: [5, 1]; nothing behind an end; one program for all rounds and calls."""
    paths = [[5, 1, 7, 8], LONG, LONG]
    params, prompt = toys.scripts(*paths), toys.script_prompt(0, 1, 2)
    options = dict(drafter=SmallModel(toys.Script(), 3), draft_params=params, max_decode_len=8)
    before = api.jit_round._cache_size()
    for stop in ([[8, 9]], [[6, 7]]):
        pieces = list(stream(toys.Script(), params, prompt, stop=stop, **options))
        rows, _ = collected(pieces, 3)
        assert rows[0] == [5, 1] and rows[1] == LONG[: 5 if stop == [[8, 9]] else 3]
        assert pieces[-1].finish_reason.tolist() == [stopping.STOP] * 3
    assert api.jit_round._cache_size() == before + 1
    assert list(stream(toys.Script(), params, prompt, **options | {"max_decode_len": 0})) == []


def test_a_stream_refuses_at_the_call():
    """Bad values do not wait for the first piece."""
    params, prompt = toys.scripts(LONG), toys.script_prompt(0)
    for bad in ({"max_decode_len": -1}, {"max_decode_len": 3, "num_decodes": 2}):
        with pytest.raises(ValueError):
            stream(toys.Script(), params, prompt, **bad)


@pytest.mark.parametrize("length", [0, 4])
def test_a_prompt_length_outside_its_tokens_is_refused(length):
    """It would be clamped, and read padding, or nothing: a softmax over nothing is NaN."""
    ask = toys.script_prompt(0, 0)._replace(length=jnp.asarray([1, length], jnp.int32))
    with pytest.raises(ValueError, match=r"prompt lengths must lie in 1 \.\. 1, got \[1 "):
        toys.generate(toys.Script(), toys.scripts([5, 1]), ask, max_decode_len=4)
    with pytest.raises(ValueError, match="tokens of 2 rows, but lengths of shape"):
        ask = ask._replace(length=jnp.ones(3, jnp.int32))
        toys.generate(toys.Script(), toys.scripts([5, 1]), ask, max_decode_len=4)
