"""Lookahead decoding: its mask, its window and pool, and what the target makes of its guesses."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, generate
from specjax.decode import loop, stats, stopping, tree
from specjax.decode.interfaces import Drafter, Params
from specjax.decode.processors import RepetitionPenalty
from specjax.decode.verify import BlockVerification, GreedyMatch, SpeculativeSampling
from specjax.drafters.lookahead import Lookahead, LookaheadState, matches, remember
from tests import toys
from tests.decode.laws import chain_rule, distance
from tests.models import decoders

shapes = pytest.mark.parametrize("window, ngram, guesses", [(5, 4, 5), (1, 5, 4), (6, 3, 1)])


def proposed(drafter, text, window=None, pool=()):
    """The tree behind one row of text, given a window (numbered cells by default) and n-grams."""
    if window is None:
        window = 10 + np.arange((drafter.ngram - 1) * drafter.window)
    prompt = toys.prompt([2])
    room = np.full((1, drafter.pool, drafter.ngram), -1, np.int32)
    for i, words in enumerate(pool):
        room[0, i] = words
    window = jnp.asarray(window, jnp.int32).reshape(1, drafter.ngram - 1, drafter.window)
    state = LookaheadState(window, jnp.asarray(room), jnp.zeros(1, jnp.int32), prompt)
    behind = loop.Text(jnp.asarray([text], jnp.int32), jnp.asarray([len(text)], jnp.int32))
    return _propose(drafter, state, behind)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, state, text):
    keys = toys.row_keys(jax.random.key(0), 1)
    return drafter.propose(Params(None, None), state, text, Sampling().rows(1), keys)[0]


_remember, _matches = jax.jit(remember), jax.jit(matches, static_argnums=2)


# The mask.


def two_rules(window, ngram, guesses):
    """The released mask, root and window first, then the guesses, each ``ngram - 1`` long."""
    inside, size = window * (ngram - 1), ngram - 1
    mask = np.zeros((inside + guesses * size,) * 2, bool)
    mask[:, 0] = True
    for level, i in itertools.product(range(size), range(window)):
        mask[level * window + i, : i + 1] = True  # level 0 up to the column
        for between in range(1, level + 1):
            mask[level * window + i, between * window + i] = (
                True  # the column on the levels between
            )
    for g in range(guesses):
        at = slice(inside + g * size, inside + (g + 1) * size)
        mask[at, at] = np.tri(size, dtype=bool)
    return mask


@shapes
def test_the_mask_is_that_of_the_two_rules(window, ngram, guesses):
    """C7, invariant 8: rows and columns as released; depth is column and level, not the index."""
    drafter = Lookahead(window, ngram, guesses)
    pool = [[9, *range(50 * g, 50 * g + ngram - 1)] for g in range(guesses)]
    drafted = proposed(drafter, [3, 9], pool=pool)
    block = tree.block(drafted, jnp.asarray([9], jnp.int32))
    np.testing.assert_array_equal(block.mask[0], two_rules(window, ngram, guesses))
    assert block.tokens.shape[1] == (window + guesses) * (ngram - 1) == drafter.nodes + 1
    cells = [j + i for j in range(ngram - 1) for i in range(window)]
    assert block.depth[0].tolist() == cells + list(range(1, ngram)) * guesses
    assert max(block.depth[0].tolist()) == drafter.depth == drafted.depth
    inside = window * (ngram - 1) - 1
    assert drafted.valid.all() and drafted.log_q is None and (drafted.q_row == -1).all()
    assert drafted.judged[0].tolist() == [False] * inside + [True] * guesses * (ngram - 1)


def test_the_papers_cost_is_the_block():
    """The extra work said of 7B, 13B and 33B models: 120, 80 and 56 tokens a step."""
    sizes = [Lookahead(w, 5, w).nodes + 1 for w in (15, 10, 7)]
    assert sizes == [120, 80, 56]


def test_guesses_with_one_beginning_share_it():
    """Every path is a parent chain, no token is twice below one parent, unused nodes are nothing."""
    pool = [[9, 5, 6, 7], [8, 1, 1, 1], [9, 5, 6, 8], [9, 5, 5, 5], [9, 4, 6, 7], [9, 3, 3, 3]]
    drafted = proposed(Lookahead(2, 4, 4), [9], pool=pool)
    inside, row = 5, jax.tree.map(lambda x: np.asarray(x[0]), drafted)
    nodes = [i for i in range(row.tokens.size) if row.judged[i]]
    assert nodes == [i for i in range(inside, row.tokens.size) if row.valid[i]]

    def path(i):
        return () if i < 0 else (*path(row.parent[i]), int(row.tokens[i]))

    tried = [w[1:] for w in pool if w[0] == 9][:4]  # the newest four of five
    expected = {tuple(words[:k]) for words in tried for k in (1, 2, 3)}
    assert {path(i) for i in nodes} == expected and len(nodes) == len(expected) < 12


def test_nothing_known_is_nothing_judged():
    """G2, N4: no n-gram begins with the root: the window is read, and the round is a plain one."""
    drafted = proposed(Lookahead(2, 3, 2), [9], pool=[[8, 9, 9]])
    assert not drafted.judged.any() and drafted.valid[0].tolist() == [True] * 3 + [False] * 4


# Window and pool.


def released_pool(rounds, most):
    """{first token: continuations, the newest last}, as released."""
    known = {}
    for grams in rounds:
        for first, *rest in grams:
            mine = known.setdefault(first, [])
            if rest in mine:
                mine.remove(rest)
            elif len(mine) == most:
                mine.pop(0)
            mine.append(rest)
    return known


def bounded_pool(rounds, size):
    """All n-grams, the newest first and the last ``size`` only."""
    known = []
    for grams in rounds:
        for gram in grams:
            known = [gram] + [old for old in known if old != gram]
        known = known[:size]
    return known


@pytest.mark.parametrize("size", [64, 7])
def test_the_pool_keeps_the_newest(size):
    """With room for all it tries what the released pool of G per token holds; else the oldest go."""
    rng, most = np.random.default_rng(size), 3
    pool, rounds = jnp.full((2, size, 3), -1, jnp.int32), []
    for _ in range(12):
        grams = rng.integers(2, 5, (2, 4, 3)).astype(np.int32)
        kept = rng.random((2, 4)) < 0.7
        pool = _remember(pool, jnp.asarray(grams), jnp.asarray(kept))
        rounds.append([grams[b][kept[b]].tolist() for b in range(2)])
        for b in range(2):
            mine = [r[b] for r in rounds]
            known = bounded_pool(mine, size)
            assert np.asarray(pool[b]).tolist() == known + [[-1] * 3] * (size - len(known))
            for root in (2, 3, 4, 5):
                found = np.asarray(_matches(pool, jnp.asarray([root] * 2), most)[b]).tolist()
                expected = [words[1:] for words in known if words[0] == root][:most]
                assert found == expected + [[-1, -1]] * (most - len(expected))
                if size == 64:
                    assert expected == released_pool(mine, most).get(root, [])[::-1]


class Restated:
    """One row of greedy lookahead decoding on a table of successors, in NumPy and lists."""

    def __init__(self, drafter, after, prompt, steps):
        self.d, self.after, self.prompt, self.steps = drafter, after, prompt, steps
        self.text, self.pool, self.age, self.rounds = [0], [], 0, 0
        self.window = self.filling()

    def filling(self):
        cells = (self.d.ngram - 1) * self.d.window
        number = (self.age * cells + np.arange(cells)).astype(np.uint64)
        place = (number * 2654435761 % 2**32 // 2**16) % len(self.prompt)
        return np.asarray(self.prompt)[place.astype(int)].reshape(self.d.ngram - 1, -1)

    def round(self):
        d, left = self.d, self.steps + 1 - len(self.text)
        self.window[0, 0] = root = self.text[-1]
        if d.ngram == 2:
            guesses = [self.window[0, 1:].tolist()]
        else:
            guesses = [gram[1:] for gram in self.pool if gram[0] == root][: d.guesses]
        said = [[self.after[root]] + [self.after[w] for w in guess] for guess in guesses]
        right = [
            next((i for i, w in enumerate(g) if w != s[i]), len(g))
            for g, s in zip(guesses, said, strict=True)
        ]
        words = [self.after[root]]
        if right:
            best = int(np.argmax(right))
            words = said[best][: right[best] + 1]
        words = words[:left]
        self.age += 1
        new = self.filling()
        last = self.window[-1]
        sound = np.arange(d.window) + d.ngram - 2 <= left
        fresh = np.where(sound, self.after[last], new[-1])
        levels = np.concatenate([self.window, fresh[None]])
        if d.ngram > 2 and self.age > d.ngram - 2:
            for i in range(d.window):
                gram = levels[:, i].tolist()
                if sound[i] and (i > 0 or len(self.text) > 1):
                    self.pool = [gram] + [old for old in self.pool if old != gram]
            self.pool = self.pool[: d.pool]
        by = len(words) - 1 if d.follow or d.ngram == 2 else 0
        self.window = new
        self.window[:, : d.window - by] = levels[1:, by:]
        self.text += words
        self.rounds += 1


def cycle(seed, period=16, size=32):
    """Every token's successor: a cycle of ``period`` tokens, which all others fall into."""
    rng = np.random.default_rng(seed)
    ring = rng.permutation(np.arange(2, 2 + period))
    after = rng.choice(ring, size)
    after[ring] = np.roll(ring, -1)
    return after


FORGIVING = cycle(0)[np.arange(32) // 8 * 8]  # wrong words are often followed by the right one


def table(after):
    return {"logits": jnp.asarray(10 * np.eye(len(after))[after], jnp.float32)}


TABLE, STEPS = toys.Table(eos_id=-1), 40
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 30], [4, 4, 9], [3]]


def on_table(drafter, after, prompts=PROMPTS, steps=STEPS, **options):
    ask = prompts if isinstance(prompts, Prompt) else toys.prompt(*prompts, width=6)
    return generate(TABLE, table(after), ask, drafter=drafter, max_decode_len=steps, **options)


@pytest.mark.parametrize(
    "drafter",
    [Lookahead(4, 4, 3), Lookahead(5, 3, 2, pool=14, follow=True), Lookahead(5, 2, 0)],
    ids=["moves by one", "follows the text", "Jacobi"],
)
def test_rounds_are_those_of_a_restatement(drafter):
    """Window, pool and text after each round; G6: what the pool holds was never padding or start."""
    after = FORGIVING if drafter.ngram == 2 else cycle(0)
    decoder = loop.Decoder(TABLE, STEPS, drafter, eos_id=-1)
    ask = toys.prompt(*PROMPTS, width=6)
    rows = [Restated(drafter, after, words, STEPS) for words in PROMPTS]
    for turn in toys.drive(decoder, Params(table(after), None), ask):
        state = jax.tree.map(np.asarray, turn.after._replace(keys=None))
        for b, row in enumerate(rows):
            if turn.before.finish[b] != stopping.LIVE:
                continue
            row.round()
            assert state.text.tokens[b, : state.text.length[b]].tolist() == row.text
            np.testing.assert_array_equal(state.drafter.window[b], row.window)
            known = state.drafter.pool[b]
            assert known[known[:, 0] >= 0].tolist() == row.pool
            assert 0 not in known and (known[len(row.pool) :] == -1).all()
    assert state.stats.rounds.tolist() == [row.rounds for row in rows]
    assert min(row.rounds for row in rows) < 0.8 * STEPS


# Greedy decoding.


def jacobi(after, prompt, width, steps):
    """(tokens, target steps) of Jacobi iteration over ``width - 1`` guesses behind the newest token."""

    def fresh(rounds):
        number = (rounds * width + np.arange(width)).astype(np.uint64)
        return [prompt[place] for place in number * 2654435761 % 2**32 // 2**16 % len(prompt)]

    guess, text, rounds = fresh(0)[1:], [0], 0
    while len(text) <= steps:
        rounds += 1
        said = [after[word] for word in [text[-1], *guess]]
        right = next((i for i, word in enumerate(guess) if word != said[i]), len(guess))
        text += said[: right + 1]
        guess = [*said[right + 1 :], *fresh(rounds)[width - right :]]
    return text[1 : steps + 1], rounds


def test_two_grams_are_jacobi_decoding():
    """N = 2: the tokens of plain decoding, in the steps that Jacobi iteration takes."""
    plain, out = (on_table(drafter, FORGIVING) for drafter in (None, Lookahead(8, 2, 0)))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    for b, words in enumerate(PROMPTS):
        tokens, rounds = jacobi(FORGIVING, words, 8, STEPS)
        assert out.tokens[b].tolist() == tokens
        assert out.stats.rounds[b] == rounds < 0.6 * STEPS
    got = stats.summary(out.stats)
    assert got["drafted"] > 0 and got["rounds_plain"] <= 4  # at most each row's last round


def test_wider_windows_take_fewer_steps():
    """On a repetitive text; W = 1 finds nothing where the next token hangs on the last one alone."""
    after = cycle(2, period=24)
    rounds = []
    for width in (1, 2, 4):
        out = on_table(Lookahead(width, 4, 3), after, steps=60)
        rounds.append(int(out.stats.rounds.sum()))
    assert rounds[0] > rounds[1] > rounds[2] and rounds[2] < 0.5 * rounds[0], rounds


T5_DRAFTER = Lookahead(4, 3, 3, pool=64)


def t5(seed, prompt, drafter=None, **options):
    params = toys.init(toys.T5, seed)
    return generate(
        toys.T5, params, prompt, drafter=drafter, max_decode_len=toys.STEPS, **options
    ), params


def test_greedy_t5_is_plain_t5():
    """Invariant 1: rows of unequal prompts, and each as a batch of its own (G9, H1)."""
    ties, shared = [], 0
    for seed in range(8):
        ask = toys.ask(seed)
        (plain, params), (spec, _) = t5(seed, ask), t5(seed, ask, T5_DRAFTER)
        ties += toys.differences(toys.T5, params, ask, plain, spec)
        shared += int(spec.stats.accepted.sum())
        if seed > 2:
            continue
        for b in range(toys.BATCH):
            one = jax.tree.map(lambda x, b=b: x[b : b + 1], ask)
            alone, _ = t5(seed, one, T5_DRAFTER)
            decoders.same_decode(alone, jax.tree.map(lambda x, b=b: x[b : b + 1], spec))
    assert len(ties) <= 1 and shared > 20, (ties, shared)


def test_greedy_llama_is_plain_llama():
    """Invariant 1, decoder-only: the prompt is the beginning of the text."""
    model, shared = decoders.tiny_llama(), 0
    for seed in range(4):
        params, ask = decoders.init(model, seed), toys.ask(seed)
        plain = decoders.decode(model, params, ask, steps=24)
        spec = generate(model, params, ask, drafter=Lookahead(4, 3, 3), max_decode_len=24)
        assert toys.emitted(plain) == toys.emitted(spec)
        shared += int(spec.stats.accepted.sum())
    assert shared > 5


def test_processors_see_the_way_to_every_node():
    """I1: the penalty of a repeated token counts inside of the block; by another rule for trees."""
    sampling, ask = Sampling(processors=(RepetitionPenalty(1.3),)), toys.ask(3)
    (plain, _), (spec, _) = (
        t5(3, ask, drafter, sampling=sampling, verifier=GreedyMatch())
        for drafter in (None, T5_DRAFTER)
    )
    assert toys.emitted(plain) == toys.emitted(spec)


def test_lengths_and_ends():
    """A5, invariant 6: exactly as many tokens as asked, in buffers that the deepest block fits."""
    after = cycle(3)
    for steps, drafter in (
        (1, Lookahead(6, 4, 2)),
        (9, Lookahead(6, 3, 2)),
        (5, Lookahead(6, 2, 0)),
    ):
        out = on_table(drafter, after, steps=steps)
        assert out.lengths.tolist() == [steps] * 4
        np.testing.assert_array_equal(out.tokens[:, 0], after[0])
        np.testing.assert_array_equal(out.tokens[:, 1:], after[np.asarray(out.tokens[:, :-1])])
    eos = int(after[after[after[after[0]]]])  # the fourth token
    out = on_table(Lookahead(6, 4, 2), after, eos_id=eos)
    assert out.lengths.tolist() == [4] * 4 and (out.finish_reason == stopping.STOP).all()


def test_chains_of_guesses_can_be_judged_as_a_block():
    """Jacobi's guesses are one chain, which any rule for chains takes."""
    a, b = (
        on_table(Lookahead(8, 2, 0), FORGIVING, verifier=rule)
        for rule in (BlockVerification(), SpeculativeSampling())
    )
    decoders.same_decode(a, b)


# What it remembers, and for whom.


def test_nothing_outlives_a_decode_and_rows_do_not_meet():
    """G8, H1: a decode's tokens and stats do not hang on what was decoded before or beside it."""
    after, drafter = cycle(4), Lookahead(4, 4, 3)
    first = on_table(drafter, after)
    on_table(drafter, cycle(5), [[9, 8], [7], [6, 5, 4], [3]])
    decoders.same_decode(first, on_table(drafter, after))
    turned = on_table(drafter, after, PROMPTS[::-1])
    decoders.same_decode(first, jax.tree.map(lambda x: x[::-1], turned))


def test_padding_is_never_read():
    """G6, O3: what stands behind a prompt's length changes nothing, and is in no window."""
    after, drafter = cycle(4), Lookahead(4, 4, 3)
    ask = toys.prompt(*PROMPTS, width=6)
    inside = np.arange(6)[None] < np.asarray(ask.length)[:, None]
    dirty = ask._replace(tokens=jnp.where(jnp.asarray(inside), ask.tokens, 29))
    decoders.same_decode(on_table(drafter, after, ask), on_table(drafter, after, dirty))
    prefilled = TABLE.prefill(table(after), ask, 8)
    window = np.asarray(drafter.init(Params(None, None), prefilled, 8).window)
    for row, words in zip(window, PROMPTS, strict=True):
        assert set(row.ravel().tolist()) <= set(words)


def test_decodes_of_one_prompt_have_windows_of_their_own():
    """Rows are the first axis of all state."""
    out = on_table(Lookahead(4, 4, 3), cycle(4), num_decodes=2)
    single = on_table(Lookahead(4, 4, 3), cycle(4))
    for i in range(2):
        np.testing.assert_array_equal(out.tokens[:, i], single.tokens)
        np.testing.assert_array_equal(out.stats.rounds[:, i], single.stats.rounds)


def test_window_nodes_are_no_drafts():
    """N4, A13: only guesses are counted, and rounds without any are plain."""
    drafter = Lookahead(4, 4, 3)
    got = stats.summary(on_table(drafter, cycle(0)).stats)
    assert 0 < got["drafted"] <= got["rounds"] * 3 * 3
    assert got["rounds_plain"] >= 4 * 3  # three rounds pass before the first guess
    assert got["mean_accepted"] == got["accepted"] / (got["rounds"] - got["rounds_plain"])
    assert got["accepted_by_position"]["marginal"][3:] == [None] * (drafter.depth - 3)


# The law.


@dataclasses.dataclass
class Given:
    """Speculative sampling by given uniforms, with a given next token; it keeps what it said."""

    u: jax.Array
    next_token: jax.Array
    residual: bool = True

    lossless = True

    def judge(self, tree_, log_p, keys):
        del keys
        verdict = SpeculativeSampling().walk(tree_, log_p, self.u)
        if not self.residual:
            last = jnp.take_along_axis(verdict.path, verdict.accepted[:, None] - 1, axis=1)[:, 0]
            row = jnp.where(verdict.accepted > 0, last + 1, 0)[:, None, None]
            verdict = verdict._replace(log_next=jnp.take_along_axis(log_p, row, axis=1)[:, 0])
        self.tree, self.verdict = tree_, verdict
        return verdict._replace(next_token=self.next_token)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _outcomes(decoder, params, state, sampling, u, next_token, residual):
    """The states after a round, one per row of uniforms, and their probabilities."""
    rule = Given(u, next_token, residual)
    decoder = dataclasses.replace(decoder, verifier=rule)
    after = loop.speculative_round(decoder, params, state, sampling=sampling)
    accept, low = jnp.exp(rule.verdict.log_accept), u == 0
    trial = jnp.where(
        rule.tree.judged & rule.tree.valid,
        jnp.where(low, accept, 1 - accept),
        jnp.where(low, 0.0, 1.0),
    )
    law = jnp.exp(rule.verdict.log_next)
    return after, trial.prod(1) * jnp.take_along_axis(law, next_token[:, None], axis=1)[:, 0]


def enumerated(drafter, logits, steps, pool, residual=True):
    """({output: probability}, share of it in rounds of several tokens), round by round.

    All acceptances and refusals of the guesses (their uniform just above 0, or just below 1) with
    all next tokens: the rounds are those of the loop.
    """
    size, params = len(logits), Params({"logits": jnp.asarray(logits)}, None)
    tried = drafter.guesses * (drafter.ngram - 1)
    cases = list(itertools.product(*[(0.0, np.nextafter(1, 0))] * tried, range(size)))
    u = np.full((len(cases), drafter.nodes), np.nextafter(1, 0))
    u[:, -tried:] = [case[:-1] for case in cases]
    next_token = jnp.asarray([case[-1] for case in cases], jnp.int32)
    decoder = loop.Decoder(toys.Table(size, eos_id=-1), steps, drafter, eos_id=-1)
    ask = toys.prompt([1, 2, 2])
    first = loop.jit_start(decoder, params, ask, toys.row_keys(jax.random.key(0), 1))
    known = first.drafter.pool.at[0, : len(pool)].set(jnp.asarray(pool, jnp.int32))
    first = first._replace(drafter=first.drafter._replace(pool=known))
    sampling = Sampling(1.0).rows(len(cases))
    # Rows are the same state where text and drafter are; keys and counters say nothing here.
    one_of = lambda state: [state.text.tokens, state.text.length, *state.drafter[:3]]  # noqa: E731
    todo, out, several = [(first, 1.0)], {}, 0.0
    while todo:
        merged = {}
        for state, chance in todo:
            rows = jax.tree.map(lambda x: jnp.repeat(x, len(cases), axis=0), state)
            after, weight = _outcomes(
                decoder, params, rows, sampling, jnp.asarray(u), next_token, residual
            )
            after, weight = jax.tree.map(np.array, (after._replace(keys=None), weight))
            for b in np.flatnonzero(weight):
                row = jax.tree.map(lambda x, b=b: x[b : b + 1], after)._replace(keys=state.keys)
                length, here = int(row.text.length[0]), chance * weight[b]
                row.text.tokens[0, length:] = 0
                several += here * (length - int(state.text.length[0]) > 1)
                if row.finish[0] != stopping.LIVE:
                    words = tuple(row.text.tokens[0, 1:length].tolist())
                    out[words] = out.get(words, 0.0) + here
                    continue
                key = b"".join(np.asarray(x).tobytes() for x in one_of(row))
                merged[key] = (row, here + merged.get(key, (row, 0.0))[1])
        todo = list(merged.values())
    return out, several


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("follow", [False, True])
def test_the_law_of_whole_outputs_is_exact(follow):
    """B18, C1, invariant 2: all outputs of four tokens, by enumeration of the loop's own rounds."""
    logits = toys.table_pair(3, spread=0.7)[0]
    pool = [[0, 1, 2], [0, 1, 1], [1, 2, 0], [2, 2, 2], [2, 0, 1], [1, 2, 1]]
    drafter = Lookahead(2, 3, 2, pool=8, follow=follow)
    law, several = enumerated(drafter, logits, 4, pool)
    log_p = np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    target = chain_rule(lambda text: log_p[text[-1]], 4)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12) and len(law) == 81
    assert distance(law, target) < 1e-12 and several > 0.3
    if not follow:  # the enumeration sees a wrong rule
        wrong, _ = enumerated(drafter, logits, 4, pool, residual=False)
        assert distance(wrong, target) > 1e-3


# What cannot be.


def test_values_that_cannot_be_are_refused():
    """C8: each is named."""
    for bad, word in (
        ({"ngram": 1}, "ngram"), ({"ngram": 2}, "Jacobi"), ({"window": 0}, "window"),
        ({"guesses": 0}, "guesses"), ({"pool": 0}, "pool"),
        ({"ngram": 2, "guesses": 0, "window": 1}, "Jacobi"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            Lookahead(**bad)
    assert isinstance(Lookahead(), Drafter)
