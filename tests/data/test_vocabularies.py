"""Sentinels, bytes, vocabularies beside a model, and telling two of them apart."""

import importlib.resources
import json
import shutil

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from specjax.data import vocabulary as vocabulary_lib
from specjax.data.vocabulary import Bytes, Vocabulary

MODEL = importlib.resources.files("specjax") / "assets" / "debian" / "sentencepiece.model"
PIECE = sentencepiece_model_pb2.ModelProto.SentencePiece
TEXT = "a library <extra_id_0> for <extra_id_1> files <extra_id_99>"


def enlarge(path, count: int, sentinels: int = 0, change=lambda pieces: None) -> str:
    """Writes the shipped model with further pieces up to ``count``, then sentinels inside."""
    model = sentencepiece_model_pb2.ModelProto.FromString(MODEL.read_bytes())
    for i in range(len(model.pieces), count):
        model.pieces.add(piece=f"\u4e00{i}", score=-30.0, type=PIECE.NORMAL)
    for i in reversed(range(sentinels)):
        model.pieces.add(piece=f"▁<extra_id_{i}>", score=0.0, type=PIECE.USER_DEFINED)
    change(model.pieces)
    path.write_bytes(model.SerializeToString())
    return str(path)


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> str:
    """A model with as many pieces as T5's."""
    return enlarge(tmp_path_factory.mktemp("t5") / "spiece.model", 32_000)


@pytest.fixture(scope="module")
def mt5(tmp_path_factory) -> str:
    """A model with as many pieces as mT5's."""
    return enlarge(tmp_path_factory.mktemp("mt5") / "spiece.model", 250_000, 100)


def test_sentinels_of_t5_count_down_behind_the_pieces(t5):
    vocabulary = Vocabulary.load(t5, 100)
    assert vocabulary.size == 32_100 and Vocabulary.load(t5).size == 32_000
    ids = vocabulary.encode(TEXT)
    assert [i for i in ids if i >= 32_000] == [32_099, 32_098, 32_000]
    assert vocabulary.decode([*ids, 1, 32_090]) == TEXT
    unknown = vocabulary.decode([vocabulary.unk_id])
    assert vocabulary.decode([32_100]) == vocabulary.decode([32_127]) == unknown
    rest = [i for i in ids if i < 32_000]
    assert rest == Vocabulary.load(t5).encode("a library for files")


def test_sentinels_are_seqio_s_own(t5):
    import seqio

    theirs, ours = seqio.SentencePieceVocabulary(t5, extra_ids=100), Vocabulary.load(t5, 100)
    assert theirs.vocab_size == ours.size
    for text in (TEXT, "<extra_id_5>", "a<extra_id_5>b", "", "  two  spaces "):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
    bytes_ = seqio.ByteVocabulary()
    for text in ("Öl für 3 €", "", "<extra_id_0>"):
        assert Bytes().encode(text) == list(bytes_.encode(text))
        assert Bytes().decode(Bytes().encode(text)) == bytes_.decode(bytes_.encode(text))
    odd = [3 + 0xC3, 2, 300, 3 + 65, 0, 3 + 66]
    assert Bytes().decode(odd) == bytes_.decode(odd) == "AB"


def test_sentinels_of_mt5_lie_inside(mt5):
    vocabulary = Vocabulary.load(mt5)
    assert vocabulary.size == 250_100
    assert [i for i in vocabulary.encode(TEXT) if i >= 250_000] == [250_099, 250_098, 250_000]
    with pytest.raises(ValueError, match="has sentinels already") as error:
        Vocabulary.load(mt5, 100)
    assert "\n" not in str(error.value)


def test_bytes():
    vocabulary = Bytes()
    assert vocabulary.size == len(vocabulary.pieces()) == 259
    assert vocabulary.encode("aÄ") == [97 + 3, 0xC3 + 3, 0x84 + 3]
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    every = bytes(range(256)).decode("latin-1")
    assert vocabulary.decode(vocabulary.encode(every)) == every
    ids, lengths = vocabulary.batch(["aÄ", ""], 6)
    assert ids.tolist() == [[100, 198, 135, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert lengths.tolist() == [4, 1]
    assert vocabulary.decode(np.array([100, 1, 101])) == "a"
    assert Bytes(125).size == len(set(Bytes(125).pieces())) == 384
    assert Bytes(125).decode([100, 259, 383, 101]) == "ab"


def folder_of(tmp_path, model=None, config=None, tokenizer=None):
    if model is not None:
        shutil.copy(model, tmp_path / "spiece.model")
    for name, content in (("config", config), ("tokenizer_config", tokenizer)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "config", "tokenizer", "size"),
    [
        ("t5", {"model_type": "t5"}, None, 32_100),
        ("t5", {"model_type": "t5"}, {"extra_ids": 0}, 32_000),
        ("t5", {"model_type": "t5"}, {"extra_ids": 28, "tokenizer_class": "T5Tokenizer"}, 32_028),
        ("t5", None, None, 32_000),
        ("mt5", {"model_type": "mt5", "tokenizer_class": "T5Tokenizer"}, None, 250_100),
        ("mt5", {"model_type": "mt5"}, {"extra_ids": 100}, 250_100),
        (None, {"model_type": "t5", "tokenizer_class": "ByT5Tokenizer"}, None, 384),
        (None, {"model_type": "t5"}, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}, 259),
    ],
)
def test_the_vocabulary_of_a_folder(request, tmp_path, kind, config, tokenizer, size):
    model = None if kind is None else request.getfixturevalue(kind)
    vocabulary = vocabulary_lib.of_folder(folder_of(tmp_path, model, config, tokenizer))
    assert vocabulary.size == size and isinstance(vocabulary, Bytes) == (kind is None)


def test_a_folder_without_one(tmp_path):
    with pytest.raises(ValueError, match="no spiece.model and no sentencepiece.model in") as error:
        vocabulary_lib.of_folder(folder_of(tmp_path, config={"model_type": "t5"}))
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json holds no JSON object"):
        vocabulary_lib.of_folder(tmp_path)


def test_as_many_pieces_are_not_the_same_pieces(tmp_path):
    def swap(pieces):
        pieces[5].piece, pieces[6].piece = pieces[6].piece, pieces[5].piece

    def score(pieces):
        pieces[500].score -= 0.1

    same = Vocabulary.load(str(MODEL))
    swapped = Vocabulary.load(enlarge(tmp_path / "swapped", 8000, change=swap))
    scored = Vocabulary.load(enlarge(tmp_path / "scored", 8000, change=score))
    longer = Vocabulary.load(str(MODEL), 100)
    assert same.fingerprint == Vocabulary.load(str(MODEL)).fingerprint == scored.fingerprint
    prints = {v.fingerprint for v in (same, swapped, longer, Bytes(), Bytes(125))}
    assert len(prints) == 5 and all(len(x) == 64 for x in prints)
    vocabulary_lib.check_same(same, scored)
    a, b = same.pieces()[5:7]
    for draft, said in (
        (swapped, f"id 5 is {b!r}, not {a!r}"),
        (longer, "it has 8100 pieces, not 8000"),
        (Bytes(), f"id 3 is '<0x00>', not {same.pieces()[3]!r}"),
    ):
        with pytest.raises(ValueError) as error:
            vocabulary_lib.check_same(same, draft)
        assert str(error.value) == f"the draft's vocabulary is not the target's: {said}"


def test_special_ids_count(tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
    assert Vocabulary(processor).fingerprint != Vocabulary(processor, eos_id=2).fingerprint


@pytest.fixture(scope="module")
def with_bytes(tmp_path_factory) -> str:
    """A model that spells what it has no piece for in bytes."""
    path = tmp_path_factory.mktemp("bytes") / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(MODEL.read_bytes())
    model.trainer_spec.byte_fallback = True
    for byte in range(256):
        model.pieces.add(piece=f"<0x{byte:02X}>", score=-30.0, type=PIECE.BYTE)
    path.write_bytes(model.SerializeToString())
    return str(path)


def test_a_stream_gives_whole_characters(with_bytes):
    """Some bytes of one are held back; at the end they are what `decode` makes of them."""
    for vocabulary in (Vocabulary.load(with_bytes), Bytes()):
        spelled = vocabulary.encode("中")[-3:]
        stream = vocabulary.stream()
        said = [stream.push([i]) for i in [*vocabulary.encode("a"), *spelled, *spelled[:2]]]
        assert "".join(said[:-5]) == "a" and said[-5:] == ["", "", "中", "", ""]
        whole = vocabulary.decode([*vocabulary.encode("a"), *spelled, *spelled[:2]])
        assert "".join(said) + stream.end() == whole


@pytest.mark.parametrize("kind", ["sentinels", "bytes", "no pieces"])
def test_the_parts_of_a_stream_are_the_whole_text(t5, with_bytes, kind):
    """Random ids, special ones and such as are none among them, in random parts."""
    paths = {"sentinels": (t5, 100), "bytes": (with_bytes, 0)}
    vocabulary = Vocabulary.load(*paths[kind]) if kind in paths else Bytes(10)
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, vocabulary.size + 3, rng.integers(0, 20)).tolist()
        if kind == "bytes":  # half of them
            ids = [i if rng.random() < 0.5 else vocabulary.size - 1 - i % 256 for i in ids]
        cuts = np.sort(rng.integers(0, len(ids) + 1, 5))
        stream = vocabulary.stream()
        parts = [stream.push(part) for part in np.split(np.asarray(ids, np.int32), cuts)]
        assert "".join(parts) + stream.end() == vocabulary.decode(ids)
