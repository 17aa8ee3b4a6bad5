"""Stop sequences: inside a block, over two blocks, and against EOS and the limit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate
from specjax.decode import loop, stopping
from specjax.decode.interfaces import Text
from specjax.decode.stopping import LENGTH, LIVE, STOP, Stops
from tests import toys
from tests.toys import OFF_PATH, play

LONG = [*range(5, 20)]
WRONG = [OFF_PATH - 1] * len(LONG)

cut = jax.jit(stopping.cut, static_argnums=4)


def cut_row(before, block, sequences, remaining=20, start=1, count=None):
    """(count, finish) of a block that stands behind ``before``, all of it meant."""
    one = lambda x: jnp.asarray([x], jnp.int32)  # noqa: E731
    words = [0, *before]
    text = Text(one([*words, *[12] * (12 - len(words))]), one(len(words)), one(1), one(start))
    padded = [*block, *[0] * (9 - len(block))]
    count = len(block) if count is None else count
    got = cut(
        one(padded), one(count), one(remaining), one(LIVE), 1, jnp.zeros(1, bool),
        stopping.stops(sequences), text,
    )  # fmt: skip
    return int(got.count[0]), int(got.finish[0])


A7 = [4, 12, 13, 5, 5, 5, 5, 5, 5]


@pytest.mark.parametrize(
    "before, block, sequences, expected",
    [
        ([], A7, [[12, 13]], (3, STOP)),
        ([4, 12], [13, 5, 5], [[12, 13]], (1, STOP)),
        ([4, 12, 5], [13, 5, 5], [[12, 13]], (3, LIVE)),
        ([], [4, 12], [[12, 13]], (2, LIVE)),
        ([3, 4], [5, 6, 7], [[3, 4, 5, 6]], (2, STOP)),
        ([], [5, 6, 7], [[6], [5, 6, 7]], (2, STOP)),
        ([], [5, 6, 7], [[5, 6, 7], [6]], (2, STOP)),
        ([], [5, 1, 7], [[5, 1, 7]], (2, STOP)),
        ([], [7, 1, 7], [[7]], (1, STOP)),
        ([6, 6], [6, 6, 7], [[6, 6, 6, 6]], (2, STOP)),
        ([], [0, 0, 5], [[0, 0]], (2, STOP)),
        ([], [0, 5], [[0, 0]], (2, LIVE)),  # the start token 0 was not emitted
    ],
)
def test_a_block_is_cut_where_a_sequence_is_complete(before, block, sequences, expected):
    """A7: in the middle, over two blocks, several at once, with pad as an id."""
    assert cut_row(before, block, sequences) == expected


def test_limit_count_and_prefix():
    """A5, A7: the limit may come first, or with the last token; what is not meant is not seen."""
    assert cut_row([], [4, 12, 13, 5], [[12, 13]], remaining=2) == (2, LENGTH)
    assert cut_row([], [4, 12, 13, 5], [[12, 13]], remaining=3) == (3, STOP)
    assert cut_row([], [4, 12, 13, 5], [[12, 13]], count=2) == (2, LIVE)
    # A sequence that begins in what was given is not the model's own.
    assert cut_row([4, 12], [13, 5], [[12, 13]], start=3) == (2, LIVE)
    assert cut_row([4, 12], [13, 5], [[12, 13]], start=2) == (1, STOP)


def test_random_blocks_against_a_search():
    """A7: all blocks of two ids behind all texts, every pair of sequences: as a search finds it."""
    rng = np.random.default_rng(0)
    words = list(itertools.product((5, 6), repeat=3))
    for _ in range(40):
        before, block = [*rng.choice([5, 6], 3)], [*rng.choice([5, 6], 4)]
        sequences = [list(words[i][: rng.integers(1, 4)]) for i in rng.integers(0, 8, 2)]
        whole = [*before, *block]
        ends = [k + 1 for k in range(4) for s in sequences if whole[: 4 + k][-len(s) :] == s]
        expected = (min(ends), STOP) if ends else (4, LIVE)
        assert cut_row(before, block, sequences) == expected, (before, block, sequences)


def test_padding_and_empty_rows_of_given_arrays_match_nothing():
    """Arrays as a caller may pad them: nothing behind a length is read, length 0 is none."""
    given = Stops(jnp.asarray([[12, 13, 7], [4, 4, 4]], jnp.int32), jnp.asarray([2, 0], jnp.int32))
    assert stopping.stops(given) is given and stopping.stops(()) is None
    assert cut_row([], [4, 4, 4, 12, 13, 5], given) == (5, STOP)


@pytest.mark.parametrize("stop", [[[]], [[5], []], [[5, -1]]])
def test_sequences_without_ids_are_refused(stop):
    """By name, before anything is traced."""
    with pytest.raises(ValueError, match="stop sequence"):
        play([LONG], [LONG], stop=stop)


def both_ways(stop, max_new=8):
    """Plain decoding, and speculative decoding by a draft that is right, wrong, and in between."""
    half = [t if i % 3 else OFF_PATH - 1 for i, t in enumerate(LONG)]
    spec = play([LONG] * 3, [LONG] * 3, says=[LONG, WRONG, half], stop=stop, max_new=max_new)
    plain = generate(
        toys.Script(), toys.scripts(*[LONG] * 3), toys.script_prompt(0, 1, 2), stop=stop,
        max_decode_len=max_new,
    )  # fmt: skip
    return plain, spec


def test_the_loop_stops_as_plain_decoding_does():
    """A7: ends at every place of a block; tokens, reasons and log-probabilities end together."""
    for end in range(8):
        stop = [LONG[max(0, end - 1) : end + 1], [9, 9, 9]]
        plain, spec = both_ways(stop)
        assert toys.emitted(plain) == toys.emitted(spec) == [LONG[: end + 1]] * 3
        assert plain.finish_reason.tolist() == spec.finish_reason.tolist() == [STOP] * 3
        assert not np.asarray(spec.tokens)[:, end + 1 :].any()
        np.testing.assert_array_equal(spec.stats.emitted, [end + 1] * 3)
        assert (spec.stats.accepted <= spec.stats.tested).all()


def test_ids_of_stop_sequences_cost_no_compile():
    """Must-show 5: other ids and lengths of the same shape run the same program."""
    both_ways([[5, 6], [7, 8]])
    before = [f._cache_size() for f in (loop.jit_start, loop.jit_run)]
    both_ways([[9], [10, 11]])
    assert [f._cache_size() for f in (loop.jit_start, loop.jit_run)] == before
