"""The pictures hold what the rows hold, and leave out what they do not."""

import numpy as np
import pytest
from matplotlib import image

from specjax.analysis import plots

SIGNATURE = b"\x89PNG"


def _row(task="ende", temperature=0.0, batch_size=1, gamma=3, **others):
    drafted = gamma > 0
    row = {
        "task": task,
        "model": "pair",
        "method": "draft" if drafted else "plain",
        "temperature": temperature,
        "batch_size": batch_size,
        "gamma": gamma,
        "speedup": 1 + gamma / 5 if drafted else 1.0,
        "speedup_quartiles": [0.9 + gamma / 5, 1.2 + gamma / 5] if drafted else None,
        "predicted_speedup": 1.1 + gamma / 5 if drafted else None,
        "predicted_from_alpha": 1.05 + gamma / 5 if drafted else None,
        "accepted_by_position": {"marginal": [0.5] * gamma, "conditional": [0.7] * gamma}
        if drafted
        else None,
    }
    return row | others


def _rows():
    return [
        _row(task, temperature, batch, gamma)
        for task in ("ende", "synopsis")
        for temperature in (0.0, 1.0)
        for batch in (1, 8)
        for gamma in (0, 1, 3, 5)
    ]


def _check_file(path, figure):
    """The file is a PNG of the figure's size, and not of one colour."""
    assert path.read_bytes().startswith(SIGNATURE)
    pixels = image.imread(path)
    width, height = figure.get_size_inches() * plots.STYLE["savefig.dpi"]
    assert pixels.shape[:2] == pytest.approx((height, width), abs=1)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10


def _line(axes, style, color):
    """The one line of a style and colour."""
    (line,) = [k for k in axes.lines if k.get_linestyle() == style and k.get_color() == color]
    return line


def _legend(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_speedup_has_a_panel_per_task_and_temperature(tmp_path):
    figure = plots.speedup_against_gamma(_rows(), tmp_path / "new" / "speed.png")
    _check_file(tmp_path / "new" / "speed.png", figure)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["ende, T = 0", "ende, T = 1", "synopsis, T = 0", "synopsis, T = 1"]
    assert figure.axes[2].get_xlabel() == "drafted tokens per block, γ"
    assert figure.axes[2].get_ylabel() == "speed-up over plain decoding"
    assert _legend(figure)[-2:] == ["batch 1", "batch 8"] and len(_legend(figure)) == 5


def test_speedup_draws_the_rows_values(tmp_path):
    figure = plots.speedup_against_gamma(_rows(), tmp_path / "speed.png")
    axes = figure.axes[0]
    for color in plots.COLORS[:2]:
        dashed, dotted = _line(axes, "--", color), _line(axes, ":", color)
        np.testing.assert_allclose(dashed.get_ydata(), [1.3, 1.7, 2.1])
        np.testing.assert_allclose(dotted.get_ydata(), [1.25, 1.65, 2.05])
        measured = _line(axes, "-", color)
        np.testing.assert_allclose(measured.get_ydata(), [1.0, 1.2, 1.6, 2.0])
        np.testing.assert_allclose(measured.get_xdata(), [0, 1, 3, 5], atol=0.1)
    bars = axes.collections[0].get_segments()
    np.testing.assert_allclose([bar[:, 1] for bar in bars], [[1.1, 1.4], [1.5, 1.8], [1.9, 2.2]])


def test_speedup_names_methods_where_there_are_several(tmp_path):
    rows = [_row(gamma=g) for g in (0, 3)] + [_row(gamma=3, method="lookup")]
    figure = plots.speedup_against_gamma(rows, tmp_path / "speed.png")
    assert _legend(figure)[-2:] == ["draft, batch 1", "lookup, batch 1"]


def test_missing_values_are_left_out(tmp_path):
    none = {"predicted_speedup": None, "predicted_from_alpha": None, "speedup_quartiles": None}
    rows = [_row(gamma=3, **none), _row(gamma=5, **none), _row(gamma=7, speedup=None)]
    figure = plots.speedup_against_gamma(rows, tmp_path / "speed.png")
    (axes,) = figure.axes
    np.testing.assert_allclose(_line(axes, "-", plots.COLORS[0]).get_xdata(), [3, 5])
    assert not axes.collections
    assert _legend(figure) == ["measured end to end, median and quartiles", "batch 1"]


def test_acceptance_has_a_line_per_gamma_of_the_smallest_batch(tmp_path):
    rows = _rows() + [_row(gamma=2, accepted_by_position={"conditional": [0.6, None]})]
    figure = plots.acceptance_by_position(rows, tmp_path / "acceptance.png")
    _check_file(tmp_path / "acceptance.png", figure)
    assert [len(axes.lines) for axes in figure.axes] == [4, 3, 3, 3]
    lines = {len(line.get_xdata()): line for line in figure.axes[1].lines}
    assert sorted(lines) == [1, 3, 5]
    np.testing.assert_allclose(lines[3].get_ydata(), [0.7] * 3)
    assert list(lines[5].get_xdata()) == [1, 2, 3, 4, 5]
    assert _legend(figure) == ["γ = 1", "γ = 2", "γ = 3", "γ = 5"]
    assert figure.axes[2].get_xlabel() == "position in the block"


def _event(lane, start, end):
    return {"lane": lane, "start_ms": start, "end_ms": end}


def _rounds():
    drafted = [_event("target encoder", 0, 5), _event("draft encoder", 5, 6)]
    for start in (6, 20):
        drafted += [_event("draft decoder", start + i, start + i + 1) for i in range(3)]
        drafted.append(_event("target decoder", start + 3, start + 14))
    plain = [_event("target encoder", 0, 5)]
    plain += [_event("target decoder", 5 + 10 * i, 15 + 10 * i) for i in range(6)]
    return [{"gamma": 3, "events": drafted, "tokens": 6}, {"gamma": 0, "events": plain}]


def test_trace_has_lanes_per_gamma_on_one_time_axis(tmp_path):
    figure = plots.trace(_rounds(), tmp_path / "trace.png")
    _check_file(tmp_path / "trace.png", figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["γ = 3", "plain"]
    assert [len(lane.get_paths()) for lane in axes.collections] == [1, 1, 6, 2, 1, 6]
    widths = [path.get_extents().width for path in axes.collections[3].get_paths()]
    np.testing.assert_allclose(widths, [11, 11])
    assert [text.get_text() for text in axes.texts] == ["34 ms\n6 tokens", "65 ms"]
    assert _legend(figure) == list(plots.LANES)
    assert axes.get_xlabel() == "time (ms)"


def test_trace_puts_no_lane_over_another(tmp_path):
    (axes,) = plots.trace(_rounds(), tmp_path / "trace.png").axes
    boxes = [lane.get_paths()[0].get_extents() for lane in axes.collections]
    edges = [edge for box in boxes for edge in (box.y0, box.y1)]
    assert edges == sorted(edges)


def test_bandwidth_annotates_the_ratio(tmp_path):
    rows = [
        {"label": "target", "step_ms": 8.0, "bound_ms": 4.0},
        {"label": "draft", "step_ms": 0.5, "bound_ms": None},
        {"label": "T5 small", "step_ms": 18.0, "bound_ms": 10.0},
    ]
    figure = plots.bandwidth(rows, tmp_path / "bandwidth.png")
    _check_file(tmp_path / "bandwidth.png", figure)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [8, 18, 4, 10]
    assert [text.get_text() for text in axes.texts] == [
        " 8 ms, 2.00x the bound",
        " 18 ms, 1.80x the bound",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["target", "T5 small"]


def test_training_curves_drop_what_is_not_finite(tmp_path):
    points = [(0, 4.0), (10, None), (20, float("nan")), (30, 2.0)]
    curves = {"target": points, "draft": [(i, 3.0 + (-1) ** i) for i in range(100)], "none": []}
    figure = plots.training_curves(curves, tmp_path / "curves.png")
    _check_file(tmp_path / "curves.png", figure)
    (axes,) = figure.axes
    target, faint, bold = axes.lines
    assert list(target.get_xdata()) == [0, 30] and list(target.get_ydata()) == [4, 2]
    assert list(faint.get_ydata()) == [y for _, y in curves["draft"]]
    np.testing.assert_allclose(bold.get_ydata()[1:-1], 3.0, atol=0.34)
    assert axes.get_xlabel() == "training step"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["target", "draft"]


def test_a_mask_is_drawn_cell_by_cell(tmp_path):
    """Rows read, columns are read; a role's colour, lighter but for a token itself, else grey."""
    mask = np.tri(4, dtype=bool)
    mask[3, 2] = False
    roles = ["root", "It", "guess 0", "guess 1"]
    figure = plots.mask_picture(mask, "0112", roles, tmp_path / "mask.png")
    _check_file(tmp_path / "mask.png", figure)
    (axes,), (legend,) = figure.axes, figure.legends
    pixels = np.asarray(axes.images[0].get_array())
    grey = (pixels == pixels[0, 3]).all(-1)
    np.testing.assert_array_equal(~grey, mask)
    own = [tuple(pixels[i, i]) for i in range(4)]
    assert own[2] == own[3] and len(set(own)) == 3
    assert tuple(pixels[1, 0]) not in (own[0], tuple(pixels[0, 3]))
    assert [text.get_text() for text in legend.get_texts()] == ["root", "It", "guess"]
    assert [text.get_text() for text in axes.texts] == [*"00111122"]
    with pytest.raises(ValueError, match="as many labels and roles, got 4 and 3"):
        plots.mask_picture(mask, "0112", roles[:3], tmp_path / "wrong.png")


def test_moving_mean_is_centred():
    line = np.arange(20.0)
    np.testing.assert_allclose(plots._moving_mean(line, 5)[:18], line[:18])
    assert plots._moving_mean(line, 5)[-1] == 18
    np.testing.assert_allclose(plots._moving_mean(line, 1), line)


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plots.speedup_against_gamma([_row(speedup=None)], path),
        lambda path: plots.acceptance_by_position([_row(gamma=0)], path),
        lambda path: plots.trace([{"gamma": 3, "events": []}], path),
        lambda path: plots.trace([{"gamma": 3, "events": [_event("decoder", 0, 1)]}], path),
        lambda path: plots.bandwidth([], path),
        lambda path: plots.training_curves({"target": [(0, None)]}, path),
    ],
)
def test_nothing_to_draw_raises_and_writes_nothing(draw, tmp_path):
    with pytest.raises(ValueError, match="nothing to draw|unknown lanes"):
        draw(tmp_path / "empty.png")
    assert not list(tmp_path.iterdir())
