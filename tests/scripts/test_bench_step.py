"""scripts/bench_step.py runs: it calls what the package has."""

import pathlib
import runpy
import sys

from specjax.models import layers

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "bench_step.py"


def test_a_block_stands_beside_the_plain_step(monkeypatch, capsys):
    said = (
        f"{SCRIPT} --model t5_1_1_tiny --blocks 4 --rounds 4 --repeats 2 --cached 8 "
        "--input_length 8 --layout tiled"
    )
    monkeypatch.setattr(sys, "argv", said.split())
    monkeypatch.setattr(layers, "long_vectors", layers.long_vectors)  # the script sets it
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    assert "tiled" in out and "over plain" in out
