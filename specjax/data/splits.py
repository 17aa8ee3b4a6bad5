"""Splits by source package, and the rule that keeps held-out text out of training.

Packages of one source share sentences, so a split by example would leak; sources share
boilerplate, so held-out text that training also sees is dropped, compared after a normalisation
that ignores case, spacing, punctuation and digits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import UInt8

SPLITS = ("train", "validation", "test")
HALVES = ("calibration", "report")
DIGEST_BYTES = 5  # 40 bits: some 3e-7 chance that one text collides with any of 300,000

_SPLIT_SALT = "debian_v001"
_HELD_OUT_SHARE = 0.03
_LETTERS = re.compile(r"[^\W\d_]+")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One example without its task prefix.

    Attributes:
      source_package: Source package, the unit of splitting.
      source: Input text.
      target: Output text.
      parts: Paragraphs of `source`, which whoever reads the source has seen as well.
    """

    source_package: str
    source: str
    target: str
    parts: tuple[str, ...] = ()


def normalise(text: str) -> str:
    """Letters only: NFKC, case folded, everything between two words one space."""
    return " ".join(_LETTERS.findall(unicodedata.normalize("NFKC", text).casefold()))


def digest(text: str) -> bytes:
    """Stable digest of the normalised text."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=DIGEST_BYTES).digest()


def rank(*parts: str) -> int:
    """Stable pseudo-random 64-bit number of some strings, for orders that never change."""
    data = "\0".join((_SPLIT_SALT, *parts)).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def assign(source_package: str) -> str:
    """The split of a source package: 94 % train, 3 % validation, 3 % test."""
    share = rank(source_package) / 2**64
    if share < _HELD_OUT_SHARE:
        return "test"
    return "validation" if share < 2 * _HELD_OUT_SHARE else "train"


def seen_digests(pairs: Iterable[Pair]) -> set[bytes]:
    """Digests of every text that somebody who trains on the pairs gets to see."""
    return {digest(text) for p in pairs for text in (p.source, p.target, *p.parts)}


def split(
    tasks: Mapping[str, Iterable[Pair]],
) -> tuple[dict[str, dict[str, list[Pair]]], dict[str, dict[str, int]]]:
    """Splits several tasks alike and drops held-out pairs that training has seen.

    One set of seen texts serves all tasks and both sides, which is stricter than comparing
    sources with sources. Test pairs are compared with train; validation pairs with both.
    Within a split, exact duplicates are dropped and the order is a stable shuffle.

    Args:
      tasks: Pairs by task.

    Returns:
      Pairs by task and split, and the number of dropped pairs by task and split.
    """
    kept = {task: {name: [] for name in SPLITS} for task in tasks}
    for task, pairs in tasks.items():
        for pair in _unique(pairs):
            kept[task][assign(pair.source_package)].append(pair)
    dropped = {task: {} for task in tasks}
    seen = seen_digests(pair for by_split in kept.values() for pair in by_split["train"])
    for name in ("test", "validation"):
        for task, by_split in kept.items():
            fresh = [pair for pair in by_split[name] if not is_seen(pair, seen)]
            dropped[task][name] = len(by_split[name]) - len(fresh)
            by_split[name] = fresh
        seen |= seen_digests(pair for by_split in kept.values() for pair in by_split[name])
    return kept, dropped


def is_seen(pair: Pair, seen: set[bytes]) -> bool:
    """Whether the source or the target of a pair is among the seen texts."""
    return digest(pair.source) in seen or digest(pair.target) in seen


def _unique(pairs: Iterable[Pair]) -> list[Pair]:
    """One pair per split and text, in a stable shuffle."""
    unique = {(assign(p.source_package), p.source, p.target): p for p in pairs}
    ordered = sorted(unique.values(), key=lambda p: (p.source_package, p.source, p.target))
    return sorted(ordered, key=lambda p: rank(p.source_package, p.source, p.target))


def half_of(source_package: str) -> str:
    """The half of the held-out sample that a source package belongs to, in every task."""
    return HALVES[rank("half", source_package) % 2]


def held_out_sample(pairs: Iterable[Pair], per_half: int) -> dict[str, list[Pair]]:
    """Draws a sample in stable hash order, in two halves without a source package in common.

    A pair whose source or target is already in the sample, compared like held-out and train
    text, is passed over.

    Args:
      pairs: Pairs of a test split.
      per_half: Size of each half.

    Returns:
      Pairs by half.

    Raises:
      ValueError: There are too few pairs.
    """
    halves: dict[str, list[Pair]] = {half: [] for half in HALVES}
    seen: set[bytes] = set()
    for pair in sorted(pairs, key=lambda p: rank("sample", p.source, p.target)):
        half = halves[half_of(pair.source_package)]
        if len(half) < per_half and not is_seen(pair, seen):
            half.append(pair)
            seen |= {digest(pair.source), digest(pair.target)}
    if any(len(half) < per_half for half in halves.values()):
        raise ValueError(f"too few held-out pairs for two halves of {per_half}")
    return halves


def pack_digests(digests: set[bytes]) -> UInt8[np.ndarray, "n bytes"]:
    """Sorted digests as an array, five bytes a row."""
    flat = b"".join(sorted(digests))
    return np.frombuffer(flat, np.uint8).reshape(-1, DIGEST_BYTES)


def load_digests(path: pathlib.Path) -> set[bytes]:
    """Inverse of saving `pack_digests`."""
    return {row.tobytes() for row in np.load(path)}
