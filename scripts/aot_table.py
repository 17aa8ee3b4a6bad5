"""Compiles every file of configs/tpu for its slice and writes the table of what was found to docs/aot.md.

  python scripts/aot_table.py [--only=PART] [--again]

Each file is compiled by a process of its own, without a TPU (needs libtpu); what was compiled before is
taken from runs/aot unless --again is given. Some minutes a file on two cores.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

from rich.progress import track

from specjax.partitioning import aot, chips

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "tpu"
REPORTS = ROOT / "runs" / "aot"
TABLE = ROOT / "docs" / "aot.md"

HEAD = """# What the TPU compiler makes of `configs/tpu`

Written by `python scripts/aot_table.py`, which compiles every file for its slice on a machine without a TPU.
Memory, collectives and copies are facts of the compiled programs. Times are rooflines of single steps: the
larger of operations over peak and bytes over bandwidth, plus collectives over the interconnect; of training
steps without their activations' traffic. c is a round's drafting over its depth, in plain steps. Memory is
of one chip, collectives are of one chip in a round of the loop or in a training step.
"""


def compile_one(config: pathlib.Path) -> dict | str:
    """The report of one file, or the line that says why there is none."""
    folder = REPORTS / config.stem
    command = [sys.executable, "-m", "specjax.main", "--run_mode=aot", f"--gin_file={config}"]
    command.append(f"--gin.OUTPUT_DIR='{folder}'")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed and said nothing"])[-1]
    return json.loads((folder / "aot.json").read_text())


def read(config: pathlib.Path) -> dict | None:
    """The report of an earlier run."""
    file = REPORTS / config.stem / "aot.json"
    return json.loads(file.read_text()) if file.is_file() else None


def row(name: str, found: dict) -> list[str]:
    """One line of the table."""
    mesh = " × ".join(f"{size} {axis}" for axis, size in found["mesh"].items())
    steps = found["steps"]
    ratios = [f"{found[x]:.3f}" if found[x] is not None else "" for x in ("c", "v")]
    seconds = sum(program["compile_seconds"] for program in found["programs"])
    copies = sum(p["cache_copies"] + p["host_operations"] for p in found["programs"])
    exchanged = aot.moved(found["programs"][-1]["collectives"])
    fits = "" if found["fits"] else f" (does not fit; {found['smallest'] or 'no slice'} would)"
    return [
        f"`{name}`", found["slice"], mesh, f"{found['peak'] / chips.GIB:.1f}{fits}",
        f"{steps[0]['flops'] / 1e9:.0f}", f"{steps[0]['bytes'] / 1e9:.2f}",
        f"{steps[0]['seconds'] * 1e3:.2f}", *ratios, exchanged, str(copies), f"{seconds:.0f}",
    ]  # fmt: skip


COLUMNS = [
    "file", "slice", "mesh", "peak GiB", "GFLOP a step", "GB a step", "roofline ms", "c", "v",
    "collectives", "copies and host calls", "compile s",
]  # fmt: skip


def natural(path: pathlib.Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only files whose name holds this")
    parser.add_argument(
        "--again", action="store_true", help="compile what was compiled before, too"
    )
    options = parser.parse_args()
    launches = (f for f in CONFIGS.glob("*.gin") if "TOPOLOGY" in f.read_text())
    files = sorted((f for f in launches if options.only in f.name), key=natural)
    if not files:
        parser.error(f"no file of {CONFIGS} holds {options.only!r} in its name")
    rows, failed = [], []
    for config in track(files, "compiling"):
        found = None if options.again else read(config)
        found = compile_one(config) if found is None else found
        if isinstance(found, str):
            failed.append(f"{config.name}: {found}")
        else:
            rows.append(row(config.stem, found))
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    if options.only or failed:
        print("\n".join(lines))
    else:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join([HEAD, *lines]) + "\n")
        print(f"wrote {TABLE}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
