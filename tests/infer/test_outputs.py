"""Predictions on disk survive any interruption: nothing lost, nothing doubled."""

import json
import random

import pytest

from specjax import runs
from specjax.infer.outputs import Outputs


class Killed(Exception):
    """Stands for a process that dies."""


def lines(count, seed=0):
    """(place, line) in a random order."""
    places = list(range(count))
    random.Random(seed).shuffle(places)
    return [(place, {"prediction": f"text {place}"}) for place in places]


def until(found, n):
    """The first ``n`` of them, then death."""
    for i, item in enumerate(found):
        if i == n:
            raise Killed
        yield item


def texts(where: Outputs) -> list[str]:
    return [line["prediction"] for line in where.read()]


@pytest.mark.parametrize("count", [1, 4, 10, 12])
def test_lines_come_out_in_input_order(tmp_path, count):
    where = Outputs(str(tmp_path), "task", count, part_size=4)
    assert where.missing() == list(range(count))
    where.collect(iter(lines(count)))
    assert where.missing() == []
    final = where.join()
    assert final.name == "task-predict.jsonl-00000-of-00001"
    assert texts(where) == [f"text {i}" for i in range(count)]
    assert not where.parts.exists()


@pytest.mark.parametrize("deaths", [[0], [3], [5, 1], [9, 2, 4], [2, 2, 2, 2, 2, 2]])
def test_a_run_killed_anywhere_completes(tmp_path, deaths):
    where = Outputs(str(tmp_path), "task", 10, part_size=4)
    everything = dict(lines(10))
    for seed, n in enumerate(deaths):
        missing = where.missing()
        order = [(place, line) for place, line in lines(10, seed) if place in missing]
        try:
            where.collect(until(order, n))
        except Killed:
            pass
    where.collect((place, everything[place]) for place in where.missing())
    where.join()
    assert texts(where) == [f"text {i}" for i in range(10)]


def test_an_unfinished_part_is_decoded_again(tmp_path):
    """A file half written when the process died has another name and is never taken for a part."""
    where = Outputs(str(tmp_path), "task", 8, part_size=4)
    where.collect(iter(lines(4)))
    (where.parts / "unfinished-part_000001.jsonl").write_text('{"prediction": "hal')
    assert where.missing() == [4, 5, 6, 7]
    where.collect((i, {"prediction": f"text {i}"}) for i in where.missing())
    where.join()
    assert texts(where) == [f"text {i}" for i in range(8)]


def test_joining_too_soon_names_what_is_missing(tmp_path):
    where = Outputs(str(tmp_path), "task", 8, part_size=4)
    where.collect(iter(lines(4)))
    with pytest.raises(ValueError, match="no part_000001.jsonl"):
        where.join()
    assert where.missing() == [4, 5, 6, 7]


def test_a_death_while_joining_loses_nothing(tmp_path):
    where = Outputs(str(tmp_path), "task", 8, part_size=4)
    where.collect(iter(lines(8)))
    (tmp_path / "unfinished-task-predict.jsonl-00000-of-00001").write_text("half")
    assert where.missing() == []
    where.join()
    assert texts(where) == [f"text {i}" for i in range(8)]
    where.join()  # again, after the parts are gone
    assert texts(where) == [f"text {i}" for i in range(8)]


def test_shards_have_files_of_their_own(tmp_path):
    names = {Outputs(str(tmp_path), "t", 3, shard=i, num_shards=2).final.name for i in (0, 1)}
    assert names == {"t-predict.jsonl-00000-of-00002", "t-predict.jsonl-00001-of-00002"}


def test_text_outside_ascii_stays_readable(tmp_path):
    where = Outputs(str(tmp_path), "task", 1)
    where.collect(iter([(0, {"prediction": "Größe\u2028"})]))
    assert json.loads(where.join().read_text(encoding="utf-8"))["prediction"] == "Größe\u2028"
    assert len(where.read()) == 1
    assert "Größe" in where.final.read_text(encoding="utf-8")


def test_the_same_run_may_go_on_and_another_may_not(tmp_path):
    mine = {"target": "abc", "seed": 0, "lengths": {"inputs": 4}}
    runs.claim(str(tmp_path / "out"), mine)
    runs.claim(str(tmp_path / "out"), dict(mine))
    with pytest.raises(ValueError, match=r"holds another run \(seed: 0 there, 1 here\)"):
        runs.claim(str(tmp_path / "out"), mine | {"seed": 1})
    with pytest.raises(ValueError, match="gamma: None there, 3 here"):
        runs.claim(str(tmp_path / "out"), mine | {"gamma": 3})
    assert json.loads((tmp_path / "out" / runs.DESCRIPTION).read_text()) == mine
