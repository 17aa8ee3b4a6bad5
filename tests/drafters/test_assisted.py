"""Assisted generation: chains of a length that each row finds for itself."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, generate
from specjax.decode import loop, refill, stopping, tree
from specjax.decode import sampling as laws
from specjax.decode.interfaces import Params
from specjax.decode.processors import RepetitionPenalty
from specjax.decode.refill import Refill, Request
from specjax.decode.verify import BlockVerification, SpeculativeSampling
from specjax.drafters import assisted
from specjax.drafters.assisted import Assisted, Schedule
from specjax.drafters.small_model import SmallModel
from specjax.partitioning import mesh as meshes
from specjax.partitioning.rules import Partitioner
from tests import toys
from tests.decode.laws import block_outcomes, chain_rule, distance, outcomes
from tests.drafters import test_small_model as small
from tests.toys import OFF_PATH, STEPS, T5

x64 = pytest.mark.usefixtures("x64")
SCRIPT = [*range(5, 5 + toys.SCRIPT_LENGTH)]
GAMMA, UNSURE = 5, 0.1
BOTH_RULES = Assisted(T5, GAMMA, Schedule(start=3), 0.25)


# The law of whole outputs, by enumeration.

SIZE, LENGTH, EXACT, SURE = 3, 4, 1e-12, 0.4


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, prefix, gamma, sampling, u):
    """The production proposal behind a text, with the uniforms ``u`` for its draws."""
    ask = Prompt(jnp.zeros((u.shape[0], 1), jnp.int32), jnp.ones(u.shape[0], jnp.int32), prefix)
    prefilled = drafter.model.prefill(params.draft, ask, LENGTH + 8)
    state = drafter.init(params, prefilled, LENGTH + 8)
    state = state._replace(gamma=jnp.full(u.shape[0], gamma))
    keys = toys.row_keys(jax.random.key(0), u.shape[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assisted.laws, "uniform", lambda *_: u)
        return drafter.propose(params, state, prefilled.text, sampling, keys)[0]


class AssistedLaw:
    """The law of outputs: production drafts, verdicts and schedule, over all that may be drawn.

    ``dropped`` leaves the token out that a row stopped at.
    """

    def __init__(self, verifier, drafter, seed, temperature=1.0, eos_id=-1, dropped=False):
        self.verifier, self.drafter, self.eos_id, self.dropped = verifier, drafter, eos_id, dropped
        tables = toys.table_pair(seed, SIZE)
        self.params = Params(*({"logits": jnp.asarray(x)} for x in tables))
        self.sampling = Sampling(temperature).rows(SIZE**drafter.gamma)
        one = Sampling(temperature).rows(1)
        self.p, self.q = (np.asarray(laws.log_law(jnp.asarray(x)[None], one))[0] for x in tables)
        self.softmax = np.exp(tables[1]) / np.exp(tables[1]).sum(-1, keepdims=True)
        self.sure = self.softmax if temperature == 0 else np.exp(self.q)
        self.known, self.lengths = {}, set()

    def target(self, text):
        return self.p[text[-1]]

    def after(self, text, gamma):
        """{output: probability} of all that may follow ``text`` while ``gamma`` may be drafted."""
        if len(text) == LENGTH + 1 or (len(text) > 1 and text[-1] == self.eos_id):
            return {text[1:]: 1.0}
        if (text, gamma) not in self.known:
            self.known[text, gamma] = self._round(text, gamma)
        return self.known[text, gamma]

    def _drafts(self, text, gamma):
        """(tree, chance ``[R]``) of all drafts, each drawn at the middle of its quantiles."""
        rows = np.asarray(list(itertools.product(range(SIZE), repeat=self.drafter.gamma)))
        before = np.concatenate([np.full_like(rows[:, :1], text[-1]), rows[:, :-1]], axis=1)
        q = np.exp(self.q)
        upto = np.cumsum(q, axis=1)
        chance = q[before, rows].prod(1)
        u = jnp.asarray(upto[before, rows] - q[before, rows] / 2)
        width = len(rows), LENGTH
        words = np.zeros(width, np.int32)
        words[:, : len(text) - 1] = text[1:]
        prefix = Prompt(jnp.asarray(words), jnp.full(len(rows), len(text) - 1, jnp.int32))
        nodes = propose(self.drafter, self.params, prefix, gamma, self.sampling, u)
        drafted = np.asarray(nodes.valid).sum(1)
        self._check(nodes, drafted, rows, self.sure[before, rows], gamma, chance)
        if self.dropped:
            last = self.sure[before, rows][np.arange(len(rows)), drafted - 1]
            drafted = drafted - (last < self.drafter.confidence)
        valid = jnp.asarray(np.arange(rows.shape[1])[None] < drafted[:, None])
        nodes = dataclasses.replace(
            nodes, valid=valid, judged=valid, tokens=jnp.asarray(rows, jnp.int32)
        )
        return rows, nodes, chance

    def _check(self, nodes, drafted, rows, sure, gamma, chance):
        """The tokens meant were drafted, up to the first that the draft was not sure of."""
        stop = [next((i + 1 for i, s in enumerate(row) if not s >= SURE), gamma) for row in sure]
        possible = chance > 0
        np.testing.assert_array_equal(drafted[possible], np.minimum(stop, gamma)[possible])
        own = np.asarray(nodes.valid) & possible[:, None]
        np.testing.assert_array_equal(np.asarray(nodes.tokens)[own], rows[own])
        self.lengths |= set(drafted[possible].tolist())

    def _round(self, text, gamma):
        rows, nodes, chance = self._drafts(text, gamma)
        left = LENGTH + 1 - len(text)
        nodes = tree.limit(nodes, jnp.full(len(rows), left, jnp.int32))
        prefixes = [[(*text, *r[:i]) for i in range(len(r) + 1)] for r in rows.tolist()]
        log_p = jnp.asarray([[self.target(prefix) for prefix in row] for row in prefixes])
        drafted = nodes.valid.sum(1, dtype=jnp.int32)
        out, judge = (
            {},
            block_outcomes if isinstance(self.verifier, BlockVerification) else outcomes,
        )
        for accepted, weight, law in judge(self.verifier, nodes, log_p):
            moved = self.drafter.moved(
                jnp.full(len(rows), gamma), drafted, jnp.asarray(accepted, jnp.int32)
            )
            for r in np.flatnonzero(chance * weight):
                for token in np.flatnonzero(law[r]):
                    words = (*rows[r, : accepted[r]].tolist(), int(token))[:left]
                    if self.eos_id in words:
                        words = words[: words.index(self.eos_id) + 1]
                    total = chance[r] * weight[r] * law[r, token]
                    for output, rest in self.after((*text, *words), int(moved[r])).items():
                        out[output] = out.get(output, 0.0) + total * rest
        return out


def error(verifier, seed, gamma=3, start=2, **options):
    """(distance of the law from the target's own, lengths of the drafts)."""
    drafter = Assisted(toys.Table(SIZE), gamma, Schedule(start), SURE)
    law = AssistedLaw(verifier, drafter, seed, **options)
    found = law.after((0,), start)
    assert sum(found.values()) == pytest.approx(1, abs=EXACT)
    return distance(found, chain_rule(law.target, LENGTH, law.eos_id)), law


@x64
@pytest.mark.parametrize("verifier", [SpeculativeSampling(), BlockVerification()])
@pytest.mark.parametrize("eos_id", [-1, 2])
def test_both_rules_leave_the_law_as_it_is(verifier, eos_id):
    """Invariant 2: to 1e-12 for every output, with blocks of all lengths and schedules."""
    lengths, gammas = set(), set()
    for seed in (0, 1):
        distance, law = error(verifier, seed, eos_id=eos_id)
        assert distance < EXACT
        lengths |= law.lengths
        gammas |= {gamma for _, gamma in law.known}
    assert lengths == {1, 2, 3} and gammas == {1, 2, 3}


@x64
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_other_temperatures_are_exact_too(temperature):
    """A greedy row's confidence is its softmax, a sampling row's its law."""
    distance, law = error(SpeculativeSampling(), 2, temperature=temperature)
    assert distance < EXACT and len(law.lengths) > 1


@x64
@pytest.mark.parametrize("verifier", [SpeculativeSampling(), BlockVerification()])
def test_leaving_out_the_token_that_stopped_bends_the_law(verifier):
    """Design, section 3: it was kept or not by looking at what was drawn."""
    assert max(error(verifier, seed, dropped=True)[0] for seed in (0, 1)) > 1e-3


# The schedule.

SAYS_WRONG = [(), range(16), (3,), (1, 2, 7, 12), (0, 1, 2, 3, 4), (9, 10, 11)]
LONGEST = 15


def played(wrong, schedule, gamma):
    """(drafted, accepted, gamma after) of each round of a row, by the rule in words."""
    said, now, rounds = 0, schedule.start, []
    while said < LONGEST:
        drafted = min(now, gamma, LONGEST - said)
        accepted = 0
        while accepted < drafted and said + accepted not in wrong:
            accepted += 1
        if accepted == drafted:
            now = min(now + schedule.up, gamma)
        else:
            now = max(1, now - schedule.down)
        rounds.append((drafted, accepted, now))
        said += accepted + 1
    return rounds


@pytest.mark.parametrize("schedule, gamma", [(Schedule(), 8), (Schedule(2, 3, 2), 6)])
def test_a_row_s_gamma_follows_what_was_accepted(schedule, gamma):
    """Round by round, against the rule in words; lags of the cache and counts of drafts too."""
    says = [[OFF_PATH - 1 if i in w else t for i, t in enumerate(SCRIPT)] for w in SAYS_WRONG]
    rows = len(says)
    both = Params(toys.scripts(*[SCRIPT] * rows), toys.scripts(*[SCRIPT] * rows, says=says))
    decoder = loop.Decoder(toys.Script(), LONGEST, Assisted(toys.Script(), gamma, schedule))
    expected = [played(wrong, schedule, gamma) for wrong in SAYS_WRONG]
    rounds = toys.drive(decoder, both, toys.script_prompt(*range(rows)))
    assert len(rounds) == max(map(len, expected))
    for i, (nodes, before, after) in enumerate(rounds):
        seen = [jax.device_get(seen_of(state)) for state in (before, after)]
        taken, grown = (seen[1][name] - seen[0][name] for name in ("accepted", "length"))
        drafted = np.minimum(np.asarray(nodes.valid).sum(1), LONGEST + 1 - seen[0]["length"])
        for row, script in enumerate(expected):
            if i >= len(script):  # it has ended: nothing moves, and soon it keeps nobody waiting
                assert seen[1]["gamma"][row] == seen[0]["gamma"][row] and grown[row] == 0
                assert nodes.valid[row].sum() == 1 or i == len(script)
                continue
            assert (drafted[row], taken[row], seen[1]["gamma"][row]) == script[i]
            # The last draft was not read: where it is followed by a bonus token, the cache lacks it.
            assert seen[1]["lag"][row] == 1 + (grown[row] == script[i][0] + 1)
    last = rounds[-1].after
    assert last.stats.drafted.tolist() == [sum(d for d, *_ in script) for script in expected]
    assert last.text.tokens[:, 1 : LONGEST + 1].tolist() == [SCRIPT[:LONGEST]] * rows


def seen_of(state):
    """What the schedule and the caches of a state are."""
    length, drafter = state.text.length, state.drafter
    lag = length - drafter.cache.length
    return dict(accepted=state.stats.accepted, length=length, gamma=drafter.gamma, lag=lag)


def tables(seed):
    """A table model of 32 words, its parameters, and those of a draft that often agrees."""
    target, noise = toys.table_pair(seed, toys.VOCAB)
    as_params = lambda x: {"logits": jnp.asarray(x, jnp.float32)}  # noqa: E731
    return toys.Table(), as_params(2 * target), as_params(2 * target + 0.3 * noise)


def test_without_the_rules_it_is_a_small_model():
    """Bit for bit, tokens and counts."""
    model, params, draft = tables(0)
    options = dict(draft_params=draft, max_decode_len=STEPS, sampling=Sampling(1.0, top_p=0.9))
    ask = toys.prompt([0], [0], [0])
    expected = generate(model, params, ask, drafter=SmallModel(model, 3), **options)
    out = generate(model, params, ask, drafter=Assisted(model, 3, None, None), **options)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


class Counting(toys.Script):
    """Counts the steps that the host sees it make."""

    steps = []

    def extend(self, *args, **kwargs):
        jax.debug.callback(lambda: self.steps.append(1))
        return super().extend(*args, **kwargs)


@pytest.mark.parametrize("wrong", [(), range(16), (3, 4, 9)])
def test_one_row_costs_no_draft_step_more_than_it_drafts(wrong):
    """The first block drafts one token, every further one a step."""
    says = [OFF_PATH - 1 if i in wrong else t for i, t in enumerate(SCRIPT)]
    drafter = Assisted(Counting(), 8)
    Counting.steps.clear()
    out = generate(
        toys.Script(), toys.scripts(SCRIPT), toys.script_prompt(0), drafter=drafter,
        draft_params=toys.scripts(SCRIPT, says=[says]), max_decode_len=LONGEST,
    )  # fmt: skip
    jax.block_until_ready(out)
    jax.effects_barrier()
    rounds = played(wrong, Schedule(), 8)
    assert out.stats.rounds.tolist() == [len(rounds)]
    # The last round drafts what the schedule says, of which the length limit takes a part.
    before = [5, *(now for *_, now in rounds[:-1])]
    assert len(Counting.steps) == sum(before)


def test_nothing_is_drafted_behind_the_draft_s_longest_text():
    """As with `SmallModel`; and nothing is read there."""
    decoder = loop.Decoder(toys.Script(), 12, Assisted(small.Short(), 5))
    both = Params(*[toys.scripts(SCRIPT)] * 2)
    for nodes, before, _ in toys.drive(decoder, both, toys.script_prompt(0)):
        slot = int(before.text.length[0]) + np.arange(5)
        np.testing.assert_array_equal(nodes.valid[0], slot <= 6)


@pytest.mark.parametrize(
    "bad",
    [
        dict(gamma=4),
        dict(gamma=0),
        dict(confidence=0.0),
        dict(confidence=1.1),
        dict(confidence=-1.0),
    ],
)
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match="gamma|confidence"):
        Assisted(T5, **bad)


@pytest.mark.parametrize("bad", [dict(start=0), dict(up=-1), dict(down=-1)])
def test_a_schedule_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match="schedule"):
        Schedule(**bad)


# Against a drafter that recomputes from the text.


@functools.partial(jax.jit, static_argnums=0)
def softmax_of(model, params, prompt, text, tokens):
    """The draft's own softmax at each of ``tokens`` behind the text."""
    mask = jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)[None] < prompt.length[:, None]
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    logits = model.forward(params, prompt.tokens, mask, write(text.tokens, tokens, text.length))
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    at = (text.length[:, None] - 1 + index)[..., None]
    log_p = jax.nn.log_softmax(jnp.take_along_axis(logits, at, axis=1), axis=-1)
    return jnp.exp(jnp.take_along_axis(log_p, tokens[..., None], axis=2)[..., 0])


@functools.cache
def compared(seed, temperature):
    """{(drafted, accepted)} of a decode whose every round is compared."""
    both, sampling = small.pair(seed), Sampling(temperature, 0, 0.9)
    drafter = Assisted(small.DRAFT_MODEL, GAMMA, Schedule(3), UNSURE)
    decoder = dataclasses.replace(small.DECODER, drafter=drafter)
    rounds = toys.drive(decoder, both, small.PROMPT, sampling, jax.random.key(seed))
    rows, found, gamma = sampling.rows(small.BATCH), set(), [3] * small.BATCH
    for nodes, before, after in rounds:
        keys = laws.fold(before.keys, before.stats.rounds)
        ask = small.DRAFT_MODEL, GAMMA, both.draft, small.PROMPT, before.text
        tokens, log_q = map(np.asarray, small.recompute(*ask, rows, keys))
        sure = np.exp(np.take_along_axis(log_q, tokens[..., None], 2)[..., 0])
        if temperature == 0:
            sure = np.asarray(softmax_of(*ask[:1], *ask[2:], jnp.asarray(tokens)))
        old, new = (jax.device_get(seen_of(state)) for state in (before, after))
        taken = new["accepted"] - old["accepted"]
        for row in np.flatnonzero(small.live(before)):
            unsure = np.flatnonzero(~(sure[row] >= UNSURE))
            want = int(min([gamma[row], *(unsure[:1] + 1)]))
            assert nodes.valid[row].tolist() == [i < want for i in range(GAMMA)]
            np.testing.assert_array_equal(nodes.tokens[row, :want], tokens[row, :want])
            q = np.exp(nodes.log_q[row, :want]), np.exp(log_q[row, :want])
            np.testing.assert_allclose(*q, atol=2e-5)
            found.add((want, int(taken[row])))
            whole = taken[row] == want
            gamma[row] = min(gamma[row] + 2, GAMMA) if whole else max(1, gamma[row] - 1)
            if small.live(after)[row]:
                assert (new["gamma"][row], new["lag"][row]) == (gamma[row], 1 + whole)
    return found


@pytest.mark.parametrize("seed, temperature", small.DECODES)
def test_every_round_proposes_what_a_recomputing_drafter_does(seed, temperature):
    """Tokens, laws and lengths, whatever was drafted and accepted before."""
    assert len(compared(seed, temperature)) > 2


def test_the_decodes_compared_take_every_branch():
    """Blocks of all lengths; whole, partial and no acceptance."""
    found = set().union(*(compared(*decode) for decode in small.DECODES))
    assert {drafted for drafted, _ in found} == set(range(1, GAMMA + 1))
    assert {min(taken, 1) + (taken == drafted) for drafted, taken in found} == {0, 1, 2}


# What must hold of every decode.


@x64
def test_greedy_text_is_the_plain_one_in_float64():
    """Invariant 1, with and without a processor that looks at the drafted path."""
    model = toys.tiny_t5(dtype="float64")
    drafter = dataclasses.replace(BOTH_RULES, model=model)
    for options in (Sampling(), Sampling(processors=(RepetitionPenalty(1.3),))):
        for seed in range(20):
            params, ask = toys.init(model, seed), toys.ask(seed)
            draft = toys.noisy(params, seed, [0.03, 0.1, 0.3, 3.0][seed % 4])
            both = dict(max_decode_len=STEPS, sampling=options)
            plain = generate(model, params, ask, **both)
            fast = generate(model, params, ask, drafter=drafter, draft_params=draft, **both)
            assert toys.emitted(plain) == toys.emitted(fast)
            np.testing.assert_array_equal(plain.finish_reason, fast.finish_reason)


def same(out, alone, row) -> None:
    """One row of a decode against the same row of another."""
    np.testing.assert_array_equal(out.tokens, alone.tokens[row])
    assert (out.lengths, out.finish_reason) == (alone.lengths[row], alone.finish_reason[row])
    for name, count in out.stats._asdict().items():
        np.testing.assert_allclose(count, getattr(alone.stats, name)[row], rtol=1e-5)


def test_rows_depend_on_nothing_but_themselves():
    """Invariant 5: refilled one by one beside two others, and several decodes of one prompt."""
    (model, params, draft), rows, key = tables(1), 7, jax.random.key(7)
    drafter = dataclasses.replace(BOTH_RULES, model=model)
    ask, sampling = toys.prompt(*[[0]] * rows), Sampling(1.0)
    options = dict(drafter=drafter, draft_params=draft, max_decode_len=STEPS, key=key, eos_id=-1)
    whole = generate(model, params, ask, sampling=sampling, **options)
    assert len(set(whole.stats.drafted.tolist())) > 3
    engine = Refill(loop.Decoder(model, STEPS, drafter, eos_id=-1), 3, 1, 1)
    requests = [Request(i, np.zeros(1, np.int32)) for i in range(rows)]
    found = dict(engine(Params(params, draft), requests, sampling, key))
    assert sorted(found) == list(range(rows))
    for row, out in found.items():
        same(out, whole, row)
    several = [
        generate(model, params, ask, sampling=sampling, num_decodes=3, **options, row_ids=ids)
        for ids in (None, jnp.arange(rows, dtype=jnp.int32))
    ]
    assert several[0].tokens.shape == (rows, 3, STEPS)
    assert len(np.unique(several[0].tokens, axis=1)[0]) == 3
    np.testing.assert_array_equal(several[0].tokens, several[1].tokens)


def test_a_refilled_row_begins_its_schedule_anew():
    """What a row's last text taught is not the next one's."""
    decoder = loop.Decoder(toys.Script(), LONGEST, Assisted(toys.Script(), 8))
    both = Params(*[toys.scripts(SCRIPT)] * 2)
    state = toys.drive(decoder, both, toys.script_prompt(0))[-1].after
    assert state.drafter.gamma.tolist() == [8] and state.finish.tolist() != [stopping.LIVE]
    fresh = loop.jit_start(
        decoder, both, toys.script_prompt(0), toys.row_keys(jax.random.key(1), 1)
    )
    joined = refill.insert(state, fresh, np.zeros(1, np.int32))
    assert joined.drafter.gamma.tolist() == [5] and joined.drafter.live.tolist() == [True]


def test_a_rewound_drafter_keeps_its_schedule():
    """And drafts behind the shorter text."""
    decoder = loop.Decoder(toys.Script(), LONGEST, Assisted(toys.Script(), 8))
    both = Params(*[toys.scripts(SCRIPT)] * 2)
    state = toys.drive(decoder, both, toys.script_prompt(0))[0].after
    back = decoder.drafter.rewind(state.drafter, jnp.full(1, 3, jnp.int32))
    assert back.gamma.tolist() == [7] and back.cache.length.tolist() == [2]
    text = state.text._replace(length=jnp.full(1, 3, jnp.int32))
    sampling, keys = Sampling().rows(1), state.keys
    nodes, _ = small.propose(decoder.drafter, both, back, text, sampling, keys)
    assert nodes.tokens[0, :7].tolist() == SCRIPT[2:9] and nodes.valid[0].tolist() == [True] * 7 + [
        False
    ]


def test_groups_of_devices_keep_step():
    """Rows that stop early wait for those of other groups, and the text is one device's (float64)."""
    with jax.enable_x64(True):
        sizes = dict(num_heads=8, emb_dim=32, mlp_dim=64, dtype="float64")
        model = toys.tiny_t5(**sizes)
        params, ask = toys.init(model, 0), toys.ask(3, batch=8)
        draft = toys.noisy(params, 0, 0.2)
        place = Partitioner(meshes.make(2))
        options = dict(
            drafter=dataclasses.replace(BOTH_RULES, model=model), max_decode_len=12,
            sampling=Sampling(jnp.asarray([0.0, 1.0] * 4, jnp.float32)),
        )  # fmt: skip
        alone = generate(model, params, ask, draft_params=draft, **options)
        put = lambda x: jax.device_put(x, place.params(model))  # noqa: E731
        apart = generate(
            model, put(params), jax.device_put(ask, place.rows), draft_params=put(draft),
            mesh=place.mesh, **options,
        )  # fmt: skip
    np.testing.assert_array_equal(alone.tokens, apart.tokens)
    np.testing.assert_array_equal(alone.stats.drafted, apart.stats.drafted)
    assert len(set(alone.stats.drafted.tolist())) > 2
