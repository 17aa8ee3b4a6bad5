"""Parsing and aligning the archive's indices, on a few stanzas."""

import gzip
import lzma
import pathlib
import textwrap

import pytest

from specjax.data import debian

needs_apt = pytest.mark.skipif(
    not pathlib.Path(debian.APT_HELPER).exists(), reason="apt is not installed"
)

PACKAGES = """\
Package: lexer
Version: 1.0
Tag: role::program,
 use::parsing
Description-md5: aaa

Package: lexer-doc
Source: lexer-src (1.0-2)
Description-md5: bbb
"""

ENGLISH = """\
Package: lexer
Description-md5: aaa
Description-en: fast lexical scanner
 The scanner reads text in real-
 time, and is fast. Features:
  * reads every file that the old scanner
    could read
  * knows C: and D:
 .
 It needs no library.
 .
 Verbatim follows:
   $ lexer --help
 .
 The end is in sight.

Package: lexer-doc
Description-md5: bbb
Description-en: fast lexical scanner (documentation)
 This package contains the manual.

Package: unknown
Description-md5: ccc
Description-en: a package of another architecture
 This package contains nothing else.
"""

GERMAN = """\
Package: lexer
Description-md5: aaa
Description-de: schneller Scanner
 Der Scanner liest Text in Echtzeit-
 Blöcken und ist schnell. Merkmale:
  * liest jede Datei, die der alte Scanner lesen konnte
  * kennt C: und D:
 .
 It needs no library.
 .
 Wörtlich folgt:
   $ lexer --help
 .
 The end is in sight.

Package: lexer-doc
Description-md5: bbb
Description-de: schneller Scanner (Dokumentation)
 Dieses Paket enthält das Client-
 und Server-Handbuch.
"""


def segments(text):
    """Segments of a paragraph as (kind, text)."""
    found = debian.segments(textwrap.dedent(text).strip("\n").split("\n"))
    return [(segment.kind, segment.text) for segment in found]


def description(*body, md5="aaa"):
    return debian.Description("p", md5, "synopsis", body)


def test_sources_fall_back_to_the_package():
    assert debian.parse_sources(PACKAGES) == {"lexer": "lexer", "lexer-doc": "lexer-src"}


def test_descriptions():
    first, second, _ = debian.parse_descriptions(ENGLISH, "en")
    assert (first.package, first.md5, first.synopsis) == ("lexer", "aaa", "fast lexical scanner")
    assert first.body[0] == "The scanner reads text in real-"
    assert first.body[2] == " * reads every file that the old scanner"
    assert second.body == ("This package contains the manual.",)
    assert list(debian.parse_descriptions(ENGLISH, "de")) == []


def test_paragraphs_split_at_dots():
    assert debian.paragraphs(["a", "b ", ".", "c", ".", "."]) == [["a", "b"], ["c"], [], []]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["two", "  lines "], "two lines"),
        (["in real-", "time"], "in real-time"),
        (["eine Echtzeit-", "Bibliothek"], "eine Echtzeit-Bibliothek"),
        (["das Client-", "und Server-Paket"], "das Client- und Server-Paket"),
        (["a dash -", "here"], "a dash - here"),
        (["", " "], ""),
    ],
)
def test_unwrap(lines, text):
    assert debian.unwrap(lines) == text


def test_segments_of_an_indented_list():
    paragraph = """
        Features:
         * one and
           two
         o three
        and text
    """
    assert segments(paragraph) == [
        ("text", "Features:"),
        ("item", "one and two"),
        ("item", "three"),
        ("text", "and text"),
    ]


def test_segments_of_an_unindented_list():
    assert segments("- one\n  more\n- two\n- three") == [
        ("item", "one more"),
        ("item", "two"),
        ("item", "three"),
    ]


def test_segments_of_verbatim_lines():
    assert segments("Run\n  lexer --help\n  lexer -x\nnow") == [
        ("text", "Run"),
        ("verbatim", "lexer --help lexer -x"),
        ("text", "now"),
    ]


def test_a_lone_o_or_number_begins_no_item_in_running_text():
    assert segments("from 9 to\n5. It was\no dear") == [("text", "from 9 to 5. It was o dear")]


def test_alignment_of_a_whole_description():
    english = next(debian.parse_descriptions(ENGLISH, "en"))
    german = next(debian.parse_descriptions(GERMAN, "de"))
    # Untranslated paragraphs and verbatim text are left out.
    assert debian.align(english, german) == [
        (
            "The scanner reads text in real-time, and is fast. Features:",
            "Der Scanner liest Text in Echtzeit-Blöcken und ist schnell. Merkmale:",
        ),
        (
            "reads every file that the old scanner could read",
            "liest jede Datei, die der alte Scanner lesen konnte",
        ),
        ("knows C: and D:", "kennt C: und D:"),
        ("Verbatim follows:", "Wörtlich folgt:"),
    ]


def test_no_alignment_with_another_number_of_paragraphs():
    english = description("One good line.", ".", "Two good lines.")
    assert debian.align(english, description("Eine gute Zeile.")) == []
    assert len(debian.align(english, description("Eine Zeile.", ".", "Zwei Zeilen."))) == 2


def test_a_list_of_another_length_is_left_out_alone():
    english = description("Features are:", " * a fast one", " * a slow one", "And so on.")
    german = description("Merkmale sind:", " * ein schnelles", "Und so weiter.")
    assert debian.align(english, german) == [
        ("Features are:", "Merkmale sind:"),
        ("And so on.", "Und so weiter."),
    ]


def test_a_paragraph_with_another_order_of_blocks_is_left_out():
    english = description("Features are:", " * a fast one", ".", "The end.")
    german = description(" * ein schnelles", "Merkmale sind:", ".", "Das Ende.")
    assert debian.align(english, german) == [("The end.", "Das Ende.")]


@pytest.mark.parametrize("german", ["The very  END, of it!", "...", "Ja.", "Das Ende. " * 20])
def test_implausible_translations_are_left_out(german):
    assert debian.align(description("The very end of it."), description(german)) == []


def test_flatten_keeps_everything():
    english = next(debian.parse_descriptions(ENGLISH, "en"))
    assert debian.flatten(english.body) == (
        "The scanner reads text in real-time, and is fast. Features: * reads every file that the "
        "old scanner could read * knows C: and D: It needs no library. Verbatim follows: "
        "$ lexer --help The end is in sight."
    )


def write_lists(folder):
    """A list directory with one index of each form that apt keeps."""
    (folder / "mirror_main_binary-amd64_Packages").write_text(PACKAGES)
    english = gzip.compress(ENGLISH.encode())
    (folder / "mirror_main_i18n_Translation-en.gz").write_bytes(english)
    german = lzma.compress(GERMAN.encode())
    (folder / "mirror_main_i18n_Translation-de.xz").write_bytes(german)


@needs_apt
def test_corpus_of_a_list_directory(tmp_path):
    write_lists(tmp_path)
    corpus = debian.read_corpus(tmp_path)
    assert [pair.source_package for pair in corpus["ende"]] == ["lexer"] * 4 + ["lexer-src"]
    assert corpus["ende"][-1].target == "Dieses Paket enthält das Client- und Server-Handbuch."
    # The package that Packages does not know has no source package, and is not there.
    assert [(pair.source_package, pair.target) for pair in corpus["synopsis"]] == [
        ("lexer", "fast lexical scanner"),
        ("lexer-src", "fast lexical scanner (documentation)"),
    ]
    assert "It needs no library." in corpus["synopsis"][0].parts


def test_a_missing_index_is_named(tmp_path):
    write_lists(tmp_path)
    (tmp_path / "mirror_main_i18n_Translation-de.xz").unlink()
    with pytest.raises(FileNotFoundError, match="Translation-de"):
        debian.read_corpus(tmp_path)
