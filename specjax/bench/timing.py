"""Timing: compile time apart, warm-up, interleaved repeats, medians with quartiles.

A machine drifts (clock, other users), so calls that are to be compared take turns, and a ratio is the
median of the ratios within each turn.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Samples(NamedTuple):
    """Repeated measurements of one quantity, in the order they were taken."""

    values: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.values, [25, 75])
        return float(low), float(high)

    def __truediv__(self, other: "Samples | float") -> "Samples":
        """Paired ratios, turn by turn."""
        return Samples(self.values / (other.values if isinstance(other, Samples) else other))

    def __mul__(self, factor: float) -> "Samples":
        return Samples(self.values * factor)

    def text(self, digits: int = 2) -> str:
        low, high = self.quartiles
        return f"{self.median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def compiled(function: Callable, *args, **options) -> tuple[Callable, float]:
    """Compiles ahead of time.

    Args:
      function: to be jitted, or jitted already (then without ``options``).
      *args: example arguments.
      **options: for `jax.jit`.

    Returns:
      The compiled function, which takes the traced arguments only, and the seconds that tracing and
      compiling took.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function, **options)
    began = time.perf_counter()
    return jitted.lower(*args).compile(), time.perf_counter() - began


def once(call: Callable[[], Any]) -> float:
    """Seconds of one call, until its result is there."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def interleaved(
    calls: Mapping[str, Callable[[], Any]], repeats: int = 7, warmup: int = 1
) -> dict[str, Samples]:
    """Times calls in turns, in an order that rotates.

    Args:
      calls: what to time, by name; each returns arrays to wait for.
      repeats: turns that count.
      warmup: turns before them that do not.

    Returns:
      Seconds per call, by name.

    Raises:
      ValueError: no repeats.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    names, seconds = list(calls), {name: [] for name in calls}
    for turn in range(warmup + repeats):
        shift = turn % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            took = once(calls[name])
            if turn >= warmup:
                seconds[name].append(took)
    return {name: Samples(np.array(values)) for name, values in seconds.items()}
