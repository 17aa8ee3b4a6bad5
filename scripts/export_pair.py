"""Writes the newest checkpoints of the two training runs as the shipped int8 pair.

    python scripts/export_pair.py
    python scripts/export_pair.py --target_run=runs/target --draft_run=runs/draft --output_dir=out

Prints the size of each file and the largest |w - dequantised|, and writes the training curves beside them.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys

# A conversion has no use for an accelerator, and must not wait for a busy one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
import rich

from specjax import config
from specjax.analysis import plots
from specjax.checkpoints import int8, native, structure
from specjax.models.t5 import T5

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUNS = "~/.cache/specjax/runs"
MODELS = {"target": "MODEL", "draft": "DRAFT"}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      path: the file.
      step: of the run's checkpoint.
      size: bytes.
      parameters: number of weights.
      error: largest |w - dequantised|.
    """

    path: pathlib.Path
    step: int
    size: int
    parameters: int
    error: float


def read_models(gin_files: list[str]) -> dict[str, T5]:
    """Target and draft from gin files that together bind the macros MODEL and DRAFT."""
    config.parse(gin_files)
    return {role: config.macro(macro) for role, macro in MODELS.items()}


def export(model: T5, run: str, step: int, path: pathlib.Path) -> Exported:
    """Writes one checkpoint of a run.

    Args:
      model: what the run trained.
      run: the run's folder.
      step: a saved step.
      path: file to write.

    Returns:
      What was written.

    Raises:
      ValueError: no such checkpoint.
    """
    params = native.load_run(run, model.abstract(), step)
    int8.save(path, model, params, {"step": str(step)})
    _, dequantised = int8.load_model(path)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(dequantised), strict=True)
    error = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    count = sum(x.size for x in structure.flatten(params).values())
    return Exported(path, step, path.stat().st_size, count, error)


def export_curves(runs: dict[str, str], folder: pathlib.Path) -> None:
    """Writes both runs' losses as curves.json and curves.png.

    Args:
      runs: run folder by role; what a run did not log is left out.
      folder: where to write.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for role, run in runs.items():
        log = pathlib.Path(run).expanduser() / "metrics.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            entry = json.loads(line)
            point = (entry["step"], round(entry["loss"], 4))
            curves.setdefault(f"{role}, {entry['data']}", []).append(point)
    # A resumed run logs the steps after its checkpoint again.
    curves = {name: sorted(dict(points).items()) for name, points in curves.items()}
    (folder / "curves.json").write_text(json.dumps(curves) + "\n")
    if curves:
        plots.training_curves(curves, folder / "curves.png")


def newest_step(run: str) -> int:
    """The step of a run's newest checkpoint.

    Args:
      run: the run's folder.

    Returns:
      The step.

    Raises:
      ValueError: no checkpoint.
    """
    folder = pathlib.Path(run).expanduser().resolve() / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"no checkpoints in {folder}")
    with ocp.CheckpointManager(folder) as manager:
        step = manager.latest_step()
    if step is None:
        raise ValueError(f"no checkpoints in {folder}")
    return step


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target_run", default=f"{RUNS}/debian_target", help="default: %(default)s")
    add("--draft_run", default=f"{RUNS}/debian_draft", help="default: %(default)s")
    add(
        "--gin_file",
        action="append",
        help="binds the macros MODEL and DRAFT; may be repeated. Default: "
        "configs/models/debian_target.gin and configs/models/debian_draft.gin",
    )
    add("--only", choices=tuple(MODELS), help="export one of them, leaving the other as it is")
    assets = ROOT / "specjax" / "assets" / "debian"
    add("--output_dir", type=pathlib.Path, default=assets, help="default: the package's assets")
    args = parser.parse_args(argv)
    args.gin_file = args.gin_file or [f"configs/models/debian_{role}.gin" for role in MODELS]
    return args


def main(argv: list[str] | None = None) -> None:
    """Exports both; a ValueError ends in one line."""
    args = parse_args(argv)
    runs = {"target": args.target_run, "draft": args.draft_run}
    wanted = {role: run for role, run in runs.items() if args.only in (None, role)}
    try:
        models = read_models(args.gin_file)
        # Both are looked for before one is written: no new target stands beside an old draft.
        steps = {role: newest_step(run) for role, run in wanted.items()}
        args.output_dir.mkdir(parents=True, exist_ok=True)
        done = [
            export(models[role], run, steps[role], args.output_dir / f"{role}.int8.safetensors")
            for role, run in wanted.items()
        ]
        export_curves(runs, args.output_dir)
    except ValueError as error:
        sys.exit(f"export_pair: {error}")
    for one in done:
        rich.print(
            f"{one.path.name}: step {one.step}, {one.parameters:,} parameters, {one.size:,} bytes,"
            f" max |w - dequantised| {one.error:.2e}"
        )
    rich.print(f"together {sum(one.size for one in done) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
