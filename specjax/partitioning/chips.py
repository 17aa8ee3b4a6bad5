"""TPU chips and slices by name: what a program compiled for them is measured against.

Sources: Cloud TPU documentation, pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e"
(docs.cloud.google.com/tpu/docs/v4 and so on): peak bfloat16 FLOP/s, memory, its bandwidth, and
interconnect per chip. Of a v4 chip's 32 GiB libtpu leaves 30.75 to a program (it says so when one does not
fit); of the others the whole memory is taken here.
"""

import re
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One chip.

    Attributes:
      name: v4, v5e, v5p or v6e.
      flops: bfloat16 operations per second.
      memory: bytes of HBM that a program may use.
      bandwidth: of HBM, bytes per second.
      interconnect: bytes per second to its neighbours together.
      cores_in_name: whether a slice's number counts cores (two a chip) instead of chips.
      shapes: chips of a slice to its extent.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    interconnect: float
    cores_in_name: bool
    shapes: dict[int, tuple[int, ...]]


_CUBES = {
    1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4),
    128: (4, 4, 8), 256: (4, 8, 8),
}  # fmt: skip
_SQUARES = {
    1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
    256: (16, 16),
}  # fmt: skip

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, int(30.75 * GIB), 1228e9, 300e9, True, _CUBES),
        Chip("v5e", 197e12, 16 * GIB, 819e9, 200e9, False, _SQUARES),
        Chip("v5p", 459e12, 95 * GIB, 2765e9, 600e9, True, _CUBES),
        Chip("v6e", 918e12, 32 * GIB, 1640e9, 448e9, False, _SQUARES),
    )
}


class Slice(NamedTuple):
    """Some chips that are wired together.

    Attributes:
      name: as Cloud TPU calls it.
      chip: what it is made of.
      chips: how many.
    """

    name: str
    chip: Chip
    chips: int

    @property
    def topology(self) -> str:
        """libtpu's name, e.g. ``v4:2x2x1``."""
        extent = "x".join(str(n) for n in self.chip.shapes[self.chips])
        return f"{self.chip.name}:{extent}"

    @property
    def larger(self) -> list["Slice"]:
        """This slice and all larger ones of the same chip."""
        return [of_chips(self.chip, n) for n in self.chip.shapes if n >= self.chips]


def of_chips(chip: Chip, chips: int) -> Slice:
    """The slice of so many chips."""
    return Slice(f"{chip.name}-{chips * (1 + chip.cores_in_name)}", chip, chips)


def parse(name: str) -> Slice:
    """A slice by its name: ``v4-8`` has four chips (v4 and v5p count cores), ``v5e-8`` eight.

    Raises:
      ValueError: there is no such slice; the known ones are said.
    """
    found = re.fullmatch(r"(v\d+[a-z]?)-(\d+)", name)
    chip = CHIPS.get(found[1]) if found else None
    if chip is None:
        raise ValueError(f"unknown slice {name!r}; slices are of {', '.join(CHIPS)}, e.g. v4-8")
    for chips in chip.shapes:
        if of_chips(chip, chips).name == name:
            return of_chips(chip, chips)
    known = ", ".join(of_chips(chip, n).name for n in chip.shapes)
    raise ValueError(f"unknown slice {name!r}; of {chip.name} there are {known}")
