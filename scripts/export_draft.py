"""Writes the newest checkpoint of a draft's training run as the int8 file that is shipped.

  python scripts/export_draft.py [--run=~/.cache/specjax/runs/smollm2_draft] [--out=specjax/assets/smollm2]

Prints its size and the largest |w - dequantised|, and draws the training curves beside it.
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a conversion must not wait for a busy accelerator

import jax
import numpy as np

from specjax import checkpoints
from specjax.analysis import plots
from specjax.checkpoints import int8

ASSETS = pathlib.Path(__file__).resolve().parents[1] / "specjax" / "assets" / "smollm2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="~/.cache/specjax/runs/smollm2_draft")
    parser.add_argument("--out", default=str(ASSETS), help="folder")
    options = parser.parse_args()
    run, out = pathlib.Path(options.run).expanduser(), pathlib.Path(options.out)
    model, params = checkpoints.load_any(run)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "draft.int8.safetensors"
    curves = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out: dict[str, list] = {}
    for row in curves:
        if row["data"] != "train":
            held_out.setdefault(f"validation, {row['data']}", []).append((row["step"], row["loss"]))
    metadata = {"target": "smollm2-135m", "steps": str(curves[-1]["step"])}
    int8.save(file, model, params, metadata)
    read = int8.load(file, model)
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), read, params)
    (out / "curves.json").write_text(json.dumps(held_out) + "\n", encoding="utf-8")
    plots.training_curves(held_out, out / "curves.png")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{file}: {file.stat().st_size / 1e6:.2f} MB, {count:,} parameters, step {curves[-1]['step']}"
    )
    print(f"largest |w - dequantised|: {max(jax.tree.leaves(error)):.2e}")


if __name__ == "__main__":
    main()
