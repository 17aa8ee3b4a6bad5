"""Stages of scripts/build_debian.py on a toy list directory, and its error messages."""

import importlib.resources
import importlib.util
import json
import pathlib

import numpy as np
import pytest

from specjax.data import debian, splits
from specjax.data import vocabulary as vocabulary_lib

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "build_debian.py"
ASSETS = importlib.resources.files("specjax") / "assets" / "debian"

needs_apt = pytest.mark.skipif(
    not pathlib.Path(debian.APT_HELPER).exists(), reason="apt is not installed"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_debian", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_lib.Vocabulary.load(str(ASSETS / "sentencepiece.model"))


def write_lists(folder, packages=40):
    """Indices of packages whose texts have nothing in common but "a … lives"."""
    names = [f"{a}{b}" for a in "bdfgklmn" for b in "aeiou"][:packages]
    stanzas = {"Packages": "", "i18n_Translation-en": "", "i18n_Translation-de": ""}
    for i, name in enumerate(names):
        head = f"Package: {name}\nDescription-md5: {i}\n"
        stanzas["Packages"] += head + "\n"
        stanzas["i18n_Translation-en"] += f"{head}Description-en: the {name}\n a {name} lives\n\n"
        stanzas["i18n_Translation-de"] += f"{head}Description-de: {name}\n ein {name} lebt\n\n"
    folder.mkdir()
    for kind, text in stanzas.items():
        (folder / f"mirror_{kind}").write_text(text)
    return folder


def fake_apt(folder, monkeypatch, body):
    """Puts an `apt-get` of our own in front of the path."""
    folder.mkdir()
    command = folder / "apt-get"
    command.write_text(f"#!/bin/sh\n{body}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@needs_apt
def test_splits_and_tokens(script, vocabulary, tmp_path):
    lists = write_lists(tmp_path / "lists")
    out = tmp_path / "out"
    script.build_splits(lambda: script.read_split_corpus(lists, out), out)
    script.build_tokens(out, vocabulary)
    rows = script.read_jsonl(out / "ende-train.jsonl")
    assert 30 < len(rows) <= 40
    for row in rows:
        name = row["source_package"]
        assert row["inputs"] == f"translate English to German: a {name} lives"
        assert row["targets"] == f"ein {name} lebt"
    with np.load(out / "tokens" / "ende-train.npz") as arrays:
        offsets = arrays["targets_offsets"]
        assert offsets.dtype == np.int64 and arrays["targets"].dtype == np.int32
        assert len(offsets) == len(rows) + 1 and offsets[-1] == len(arrays["targets"])
        for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
            assert arrays["targets"][start:end].tolist() == [*vocabulary.encode(row["targets"]), 1]
    table = script.summary(out)
    assert table.row_count == 6


@needs_apt
def test_a_second_run_skips_what_exists(script, vocabulary, tmp_path):
    lists = write_lists(tmp_path / "lists")
    out = tmp_path / "out"
    script.build_splits(lambda: script.read_split_corpus(lists, out), out)
    (out / "synopsis-test.jsonl").unlink()
    (out / "ende-train.jsonl").write_text("kept\n")
    script.build_splits(lambda: script.read_split_corpus(lists, out), out)
    assert (out / "synopsis-test.jsonl").exists()
    assert (out / "ende-train.jsonl").read_text() == "kept\n"

    def corpus():
        raise AssertionError("read again")

    script.build_splits(corpus, out)


def test_long_examples(script, vocabulary):
    words = " file" * 200
    rows = [
        {"inputs": words, "targets": "short"},
        {"inputs": "short", "targets": words},
        {"inputs": "short", "targets": "short"},
    ]
    arrays, counts = script.tokenize(rows, vocabulary)
    assert counts == {"examples": 2, "truncated": 1, "too_long": 1}
    first = arrays["inputs"][: arrays["inputs_offsets"][1]]
    assert first.tolist() == [*vocabulary.encode(words)[:127], 1]
    short = [*vocabulary.encode("short"), 1]
    assert arrays["targets"].tolist() == short * 2


def test_held_out_rows_need_fitting_lengths(script, vocabulary, monkeypatch):
    monkeypatch.setattr(script, "HELD_OUT_PER_HALF", 1)
    packages = {splits.half_of(f"p{i}"): f"p{i}" for i in range(20)}
    long, fine = "the file " * 100, "a file of words that are all known and many"
    rows = []
    for half, package in packages.items():
        texts = [("input", "short", long), ("cut", long, fine), ("brief", "short", "file")]
        texts.append((half, f"good {half}", f"{fine} {half}"))
        rows += [
            {"source_package": package, "inputs": f"summarize: {tag} {text}", "targets": target}
            for tag, text, target in texts
        ]
    found = script.held_out_rows("synopsis", rows, vocabulary)
    assert [row["half"] for row in found] == ["calibration", "report"]
    assert [row["inputs"] for row in found] == [
        f"summarize: {half} good {half}" for half in ("calibration", "report")
    ]
    with pytest.raises(script.BuildError, match="ende: too few held-out pairs"):
        script.held_out_rows("ende", [], vocabulary)


def test_without_apt_there_is_one_line(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(script.BuildError, match="apt-get not found"):
        script.fetch_indices(tmp_path / "apt")


def test_a_missing_mirror_is_one_line(script, tmp_path, monkeypatch):
    body = "echo 'W: one' >&2; echo 'E: Could not resolve mirror' >&2; exit 100"
    fake_apt(tmp_path / "bin", monkeypatch, body)
    with pytest.raises(script.BuildError, match="E: Could not resolve mirror") as error:
        script.fetch_indices(tmp_path / "apt")
    assert "\n" not in str(error.value)


@needs_apt
def test_incomplete_indices_are_refused(script, tmp_path, monkeypatch):
    lists = write_lists(tmp_path / "source", packages=3)
    out = tmp_path / "out"
    fake_apt(tmp_path / "bin", monkeypatch, f"cp {lists}/* {out}/apt/lists/")
    with pytest.raises(script.BuildError, match="incomplete"):
        script.read_split_corpus(None, out)


def test_main_ends_in_one_line(script, tmp_path, monkeypatch):
    argv = ["build_debian", f"--lists_dir={tmp_path}", f"--output_dir={tmp_path / 'out'}"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit, match="build_debian: no .*_Packages.* index in"):
        script.main()


def test_jsonl_round_trip(script, tmp_path):
    rows = [{"inputs": "Übung\u2028»x«", "targets": "a\nb"}]
    path = tmp_path / "deep" / "rows.jsonl"
    script.write_jsonl(path, rows)
    assert script.read_jsonl(path) == rows
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]
    assert json.loads(path.read_text(encoding="utf-8").split("\n")[0]) == rows[0]
