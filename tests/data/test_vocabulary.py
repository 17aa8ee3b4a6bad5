"""The shipped vocabulary, its decoding rules and padded batches."""

import importlib.resources

import numpy as np
import pytest
import sentencepiece

from specjax.data import debian, samples
from specjax.data import vocabulary as vocabulary_lib

MODEL = importlib.resources.files("specjax") / "assets" / "debian" / "sentencepiece.model"


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_lib.Vocabulary.load(str(MODEL))


def test_shipped_model_has_t5_ids_and_8000_pieces(vocabulary):
    pieces = vocabulary.pieces()
    assert vocabulary.size == len(pieces) == len(set(pieces)) == 8000
    assert pieces[:3] == ("<pad>", "</s>", "<unk>")
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert not any(piece.startswith("<0x") for piece in pieces), "byte fallback is off"


def test_prefixes_are_few_pieces(vocabulary):
    assert len(vocabulary.encode(debian.ENDE_PREFIX)) <= 6
    assert len(vocabulary.encode(debian.SYNOPSIS_PREFIX)) <= 3


def test_held_out_targets_survive_the_round_trip(vocabulary):
    for task in samples.TASKS:
        targets = [example.targets for example in samples.load_heldout(task)]
        changed = [t for t in targets if vocabulary.decode(vocabulary.encode(t)) != t]
        assert len(changed) <= 0.02 * len(targets), changed


def test_rare_letters_are_not_unknown(vocabulary):
    for text in ("Änderung & Übung!", "Öl: »groß« – 100 %", "~user@host {x|y} \\ ^ `"):
        assert vocabulary.unk_id not in vocabulary.encode(text)


def test_encode_adds_no_eos_and_decode_stops_at_the_first(vocabulary):
    ids = vocabulary.encode("a library for files")
    assert vocabulary.eos_id not in ids
    tail = vocabulary.encode("never seen")
    assert vocabulary.decode([*ids, 1, *tail, 1]) == "a library for files"
    assert vocabulary.decode(np.array([*ids, 1, 0, 0], np.int32)) == "a library for files"
    assert vocabulary.decode([]) == vocabulary.decode([1]) == ""


@pytest.mark.parametrize("outside", [8000, 8127, 32127, -1])
def test_ids_outside_become_unknown(vocabulary, outside):
    ids = vocabulary.encode("files")
    assert vocabulary.decode([*ids, outside]) == vocabulary.decode([*ids, vocabulary.unk_id])
    assert vocabulary.decode([*ids, outside]) != "files"


def test_batch_pads_and_ends_each_row(vocabulary):
    ids, lengths = vocabulary.batch(["files", "", "a library for files"], 12)
    assert ids.dtype == lengths.dtype == np.int32 and ids.shape == (3, 12)
    for row, length, text in zip(ids, lengths, ["files", "", "a library for files"], strict=True):
        assert row[: length - 1].tolist() == vocabulary.encode(text)
        assert row[length - 1] == 1 and not row[length:].any()
    assert lengths[1] == 1


def test_batch_at_the_limit(vocabulary):
    text = "a library for files"
    size = len(vocabulary.encode(text)) + 1
    assert vocabulary.batch([text], size)[1].tolist() == [size]
    with pytest.raises(ValueError, match=f"text 1 has {size} ids with EOS, the limit is") as error:
        vocabulary.batch(["", text], size - 1)
    assert "\n" not in str(error.value)
    ids, lengths = vocabulary.batch([text], size - 1, truncate=True)
    assert lengths.tolist() == [size - 1]
    assert ids[0].tolist() == [*vocabulary.encode(text)[: size - 2], 1]
    with pytest.raises(ValueError, match="at least 1"):
        vocabulary.batch([text], 0)


def test_load_refuses_other_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no SentencePiece model"):
        vocabulary_lib.Vocabulary.load(tmp_path / "none.model")
    lines = ["a few words of text", "more of the same text"] * 20
    sentencepiece.SentencePieceTrainer.train(  # its defaults: UNK 0, BOS 1, EOS 2, no pad
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "other"),
        vocab_size=18,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="pad, EOS, UNK are"):
        vocabulary_lib.Vocabulary.load(tmp_path / "other.model")


def test_training_is_deterministic(tmp_path):
    texts = [e.targets for e in samples.load_heldout("debian_synopsis")]
    models = []
    for name in ("a", "b"):
        vocabulary_lib.train(texts, tmp_path / name, 400)
        models.append((tmp_path / name).read_bytes())
    assert models[0] == models[1]
    assert vocabulary_lib.Vocabulary.load(tmp_path / "a").size == 400
