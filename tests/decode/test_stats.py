"""Counters and the ratios made from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, stats, tree
from specjax.decode.interfaces import Params
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.toys import OFF_PATH, play

SCRIPT, WRONG = [*range(5, 20)], OFF_PATH - 1


def worked_example():
    """gamma 4, accepted [3, 0, 4]: the draft errs at outputs 3 and 4."""
    says = [WRONG if i in (3, 4) else token for i, token in enumerate(SCRIPT)]
    return play([SCRIPT], [SCRIPT], says=[says], gamma=4, max_new=10)


def test_the_worked_example():
    """N1, N3: every number of the example, under its name."""
    out = worked_example()
    got = stats.summary(out.stats)
    assert toys.emitted(out) == [SCRIPT[:10]]
    counts = dict(rounds=3, drafted=12, accepted=7, emitted=10, tested=9)
    counts |= dict(rounds_plain=0, drafted_cut=0)
    assert {name: got[name] for name in counts} == counts
    assert round(got["accepted_per_drafted"], 4) == 0.5833
    assert round(got["accepted_per_tested"], 4) == 0.7778
    assert round(got["mean_accepted"], 3) == 2.333
    assert round(got["block_efficiency"], 3) == 3.333
    assert got["emitted_per_verified"] == pytest.approx(10 / 12)
    assert got["drafted_per_emitted"] == pytest.approx(12 / 10)
    assert got["accepted_by_position"]["marginal"] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert got["accepted_by_position"]["conditional"] == pytest.approx([2 / 3, 1, 1, 1 / 2])
    assert got["accepted_histogram"] == [1, 0, 0, 1, 1]


def test_alpha_is_the_share_of_accepted_tests_when_greedy():
    """B16, section 5: sum min(p, q) over tested positions only."""
    got = stats.summary(worked_example().stats)
    assert got["acceptance_rate"] == pytest.approx(got["accepted_per_tested"])


def test_alpha_is_the_overlap_of_the_laws_when_sampling():
    """B19: a constant pair of laws with overlap .5 gives alpha .5, and acceptance near it."""
    model, ask = toys.Table(3, eos_id=-1), toys.prompt([0])
    target, draft = (
        {"logits": jnp.tile(jnp.log(jnp.asarray(x)), (3, 1))}
        for x in ((0.6, 0.3, 0.1), (0.1, 0.3, 0.6))
    )

    def one(key):
        return generate(
            model, target, ask, drafter=SmallModel(model, 2), draft_params=draft,
            sampling=Sampling(1.0), max_decode_len=12, key=key,
        )  # fmt: skip

    out = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 200))
    out = jax.tree.map(lambda x: x[:, 0], out)
    got = stats.summary(out.stats)
    assert got["acceptance_rate"] == pytest.approx(0.5, abs=1e-5)
    assert abs(got["accepted_per_tested"] - 0.5) < 4 * 0.5 / np.sqrt(got["tested"])
    assert got["accepted_by_position"]["conditional"] == pytest.approx([0.5, 0.5], abs=0.08)


def test_accepting_all_is_a_rate_of_one():
    """N3, D4: never more than 1, though the bonus is emitted."""
    got = stats.summary(play([SCRIPT], [SCRIPT], gamma=4, max_new=10).stats)
    assert got["accepted_per_drafted"] == 1.0 and got["accepted_per_tested"] == 1.0
    assert got["acceptance_rate"] == 1.0 and got["block_efficiency"] == 5.0


def test_nodes_behind_an_accepted_eos_enter_no_ratio():
    """A9, N3, invariant 6: drafted_cut counts them; the rate stays 1."""
    script = [5, 6, 1]
    got = stats.summary(play([script], [script], gamma=4, max_new=10).stats)
    assert (got["drafted"], got["drafted_cut"], got["accepted"], got["emitted"]) == (3, 1, 3, 3)
    assert got["tested"] == 3 and got["accepted_per_drafted"] == 1.0
    assert got["accepted_by_position"]["marginal"] == [1.0, 1.0, 1.0, None]
    assert got["accepted_histogram"] == [0, 0, 0, 1, 0]


def test_drafts_behind_a_rejection_that_eos_replaces_stay_drafted():
    """Invariant 6: EOS as correction cuts nothing that was not refused anyway."""
    got = stats.summary(play([[5, 1]], [[5, 6, 7, 8]], gamma=4, max_new=10).stats)
    assert (got["drafted"], got["drafted_cut"], got["accepted"], got["tested"]) == (4, 0, 1, 2)


def test_one_token_has_a_rate():
    """N5: max_new 1 leaves one node, which counts once."""
    out = play([SCRIPT] * 2, [SCRIPT] * 2, says=[SCRIPT, [WRONG] * 9], gamma=7, max_new=1)
    assert out.stats.drafted.tolist() == [1, 1] and out.stats.emitted.tolist() == [1, 1]
    assert stats.summary(out.stats)["accepted_per_drafted"] == 0.5


def test_nothing_drafted_has_no_rate():
    """N5: plain decoding's ratios over drafts are None, not NaN."""
    out = generate(toys.Script(), toys.scripts(SCRIPT), toys.script_prompt(0), max_decode_len=4)
    got = stats.summary(out.stats)
    assert got["rounds"] == got["rounds_plain"] == got["emitted"] == 4
    for name in ("accepted_per_drafted", "accepted_per_tested", "mean_accepted",
                 "emitted_per_verified", "acceptance_rate"):  # fmt: skip
        assert got[name] is None
    assert got["block_efficiency"] == 1.0 and got["accepted_histogram"] == [0, 0]


@dataclasses.dataclass(frozen=True)
class Hesitant:
    """A drafter that has nothing to say while the text's length is even."""

    inner: SmallModel

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, params, state, text, sampling, keys):
        proposed, state = self.inner.propose(params, state, text, sampling, keys)
        speaks = jnp.broadcast_to((text.length % 2 == 1)[:, None], proposed.valid.shape)
        return tree._swap(proposed, valid=speaks, judged=speaks), state


def test_rounds_without_a_draft_count_as_plain():
    """N4, A13: they add nothing to drafted, tested or the histogram, and are seen."""
    params = toys.scripts(SCRIPT)
    out = generate(
        toys.Script(), params, toys.script_prompt(0), drafter=Hesitant(SmallModel(toys.Script(), 2)),
        draft_params=params, max_decode_len=8,
    )  # fmt: skip
    # Text lengths 1 (3 tokens), 4 (plain), 5 (3 tokens), 8 (plain): 8 tokens.
    got = stats.summary(out.stats)
    assert toys.emitted(out) == [SCRIPT[:8]]
    assert (got["rounds"], got["rounds_plain"], got["drafted"], got["tested"]) == (4, 2, 4, 4)
    assert got["accepted_histogram"] == [0, 0, 2] and got["accepted_per_drafted"] == 1.0
    assert got["mean_accepted"] == 2.0


@dataclasses.dataclass(frozen=True)
class Halting:
    """A drafter whose last node is read and not judged; with ``mute`` none is judged."""

    inner: SmallModel
    mute: bool = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, params, state, text, sampling, keys):
        proposed, state = self.inner.propose(params, state, text, sampling, keys)
        judged = proposed.judged.at[:, -1].set(False) & (not self.mute)
        return tree._swap(proposed, judged=judged), state


@pytest.mark.parametrize("mute", [False, True])
def test_what_is_read_and_not_judged_is_no_draft(mute):
    """N4: it enters no ratio, is never accepted, and a round of nothing else is plain."""
    params = toys.scripts(SCRIPT)
    drafter = Halting(SmallModel(toys.Script(), 3), mute)
    out = generate(
        toys.Script(), params, toys.script_prompt(0), drafter=drafter, draft_params=params,
        max_decode_len=6,
    )  # fmt: skip
    got = stats.summary(out.stats)
    assert toys.emitted(out) == [SCRIPT[:6]]
    counts = [got[name] for name in ("rounds", "rounds_plain", "drafted", "accepted", "tested")]
    assert counts == ([6, 6, 0, 0, 0] if mute else [2, 0, 4, 4, 4])
    marginal = got["accepted_by_position"]["marginal"]
    assert marginal == ([None] * 3 if mute else [1.0, 1.0, None])


def test_speculation_is_not_given_up_silently():
    """A13: a short decode drafts in every round, and no round is plain."""
    out = play([SCRIPT], [SCRIPT])
    assert out.stats.drafted.tolist() == [6] and out.stats.rounds_plain.tolist() == [0]


def test_drafting_seldom_shows():
    """N6: drafted per emitted stands beside the rate."""
    got = stats.summary(worked_example().stats)
    assert got["drafted_per_emitted"] * got["emitted"] == pytest.approx(got["drafted"])


def test_totals_are_sums_over_rows_and_ratios_come_last():
    """M8: the rate of two rows is that of their summed counts, not of the last row."""
    says = [SCRIPT, [WRONG] * 15]
    both = play([SCRIPT] * 2, [SCRIPT] * 2, says=says)
    got = stats.summary(both.stats)
    assert got["accepted"] == 6 and got["drafted"] == 6 + 21
    assert got["accepted_per_drafted"] == 6 / 27


def test_plain_and_speculative_decoding_share_one_counter():
    """N7: emitted is counted alike, EOS included and nothing behind it."""
    script = [*SCRIPT[:4], 1]
    params, ask = toys.scripts(script), toys.script_prompt(0)
    plain = generate(toys.Script(), params, ask, max_decode_len=8)
    spec = play([script], [script])
    assert plain.stats.emitted.tolist() == spec.stats.emitted.tolist() == [5]
    assert plain.stats.rounds.tolist() == [5] and spec.stats.rounds.tolist() == [2]


def test_counters_of_an_ended_row_stand_still():
    """H1, H4: while row 1 goes on, row 0's counters do not grow."""
    model, says = toys.Script(), [SCRIPT, [WRONG] * 15]
    paths = [SCRIPT] * 3
    both = Params(toys.scripts(*paths), toys.scripts(*paths, says=[*says, SCRIPT]))
    decoder = loop.Decoder(model, 8, SmallModel(model, 3))
    rounds = toys.drive(decoder, both, toys.script_prompt(0, 1, 2))
    row = lambda state: [np.asarray(x[0]).tolist() for x in state.stats]  # noqa: E731
    assert len(rounds) == 8 and row(rounds[1].after) == row(rounds[-1].after)
    assert jax.tree.leaves(rounds[1].after.stats)[0].tolist() == [2, 2, 2]
