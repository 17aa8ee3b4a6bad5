"""Several processes as one program: two and four of them with two CPU devices each."""

import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from specjax import assets, checkpoints
from specjax.checkpoints import int8
from specjax.data import samples
from specjax.models.t5 import T5, T5Config
from specjax.partitioning import hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = ["A library.", "", "Tools for the network", "x", "A game", "Data", "A parser of XML"]
MODEL = T5(T5Config(8000, 16, 4, 8, 32, 1, 2))
DRAFT = T5(T5Config(8000, 16, 4, 8, 32, 1, 1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("localhost:1", None, 0), "belong together"),
        (("localhost:1", 2, 2), r"process_index must lie in 0 .. 1, got 2"),
    ],
)
def test_what_is_said_of_processes_must_be_whole(given, said):
    with pytest.raises(ValueError, match=said):
        hosts.initialize(*given)


def test_one_process_decides_for_itself():
    assert hosts.decide(lambda: [1, "a"]) == [1, "a"]
    assert hosts.any_of(True) and not hosts.any_of(False) and hosts.leads()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tiny checkpoints with the shipped vocabulary beside them, and a text file."""
    root = tmp_path_factory.mktemp("hosts")
    vocabulary = (assets.folder() / "sentencepiece.model").read_bytes()
    (root / "sentencepiece.model").write_bytes(vocabulary)
    for name, model in (("target", MODEL), ("draft", DRAFT)):
        int8.save(root / f"{name}.safetensors", model, model.init(jax.random.key(0)))
    rows = [{"inputs": text, "targets": text or "nothing"} for text in TEXTS]
    (root / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def start(arguments: list[str], processes: int, devices: int) -> list[subprocess.Popen]:
    """Processes of one job on this machine, each with so many CPU devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "specjax.main", "--compilation_cache_dir=", *arguments]
    joined = lambda i: [  # noqa: E731
        f"--coordinator_address=localhost:{port}", f"--process_count={processes}",
        f"--process_index={i}",
    ]  # fmt: skip
    return [
        subprocess.Popen(
            command + (joined(i) if processes > 1 else []),
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(processes)
    ]  # fmt: skip


def finish(running: list[subprocess.Popen]) -> list[str]:
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said
    return said


def decode(folder, out, mode="infer", *more) -> list[str]:
    place = "EVAL_OUTPUT_DIR" if mode == "eval" else "INFER_OUTPUT_DIR"
    return [
        f"--run_mode={mode}",
        f"--gin_file=configs/runs/{mode}.gin",
        "--gin_file=configs/methods/small_model.gin",
        f"--gin_bindings=CHECKPOINT_PATH='{folder}/target.safetensors'",
        f"--gin_bindings=DRAFT_CHECKPOINT_PATH='{folder}/draft.safetensors'",
        "--gin_bindings=MIXTURE_OR_TASK_NAME='in'",
        "--gin_bindings=SOURCE=@sources.TextFile()",
        f"--gin_bindings=sources.TextFile.path='{folder}/in.jsonl'",
        "--gin_bindings=TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 12}",
        f"--gin_bindings={place}='{out}'",
        "--gin_bindings=BATCH_SIZE=4",
        "--gin_bindings=PART_SIZE=2",
        "--gin_bindings=TEMPERATURE=1.0",
        *more,
    ]


def predictions(out) -> list[dict]:
    lines = (pathlib.Path(out) / "in-predict.jsonl-00000-of-00001").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(x["inputs"], x["prediction"], x["aux"]["accepted"]) for x in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "parts"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.long)]
)
def test_processes_together_decode_what_one_does(folder, tmp_path, processes, parts):
    """Sampled; the model split inside of a process, and rows over all of them."""
    finish(start(decode(folder, tmp_path / "one"), 1, 1))
    more = f"--gin_bindings=NUM_PARTITIONS={parts}"
    said = finish(start(decode(folder, tmp_path / "all", "eval", more), processes, 2))
    assert predictions(tmp_path / "all") == predictions(tmp_path / "one")
    assert "bleu" in said[0] and not any("bleu" in text for text in said[1:])
    assert (tmp_path / "all" / "in-metrics.jsonl").exists()


@pytest.mark.long
def test_what_one_process_refuses_stops_all(folder, tmp_path):
    """Another run's folder: one line in every process, and none waits for the others."""
    out = tmp_path / "out"
    finish(start(decode(folder, out), 1, 1))
    running = start(decode(folder, out, "infer", "--gin_bindings=SEED=5"), 2, 2)
    for process in running:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 2 and "holds another run" in said, said


# Training.


def tune(folder, out, steps, parts=2) -> list[str]:
    """Fine-tuning of a tiny T5 on the shipped examples."""
    sizes = {"emb_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 32, "vocab_size": 8000}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 2}
    macros = {
        "MIXTURE_OR_TASK_NAME": "debian_ende_v001",
        "INITIAL_CHECKPOINT_PATH": f"{folder}/target.safetensors",
        "MODEL_DIR": str(out),
        "TASK_FEATURE_LENGTHS": {"inputs": 16, "targets": 12},
        "TRAIN_STEPS": steps,
        "BATCH_SIZE": 4,
        "EVAL_STEPS": 1,
        "EVAL_PERIOD": 100,
        "CHECKPOINT_PERIOD": 2,
        "NUM_PARTITIONS": parts,
    }
    bindings = [f"target/t5.T5Config.{name}={value}" for name, value in sizes.items()]
    bindings += [f"{name}={value!r}" for name, value in macros.items()]
    return [
        "--run_mode=train",
        "--gin_file=configs/models/t5_1_1_small.gin",
        "--gin_file=configs/runs/finetune.gin",
        *(f"--gin_bindings={binding}" for binding in bindings),
    ]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_DATA_DIR", str(tmp_path))
    for split, half in (("train", "calibration"), ("validation", "report")):
        rows = [dataclasses.asdict(e) for e in samples.load_heldout("debian_ende", half)[:12]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"ende-{split}.jsonl").write_text(text, encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_a_killed_process_ends_the_job_and_the_next_start_goes_on(
    folder, corpus, tmp_path, processes
):
    """One of them is killed after a checkpoint: the same parameters as one process alone."""
    finish(start(tune(folder, tmp_path / "one", 8, parts=1), 1, 1))
    out = tmp_path / "several"
    running = start(tune(folder, out, 8), processes, 2)
    # what is not finished yet has a longer name
    steps = lambda: [p.name for p in (out / "checkpoints").glob("*") if p.name.isdigit()]  # noqa: E731
    until = time.monotonic() + 200
    while not steps():
        assert time.monotonic() < until and running[-1].poll() is None
        time.sleep(0.02)
    running[-1].kill()
    said, *_ = [process.communicate(timeout=300)[0] for process in running]
    if "8" not in steps():  # it may have been done already
        assert running[0].returncode != 0, said
    resumed, *_ = finish(start(tune(folder, out, 8), processes, 2))
    assert "Found 0 checkpoint steps" not in resumed  # it went on, and did not begin anew
    assert "8" in steps()
    both = [checkpoints.load_any(tmp_path / name, MODEL)[1] for name in ("one", "several")]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
