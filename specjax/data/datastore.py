"""Datastores for REST: texts as one stream of ids, with a suffix array over it, in a folder.

    tokens.npy     int32 [Z, T]: Z parts of T ids, each document followed by -1, which also fills a part
    suffixes.npy   int32 [Z, T]: the places of a part's ids, in the order of what stands from there on
    meta.json      what it was made of; written last, so that a folder without it is unfinished

What ends a text ends a document: behind every EOS stands a -1 too. So nothing is drafted behind one, and
no match reaches across; in a chat every turn is a document.

References:
  He et al. 2023 (2311.08252), section 3.1; Manber and Myers 1993 for suffix arrays.
"""

import array
import dataclasses
import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from etils import epath
from jaxtyping import Int32
from rich import progress

from specjax import runs
from specjax.data import seqio_batches
from specjax.data.prompts import Excluded
from specjax.data.sources import read_lines
from specjax.data.vocabulary import Base

VERSION = 1
SEPARATOR = -1
LARGEST_PART = 2**31 - 2**16  # places, and a draft's way behind the last one, are 32-bit numbers

_TOKENS, _SUFFIXES, _META, _STREAM = "tokens.npy", "suffixes.npy", "meta.json", "stream.int32"
_CHUNK = 2**24


class Document(NamedTuple):
    """A text of a source.

    Attributes:
      text: compared with what must not enter.
      ids: of the text, where the source has them; otherwise the vocabulary makes them, with EOS.
    """

    text: str
    ids: np.ndarray | None = None


class Source(Protocol):
    """Where documents come from."""

    @property
    def name(self) -> str:
        """For descriptions."""
        ...

    def documents(self, vocabulary: Base) -> Iterator[Document]:
        """All of them, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class Files:
    """Text files, a document each, and JSON lines (``.jsonl``), a document a line.

    Attributes:
      paths: files, or folders, which are searched in the order of names.
      field: of a JSON line.
      suffixes: of the files in folders that are read.
      largest: longer files in folders, in bytes, are left out: they are data.
    """

    paths: tuple[str, ...]
    field: str = "text"
    suffixes: tuple[str, ...] = (".py",)
    largest: int = 60_000

    @property
    def name(self) -> str:
        return " ".join(self.paths)

    def documents(self, vocabulary: Base) -> Iterator[Document]:
        """All of them.

        Raises:
          ValueError: there is no such file, or a line has no such field.
        """
        del vocabulary
        for path in self.paths:
            root = pathlib.Path(path).expanduser()
            if not root.exists():
                raise ValueError(f"no file {path}")
            for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
                if root.is_file() or self._wanted(file):
                    yield from self._of(file)

    def _wanted(self, file: pathlib.Path) -> bool:
        known = file.suffix in self.suffixes and file.is_file() and not file.is_symlink()
        return known and file.stat().st_size <= self.largest

    def _of(self, file: pathlib.Path) -> Iterator[Document]:
        if file.suffix != ".jsonl":
            yield Document(file.read_text(encoding="utf-8", errors="ignore"))
            return
        for number, line in enumerate(read_lines(epath.Path(file))):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file} line {number + 1} is no JSON: {error}") from None
            if not isinstance(row, dict) or not isinstance(row.get(self.field), str):
                raise ValueError(f"{file} line {number + 1} has no text in {self.field!r}")
            yield Document(row[self.field])


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token arrays (``.npz``): a stream ``tokens`` with EOS between documents, or the ``targets`` of pairs.

    ``scripts/build_text.py`` writes the one, ``scripts/build_debian.py`` the other.

    Attributes:
      path: the file.
    """

    path: str

    @property
    def name(self) -> str:
        return self.path

    def documents(self, vocabulary: Base) -> Iterator[Document]:
        """All of them.

        Raises:
          ValueError: there is no such file, or it holds something else.
        """
        file = pathlib.Path(self.path).expanduser()
        if not file.is_file():
            raise ValueError(f"no token arrays at {self.path}")
        with np.load(file) as data:
            if "tokens" in data:
                flat = data["tokens"]
                cuts = np.flatnonzero(flat == vocabulary.eos_id) + 1
            elif "targets" in data:
                flat, cuts = data["targets"], data["targets_offsets"][1:-1]
            else:
                raise ValueError(f"{self.path} has neither 'tokens' nor 'targets'")
        _check_ids(flat, vocabulary.size, self.path)  # before anything becomes a text
        for low, high in itertools.pairwise([0, *cuts.tolist(), len(flat)]):
            ids = flat[low:high]
            yield Document(vocabulary.decode(ids), ids)


@dataclasses.dataclass(frozen=True)
class SeqioTask:
    """A feature of a registered seqio task or mixture (its own vocabulary makes the ids).

    Attributes:
      task: as registered.
      split: which split; not one that is measured on.
      feature: what is read.
      modules: imported first, so that they register the task; ours and T5's by default.
      use_cached: read the task's cached examples, from seqio's cache directories.
    """

    task: str
    split: str = "train"
    feature: str = "targets"
    modules: tuple[str, ...] = seqio_batches.MODULES
    use_cached: bool = False

    @property
    def name(self) -> str:
        return f"{self.task} {self.split} {self.feature}"

    def documents(self, vocabulary: Base) -> Iterator[Document]:
        """All of them.

        Raises:
          ValueError: there is no such task or feature, or its vocabulary has another size.
        """
        task = seqio_batches.find(self.task, self.modules)
        if self.feature not in task.output_features:
            known = ", ".join(task.output_features)
            raise ValueError(f"task {self.task} has no feature {self.feature!r}, only {known}")
        size = task.output_features[self.feature].vocabulary.vocab_size
        if size != vocabulary.size:
            raise ValueError(
                f"task {self.task} has {size} pieces, the vocabulary has {vocabulary.size}"
            )
        data = task.get_dataset(
            None, self.split, use_cached=self.use_cached, shuffle=False, num_epochs=1
        )
        for row in data.as_numpy_iterator():
            ids = np.asarray(row[self.feature])
            yield Document(vocabulary.decode(ids), ids)


class Datastore(NamedTuple):
    """A finished datastore.

    Attributes:
      tokens, suffixes: int32 ``[Z, T]``, on disk.
      meta: what it was made of.
    """

    tokens: Int32[np.ndarray, "Z T"]
    suffixes: Int32[np.ndarray, "Z T"]
    meta: dict[str, Any]


def build(
    folder: str | os.PathLike,
    sources: Sequence[Source],
    vocabulary: Base,
    forbidden: Excluded,
    *,
    compared: Sequence[str] = (),
    parts: int = 1,
    limit: int | None = None,
    quiet: bool = False,
) -> Datastore:
    """Reads sources into a folder, which may hold what an interrupted build has left.

    Args:
      folder: where.
      sources: what to read, in this order.
      vocabulary: of the models that will draft from it.
      forbidden: documents that repeat any of it are left out: see `specjax.data.prompts.excluded`.
      compared: names of the sets that it is made of, for the description.
      parts: parts with an array each, which devices may share; a part is searched as a whole.
      limit: ids at most; the last document is cut.
      quiet: show no progress.

    Raises:
      ValueError: the folder holds a datastore or other things, a source cannot be read, there is
        nothing to read, or there are too many ids for so few parts.
    """
    if parts < 1 or (limit is not None and limit < 1):
        raise ValueError(f"parts and limit must be at least 1, got {parts} and {limit}")
    root = _emptied(pathlib.Path(folder).expanduser())
    bars = progress.Progress(
        *("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn()),
        progress.TimeElapsedColumn(), disable=quiet,
    )  # fmt: skip
    with bars:
        documents = _allowed(sources, vocabulary, forbidden)
        ends, count, left_out = _write_stream(root / _STREAM, documents, vocabulary, limit, bars)
        sizes = _write_parts(root, ends, parts)
        checks = [_checksum(root / _TOKENS), _write_suffixes(root, bars)]
    meta = {
        "version": VERSION,
        "vocabulary": vocabulary.fingerprint,
        "vocab_size": vocabulary.size,
        "eos_id": vocabulary.eos_id,
        "documents": len(ends),
        "tokens": count,
        "parts": sizes,
        "sources": [source.name for source in sources],
        "excluded": {"sets": list(compared), "digest": forbidden.digest, "documents": left_out},
        "crc32": dict(zip((_TOKENS, _SUFFIXES), checks, strict=True)),
    }
    runs.write_whole(epath.Path(root / _META), json.dumps(meta, indent=1) + "\n")
    (root / _STREAM).unlink()
    return load(root)


def load(folder: str | os.PathLike, *, check: bool = True) -> Datastore:
    """Opens a datastore; its arrays stay on disk until they are read.

    Args:
      folder: what `build` wrote.
      check: read it all once, to see that nothing has changed.

    Raises:
      ValueError: there is none, it is unfinished, damaged, or of another version.
    """
    root = pathlib.Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(f"no datastore at {folder}; build one with scripts/build_datastore.py")
    if not (root / _META).is_file():
        unfinished = any((root / name).exists() for name in (_STREAM, _TOKENS, _SUFFIXES))
        what = "is unfinished: build it again" if unfinished else f"is none: no {_META} in it"
        raise ValueError(f"the datastore at {folder} {what}")
    try:
        meta = json.loads((root / _META).read_text(encoding="utf-8"))
        version = meta["version"]
        shape = (len(meta["parts"]), max(meta["parts"]))
        checks = {name: meta["crc32"][name] for name in (_TOKENS, _SUFFIXES)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the datastore at {folder} is damaged: {_META}: {error}") from None
    if version != VERSION:
        raise ValueError(f"the datastore at {folder} is of version {version}, not {VERSION}")
    return Datastore(*(_array(root, name, shape, checks, check) for name in checks), meta)


def check_vocabulary(meta: Mapping[str, Any], vocabulary: Base) -> None:
    """Raises ValueError unless a datastore's ids mean what the vocabulary's do."""
    if meta["vocabulary"] != vocabulary.fingerprint:
        raise ValueError(
            f"the datastore's ids are another vocabulary's: it was built with one of "
            f"{meta['vocab_size']} pieces, the target's has {vocabulary.size}"
        )


def sort(tokens: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
    """The places of a stream, in the order of what stands from there on; the shorter comes first."""
    try:
        from pydivsufsort import divsufsort  # needed to build only
    except ImportError:
        raise ValueError("a datastore needs pydivsufsort: pip install pydivsufsort") from None

    # It sorts bytes: those of the ids, highest first, of which it keeps the beginnings of ids.
    return divsufsort(np.ascontiguousarray(tokens, np.int32)).astype(np.int32)


def closed(ids: np.ndarray, eos_id: int) -> Int32[np.ndarray, " T"]:
    """A document's ids with a separator behind every EOS and behind the last."""
    ids = np.asarray(ids, np.int32)
    found = np.insert(ids, np.flatnonzero(ids == eos_id) + 1, SEPARATOR)
    if len(found) and found[-1] == SEPARATOR:
        return found
    return np.append(found, np.int32(SEPARATOR))


def _check_ids(ids: np.ndarray, size: int, where: str) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < size):
        outside = ids[(ids < 0) | (ids >= size)][0]
        raise ValueError(f"{where}: id {outside} is none of the vocabulary's {size}")


def _emptied(root: pathlib.Path) -> pathlib.Path:
    """The folder without what an interrupted build has left."""
    root.mkdir(parents=True, exist_ok=True)
    if (root / _META).exists():
        raise ValueError(f"{root} holds a datastore already; remove it, or choose another folder")
    known = {_STREAM, _TOKENS, _SUFFIXES}
    files = list(root.iterdir())
    # A build makes the stream first and removes it last: without it these files are somebody else's.
    ours = (root / _STREAM).exists()
    partial = lambda name: name.startswith("unfinished-") and name.endswith(_META)  # noqa: E731
    others = [f.name for f in files if not (ours and (f.name in known or partial(f.name)))]
    if others:
        raise ValueError(f"{root} holds other things ({others[0]}); choose another folder")
    for file in files:
        file.unlink()
    return root


def _allowed(
    sources: Sequence[Source], vocabulary: Base, forbidden: Excluded
) -> Iterator[tuple[str, np.ndarray | None]]:
    """(source, ids), or None for ids where a document repeats what must not enter."""
    for source in sources:
        for document in source.documents(vocabulary):
            if forbidden.touches(document.text):
                yield source.name, None
            elif document.ids is None:
                ids = [*vocabulary.encode(document.text), vocabulary.eos_id]
                yield source.name, np.asarray(ids if len(ids) > 1 else [], np.int32)
            else:
                yield source.name, np.asarray(document.ids)


def _write_stream(
    file: pathlib.Path,
    documents: Iterable[tuple[str, np.ndarray | None]],
    vocabulary: Base,
    limit: int | None,
    bars: progress.Progress,
) -> tuple["array.array[int]", int, int]:
    """(where documents end in the stream, separators included; ids; documents left out)."""
    ends, end, count, left_out = array.array("q"), 0, 0, 0
    bar = bars.add_task("reading ids", total=limit)
    with file.open("wb") as out:
        for name, ids in documents:
            if ids is None:
                left_out += 1
                continue
            _check_ids(ids, vocabulary.size, name)
            ids = ids if limit is None else ids[: limit - count]
            if not len(ids):
                continue
            row = closed(ids, vocabulary.eos_id)
            row.tofile(out)
            end, count = end + len(row), count + len(ids)
            ends.append(end)
            bars.advance(bar, len(ids))
            if count == limit:
                break
    if not ends:
        raise ValueError(f"there is nothing to read ({left_out} documents were left out)")
    bars.update(bar, total=count)
    return ends, count, left_out


def _write_parts(root: pathlib.Path, ends: "array.array[int]", parts: int) -> list[int]:
    """Writes tokens.npy, cut between documents; returns the parts' sizes."""
    places = np.frombuffer(ends, np.int64)
    total = int(places[-1])
    near = np.searchsorted(places, [total * i // parts for i in range(1, parts)])
    cuts = [0, *places[near].tolist(), total]
    sizes = [high - low for low, high in itertools.pairwise(cuts)]
    if 0 in sizes:
        raise ValueError(f"{len(ends)} documents do not make {parts} parts")
    if max(sizes) > LARGEST_PART:
        raise ValueError(f"a part of {max(sizes)} ids is too large: make more than {parts} parts")
    stream = np.memmap(root / _STREAM, np.int32, "r")
    shape = (parts, max(sizes))
    tokens = np.lib.format.open_memmap(root / _TOKENS, "w+", np.int32, shape)
    for row, size, start in zip(tokens, sizes, cuts, strict=False):
        row[:size] = stream[start : start + size]
        row[size:] = SEPARATOR
    tokens.flush()
    return sizes


def _write_suffixes(root: pathlib.Path, bars: progress.Progress) -> int:
    """Writes suffixes.npy; returns its checksum."""
    tokens = np.load(root / _TOKENS, mmap_mode="r")
    suffixes = np.lib.format.open_memmap(root / _SUFFIXES, "w+", np.int32, tokens.shape)
    for row, part in bars.track(
        zip(suffixes, tokens, strict=True), total=len(tokens), description="sorting parts"
    ):
        row[:] = sort(part)
    suffixes.flush()
    return _checksum(root / _SUFFIXES)


def _checksum(file: pathlib.Path) -> int:
    found = 0
    with file.open("rb") as data:
        while chunk := data.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def _array(
    root: pathlib.Path, name: str, shape: tuple[int, int], checks: Mapping[str, int], check: bool
) -> np.ndarray:
    try:
        found = np.load(root / name, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"the datastore at {root} is damaged: {name}: {error}") from None
    if found.dtype != np.int32 or found.shape != shape:
        said = f"{found.dtype} {found.shape}, not int32 {shape}"
        raise ValueError(f"the datastore at {root} is damaged: {name} is {said}")
    if check and _checksum(root / name) != checks[name]:
        raise ValueError(f"the datastore at {root} is damaged: {name} is not what was written")
    return found
