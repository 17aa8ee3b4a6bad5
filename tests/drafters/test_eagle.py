"""EAGLE's head: what it reads, the trees it drafts, and what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop
from specjax.decode.interfaces import Params
from specjax.decode.verify import GreedyMatch
from specjax.drafters.eagle import EagleHead
from specjax.models import draft_vocab
from specjax.models.eagle import Eagle, EagleConfig, Pairs
from tests import toys
from tests.models import decoders

pytestmark = pytest.mark.usefixtures("x64")
STEPS = 20
TREES = {
    "chain": dict(widths=(1, 1, 1)),
    # The third node of the first level has a child, the second has none.
    "sparse": dict(
        paths=((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 0), (2, 0, 1))
    ),
}
TARGET = decoders.tiny_llama(dtype="float64")


def of_config(**options):
    c = TARGET.config
    sizes = dict(
        vocab_size=c.vocab_size, emb_dim=c.emb_dim, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
        dtype="float64",
    )  # fmt: skip
    return Eagle(EagleConfig(**sizes | options))


@functools.cache
def made(draft=None):
    """A random head on the target's embedding and output layer, and its parameters."""
    head = of_config(draft_vocab=draft)
    params = decoders.init(head, 3)
    return head, params | head.taken(TARGET, plain()[0])


@functools.cache
def plain():
    """(the target's parameters, prompts of 3 to 6 tokens, plain greedy output)."""
    params, prompt = decoders.init(TARGET, 1), toys.ask(6, 4)
    return params, prompt, generate(TARGET, params, prompt, max_decode_len=STEPS, eos_id=-1)


def speculate(shape, rows=slice(None), draft=None, **options):
    params, prompt, _ = plain()
    prompt = jax.tree.map(lambda x: x[rows], prompt)
    head, weights = made(draft)
    options = {"eos_id": -1, "max_decode_len": STEPS} | options
    return generate(
        TARGET, params, prompt, drafter=EagleHead(head, **shape), draft_params=weights, **options
    )


@pytest.mark.parametrize("shape", TREES)
def test_greedy_text_is_the_plain_one(shape):
    """Invariants 1 and 6, and rows alone (5), whatever a random head says."""
    out = speculate(TREES[shape], verifier=GreedyMatch())
    np.testing.assert_array_equal(out.tokens, plain()[2].tokens)
    row = jnp.asarray([2], jnp.int32)
    alone = speculate(TREES[shape], slice(2, 3), row_ids=row, verifier=GreedyMatch())
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[2])
    own = jax.tree.map(lambda x: x[2], out.stats)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), alone.stats, own)


@pytest.mark.parametrize("draws", [False, True])
def test_rows_that_sample_and_rows_that_do_not_stand_in_one_batch(draws):
    sampling = Sampling(jnp.asarray([0.0, 1.0, 0.0, 1.0]))
    shape = TREES["sparse"] | dict(draws=draws)
    out = speculate(shape, sampling=sampling, key=jax.random.key(5))
    np.testing.assert_array_equal(out.tokens[::2], plain()[2].tokens[::2])
    assert (out.stats.emitted == STEPS).all()


def test_a_reduced_vocabulary_drafts_its_pieces_only():
    vocab = draft_vocab.of_ids(np.arange(0, toys.VOCAB, 3), toys.VOCAB)
    out = speculate(TREES["chain"], draft=vocab)
    np.testing.assert_array_equal(out.tokens, plain()[2].tokens)


WIDE = 40


@functools.cache
def compiled():
    """(the target's states of a padded text, the head's of its pairs), compiled once."""
    head = made()[0]
    states = jax.jit(lambda params, text: TARGET.states(params, text, ("final",))["final"])
    return states, jax.jit(lambda weights, pairs: head.next_states(weights, pairs, {}))


def recomputed(head, weights, params, text, path):
    """The head's logits behind a text and drafted tokens, as training reads whole texts.

    The target's states are recomputed from the text alone; behind it the head's own follow.
    """
    target_states, next_states = compiled()
    words = jnp.asarray(np.pad([*text, *path], (0, WIDE - len(text) - len(path))), jnp.int32)[None]
    tokens = jnp.roll(words, -1, axis=1)
    states = target_states(params, words)
    for at in range(len(text) - 2, len(text) - 1 + len(path)):
        out = next_states(weights, Pairs(tokens, states))
        states = states.at[:, at + 1].set(out[:, at])
    return head.logits(weights, states[:, at + 1][:, None])[0, 0]


@pytest.mark.parametrize("shape", TREES)
def test_drafts_are_what_training_reads(shape):
    """M2, L6: every node of some rounds has the law that whole texts of pairs have, read anew.

    So accepted tokens are read again with the target's own states, no matter how many there were.
    """
    params, prompt, _ = plain()
    head, weights = made()
    drafter = EagleHead(head, **TREES[shape])
    decoder = loop.Decoder(TARGET, STEPS, drafter, eos_id=-1)
    both, sampling = Params(params, weights), Sampling(0.0).rows(4)
    state = loop.jit_start(decoder, both, prompt, toys.row_keys(jax.random.key(0), 4))
    propose = jax.jit(drafter.propose)
    one = jax.jit(functools.partial(loop.one_round, decoder))
    lags = set()
    for _ in range(4):
        drafted, _ = propose(both, state.drafter, state.text, sampling, state.keys)
        lags |= set(np.asarray(state.drafter.lag).tolist())
        for row in range(4):
            text = np.asarray(state.text.tokens[row, : int(state.text.length[row])])
            if len(text) < 2:
                assert not drafted.valid[row].any()
                continue
            _check(
                drafter, drafted, row, functools.partial(recomputed, head, weights, params, text)
            )
        state = one(both, state, sampling=sampling)
    assert len(lags) > 1


def _check(drafter, drafted, row, law):
    words = np.asarray(drafted.tokens[row]).tolist()
    for parent in sorted(set(drafter.template.parents.tolist())):
        path, node = [], parent
        while node >= 0:
            path, node = [words[node], *path], int(drafter.template.parents[node])
        children = np.flatnonzero(drafter.template.parents == parent)
        best = np.argsort(-np.asarray(law(path)), kind="stable")[: len(children)]
        assert [words[n] for n in children] == best.tolist()


def test_a_head_of_another_width_is_refused():
    with pytest.raises(ValueError, match="the heads are for 32 pieces and width 24"):
        of_config(emb_dim=24).taken(TARGET, plain()[0])
