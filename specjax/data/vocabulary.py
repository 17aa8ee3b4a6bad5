"""SentencePiece and byte vocabularies without TensorFlow, and batches of padded ids.

Ids follow T5: pad 0, EOS 1, UNK 2. T5's own vocabulary is a model of 32,000 pieces with 100
sentinels behind them, mT5's one of 250,100 that has its sentinels inside; ByT5's ids are bytes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import sentencepiece
from jaxtyping import Int32

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2

# Never UNK, however rare: printable ASCII, German letters, quotes and dashes.
_REQUIRED_CHARACTERS = "".join(map(chr, range(33, 127))) + "ÄÖÜäöüß»«„“”‚‘’–—§°µ²³©®"


SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.model")
T5_EXTRA_IDS = 100
BYTE_OFFSET = 3
BYTE_EXTRA_IDS = 125  # ByT5's table has 384 rows, of which 259 are used


class Stream(Protocol):
    """Text that comes piece by piece: all pieces together are what `Base.decode` makes of all ids."""

    def push(self, ids: Iterable[int] | np.ndarray) -> str:
        """Takes the next ids, and gives what text they complete."""
        ...

    def end(self) -> str:
        """Gives what was held back."""
        ...


class Base(abc.ABC):
    """What every vocabulary can do.

    Attributes:
      pad_id: Padding; also the start token.
      eos_id: End of a text.
      unk_id: What is not in the vocabulary.
    """

    pad_id: int
    eos_id: int
    unk_id: int

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of pieces; a model's embedding may have more rows."""

    @abc.abstractmethod
    def pieces(self) -> tuple[str, ...]:
        """All pieces by id."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without EOS."""

    def inputs(self, text: str) -> list[int]:
        """Ids of a text as a model reads it: an encoder's ends with EOS, a prompt goes on."""
        return [*self.encode(text), self.eos_id]

    def shorten(self, ids: np.ndarray, length: int) -> np.ndarray:
        """What of an input's ids is read where there are too many: see `keep_eos`."""
        return keep_eos(ids, length)

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text up to the first EOS."""

    def stream(self) -> Stream:
        """Turns ids that come one after the other into text that comes piece by piece."""
        return Grown(self)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two vocabularies whose ids mean the same: same pieces, not only as many."""
        content = json.dumps([self.pad_id, self.eos_id, self.unk_id, *self.pieces()])
        return hashlib.sha256(content.encode()).hexdigest()

    def batch(
        self, texts: Sequence[str], length: int, *, truncate: bool = False
    ) -> tuple[Int32[np.ndarray, "B L"], Int32[np.ndarray, " B"]]:
        """Encodes texts, each with its EOS, into padded rows.

        Args:
          texts: B texts; an empty one is EOS alone.
          length: Row length L.
          truncate: Whether to cut over-long texts; EOS stays last.

        Returns:
          Ids [B, L] and lengths with EOS [B].

        Raises:
          ValueError: A text does not fit and `truncate` is off, or `length` is below 1.
        """
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        rows = [self.encode(text) for text in texts]
        ids = np.full((len(rows), length), self.pad_id, np.int32)
        lengths = np.zeros(len(rows), np.int32)
        for i, row in enumerate(rows):
            if len(row) >= length and not truncate:
                raise ValueError(f"text {i} has {len(row) + 1} ids with EOS, the limit is {length}")
            row = [*row[: length - 1], self.eos_id]
            ids[i, : len(row)] = row
            lengths[i] = len(row)
        return ids, lengths


class Grown:
    """A `Stream` for any vocabulary whose longer texts begin with their shorter ones.

    It decodes the whole text again with each piece. A character whose bytes are not all there decodes
    to U+FFFD, or to nothing: what ends in the former is held back.
    """

    def __init__(self, vocabulary: Base):
        self._vocabulary, self._ids, self._given = vocabulary, [], 0

    def push(self, ids: Iterable[int] | np.ndarray) -> str:
        """Takes the next ids, and gives what text they complete; nothing behind EOS."""
        self._ids.extend(int(i) for i in ids)
        return self._give(self._vocabulary.decode(self._ids).rstrip("\ufffd"))

    def end(self) -> str:
        """Gives what was held back."""
        return self._give(self._vocabulary.decode(self._ids))

    def _give(self, text: str) -> str:
        new, self._given = text[self._given :], max(self._given, len(text))
        return new


@dataclasses.dataclass(frozen=True)
class Vocabulary(Base):
    """A SentencePiece model with T5's special ids.

    Attributes:
      processor: The loaded SentencePiece model.
    """

    processor: sentencepiece.SentencePieceProcessor
    pad_id: int = PAD_ID
    eos_id: int = EOS_ID
    unk_id: int = UNK_ID

    @classmethod
    def load(cls, path: str | os.PathLike[str], extra_ids: int = 0) -> Vocabulary:
        """Loads a `.model` file.

        Args:
          path: SentencePiece model.
          extra_ids: Sentinels to add behind its pieces, `<extra_id_0>` last, as T5 and seqio do:
            100 for T5's 32,000 pieces, none for mT5, whose model has them inside.

        Returns:
          The vocabulary.

        Raises:
          FileNotFoundError: There is no such file.
          ValueError: Its special ids are not T5's, or it has sentinels and more are asked for.
        """
        path = pathlib.Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no SentencePiece model at {path}")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        found = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise ValueError(f"{path}: pad, EOS, UNK are {found}, not {PAD_ID, EOS_ID, UNK_ID}")
        return cls(_add_sentinels(processor, extra_ids, path) if extra_ids else processor)

    @property
    def size(self) -> int:
        """Number of pieces; a model's embedding may have more rows."""
        return self.processor.get_piece_size()

    def pieces(self) -> tuple[str, ...]:
        """All pieces by id."""
        return tuple(self.processor.id_to_piece(i) for i in range(self.size))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without EOS."""
        return self.processor.encode(text)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text up to the first EOS; padding is skipped, an id outside becomes UNK as in seqio."""
        kept = []
        for token in (int(i) for i in ids):
            if token == self.eos_id:
                break
            if token != self.pad_id:
                kept.append(token if 0 <= token < self.size else self.unk_id)
        return self.processor.decode(kept)


@dataclasses.dataclass(frozen=True)
class Bytes(Base):
    """ByT5's vocabulary: byte b of the UTF-8 text is id b + 3. It needs no file.

    Attributes:
      extra_ids: Further ids from 259 on. They have no text: encoding never gives one, decoding
        skips them, as in seqio.

    References:
      Xue et al. 2022 (2105.13626), section 3.
    """

    extra_ids: int = 0
    pad_id: int = PAD_ID
    eos_id: int = EOS_ID
    unk_id: int = UNK_ID

    @property
    def size(self) -> int:
        """Number of ids; the model's embedding has 384 rows."""
        return BYTE_OFFSET + 256 + self.extra_ids

    def pieces(self) -> tuple[str, ...]:
        """All ids' names."""
        names = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        return (*names, *(f"<extra_id_{i}>" for i in range(self.extra_ids)))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without EOS."""
        return [byte + BYTE_OFFSET for byte in text.encode()]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text up to the first EOS; special ids and what is no UTF-8 are skipped."""
        kept = bytearray()
        for token in (int(i) for i in ids):
            if token == self.eos_id:
                break
            if BYTE_OFFSET <= token < BYTE_OFFSET + 256:
                kept.append(token - BYTE_OFFSET)
        return kept.decode(errors="ignore")


def keep_eos(ids: np.ndarray, length: int) -> np.ndarray:
    """The first ``length`` ids, the last of which is the EOS of all of them."""
    return ids if len(ids) <= length else np.append(ids[: length - 1], ids[-1])


def of_folder(path: str | os.PathLike[str]) -> Base:
    """The vocabulary that a Hugging Face folder describes.

    Args:
      path: Folder with `spiece.model` (or `sentencepiece.model`), or of a ByT5, which has no file.

    Returns:
      The vocabulary, with the sentinels that its tokenizer has.

    Raises:
      ValueError: There is none.
    """
    folder = pathlib.Path(path).expanduser()
    config, tokenizer = (
        entries(folder / f"{name}.json") for name in ("config", "tokenizer_config")
    )
    kind = tokenizer.get("tokenizer_class") or config.get("tokenizer_class") or ""
    extra_ids = tokenizer.get("extra_ids")
    if kind.startswith("ByT5"):
        return Bytes(BYTE_EXTRA_IDS if extra_ids is None else extra_ids)
    file = next((folder / n for n in SENTENCEPIECE_FILES if (folder / n).is_file()), None)
    if file is None:
        raise ValueError(f"no {' and no '.join(SENTENCEPIECE_FILES)} in {folder}, nor a ByT5")
    vocabulary = Vocabulary.load(file)
    if _has_sentinels(vocabulary.processor):
        return vocabulary
    if extra_ids is None:
        extra_ids = T5_EXTRA_IDS if config.get("model_type") == "t5" else 0
    return Vocabulary.load(file, extra_ids)


def check_same(target: Base, draft: Base) -> None:
    """Refuses a draft whose ids mean something else than its target's.

    Args:
      target: The target's vocabulary.
      draft: The draft's.

    Raises:
      ValueError: They differ; the first difference is said.
    """
    if target.fingerprint == draft.fingerprint:
        return
    pairs = enumerate(zip(draft.pieces(), target.pieces(), strict=False))
    unlike = (f"id {i} is {a!r}, not {b!r}" for i, (a, b) in pairs if a != b)
    where = next(unlike, f"it has {draft.size} pieces, not {target.size}")
    raise ValueError(f"the draft's vocabulary is not the target's: {where}")


def _has_sentinels(processor: sentencepiece.SentencePieceProcessor) -> bool:
    names = ("<extra_id_0>", "▁<extra_id_0>")
    return any(processor.piece_to_id(name) != processor.unk_id() for name in names)


def _add_sentinels(
    processor: sentencepiece.SentencePieceProcessor, count: int, path: pathlib.Path
) -> sentencepiece.SentencePieceProcessor:
    """The model with user-defined pieces behind its own, exactly as seqio adds them."""
    if _has_sentinels(processor):
        raise ValueError(f"{path} has sentinels already: load it with no extra ids")
    # Needed here alone, and it needs protobuf.
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    for i in reversed(range(count)):
        kind = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
        model.pieces.add(piece=f"▁<extra_id_{i}>", score=0.0, type=kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def entries(file: pathlib.Path) -> dict:
    """A JSON object; nothing where there is no file."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} holds no JSON object: {error}") from None


def train(lines: Iterable[str], path: pathlib.Path, size: int) -> None:
    """Trains a unigram model with T5's special ids; the same lines give the same bytes.

    Args:
      lines: Training text.
      path: Model file to write.
      size: Number of pieces.
    """
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            model_type="unigram",
            vocab_size=size,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            byte_fallback=False,
            character_coverage=0.9995,
            required_chars=_REQUIRED_CHARACTERS,
            max_sentence_length=65536,
            # Sampling and threads would make it differ from run to run.
            shuffle_input_sentence=False,
            num_threads=1,
            minloglevel=2,
        )
