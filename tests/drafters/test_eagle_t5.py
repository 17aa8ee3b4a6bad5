"""EAGLE's head for T5: the plain text comes out, and decoding does what training learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate
from specjax.decode.interfaces import Prompt
from specjax.decode.verify import GreedyMatch
from specjax.drafters.eagle import EagleHead
from specjax.drafters.medusa import MedusaHeads
from specjax.models import medusa
from specjax.models.eagle_t5 import EagleT5, EagleT5Config
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.training import heads, loop, states
from tests import toys

STEPS = 16
TARGET = toys.tiny_t5(num_decoder_layers=2)
WIDTH = TARGET.config.emb_dim
EAGLE = EagleT5(
    EagleT5Config(
        vocab_size=toys.VOCAB, emb_dim=WIDTH, encoded_dim=WIDTH, num_heads=2, head_dim=8, mlp_dim=32,
        num_encoder_layers=0, num_decoder_layers=1,
    )
)  # fmt: skip
MEDUSA = Medusa(MedusaConfig(toys.VOCAB, WIDTH, heads=3))


@functools.cache
def plain():
    """(the target's parameters, prompts, plain greedy output)."""
    params, prompt = toys.init(TARGET, 1), toys.ask(3, 4)
    return params, prompt, generate(TARGET, params, prompt, max_decode_len=STEPS, eos_id=-1)


def begun(model):
    rng = np.random.default_rng(4)
    noise = lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    params = jax.tree.map(noise, model.abstract())
    if model is MEDUSA:
        return medusa.begun(model, params, TARGET, plain()[0])
    return params | model.taken(TARGET, plain()[0])


@pytest.mark.usefixtures("long_vectors")
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2)])
def test_greedy_text_is_the_plain_one(widths):
    """Invariants 1, 5 and 6: rows of unequal prompts, whatever a random head says."""
    params, prompt, out = plain()
    drafter = EagleHead(EAGLE, widths=widths)
    options = dict(max_decode_len=STEPS, eos_id=-1, verifier=GreedyMatch())
    got = generate(TARGET, params, prompt, drafter=drafter, draft_params=begun(EAGLE), **options)
    np.testing.assert_array_equal(got.tokens, out.tokens)
    tiled = generate(
        TARGET, TARGET.tile(params), prompt, drafter=drafter, draft_params=EAGLE.tile(begun(EAGLE)), **options
    )  # fmt: skip
    np.testing.assert_array_equal(tiled.tokens, out.tokens)


class OneBatch:
    """The first prompt with its greedy answer."""

    def __len__(self):
        return 1

    def __getitem__(self, position):
        _, prompt, out = plain()
        length = int(prompt.length[0])
        targets = np.asarray(out.tokens[:1])
        return {
            "inputs": np.asarray(prompt.tokens[:1, :length]),
            "input_mask": np.ones((1, length), bool),
            "decoder_inputs": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "targets": targets,
            "weights": np.ones((1, STEPS), np.float32),
        }


@pytest.mark.parametrize(
    "recipe", [heads.Eagle1(EAGLE, noise=0.0), heads.Medusa1(MEDUSA)], ids=["eagle", "medusa"]
)
def test_what_overfits_is_accepted_whole(recipe, tmp_path, monkeypatch):
    """M2: training accuracy 1 and acceptance 1 come together; a first round has nothing to draft from."""
    monkeypatch.setattr(states, "load_target", lambda model, path: plain()[0])
    batches = states.T5StateBatches(OneBatch(), TARGET, "toy")
    batch = batches[0]
    assert batch["tokens"].shape == (1, STEPS + 1) and batch["states"].shape[1] == STEPS + 1
    schedule = loop.Schedule(peak=1e-2, warmup=10, steps=250, decay=100)
    state = loop.train(
        recipe, batches, str(tmp_path), schedule, optimizer="adamw", initial_params=begun(recipe.model),
        checkpoint_period=500, evaluation_period=500,
    )  # fmt: skip
    found = loop.averages(recipe.evaluate(state.params, batch))
    assert min(v for k, v in found.items() if k.startswith("top1")) == 1.0
    params, prompt, out = plain()
    one = Prompt(prompt.tokens[:1], prompt.length[:1])
    drafter = MedusaHeads(MEDUSA) if recipe.model is MEDUSA else EagleHead(EAGLE, widths=(1,))
    got = generate(TARGET, params, one, drafter=drafter, draft_params=state.params, max_decode_len=STEPS,
                   eos_id=-1, verifier=GreedyMatch())  # fmt: skip
    np.testing.assert_array_equal(got.tokens, out.tokens[:1])
    assert int(got.stats.accepted[0]) == int(got.stats.tested[0]) > 0
