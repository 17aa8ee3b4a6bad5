"""Logit processors: what each does, in-block history, laws and tokens equal to plain decoding's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, processors, sampling, stopping, tree
from specjax.decode.interfaces import Text, TokenTree
from specjax.decode.processors import MinLength, NoRepeatNgram, RepetitionPenalty
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.decode.laws import PRODUCTION, SequenceLaw, chain_rule, distance

LENGTH, EXACT, INF = 4, 1e-12, np.inf
x64 = pytest.mark.usefixtures("x64")
log_law = jax.jit(sampling.log_law)


def text_of(words, start=1):
    """Text of one row behind a start token 0, in a buffer of 16 slots."""
    tokens = np.full((1, 16), 9, np.int32)  # garbage that must not be read
    tokens[0, : len(words) + 1] = [0, *words]
    one = lambda x: jnp.asarray([x], jnp.int32)  # noqa: E731
    return Text(jnp.asarray(tokens), one(len(words) + 1), one(1), one(start))


def apply(processor, logits, words, start=1):
    """Processed logits after ``words``."""
    logits = jnp.asarray(logits, jnp.float32)[None, None]
    past = processors.history(text_of(words, start))
    return np.asarray(processor.rows(1)(logits, past))[0, 0].tolist()


# What each does.


def test_repetition_penalty_goes_by_the_sign_and_not_by_the_count():
    """I1: said once or twice is the same; the start token 0 and garbage ids count for nothing."""
    logits = [2.0, -1.0, 4.0, 0.0]
    assert apply(RepetitionPenalty(2.0), logits, []) == logits
    assert apply(RepetitionPenalty(2.0), logits, [1, 2, 2]) == [2.0, -2.0, 2.0, 0.0]
    assert apply(RepetitionPenalty(2.0), logits, [0]) == [1.0, -1.0, 4.0, 0.0]


def test_minimum_length_counts_what_was_emitted():
    """EOS (1) is out until two tokens were emitted; a forced prefix does not count."""
    logits = [2.0, 5.0, 4.0, 0.0]
    banned = [2.0, -INF, 4.0, 0.0]
    assert apply(MinLength(2), logits, []) == apply(MinLength(2), logits, [7]) == banned
    assert apply(MinLength(2), logits, [7, 7]) == logits
    assert apply(MinLength(2), logits, [7, 7, 7], start=3) == banned
    assert apply(MinLength(0), logits, []) == logits
    assert apply(MinLength(1, eos_id=2), logits, []) == [2.0, 5.0, -INF, 0.0]


@pytest.mark.parametrize(
    "size, words, banned",
    [
        (1, [], []),
        (1, [2, 3], [2, 3]),
        (2, [2], []),
        (2, [2, 3, 2], [3]),
        (2, [2, 2], [2]),
        (2, [2, 3, 2, 1, 2], [1, 3]),
        (3, [2, 3], []),
        (3, [2, 3, 1, 2, 3], [1]),
        (3, [2, 3, 1, 3], []),
        (2, [1, 0], []),  # the start token 0 begins no n-gram: "0 1" was never said
        (4, [2, 2], []),
    ],
)
def test_no_ngram_is_said_twice(size, words, banned):
    """transformers' rule on the decoder's own text."""
    got = apply(NoRepeatNgram(size), [0.0] * 4, words)
    assert [i for i, x in enumerate(got) if x == -INF] == banned


def test_values_out_of_range_are_refused_by_name():
    """Before anything is traced."""
    for processor, word in (
        (RepetitionPenalty(0.0), "penalty"),
        (MinLength(-1), "minimum length"),
        (NoRepeatNgram(0), "n-gram"),
        (MinLength(3, eos_id=7), "id 7"),
    ):
        with pytest.raises(ValueError, match=word):
            play([5, 6], processors=(processor,))


def play(words, **options):
    return generate(
        toys.Script(), toys.scripts(words), toys.script_prompt(0), max_decode_len=4,
        sampling=Sampling(**options),
    )  # fmt: skip


def test_processors_need_a_history():
    """I4: a caller that has none is told so."""
    rows = Sampling(1.0, processors=(RepetitionPenalty(2.0),)).rows(1)
    with pytest.raises(ValueError, match="history"):
        sampling.log_law(jnp.zeros((1, 1, 3)), rows)


# History inside a block.


def test_each_node_sees_the_path_to_it():
    """I3: text, then the way from the root, whatever the order of the nodes."""
    parent = jnp.asarray([[-1, 0, -1, 1, 2]], jnp.int32)
    on = jnp.ones((1, 5), bool)
    words = jnp.asarray([[5, 6, 7, 8, 4]], jnp.int32)
    branching = TokenTree(words, parent, on, on, None, jnp.full((1, 5), -1, jnp.int32), depth=3)
    got = processors.history(text_of([2, 3]), branching)
    seen = [got.tokens[0, m, 1 : int(n)].tolist() for m, n in enumerate(got.length[0])]
    assert seen == [[2, 3], [2, 3, 5], [2, 3, 5, 6], [2, 3, 7], [2, 3, 5, 6, 8], [2, 3, 7, 4]]
    chain = processors.history(text_of([2, 3]), tree.chain(words, on, None))
    seen = [chain.tokens[0, m, 1 : int(n)].tolist() for m, n in enumerate(chain.length[0])]
    assert seen == [[2, 3, *words[0, :m].tolist()] for m in range(6)]


def table_decode(processors, logits=((2.0, 1.5, 0.0),) * 3, draft=None, gamma=3, **options):
    """Greedy plain and speculative decoding of a table; ids are 0, 1, 2 and none is EOS."""
    model = toys.Table(3)
    params = {"logits": jnp.asarray(logits)}
    draft = params if draft is None else {"logits": jnp.asarray(draft)}
    options = dict(sampling=Sampling(processors=processors), max_decode_len=4) | options
    ask = toys.prompt([2])
    spec = generate(
        model, params, ask, drafter=SmallModel(model, gamma), draft_params=draft, eos_id=-1,
        **options,
    )  # fmt: skip
    return generate(model, params, ask, eos_id=-1, **options), spec


def test_a_penalty_sees_what_was_drafted_in_the_same_block():
    """I1: logits [2, 1.5, 0], penalty 2: 0, 1, 0, 0, in one round with three accepted drafts."""
    plain, spec = table_decode((RepetitionPenalty(2.0),))
    assert toys.emitted(plain) == toys.emitted(spec) == [[0, 1, 0, 0]]
    assert spec.stats.rounds.tolist() == [1] and spec.stats.accepted.tolist() == [3]


ALL = (RepetitionPenalty(1.75), MinLength(3, eos_id=2), NoRepeatNgram(2))
SETS = [ALL[:1], ALL[1:2], ALL[2:], ALL]
names = lambda chosen: "+".join(type(p).__name__ for p in chosen)  # noqa: E731


@pytest.mark.parametrize("chosen", [ALL[:2], ALL], ids=names)
def test_greedy_tokens_are_those_of_plain_decoding(chosen):
    """Invariant 1, I1: drafts that agree, or not, with and without EOS."""
    target, drafts = toys.tiny_t5(), []
    for seed in range(12):
        params = toys.init(target, seed)
        options = Sampling(processors=chosen)
        both = dict(sampling=options, eos_id=2)
        draft = toys.noisy(params, seed, [0.05, 0.3][seed % 2])
        plain = toys.decode(params, toys.ask(seed), **both)
        spec = toys.decode(params, toys.ask(seed), draft, **both)
        assert toys.emitted(plain) == toys.emitted(spec)
        np.testing.assert_array_equal(plain.finish_reason, spec.finish_reason)
        drafts.append(float(spec.stats.accepted.sum() / spec.stats.drafted.sum()))
        check_the_rules(toys.emitted(spec), chosen, plain.finish_reason)
    assert max(drafts) > 0.5  # the draft is processed too, or little would be accepted


def check_the_rules(outputs, chosen, finish):
    for words, reason in zip(outputs, np.asarray(finish), strict=True):
        if any(isinstance(p, NoRepeatNgram) for p in chosen):
            pairs = list(itertools.pairwise(words))
            assert len(pairs) == len(set(pairs))
        if any(isinstance(p, MinLength) for p in chosen) and reason == stopping.STOP:
            assert len(words) > 3


# Laws.


def processed_law(logits, chosen, options):
    """Text -> log-law by a restatement in NumPy: the tests' own processors."""

    def law(text):
        words, row = text[1:], np.array(logits[text[-1]], np.float64)
        for p in chosen:
            if isinstance(p, RepetitionPenalty):
                for x in set(words):
                    row[x] = row[x] / p.penalty if row[x] > 0 else row[x] * p.penalty
            elif isinstance(p, MinLength) and len(words) < p.length:
                row[p.eos_id] = -np.inf
            elif isinstance(p, NoRepeatNgram):
                for pair in itertools.pairwise(words):
                    if words and pair[0] == words[-1]:
                        row[pair[1]] = -np.inf
        row = row / options.get("temperature", 1.0)
        if options.get("top_k"):
            row = np.where(row >= np.sort(row)[-options["top_k"]], row, -np.inf)
        with np.errstate(divide="ignore"):
            return row - np.log(np.exp(row - row.max()).sum()) - row.max()

    return law


WITHOUT_BANS = (RepetitionPenalty(1.75), MinLength(2, eos_id=2))


@x64
@pytest.mark.parametrize("chosen", [*SETS[:2], WITHOUT_BANS], ids=names)
@pytest.mark.parametrize("gamma", [1, 3])
def test_the_law_of_whole_outputs_is_exact(chosen, gamma):
    """I1, B18: production laws with in-block history, enumerated, against NumPy's chain rule."""
    target, draft = toys.table_pair(0)
    options = {"temperature": 0.75}
    exact = chain_rule(processed_law(target, chosen, options), LENGTH, eos_id=2)
    speculative = SequenceLaw(
        PRODUCTION, production_law(target, chosen, options), production_law(draft, chosen, options),
        gamma, LENGTH, eos_id=2,
    ).after((0,))  # fmt: skip
    assert sum(speculative.values()) == pytest.approx(1, abs=EXACT)
    assert distance(speculative, exact) < EXACT


def production_law(logits, chosen, options):
    """Text -> log-law by the production processors, computed as a row of a block would be."""
    rows = Sampling(**options, processors=chosen).rows(1)

    def law(text):
        past = processors.history(text_of(text[1:]))
        return np.asarray(log_law(jnp.asarray(logits[text[-1]])[None, None], rows, past))[0, 0]

    return law


@x64
def test_rows_of_a_block_have_the_laws_of_plain_steps():
    """I1, I3: for every path of three drafts, each row of the block equals the step's own law."""
    target, _ = toys.table_pair(1)
    options, text = {"temperature": 1.25}, (0, 1, 2, 1)
    rows = Sampling(**options, processors=ALL).rows(1)
    step = production_law(target, ALL, options)
    for drafts in itertools.product(range(3), repeat=3):
        words = jnp.asarray([drafts], jnp.int32)
        history = processors.history(
            text_of(text[1:]), tree.chain(words, jnp.ones_like(words, bool), None)
        )
        logits = jnp.asarray(target)[jnp.asarray([[text[-1], *drafts]])]
        got = np.asarray(log_law(logits, rows, history))[0]
        for m in range(4):
            np.testing.assert_allclose(got[m], step((*text, *drafts[:m])), atol=1e-14)


@pytest.mark.parametrize("gamma", [None, 2])
def test_the_real_decode_has_the_processed_law(gamma):
    """B18, I1: Monte Carlo through `generate`, plain and speculative, with all processors."""
    draws, model = 50_000, toys.Table(4)
    target, draft = toys.table_pair(2, size=4, spread=1.0)
    drafter = None if gamma is None else SmallModel(model, gamma)
    as_params = lambda x: {"logits": jnp.asarray(x, jnp.float32)}  # noqa: E731

    def one(key):
        out = generate(
            model, as_params(target), toys.prompt([0]), drafter=drafter, eos_id=2,
            draft_params=as_params(draft), max_decode_len=3, key=key,
            sampling=Sampling(1.0, processors=ALL),
        )  # fmt: skip
        return out.tokens[0], out.lengths[0]

    keys = jax.random.split(jax.random.key(5), draws)
    tokens, lengths = (np.asarray(x) for x in jax.jit(jax.vmap(one))(keys))
    observed = {}
    for words, n in zip(tokens.tolist(), lengths, strict=True):
        observed[tuple(words[:n])] = observed.get(tuple(words[:n]), 0) + 1 / draws
    expected = chain_rule(processed_law(target, ALL, {}), 3, eos_id=2)
    variation = sum(abs(observed.get(k, 0) - expected.get(k, 0)) for k in observed | expected) / 2
    assert variation < 0.015
    assert all(2 not in words for words in observed)


# Programs.


def test_without_processors_the_program_has_no_trace_of_them(monkeypatch):
    """No history is built, and the draft's scan carries no text."""

    def never(*args):
        raise AssertionError("a history was built")

    monkeypatch.setattr(processors, "History", never)
    monkeypatch.setattr(Text, "_replace", never)
    _, both, ask = toys.scripted([*range(5, 20)], [[*range(5, 20)]])
    prefilled = toys.Script().prefill(both.target, ask, 16)
    drafter, keys = SmallModel(toys.Script(), 2), toys.row_keys(jax.random.key(0), 1)
    drafting = drafter.init(both, prefilled, 16)

    def trace(*chosen):
        rows = Sampling(1.0, processors=chosen).rows(1)
        jax.eval_shape(lambda: drafter.propose(both, drafting, prefilled.text, rows, keys))

    trace()
    with pytest.raises(AssertionError, match="history"):
        trace(RepetitionPenalty(2.0))


def test_values_cost_no_compile():
    """Must-show 5: penalties and minimum lengths are traced, and may differ per row."""
    words = [[*range(5, 20)]] * 3

    def decode(*chosen):
        toys.play(words, words, sampling=Sampling(1.0, processors=chosen))

    decode(RepetitionPenalty(1.5), MinLength(2))
    before = loop.jit_run._cache_size()
    decode(RepetitionPenalty(jnp.asarray([1.0, 3.0, 2.0])), MinLength(jnp.asarray([0, 1, 2])))
    assert loop.jit_run._cache_size() == before


def test_a_text_with_every_token_forbidden_is_an_error():
    """B14: nothing is left to say; that is reported, and is not token 0."""
    plain, spec = table_decode((NoRepeatNgram(1),), max_decode_len=6)
    for out in (plain, spec):
        assert toys.emitted(out) == [[0, 1, 2]]
        assert out.finish_reason.tolist() == [stopping.ERROR]
