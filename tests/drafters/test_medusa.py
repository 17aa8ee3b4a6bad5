"""Medusa's heads: what they say, how their trees are drawn, and what comes out."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, generate
from specjax.decode.lossy import TypicalAcceptance
from specjax.decode.verify import GreedyMatch, SpeculativeSampling
from specjax.drafters import levels
from specjax.drafters.medusa import MedusaHeads
from specjax.models import draft_vocab, medusa
from specjax.models.medusa import Medusa, MedusaConfig
from tests import toys
from tests.decode import test_tree_law
from tests.models import decoders

pytestmark = pytest.mark.usefixtures("x64")
STEPS = 20
TREES = {
    "chain": dict(widths=(1, 1, 1)),
    "product": dict(widths=(2, 3)),
    "sparse": dict(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
}


# The law.


@dataclasses.dataclass(frozen=True)
class Shared(test_tree_law.Shape):
    """A tree all of whose nodes of a level have the same children, drawn without replacement."""

    def drawn(self, drafts):
        depth = [len(self.above(n)) - 1 for n in range(len(self.parents))]
        rank = [sum(p == self.parents[n] for p in self.parents[:n]) for n in range(len(depth))]
        widths = [1 + max(r for r, d in zip(rank, depth, strict=True) if d == level) for level in
                  range(self.depth)]  # fmt: skip
        laws = [drafts[0]((level,)) for level in range(self.depth)]
        every = [list(itertools.permutations(range(test_tree_law.V), width)) for width in widths]
        tokens, chances = [], []
        for found in itertools.product(*every):
            chance = 1.0
            for law, words in zip(laws, found, strict=True):
                left = law.copy()
                for word in words:
                    chance *= left[word] / left.sum()
                    left[word] = 0
            tokens.append([found[d][r] for d, r in zip(depth, rank, strict=True)])
            chances.append(chance)
        log_q = np.broadcast_to(np.log(laws), (len(tokens), self.depth, test_tree_law.V))
        return np.asarray(tokens, np.int32), np.asarray(chances), log_q, np.asarray(depth, np.int32)


SHAPE = Shared((-1, -1, 0, 0, 1), (0,) * 5, replace=False)


def test_siblings_that_all_nodes_of_a_level_share_have_the_law_of_the_target():
    """Invariant 2: the children of two nodes are one draw, of which only one node's are tried."""
    draft, target = test_tree_law.laws(1), test_tree_law.laws(3)
    assert test_tree_law.error(SpeculativeSampling(), SHAPE, [draft], target) < 1e-14


def test_typical_acceptance_of_the_same_tree_is_lossy():
    draft, target = test_tree_law.laws(1), test_tree_law.laws(3)
    assert test_tree_law.error(TypicalAcceptance(), SHAPE, [draft], target) > 0.05


def test_children_are_draws_without_replacement():
    """The chance of every ordered pair, over many draws; a greedy row's are the likeliest ones."""
    law, many = np.asarray([0.5, 0.3, 0.15, 0.05]), 40_000
    log_q = jnp.broadcast_to(jnp.log(jnp.asarray(law)), (many, 1, 4))
    keys = jax.random.split(jax.random.key(0), many)
    found = levels.children(log_q, None, 2, Sampling(1.0).rows(many), keys)
    pairs = np.asarray(found.tokens[:, 0])
    for a, b in itertools.permutations(range(4), 2):
        expected = law[a] * law[b] / (1 - law[a])
        got = ((pairs == (a, b)).all(1)).mean()
        assert abs(got - expected) < 4 * np.sqrt(expected / many)
    greedy = levels.children(log_q[:1], None, 2, Sampling(0.0).rows(1), keys[:1])
    assert greedy.tokens[0, 0].tolist() == [0, 1] and not greedy.drawn[0]


def test_what_cannot_be_drawn_is_not_there():
    law = jnp.log(jnp.asarray([[[1.0, 0.0, 0.0]]]))
    keys = jax.random.split(jax.random.key(0), 1)
    found = levels.children(law, None, 2, Sampling(1.0).rows(1), keys)
    assert found.there[0, 0].tolist() == [True, False]


def test_large_noise_has_all_its_digits_in_float32():
    """Made of uniforms of 24 bits it would end at 16, and exp(-noise) be a whole number of steps."""
    keys = jax.random.split(jax.random.key(0), 4)
    noise = np.asarray(levels.gumbel(keys, (1, 500_000), jnp.float32), np.float64)
    steps = np.exp(-noise[noise > 12]) * 2**23
    assert len(steps) > 5 and np.abs(steps - np.rint(steps)).max() > 0.1


# The heads.


def heads(model, key=2, **options):
    """Random heads for a model."""
    width = model.config.emb_dim
    made = Medusa(MedusaConfig(toys.VOCAB, width, 3, dtype="float64", **options))
    noise = lambda x, k: 0.5 * jax.random.normal(k, x.shape, jnp.float64)  # noqa: E731
    leaves, treedef = jax.tree.flatten(made.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(key), len(leaves))
    return made, treedef.unflatten([noise(x, k) for x, k in zip(leaves, keys, strict=True)])


@pytest.mark.parametrize("own_output", [True, False])
def test_fresh_heads_say_what_the_target_says(own_output):
    """Section 2.1.1: the residual block begins at nothing, the output layer as the target's."""
    model = decoders.tiny_llama(dtype="float64")
    made = Medusa(MedusaConfig(toys.VOCAB, model.config.emb_dim, own_output=own_output))
    output = jax.random.normal(jax.random.key(1), (toys.VOCAB, model.config.emb_dim), jnp.float32)
    given = {"embed_tokens": {"weight": output}}
    params = medusa.begun(made, made.init(jax.random.key(0)), model, given)
    hidden = jax.random.normal(jax.random.key(2), (2, 3, model.config.emb_dim), jnp.float32)
    logits = made.logits(params, hidden)
    for i in range(4):
        np.testing.assert_allclose(logits[:, :, i], hidden @ output.T, rtol=1e-5, atol=1e-5)


def test_a_head_is_x_plus_silu():
    model = decoders.tiny_llama(dtype="float64")
    made, params = heads(model, layers=2)
    x = np.asarray(jax.random.normal(jax.random.key(2), (2, 1, model.config.emb_dim), jnp.float64))
    expected = x
    for j in range(2):
        block = jax.tree.map(np.asarray, params["head_1"][f"layer_{j}"])
        y = expected @ block["weight"].T + block["bias"]
        expected = expected + y / (1 + np.exp(-y))
    expected = expected @ np.asarray(params["head_1"]["output"]["weight"]).T
    got = made.logits(params, jnp.asarray(x))[:, :, 1]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_reduced_vocabulary_says_its_pieces_only():
    model = decoders.tiny_llama(dtype="float64")
    vocab = draft_vocab.of_ids(np.asarray([1, 4, 7]), toys.VOCAB)
    made, params = heads(model, draft_vocab=vocab)
    logits = made.logits(params, jnp.ones((1, 1, model.config.emb_dim)))
    assert np.flatnonzero(np.isfinite(logits[0, 0, 0])).tolist() == [1, 4, 7]
    out = speculate("llama", made, params, TREES["product"])
    np.testing.assert_array_equal(out.tokens, plain("llama")[2].tokens)


def test_a_tree_deeper_than_the_heads_is_refused():
    made, _ = heads(decoders.tiny_llama(dtype="float64"))
    with pytest.raises(ValueError, match="depth 4 from 3 heads"):
        MedusaHeads(made, widths=(1, 1, 1, 1))


# Whole decodes.


MODELS = {
    "t5": toys.tiny_t5(num_decoder_layers=2, dtype="float64"),
    "llama": decoders.tiny_llama(dtype="float64"),
    "opt": decoders.tiny_opt(dtype="float64"),
}


@functools.cache
def plain(name, batch=4):
    model = MODELS[name]
    params = toys.init(model, 1) if name == "t5" else decoders.init(model, 1)
    prompt = toys.ask(3, batch)
    return params, prompt, generate(model, params, prompt, max_decode_len=STEPS, eos_id=-1)


def speculate(name, made, weights, shape, rows=slice(None), **options):
    params, prompt, _ = plain(name)
    prompt = jax.tree.map(lambda x: x[rows], prompt)
    options = {"eos_id": -1, "max_decode_len": STEPS} | options
    drafter = MedusaHeads(made, **shape)
    return generate(MODELS[name], params, prompt, drafter=drafter, draft_params=weights, **options)


@pytest.mark.parametrize(
    ("name", "shape"), [*(("llama", shape) for shape in TREES), ("t5", "sparse"), ("opt", "sparse")]
)
def test_greedy_text_is_the_plain_one(name, shape):
    """Invariants 1 and 6, and rows alone (5), whatever random heads say."""
    made, weights = heads(MODELS[name])
    out = speculate(name, made, weights, TREES[shape], verifier=GreedyMatch())
    np.testing.assert_array_equal(out.tokens, plain(name)[2].tokens)
    one = slice(2, 3)
    alone = speculate(name, made, weights, TREES[shape], one, row_ids=jnp.asarray([2], jnp.int32),
                      verifier=GreedyMatch())  # fmt: skip
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[2])
    own = jax.tree.map(lambda x: x[2], out.stats)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), alone.stats, own)


@pytest.mark.parametrize("draws", [False, True])
def test_rows_that_sample_and_rows_that_do_not_stand_in_one_batch(draws):
    made, weights = heads(MODELS["llama"])
    sampling = Sampling(jnp.asarray([0.0, 1.0, 0.0, 1.0]))
    out = speculate("llama", made, weights, TREES["product"] | dict(draws=draws), sampling=sampling,
                    key=jax.random.key(5))  # fmt: skip
    np.testing.assert_array_equal(out.tokens[::2], plain("llama")[2].tokens[::2])
    assert (out.stats.emitted == STEPS).all()


def test_the_state_follows_the_text():
    """Heads that know the target's next tokens are accepted whole: each reads the state before it.

    The heads here look a state up among those of the plain text, and say what came two tokens later.
    """
    model = MODELS["llama"]
    params, prompt, out = plain("llama", 1)
    text = np.concatenate([np.asarray(prompt.tokens[0, : int(prompt.length[0])]), out.tokens[0]])
    seen = _states(model, params, text)

    @dataclasses.dataclass(frozen=True)
    class Oracle(Medusa):
        def known_logits(self, params, hidden):
            gap = jnp.abs(params[None] - hidden).sum(-1)
            at = gap.argmin(-1)
            said = jnp.pad(jnp.asarray(text), (0, 8))
            ids = said[at[:, None] + 2 + jnp.arange(3)[None]]
            return jax.nn.one_hot(ids, toys.VOCAB, dtype=jnp.float64)[:, None]

    made = Oracle(MedusaConfig(toys.VOCAB, model.config.emb_dim, 3))
    drafter = MedusaHeads(made)
    got = generate(model, params, prompt, drafter=drafter, draft_params=seen, max_decode_len=STEPS,
                   eos_id=-1, verifier=GreedyMatch())  # fmt: skip
    np.testing.assert_array_equal(got.tokens, out.tokens)
    alone = int(prompt.length[0]) == 1  # behind a first token there is no state yet
    assert int(got.stats.rounds[0]) == alone - (alone - STEPS) // 4


def _states(model, params, text):
    prompt = toys.Prompt(jnp.asarray(text, jnp.int32)[None], jnp.asarray([len(text)], jnp.int32))
    return model.prefill(params, prompt, 1, taps=("final",)).taps["final"][0]
