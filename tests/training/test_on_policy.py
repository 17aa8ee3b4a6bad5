"""What a draft says while it is trained: its own texts, the target's law of them, and a run that resumes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt, generate
from specjax.models.t5 import T5, T5Config
from specjax.training import batches, distill, loop, on_policy, seq2seq
from specjax.training.divergences import ForwardKL, ReverseKL, TotalVariation

TINY = T5Config(
    vocab_size=12, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=16, num_encoder_layers=1,
    num_decoder_layers=1,
)  # fmt: skip
TEACHER, STUDENT = T5(TINY), T5(dataclasses.replace(TINY, emb_dim=8))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng, pairs = np.random.default_rng(0), batches.TokenPairs([], [])
    for _ in range(24):
        words = rng.integers(2, 12, rng.integers(3, 7), dtype=np.int32)
        pairs.inputs.append(np.append(words, 1).astype(np.int32))
        pairs.targets.append(np.append(words[::-1], 1).astype(np.int32))
    file = tmp_path_factory.mktemp("pairs") / "pairs.npz"
    batches.save_pairs(file, pairs)
    data = batches.Seq2SeqBatches([str(file)], shapes=[(8, 8)], tokens=128)
    return distill.TeacherBatches(data, TEACHER, params=TEACHER.init(jax.random.key(1)))


def said(source, position=0, **options) -> dict:
    students = on_policy.StudentBatches(source, STUDENT, **options)
    return students.said_by(STUDENT.init(jax.random.key(2)))[position]


def forward(model: T5, params, batch: dict):
    names = ("inputs", "input_mask", "decoder_inputs")
    return model.forward(params, *(jnp.asarray(batch[name]) for name in names))


def test_a_draft_says_what_it_decodes(source):
    """Greedy texts are its own plain ones, up to and including EOS."""
    batch, given = said(source, temperature=0.0), source.batches[0]
    prompt = Prompt(
        jnp.asarray(given["inputs"]), jnp.asarray(given["input_mask"].sum(1, dtype=np.int32))
    )
    plain = generate(STUDENT, STUDENT.init(jax.random.key(2)), prompt, max_decode_len=8)
    real = given["weights"].any(1)
    np.testing.assert_array_equal(np.asarray(batch["weights"]).sum(1)[real], plain.lengths[real])
    inside = np.asarray(batch["weights"]) > 0
    np.testing.assert_array_equal(batch["targets"][inside], plain.tokens[inside])
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 1:], batch["targets"][:, :-1])
    assert (batch["decoder_inputs"][:, 0] == 0).all()


def test_the_target_s_law_is_of_what_was_said(source):
    batch = said(source)
    logits = forward(TEACHER, source.params, batch)
    np.testing.assert_allclose(batch["teacher"], jax.nn.log_softmax(logits), atol=1e-5)


def test_sampled_texts_follow_the_draft_s_law(source):
    """First tokens of many batches against the draft's own first law."""
    students = on_policy.StudentBatches(source, STUDENT).said_by(STUDENT.init(jax.random.key(2)))
    given = source.batches[0]
    logits = forward(STUDENT, STUDENT.init(jax.random.key(2)), given)[:, 0]
    repeats = dataclasses.replace(source, batches=[given] * 400)
    students = on_policy.StudentBatches(repeats, STUDENT).said_by(students.params)
    drawn = np.stack([students[i]["targets"][:, 0] for i in range(400)])
    real = given["weights"].any(1)
    shares = (drawn[:, real, None] == np.arange(12)).mean((0, 1))
    wanted = np.asarray(jax.nn.softmax(logits))[real].mean(0)
    spread = np.sqrt(wanted * (1 - wanted) / (400 * real.sum()))
    assert (np.abs(shares - wanted) < 4.5 * spread).all()


def test_shares(source):
    """None are the references themselves; half of a mixture's rows are; padding rows never say anything."""
    given = source[0]
    for name, value in said(source, share=0.0).items():
        np.testing.assert_array_equal(value, given[name])
    rows = [np.asarray(said(source, i, share=0.5)["targets"]) for i in range(len(source))]
    kept = np.concatenate(
        [
            (r == source[i]["targets"]).all(1)[source[i]["weights"].any(1)]
            for i, r in enumerate(rows)
        ]
    )
    assert 0.2 < kept.mean() < 0.8
    empty = dict(source.batches[0])
    empty["weights"] = np.zeros_like(empty["weights"])
    assert not np.any(said(dataclasses.replace(source, batches=[empty]))["weights"])
    with pytest.raises(ValueError, match="share"):
        on_policy.StudentBatches(source, STUDENT, share=1.5)
    with pytest.raises(TypeError, match="said_by"):
        on_policy.StudentBatches(source, STUDENT)[0]


def trained(source, folder, steps, divergence=ReverseKL(), **options):
    data = on_policy.StudentBatches(source, STUDENT, **options)
    schedule = loop.Schedule(peak=2e-2, warmup=1, steps=steps, decay=0)
    recipe = distill.Distill(STUDENT, divergence)
    state = loop.train(recipe, data, str(folder), schedule, log_period=5, checkpoint_period=3)
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return state, [line for line in lines if line["data"] == "train"]


@pytest.mark.parametrize("divergence", [ReverseKL(), TotalVariation()], ids=str)
def test_a_draft_learns_on_its_own_texts(source, tmp_path, divergence):
    _, lines = trained(source, tmp_path / "run", 40, divergence)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[-1]["overlap"] > lines[0]["overlap"]


def test_a_stopped_run_goes_on_the_same(source, tmp_path):
    whole, _ = trained(source, tmp_path / "whole", 7)
    trained(source, tmp_path / "parts", 3)
    parts, _ = trained(source, tmp_path / "parts", 7)
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)


def test_gold_text_by_cross_entropy_is_the_baseline(source):
    """The loss of plain supervised training, beside what a distilled draft reports."""
    params, batch = STUDENT.init(jax.random.key(2)), jax.tree.map(jnp.asarray, source[0])
    gold = distill.Supervised(STUDENT).evaluate(params, batch)
    plain = seq2seq.Seq2Seq(STUDENT).evaluate(params, batch)
    kl = distill.Distill(STUDENT, ForwardKL()).evaluate(params, batch)
    np.testing.assert_allclose(gold["loss"], plain["loss"], rtol=1e-6)
    np.testing.assert_allclose(gold["divergence"], kl["loss"], rtol=1e-6)
    tv = distill.Distill(STUDENT, TotalVariation()).evaluate(params, batch)
    np.testing.assert_allclose(tv["loss"], tv["tokens"] - tv["overlap"], rtol=1e-5)
