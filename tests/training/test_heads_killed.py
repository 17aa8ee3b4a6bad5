"""Training heads, killed again and again: the same parameters as never killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from specjax import checkpoints
from tests.training import heads_run

ROOT = pathlib.Path(__file__).resolve().parents[2]


def start(folder):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.training.heads_run", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]


def saved(folder):
    """Steps that are saved."""
    place = folder / "run" / "checkpoints"
    return [int(p.name) for p in place.iterdir() if p.name.isdigit()] if place.is_dir() else []


@pytest.mark.long
def test_killing_at_random_changes_nothing(tmp_path):
    """SIGKILL while states are computed, and four times while steps are taken."""
    finish(start(tmp_path / "whole"))
    rng, killed = np.random.default_rng(0), tmp_path / "killed"
    process = start(killed)
    while process.poll() is None and not list(killed.glob("states/*/states.npy")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stopped = []
    for _ in range(4):
        process, before = start(killed), max(saved(killed), default=0)
        while process.poll() is None and max(saved(killed), default=0) <= before:
            time.sleep(0.01)
        time.sleep(0.1 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        stopped.append(max(saved(killed)))
    assert stopped[0] < heads_run.STEPS and len(set(stopped)) > 1
    finish(start(killed))
    model, whole = checkpoints.load_any(tmp_path / "whole" / "run")
    again, params = checkpoints.load_any(killed / "run")
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    lines = (killed / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == heads_run.STEPS
