"""Where a sequence ends: the cut itself, and the real loop on scripted models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate, stream
from specjax.decode import loop, refill, stopping, tree
from specjax.decode import stats as counters
from specjax.decode.interfaces import Params
from specjax.decode.processors import MinLength
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.toys import OFF_PATH, play

LIVE, STOP, LENGTH, ERROR = stopping.LIVE, stopping.STOP, stopping.LENGTH, stopping.ERROR
LONG = [*range(5, 20)]  # no EOS within 15 outputs

cut = jax.jit(stopping.cut, static_argnums=4)


def cut_row(tokens, count, remaining, finish=LIVE, eos_id=1):
    """(count, finish) of one row."""
    one = lambda x: jnp.asarray([x], jnp.int32)  # noqa: E731
    got = cut(one(tokens), one(count), one(remaining), one(finish), eos_id)
    return int(got.count[0]), int(got.finish[0])


# The cut.


@pytest.mark.parametrize(
    "tokens, count, remaining, expected",
    [
        ([5, 6, 7, 8], 4, 9, (4, LIVE)),
        ([5, 1, 7, 8], 4, 9, (2, STOP)),
        ([5, 6, 7, 1], 4, 9, (4, STOP)),
        ([5, 6, 7, 1], 3, 9, (3, LIVE)),
        ([5, 1, 7, 1], 4, 9, (2, STOP)),
        ([1, 1, 1, 1], 4, 9, (1, STOP)),
        ([5, 6, 7, 8], 4, 3, (3, LENGTH)),
        ([5, 6, 7, 8], 4, 4, (4, LENGTH)),
        ([5, 6, 7, 1], 4, 4, (4, STOP)),
        ([5, 6, 7, 1], 4, 3, (3, LENGTH)),
        ([5, 6, 1, 8], 4, 3, (3, STOP)),
        ([5, 6, 7, 8], 4, 0, (0, LENGTH)),
    ],
)
def test_a_block_is_cut_at_the_first_eos_and_at_the_limit(tokens, count, remaining, expected):
    """A1, A5: EOS anywhere among the meant tokens; as the last permitted token it is a stop."""
    assert cut_row(tokens, count, remaining) == expected


@pytest.mark.parametrize("finish", [STOP, LENGTH, ERROR])
def test_an_ended_row_keeps_nothing(finish):
    """H4: a row that has ended gains no token and keeps its reason."""
    assert cut_row([5, 6, 7, 8], 4, 9, finish) == (0, finish)


def test_a_broken_law_is_an_error_unless_the_row_ends_before_it():
    """B14: tokens before it stay; EOS or the limit come first where they lie before it."""
    one = lambda x: jnp.asarray([x] * 3, jnp.int32)  # noqa: E731
    tokens = jnp.asarray([[5, 6, 7, 8], [5, 1, 7, 8], [5, 6, 7, 8]], jnp.int32)
    remaining = jnp.asarray([9, 9, 2], jnp.int32)
    got = cut(tokens, one(2), remaining, one(LIVE), 1, jnp.ones(3, bool))
    assert got.count.tolist() == [2, 2, 2] and got.finish.tolist() == [ERROR, STOP, LENGTH]


def test_no_eos_means_none():
    """G2: eos_id -1 matches no token."""
    assert cut_row([0, 1, 2, 3], 4, 9, eos_id=-1) == (4, LIVE)


@jax.jit
def _simulated_round(gamma, left, wanted, position, finish, eos_at):
    """A round of scripted acceptance: limit, accept, cut, as the loop does it."""
    index = jnp.arange(8, dtype=jnp.int32)[None]
    tokens = jnp.where(index + position[:, None] == eos_at[:, None], 1, 5)
    chain = tree.chain(tokens[:, :-1], index[:, :-1] < gamma[:, None], None)
    valid = tree.limit(chain, left).valid.sum(1, dtype=jnp.int32)
    return stopping.cut(tokens, jnp.minimum(wanted, valid) + 1, left, finish, 1)


def test_every_limit_and_acceptance_gives_exactly_the_tokens_asked_for():
    """A5, A6: gamma 1..7, limits 0..12, any acceptance, EOS at any output or none."""
    grid = np.stack(np.meshgrid(range(1, 8), range(13), range(8), range(14), indexing="ij"))
    gamma, limit, wanted, eos_at = grid.reshape(4, -1).astype(np.int32)
    count, rounds = np.zeros_like(limit), np.zeros_like(limit)
    finish = np.where(limit == 0, LENGTH, LIVE).astype(np.int32)
    while (finish == LIVE).any():
        live = finish == LIVE
        kept = _simulated_round(gamma, limit - count, wanted, count, finish, eos_at)
        count, finish, rounds = count + kept.count, np.asarray(kept.finish), rounds + live
        assert (kept.count[live] > 0).all()
    np.testing.assert_array_equal(count, np.minimum(limit, eos_at + 1))
    np.testing.assert_array_equal(finish, np.where(eos_at < limit, STOP, LENGTH))
    np.testing.assert_array_equal(rounds, -(-count // (np.minimum(wanted, gamma) + 1)))


# The real loop.


def test_eos_accepted_inside_a_block_ends_the_row():
    """A1, A8, A9: script [5, 1, 7, 8] on both sides, gamma 3."""
    out = play([[5, 1, 7, 8]], [[5, 1, 7, 8]])
    assert out.tokens.tolist() == [[5, 1, 0, 0, 0, 0, 0, 0]]
    assert out.lengths.tolist() == [2] and out.finish_reason.tolist() == [STOP]
    stats = jax.tree.map(lambda x: x[0], out.stats)
    assert (stats.drafted + stats.drafted_cut, stats.drafted_cut) == (3, 1)
    assert (stats.emitted, stats.accepted, stats.rounds) == (2, 2, 1)
    assert stats.accepted_at.tolist() == [1, 1, 0] and stats.drafted_at.tolist() == [1, 1, 0]


def test_log_probs_are_cut_with_the_tokens():
    """A8: every token has its log-probability under the law, everything behind the end 0."""
    out = play([[5, 1, 7, 8], LONG], [[5, 1, 7, 8], LONG], sampling=toys.Sampling(1.0))
    assert toys.emitted(out) == [[5, 1], LONG[:8]]
    certain = 10 - np.log(np.exp(10) + toys.VOCAB - 1)  # the scripts' gap is 10 nats
    assert certain < -1e-3
    expected = np.where(np.arange(8) < np.asarray(out.lengths)[:, None], certain, 0)
    np.testing.assert_allclose(out.log_probs, expected, atol=1e-5)


def test_an_eos_that_the_target_refuses_ends_nothing():
    """A3: draft [5, 1, 1, 1], target [5, 6, 7, 1]."""
    out = play([[5, 6, 7, 1]], [[5, 1, 1, 1]])
    assert toys.emitted(out) == [[5, 6, 7, 1]] and out.finish_reason.tolist() == [STOP]


def test_eos_as_correction_and_as_bonus_ends_the_row():
    """A1: EOS need not be drafted."""
    correction, bonus = [5, 6, 1, 9], [5, 6, 7, 1]
    out = play([correction, bonus], [[5, 6, 7, 9], [5, 6, 7, 9]])
    assert toys.emitted(out) == [[5, 6, 1], [5, 6, 7, 1]]
    assert out.finish_reason.tolist() == [STOP, STOP] and out.stats.rounds.tolist() == [1, 1]


def test_the_budget_is_charged_with_what_is_emitted():
    """A6: max_new 6, gamma 4, all accepted: 6 tokens, in rounds of 5 and 1."""
    out = play([LONG], [LONG], gamma=4, max_new=6)
    assert toys.emitted(out) == [LONG[:6]] and out.finish_reason.tolist() == [LENGTH]
    assert out.stats.emitted.tolist() == [6] and out.stats.rounds.tolist() == [2]
    # Of the second chain only the first node could be emitted.
    assert out.stats.drafted.tolist() == [4 + 1] and out.stats.drafted_cut.tolist() == [0]


@pytest.mark.parametrize("max_new, gamma", [(5, 3), (1, 1), (1, 7)])
def test_exactly_the_asked_number_of_tokens_through_the_loop(max_new, gamma):
    """A5: rows that accept all, nothing, and every second draft."""
    every_second = [t if i % 2 else OFF_PATH - 1 for i, t in enumerate(LONG)]
    nothing = [OFF_PATH - 1] * len(LONG)
    says = [LONG, nothing, every_second]
    out = play([LONG] * 3, [LONG] * 3, says=says, gamma=gamma, max_new=max_new)
    assert toys.emitted(out) == [LONG[:max_new]] * 3
    assert out.finish_reason.tolist() == [LENGTH] * 3
    assert out.stats.rounds[:2].tolist() == [-(-max_new // (gamma + 1)), max_new]
    assert out.stats.emitted.tolist() == [max_new] * 3


def test_rows_end_on_their_own():
    """H1, H4: row 0 accepts all, row 1 nothing; their rounds, tokens and counters are their own."""
    says = [LONG, [OFF_PATH - 1] * len(LONG)]
    out = play([LONG] * 2, [LONG] * 2, says=says)
    assert toys.emitted(out) == [LONG[:8]] * 2
    assert out.stats.rounds.tolist() == [2, 8] and out.stats.accepted.tolist() == [6, 0]
    # Row 0 drafts 3 and 3 and is done; row 1 drafts 3 until fewer are left: 6 x 3 + 2 + 1.
    assert out.stats.drafted.tolist() == [6, 21]
    early, late = [5, 1], [*LONG[:6], 1]
    out = play([early, late], [early, late], says=[early, [OFF_PATH - 1] * 9])
    assert toys.emitted(out) == [early, late] and out.tokens[0, 2:].tolist() == [0] * 6
    assert out.stats.rounds.tolist() == [1, 7] and out.stats.drafted.tolist() == [2, 21 - 1]


def test_nothing_is_asked_for():
    """A14, H4: max_new 0 gives [B, 0], no round and no NaN in any ratio."""
    for drafter in (SmallModel(toys.Script(), 3), None):
        params = toys.scripts(LONG, LONG)
        out = generate(
            toys.Script(), params, toys.script_prompt(0, 1), drafter=drafter,
            draft_params=params, max_decode_len=0,
        )  # fmt: skip
        assert out.tokens.shape == (2, 0) and out.lengths.tolist() == [0, 0]
        assert out.finish_reason.tolist() == [LENGTH, LENGTH]
        assert out.stats.rounds.tolist() == [0, 0]
        ratios = counters.summary(out.stats)
        assert ratios["accepted_per_drafted"] is None and ratios["block_efficiency"] is None


def test_token_zero_is_a_token():
    """O5, C9, invariant 9: what ends a row is its length, and a target that says 0 is heard."""
    script = [5, 0, 0, 7, 1]
    out = play([script, script], [script, [5, 6]])
    assert toys.emitted(out) == [script, script]
    assert out.lengths.tolist() == [5, 5]
    assert out.stats.accepted.tolist()[1] == 1  # drafts off the path are 31, not 0


def test_another_eos_can_be_asked_for():
    """A1: eos_id 7 in place of the model's."""
    out = play([[5, 1, 7, 8]], [[5, 1, 7, 8]], eos_id=7)
    assert toys.emitted(out) == [[5, 1, 7]]


def test_several_eos_can_be_asked_for():
    """A1: whichever comes first, drafted or the target's own; the model's own is then none."""
    rows = [[5, 1, 7, 8], [5, 6, 9, 7], [5, 6, 8, 7]]
    for draft in (rows, [[4]] * 3):
        out = play(rows, draft, eos_id=[7, 9], max_new=4)
        assert toys.emitted(out) == [[5, 1, 7], [5, 6, 9], [5, 6, 8, 7]]
        assert out.finish_reason.tolist() == [stopping.STOP] * 3


class Several(toys.Script):
    """A model with more ids that end a text than its EOS."""

    other_eos_ids = (7, 9)


ENDS = [[5, 9, 1, 8], [5, 1, 8, 8], [5, 6, 8, 7]]


def pieces(model, **options):
    """What `stream` yields, row by row."""
    found = stream(model, toys.scripts(*ENDS), toys.script_prompt(0, 1, 2), **options)
    rows = [[], [], []]
    for piece in found:
        for row, tokens, count in zip(rows, piece.tokens, piece.count, strict=True):
            row += tokens[:count].tolist()
    return rows


def refilled(model, **options):
    """What continuous batching gives."""
    decoder = loop.Decoder(model, options["max_decode_len"], eos_id=stopping.end_ids(model))
    requests = [refill.Request(i, np.asarray([i], np.int32)) for i in range(3)]
    params = Params(toys.scripts(*ENDS), None)
    found = dict(refill.Refill(decoder, 2, 1)(params, requests, Sampling(), jax.random.key(0)))
    return [found[i].tokens[: found[i].lengths].tolist() for i in range(3)]


def test_a_model_s_text_ends_at_any_of_its_ids():
    """In all that decodes, unless ids are given: then at these alone."""
    words = [[5, 9], [5, 1], [5, 6, 8, 7]]
    options = dict(max_decode_len=6)
    both = (Several(), toys.scripts(*ENDS), toys.script_prompt(0, 1, 2))
    out = generate(*both, **options)
    assert toys.emitted(out) == words and out.finish_reason.tolist() == [stopping.STOP] * 3
    assert pieces(Several(), **options) == refilled(Several(), **options) == words
    assert stopping.end_ids(Several()) == (1, 7, 9) and stopping.end_ids(toys.Script()) == 1
    own = [[5, 9, 1], [5, 1], [*ENDS[2], OFF_PATH, OFF_PATH]]
    assert toys.emitted(generate(*both, eos_id=1, **options)) == own
    assert pieces(toys.Script(), **options) == own


def test_a_minimum_length_forbids_all_ids_that_end_a_text():
    """transformers': as long as one of them may come, the text may end."""
    both = (Several(), toys.scripts(*ENDS), toys.script_prompt(0, 1, 2))
    sampling = Sampling(processors=(MinLength(3, [9, 7, 1]),))
    out = generate(*both, max_decode_len=6, sampling=sampling)
    assert (out.lengths >= 3).all() and not np.isin(out.tokens[:, :3], (1, 7, 9)).any()
    with pytest.raises(
        ValueError, match=r"MinLength forbids id 1, but text ends at id \(1, 7, 9\)"
    ):
        generate(*both, max_decode_len=6, sampling=Sampling(processors=(MinLength(3),)))


def test_a_negative_length_is_refused():
    """A5: by name, before anything is traced."""
    with pytest.raises(ValueError, match="max_decode_len"):
        play([LONG], [LONG], max_new=-1)
