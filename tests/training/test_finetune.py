"""Fine-tuning: seqio batches by position, dropout, z-loss, Adafactor, and a run from end to end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import assets, checkpoints, config, main
from specjax.checkpoints import native
from specjax.data import samples, seqio_batches
from specjax.data.seqio_batches import SeqioBatches
from specjax.data.vocabulary import Vocabulary
from specjax.models import layers
from specjax.models.t5 import T5, T5Config
from specjax.training import loop, losses, seq2seq

TINY = T5Config(
    vocab_size=8000,
    emb_dim=8,
    num_heads=2,
    head_dim=4,
    mlp_dim=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
)
LENGTHS = {"inputs": 16, "targets": 12}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Shipped examples as the corpus that scripts/build_debian.py would have written; so few that
    to shuffle among more would be to read them again and again."""
    monkeypatch.setenv("SPECJAX_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(seqio_batches, "APART", 16)
    monkeypatch.setattr(seqio_batches.find("debian_ende_v001"), "_shuffle_buffer_size", 32)
    for split, half in (("train", "calibration"), ("validation", "report")):
        rows = [dataclasses.asdict(e) for e in samples.load_heldout("debian_ende", half)[:12]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"ende-{split}.jsonl").write_text(text, encoding="utf-8")


def batches(**options) -> SeqioBatches:
    settings = dict(name="debian_ende_v001", lengths=LENGTHS, batch_size=4) | options
    return SeqioBatches(**settings)


# Batches.


@pytest.mark.parametrize("shards", [1, 2])
def test_a_position_holds_the_same_batch_however_it_is_reached(corpus, shards):
    """In order, after a jump, and by another reader: what a resumed run relies on."""
    one, other = batches(shards=shards), batches(shards=shards)
    forward = [one[i] for i in range(6)]
    for i in (4, 1, 2):
        for name, value in other[i].items():
            np.testing.assert_array_equal(value, forward[i][name])
    assert (forward[0]["inputs"] != batches(seed=1, shards=shards)[0]["inputs"]).any()


def test_shards_are_shuffled_each_for_itself(corpus):
    """Examples that are neighbours in the source are not always in one batch."""
    rows = batches(seed=None, shards=1)
    order = [row.tolist() for i in range(3) for row in rows[i]["inputs"]]
    shuffled = batches(shards=4)
    found = [sorted(map(order.index, shuffled[i]["inputs"].tolist())) for i in range(6)]
    assert any({n // 4 for n in batch} != {batch[0] // 4} for batch in found)
    assert all(sorted(n % 4 for n in batch) == [0, 1, 2, 3] for batch in found)


def test_without_a_seed_batches_come_in_order_each_example_once(corpus):
    rows = [row for i in range(3) for row in batches(seed=None, batches=3)[i]["inputs"]]
    whole = samples.load_heldout("debian_ende", "calibration")[:12]
    vocabulary = assets_vocabulary()
    for row, example in zip(rows, whole, strict=True):
        ids = [*vocabulary.encode(example.inputs), 1]
        assert row[:8].tolist() == np.pad(ids, (0, 8))[:8].tolist()


def test_processes_read_their_own_rows_and_together_the_whole_batch(corpus):
    """What a row holds is the same for any number of processes, also where one takes over from others."""
    options = dict(batch_size=8, shards=4)
    source = batches(**options)
    whole = [source[position] for position in range(3)]
    for processes, positions in ((2, (0, 1)), (4, (2,))):
        share = 8 // processes
        for process in range(processes):
            own, mine = np.arange(process * share, (process + 1) * share), batches(**options)
            for position in positions:
                part = mine.part(position, own)
                for name, value in whole[position].items():
                    np.testing.assert_array_equal(part[name], value[own])
            (opened,) = mine._readers
            assert opened == tuple(np.unique(own // 2))  # two rows come from each shard


@pytest.mark.long
def test_a_process_tokenises_its_own_examples_only(corpus, monkeypatch):
    """A third of the twelve; all shards together give every example once, batch by batch in order."""
    import seqio
    import tensorflow as tf

    seen, tokenize = [], seqio.SentencePieceVocabulary.encode_tf

    def watched(self, text):
        tf.numpy_function(seen.append, [text], [])
        return tokenize(self, text)

    monkeypatch.setattr(seqio.SentencePieceVocabulary, "encode_tf", watched)
    options = dict(batch_size=6, seed=None, batches=2)
    shards = batches(**options, shards=3)
    mine = [shards._read(position, (1,)) for position in range(2)]
    assert len(set(seen)) == 2 * 4  # inputs and targets
    in_order = batches(**options)
    for position in range(2):
        rows, wanted = (x[position]["inputs"].tolist() for x in (shards, in_order))
        assert rows != wanted and sorted(rows) == sorted(wanted)
        assert mine[position]["encoder_input_tokens"].tolist() == rows[2:4]


def test_what_is_read_ahead_can_be_given_up(corpus):
    """Else Python and TensorFlow's threads may wait for each other at the end of a run."""
    source = batches(seed=None)
    first = source[0]
    (reader,) = source._readers.values()
    seqio_batches._close_readers()
    with pytest.raises(StopIteration):
        next(reader.rows)
    np.testing.assert_array_equal(source[0]["inputs"], first["inputs"])


def test_how_many_shards_there_are_follows_from_the_batch_and_not_from_the_machine():
    assert [batches(batch_size=size).shards for size in (4, 6, 128)] == [4, 2, 8]
    assert batches(batch_size=128, batches=3).shards == 1  # a pass reads every example it can
    assert "shards=4" in repr(batches())  # another order is another run
    with pytest.raises(ValueError, match="a batch of 4 does not divide over 3 shards"):
        batches(shards=3)


def test_batches_are_shifted_and_weighted_as_t5x_does(corpus):
    batch = batches()[0]
    assert batch["inputs"].shape == (4, 16) and batch["targets"].shape == (4, 12)
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 0], 0)
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["weights"], batch["targets"] > 0)
    np.testing.assert_array_equal(batch["input_mask"], batch["inputs"] > 0)
    ends = [row[row > 0][-1] for row in batch["targets"]]
    assert ends == [1] * 4  # a cut target keeps its EOS


def test_what_does_not_fit_is_one_clear_error(corpus):
    with pytest.raises(ValueError, match="no seqio task 'nope'"):
        batches(name="nope")[0]
    small = T5(dataclasses.replace(TINY, vocab_size=100))
    with pytest.raises(ValueError, match="8000 pieces, the model only 100 rows"):
        batches(model=small)[0]
    with pytest.raises(ValueError, match="TASK_FEATURE_LENGTHS has no targets"):
        batches(lengths={"inputs": 8})
    with pytest.raises(IndexError, match="batch 2 of 2"):
        batches(batches=2)[2]
    with pytest.raises(ValueError, match="there is no batch 0 of 16 examples in 16 shards"):
        batches(batch_size=16, shards=16).part(0, np.asarray([12]))


def assets_vocabulary():
    return Vocabulary.load(assets.folder() / "sentencepiece.model")


# Losses.


def test_dropout_keeps_the_mean_and_drops_features_of_whole_sequences():
    x = jnp.ones((64, 5, 256))
    dropped = np.asarray(layers.Dropout(jax.random.key(0), 0.25)(x))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert dropped.mean() == pytest.approx(1, abs=0.02)
    np.testing.assert_array_equal(dropped, dropped[:, :1].repeat(5, axis=1))
    drop = layers.Dropout(jax.random.key(0), 0.25)
    assert (drop(x) != drop(x)).any()  # every site has a draw of its own
    assert layers.Dropout(jax.random.key(0), 0.0)(x) is x
    with pytest.raises(ValueError, match="dropout rate"):
        layers.Dropout(jax.random.key(0), 1.0)


def test_dropout_stands_at_t5x_s_places():
    """Each of them changes the output: ones dropped at one place at a time."""
    model, calls = T5(TINY), []
    params = model.init(jax.random.key(0))
    ids = jnp.asarray([[5, 6, 7, 1]], jnp.int32)

    class Seen(layers.Dropout):
        def __call__(self, x):
            calls.append(x.shape)
            return x

    model.forward(params, ids, ids > 0, ids, drop=Seen())
    heads, width, hidden = (1, 2, 4, 4), (1, 4, 8), (1, 4, 16)
    encoder = [width, heads, width, hidden, width, width]
    decoder = [width, heads, width, heads, width, hidden, width, width]
    assert calls == encoder + decoder


def test_z_loss_is_the_squared_log_normaliser():
    logits = jnp.log(jnp.asarray([[[1.0, 2.0, 5.0], [3.0, 3.0, 3.0]]]))
    weights = jnp.asarray([[1.0, 0.5]])
    expected = np.log(8.0) ** 2 + 0.5 * np.log(9.0) ** 2
    assert float(losses.z_loss(logits, weights)) == pytest.approx(expected, rel=1e-6)


def test_what_is_minimised_has_z_loss_and_dropout_and_what_is_reported_has_not(corpus):
    batch = jax.tree.map(jnp.asarray, batches()[0])
    plain = seq2seq.Seq2Seq(T5(TINY))
    params, key = plain.init(jax.random.key(0)), jax.random.key(1)
    total, sums = plain.loss(params, batch, key)
    heavy = seq2seq.Seq2Seq(T5(TINY), z_loss=0.5)
    logits = plain.model.forward(
        params, batch["inputs"], batch["input_mask"], batch["decoder_inputs"]
    )
    extra = 0.5 * losses.z_loss(logits, batch["weights"])
    np.testing.assert_allclose(heavy.loss(params, batch, key)[0], total + extra, rtol=1e-5)
    np.testing.assert_array_equal(heavy.loss(params, batch, key)[1]["loss"], sums["loss"])
    dropping = seq2seq.Seq2Seq(T5(TINY), dropout_rate=0.5)
    assert float(dropping.loss(params, batch, key)[0]) != float(total)
    np.testing.assert_array_equal(dropping.evaluate(params, batch)["loss"], sums["loss"])


# A run.


def test_adafactor_learns(corpus, tmp_path):
    schedule = loop.Schedule(peak=0.05, warmup=3, steps=30, decay=0)
    recipe = seq2seq.Seq2Seq(T5(TINY))
    options = dict(log_period=5, optimizer="adafactor")
    loop.train(recipe, batches(), str(tmp_path / "run"), schedule, **options)
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    with pytest.raises(ValueError, match="unknown optimizer 'sgd', known are adam, adafactor"):
        loop.train(recipe, batches(), str(tmp_path / "run"), schedule, optimizer="sgd")


@pytest.mark.long
def test_fine_tuning_from_a_checkpoint_by_its_gin_file(corpus, tmp_path):
    """From a saved checkpoint, resumed bit by bit, and decodable where it lies."""
    model = T5(TINY)
    initial = model.init(jax.random.key(3))
    native.save(tmp_path / "initial", model, initial)

    def tune(folder, steps):
        run_finetune(tmp_path / folder, tmp_path / "initial", steps)
        return checkpoints.load_any(tmp_path / folder)

    assert same(seq2seq.pretrained(model, str(tmp_path / "initial")), initial)
    found, whole = tune("whole", 4)
    assert found == model and not same(whole, initial)
    tune("halves", 2)
    assert same(tune("halves", 4)[1], whole)
    lines = [json.loads(line) for line in open(tmp_path / "whole" / "metrics.jsonl")]
    assert {line["data"] for line in lines} == {"validation"}


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def run_finetune(folder, initial, steps):
    import gin

    sizes = dataclasses.asdict(TINY)
    bindings = [f"target/t5.T5Config.{name}={sizes[name]!r}" for name in sizes if name != "dtype"]
    bindings += [
        "MIXTURE_OR_TASK_NAME='debian_ende_v001'",
        f"TASK_FEATURE_LENGTHS={LENGTHS}",
        f"INITIAL_CHECKPOINT_PATH='{initial}'",
        f"MODEL_DIR='{folder}'",
        f"TRAIN_STEPS={steps}",
        "BATCH_SIZE=4",
        "EVAL_STEPS=2",
        "EVAL_PERIOD=2",
    ]
    config.parse(["configs/models/t5_1_1_small.gin", "configs/runs/finetune.gin"], bindings)
    assert main.MODES["train"] == "specjax.training.loop.train"
    gin.get_configurable(loop.train)()
