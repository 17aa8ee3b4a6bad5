"""EAGLE-2's trees: which nodes grow and which stay, and what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop
from specjax.decode.interfaces import Params
from specjax.decode.verify import GreedyMatch
from specjax.drafters.eagle2 import Eagle2
from specjax.models import draft_vocab
from tests import toys
from tests.drafters import test_eagle
from tests.drafters.test_eagle import STEPS, TARGET, made, plain, recomputed

pytestmark = pytest.mark.usefixtures("x64")
SHAPE = dict(depth=3, expand=3, nodes=7)


def speculate(rows=slice(None), draft=None, shape=SHAPE, **options):
    params, prompt, _ = plain()
    head, weights = made(draft)
    options = {"eos_id": -1, "max_decode_len": STEPS} | options
    prompt = jax.tree.map(lambda x: x[rows], prompt)
    return generate(
        TARGET, params, prompt, drafter=Eagle2(head, **shape), draft_params=weights, **options
    )


def test_greedy_text_is_the_plain_one():
    out = speculate(verifier=GreedyMatch())
    np.testing.assert_array_equal(out.tokens, plain()[2].tokens)
    row = jnp.asarray([2], jnp.int32)
    alone = speculate(slice(2, 3), row_ids=row, verifier=GreedyMatch())
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[2])


def test_rows_that_sample_and_rows_that_do_not_stand_in_one_batch():
    sampling = Sampling(jnp.asarray([0.0, 1.0, 0.0, 1.0]))
    out = speculate(sampling=sampling, key=jax.random.key(5))
    np.testing.assert_array_equal(out.tokens[::2], plain()[2].tokens[::2])
    assert (out.stats.emitted == STEPS).all()


def test_one_level_is_the_likeliest_children():
    one = speculate(shape=dict(depth=1, expand=3, nodes=3), verifier=GreedyMatch())
    static = test_eagle.speculate(dict(widths=(3,)), verifier=GreedyMatch())
    jax.tree.map(np.testing.assert_array_equal, one, static)


def test_a_reduced_vocabulary_drafts_its_pieces_only():
    vocab = draft_vocab.of_ids(np.arange(0, toys.VOCAB, 3), toys.VOCAB)
    np.testing.assert_array_equal(speculate(draft=vocab).tokens, plain()[2].tokens)


def expected(law, depth, expand, nodes):
    """The tree from laws of whole texts read anew: {path: log value}."""
    level, grown = {(): 0.0}, {}
    for _ in range(depth):
        frontier = sorted(level, key=level.get, reverse=True)[:expand]
        children = {}
        for path in frontier:
            logits = np.asarray(law(list(path)))
            log_q = logits - np.log(np.exp(logits).sum())
            for word in np.argsort(-log_q, kind="stable")[:expand].tolist():
                children[(*path, word)] = level[path] + log_q[word]
        grown |= children
        level = children
    best = sorted(grown, key=grown.get, reverse=True)[:nodes]
    return {path: grown[path] for path in best}


def test_trees_are_what_the_paper_grows():
    """Section 4.1 and 4.2 by hand, on some rounds, with laws that read the whole text anew."""
    params, prompt, _ = plain()
    head, weights = made()
    drafter = Eagle2(head, **SHAPE)
    decoder = loop.Decoder(TARGET, STEPS, drafter, eos_id=-1)
    both, sampling = Params(params, weights), Sampling(0.0).rows(4)
    state = loop.jit_start(decoder, both, prompt, toys.row_keys(jax.random.key(0), 4))
    propose = jax.jit(drafter.propose)
    one = jax.jit(functools.partial(loop.one_round, decoder))
    shapes = set()
    for _ in range(3):
        drafted, _ = propose(both, state.drafter, state.text, sampling, state.keys)
        for row in range(4):
            text = np.asarray(state.text.tokens[row, : int(state.text.length[row])])
            law = functools.partial(recomputed, head, weights, params, text)
            words, parents = np.asarray(drafted.tokens[row]), np.asarray(drafted.parent[row])
            got = []
            for n in range(drafter.nodes):
                path = []
                while n >= 0:
                    path, n = [int(words[n]), *path], int(parents[n])
                got.append(tuple(path))
            if len(text) < 2:
                assert not drafted.valid[row].any()
                continue
            assert set(got) == set(expected(law, **SHAPE))
            shapes.add(tuple(parents.tolist()))
        state = one(both, state, sampling=sampling)
    assert len(shapes) > 1  # else the tree is not dynamic


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dict(depth=0), "depth must be at least 1"),
        (dict(depth=2, expand=2, nodes=7), "grows 6"),
        (dict(depth=4, expand=2, nodes=3), "3 nodes are too few for a path of 4"),
    ],
)
def test_impossible_trees_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        Eagle2(made()[0], **shape)
