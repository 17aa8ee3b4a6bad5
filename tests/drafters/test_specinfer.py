"""SpecInfer's drafter: its small models' laws, trees without holes, plain text, and the target's law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, stopping
from specjax.decode import tree as trees
from specjax.decode.interfaces import Params
from specjax.drafters.specinfer import SpecInfer
from specjax.models.ensemble import Ensemble
from tests import toys

TABLE = toys.Table(3, -1)
OTHER = toys.Table(3, 7)  # unlike the first one, so in a group of its own
TREES = {
    "chain": dict(widths=(1, 1)),
    "tree": dict(widths=(2, 1)),
    "sparse": dict(paths=((0,), (1,), (1, 0))),
}


def tables(count: int, noise: float = 1.5) -> list:
    """A target's table, then those of drafts that agree with it more or less."""
    base, *others = jax.random.normal(jax.random.key(3), (count + 1, 3, 3))
    return [{"logits": base}] + [{"logits": base + noise * other} for other in others]


def several(models, **shape):
    """(drafter, its parameters)."""
    ensemble = Ensemble(models)
    return SpecInfer(model=ensemble, **shape), ensemble.stack(tables(len(models))[1:])


def prompt(rows: int):
    tokens = np.arange(rows, dtype=np.int32)[:, None] % 3
    return toys.Prompt(jnp.asarray(tokens), jnp.ones(rows, jnp.int32))


def decode(drafter, params, rows=6, temperature=1.0, length=12, target=None, **options):
    target = tables(1)[0] if target is None else target
    return generate(
        TABLE, target, prompt(rows), drafter=drafter, draft_params=params, sampling=Sampling(temperature),
        max_decode_len=length, eos_id=-1, **({"key": jax.random.key(7)} | options),
    )  # fmt: skip


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("models", [(TABLE,), (TABLE, TABLE, OTHER)], ids=["one", "three"])
def test_no_small_model_has_a_hole(models, shape):
    """A toy that misses a token, or sees one twice, says nothing but NaN; no NaN is drafted from."""
    drafter, params = several(models, **TREES[shape], draws=True)
    for temperature in (0.0, 1.0):
        out = decode(drafter, params, temperature=temperature, length=24)
        assert (out.finish_reason == stopping.LENGTH).all() and (out.lengths == 24).all()
        assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()
        assert (out.stats.drafted >= out.stats.rounds).all(), "NaN leaves a node without tokens"
        if temperature == 0:
            plain = generate(TABLE, tables(1)[0], prompt(6), max_decode_len=24, eos_id=-1)
            np.testing.assert_array_equal(out.tokens, plain.tokens)


def proposals(drafter, params, rows=12, temperature=1.0, key=11):
    """(trees, roots) of one round after two that leave refusals behind."""
    decoder = loop.Decoder(TABLE, 64, drafter, eos_id=-1)
    both, sampling = Params(tables(1)[0], params), Sampling(temperature).rows(rows)

    @jax.jit
    def once():
        keys = loop.row_keys(jax.random.key(key), jnp.arange(rows, dtype=jnp.int32))
        state = loop.start(decoder, both, prompt(rows), keys)
        for _ in range(2):
            state = loop.speculative_round(decoder, both, state, sampling=sampling)
        return drafter.propose(both, state.drafter, state.text, sampling, keys)[0], loop.newest(
            state.text
        )

    return once()


def test_every_node_is_drawn_from_its_model_s_law():
    """Behind its own prefix, whichever model's token that begins with."""
    models = (TABLE, TABLE, OTHER)
    drafter, params = several(models, widths=(2, 2), draws=True)
    tree, root = proposals(drafter, params)
    laws = [jax.nn.log_softmax(table["logits"]) for table in tables(3)[1:]]
    per, words = drafter.template.nodes, np.asarray(tree.tokens)
    assert tree.tokens.shape == (12, 3 * per) and tree.judged.all()
    for b in range(len(words)):
        for n in range(3 * per):
            up = int(tree.parent[b, n])
            last = int(root[b]) if up < 0 else words[b, up]
            law = tree.log_q[b, int(tree.q_row[b, n])]
            np.testing.assert_allclose(law, laws[n // per][last], atol=1e-6)
    assert not tree.valid.all(), "three models of three tokens repeat each other"
    again = trees.share_repeats(tree)
    np.testing.assert_array_equal(again.parent, tree.parent)


def test_models_that_are_alike_draft_as_they_would_alone():
    """Piled up and run as one batch, or one after the other: the same trees."""
    drafter, params = several((TABLE, TABLE), widths=(2, 1), draws=True)
    apart, own = several((TABLE, OTHER), widths=(2, 1), draws=True)
    assert len(params) == 1 and len(own) == 2
    one, other = proposals(drafter, params)[0], proposals(apart, own)[0]
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_chain_of_one_is_the_small_model_s():
    """On a T5 with an encoder of its own: what is accepted, round by round, to the number."""
    target, draft = toys.pair_of(0)
    prompt_, options = toys.ask(0), dict(max_decode_len=toys.STEPS)
    drafter = SpecInfer(model=toys.T5, widths=(1, 1, 1))
    assert drafter.chain and drafter.nodes == 3
    mine = generate(toys.T5, target, prompt_, drafter=drafter, draft_params=draft, **options)
    theirs = toys.decode(target, prompt_, draft)
    jax.tree.map(np.testing.assert_array_equal, mine.stats, theirs.stats)
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)


def test_more_models_accept_more():
    """Of drafts that err in different places; and the text is the plain one."""
    target = toys.init(toys.T5, 0)
    drafts = [toys.noisy(target, seed, 0.3) for seed in range(4)]
    prompt_ = toys.ask(0)
    plain = toys.decode(target, prompt_)
    steps = []
    for count in (1, 4):
        ensemble = Ensemble((toys.T5,) * count)
        out = generate(
            toys.T5, target, prompt_, drafter=SpecInfer(model=ensemble, widths=(1, 1, 1)),
            draft_params=ensemble.stack(drafts[:count]), max_decode_len=toys.STEPS,
        )  # fmt: skip
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        steps.append(int(out.stats.rounds.sum()))
    assert steps[1] < steps[0]


def test_outputs_follow_the_target_s_law():
    """27 outputs of three tokens."""
    drafter, params = several((TABLE, OTHER), widths=(2, 1), draws=True)
    outs = [decode(drafter, params, length=3, rows=16, key=jax.random.key(i)) for i in range(125)]
    tokens = np.concatenate([np.asarray(out.tokens) for out in outs])
    target = np.asarray(jax.nn.softmax(tables(1)[0]["logits"]), np.float64)
    seen = np.bincount(tokens @ [9, 3, 1], minlength=27) / len(tokens)
    wanted = (target[0][:, None, None] * target[:, :, None] * target[None]).reshape(-1)
    spread = np.sqrt(wanted * (1 - wanted) / len(tokens))
    assert (np.abs(seen - wanted) < 4.5 * spread + 1e-9).all()


def test_rows_depend_on_nothing_but_themselves():
    drafter, params = several((TABLE, TABLE), widths=(2, 1), draws=True)
    whole = decode(drafter, params, row_ids=jnp.arange(6, dtype=jnp.int32))
    alone = generate(
        TABLE, tables(1)[0], toys.Prompt(prompt(6).tokens[4:5], prompt(6).length[4:5]), drafter=drafter,
        draft_params=params, sampling=Sampling(1.0), max_decode_len=12, key=jax.random.key(7), eos_id=-1,
        row_ids=jnp.asarray([4], jnp.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(whole.tokens[4:5], alone.tokens)


def test_parameters_are_one_a_model():
    with pytest.raises(ValueError, match="2 models and parameters of 1"):
        Ensemble((TABLE, TABLE)).stack(tables(1)[1:])
    with pytest.raises(ValueError, match="at least one model"):
        Ensemble(())
