"""What `infer` and `eval` read."""

import json

import numpy as np
import pytest

from specjax import assets
from specjax.data import samples, sources
from specjax.data.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.load(assets.folder() / "sentencepiece.model")


def test_a_text_file_has_one_input_per_line(tmp_path, vocabulary):
    """Empty text is EOS alone; no line is dropped, whatever is in it."""
    path = tmp_path / "in.v1.txt"
    path.write_text("A library.\n\n  \nA tool", encoding="utf-8")
    source = sources.TextFile(str(path), prefix="x: ")
    found = source.read(vocabulary)
    assert source.name == "in"
    assert [e.text["inputs_pretokenized"] for e in found] == [
        "x: A library.",
        "x: ",
        "x:   ",
        "x: A tool",
    ]
    assert found[0].inputs.tolist() == [*vocabulary.encode("x: A library."), 1]
    bare = sources.TextFile(str(path)).read(vocabulary)
    assert bare[1].inputs.tolist() == [1] and bare[1].inputs.dtype == np.int32


def test_jsonl_with_and_without_references(tmp_path, vocabulary):
    path = tmp_path / "in.jsonl"
    rows = [{"q": "A library.", "a": "Eine kleine Bibliothek für alle."}, {"q": "A tool."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = sources.TextFile(str(path), inputs="q", targets="a", limit=1)
    (first,) = source.read(vocabulary)
    assert first.text["targets_pretokenized"] == "Eine kleine Bibliothek für alle."
    assert source.score([first], ["Eine kleine Bibliothek für alle."])["bleu"] == pytest.approx(100)
    both = sources.TextFile(str(path), inputs="q", targets="a").read(vocabulary)
    with pytest.raises(ValueError, match="input 1 has no reference"):
        source.score(both, ["a", "b"])


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is no JSON"), ('{"x": "y"}', "line 2 has no text field 'inputs'"),
     ('{"inputs": 3}', "line 2 has no text field 'inputs'"), ("[]", "line 2 has no text field"),
     ('{"inputs": "a", "targets": 3}', "line 2: 'targets' is no text")],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, vocabulary, line, message):
    path = tmp_path / "in.jsonl"
    path.write_text('{"inputs": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        sources.TextFile(str(path)).read(vocabulary)


def test_what_is_not_there_is_said(vocabulary):
    with pytest.raises(ValueError, match="no input file /no/such.txt"):
        sources.TextFile("/no/such.txt").read(vocabulary)
    with pytest.raises(ValueError, match="unknown task 'nonsense'"):
        sources.Heldout("nonsense").read(vocabulary)
    with pytest.raises(ValueError, match="unknown metric 'wit'"):
        sources.TextFile("x.txt", metric="wit")
    with pytest.raises(ValueError, match="limit must not be negative, got -1"):
        sources.TextFile("x.txt", limit=-1)


def test_the_held_out_sample(vocabulary):
    found = sources.Heldout("debian_synopsis", "report", limit=5).read(vocabulary)
    shipped = samples.load_heldout("debian_synopsis", "report")[:5]
    assert [e.text["targets_pretokenized"] for e in found] == [e.targets for e in shipped]
    assert [e.number for e in found] == [0, 1, 2, 3, 4]
    source = sources.Heldout("debian_synopsis")
    assert source.score(found, [e.targets for e in shipped])["rougeL"] == pytest.approx(100)


def test_a_seqio_task_gives_its_own_ids_and_score(tmp_path, monkeypatch, vocabulary):
    monkeypatch.setenv("SPECJAX_DATA_DIR", str(tmp_path))
    rows = samples.load_heldout("debian_ende", "report")[:3]
    text = "".join(json.dumps({"inputs": e.inputs, "targets": e.targets}) + "\n" for e in rows)
    (tmp_path / "ende-test.jsonl").write_text(text, encoding="utf-8")
    source = sources.SeqioTask("debian_ende_v001", limit=2)
    found = source.read(vocabulary)
    assert [e.inputs.tolist() for e in found] == [
        [*vocabulary.encode(e.inputs), 1] for e in rows[:2]
    ]
    assert source.score(found, [e.targets for e in rows[:2]])["bleu"] == pytest.approx(100)
    with pytest.raises(
        ValueError,
        match="no seqio task .nope. in .*; registered are .*debian_ende_v001",
    ):
        sources.SeqioTask("nope").read(vocabulary)


def test_a_task_of_other_pieces_is_refused(vocabulary, monkeypatch, tmp_path):
    class Other(Vocabulary):
        size = 32100

    with pytest.raises(ValueError, match="has 8000 pieces, the model's vocabulary has 32100"):
        sources.SeqioTask("debian_ende_v001").read(Other(vocabulary.processor))


def test_over_long_inputs_are_cut_only_when_asked(tmp_path, vocabulary):
    path = tmp_path / "in.txt"
    path.write_text("A tool.\n" + "word " * 30 + "\n")
    found = sources.TextFile(str(path)).read(vocabulary)
    with pytest.raises(
        ValueError, match="1 of 2 inputs are longer than 8 ids with EOS .*number 1 with"
    ):
        sources.cut(found, 8, truncate=False)
    short, long = sources.cut(found, 8, truncate=True)
    assert short == found[0]
    assert long.inputs.tolist() == [*found[1].inputs[:7], 1]


def test_only_newlines_end_a_line(tmp_path, vocabulary):
    """A line separator within a text is text; a Windows file reads the same; an empty file is empty."""
    path = tmp_path / "in.txt"
    path.write_bytes("one\u2028still one\x0cstill\r\nt\rwo\r\n".encode())
    found = sources.TextFile(str(path)).read(vocabulary)
    texts = [e.text["inputs_pretokenized"] for e in found]
    assert texts == ["one\u2028still one\x0cstill", "t\rwo"]
    path.write_text("")
    assert sources.TextFile(str(path)).read(vocabulary) == []
