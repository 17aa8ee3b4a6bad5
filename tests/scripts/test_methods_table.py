"""scripts/methods_table.py on made-up reports: what it is given is written, the rest of the page stays."""

import importlib.util
import json
import pathlib
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "methods_table.py"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a page of reports and training runs, and returns its lines."""
    spec = importlib.util.spec_from_file_location("methods_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "DOCS", tmp_path)
    monkeypatch.setattr(script, "_size", lambda run: 2e6)

    def main(*reports, trained=()):
        said = [
            "methods_table",
            "--page=heads",
            "--trained",
            *map(str, trained),
            "--",
            *map(str, reports),
        ]
        monkeypatch.setattr(sys, "argv", said)
        script.main()
        return (tmp_path / "heads.md").read_text(encoding="utf-8").splitlines()

    return main


def report(folder: pathlib.Path, task: str, method: str, speedup: float) -> pathlib.Path:
    row = {
        "task": task, "temperature": 0.0, "method": method, "setting": "3", "chosen": True, "gamma": 3,
        "speedup": speedup, "speedup_quartiles": [1.0, 2.0], "repeats": 1, "speedup_decode": speedup,
        "block_efficiency": 2.0, "acceptance_rate": 0.5, "rounds": 10, "rounds_plain": 0, "drafted": 30,
        "c": 0.1, "v": 1.2, "identical": True, "differences": [],
    }  # fmt: skip
    content = {
        "machine": {"cpu": "Z80", "cores": 1}, "baseline": None, "rows": [row],
        "settings": {"sentences": 20, "temperatures": [0.0]},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def run(folder: pathlib.Path, top: float) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    said = {"step": 7, "data": "ende", "top1_0": top, "top5_0": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(said), encoding="utf-8")
    return folder


def test_other_runs_stay_as_they_are(tmp_path, write):
    one = report(tmp_path / "one", "humaneval", "EAGLE, chain", 1.25)
    two = report(tmp_path / "two", "debian_ende", "small model", 1.75)
    heads = run(tmp_path / "eagle", 0.25), run(tmp_path / "medusa", 0.125)
    before = write(one, two, trained=heads)
    for kept in (one, heads[0]):  # what is made elsewhere is not here
        next(kept.iterdir()).unlink()
    report(two, "humaneval", "lookahead", 1.5)  # of a paper that the page did not name
    after = write(two, trained=[run(heads[1], 0.75)])
    rows = lambda lines, name: [line for line in lines if name in line]  # noqa: E731
    assert rows(before, "1.25") == rows(after, "1.25") != []  # with the number of its source
    assert rows(after, "| eagle |") == rows(before, "| eagle |") and not rows(after, "0.12")
    assert "| medusa | 2.0 M | 7 | ende | 0.75 | 0.50 |" in after
    assert rows(after, "## ") == ["## Training", "## one", "## two", "## Published"]
    sources = after[after.index("## Published") :]
    assert [line[:2] for line in sources if line[:1].isdigit()] == [
        f"{i}." for i in range(1, len(sources) - 1)
    ]
    assert set(before[before.index("## Published") :]) < {*sources, ""}


def test_the_same_reports_give_the_same_page(tmp_path, write):
    one = report(tmp_path / "one", "humaneval", "EAGLE, chain", 1.25)
    heads = [run(tmp_path / "eagle", 0.25)]
    assert write(one, trained=heads) == write(one, trained=heads)
