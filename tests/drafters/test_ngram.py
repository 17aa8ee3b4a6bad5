"""Unigram and bigram drafts: their tables, their laws, and the papers' alpha."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling, generate
from specjax.bench.alpha import alpha
from specjax.decode import loop, stopping
from specjax.decode.interfaces import Drafter, Params
from specjax.decode.processors import RepetitionPenalty
from specjax.drafters.ngram import Ngram, bigram_table, unigram_table
from tests import toys
from tests.decode.laws import PRODUCTION
from tests.decode.test_law import EXACT, error, laws_of, pair, x64

TEXTS, LENGTHS = np.asarray([[2, 3, 2, 1, 9, 9], [3, 3, 1, 7, 7, 7]]), np.asarray([4, 3])


# Tables.


def test_unigrams_are_counted_up_to_the_lengths():
    """Counts 2: 2, 3: 3, 1: 2 of 7; one more of each of 10 ids."""
    table = np.exp(unigram_table(TEXTS, LENGTHS, 10))
    np.testing.assert_allclose(table, (np.asarray([0, 2, 2, 3, *[0] * 6]) + 1) / 17, rtol=1e-6)
    bare = unigram_table(TEXTS, LENGTHS, 10, smoothing=0.0)
    assert bare[9] == -np.inf and np.exp(bare).sum() == pytest.approx(1)


def test_bigrams_follow_the_start_token_and_are_smoothed_towards_unigrams():
    """G6: what follows 0 is a text's first token; an unseen context has the unigram law."""
    unigram = np.exp(unigram_table(TEXTS, LENGTHS, 10))
    table = np.exp(bigram_table(TEXTS, LENGTHS, 10, smoothing=0.5))
    np.testing.assert_allclose(table.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(table[9], unigram, rtol=1e-5)
    after_start = (np.eye(10)[2] + np.eye(10)[3] + 0.5 * unigram) / 2.5
    np.testing.assert_allclose(table[0], after_start, rtol=1e-5)
    after_3 = (np.eye(10)[2] + np.eye(10)[3] + np.eye(10)[1] + 0.5 * unigram) / 3.5
    np.testing.assert_allclose(table[3], after_3, rtol=1e-5)
    assert table[1].argmax() == 3 and not np.allclose(table[2], unigram)
    with pytest.raises(ValueError, match="smoothing"):
        bigram_table(TEXTS, LENGTHS, 10, smoothing=0.0)


# Drafts.


@x64
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("order", [1, 2])
def test_their_laws_are_exact(order, sampled):
    """B3, B18: whole outputs; unigrams repeat one row."""
    target, draft = pair(0)
    if order == 1:
        draft = lambda text, row=draft((0, 0)): row  # noqa: E731
    assert error(PRODUCTION, target, draft, 3, sampled=sampled) < EXACT


def proposed(drafter, table, sampling, words=(5, 6)):
    """The tree drafted behind a text of one row."""
    params = Params(toys.scripts([5]), jnp.asarray(table, jnp.float32))
    prompt = toys.script_prompt(0)._replace(prefix=toys.prompt(words))
    prefilled = toys.Script().prefill(params.target, prompt, 16)
    text = loop.given(prefilled.text)
    state = drafter.init(params, prefilled, 16)
    keys = toys.row_keys(jax.random.key(3), 1)
    return drafter.propose(params, state, text, sampling.rows(1), keys)[0]


def test_drafts_are_drawn_from_the_rows_that_log_q_says():
    """B3, invariant 10: q is the table's row behind the token before, under the sampling."""
    table = np.random.default_rng(0).normal(size=(8, 8))
    for order, rows in ((1, table[2]), (2, table)):
        tree = proposed(Ngram(order, 3), rows, Sampling(0.7, top_k=5))
        words = [6, *tree.tokens[0].tolist()]
        for i in range(3):
            logits = rows if order == 1 else rows[words[i]]
            law = laws_of(np.asarray(logits, np.float32)[None], {"temperature": 0.7, "top_k": 5})
            np.testing.assert_allclose(np.exp(tree.log_q[0, i]), np.exp(law((0,))), rtol=1e-4)
            assert tree.log_q[0, i, words[i + 1]] > -np.inf
    tree = proposed(Ngram(2, 3, sampled=False), table, Sampling(1.0))
    words = [6, *tree.tokens[0].tolist()]
    assert words[1:] == [int(table[w].argmax()) for w in words[:3]]
    assert tree.log_q is None and (tree.q_row == -1).all()
    row = np.asarray([3.0, 2.0, 1.0, *[0.0] * 5])
    tree = proposed(Ngram(1, 3), row, Sampling(processors=(RepetitionPenalty(2.0),)), (5,))
    assert tree.tokens[0].tolist() == [0, 1, 0]  # 3, 2 | 1.5, 2 | 1.5, 1


def test_decoding_with_them_is_plain_decoding():
    """Invariant 1, H1: greedy tokens; a table that is the target's own is accepted whole."""
    model, rng = toys.Table(12), np.random.default_rng(1)
    target = jnp.asarray(rng.normal(size=(12, 12)), jnp.float32)
    ask = toys.prompt([2], [3], [4])
    common = dict(max_decode_len=9, eos_id=1)
    plain = generate(model, {"logits": target}, ask, **common)
    for table in (target, jnp.asarray(rng.normal(size=(12, 12)), jnp.float32)):
        spec = generate(
            model, {"logits": target}, ask, drafter=Ngram(2, 3), draft_params=table, **common
        )
        assert toys.emitted(spec) == toys.emitted(plain)
        assert (spec.finish_reason != stopping.ERROR).all()
        if table is target:
            np.testing.assert_array_equal(spec.stats.accepted, spec.stats.drafted)


def test_values_that_cannot_be_are_refused():
    """G2, and a table of the wrong order."""
    for bad, word in (({"gamma": 0}, "gamma"), ({"order": 3}, "order")):
        with pytest.raises(ValueError, match=word):
            Ngram(**bad)
    with pytest.raises(ValueError, match="order 2"):
        proposed(Ngram(2), np.zeros(8), Sampling())
    assert isinstance(Ngram(), Drafter)


# alpha.


def overlap(p, q):
    return np.minimum(np.exp(p), np.exp(q)).sum()


@pytest.mark.parametrize("draft_of", ["model", "bigram", "unigram"])
def test_alpha_is_the_mean_overlap_on_given_texts(draft_of):
    """2211.17192, corollary 3.6: position by position, EOS included, nothing behind it."""
    target, draft = toys.table_pair(3, size=5)
    words, lengths = [[2, 3, 1, 4, 4], [4, 4, 2, 0, 3]], [3, 5]
    options = {"temperature": 0.75, "top_k": 4}
    p = laws_of(target, options)
    q = laws_of(draft if draft_of != "unigram" else np.tile(draft[2], (5, 1)), options)
    expected = [
        sum(overlap(p((x,)), q((x,))) for x in [0, *row][:n])
        for row, n in zip(words, lengths, strict=True)
    ]
    as_params = lambda x: {"logits": jnp.asarray(x, jnp.float32)}  # noqa: E731
    drafts = {
        "model": (toys.Table(5), as_params(draft)),
        "bigram": (Ngram(2), jnp.asarray(draft, jnp.float32)),
        "unigram": (Ngram(1), jnp.asarray(draft[2], jnp.float32)),
    }
    got = alpha(
        toys.Table(5), as_params(target), *drafts[draft_of], toys.prompt([0], [0]),
        jnp.asarray(words, jnp.int32), jnp.asarray(lengths, jnp.int32), Sampling(**options).rows(2),
    )  # fmt: skip
    np.testing.assert_allclose(got.overlap, expected, rtol=1e-5)
    assert got.value == pytest.approx(sum(expected) / 8, rel=1e-5)


def test_alpha_of_a_t5_behind_a_prefix_and_processors():
    """I1: in-block history there too; the target itself has alpha 1; a decode's rate is near."""
    (params, draft), prompt = toys.pair_of(2), toys.ask(2)
    words = jnp.asarray([[5, 6]] * 4, jnp.int32)
    prompt = prompt._replace(prefix=Prompt(words, jnp.asarray([0, 1, 2, 2], jnp.int32)))
    sampling = Sampling(1.0, processors=(RepetitionPenalty(1.5),))
    out = toys.decode(params, prompt, draft, steps=16, sampling=sampling)
    args = (prompt, out.tokens, out.lengths, sampling.rows(4))
    same = alpha(toys.T5, params, toys.T5, params, *args)
    np.testing.assert_allclose(same.overlap, out.lengths, rtol=1e-4)
    other = alpha(toys.T5, params, toys.T5, draft, *args)
    measured = float(out.stats.overlap.sum()) / int(out.stats.tested.sum())
    assert 0.2 < other.value < 0.98 and abs(other.value - measured) < 0.15
