"""A forced decoder prefix: read once, by target and draft, and no part of what is emitted."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, generate
from specjax.decode import loop, stopping
from specjax.decode.processors import MinLength, RepetitionPenalty
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.toys import ask, decode, pair_of

LONG = [*range(5, 20)]


def forced(prompt, lengths, tokens):
    """The prompt with the first ``lengths`` of each row of ``tokens`` forced."""
    lengths = jnp.asarray(lengths, jnp.int32)
    return prompt._replace(prefix=Prompt(jnp.asarray(tokens, jnp.int32), lengths))


def test_decoding_goes_on_where_the_prefix_ends():
    """O5, invariant 1: forcing the first n tokens of an output leaves the rest; rows are ragged."""
    (params, draft), prompt = pair_of(0), ask(0)
    free = decode(params, prompt, steps=12, eos_id=-1)
    lengths = np.asarray([0, 1, 3, 5])
    words = np.where(np.arange(5) < lengths[:, None], np.asarray(free.tokens)[:, :5], 31)
    asked = forced(prompt, lengths, words)
    plain = decode(params, asked, steps=7, eos_id=-1)
    spec = decode(params, asked, draft, steps=7, eos_id=-1)
    rest = [row[n : n + 7] for row, n in zip(toys.emitted(free), lengths, strict=True)]
    assert toys.emitted(plain) == toys.emitted(spec) == rest
    for out in (plain, spec):
        assert out.lengths.tolist() == out.stats.emitted.tolist() == [7] * 4
        assert out.finish_reason.tolist() == [stopping.LENGTH] * 4
    assert float(spec.stats.accepted.sum() / spec.stats.drafted.sum()) > 0.3


def test_caches_begin_with_the_prefix():
    """Invariant 4, O1: target and draft hold all of the text but its newest token; no hole."""
    path = LONG
    decoder, both, prompt = toys.scripted(path, [path] * 3)
    asked = forced(prompt, [0, 2, 4], [path[:4]] * 3)
    rounds = toys.drive(decoder, both, asked)
    first, last = rounds[0].before, rounds[-1].after
    assert first.text.length.tolist() == first.text.start.tolist() == [1, 3, 5]
    for _, before, after in rounds:
        for state in (before, after):
            np.testing.assert_array_equal(state.cache.length, state.text.length - 1)
    np.testing.assert_array_equal(first.drafter.cache.length, first.text.length - 1)
    # Toys say NaN where a position is missing or there twice.
    assert last.finish.tolist() == [stopping.LENGTH] * 3
    out = loop.jit_decoded(decoder, last)
    assert toys.emitted(out) == [path[n : n + 8] for n in (0, 2, 4)]
    np.testing.assert_array_equal(last.stats.accepted, last.stats.drafted)


def test_nothing_is_asked_for_behind_a_prefix():
    """A14: max_decode_len 0 gives [B, 0], no round; a prefix of no tokens is none."""
    prompt = toys.script_prompt(0, 1)
    params = toys.scripts(LONG, LONG)
    asked = forced(prompt, [0, 2], [LONG[:3]] * 2)
    out = generate(toys.Script(), params, asked, max_decode_len=0)
    assert out.tokens.shape == (2, 0) and out.stats.rounds.tolist() == [0, 0]
    assert out.finish_reason.tolist() == [stopping.LENGTH] * 2
    for none in (forced(prompt, [0, 0], np.zeros((2, 0))), forced(prompt, [0, 0], [LONG[:3]] * 2)):
        out = generate(toys.Script(), params, none, max_decode_len=3)
        assert toys.emitted(out) == [LONG[:3]] * 2


def test_an_eos_in_the_prefix_ends_nothing():
    """A14: as in T5X, only an emitted EOS ends a row."""
    path = [5, 1, 7, 8, 1, 9]
    prompt = forced(toys.script_prompt(0), [2], [[5, 1]])
    out = generate(toys.Script(), toys.scripts(path), prompt, max_decode_len=5)
    assert toys.emitted(out) == [[7, 8, 1]] and out.finish_reason.tolist() == [stopping.STOP]


def test_a_prefix_is_history_but_not_emitted():
    """A penalty sees the prefix; a minimum length and stop sequences do not count it."""
    model, params = toys.Table(4), {"logits": jnp.asarray([[2.0, 1.5, 1.2, 0.0]] * 4)}
    prompt = forced(toys.prompt([0]), [1], [[0]])
    common = dict(max_decode_len=3, eos_id=1)
    both = dict(drafter=SmallModel(model, 2), draft_params=params)
    for extra in ({}, both):
        out = generate(
            model, params, prompt, **common, **extra,
            sampling=Sampling(processors=(RepetitionPenalty(2.0), MinLength(1))),
        )  # fmt: skip
        assert toys.emitted(out) == [[2, 1]]
    out = generate(model, params, prompt, stop=[[0, 0]], **common)
    assert toys.emitted(out) == [[0, 0]]


@pytest.mark.parametrize(
    "lengths, tokens", [([3], [[5, 6]]), ([-1], [[5, 6]]), ([1, 1], [[5], [5]])]
)
def test_a_prefix_that_does_not_fit_is_refused(lengths, tokens):
    """By name, before anything is traced."""
    with pytest.raises(ValueError, match="prefix"):
        generate(
            toys.Script(), toys.scripts(LONG), forced(toys.script_prompt(0), lengths, tokens),
            max_decode_len=3,
        )  # fmt: skip


def test_sampling_behind_a_prefix_is_a_row_s_own():
    """Invariant 5: other rows' prefixes change nothing in a row."""
    (params, draft), prompt = pair_of(1), ask(1)
    words = np.tile(np.asarray(LONG[:4]), (4, 1))
    a = decode(params, forced(prompt, [2, 1, 4, 0], words), draft, steps=7, sampling=Sampling(1.0))
    b = decode(params, forced(prompt, [2, 4, 0, 0], words), draft, steps=7, sampling=Sampling(1.0))
    for row in (0, 3):
        np.testing.assert_array_equal(a.tokens[row], b.tokens[row])
