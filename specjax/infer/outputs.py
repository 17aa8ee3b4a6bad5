"""Predictions on disk: parts that survive an interruption, one file at the end, T5X's names.

A part holds consecutive examples and appears whole (written beside, then renamed). A rerun decodes
what is in no part. When all parts are there, they are joined to
``<task>-predict.jsonl-SSSSS-of-NNNNN`` and removed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from etils import epath

from specjax.data.sources import read_lines
from specjax.runs import write_whole


@dataclasses.dataclass(frozen=True)
class Outputs:
    """One shard's predictions.

    Attributes:
      folder: local or ``gs://``.
      task: the task's name.
      count: how many examples this shard has.
      shard, num_shards: which shard of how many.
      part_size: examples per part: what an interruption can cost at most, per row decoded.
    """

    folder: str
    task: str
    count: int
    shard: int = 0
    num_shards: int = 1
    part_size: int = 64

    @property
    def final(self) -> epath.Path:
        """The finished file."""
        return self._root / f"{self.task}-predict.jsonl-{self._shard}"

    @property
    def parts(self) -> epath.Path:
        """Where parts lie until all are there."""
        return self._root / f"tmp-{self.task}-{self._shard}"

    @property
    def _root(self) -> epath.Path:
        return epath.Path(self.folder).expanduser()

    @property
    def _shard(self) -> str:
        return f"{self.shard:05d}-of-{self.num_shards:05d}"

    def missing(self) -> list[int]:
        """Places (0 .. count - 1) of the examples that are in no finished part."""
        if self.final.exists():
            return []
        return [
            i for n in range(self._number) if not self._part(n).exists() for i in self._range(n)
        ]

    def collect(self, found: Iterator[tuple[int, dict]]) -> None:
        """Takes (place, line) in any order; writes a part as soon as it is complete."""
        waiting: dict[int, dict[int, dict]] = {}
        self.parts.mkdir(parents=True, exist_ok=True)
        for place, line in found:
            number = place // self.part_size
            part = waiting.setdefault(number, {})
            part[place] = line
            if len(part) == len(self._range(number)):
                self._write(self._part(number), [part[i] for i in self._range(number)])
                del waiting[number]

    def join(self) -> epath.Path:
        """Makes the final file of all parts.

        Raises:
          ValueError: a part is not there.
        """
        if not self.final.exists():
            names = [self._part(n) for n in range(self._number)]
            absent = [name.name for name in names if not name.exists()]
            if absent:
                raise ValueError(f"{self.parts}: no {', '.join(absent)}")
            write_whole(self.final, "".join(n.read_text(encoding="utf-8") for n in names))
        if self.parts.exists():
            self.parts.rmtree()
        return self.final

    def read(self) -> list[dict[str, Any]]:
        """The finished lines, in input order."""
        return [json.loads(line) for line in read_lines(self.final)]

    @property
    def _number(self) -> int:
        return -(-self.count // self.part_size)

    def _range(self, number: int) -> range:
        return range(number * self.part_size, min((number + 1) * self.part_size, self.count))

    def _part(self, number: int) -> epath.Path:
        return self.parts / f"part_{number:06d}.jsonl"

    def _write(self, path: epath.Path, lines: list[dict]) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_whole(path, text)
