"""The held-out examples that ship with the package; no TensorFlow, no corpus needed."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json

TASKS = ("debian_ende", "debian_synopsis")
HALVES = ("calibration", "report")


@dataclasses.dataclass(frozen=True)
class Example:
    """One held-out example.

    Attributes:
      inputs: Input text with the task's prefix.
      targets: Reference output.
      source_package: Debian source package it comes from.
      half: "calibration" (to tune and choose with) or "report" (to report on).
    """

    inputs: str
    targets: str
    source_package: str
    half: str


def load_heldout(task: str, half: str | None = None) -> list[Example]:
    """Loads the shipped sample of a task.

    Args:
      task: "debian_ende" or "debian_synopsis".
      half: "calibration", "report", or None for both.

    Returns:
      Examples in file order, the calibration half first.

    Raises:
      ValueError: There is no such task or half.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}, expected one of {', '.join(TASKS)}")
    if half is not None and half not in HALVES:
        raise ValueError(f"unknown half {half!r}, expected one of {', '.join(HALVES)}")
    name = f"{task.removeprefix('debian_')}-heldout.jsonl"
    file = importlib.resources.files("specjax") / "assets" / "debian" / name
    with file.open(encoding="utf-8") as lines:
        examples = [Example(**json.loads(line)) for line in lines]
    return [example for example in examples if half in (None, example.half)]
