"""Writes the newest checkpoint of a training run of heads as files.

  python scripts/export_heads.py --run=~/.cache/specjax/runs/smollm2_eagle --out=heads [--style=vllm] [--int8]

Without --int8 the authors' formats are written (Medusa's `medusa_lm_head`, EAGLE-1's and EAGLE-3's folders),
or what vLLM reads; SGLang reads the authors'. --int8 writes one file, as the shipped ones are: without what
heads take from their target; heads for T5, and Medusa's own output layers over some pieces, are kept so only.
Of a run of Medusa-2 the target is written beside its heads, under OUT/target.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a conversion must not wait for a busy accelerator

import dataclasses

import jax
import numpy as np

from specjax import checkpoints
from specjax.checkpoints import heads, int8, native
from specjax.models.joint import Joint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--run", required=True, help="folder of the run")
    add("--out", required=True, help="folder to write")
    add("--base", default="", help="the target's name, for config.json")
    add("--style", default=heads.AUTHORS, choices=(heads.AUTHORS, heads.VLLM))
    add("--int8", action="store_true", help="one int8 file")
    options = parser.parse_args()
    out = pathlib.Path(options.out).expanduser()
    try:
        model, params = checkpoints.load_any(pathlib.Path(options.run).expanduser())
        joint, both = model, params
        if isinstance(joint, Joint):
            model, params = joint.heads, both["heads"]
        if options.int8:
            _quantise(model, params, out)
        else:
            heads.save(params, model, out, options.base, options.style)
            print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}")
        if isinstance(joint, Joint):
            native.save(out / "target", joint.target, both["target"])
            print(f"{out / 'target'}: the target that was trained with the heads")
    except ValueError as error:
        sys.exit(f"export_heads: {error}")


def _quantise(model, params, out: pathlib.Path) -> None:
    if not hasattr(model, "beside"):
        raise ValueError(f"a {type(model).__name__} is no head")
    alone = type(model)(dataclasses.replace(model.config, alone=True))
    kept = {name: params[name] for name in alone.abstract()}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "heads.int8.safetensors"
    int8.save(file, alone, kept, {})
    read = int8.load(file, alone)
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), read, kept)
    count = sum(leaf.size for leaf in jax.tree.leaves(kept))
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB, {count:,} parameters")
    print(f"largest |w - dequantised|: {max(jax.tree.leaves(error)):.2e}")


if __name__ == "__main__":
    main()
