"""Entry point, with the habits of T5X.

python -m specjax.main --run_mode=bench --gin_file=configs/quickstart.gin
python -m specjax.main --run_mode=train --gin_file=configs/train/debian_target.gin --gin.OUTPUT_DIR="'runs/x'"
"""

import importlib
import sys

from absl import app, flags

MODES = {
    "bench": "specjax.bench.run.bench",
    "train": "specjax.training.loop.train",
}

flags.DEFINE_enum("run_mode", None, sorted(MODES), "What to do.", required=True)
flags.DEFINE_multi_string("gin_file", [], "Gin file; several are allowed, later ones win.")
flags.DEFINE_multi_string(
    "gin_bindings", [], "A gin binding; --gin.NAME=VALUE is short for --gin_bindings=NAME=VALUE."
)
flags.DEFINE_multi_string("gin_search_paths", ["."], "Where gin files are looked for.")
flags.DEFINE_bool("traceback", False, "Show the traceback of an error, not one line.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        run()
    except (ValueError, OSError) as error:
        if flags.FLAGS.traceback:
            raise
        print(f"specjax: {' '.join(str(error).split())}", file=sys.stderr)
        print("specjax: --traceback shows where", file=sys.stderr)
        sys.exit(2)


def run() -> None:
    """Reads the gin files and calls what ``--run_mode`` names with its bindings."""
    import gin  # late, so that --help answers at once

    from specjax import config

    config.parse(flags.FLAGS.gin_file, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths)
    module, _, name = MODES[flags.FLAGS.run_mode].rpartition(".")
    gin.get_configurable(getattr(importlib.import_module(module), name))()


def expand(argv: list[str]) -> list[str]:
    """Turns ``--gin.NAME=VALUE`` into ``--gin_bindings=NAME=VALUE``."""
    return [f"--gin_bindings={a[len('--gin.') :]}" if a.startswith("--gin.") else a for a in argv]


if __name__ == "__main__":
    app.run(main, argv=expand(sys.argv))
