"""Splits by source package, the leak rule, and the shipped sample against the training text."""

import collections
import importlib.resources
import json
import pathlib

import numpy as np
import pytest

from specjax.data import debian, samples, splits

ASSETS = importlib.resources.files("specjax") / "assets" / "debian"
BUILT = pathlib.Path("~/.cache/specjax/debian_v001").expanduser()
PREFIXES = {"debian_ende": debian.ENDE_PREFIX, "debian_synopsis": debian.SYNOPSIS_PREFIX}


def source_of(split):
    """A source package that falls into a split."""
    return next(f"source{i}" for i in range(1000) if splits.assign(f"source{i}") == split)


TRAIN, VALIDATION, TEST = map(source_of, splits.SPLITS)


def shipped_texts():
    """(task, side, text without prefix) of every shipped example."""
    for task, prefix in PREFIXES.items():
        for example in samples.load_heldout(task):
            assert example.inputs.startswith(prefix)
            yield task, "inputs", example.inputs.removeprefix(prefix)
            yield task, "targets", example.targets


# The rule.


def test_assignment_is_stable():
    # Changing any of these moves packages between the splits of a published corpus.
    names = ["bash", "glibc", "bluez", "lxml", "yorick", "gramps", "wesnoth-1.16", "debian-gis"]
    assert [splits.assign(name) for name in names] == [
        "train", "test", "test", "train", "test", "train", "train", "test",
    ]  # fmt: skip


def test_assignment_has_the_promised_shares():
    counts = collections.Counter(splits.assign(f"package-{i}") for i in range(20_000))
    # Three standard deviations of a share of 3 % are 0.36 %.
    assert counts["test"] / 20_000 == pytest.approx(0.03, abs=0.0036)
    assert counts["validation"] / 20_000 == pytest.approx(0.03, abs=0.0036)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The  Library\tv1.2, for C++! ", "the library v for c"),
        ("Straße — ﬁne", "strasse fine"),
        ("linux-image-6.1.0", "linux image"),
        ("snake_case", "snake case"),
        ("12 %", ""),
    ],
)
def test_normalise(text, normal):
    assert splits.normalise(text) == normal


def test_digests_follow_normalisation_and_pack():
    assert splits.digest("The files (2.0)") == splits.digest("the FILES")
    assert splits.digest("the files") != splits.digest("the file")
    digests = {splits.digest(word) for word in ("a", "b", "c")}
    packed = splits.pack_digests(digests)
    assert packed.shape == (3, splits.DIGEST_BYTES)
    assert [row.tobytes() for row in packed] == sorted(digests)


def split_toy(ende, synopsis=()):
    """Splits (source package, source, target) triples."""
    return splits.split(
        {
            "ende": [splits.Pair(*pair) for pair in ende],
            "synopsis": [splits.Pair(*pair) for pair in synopsis],
        }
    )


def test_exact_duplicates_are_dropped_within_a_split():
    pair = (TRAIN, "a file", "eine Datei")
    kept, _ = split_toy([pair, pair, (TRAIN, "a file", "die Datei")])
    assert sorted(p.target for p in kept["ende"]["train"]) == ["die Datei", "eine Datei"]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_pairs_that_training_saw_are_dropped(split):
    held_out = source_of(split)
    kept, dropped = split_toy(
        [
            (TRAIN, "Read version 1.2 files", "Dateien lesen"),
            (held_out, "read Version 3 files!", "etwas anderes"),  # source seen
            (held_out, "something new", "dateien LESEN"),  # target seen
            (held_out, "a short summary", "neu"),  # seen as the other task's target
            (held_out, "one paragraph", "ein Absatz"),  # seen inside the other task's source
            (held_out, "not seen", "nicht gesehen"),
        ],
        [
            (TRAIN, "one paragraph two paragraphs", "a short summary", ("one paragraph",)),
            (held_out, "read version files", "fresh target"),  # source seen in the other task
            (held_out, "fresh source", "fresh target"),
        ],
    )
    assert [p.source for p in kept["ende"][split]] == ["not seen"]
    assert [p.source for p in kept["synopsis"][split]] == ["fresh source"]
    assert dropped["ende"][split] == 4 and dropped["synopsis"][split] == 1
    assert len(kept["ende"]["train"]) == len(kept["synopsis"]["train"]) == 1


def test_validation_is_disjoint_from_test():
    kept, dropped = split_toy(
        [(TEST, "the same", "dasselbe"), (VALIDATION, "The Same", "das Gleiche")]
    )
    assert len(kept["ende"]["test"]) == 1 and not kept["ende"]["validation"]
    assert dropped["ende"] == {"test": 0, "validation": 1}


def test_the_order_is_a_shuffle_that_input_order_does_not_change():
    pairs = [(TRAIN, f"text {chr(97 + i)}", f"Text {i}") for i in range(20)]
    first = split_toy(pairs)[0]["ende"]["train"]
    assert first == split_toy(pairs[::-1])[0]["ende"]["train"]
    assert [p.source for p in first] != sorted(p.source for p in first)


def test_held_out_sample_keeps_its_rules():
    words = [f"{a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    pairs = [splits.Pair(f"s{i % 25}", f"source {w}", f"target {w}") for i, w in enumerate(words)]
    repeats = [splits.Pair("s1", p.source.upper(), "other") for p in pairs]
    halves = splits.held_out_sample(pairs + repeats, 20)
    assert halves == splits.held_out_sample((pairs + repeats)[::-1], 20)
    drawn = halves["calibration"] + halves["report"]
    assert [len(half) for half in halves.values()] == [20, 20]
    assert len({splits.digest(p.source) for p in drawn}) == 40
    assert not {p.source_package for p in halves["calibration"]} & {
        p.source_package for p in halves["report"]
    }
    with pytest.raises(ValueError, match="too few"):
        splits.held_out_sample(pairs, 60)


# What ships.


def test_shipped_sample_is_disjoint_from_training():
    seen = splits.load_digests(ASSETS / "train_digests.npy")
    assert len(seen) > 200_000
    leaks = [item for item in shipped_texts() if splits.digest(item[2]) in seen]
    assert not leaks


def test_shipped_digests_are_sorted_and_would_find_a_leak():
    packed = np.load(ASSETS / "train_digests.npy")
    assert packed.dtype == np.uint8 and packed.shape[1] == splits.DIGEST_BYTES
    rows = [row.tobytes() for row in packed]
    assert rows == sorted(set(rows))
    # Sentences that hundreds of training packages share.
    for text in (
        "This package contains the development files.",
        "Dieses Paket enthält die Dokumentation.",
    ):
        assert splits.digest(text) in set(rows)


@pytest.mark.parametrize("task", samples.TASKS)
def test_shipped_halves(task):
    calibration, report = (samples.load_heldout(task, half) for half in samples.HALVES)
    assert len(calibration) == len(report) == 160
    assert calibration + report == samples.load_heldout(task)
    assert {e.half for e in calibration} == {"calibration"} and {e.half for e in report} == {
        "report"
    }
    assert {splits.assign(e.source_package) for e in calibration + report} == {"test"}


def test_shipped_halves_share_no_source_package_and_no_text():
    packages, texts = {}, {half: set() for half in samples.HALVES}
    for half in samples.HALVES:
        examples = [e for task in samples.TASKS for e in samples.load_heldout(task, half)]
        packages[half] = {e.source_package for e in examples}
        for example in examples:
            source = example.inputs.split(": ", 1)[1]  # both prefixes end so
            texts[half] |= {splits.digest(source), splits.digest(example.targets)}
    assert not packages["calibration"] & packages["report"]
    assert not texts["calibration"] & texts["report"]


def test_unknown_names_raise():
    with pytest.raises(ValueError, match="unknown task"):
        samples.load_heldout("ende")
    with pytest.raises(ValueError, match="unknown half"):
        samples.load_heldout("debian_ende", "all")


# The whole corpus, where it has been built.


def built_rows(task, split):
    prefix = PREFIXES[task]
    with (BUILT / f"{task.removeprefix('debian_')}-{split}.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            yield row["source_package"], row["inputs"].removeprefix(prefix), row["targets"]


@pytest.mark.skipif(
    not (BUILT / "tokens" / "synopsis-test.npz").exists(), reason="the corpus has not been built"
)
def test_built_corpus_is_disjoint():
    texts, packages = collections.defaultdict(set), collections.defaultdict(set)
    for split in splits.SPLITS:
        for task in samples.TASKS:
            for package, source, target in built_rows(task, split):
                packages[split].add(package)
                texts[split] |= {splits.digest(source), splits.digest(target)}
    for left, right in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not texts[left] & texts[right]
        assert not packages[left] & packages[right]
    assert not {splits.digest(text) for *_, text in shipped_texts()} & texts["train"]
    test_sources = {
        splits.digest(source) for t in samples.TASKS for _, source, _ in built_rows(t, "test")
    }
    assert {
        splits.digest(text) for _, side, text in shipped_texts() if side == "inputs"
    } <= test_sources
