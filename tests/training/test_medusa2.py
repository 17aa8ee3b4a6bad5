"""Target and heads that learn together: gradients, rates, and that what overfits is accepted whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints, generate
from specjax.decode.interfaces import Prompt
from specjax.decode.verify import GreedyMatch
from specjax.drafters.medusa import MedusaHeads
from specjax.models import families, medusa
from specjax.models.joint import Joint
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.training import loop
from specjax.training.medusa2 import Medusa2
from tests import toys
from tests.models import decoders

TARGET = decoders.tiny_llama()
JOINT = Joint(TARGET, Medusa(MedusaConfig(toys.VOCAB, TARGET.config.emb_dim, heads=2)))
TEXT = np.random.default_rng(5).integers(2, toys.VOCAB, 20).astype(np.int32)


@functools.cache
def begun():
    params = decoders.init(TARGET, 1)
    own = JOINT.heads.init(jax.random.key(0))
    return {"target": params, "heads": medusa.begun(JOINT.heads, own, TARGET, params)}


def batch(answers=4):
    weights = (np.arange(20) >= answers).astype(np.float32)
    return {"tokens": TEXT[None], "weights": weights[None]}


def as_jax(given):
    return jax.tree.map(jnp.asarray, given)


def test_the_heads_gradients_reach_the_target_as_much_as_they_weigh():
    key = jax.random.key(0)

    def gradient(weight):
        recipe = Medusa2(JOINT, weight)
        return jax.jit(jax.grad(lambda p: recipe.loss(p, as_jax(batch()), key)[0]))(begun())[
            "target"
        ]

    none, some, more = (gradient(w) for w in (0.0, 0.2, 0.4))
    differ = lambda a, b: jax.tree.map(lambda x, y: y - x, a, b)  # noqa: E731
    one, two = differ(none, some), differ(none, more)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one)) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, atol=1e-4), one, two)


def test_the_target_s_loss_is_that_of_plain_training():
    """Of the tokens that answer, and of no others."""
    sums = loop.averages(Medusa2(JOINT).evaluate(begun(), as_jax(batch())))
    logits = TARGET.forward(begun()["target"], jnp.asarray(TEXT[None]))
    law = jax.nn.log_softmax(logits)[0]
    expected = -np.mean([law[i - 1, TEXT[i]] for i in range(4, 20)])
    np.testing.assert_allclose(sums["target_loss"], expected, rtol=1e-5)


def test_heads_learn_faster():
    rates = Medusa2(JOINT, head_rate=4.0).rates(begun())
    assert set(jax.tree.leaves(rates["target"])) == {1.0}
    assert set(jax.tree.leaves(rates["heads"])) == {4.0}


class One:
    """One text, at every position."""

    def __len__(self):
        return 1

    def __getitem__(self, position):
        return batch()


def test_what_overfits_is_accepted_whole_and_read_back(tmp_path):
    """M2 of both together, from the run's own files."""
    recipe = Medusa2(JOINT, 1.0)
    schedule = loop.Schedule(peak=2e-3, warmup=10, steps=250, decay=100)
    state = loop.train(
        recipe, One(), str(tmp_path / "run"), schedule, optimizer="adamw",
        initial_params=jax.device_get(begun()), checkpoint_period=500, evaluation_period=500,
    )  # fmt: skip
    found = loop.averages(recipe.evaluate(state.params, as_jax(batch())))
    assert found["target_accuracy"] == found["top1_0"] == found["top1_1"] == 1.0
    model, params = checkpoints.load_any(tmp_path / "run")
    assert model == JOINT
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    prompt = Prompt(jnp.asarray(TEXT[None, :4]), jnp.asarray([4], jnp.int32))
    out = generate(
        TARGET, params["target"], prompt, drafter=MedusaHeads(JOINT.heads, widths=(1, 1)),
        draft_params=params["heads"], max_decode_len=16, eos_id=-1, verifier=GreedyMatch(),
    )  # fmt: skip
    assert out.tokens[0].tolist() == TEXT[4:].tolist()
    assert int(out.stats.accepted[0]) == int(out.stats.tested[0]) > 0


def test_a_t5_and_its_heads_learn_together():
    """One batch of inputs and targets; every parameter has a gradient."""
    target = toys.tiny_t5()
    joint = Joint(target, Medusa(MedusaConfig(target.vocab_size, target.config.emb_dim, heads=2)))
    rng = np.random.default_rng(0)
    words = rng.integers(2, target.vocab_size, (2, 7)).astype(np.int32)
    given = as_jax(dict(
        inputs=rng.integers(2, target.vocab_size, (2, 5)).astype(np.int32),
        input_mask=np.ones((2, 5), bool), decoder_inputs=np.roll(words, 1, 1), targets=words,
        weights=np.ones((2, 7), np.float32),
    ))  # fmt: skip
    params = {"target": target.init(jax.random.key(0))}
    own = joint.heads.init(jax.random.key(1))
    params["heads"] = medusa.begun(joint.heads, own, target, params["target"])
    loss = lambda p: Medusa2(joint).loss(p, given, jax.random.key(0))[0]  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(params)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(gradient))


def test_it_is_described_and_found_again():
    said = families.dump(JOINT)
    assert families.of(families.parse(said["model"], said["config"])) == JOINT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(vocab_size=9), "the heads are for 9 pieces"),
        (dict(own_output=False), "share their target"),
    ],
)
def test_heads_that_do_not_fit_are_refused(options, message):
    sizes = dict(vocab_size=toys.VOCAB, emb_dim=TARGET.config.emb_dim) | options
    with pytest.raises(ValueError, match=message):
        Joint(TARGET, Medusa(MedusaConfig(**sizes)))
