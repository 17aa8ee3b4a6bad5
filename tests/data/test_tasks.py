"""The seqio tasks on a tiny corpus."""

import json

import pytest
import seqio

from specjax.data import samples, tasks
from specjax.data import vocabulary as vocabulary_lib


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_lib.Vocabulary.load(tasks.vocabulary_path())


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Four shipped examples of each task, written as the build script would."""
    monkeypatch.setenv("SPECJAX_DATA_DIR", str(tmp_path))
    found = {}
    for name in ("ende", "synopsis"):
        found[name] = samples.load_heldout(f"debian_{name}", "calibration")[:4]
        rows = [
            {"source_package": e.source_package, "inputs": e.inputs, "targets": e.targets}
            for e in found[name]
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / f"{name}-validation.jsonl").write_text(text, encoding="utf-8")
    return found


def read(name, lengths=None, split="validation"):
    task = seqio.get_mixture_or_task(f"debian_{name}_v001")
    dataset = task.get_dataset(lengths, split, shuffle=False)
    return list(dataset.as_numpy_iterator())


@pytest.mark.parametrize("name", ["ende", "synopsis"])
def test_whole_examples(corpus, vocabulary, name):
    rows = read(name)
    assert len(rows) == 4
    for row, example in zip(rows, corpus[name], strict=True):
        assert row["inputs"].tolist() == [*vocabulary.encode(example.inputs), 1]
        assert row["targets"].tolist() == [*vocabulary.encode(example.targets), 1]
        assert row["inputs_pretokenized"].decode() == example.inputs
        assert row["targets_pretokenized"].decode() == example.targets


def test_trimmed_examples_keep_their_eos(corpus, vocabulary):
    for row, example in zip(read("ende", {"inputs": 8, "targets": 5}), corpus["ende"], strict=True):
        assert row["inputs"].tolist() == [*vocabulary.encode(example.inputs)[:7], 1]
        assert row["targets"].tolist() == [*vocabulary.encode(example.targets)[:4], 1]


def test_both_vocabularies_decode_alike(corpus, vocabulary):
    theirs = seqio.get_mixture_or_task("debian_ende_v001").output_features["targets"].vocabulary
    assert theirs.vocab_size == vocabulary.size
    assert (theirs.eos_id, theirs.unk_id, theirs.pad_id) == (1, 2, 0)
    for example in corpus["ende"]:
        ids = vocabulary.encode(example.targets)
        for variant in (ids, [*ids, 1, 5, 6], [*ids[:3], 8000, 8127, *ids[3:]], [*ids, 0, 0]):
            assert vocabulary.decode(variant) == theirs.decode(variant)


def test_metric_functions(corpus):
    for name, keys in (("ende", {"bleu"}), ("synopsis", {"rouge1", "rouge2", "rougeL"})):
        targets = [example.targets for example in corpus[name]]
        (metric,) = seqio.get_mixture_or_task(f"debian_{name}_v001").metric_fns
        assert metric(targets, targets) == pytest.approx({key: 100 for key in keys})


def test_a_missing_corpus_names_the_script(corpus):
    with pytest.raises(FileNotFoundError, match="ende-test.jsonl: run scripts/build_debian.py"):
        read("ende", split="test")
