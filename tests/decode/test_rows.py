"""A row's tokens and counts depend on nothing but the row: invariant 5."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Prompt, Sampling
from specjax.decode import loop
from tests import toys
from tests.toys import BATCH, OFF_PATH, ask, decode, pair_of, play, scripted

SCRIPT = [*range(5, 20)]
SAMPLED = Sampling(jnp.asarray([1.0, 0.7, 0.0, 1.3]))


def rows_of(out, rows):
    """Tokens, lengths and all counts of these rows, as lists."""
    picked = jax.tree.map(lambda x: np.asarray(x)[np.asarray(rows)].tolist(), out)
    return picked.tokens, picked.lengths, picked.stats


def test_a_row_does_not_depend_on_the_others():
    """H1, invariant 5: other prompts in rows 0 and 3 leave rows 1 and 2 as they were, bitwise."""
    (params, draft), prompt, other = pair_of(1), ask(1), ask(2)
    out = decode(params, prompt, draft, sampling=SAMPLED)
    keep = jnp.asarray([False, True, True, False])
    mixed = Prompt(
        jnp.where(keep[:, None], prompt.tokens, other.tokens),
        jnp.where(keep, prompt.length, other.length),
    )
    changed = decode(params, mixed, draft, sampling=SAMPLED)
    assert rows_of(out, [1, 2]) == rows_of(changed, [1, 2])
    assert rows_of(out, [0, 3]) != rows_of(changed, [0, 3])
    np.testing.assert_array_equal(out.log_probs[1:3], changed.log_probs[1:3])


def test_rows_move_with_their_ids():
    """J1, invariant 5: prompts, temperatures and row ids permuted together permute the output."""
    (params, draft), prompt = pair_of(3), ask(3)
    order = jnp.asarray([2, 0, 3, 1])
    out = decode(params, prompt, draft, sampling=SAMPLED, key=jax.random.key(5))
    moved = decode(
        params, Prompt(prompt.tokens[order], prompt.length[order]), draft, row_ids=order,
        sampling=Sampling(SAMPLED.temperature[order]), key=jax.random.key(5),
    )  # fmt: skip
    assert rows_of(out, order) == rows_of(moved, range(BATCH))
    ids = jnp.asarray([7, 1, 2, 3])
    renamed = decode(params, prompt, draft, sampling=SAMPLED, key=jax.random.key(5), row_ids=ids)
    assert rows_of(out, [1, 2, 3]) == rows_of(renamed, [1, 2, 3])
    assert rows_of(out, [0]) != rows_of(renamed, [0])


def test_a_row_alone_and_padded_is_the_same_row():
    """H1, O3, invariant 5: B = 1 and three more columns of padding, tokens and stats."""
    (params, draft), prompt = pair_of(4), ask(4)
    together = decode(params, prompt, draft, sampling=SAMPLED)
    for row in range(BATCH):
        tokens = jnp.pad(prompt.tokens[row : row + 1], ((0, 0), (0, 3)), constant_values=9)
        alone = decode(
            params, Prompt(tokens, prompt.length[row : row + 1]), draft,
            sampling=Sampling(SAMPLED.temperature[row : row + 1]),
            row_ids=jnp.asarray([row], jnp.int32),
        )  # fmt: skip
        assert rows_of(alone, [0])[:2] == rows_of(together, [row])[:2]
        counts = [(x[0].tolist(), y[row].tolist())
                  for x, y in zip(alone.stats, together.stats, strict=True)]  # fmt: skip
        assert all(np.allclose(x, y, rtol=1e-4) for x, y in counts)


def test_seeds_and_rows_differ_and_repeat():
    """J1, J2: flat laws: equal prompts in a batch differ; a seed repeats; another seed differs."""
    flat = dict(sampling=Sampling(1e4))
    rows = [[[5] * 15] * 3] * 2
    first, again = (play(*rows, key=jax.random.key(1), **flat) for _ in range(2))
    other = play(*rows, key=jax.random.key(2), **flat)
    a, b, c = toys.emitted(first)
    assert a != b and b != c and a != c
    assert toys.emitted(first) == toys.emitted(again) != toys.emitted(other)


def test_interleaved_decodes_are_two_decodes():
    """G8, J4: no state outside; rounds of two decodes in turn equal each alone."""
    decoder, both, prompt = scripted(SCRIPT, [SCRIPT, [OFF_PATH - 1] * 15, SCRIPT])
    sampling = Sampling(1e4).rows(3)
    starts = [
        loop.jit_start(decoder, both, prompt, toys.row_keys(jax.random.key(i), 3)) for i in (1, 2)
    ]
    alone = [toys.drive(decoder, both, prompt, Sampling(1e4), jax.random.key(i)) for i in (1, 2)]
    states = starts
    for _ in range(8):
        states = [toys.jit_round(decoder, both, state, sampling)[1] for state in states]
    for state, rounds in zip(states, alone, strict=True):
        length = np.asarray(state.text.length)
        np.testing.assert_array_equal(length, rounds[-1].after.text.length)
        for row, end in enumerate(length):
            np.testing.assert_array_equal(
                state.text.tokens[row, :end], rounds[-1].after.text.tokens[row, :end]
            )
    assert np.any(states[0].text.tokens[:, 1:5] != states[1].text.tokens[:, 1:5])
