"""specjax: speculative decoding of T5. One entry, with the habits of T5X.

Modes, each with a gin file that says what is required and what is commonly overridden:

  infer   decode a file or task:   --gin_file=configs/runs/infer.gin
  eval    decode and score it:     --gin_file=configs/runs/eval.gin
  bench   plain against speculative decoding, with a report: --gin_file=configs/quickstart.gin
  train   targets and drafts:      --gin_file=configs/train/debian_target.gin, or configs/runs/finetune.gin
  aot     compile for a TPU slice that is not there: --gin_file=configs/tpu/t5_xxl_small_v4_8.gin

Methods of drafting are gin files too, given after the first: --gin_file=configs/methods/small_model.gin

Examples:

  python -m specjax.main --run_mode=bench --gin_file=configs/quickstart.gin
  python -m specjax.main --run_mode=infer --gin_file=configs/examples/debian_ende_infer.gin
  python -m specjax.main --run_mode=infer --gin_file=configs/runs/infer.gin \\
      --gin_file=configs/methods/small_model.gin --gin.MIXTURE_OR_TASK_NAME="'mine'" \\
      --gin.SOURCE="@sources.TextFile()" --gin.sources.TextFile.path="'in.txt'" \\
      --gin.CHECKPOINT_PATH="'/checkpoints/target'" --gin.DRAFT_CHECKPOINT_PATH="'/checkpoints/draft'" \\
      --gin.INFER_OUTPUT_DIR="'out'" \\
      --gin.TASK_FEATURE_LENGTHS="{'inputs': 128, 'targets': 64}"

Strings on the command line carry quotes of their own, as in T5X. The bindings in effect are written to
config.gin beside the results.
"""

import contextlib
import functools
import importlib
import os
import pathlib
import sys

from absl import app, flags

MODES = {
    "aot": "specjax.partitioning.aot.run",
    "bench": "specjax.bench.run.bench",
    "eval": "specjax.infer.run.evaluate",
    "infer": "specjax.infer.run.infer",
    "train": "specjax.training.loop.train",
}

flags.DEFINE_enum("run_mode", None, sorted(MODES), "What to do.", required=True)
flags.DEFINE_multi_string("gin_file", [], "Gin file; several are allowed, later ones win.")
flags.DEFINE_multi_string(
    "gin_bindings", [], "A gin binding; --gin.NAME=VALUE is short for --gin_bindings=NAME=VALUE."
)
flags.DEFINE_multi_string("gin_search_paths", ["."], "Where gin files are looked for.")
flags.DEFINE_string("tfds_data_dir", None, "Where TFDS data sets lie; by default where TFDS says.")
flags.DEFINE_string(
    "compilation_cache_dir",
    "~/.cache/specjax/jax",
    "Compiled programs are kept here from run to run; empty for none.",
)
flags.DEFINE_string(
    "profile",
    None,
    "Write a profile (TensorBoard, Perfetto) of the run here; of bench, some rounds of every method, "
    "from which the report then reads where their time goes, and c.",
)
flags.DEFINE_bool(
    "multihost", False, "Join the processes of a Cloud TPU or GKE job to one program."
)
flags.DEFINE_string("coordinator_address", None, "Elsewhere: host and port of process 0.")
flags.DEFINE_integer("process_count", None, "Elsewhere: how many processes there are.")
flags.DEFINE_integer("process_index", None, "Elsewhere: which of them this is.")
flags.DEFINE_bool("traceback", False, "Show the traceback of an error, not one line.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        run()
    except (ValueError, OSError, RuntimeError) as error:
        # gin says with a RuntimeError that a required binding is missing; others are bugs.
        mine = not isinstance(error, RuntimeError) or "Required bindings" in str(error)
        if flags.FLAGS.traceback or not mine:
            raise
        text = str(error).split("\n  In call to configurable")[0]  # gin's own addition
        print(f"specjax: {' '.join(text.split())}", file=sys.stderr)
        print("specjax: --traceback shows where", file=sys.stderr, flush=True)
        _leave(2)


def _leave(code: int) -> None:
    """Exits; one of several processes at once, since the others may be waiting for it."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run() -> None:
    """Reads the gin files and calls what ``--run_mode`` names with its bindings."""
    import gin  # late, so that --help answers at once

    from specjax import config

    set_up(flags.FLAGS)
    config.parse(flags.FLAGS.gin_file, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths)
    module, _, name = MODES[flags.FLAGS.run_mode].rpartition(".")
    try:
        call, folder = gin.get_configurable(getattr(importlib.import_module(module), name)), None
    except ValueError:  # the files bind nothing to it
        mode = flags.FLAGS.run_mode
        raise ValueError(
            f"no gin file here says how to {mode}: {module}.{name} is not bound; see configs/runs, "
            f"configs/train and configs/examples for files of --run_mode={mode}"
        ) from None
    if flags.FLAGS.run_mode == "bench":  # whole, it would be too large: it profiles single rounds
        call = functools.partial(call, profile_dir=flags.FLAGS.profile)
    else:
        folder = flags.FLAGS.profile
    with _profiled(folder):
        call()


def _profiled(folder: str | None) -> contextlib.AbstractContextManager:
    """A trace in which a round's parts carry the names draft, verify and commit."""
    import jax

    return jax.profiler.trace(folder) if folder else contextlib.nullcontext()


def set_up(values: flags.FlagValues) -> None:
    """What must be said before anything is compiled or read."""
    import jax

    if values.run_mode == "aot":
        # What is compiled for a TPU cannot be loaded here, so keeping it is of no use.
        jax.config.update("jax_platforms", "cpu")
    elif values.compilation_cache_dir:
        folder = pathlib.Path(values.compilation_cache_dir).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    given = values.coordinator_address, values.process_count, values.process_index
    if values.multihost or any(x is not None for x in given):
        from specjax.partitioning import hosts

        hosts.initialize(*given)
    if values.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = values.tfds_data_dir


def expand(argv: list[str]) -> list[str]:
    """Turns ``--gin.NAME=VALUE`` into ``--gin_bindings=NAME=VALUE``."""
    return [f"--gin_bindings={a[len('--gin.') :]}" if a.startswith("--gin.") else a for a in argv]


if __name__ == "__main__":
    app.run(main, argv=expand(sys.argv))
