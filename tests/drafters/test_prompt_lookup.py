"""Prompt lookup and LLMA: what is copied, from where, and that it changes nothing but speed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import stopping
from specjax.decode.interfaces import Drafter
from specjax.drafters.prompt_lookup import PromptLookup
from tests import toys
from tests.drafters import copying
from tests.drafters.copying import Spoken, cycle, prefixes, proposed, says
from tests.models import decoders

LLMA = PromptLookup(max_match=5, copy=19, output=False)


def drafted(tree, row=0):
    """The tokens of a chain."""
    assert tree.chain
    return [int(t) for t, on in zip(tree.tokens[row], tree.valid[row], strict=True) if on]


# What is copied.


def test_ties_go_where_they_are_said_to_go():
    """G1: [1,2,3,1,2,4,1,2], two tokens: the leftmost draft begins with 3, the newest with 4."""
    texts = [[5, 2, 3, 5, 2, 4, 5, 2]]
    assert drafted(proposed(PromptLookup(2, 2, 3), texts)) == [3, 5, 2]
    assert drafted(proposed(PromptLookup(2, 2, 3, tie="last"), texts)) == [4, 5, 2]


def test_the_longest_match_wins_wherever_it_stands():
    texts = [[9, 5, 6, 8, 4, 6, 7, 9, 5, 6]]
    assert drafted(proposed(PromptLookup(1, 1, 1), texts)) == [8]
    for tie in ("first", "last"):
        assert drafted(proposed(PromptLookup(3, 1, 1, tie=tie), texts)) == [8]
    longer = [[5, 6, 7, 9, 5, 6, 8, 9, 5, 6]]
    assert drafted(proposed(PromptLookup(2, 1, 1), longer)) == [7]
    assert drafted(proposed(PromptLookup(3, 1, 1), longer)) == [8]


def test_without_a_match_nothing_is_drafted():
    """G2, G3: no repeat, and texts shorter than the n-gram, without EOS too; no stand-in token."""
    for drafter in (PromptLookup(eos_id=-1), PromptLookup(), PromptLookup(spans=3)):
        tree = proposed(drafter, [[2, 3, 4, 5], [7], [7, 8], [3, 3]])
        assert tree.valid.sum(1).tolist() == [0, 0, 0, 1]
        tree = proposed(drafter, [[], [7], [3, 3]], [[4, 5, 1], [6, 1], [9, 1]])
        assert tree.valid.sum(1).tolist() == [0, 0, 1]
    assert not proposed(PromptLookup(3, 2), [[3, 3]]).valid.any()  # one token is no match of two


def test_padding_start_token_and_what_lies_behind_eos_are_never_copied():
    """G6: encoder row [11,12,1,0,0,0], decoder [0]; then texts whose padding would match."""
    short = PromptLookup(1, 1, 5)
    assert not proposed(short, [[]], [[11, 12, 1]]).valid.any()
    assert drafted(proposed(short, [[11]], [[11, 12, 1]])) == [12, 1]
    assert drafted(proposed(short, [[5]], [[5, 12, 1, 8, 9]])) == [12, 1]
    assert not proposed(short, [[0]], [[11, 12, 1]]).valid.any()  # the start token is no match of 0
    assert drafted(proposed(short, [[0, 7, 0]], [[11, 1]])) == [7, 0]  # a real 0 is a token
    # Of an EOS in a prompt of several turns nothing is looked for, and no match reaches over it.
    turns = [[6, 1, 7, 8, 4, 1, 7], [5, 1, 7, 9, 6, 1]]
    assert drafted(proposed(short, turns)) == [8, 4, 1]
    assert not proposed(short, turns).valid[1].any()
    assert drafted(proposed(PromptLookup(3, 3, 2), [[6, 2, 7, 8, 6, 2, 7]])) == [8, 6]
    assert not proposed(PromptLookup(3, 3, 2), [[6, 1, 7, 8, 6, 1, 7]]).valid.any()
    assert drafted(proposed(PromptLookup(3, 3, 2, eos_id=-1), [[6, 1, 7, 8, 6, 1, 7]])) == [8, 6]
    # Llama 3 has several ids that end a text: 8 is one here.
    several = PromptLookup(1, 1, 4, eos_id=(1, 8))
    assert drafted(proposed(several, [[6, 7, 8, 4, 5, 6]])) == [7, 8]
    assert not proposed(several, [[8, 4, 5, 8]]).valid.any()


def test_llma_copies_from_the_reference_alone():
    """2304.04487: first occurrence, longest trigger of up to 5, 20 tokens with the newest one."""
    assert (LLMA.min_match, LLMA.depth, LLMA.nodes) == (1, 19, 19)
    words = [*range(2, 31)]
    assert drafted(proposed(LLMA, [[4]], [words], given=[0])) == words[3:22]
    both = [[6, 8, 9, 6]]
    assert drafted(proposed(LLMA, both, [[6, 7, 1]], given=[0])) == [7, 1]
    assert drafted(proposed(PromptLookup(), both, [[6, 7, 1]], given=[0])) == [7, 1]
    assert drafted(proposed(LLMA, both, [[2, 7, 1]], given=[0])) == []
    assert drafted(proposed(PromptLookup(), both, [[2, 7, 1]], given=[0])) == [8, 9, 6]
    assert drafted(proposed(LLMA, both, given=[3])) == [8, 9]  # decoder-only: of what was given


def test_a_copy_ends_where_the_text_does():
    assert drafted(proposed(PromptLookup(1, 1, 4), [[7, 8, 9, 7]])) == [8, 9, 7]
    assert drafted(proposed(PromptLookup(1, 1, 4, tie="last"), [[7, 7, 7]])) == [7]
    assert drafted(proposed(PromptLookup(1, 1, 4), [[7]], [[8, 7, 2]])) == [2]  # not on to the text


def test_several_spans_are_one_tree():
    """The best matches first; alike copies fold; the budget holds."""
    texts = [[7, 2, 3, 7, 2, 4, 7, 5, 6, 7, 2, 3, 7]]
    wide = PromptLookup(1, 1, 2, spans=4)
    assert (wide.nodes, wide.depth) == (8, 2)
    tree = proposed(wide, texts)
    assert says(tree) == prefixes((2, 3), (2, 4), (5, 6)) and not tree.chain
    assert says(proposed(PromptLookup(1, 1, 2, spans=2), texts)) == prefixes((2, 3), (2, 4))
    tree = proposed(PromptLookup(1, 1, 2, spans=4, budget=3), texts)
    assert says(tree) == prefixes((2, 3), (2, 4)) and tree.tokens.shape == (1, 3)
    assert PromptLookup(1, 1, 9, spans=4, budget=3).depth == 3
    tree = proposed(PromptLookup(1, 1, 2, spans=4, tie="last"), texts)
    assert list(copying.paths(tree).values())[:2] == [(2,), (2, 3)]


def restated(drafter, text, prompt, start):
    """(paths) by plain search; ``prompt`` None for a decoder-only model."""
    own = [(w if drafter.output or i < start else None) for i, w in enumerate(text)]
    places, sources = [], ([] if prompt is None else [prompt]) + [own]
    for source in sources:
        for at in range(len(source) - 1):
            n, limit = 0, min(drafter.max_match, at + 1, len(text))
            while n < limit and source[at - n] == text[-1 - n] != drafter.eos_id:
                n += 1
            span = source[at + 1 : at + 1 + drafter.depth]
            span = span[: span.index(drafter.eos_id) + 1] if drafter.eos_id in span else span
            span = span[: span.index(None)] if None in span else span
            if n >= drafter.min_match and span:
                places.append((n, span))
    if drafter.tie == "last":
        places.reverse()
    chosen = set()
    for _, span in sorted(places, key=lambda place: -place[0])[: drafter.spans]:
        for path in sorted(prefixes(span), key=len):
            if len(chosen) < drafter.nodes:
                chosen.add(path)
    return chosen


@pytest.mark.parametrize(
    "drafter",
    [
        PromptLookup(), LLMA, PromptLookup(2, 2, 3, tie="last"), PromptLookup(3, 1, 4, spans=3, budget=9),
        PromptLookup(4, 1, 5, spans=6, budget=7, tie="last", eos_id=2), PromptLookup(2, 1, 2, output=False),
    ],
)  # fmt: skip
def test_random_texts_against_a_search(drafter):
    """G1, G3, G6, G9: four letters, texts of all lengths, each row its own."""
    rng, rows, hits = np.random.default_rng(0), 40, 0
    texts = [rng.integers(0, 5, rng.integers(0, 20)).tolist() for _ in range(rows)]
    prompts = [rng.integers(0, 5, rng.integers(1, 12)).tolist() for _ in range(rows)]
    given = [int(rng.integers(0, len(text) + 1)) for text in texts]
    for with_prompts in (prompts, None):
        if with_prompts is None:
            texts = [text or [3] for text in texts]
        tree = proposed(drafter, texts, with_prompts, given=given, width=24)
        for row, text in enumerate(texts):
            prompt = None if with_prompts is None else prompts[row]
            expected = restated(drafter, text, prompt, given[row])
            assert says(tree, row) == expected, (text, prompt, given[row])
            hits += bool(expected)
    assert hits > 8


def test_nodes_are_deterministic_and_know_nothing_but_the_text():
    """B3, invariant 2: no q; the noise behind the lengths is nothing."""
    texts, prompts = [[4, 5, 4], [6, 6, 7]], [[4, 8, 1], [6, 6, 5, 1]]
    for drafter in (PromptLookup(), PromptLookup(spans=3, budget=8)):
        tree = proposed(drafter, texts, prompts)
        again = proposed(drafter, texts, prompts, width=30)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        assert tree.log_q is None and (tree.q_row == -1).all()
        np.testing.assert_array_equal(tree.judged, tree.valid)
        assert isinstance(drafter, Drafter)


def test_values_that_cannot_be_are_refused():
    for bad, word in (
        ({"min_match": 0}, "matches"), ({"min_match": 4}, "matches"), ({"copy": 0}, "copy"),
        ({"spans": 0}, "spans"), ({"budget": 0}, "nodes"), ({"tie": "best"}, "tie"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            PromptLookup(**bad)


# What is decoded.


def test_the_limit_is_met_exactly():
    """A4: context [7,8,9,7,8,9,7,8], three drafts, two tokens asked for: [9,7]."""
    context = toys.prompt([7, 8, 9, 7, 8, 9, 7, 8])
    out = generate(
        Spoken(), cycle(7, 8, 9), context, drafter=PromptLookup(copy=3), max_decode_len=2
    )
    assert toys.emitted(out) == [[9, 7]] and out.stats.drafted.tolist() == [2]


def test_a_script_that_repeats_itself_is_accepted_almost_whole():
    """The input is the output (LLMA's best case), and a cycle is found again in the output."""
    script = [*range(5, 17)]
    ask = toys.prompt([0, *script], [0, *script[::-1]])
    out = generate(
        toys.Script(), toys.scripts(script), ask, drafter=PromptLookup(copy=5), max_decode_len=12
    )
    assert toys.emitted(out)[0] == script
    # A plain round says 5, then two rounds of 5 + 1 tokens.
    assert out.stats.rounds.tolist()[0] == 3 and out.stats.rounds_plain.tolist()[0] == 1
    assert out.stats.accepted[0] == out.stats.drafted[0] - out.stats.drafted_cut[0]
    plain = dict(max_decode_len=40, drafter=PromptLookup(copy=5))
    out = generate(Spoken(), cycle(7, 8, 9), toys.prompt([7]), **plain)
    assert toys.emitted(out) == [([8, 9, 7] * 14)[:40]]
    assert out.stats.rounds[0] <= 11 and out.stats.accepted[0] == out.stats.drafted[0]


CHAIN, TREE = PromptLookup(copy=4), PromptLookup(copy=4, spans=4, budget=8)


@pytest.mark.parametrize("drafter", [CHAIN, TREE])
def test_greedy_output_is_plain_decoding_s(drafter):
    """Invariants 1 and 5, G9, H1: T5, B = 4 of unequal lengths and B = 1; rows as they are alone."""
    ties, accepted = [], 0
    for seed in range(4):
        params, ask = toys.init(toys.T5, seed), toys.ask(seed)
        plain = toys.decode(params, ask)
        spec = generate(toys.T5, params, ask, drafter=drafter, max_decode_len=toys.STEPS)
        ties += toys.differences(toys.T5, params, ask, plain, spec)
        assert (spec.finish_reason != stopping.ERROR).all()
        accepted += int(spec.stats.accepted.sum())
        if seed:
            continue
        for row in range(toys.BATCH):
            alone = jax.tree.map(lambda x, row=row: x[row : row + 1], ask)
            ids = jnp.asarray([row], jnp.int32)
            one = generate(
                toys.T5, params, alone, drafter=drafter, max_decode_len=toys.STEPS, row_ids=ids
            )
            copying.same_tokens_and_counts(one, spec, row)
    assert not ties and accepted > 30


def test_decoder_only_output_is_plain_decoding_s(drafter=TREE):
    """Invariants 1 and 5, G9: a Llama, four unequal prompts, and two of them alone."""
    model = decoders.tiny_llama()
    params, ask = decoders.init(model, 1), toys.ask(1)
    plain = decoders.decode(model, params, ask)
    spec = generate(model, params, ask, drafter=drafter, max_decode_len=16)
    assert toys.emitted(plain) == toys.emitted(spec)
    for row in (0, 3):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], ask)
        ids = jnp.asarray([row], jnp.int32)
        one = generate(model, params, alone, drafter=drafter, max_decode_len=16, row_ids=ids)
        copying.same_tokens_and_counts(one, spec, row)


def test_rows_with_different_matches_and_one_without():
    """G9: three rows, a cycle of three, of two, and none."""
    params = cycle(7, 8, 9)
    logits = np.array(params["logits"])
    logits[4, 5] = logits[5, 4] = 10
    for word in range(10, 31):
        logits[word, word + 1] = 10
    params = {"logits": jnp.asarray(logits)}
    ask = toys.prompt([7, 8, 9, 7], [4, 5, 4], [10])
    options = dict(drafter=PromptLookup(copy=4), max_decode_len=12)
    many = generate(Spoken(), params, ask, **options)
    assert many.stats.rounds.tolist()[2] == 12 and many.stats.drafted.tolist()[2] == 0
    assert many.stats.rounds_plain.tolist()[2] == 12 and many.stats.rounds[0] < 5
    for row, words in enumerate(([7, 8, 9, 7], [4, 5, 4], [10])):
        ids = jnp.asarray([row], jnp.int32)
        one = generate(Spoken(), params, toys.prompt(words), row_ids=ids, **options)
        copying.same_tokens_and_counts(one, many, row)


def test_num_decodes_and_samples_have_their_own_texts():
    """J2: decodes of one prompt go apart, each drafted from its own text."""
    params = {"logits": jnp.asarray(2 * np.random.default_rng(0).normal(size=(6, 6)), jnp.float32)}
    out = generate(
        toys.Table(6), params, toys.prompt([2, 3], [4]), drafter=PromptLookup(copy=3, eos_id=-1),
        sampling=Sampling(1.0), num_decodes=3, max_decode_len=12, eos_id=-1,
    )  # fmt: skip
    assert len({tuple(x) for x in np.asarray(out.tokens).reshape(6, -1)}) == 6
    assert (out.stats.accepted > 0).all() and (out.finish_reason == stopping.LENGTH).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "drafter", [PromptLookup(2, 1, 2), PromptLookup(2, 1, 2, spans=3, budget=4)]
)
def test_the_law_of_samples_is_the_target_s(drafter):
    """B3, B18, C1, invariant 2: 27 outputs of three tokens, exactly."""
    table = np.random.default_rng(3).normal(size=(3, 3))
    table -= np.log(np.exp(table).sum(1, keepdims=True))
    drafter = PromptLookup(**(vars(drafter) | {"eos_id": -1}))
    propose = lambda text: proposed(drafter, [text])  # noqa: E731
    text = (0, 1, 2, 0, 0, 2, 1, 0)
    assert propose(text).valid.sum() >= 2
    assert copying.law_error(propose, table, text, 3) < 1e-12
