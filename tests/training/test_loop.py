"""The training loop: it learns, resumes bit for bit, stops on SIGTERM and logs."""

import dataclasses
import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import int8, native
from specjax.models.t5 import T5, T5Config
from specjax.training import distill, features, loop, seq2seq
from specjax.training.batches import Seq2SeqBatches, TokenPairs, save_pairs

TINY = T5Config(
    vocab_size=32,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Seq2SeqBatches:
    """Copying short sequences."""
    file = str(tmp_path_factory.mktemp("data") / "copy.npz")
    rng = np.random.default_rng(0)
    rows = [np.append(rng.integers(2, 32, 5), 1) for _ in range(64)]
    save_pairs(file, TokenPairs(rows, rows))
    return Seq2SeqBatches((file,), shapes=((8, 8),), tokens=256)


def schedule(steps: int) -> loop.Schedule:
    return loop.Schedule(peak=2e-2, warmup=5, steps=steps, decay=1)


def run(data, folder, steps, **options):
    recipe = seq2seq.Seq2Seq(T5(TINY))
    return loop.train(recipe, data, str(folder), schedule(steps), checkpoint_period=4, **options)


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def test_it_learns_and_logs(data, tmp_path):
    run(data, tmp_path / "run", 60, validation={"copy": data}, log_period=5, evaluation_period=30)
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    losses = [line["loss"] for line in lines if line["data"] == "train"]
    assert losses[-1] < 0.9 * losses[0]
    assert [line["step"] for line in lines if line["data"] == "copy"] == [30, 60]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_resume_is_bit_identical(data, tmp_path):
    """Six steps, then six more from the checkpoint = twelve at once: state and all."""
    whole = run(data, tmp_path / "whole", 12)
    run(data, tmp_path / "halves", 6)
    resumed = run(data, tmp_path / "halves", 12)
    assert int(resumed.step) == 12
    assert same(whole, resumed)


def test_sigterm_saves_and_the_run_goes_on(data, tmp_path):
    class Stopping:
        def __repr__(self):
            return repr(data)

        def __len__(self):
            return len(data)

        def __getitem__(self, position):
            if position == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return data[position]

    recipe = seq2seq.Seq2Seq(T5(TINY))
    stopped = loop.train(recipe, Stopping(), str(tmp_path / "run"), schedule(12))
    assert int(stopped.step) == 7
    resumed = run(data, tmp_path / "run", 12)
    assert same(resumed, run(data, tmp_path / "whole", 12))


def test_parameters_are_read_back(data, tmp_path):
    state = run(data, tmp_path / "run", 4)
    model = T5(TINY)
    assert same(native.load_run(str(tmp_path / "run"), model.abstract()), state.params)
    with pytest.raises(ValueError, match="no checkpoint of step 3"):
        native.load_run(str(tmp_path / "run"), model.abstract(), step=3)
    with pytest.raises(ValueError, match="no checkpoints in"):
        native.load_run(str(tmp_path / "nothing"), model.abstract())


def test_padding_rows_weigh_nothing(data):
    """Ten padding columns and empty rows change neither sums nor gradients' scale."""
    recipe = seq2seq.Seq2Seq(T5(TINY))
    params = recipe.init(jax.random.key(0))
    batch = data[0]
    arrays = lambda x: jax.tree.map(jnp.asarray, x)  # noqa: E731
    wide = {k: np.pad(v, ((0, 2), (0, 10))) for k, v in batch.items()}
    wide["input_mask"][-2:, 0] = True
    key = jax.random.key(0)
    a, b = (recipe.loss(params, arrays(x), key)[1] for x in (batch, wide))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5)


def test_schedule():
    """Warm-up, plateau, decay to zero."""
    rate = loop.Schedule(peak=1.0, warmup=4, steps=20, decay=10)
    values = [float(rate(jnp.asarray(s))) for s in (0, 3, 9, 15, 20)]
    np.testing.assert_allclose(values, [0.25, 1.0, 1.0, 0.5, 0.0])


def test_distilling_a_copy_has_no_loss(data):
    """Draft = teacher: KL 0, overlap (alpha at T = 1) and agreement (alpha at T = 0) 1."""
    model = T5(TINY)
    params = model.init(jax.random.key(1))
    source = distill.TeacherBatches(data, model, params=params)
    _, sums = distill.Distill(model).loss(
        params, jax.tree.map(jnp.asarray, source[0]), jax.random.key(0)
    )
    found = loop.averages(sums)
    assert abs(found["loss"]) < 1e-5
    np.testing.assert_allclose([found["overlap"], found["agreement"]], 1.0, rtol=1e-5)


def test_distillation_lowers_the_divergence(data, tmp_path):
    model = T5(TINY)
    teacher = model.init(jax.random.key(1))
    source = distill.TeacherBatches(data, model, params=teacher)
    recipe = distill.Distill(model)
    loop.train(recipe, source, str(tmp_path / "run"), schedule(40), log_period=10)
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["overlap"] > lines[0]["overlap"]


def test_a_draft_learns_on_the_teacher_s_encoder_output(data, tmp_path):
    """The teacher's own decoder has no loss there; a narrower one learns."""
    model = T5(TINY)
    teacher = model.init(jax.random.key(1))
    source = distill.TeacherBatches(data, model, params=teacher)
    without = dict(num_encoder_layers=0, encoded_dim=TINY.emb_dim)
    half = T5(dataclasses.replace(TINY, **without))
    decoder = {name: teacher[name] for name in ("token_embedder", "decoder")}
    batch = jax.tree.map(jnp.asarray, source[0])
    _, sums = distill.Distill(half).loss(decoder, batch, jax.random.key(0))
    assert abs(loop.averages(sums)["loss"]) < 1e-5
    narrow = T5(dataclasses.replace(TINY, **without, emb_dim=8))
    recipe = distill.Distill(narrow)
    loop.train(recipe, source, str(tmp_path / "run"), schedule(40), log_period=10)
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


# A target's features, kept.


@pytest.fixture
def kept(data, tmp_path):
    """A teacher's checkpoint, and batches that learn from its kept features (all pieces kept)."""
    model = T5(TINY)
    teacher = model.init(jax.random.key(1))
    int8.save(tmp_path / "teacher.int8.safetensors", model, teacher)
    twice = dataclasses.replace(data, weights=(2,))
    path = str(tmp_path / "teacher.int8.safetensors")
    source = features.FeatureBatches(twice, model, path, str(tmp_path / "features"), top=32)
    return source, int8.load(pathlib.Path(path), model)


def test_kept_features_are_the_teacher_s(kept):
    """Every batch of both passes through the examples, up to half precision."""
    source, teacher = kept
    direct = distill.TeacherBatches(source.batches, source.teacher, params=teacher)
    assert len(source) == len(direct) > 1
    for i in range(len(source)):
        batch, whole = source[i], direct[i]
        inside = batch["weights"] > 0
        seen = batch["input_mask"] & (batch["inputs"] > 0)
        expected = np.asarray(whole["encoded"])
        np.testing.assert_allclose(batch["encoded"][seen], expected[seen], rtol=1e-3, atol=1e-3)
        theirs = np.take_along_axis(np.asarray(whole["teacher"]), batch["teacher_ids"], axis=-1)
        ours = batch["teacher_log_probs"]
        np.testing.assert_allclose(ours[inside], theirs[inside], rtol=2e-3, atol=2e-3)
        assert (np.diff(ours[inside]) <= 0).all()


def test_learning_from_the_likeliest_pieces_is_a_lower_bound(kept):
    """All pieces kept: the same sums as from the whole law. Few: never more divergence."""
    source, teacher = kept
    model = source.teacher
    batch = jax.tree.map(jnp.asarray, source[0])
    whole = distill.TeacherBatches(source.batches, model, params=teacher)[0]
    draft, recipe = model.init(jax.random.key(5)), distill.Distill(model)
    full = loop.averages(recipe.evaluate(draft, jax.tree.map(jnp.asarray, whole)))
    every = loop.averages(recipe.evaluate(draft, batch))
    assert every == pytest.approx(full, rel=5e-3)
    few = {n: x[..., :4] if n.startswith("teacher_") else x for n, x in batch.items()}
    part = loop.averages(recipe.evaluate(draft, few))
    assert part["loss"] < full["loss"] and part["overlap"] >= full["overlap"]
    assert part["agreement"] == pytest.approx(full["agreement"])


def test_features_are_computed_once_and_a_stopped_computation_goes_on(kept, monkeypatch):
    source, _ = kept
    calls, read = [], features._read
    monkeypatch.setattr(features, "_read", lambda *a: lambda *b: calls.append(1) or read(*a)(*b))
    first = source[0]
    assert len(calls) == 1  # 64 examples: each once, though the epoch has them twice
    again = dataclasses.replace(source)
    np.testing.assert_array_equal(again[0]["teacher_ids"], first["teacher_ids"])
    assert len(calls) == 1
    (marker,) = pathlib.Path(source.folder).glob("*/done.json")
    kept = first["encoded"].copy()
    marker.unlink()
    (marker.parent / "encoded.npy").unlink()  # made anew, so all must be read again
    np.testing.assert_array_equal(dataclasses.replace(source)[0]["encoded"], kept)
    assert len(calls) == 2
    monkeypatch.setattr(features, "PADDED", 256)  # four batches of a plan of its own
    other = dataclasses.replace(source)
    np.testing.assert_allclose(other[0]["encoded"], kept, atol=2e-3)  # half precision
    assert len(calls) == 6
    (marker,) = (m for m in pathlib.Path(source.folder).glob("*/done.json") if m.read_text() == "4")
    other._store.encoded[:] = 0
    other._store.encoded.flush()
    marker.write_text("3")
    again = dataclasses.replace(source)
    assert len(calls) == 6
    assert (again[0]["encoded"] == 0).mean() > (kept == 0).mean()  # three quarters are trusted
    assert len(calls) == 7


def test_a_draft_starts_with_the_target_s_pieces(kept):
    """Reduced by singular vectors: inner products of pieces stay what they were, as far as may be."""
    source, teacher = kept
    narrow = T5(dataclasses.replace(TINY, emb_dim=8))
    params = distill.from_teacher(narrow, source.teacher, source.path)
    for ours, theirs in (
        (params["token_embedder"]["embedding"], teacher["token_embedder"]["embedding"]),
        (params["decoder"]["logits_dense"]["weight"], teacher["decoder"]["logits_dense"]["weight"]),
    ):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        ours = ours * np.linalg.norm(theirs, 2) / np.linalg.norm(ours, 2)
        lost = np.linalg.svd(theirs, compute_uv=False)[8:]
        gram = np.linalg.norm(theirs @ theirs.T - ours @ ours.T)
        assert gram == pytest.approx(np.linalg.norm(lost**2), rel=1e-4)
    same = distill.from_teacher(T5(TINY), source.teacher, source.path)
    assert jax.tree.structure(same) == jax.tree.structure(teacher)
    with pytest.raises(ValueError, match="wider"):
        wide = T5(dataclasses.replace(TINY, emb_dim=32))
        distill.from_teacher(wide, source.teacher, source.path)
