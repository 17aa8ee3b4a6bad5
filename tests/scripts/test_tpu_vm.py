"""The TPU VM launcher's dry run: the commands a user would type."""

import importlib.util
import os
import pathlib
import shlex
import subprocess
import time

import pytest

FILE = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "tpu" / "vm.py"
COMMON = ["--name=spec", "--zone=us-central2-b", "--dry_run"]


@pytest.fixture(scope="module")
def vm():
    spec = importlib.util.spec_from_file_location("vm", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(vm, capsys, *argv) -> list[list[str]]:
    assert vm.main(list(argv)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("+ ") for line in lines)
    return [shlex.split(line[2:]) for line in lines]


@pytest.mark.parametrize(
    ("name", "accelerator", "image"),
    [
        ("v4-8", "v4-8", "tpu-ubuntu2204-base"),
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_create_names_slice_and_image_as_gcloud_does(vm, capsys, name, accelerator, image):
    (command,) = commands(vm, capsys, "create", *COMMON, f"--slice={name}", "--project=mine")
    assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "spec"]
    assert {f"--accelerator-type={accelerator}", f"--version={image}"} < set(command)
    assert {"--zone=us-central2-b", "--project=mine"} < set(command)


def test_install_copies_the_checkout_to_all_workers(vm, capsys):
    *_, archive, copy, unpack = commands(vm, capsys, "install", *COMMON)
    assert archive[:2] == ["git", "archive"]
    assert "--worker=all" in copy and "spec:" in copy
    assert "--worker=all" in unpack and any("pip install" in word for word in unpack)


def test_run_passes_arguments_through_two_shells_unharmed(vm, capsys):
    given = ["--run_mode=infer", "--gin.CHECKPOINT_PATH='gs://a/b c'", "--gin.X={'inputs': 8}"]
    (command,) = commands(vm, capsys, "run", *COMMON, "--", *given)
    (remote,) = [word for word in command if word.startswith("--command=")]
    words = shlex.split(remote.removeprefix("--command="))
    assert words[words.index("specjax.main") + 1 :][:4] == ["--multihost", *given]
    assert "--worker=all" in command


def test_logs_and_delete(vm, capsys):
    (command,) = commands(vm, capsys, "logs", *COMMON, "--worker=3", "--follow")
    assert "--worker=3" in command and any("tail -n 40 -f" in word for word in command)
    (command,) = commands(vm, capsys, "delete", *COMMON)
    assert command[4:6] == ["delete", "spec"] and "--quiet" in command


def test_what_is_wrong_is_one_line(vm, capsys):
    assert vm.main(["create", *COMMON, "--slice=v4-4"]) == 2
    assert "vm: unknown slice 'v4-4'" in capsys.readouterr().err
    assert vm.main(["run", *COMMON]) == 2
    assert "say what to run after --" in capsys.readouterr().err


def test_a_started_job_does_not_hold_the_connection(vm, capsys, tmp_path):
    """What ssh would run there, run here: it comes back though the job goes on."""
    (command,) = commands(vm, capsys, "run", *COMMON, "--", "--run_mode=infer")
    (remote,) = [w.removeprefix("--command=") for w in command if w.startswith("--command=")]
    python = tmp_path / "specjax" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nsleep 30\n")
    python.chmod(0o755)
    home = os.environ | {"HOME": str(tmp_path)}
    began = time.monotonic()
    subprocess.run(
        ["bash", "-c", remote], cwd=tmp_path, env=home, stdout=subprocess.PIPE, timeout=25
    )
    assert time.monotonic() - began < 20
    assert (tmp_path / "specjax.log").exists()


def test_bench_measures_one_chip(vm, capsys):
    for words in (["--run_mode=bench"], ["--run_mode", "bench"]):
        (command,) = commands(vm, capsys, "run", *COMMON, "--", *words)
        assert not any("--multihost" in word for word in command)
