"""What heads learn: which labels, from which positions; and that decoding does what they learned."""

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
from specjax.models import draft_vocab, medusa
from specjax.models.eagle import Eagle, EagleConfig, Pairs
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.partitioning import mesh as meshes
from specjax.partitioning.rules import Partitioner
from specjax.training import answers, heads, loop, states
from specjax.training.eagle3 import TrainingTimeTest
from tests import toys
from tests.models import decoders

TARGET = decoders.tiny_llama()
WIDTH = TARGET.config.emb_dim
MEDUSA = Medusa(MedusaConfig(toys.VOCAB, WIDTH, heads=3))
EAGLE = Eagle(
    EagleConfig(
        vocab_size=toys.VOCAB, emb_dim=WIDTH, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32
    )
)
EAGLE3 = Eagle3(
    Eagle3Config(
        vocab_size=toys.VOCAB, emb_dim=WIDTH, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32,
        reads_layers=(0, 1, 1),
    )
)  # fmt: skip
# What every recipe's heads read of the target.
TAPS = {"medusa": ("final",), "eagle": ("final",), "eagle3": EAGLE3.taps}


# Labels and weights.


def test_the_mask_is_that_of_decoding():
    """M1: tokens a b c d e, of which c d e answer. Positions 0, 1 and 2 are drafted from, 3 and 4 not.

    Where a prefill says the first token of an answer by itself, drafting begins at position 1; here the first
    round begins behind the prompt, and drafts that token from position 0.
    """
    batch = {"tokens": jnp.arange(5)[None], "weights": jnp.asarray([[0.0, 0, 1, 1, 1]])}
    wanted, weights, _ = heads.labels(batch, 2, None)
    assert weights[0].tolist() == [1, 1, 1, 0, 0]
    assert wanted[0, :3].tolist() == [2, 3, 4]


def test_every_head_is_one_token_further():
    """M3: six tokens; valid labels 4, 3, 2 for heads 0, 1, 2, the first ones tokens 2, 3, 4."""
    batch = {"tokens": jnp.arange(6)[None], "weights": jnp.ones((1, 6))}
    for i, count in enumerate((4, 3, 2)):
        wanted, weights, _ = heads.labels(batch, 2 + i, None)
        assert weights.sum() == count and wanted[0, 0] == 2 + i


def test_labels_that_heads_cannot_say_count_as_missed():
    vocab = draft_vocab.of_ids(np.asarray([0, 2, 5]), 6)
    batch = {"tokens": jnp.arange(6)[None], "weights": jnp.ones((1, 6))}
    wanted, weights, known = heads.labels(batch, 2, vocab)
    assert wanted[0, 0] == 1 and wanted[0, 3] == 2
    assert weights[0].tolist() == [1, 1, 1, 1, 0, 0] and known[0].tolist() == [1, 0, 0, 1, 0, 0]


@functools.cache
def target():
    return decoders.init(TARGET, 1)


def batch_of(tokens, weights, name="medusa"):
    tokens = jnp.asarray(tokens, jnp.int32)
    seen = TARGET.states(target(), tokens, TAPS[name])
    seen = jnp.concatenate([seen[tap] for tap in TAPS[name]], axis=-1)
    return {"tokens": tokens, "weights": jnp.asarray(weights, jnp.float32), "states": seen}


def begun(model):
    rng = np.random.default_rng(4)
    noise = lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    params = jax.tree.map(noise, model.abstract())
    if isinstance(model, Eagle):
        return params | model.taken(TARGET, target())
    return medusa.begun(model, params, TARGET, target())


RECIPES = {
    "medusa": heads.Medusa1(MEDUSA),
    "eagle": heads.Eagle1(EAGLE, noise=0.0),
    "eagle3": TrainingTimeTest(EAGLE3, 3),
}
every = pytest.mark.parametrize("name", RECIPES)


@every
def test_other_positions_have_no_gradient(name):
    """M1: what stands in front of the answer, and behind its last label, is not learned."""
    recipe, rng = RECIPES[name], np.random.default_rng(0)
    tokens = rng.integers(2, toys.VOCAB, (1, 8))
    batch = batch_of(tokens, [[0, 0, 0, 1, 1, 1, 0, 0]], name)
    # Positions 1 to 3 are used, whose p + 2 is of the answer. EAGLE learns the states behind p + 1, others
    # the tokens from p + 2 on.
    learned, ignored = ({2, 3, 4}, {5, 6, 7}) if name == "eagle" else ({3, 4, 5}, {6, 7})

    def gradient(batch):
        return jax.grad(lambda p: recipe.evaluate(p, batch)["loss"])(begun(recipe.model))

    def changed(at):
        if name == "eagle":
            return batch | {"states": batch["states"].at[0, at].add(1.0)}
        return batch | {"tokens": batch["tokens"].at[0, at].set(2 + (tokens[0, at] + 5) % 30)}

    base = gradient(batch)
    for at in learned | ignored:
        pairs = zip(*map(jax.tree.leaves, (gradient(changed(at)), base)), strict=True)
        assert all(bool((a == b).all()) for a, b in pairs) == (at in ignored), at


@every
def test_padding_changes_nothing(name):
    """M7: ten more columns, and a row of padding."""
    recipe, rng = RECIPES[name], np.random.default_rng(1)
    tokens = rng.integers(2, toys.VOCAB, (2, 8))
    weights = np.asarray([[0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 0]], np.float32)
    wide = lambda x: np.pad(x, ((0, 1), (0, 10)))  # noqa: E731
    params = begun(recipe.model)
    one = loop.averages(recipe.evaluate(params, batch_of(tokens, weights, name)))
    other = loop.averages(recipe.evaluate(params, batch_of(wide(tokens), wide(weights), name)))
    assert one.keys() == other.keys()
    for key, value in one.items():
        np.testing.assert_allclose(other[key], value, rtol=1e-5, err_msg=key)


def test_every_head_learns():
    """M4."""
    batch = batch_of(np.random.default_rng(0).integers(2, toys.VOCAB, (1, 8)), np.ones((1, 8)))
    grads = jax.grad(lambda p: RECIPES["medusa"].evaluate(p, batch)["loss"])(begun(MEDUSA))
    for i in range(3):
        assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads[f"head_{i}"]))


def test_five_guesses_hold_the_first():
    """Top-1 and top-5 are counts of the same positions."""
    batch = batch_of(np.random.default_rng(0).integers(2, toys.VOCAB, (4, 8)), np.ones((4, 8)))
    found = loop.averages(RECIPES["medusa"].evaluate(begun(MEDUSA), batch))
    assert 0 <= found["top1_1"] <= found["top5_1"] <= 1
    logits = MEDUSA.known_logits(begun(MEDUSA), batch["states"])[:, :-3, 1]
    order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[..., :5]
    hits = (order == np.asarray(batch["tokens"])[:, 3:, None]).any(-1).mean()
    np.testing.assert_allclose(found["top5_1"], hits, rtol=1e-6)


def test_accuracies_by_rank_add_up():
    """Rank by rank: the first is top-1, the first five together top-5."""
    batch = batch_of(np.random.default_rng(0).integers(2, toys.VOCAB, (4, 8)), np.ones((4, 8)))
    found = loop.averages(RECIPES["medusa"].evaluate(begun(MEDUSA), batch))
    by_rank = heads.rank_accuracies(MEDUSA, begun(MEDUSA), [batch, batch], ranks=toys.VOCAB)
    for i in range(3):
        np.testing.assert_allclose(by_rank[i, 0], found[f"top1_{i}"], rtol=1e-6)
        np.testing.assert_allclose(by_rank[i, :5].sum(), found[f"top5_{i}"], rtol=1e-6)
        np.testing.assert_allclose(by_rank[i].sum(), 1, rtol=1e-6)


def test_a_step_of_training_is_a_step_of_drafting():
    """M2, EAGLE-3: simulated steps are those of texts whose later states the head said itself."""
    rng = np.random.default_rng(2)
    batch = batch_of(rng.integers(2, toys.VOCAB, (2, 9)), np.ones((2, 9)), "eagle3")
    params = begun(EAGLE3)
    features = EAGLE3.features(params, batch["states"])
    tokens = batch["tokens"][:, 1:]
    steps = EAGLE3.simulated(params, Pairs(tokens, features[:, :-1]), 3)
    for start in (0, 2, 4):  # a draft that begins behind this pair
        states = features[:, :-1]
        for step in range(3):
            said = EAGLE3.next_states(params, Pairs(tokens, states), {})
            np.testing.assert_allclose(said[:, start + step], steps[step][:, start], atol=1e-5)
            states = states.at[:, start + step + 1].set(said[:, start + step])


# Training, then decoding.


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """One prompt and the target's own greedy answer, as a file of answers; and a folder."""
    folder = tmp_path_factory.mktemp("heads")
    prompt = Prompt(jnp.asarray([[5, 9, 3, 7]], jnp.int32), jnp.asarray([4], jnp.int32))
    out = generate(TARGET, target(), prompt, max_decode_len=24, eos_id=-1)
    text = np.concatenate([prompt.tokens[0], out.tokens[0]])
    answers.save(folder / "one.npz", answers.Answered([text], [np.arange(28) >= 4]))
    return folder, prompt, out


@pytest.fixture
def batches(said, monkeypatch):
    """The answers with the toy target's states: a function of what is trained."""
    monkeypatch.setattr(states.pretrained, "load", lambda name: (TARGET, target(), None))
    source = answers.AnswerBatches((str(said[0] / "one.npz"),), lengths=(28,), tokens=28)
    return lambda name: states.StateBatches(
        source, "toy", TAPS[name], folder=str(said[0] / "states")
    )


def test_windows_of_a_stream_are_texts_that_answer(tmp_path):
    np.savez(tmp_path / "stream.npz", tokens=np.arange(103, dtype=np.uint16))
    source = answers.AnswerBatches(streams=(tmp_path / "stream.npz",), windows=6, window=10, lengths=(16,),
                                   tokens=32)  # fmt: skip
    assert len(source.texts.tokens) == 6 and all(x.all() for x in source.texts.answers)
    firsts = [int(x[0]) for x in source.texts.tokens]
    assert firsts == sorted(set(firsts)) and all(x % 10 == 0 for x in firsts)
    assert all((np.diff(x) == 1).all() for x in source.texts.tokens)
    batch = source[0]
    assert batch["tokens"].shape == (2, 16) and batch["weights"].sum() == 20
    with pytest.raises(ValueError, match="no token file"):
        _ = answers.AnswerBatches(streams=("nowhere.npz",)).texts


def test_texts_of_which_nothing_answers_are_refused(tmp_path):
    """Else a held-out set of no answers would be reported as accuracy 0."""
    silent = answers.Answered([np.arange(3, dtype=np.int32)], [np.zeros(3, bool)])
    for name, texts in (("none", answers.Answered([], [])), ("silent", silent)):
        answers.save(tmp_path / f"{name}.npz", texts)
        with pytest.raises(ValueError, match=f"no token answers in .*{name}.npz"):
            len(answers.AnswerBatches((str(tmp_path / f"{name}.npz"),)))


def test_states_are_read_once(said, batches):
    batches = batches("medusa")
    one = batches[0]
    np.testing.assert_allclose(
        one["states"], batch_of(one["tokens"], one["weights"])["states"], atol=2e-3
    )
    again = states.StateBatches(batches.batches, "toy", folder=batches.folder)
    np.testing.assert_array_equal(again[5]["states"], one["states"])
    assert len(list((said[0] / "states").iterdir())) == 1


@every
def test_what_overfits_is_accepted_whole(name, said, batches, tmp_path):
    """M2, M7: accuracy 1 in training and acceptance 1 in decoding come together."""
    recipe, (_, prompt, out), batches = RECIPES[name], said, batches(name)
    schedule = loop.Schedule(peak=1e-2, warmup=10, steps=250, decay=100)
    state = loop.train(
        recipe, batches, str(tmp_path / name), schedule, {"again": batches}, optimizer="adamw",
        # called, and given away: no array may stand there twice
        initial_params=lambda shardings: jax.tree.map(jnp.copy, begun(recipe.model)),
        checkpoint_period=500, evaluation_period=250,
    )  # fmt: skip
    found = loop.averages(recipe.evaluate(state.params, jax.tree.map(jnp.asarray, batches[0])))
    accurate = [v for k, v in found.items() if k.startswith("top1")]
    assert min(accurate) == 1.0
    frozen = recipe.rates(state.params)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), begun(recipe.model), state.params)
    for rate, change in zip(jax.tree.leaves(frozen), jax.tree.leaves(moved), strict=True):
        assert change == (rate > 0)
    kind = MedusaHeads if name == "medusa" else EagleHead
    got = generate(
        TARGET, target(), prompt, drafter=kind(recipe.model, widths=(1,) * len(accurate)),
        draft_params=state.params, max_decode_len=24, eos_id=-1, verifier=GreedyMatch(),
    )  # fmt: skip
    np.testing.assert_array_equal(got.tokens, out.tokens)
    assert int(got.stats.accepted[0]) == int(got.stats.tested[0]) > 0


class Rows:
    """Eight rows of random text with the target's states, the same at every position."""

    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 1

    def __getitem__(self, position):
        tokens = np.random.default_rng(3).integers(2, toys.VOCAB, (8, 12))
        return jax.tree.map(np.asarray, batch_of(tokens, np.ones((8, 12)), self.name))


@pytest.mark.parametrize(
    ("name", "accumulation"), [("medusa", 2), ("eagle", 1), ("eagle", 2), ("eagle3", 2)]
)
def test_a_mesh_trains_what_one_device_does(name, accumulation, tmp_path):
    """Frozen parameters, parameters at rates of their own and accumulated gradients, split and not."""
    recipe = RECIPES[name]
    start = jax.device_get(begun(recipe.model))

    def train(folder, partitioner):
        return loop.train(
            recipe, Rows(name), str(tmp_path / folder), loop.Schedule(1e-2, 1, 3, 1), optimizer="adamw",
            initial_params=start, partitioner=partitioner, accumulation=accumulation,
        ).params  # fmt: skip

    alone, split = train("alone", None), train("split", Partitioner(meshes.make(2)))
    for a, b in zip(*map(jax.tree.leaves, (alone, split)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    moved = [
        bool((np.asarray(a) != b).any())
        for a, b in zip(*map(jax.tree.leaves, (alone, start)), strict=True)
    ]
    assert moved == [rate > 0 for rate in jax.tree.leaves(recipe.rates(start))]
