"""Decodes training inputs with a trained target, for a draft to learn from.

  python scripts/teacher_outputs.py --gin_file=configs/models/debian_target.gin \
      --target=specjax/assets/debian/target.int8.safetensors --temperature=1 \
      --inputs=~/.cache/specjax/debian_v001/tokens/ende-train.npz \
      --output=~/.cache/specjax/debian_v001/teacher/ende-t1.npz

Stopped, it goes on where it was.
"""

from absl import app, flags

from specjax import config
from specjax.training import batches, teacher

FLAGS = flags.FLAGS
flags.DEFINE_string("gin_file", "configs/models/debian_target.gin", "Gin file with macro MODEL.")
flags.DEFINE_string(
    "target",
    "specjax/assets/debian/target.int8.safetensors",
    "Training run or int8 file of the target.",
)
flags.DEFINE_string("inputs", None, "Token arrays (.npz) whose inputs are decoded.", required=True)
flags.DEFINE_string("output", None, "Token arrays (.npz) to write.", required=True)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_integer("batch_size", 64, "Rows decoded together.")
flags.DEFINE_integer("target_limit", 48, "Pairs with longer references are left out.")
flags.DEFINE_integer("input_limit", 64, "Pairs with longer inputs are left out.")
flags.DEFINE_integer("limit", 0, "Take about this many pairs, spread evenly; 0 takes all.")
flags.DEFINE_integer("seed", 0, "Of the sampling keys.")


def select(pairs: batches.TokenPairs) -> batches.TokenPairs:
    """Every n-th pair, n so that ``--limit`` remain, and of those the ones that are short enough."""
    step = max(1, len(pairs) // FLAGS.limit) if FLAGS.limit else 1
    kept = [
        i
        for i in range(0, len(pairs), step)
        if len(pairs.inputs[i]) <= FLAGS.input_limit and len(pairs.targets[i]) <= FLAGS.target_limit
    ]
    return batches.TokenPairs([pairs.inputs[i] for i in kept], [pairs.targets[i] for i in kept])


def main(_) -> None:
    config.parse([FLAGS.gin_file])
    model = config.macro("MODEL")
    params = teacher.load_target(model, FLAGS.target)
    pairs = select(batches.load_pairs(FLAGS.inputs))
    done = teacher.decode_pairs(
        model,
        params,
        pairs,
        FLAGS.output,
        temperature=FLAGS.temperature,
        batch_size=FLAGS.batch_size,
        seed=FLAGS.seed,
    )
    print(f"{len(done)} of {len(pairs)} outputs ended and were written to {FLAGS.output}")


if __name__ == "__main__":
    app.run(main)
