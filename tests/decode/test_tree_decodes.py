"""Whole decodes with trees, on every model family: the plain text, each row by itself, every branch.

The drafter here is told what plain decoding says, and spoils it: so random models accept paths of all
lengths, which real drafters on random models do not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode import loop, tree
from specjax.decode.interfaces import Params
from specjax.decode.verify import GreedyMatch, SpeculativeSampling
from specjax.models.branches import Branches
from tests import toys
from tests.models import decoders

STEPS = 20


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Proposes a merged tree of copies of ``params.draft``, each wrong from a place of its own on.

    The truth is one row per row of the batch.
    """

    copies: int = 4
    depth: int = 4
    nodes: int = 11

    taps = ()
    reach = 0

    def init(self, params, prefilled, slots):
        return jnp.asarray(params.draft, jnp.int32)

    def propose(self, params, state, text, sampling, keys):
        done = text.length - text.start
        steps = jnp.arange(self.depth, dtype=jnp.int32)[None, None]
        copy = jnp.arange(self.copies, dtype=jnp.int32)[None, :, None]
        at = done[:, None, None] + steps
        truth = jnp.take_along_axis(state, at.reshape(len(done), -1), axis=1, mode="clip")
        first = jnp.take_along_axis(state, done[:, None], axis=1, mode="clip")
        best = (7 * first + 3 * done[:, None]) % (self.depth + 1)
        wrong = jnp.maximum(best[..., None] - copy, 0)
        shift = jnp.where(steps == wrong, copy + 1, 0)
        sequences = (truth.reshape(at.shape) + shift) % toys.VOCAB
        weights = ((copy[..., 0] * 7 + done[:, None]) % 5).astype(jnp.float32)
        return tree.merge(sequences, weights, self.nodes), state

    def observe(self, params, state, outcome):
        return state

    def rewind(self, state, length):
        return state


MODELS = {
    "t5": toys.tiny_t5(num_decoder_layers=2, dtype="float64"),
    "llama": decoders.tiny_llama(dtype="float64"),
    "opt": decoders.tiny_opt(dtype="float64"),
}
pytestmark = pytest.mark.usefixtures("x64")
every_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def plain(name, batch=4):
    """(parameters, prompts, plain greedy output)."""
    model = MODELS[name]
    params = toys.init(model, 1) if name == "t5" else decoders.init(model, 1)
    prompt = toys.ask(3, batch)
    return params, prompt, generate(model, params, prompt, max_decode_len=STEPS, eos_id=-1)


def speculate(
    name, model=None, rows=slice(None), verifier=GreedyMatch(), drafter=Oracle(), **options
):
    params, prompt, out = plain(name)
    prompt = jax.tree.map(lambda x: x[rows], prompt)
    options = {"eos_id": -1, "max_decode_len": STEPS} | options
    return generate(
        model or MODELS[name], params, prompt, drafter=drafter, draft_params=out.tokens[rows],
        verifier=verifier, **options,
    )  # fmt: skip


@every_model
@pytest.mark.parametrize(
    "verifier", [GreedyMatch(), SpeculativeSampling()], ids=["match", "sampling"]
)
def test_greedy_text_is_the_plain_one(name, verifier):
    """Invariants 1, 6 and 8: B = 4 unequal rows, T5's relative bias by depth included."""
    out, expected = speculate(name, verifier=verifier), plain(name)[2]
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert (out.lengths == STEPS).all()
    # Paths of all lengths were accepted, and rounds differed from row to row.
    assert (np.asarray(out.stats.histogram).sum(0) > 0).all()
    assert (out.stats.emitted == STEPS).all()
    # Every round emits one token more than it accepts, but a last one that the length cuts.
    assert set(np.asarray(out.stats.accepted + out.stats.rounds)) <= {STEPS, STEPS + 1}
    assert (out.stats.tested <= out.stats.drafted).all()


@every_model
def test_a_row_of_a_batch_is_the_row_alone(name):
    """Invariant 5, C, H: tokens and statistics."""
    batch = speculate(name)
    for row in range(4):
        alone = speculate(name, rows=slice(row, row + 1), row_ids=jnp.asarray([row], jnp.int32))
        np.testing.assert_array_equal(alone.tokens[0], batch.tokens[row])
        own = jax.tree.map(lambda x, row=row: x[row], batch.stats)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), alone.stats, own)


@every_model
def test_branches_as_rows_say_what_the_tree_says(name):
    """Sequence-based verification: the same text, rounds and accepted nodes."""
    branches = Branches(MODELS[name], Oracle().nodes, Oracle().depth)
    own, expected = speculate(name, model=branches), speculate(name)
    np.testing.assert_array_equal(own.tokens, expected.tokens)
    jax.tree.map(np.testing.assert_array_equal, own.stats, expected.stats)


@every_model
def test_branches_have_the_logits_of_the_tree(name):
    """Logits, keys and values of every node, to rounding."""
    model, (params, prompt, out) = MODELS[name], plain(name)
    both = Params(params, out.tokens)
    state = loop.jit_start(
        loop.Decoder(model, STEPS, Oracle()), both, prompt, toys.row_keys(jax.random.key(0), 4)
    )
    keys = state.keys
    proposed, _ = Oracle().propose(both, state.drafter, state.text, Sampling().rows(4), keys)
    block = tree.block(proposed, loop.newest(state.text))
    one = jax.jit(model.extend)(params, state.cache, block)
    other = jax.jit(Branches(model, 11, 4).extend)(params, state.cache, block)
    np.testing.assert_allclose(other.logits, one.logits, atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), other.open, one.open)


@pytest.mark.parametrize("branches, depth", [(1, 4), (11, 2)])
def test_a_node_without_a_branch_ends_its_row(branches, depth):
    """What no branch reads, or stands too deep, has no law: an error, never a wrong token."""
    out = speculate("llama", model=Branches(MODELS["llama"], branches, depth))
    expected = plain("llama")[2].tokens
    for row, length in enumerate(np.asarray(out.lengths)):
        np.testing.assert_array_equal(out.tokens[row, :length], expected[row, :length])
    assert (np.asarray(out.finish_reason) == 3).any()


@pytest.mark.parametrize("length", [1, 2, 3, 5, 12])
def test_every_length_is_met_exactly(length):
    """A: no node beyond the length limit is valid; T5, whose cut falls inside of trees."""
    out = speculate("t5", max_decode_len=length)
    np.testing.assert_array_equal(out.tokens, plain("t5")[2].tokens[:, :length])
    assert (out.lengths == length).all()


@every_model
def test_sampled_rows_do_not_depend_on_their_batch(name):
    """Invariant 5 at T = 1, with chosen nodes."""
    options = dict(verifier=SpeculativeSampling(), sampling=Sampling(1.0), key=jax.random.key(5))
    batch = speculate(name, **options)
    alone = speculate(name, rows=slice(2, 3), row_ids=jnp.asarray([2], jnp.int32), **options)
    np.testing.assert_array_equal(alone.tokens[0], batch.tokens[2])
    assert (batch.stats.accepted > 0).any()
