"""EAGLE-3's head: what it reads of its target, and what comes out."""

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
from specjax.drafters.eagle2 import Eagle2
from specjax.models import draft_vocab, eagle3
from specjax.models.eagle import Pairs
from specjax.models.eagle3 import Eagle3, Eagle3Config
from tests import toys
from tests.drafters.test_eagle import STEPS, TARGET, TREES, plain
from tests.models import decoders

pytestmark = pytest.mark.usefixtures("x64")
VOCAB = draft_vocab.of_ids(np.arange(0, toys.VOCAB, 3), toys.VOCAB)


def of_config(**options):
    sizes = dict(
        vocab_size=toys.VOCAB, emb_dim=TARGET.config.emb_dim, num_heads=4, num_kv_heads=2, head_dim=8,
        mlp_dim=24, dtype="float64", reads_layers=(0, 1, 1),
    )  # fmt: skip
    return Eagle3(Eagle3Config(**sizes | options))


@functools.cache
def made(draft=None):
    head = of_config(draft_vocab=draft)
    params = decoders.init(head, 3)
    return head, params | head.taken(TARGET, plain()[0])


def speculate(kind, draft=None, rows=slice(None), **options):
    params, prompt, _ = plain()
    head, weights = made(draft)
    options = {"eos_id": -1, "max_decode_len": STEPS} | options
    prompt = jax.tree.map(lambda x: x[rows], prompt)
    return generate(TARGET, params, prompt, drafter=kind(head), draft_params=weights, **options)


KINDS = {name: functools.partial(EagleHead, **shape) for name, shape in TREES.items()}
KINDS["dynamic"] = functools.partial(Eagle2, depth=3, expand=2, nodes=5)


@pytest.mark.parametrize("draft", [None, VOCAB])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_plain_one(kind, draft):
    out = speculate(KINDS[kind], draft, verifier=GreedyMatch())
    np.testing.assert_array_equal(out.tokens, plain()[2].tokens)


def test_rows_that_sample_and_rows_that_do_not_stand_in_one_batch():
    sampling = Sampling(jnp.asarray([0.0, 1.0, 0.0, 1.0]))
    kind = functools.partial(EagleHead, **TREES["sparse"], draws=True)
    out = speculate(kind, VOCAB, sampling=sampling, key=jax.random.key(5))
    np.testing.assert_array_equal(out.tokens[::2], plain()[2].tokens[::2])
    alone = speculate(
        kind, VOCAB, slice(1, 2), sampling=Sampling(1.0), key=jax.random.key(5),
        row_ids=jnp.asarray([1], jnp.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[1])


def test_drafts_are_what_training_reads():
    """The first children of some rounds' roots, from whole texts with the target's states read anew."""
    params, prompt, _ = plain()
    head, weights = made(VOCAB)
    drafter = EagleHead(head, widths=(2,))
    decoder = loop.Decoder(TARGET, STEPS, drafter, eos_id=-1)
    both, sampling = Params(params, weights), Sampling(0.0).rows(4)
    state = loop.jit_start(decoder, both, prompt, toys.row_keys(jax.random.key(0), 4))
    propose = jax.jit(drafter.propose)
    one = jax.jit(functools.partial(loop.one_round, decoder))

    @jax.jit
    def whole(text):
        """The head's logits behind every pair of a padded text."""
        states = TARGET.states(params, text, head.taps)
        states = jnp.concatenate([states[tap] for tap in head.taps], axis=-1)
        pairs = Pairs(text[:, 1:], head.features(weights, states)[:, :-1])
        return head.known_logits(weights, head.next_states(weights, pairs, {}))[0]

    seen = 0
    for _ in range(4):
        drafted, _ = propose(both, state.drafter, state.text, sampling, state.keys)
        for row in range(4):
            length = int(state.text.length[row])
            if length < 2:
                continue
            said = whole(state.text.tokens[row][None])[length - 2]
            best = VOCAB.ids[np.argsort(-np.asarray(said), kind="stable")[:2]]
            assert drafted.tokens[row].tolist() == best.tolist()
            seen += 1
        state = one(both, state, sampling=sampling)
    assert seen > 8


def test_layers_are_the_authors_unless_said():
    assert eagle3.default_layers(32) == (2, 16, 29)
    deep = decoders.tiny_llama(num_layers=8)
    assert of_config(reads_layers=None).beside(deep).taps == ("layer_2", "layer_4", "layer_5")
    assert of_config().beside(deep).taps == ("layer_0", "layer_1", "layer_1")
    with pytest.raises(ValueError, match="does not know yet"):
        _ = of_config(reads_layers=None).taps
    with pytest.raises(ValueError, match="say which three"):
        of_config(reads_layers=None).beside(TARGET)
    with pytest.raises(ValueError, match="does not fit a T5"):
        of_config(reads_layers=None).beside(toys.tiny_t5())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(vocab_size=9), "the heads are for 9 pieces"),
        (dict(emb_dim=24), "and width 24"),
        (dict(reads_layers=(0, 1, 9)), r"reads layers \(0, 1, 9\), the target has 2"),
    ],
)
def test_a_head_of_another_target_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        of_config(**options).taken(TARGET, plain()[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_layers=2), "has one layer, not 2"),
        (dict(reads_layers=(1,)), "reads three layers"),
        (dict(reads_layers=(-1, 0, 1)), "reads three layers"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        of_config(**options)
