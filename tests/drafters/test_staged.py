"""Staged drafting: the draft's law whatever drafts for it, states without holes, any depth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, stopping
from specjax.decode.interfaces import Params
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.small_model import SmallModel
from specjax.drafters.staged import Staged
from tests import toys

TABLE = toys.Table(3, -1)


def tables(count: int, noise: float = 1.5) -> list:
    """Tables that agree more or less."""
    base, *others = jax.random.normal(jax.random.key(3), (count, 3, 3))
    return [{"logits": base}] + [{"logits": base + noise * other} for other in others]


def stages(depth: int, gamma: int = 3):
    """(drafter of so many models, its parameters), each model drafting for the one before."""
    models = tables(depth + 1)[1:]
    drafter, params = SmallModel(TABLE, gamma + 1), models[-1]
    for table in reversed(models[:-1]):
        drafter, params = Staged(TABLE, drafter, gamma), Params(table, params)
    return drafter, params


def prompt(rows: int):
    tokens = np.arange(rows, dtype=np.int32)[:, None] % 3
    return toys.Prompt(jnp.asarray(tokens), jnp.ones(rows, jnp.int32))


def decode(drafter, params, rows=6, temperature=1.0, length=12, target=None, **options):
    target = tables(2)[0] if target is None else target
    return generate(
        TABLE, target, prompt(rows), drafter=drafter, draft_params=params, sampling=Sampling(temperature),
        max_decode_len=length, eos_id=-1, **({"key": jax.random.key(7)} | options),
    )  # fmt: skip


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stage_leaves_a_hole(depth, temperature):
    """A toy that misses a token, or sees one twice, says nothing but NaN."""
    drafter, params = stages(depth)
    out = decode(drafter, params, temperature=temperature, length=24)
    assert (out.finish_reason == stopping.LENGTH).all() and (out.lengths == 24).all()
    assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()
    if temperature == 0:
        plain = generate(TABLE, tables(2)[0], prompt(6), max_decode_len=24, eos_id=-1)
        np.testing.assert_array_equal(out.tokens, plain.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_accepted_whole(temperature):
    """Whatever drafts for it: the chain follows its law, and nothing is lost in between."""
    target, other = tables(2)
    drafter = Staged(TABLE, SmallModel(TABLE, 2), 3)
    out = decode(drafter, Params(target, other), temperature=temperature, length=12)
    assert (out.stats.rounds == 3).all() and (out.stats.accepted == 9).all()


def proposals(drafter, params, repeats=1, rows=16, temperature=1.0):
    """(trees, roots) of one round after two that leave refusals behind, with so many keys.

    Few rows at a time: XLA unrolls a cache's writes over rows.
    """
    decoder = loop.Decoder(TABLE, 64, drafter, eos_id=-1)
    both = Params(tables(2)[0], params)
    sampling = Sampling(temperature).rows(rows)

    @jax.jit
    def once(key):
        keys = loop.row_keys(key, jnp.arange(rows, dtype=jnp.int32))
        state = loop.start(decoder, both, prompt(rows), keys)
        for _ in range(2):
            state = loop.speculative_round(decoder, both, state, sampling=sampling)
        tree, _ = drafter.propose(both, state.drafter, state.text, sampling, keys)
        return tree, loop.newest(state.text)

    found = [once(key) for key in jax.random.split(jax.random.key(11), repeats)]
    return jax.tree.map(lambda *x: np.concatenate(x), *found)


def test_rows_of_q_are_the_draft_s_law():
    """Of every place of the chain, though rounds inside are of unequal length in unequal rows."""
    drafter, params = stages(2)
    tree, root = proposals(drafter, params)
    assert tree.chain and tree.valid.all()
    before = np.concatenate([root[:, None], tree.tokens[:, :-1]], axis=1)
    law = jax.nn.log_softmax(params.target["logits"])
    np.testing.assert_allclose(tree.log_q, law[before], atol=1e-6)


@pytest.mark.long
def test_chains_follow_the_draft_s_law():
    """9 pairs behind each root, against the products of the table's laws."""
    drafter, params = stages(2, gamma=2)
    tree, root = proposals(drafter, params, 300)
    law = np.asarray(jax.nn.softmax(params.target["logits"]), np.float64)
    for last in range(3):
        mine = tree.tokens[root == last]
        seen = np.bincount(3 * mine[:, 0] + mine[:, 1], minlength=9) / len(mine)
        wanted = (law[last][:, None] * law).reshape(-1)
        spread = np.sqrt(wanted * (1 - wanted) / len(mine))
        assert (np.abs(seen - wanted) < 4.5 * spread).all()


def test_outputs_follow_the_target_s_law():
    """27 outputs of three tokens, of three stages."""
    drafter, params = stages(3, gamma=2)
    outs = [decode(drafter, params, length=3, rows=16, key=jax.random.key(i)) for i in range(125)]
    tokens = np.concatenate([np.asarray(out.tokens) for out in outs])
    asked = np.asarray(prompt(16).tokens[:, 0])
    assert len(tokens) == 2000 and set(asked) == {0, 1, 2}
    target = np.asarray(jax.nn.softmax(tables(2)[0]["logits"]), np.float64)
    seen = np.bincount(tokens @ [9, 3, 1], minlength=27) / len(tokens)
    wanted = (target[0][:, None, None] * target[:, :, None] * target[None]).reshape(-1)
    spread = np.sqrt(wanted * (1 - wanted) / len(tokens))
    assert (np.abs(seen - wanted) < 4.5 * spread + 1e-9).all()


def test_what_copies_may_draft_for_a_draft():
    """A drafter without parameters: n-grams of the text, as in the paper's second stage."""
    drafter = Staged(TABLE, PromptLookup(eos_id=-1), 3)
    out = decode(drafter, Params(tables(2)[1], None), temperature=0.0, length=24)
    plain = generate(TABLE, tables(2)[0], prompt(6), max_decode_len=24, eos_id=-1)
    np.testing.assert_array_equal(out.tokens, plain.tokens)


def test_rows_depend_on_nothing_but_themselves():
    drafter, params = stages(2)
    whole = decode(drafter, params, row_ids=jnp.arange(6, dtype=jnp.int32))
    alone = generate(
        TABLE, tables(2)[0], toys.Prompt(prompt(6).tokens[4:5], prompt(6).length[4:5]), drafter=drafter,
        draft_params=params, sampling=Sampling(1.0), max_decode_len=12, key=jax.random.key(7), eos_id=-1,
        row_ids=jnp.asarray([4], jnp.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(whole.tokens[4:5], alone.tokens)


def test_a_chain_needs_a_token():
    with pytest.raises(ValueError, match="gamma"):
        dataclasses.replace(stages(2)[0], gamma=0)
