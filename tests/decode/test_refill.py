"""Continuous batching: every prompt once, each with the output it has alone, rows kept busy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, Sampling
from specjax.decode import loop, refill
from specjax.decode.interfaces import Params
from specjax.decode.loop import Decoder
from specjax.decode.refill import Refill, Request
from specjax.drafters.small_model import SmallModel
from tests import toys
from tests.toys import STEPS, T5, ask, decode, pair_of

WIDTH, COUNT = 6, 11


def queue(prompt: Prompt) -> list[Request]:
    rows = zip(np.asarray(prompt.tokens), np.asarray(prompt.length), strict=True)
    return [Request(i, tokens[:length]) for i, (tokens, length) in enumerate(rows)]


def batches(gamma: int | None, batch_size: int, group: int = 0) -> Refill:
    drafter = None if gamma is None else SmallModel(T5, gamma)
    return Refill(Decoder(T5, STEPS, drafter), batch_size, WIDTH, group)


def run(engine: Refill, seed: int, sampling: Sampling, requests: list[Request], key=7) -> dict:
    params, draft = pair_of(seed)
    both = Params(params, None if engine.decoder.drafter is None else draft)
    found = list(engine(both, requests, sampling, jax.random.key(key)))
    assert len(found) == len(dict(found)), "a prompt came twice"
    return dict(found)


@pytest.mark.parametrize("gamma", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_prompt_has_the_output_it_has_alone(gamma, temperature):
    """Invariant 5: rows are reused, and no output depends on what was in the row before."""
    prompt, sampling = ask(2, COUNT, WIDTH), Sampling(temperature)
    found = run(batches(gamma, 4, 2), 2, sampling, queue(prompt))
    assert sorted(found) == list(range(COUNT))
    params, draft = pair_of(2)
    draft = None if gamma is None else draft
    alone = decode(params, prompt, draft, sampling=sampling, key=jax.random.key(7))
    for number, out in found.items():
        np.testing.assert_array_equal(out.tokens, alone.tokens[number])
        assert out.lengths == alone.lengths[number]
        assert out.finish_reason == alone.finish_reason[number]
        for name, count in out.stats._asdict().items():
            np.testing.assert_allclose(count, getattr(alone.stats, name)[number], rtol=1e-5)


@pytest.mark.parametrize(("batch_size", "group"), [(1, 0), (3, 1), (4, 4), (16, 0)])
def test_the_grouping_changes_nothing(batch_size, group):
    """More rows than prompts, one row, whole batches at a time: the same outputs."""
    requests = queue(ask(3, COUNT, WIDTH))
    found = run(batches(3, batch_size, group), 3, Sampling(1.0), requests)
    usual = run(batches(3, 4, 2), 3, Sampling(1.0), requests)
    assert sorted(found) == sorted(usual)
    for number, out in found.items():
        np.testing.assert_array_equal(out.tokens, usual[number].tokens)


def test_a_part_of_the_queue_decodes_as_in_the_whole():
    """What a resumed run relies on: numbers, not places, decide the random keys."""
    requests = queue(ask(4, COUNT, WIDTH))
    whole = run(batches(3, 4, 2), 4, Sampling(1.0), requests)
    part = run(batches(3, 4, 2), 4, Sampling(1.0), requests[5:8])
    assert sorted(part) == [5, 6, 7]
    for number, out in part.items():
        np.testing.assert_array_equal(out.tokens, whole[number].tokens)


def test_rows_are_refilled_before_the_batch_has_ended():
    """One long row does not keep the others waiting: the queue is read while it decodes."""
    lengths = [8, 1, 1, 1, 1, 1, 1]
    scripts = toys.scripts(*[[5 + i] * (n - 1) + [toys.EOS] for i, n in enumerate(lengths)])
    engine = Refill(Decoder(toys.Script(), 8), 2, 1, 1)
    requests = [Request(i, np.asarray([i], np.int32)) for i in range(len(lengths))]
    order = [n for n, _ in engine(Params(scripts, None), requests, Sampling(), jax.random.key(0))]
    assert sorted(order) == list(range(len(lengths)))
    assert order.index(0) > 3


def test_stop_sequences_end_rows_of_a_queue():
    """The sequence is the same for all rows, whichever rows are refilled."""
    scripts = toys.scripts(*[[5 + i, 20, 21, 22, toys.EOS] for i in range(5)])
    engine = Refill(Decoder(toys.Script(), 8), 2, 1, 1)
    requests = [Request(i, np.asarray([i], np.int32)) for i in range(5)]
    found = dict(
        engine(Params(scripts, None), requests, Sampling(), jax.random.key(0), [[20, 21], [9, 20]])
    )
    texts = {n: out.tokens[: out.lengths].tolist() for n, out in found.items()}
    assert texts == {i: [5 + i, 20] if i == 4 else [5 + i, 20, 21] for i in range(5)}


def test_an_empty_queue_yields_nothing():
    assert run(batches(3, 4), 2, Sampling(), []) == {}


@pytest.mark.parametrize(("size", "text"), [(WIDTH + 1, "has 7 ids"), (0, "has 0 ids")])
def test_a_prompt_that_does_not_fit_is_an_error(size, text):
    with pytest.raises(ValueError, match=f"prompt 3 {text}, allowed are 1 to {WIDTH}"):
        run(batches(None, 4), 2, Sampling(), [Request(3, np.full(size, 5, np.int32))])


@pytest.mark.parametrize(("batch_size", "group"), [(0, 0), (4, 5), (4, -1)])
def test_sizes_out_of_range_are_errors(batch_size, group):
    with pytest.raises(ValueError, match="must"):
        batches(None, batch_size, group)


def test_a_queue_costs_three_programs():
    """One for a group's prompts, one for the rounds, one for the insertion, whatever comes."""
    engine, requests = batches(3, 5, 2), queue(ask(5, COUNT, WIDTH))
    run(engine, 5, Sampling(0.5), requests)
    before = [f._cache_size() for f in (refill.run_until, refill.insert, refill.spread)]
    run(engine, 6, Sampling(0.9), requests[:7])
    after = [f._cache_size() for f in (refill.run_until, refill.insert, refill.spread)]
    assert before == after


def test_a_row_number_past_the_batch_is_dropped():
    decoder, params, prompt = toys.scripted([5, 6, 7, 1], [[5, 6, 7, 1]] * 3)
    keys = loop.row_keys(jax.random.key(0), jnp.arange(3, dtype=jnp.int32))
    state = loop.jit_start(decoder, params, prompt, keys)
    start = np.asarray(state.text.tokens)
    fresh = jax.tree.map(jnp.copy, state)
    fresh = fresh._replace(text=fresh.text._replace(tokens=fresh.text.tokens + 9))
    got = refill.insert(state, fresh, jnp.asarray([1, 3, 3], jnp.int32))
    np.testing.assert_array_equal(got.text.tokens, start + [[0], [9], [0]])
