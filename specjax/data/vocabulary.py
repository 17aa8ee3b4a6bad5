"""SentencePiece vocabularies without TensorFlow, and batches of padded ids.

Ids follow T5: pad 0, EOS 1, UNK 2.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
from jaxtyping import Int32

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2

# Never UNK, however rare: printable ASCII, German letters, quotes and dashes.
_REQUIRED_CHARACTERS = "".join(map(chr, range(33, 127))) + "ÄÖÜäöüß»«„“”‚‘’–—§°µ²³©®"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece model with T5's special ids.

    Attributes:
      processor: The loaded SentencePiece model.
    """

    processor: sentencepiece.SentencePieceProcessor
    pad_id: int = PAD_ID
    eos_id: int = EOS_ID
    unk_id: int = UNK_ID

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Loads a `.model` file.

        Args:
          path: SentencePiece model.

        Returns:
          The vocabulary.

        Raises:
          FileNotFoundError: There is no such file.
          ValueError: Its special ids are not T5's.
        """
        path = pathlib.Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no SentencePiece model at {path}")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        found = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise ValueError(f"{path}: pad, EOS, UNK are {found}, not {PAD_ID, EOS_ID, UNK_ID}")
        return cls(processor)

    @property
    def size(self) -> int:
        """Number of pieces; a model's embedding may have more rows."""
        return self.processor.get_piece_size()

    def pieces(self) -> tuple[str, ...]:
        """All pieces by id, to tell whether draft and target speak the same vocabulary."""
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
