"""Pictures of measurements, drawn from plain rows of a report into PNG files; and of masks.

Every function takes the data and a path, writes the file and returns the figure. Figures
are made without pyplot, so that no global state is kept and no display is needed. Values
that are None, or missing from a row, are left out of the picture.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#777777"

# From the top of a row of the trace to its bottom.
LANES = {
    "target encoder": "#56B4E9",
    "draft encoder": "#E69F00",
    "draft decoder": "#D55E00",
    "target decoder": "#0072B2",
}

STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.10,
    "font.size": 10,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def speedup_against_gamma(rows: Rows, path: str | Path) -> Figure:
    """Draws measured and predicted speed-up over γ, a panel per task and temperature.

    Args:
        rows: rows with `task`, `temperature`, `gamma`, `batch_size` and `method`, measured
            `speedup` and `speedup_quartiles`, `predicted_speedup`, `predicted_from_alpha`.
            Rows with γ = 0 belong to every method; those without a γ are left out.
        path: the file to write.

    Returns:
        The figure.

    Raises:
        ValueError: no row has a γ and a speed-up.
    """
    rows = _having(rows, "gamma", "speedup")
    keys = _series_keys(rows)
    colors = dict(zip(keys, _cycle(len(keys)), strict=True))
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(rows)
        for axes, group in panels:
            axes.axhline(1, color=GREY, linewidth=1, zorder=1)
            for index, key in enumerate(keys):
                # Moved aside a little, so that quartile bars do not hide each other.
                aside = 0.09 * (index - (len(keys) - 1) / 2)
                _draw_speedup(axes, _series(group, key), colors[key], aside)
            axes.set_xticks(sorted({row["gamma"] for row in rows}))
        for axes, _ in panels:  # after all lines: a limit ends the scaling of the shared axis
            axes.set_ylim(bottom=0)
        _label_outer(panels, "drafted tokens per block, γ", "speed-up over plain decoding")
        handles = _speedup_legend(rows, {_name(key, keys): colors[key] for key in keys})
        columns = len({row["temperature"] for row in rows})
        figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, 2))
        return save(figure, path)


def acceptance_by_position(rows: Rows, path: str | Path) -> Figure:
    """Draws the chance that a tested position is accepted, a line per γ.

    Acceptance does not depend on the batch, so only the smallest batch size is drawn.

    Args:
        rows: one method's rows with `task`, `temperature`, `gamma`, `batch_size` and
            `accepted_by_position`, whose "conditional" entry holds γ rates.
        path: the file to write.

    Returns:
        The figure.

    Raises:
        ValueError: no row has rates.
    """
    rows = [row for row in _having(rows, "gamma", "accepted_by_position") if row["gamma"] > 0]
    smallest = min((row["batch_size"] for row in rows), default=None)
    rows = _having([row for row in rows if row["batch_size"] == smallest], "gamma")
    gammas = sorted({row["gamma"] for row in rows})
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(gammas)))
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(rows)
        for axes, group in panels:
            # Short lines are drawn last, since long ones would hide them.
            for row in sorted(group, key=lambda row: -row["gamma"]):
                rates = row["accepted_by_position"]["conditional"]
                points = [(i, rate) for i, rate in enumerate(rates, 1) if rate is not None]
                shade = shades[gammas.index(row["gamma"])]
                axes.plot(*_columns(points), "o-", markersize=4, color=shade)
            axes.set_xticks(range(1, gammas[-1] + 1))
            axes.set_ylim(0, 1.03)
        _label_outer(panels, "position in the block", "accepted / tested")
        handles = [
            Line2D([], [], color=shade, marker="o", markersize=4, label=f"γ = {gamma}")
            for gamma, shade in zip(gammas, shades, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        return save(figure, path)


def trace(rounds: Rows, path: str | Path) -> Figure:
    """Draws when each model ran, a group of lanes per γ on one time axis.

    Args:
        rounds: one entry per γ, drawn from the top: `gamma` (0 is plain decoding),
            `events` with `lane` (a key of `LANES`), `start_ms` and `end_ms`, and,
            optionally, the number of `tokens` emitted.
        path: the file to write.

    Returns:
        The figure.

    Raises:
        ValueError: there are no events, or an event's lane is unknown.

    References:
        Leviathan et al., arXiv:2211.17192, Fig. 5.
    """
    lanes = [_lanes(entry["events"]) for entry in rounds]
    if not any(lanes):
        raise ValueError("nothing to draw: no round has an event")
    last = max(event["end_ms"] for entry in rounds for event in entry["events"])
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False}):
        height = 0.9 + 0.24 * sum(len(used) + 1 for used in lanes)
        figure = Figure(figsize=(11, height), layout="constrained")
        axes = figure.subplots()
        top, centres = 0.0, []
        for entry, used in zip(rounds, lanes, strict=True):
            _draw_round(axes, entry, used, top, last)
            centres.append(top + len(used) / 2)
            top += len(used) + 1
        axes.set_yticks(centres, [_round_name(entry) for entry in rounds])
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(0, last * 1.16), ylim=(top - 0.6, -0.4), xlabel="time (ms)")
        axes.spines["bottom"].set_bounds(0, last)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= last])
        handles = [Patch(color=LANES[lane], label=lane) for lane in LANES if lane in sum(lanes, [])]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        return save(figure, path)


def bandwidth(rows: Rows, path: str | Path) -> Figure:
    """Draws plain decoding's step time beside the time its memory traffic needs at least.

    Args:
        rows: rows with `label`, `step_ms`, and `bound_ms`, bytes read over bandwidth.
        path: the file to write.

    Returns:
        The figure.

    Raises:
        ValueError: no row has both times.
    """
    rows = _having(rows, "step_ms", "bound_ms")
    places = np.arange(len(rows))
    step, bound = (np.array([row[key] for row in rows]) for key in ("step_ms", "bound_ms"))
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(7.5, 1.3 + 0.75 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.barh(places - 0.19, step, 0.36, color=COLORS[0], label="plain step, measured")
        axes.barh(places + 0.19, bound, 0.36, color=COLORS[4], label="memory-bandwidth bound")
        for place, time, ratio in zip(places, step, step / bound, strict=True):
            text = f" {time:.3g} ms, {ratio:.2f}x the bound"
            axes.text(time, place - 0.19, text, va="center", fontsize=9)
        axes.set_yticks(places, [row["label"] for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.set(xlabel="time per step (ms)", xlim=(0, 1.45 * max(step.max(), bound.max())))
        axes.invert_yaxis()
        figure.legend(loc="outside upper center", ncols=2)
        return save(figure, path)


def training_curves(
    curves: Mapping[str, Sequence[tuple[int, float | None]]], path: str | Path
) -> Figure:
    """Draws losses over training steps, each point faintly and their moving mean boldly.

    Args:
        curves: from a name, e.g. "target, held out", to its (step, loss) points.
        path: the file to write.

    Returns:
        The figure.

    Raises:
        ValueError: no curve has a finite point.
    """
    kept = {name: _finite(points) for name, points in curves.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        raise ValueError("nothing to draw: no curve has a finite point")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, points), color in zip(kept.items(), _cycle(len(kept)), strict=True):
            steps, losses = _columns(points)
            mean = _moving_mean(losses, window=1 + len(losses) // 50)
            if len(losses) >= 50:
                axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(steps, mean, color=color, linewidth=1.6, label=name)
        axes.set(xlabel="training step", ylabel="loss per token (nats)")
        axes.legend()
        return save(figure, path)


def mask_picture(
    mask: np.ndarray, labels: Sequence[str], roles: Sequence[str], path: str | Path
) -> Figure:
    """Draws which tokens of a block each one sees: a row per token that reads, a column per token read.

    Any tree will do: ``specjax.decode.tree.block(tree, root).mask[b]`` is what the model is given.

    Args:
        mask: bool `[M, M]`, root first.
        labels: what stands in each token's box, e.g. its depth or its piece.
        roles: what each token is; every role has a colour, in the order they occur. Roles that
            end in a number behind a space share the colour and the legend of their word.
        path: the file to write.

    Returns:
        The figure.

    Raises:
        ValueError: the numbers of rows, columns, labels and roles differ.

    References:
        Fu et al., arXiv:2402.02057, and Cai et al., arXiv:2401.10774, draw theirs so.
    """
    mask = np.asarray(mask, bool)
    size = len(labels)
    if mask.shape != (size, size) or len(roles) != size:
        raise ValueError(
            f"a mask {mask.shape} needs as many labels and roles, got {size} and {len(roles)}"
        )
    words = [role.rsplit(" ", 1)[0] if role[-1].isdigit() else role for role in roles]
    kinds = list(dict.fromkeys(words))
    colors = dict(zip(kinds, _cycle(len(kinds)), strict=True))
    tokens = [colors[word] for word in words]
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        side = 2.2 + 0.21 * (size + 2)
        figure = Figure(figsize=(side, side + 0.3), layout="constrained")
        axes = figure.subplots()
        axes.imshow(_mask_colors(mask, tokens), extent=(0, size, size, 0), interpolation="none")
        for edge in range(size + 1):
            new = edge in (0, size) or roles[edge] != roles[edge - 1]
            line = dict(color=GREY if new else "white", linewidth=0.9 if new else 0.6)
            axes.plot([edge, edge], [-1.6 * new, size], **line, zorder=1 + new)
            axes.plot([-1.6 * new, size], [edge, edge], **line, zorder=1 + new)
        for place, (label, color) in enumerate(zip(labels, tokens, strict=True)):
            for x, y in ((-1.5, place), (place, -1.5)):
                box = Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, color=color, lw=0)
                axes.add_patch(box)
                centre = (x + 0.5, y + 0.5)
                axes.annotate(label, centre, ha="center", va="center", color="white", fontsize=8)
        axes.set(xlim=(-1.7, size + 0.1), ylim=(size + 0.1, -1.7), aspect="equal")
        axes.set_axis_off()
        said = ("What the token of a row sees.", "Dark: itself; grey: hidden from it")
        axes.set_title((" " if size > 12 else "\n").join(said), fontsize=10)
        handles = [Patch(color=color, label=kind) for kind, color in colors.items()]
        columns = max(1, min(len(kinds), size // 8))  # as many as the picture is wide
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        return save(figure, path)


def _mask_colors(mask: np.ndarray, tokens: Sequence[str]) -> np.ndarray:
    """Cells `[M, M, 3]`: the colour of the token that is read, lighter but for a token itself."""
    own = np.asarray([to_rgb(color) for color in tokens])
    seen = np.broadcast_to(own[None], (*mask.shape, 3))
    light = np.where(np.eye(len(mask), dtype=bool)[..., None], seen, 0.45 * seen + 0.55)
    return np.where(mask[..., None], light, np.asarray(to_rgb("#EDEDED")))


def _having(rows: Rows, *keys: str) -> list[Mapping[str, Any]]:
    """The rows in which none of the keys is missing or None."""
    kept = [row for row in rows if all(row.get(key) is not None for key in keys)]
    if not kept:
        raise ValueError(f"nothing to draw: no row has {' and '.join(keys)}")
    return kept


def _panels(rows: Rows) -> tuple[Figure, list[tuple[Axes, list[Mapping[str, Any]]]]]:
    """A figure with a row of panels per task and a column per temperature, and their rows."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    temperatures = sorted({row["temperature"] for row in rows})
    size = (1.2 + 3.8 * len(temperatures), 1.2 + 2.8 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(tasks), len(temperatures), sharex=True, sharey=True, squeeze=False)
    panels = []
    for axes, (task, temperature) in zip(
        grid.flat, [(a, b) for a in tasks for b in temperatures], strict=True
    ):
        group = [r for r in rows if r["task"] == task and r["temperature"] == temperature]
        axes.set_title(f"{task}, T = {temperature:g}")
        panels.append((axes, group))
    return figure, panels


def _label_outer(panels: Iterable[tuple[Axes, Any]], x: str, y: str) -> None:
    """Labels the axes at the left and at the bottom only; the others share their ticks."""
    for axes, _ in panels:
        axes.set(xlabel=x, ylabel=y)
        axes.label_outer()


def _series_keys(rows: Rows) -> list[tuple[str | None, int]]:
    """(method, batch size) of every line; the plain rows make none of their own."""
    drafted = [row for row in rows if row["gamma"] > 0] or rows
    keys = {(row.get("method"), row["batch_size"]) for row in drafted}
    return sorted(keys, key=lambda key: (str(key[0]), key[1]))


def _series(rows: Rows, key: tuple[str | None, int]) -> list[Mapping[str, Any]]:
    """The rows of one line by γ, plain decoding of the same batch size among them."""
    method, batch = key
    mine = [
        row
        for row in rows
        if row["batch_size"] == batch and (row["gamma"] == 0 or row.get("method") == method)
    ]
    return sorted(mine, key=lambda row: row["gamma"])


def _name(key: tuple[str | None, int], keys: list[tuple[str | None, int]]) -> str:
    """A line's name: the batch size, and the method where there are several."""
    several = len({method for method, _ in keys}) > 1
    return f"{key[0]}, batch {key[1]}" if several else f"batch {key[1]}"


def _draw_speedup(axes: Axes, rows: Rows, color: str, aside: float) -> None:
    """One line of measured medians with quartile bars, and the two predictions."""
    for key, style in (("predicted_speedup", "--"), ("predicted_from_alpha", ":")):
        points = [(row["gamma"] + aside, row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*_columns(points), style, color=color, linewidth=1.3, alpha=0.85)
    medians = [(row["gamma"] + aside, row["speedup"]) for row in rows]
    axes.plot(*_columns(medians), "o-", color=color, markersize=4, linewidth=1.8)
    bars = [
        (x, *row["speedup_quartiles"])
        for (x, _), row in zip(medians, rows, strict=True)
        if row.get("speedup_quartiles") is not None
    ]
    if bars:
        x, low, high = np.array(bars).T
        middle, half = (low + high) / 2, (high - low) / 2
        axes.errorbar(x, middle, half, fmt="none", color=color, capsize=4, linewidth=1.2)


def _speedup_legend(rows: Rows, colors: Mapping[str, str]) -> list[Line2D]:
    """Handles for the three line styles that occur, then for the colours."""
    styles = {
        "speedup": ("measured end to end, median and quartiles", "o-"),
        "predicted_speedup": ("predicted τ / (γ c + v), decoding only", "--"),
        "predicted_from_alpha": ("predicted from α, decoding only", ":"),
    }
    handles = []
    for key, (label, style) in styles.items():
        if any(row.get(key) is not None for row in rows):
            marker, line = ("o", "-") if style == "o-" else (None, style)
            handles.append(Line2D([], [], color=GREY, marker=marker, ls=line, label=label))
    named = [Line2D([], [], color=color, lw=4, label=name) for name, color in colors.items()]
    return handles + named


def _lanes(events: Rows) -> list[str]:
    """The lanes that occur, in the order of `LANES`."""
    used = {event["lane"] for event in events}
    if not used <= set(LANES):
        raise ValueError(f"unknown lanes {sorted(used - set(LANES))}; known: {list(LANES)}")
    return [lane for lane in LANES if lane in used]


def _draw_round(
    axes: Axes, entry: Mapping[str, Any], lanes: list[str], top: float, last: float
) -> None:
    """One γ's lanes below each other, and its total time and tokens behind them."""
    for index, lane in enumerate(lanes):
        spans = [
            (event["start_ms"], event["end_ms"] - event["start_ms"])
            for event in entry["events"]
            if event["lane"] == lane
        ]
        # A white edge parts successive steps, but would hide those a few pixels wide.
        edge = 0.6 if min(width for _, width in spans) > last / 200 else 0
        axes.broken_barh(
            spans, (top + index + 0.08, 0.84), facecolor=LANES[lane], edgecolor="white", lw=edge
        )
    end = max((event["end_ms"] for event in entry["events"]), default=0)
    axes.text(end + last * 0.01, top + len(lanes) / 2, _total(entry, end), va="center")


def _total(entry: Mapping[str, Any], end: float) -> str:
    """The text behind a row: its time, and its tokens where they are known."""
    tokens = entry.get("tokens")
    return f"{end:.4g} ms" + ("" if tokens is None else f"\n{tokens} tokens")


def _round_name(entry: Mapping[str, Any]) -> str:
    return "plain" if entry["gamma"] == 0 else f"γ = {entry['gamma']}"


def _finite(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in points if loss is not None and math.isfinite(loss)]


def _moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """The mean of up to `window` values around each, so that it does not lag.

    The window shrinks at the start, where losses fall fast, and is cut off at the end,
    where one noisy value would else stand alone.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    reach = np.minimum(places, window // 2)
    starts, ends = places - reach, np.minimum(places + reach + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def save(figure: Figure, path: str | Path) -> Figure:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return figure
