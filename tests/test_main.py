"""The command line."""

import subprocess
import sys

from specjax import main


def test_gin_bindings_are_spelled_as_in_t5x():
    argv = ["main", "--gin.GAMMAS=(0, 3)", "--run_mode=bench"]
    assert main.expand(argv) == ["main", "--gin_bindings=GAMMAS=(0, 3)", "--run_mode=bench"]


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "specjax.main", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_the_modes():
    out = run("--help")
    assert "--run_mode: <aot|bench|eval|infer|train>" in out.stdout


def test_a_wrong_mode_is_one_clear_line():
    out = run("--run_mode=dream")
    assert out.returncode != 0
    assert "value should be one of <aot|bench|eval|infer|train>" in out.stderr


def test_a_missing_gin_file_is_one_clear_line():
    out = run("--run_mode=bench", "--gin_file=configs/no_such.gin")
    assert out.returncode == 2
    lines = out.stderr.strip().splitlines()[-2:]
    assert lines[0].startswith("specjax: ") and lines[1] == "specjax: --traceback shows where"
    assert "Traceback" not in out.stderr
    assert "no_such.gin" in out.stderr


def test_gin_files_of_another_mode_are_one_clear_line():
    """Nothing in them is bound to what the mode calls."""
    out = run("--run_mode=train", "--gin_file=configs/examples/debian_ende_infer.gin")
    assert out.returncode == 2
    assert (
        "no gin file here says how to train: specjax.training.loop.train is not bound" in out.stderr
    )
    assert "Traceback" not in out.stderr
