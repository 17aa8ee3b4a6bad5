"""Pictures that lay methods side by side. See `specjax.analysis.plots` for the conventions."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specjax.analysis.plots import COLORS, GREY, STYLE, Rows, save

MARKERS = "osD^vPX*"


def methods(rows: Rows, path: str | Path) -> Figure:
    """Draws speed-up and tokens per step of every method's chosen setting, a line of dots per task.

    Args:
      rows: rows with `task`, `method`, `temperature`, `batch_size`, `chosen`, `speedup`,
        `speedup_quartiles` and `block_efficiency`; only chosen ones of the smallest batch are drawn.
      path: the file to write.

    Returns:
      The figure.

    Raises:
      ValueError: no row was chosen.
    """
    smallest = min((row["batch_size"] for row in rows), default=1)
    rows = [row for row in rows if row["chosen"] and row["batch_size"] == smallest]
    if not rows:
        raise ValueError("no row with a chosen setting to draw")
    temperatures, tasks = _unique(rows, "temperature"), _unique(rows, "task")
    names = _unique(rows, "method")
    with matplotlib.rc_context(STYLE):
        height = 1.2 + 0.22 * len(temperatures) * len(tasks) * max(len(names), 2) ** 0.75
        figure = Figure(figsize=(9.5, height), layout="constrained")
        panels = figure.subplots(len(temperatures), 2, squeeze=False, sharey=True, sharex="col")
        for line, temperature in zip(panels, temperatures, strict=True):
            group = [row for row in rows if row["temperature"] == temperature]
            _dots(line[0], group, tasks, names, "speedup", spread=True)
            _dots(line[1], group, tasks, names, "block_efficiency", spread=False)
            line[0].set_ylabel(f"T = {temperature:g}")
        for axes in panels[-1]:  # after all dots: a limit ends the scaling of the shared axis
            axes.set_xlim(left=0)
        panels[-1][0].set_xlabel("speed-up over plain decoding")
        panels[-1][1].set_xlabel("tokens per step, τ")
        handles = [
            Line2D([], [], color=color, marker=marker, linestyle="", markersize=6, label=name)
            for name, color, marker in zip(names, _colors(names), _markers(names), strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 4))
        return save(figure, path)


def _dots(axes: Axes, rows: Rows, tasks: list, names: list, key: str, spread: bool) -> None:
    axes.axvline(1, color=GREY, linewidth=1, zorder=1)
    for name, color, marker in zip(names, _colors(names), _markers(names), strict=True):
        aside = (names.index(name) - (len(names) - 1) / 2) * 0.7 / max(len(names), 1)
        for row in (row for row in rows if row["method"] == name):
            y = tasks.index(row["task"]) + aside
            if spread:
                axes.plot(row["speedup_quartiles"], [y, y], color=color, linewidth=2, alpha=0.5)
            axes.plot(row[key], y, color=color, marker=marker, markersize=6)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_ylim(len(tasks) - 0.5, -0.5)


def sweep(
    rows: Rows,
    path: str | Path,
    x: str,
    y: str,
    line: str,
    labels: tuple[str, str],
    name: Callable[[object], str] = str,
    bottom: float = 0.0,
) -> Figure:
    """Draws one quantity over another, a line per value of a third, a panel per task.

    Args:
      rows: rows with `task` and the three quantities.
      path: the file to write.
      x, y, line: their names in the rows.
      labels: of the two axes.
      name: of a line, from its value.
      bottom: where the vertical axis begins.

    Returns:
      The figure.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("no rows to draw")
    tasks, lines = _unique(rows, "task"), _unique(rows, line)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 4 * len(tasks), 3.8), layout="constrained")
        panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
        for axes, task in zip(panels, tasks, strict=True):
            for value, color, marker in zip(lines, _colors(lines), _markers(lines), strict=True):
                mine = [row for row in rows if row["task"] == task and row[line] == value]
                mine = sorted(mine, key=lambda row: row[x])
                points = [row[x] for row in mine], [row[y] for row in mine]
                axes.plot(*points, color=color, marker=marker, markersize=5, label=name(value))
            axes.set_title(task)
            axes.set_xlabel(labels[0])
            ticks = sorted({row[x] for row in rows})
            if np.min(ticks) > 0 and np.max(ticks) / np.min(ticks) > 20:
                axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panels[0].set_ylabel(labels[1])
        panels[0].set_ylim(bottom=bottom)
        if len(lines) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center",
                          ncols=min(len(lines), 5))  # fmt: skip
        return save(figure, path)


def _unique(rows: Rows, key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def _colors(names: Sequence) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(names))]


def _markers(names: Sequence) -> list[str]:
    return [MARKERS[i % len(MARKERS)] for i in range(len(names))]
