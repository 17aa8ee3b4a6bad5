"""Entry point: ``python -m specjax.main --run_mode=bench --gin_file=configs/quickstart.gin``."""

from absl import app, flags

_MODES = {
    "bench": "specjax.bench.run.bench",
    "train": "specjax.training.loop.train",
}

flags.DEFINE_enum("run_mode", None, sorted(_MODES), "What to do.", required=True)
flags.DEFINE_multi_string("gin_file", [], "Gin file; several allowed, later ones win.")
flags.DEFINE_multi_string(
    "gin_bindings", [], "One gin binding; --gin.NAME=VALUE is the same as --gin_bindings='NAME=VALUE'."
)
flags.DEFINE_multi_string("gin_search_paths", ["."], "Where gin files are looked for.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    import gin  # late, so that --help is instant

    for path in flags.FLAGS.gin_search_paths:
        gin.add_config_file_search_path(path)
    gin.parse_config_files_and_bindings(flags.FLAGS.gin_file, flags.FLAGS.gin_bindings)
    module, _, name = _MODES[flags.FLAGS.run_mode].rpartition(".")
    import importlib

    function = getattr(importlib.import_module(module), name)
    gin.get_configurable(function)()


def expand(argv: list[str]) -> list[str]:
    """Turns T5X's ``--gin.NAME=VALUE`` into ``--gin_bindings=NAME=VALUE``."""
    return [f"--gin_bindings={a[len('--gin.'):]}" if a.startswith("--gin.") else a for a in argv]


if __name__ == "__main__":
    import sys

    app.run(main, argv=expand(sys.argv))
