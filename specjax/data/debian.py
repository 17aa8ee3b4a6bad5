"""A parallel and a summarisation corpus from the Debian archive's indices.

apt keeps three indices that matter here. `Packages` names the source package of each binary
package; `Translation-en` holds the English descriptions; `Translation-de` the German ones that
volunteers wrote, keyed by the md5 of the English text they translate. From them come

*   `ende`: English paragraphs (and list items) with their German translation;
*   `synopsis`: whole English long descriptions with their one-line synopsis.

Nothing here needs TensorFlow or the network: the indices are files.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import subprocess
from collections.abc import Iterable, Iterator

from specjax.data import splits

APT_HELPER = "/usr/lib/apt/apt-helper"
ENDE_PREFIX = "translate English to German: "
SYNOPSIS_PREFIX = "summarize: "

_BULLET = re.compile(r"(?:[-*+•·–]|(?<=\s)(?:o|\d{1,2}[.)]))\s+")
_COMPOUND_BREAK = re.compile(r"\w-$")
# After a wrapped line these words show that its last hyphen stands for a suspended compound
# ("Client- und Server"), where the space belongs to the text.
_SUSPENDED = frozenset("und oder bzw. sowie als and or to".split())


@dataclasses.dataclass(frozen=True)
class Description:
    """One description of one package, in one language.

    Attributes:
      package: Binary package.
      md5: Digest of the English description, the key that translations share.
      synopsis: The one-line summary.
      body: Lines of the long description without their leading space.
    """

    package: str
    md5: str
    synopsis: str
    body: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Unwrapped text of one kind: "text", "item" (of a list) or "verbatim"."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Indices:
    """The index files of one apt list directory."""

    packages: tuple[pathlib.Path, ...]
    english: tuple[pathlib.Path, ...]
    german: tuple[pathlib.Path, ...]


def find_indices(lists_dir: pathlib.Path) -> Indices:
    """Finds the indices in a directory such as /var/lib/apt/lists.

    Args:
      lists_dir: Directory with apt's list files, compressed or not.

    Returns:
      The paths, sorted by name.

    Raises:
      FileNotFoundError: One of the three kinds is missing.
    """
    patterns = {
        "packages": "*_Packages*",
        "english": "*_i18n_Translation-en*",
        "german": "*_i18n_Translation-de*",
    }
    found = {kind: tuple(sorted(lists_dir.glob(p))) for kind, p in patterns.items()}
    for kind, paths in found.items():
        if not paths:
            raise FileNotFoundError(f"no {patterns[kind]} index in {lists_dir}")
    return Indices(**found)


def read_index(path: pathlib.Path) -> str:
    """Reads one index with apt's own decompressor, which knows every form apt stores."""
    command = [APT_HELPER, "cat-file", str(path)]
    result = subprocess.run(command, check=True, capture_output=True)
    return result.stdout.decode("utf-8", errors="replace")


def stanzas(text: str) -> Iterator[dict[str, list[str]]]:
    """Yields control stanzas as field → lines; the first line is the one beside the name."""
    for block in text.split("\n\n"):
        fields: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in block.split("\n"):
            if line.startswith((" ", "\t")):
                lines.append(line[1:])
            elif ":" in line:
                name, value = line.split(":", 1)
                lines = fields[name] = [value.strip()]
        if fields:
            yield fields


def parse_sources(text: str) -> dict[str, str]:
    """Maps binary to source package from a `Packages` index ("Source: name (version)")."""
    sources = {}
    for fields in stanzas(text):
        if "Package" in fields:
            package = fields["Package"][0]
            sources[package] = fields.get("Source", [package])[0].split(" ")[0]
    return sources


def parse_descriptions(text: str, language: str) -> Iterator[Description]:
    """Yields the descriptions of a `Translation-<language>` index."""
    for fields in stanzas(text):
        lines = fields.get(f"Description-{language}")
        if lines and "Package" in fields and "Description-md5" in fields:
            yield Description(
                fields["Package"][0], fields["Description-md5"][0], lines[0], tuple(lines[1:])
            )


def paragraphs(body: Iterable[str]) -> list[list[str]]:
    """Splits the lines of a long description at its " ." lines; empty ones stay."""
    result: list[list[str]] = [[]]
    for line in body:
        if line.strip() == ".":
            result.append([])
        else:
            result[-1].append(line.rstrip())
    return result


def unwrap(lines: Iterable[str]) -> str:
    """Joins wrapped lines; a compound broken behind its hyphen gets no space."""
    text = ""
    for words in (line.split() for line in lines):
        if not words:
            continue
        compound = _COMPOUND_BREAK.search(text) and words[0] not in _SUSPENDED
        text += ("" if compound or not text else " ") + " ".join(words)
    return text


def segments(paragraph: Iterable[str]) -> list[Segment]:
    """Cuts a paragraph into running text, list items and verbatim blocks.

    Policy asks for two spaces before verbatim lines; lists are written with bullets, indented
    or not, whose further lines are indented deeper than the bullet.

    Args:
      paragraph: Lines without the index's leading space.

    Returns:
      Segments in order, unwrapped, item text without its bullet.
    """
    groups: list[tuple[str, list[str]]] = []
    bullet_indent = -1
    for line in paragraph:
        indent = len(line) - len(line.lstrip())
        bullet = _BULLET.match(line, indent)
        if bullet:
            groups.append(("item", [line[bullet.end() :]]))
            bullet_indent = indent
            continue
        in_item = bool(groups) and groups[-1][0] == "item"
        # An unindented bullet leaves its further lines no way to show where they belong.
        if in_item and (indent > bullet_indent or bullet_indent == 0):
            groups[-1][1].append(line)
            continue
        kind = "verbatim" if indent else "text"
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        groups[-1][1].append(line)
    found = (Segment(kind, unwrap(lines)) for kind, lines in groups)
    return [segment for segment in found if segment.text]


def flatten(body: Iterable[str]) -> str:
    """The whole long description as one line, list items marked by an asterisk."""
    parts = itertools.chain.from_iterable(segments(p) for p in paragraphs(body))
    return " ".join(("* " if part.kind == "item" else "") + part.text for part in parts)


def align(english: Description, german: Description) -> list[tuple[str, str]]:
    """Pairs the paragraphs and list items of a description with their translation.

    Both must have the same number of paragraphs. Within one, runs of text, items and verbatim
    lines must follow in the same order, else the paragraph is left out; a list whose number of
    items differs is left out alone, and verbatim blocks always.

    Args:
      english: The original.
      german: The translation of the same description (same md5).

    Returns:
      Pairs (English, German) that are translated at all.
    """
    sides = paragraphs(english.body), paragraphs(german.body)
    if len(sides[0]) != len(sides[1]):
        return []
    pairs = itertools.chain.from_iterable(map(_align_paragraph, *sides))
    return [pair for pair in pairs if _is_translation(*pair)]


def _align_paragraph(english: list[str], german: list[str]) -> list[tuple[str, str]]:
    runs = [
        [(kind, [s.text for s in run]) for kind, run in itertools.groupby(side, lambda s: s.kind)]
        for side in (segments(english), segments(german))
    ]
    if [kind for kind, _ in runs[0]] != [kind for kind, _ in runs[1]]:
        return []
    pairs = []
    for (kind, left), (_, right) in zip(*runs, strict=True):
        if kind != "verbatim" and len(left) == len(right):
            pairs.extend(zip(left, right, strict=True))
    return pairs


def _is_translation(english: str, german: str) -> bool:
    """Whether German text is there, is not the English one, and is of a plausible length."""
    left, right = splits.normalise(english), splits.normalise(german)
    return bool(left and right) and left != right and 0.4 <= len(german) / len(english) <= 3.0


def ende_pairs(
    english: Iterable[Description], german: Iterable[Description], sources: dict[str, str]
) -> Iterator[splits.Pair]:
    """Yields translation pairs of the packages whose source package is known."""
    translated = {description.md5: description for description in german}
    for description in english:
        source = sources.get(description.package)
        if source and description.md5 in translated:
            for left, right in align(description, translated[description.md5]):
                yield splits.Pair(source, left, right)


def synopsis_pairs(
    english: Iterable[Description], sources: dict[str, str]
) -> Iterator[splits.Pair]:
    """Yields (long description, synopsis); its parts count as text that training sees."""
    for description in english:
        source = sources.get(description.package)
        parts = [s.text for p in paragraphs(description.body) for s in segments(p)]
        text = flatten(description.body)
        if source and splits.normalise(text) and splits.normalise(description.synopsis):
            yield splits.Pair(source, text, description.synopsis, tuple(parts))


def read_corpus(lists_dir: pathlib.Path) -> dict[str, list[splits.Pair]]:
    """Reads all indices of a list directory.

    `Translation-en` describes packages of every architecture, `Packages` knows one; what it does
    not know has no source package to split by and is left out.

    Args:
      lists_dir: Directory with apt's list files.

    Returns:
      The pairs of the tasks "ende" and "synopsis", unsplit, in the indices' order.

    Raises:
      FileNotFoundError: An index is missing.
    """
    indices = find_indices(lists_dir)
    sources: dict[str, str] = {}
    for path in indices.packages:
        sources.update(parse_sources(read_index(path)))
    english = _read_descriptions(indices.english, "en")
    german = _read_descriptions(indices.german, "de")
    return {
        "ende": list(ende_pairs(english, german, sources)),
        "synopsis": list(synopsis_pairs(english, sources)),
    }


def _read_descriptions(paths: Iterable[pathlib.Path], language: str) -> list[Description]:
    unique = {}
    for path in paths:
        for description in parse_descriptions(read_index(path), language):
            unique[description.package, description.md5] = description
    return list(unique.values())
