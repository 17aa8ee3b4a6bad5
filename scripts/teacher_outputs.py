"""Decodes training inputs with a trained target, for a draft to learn from.

  scripts/teacher_outputs.py --gin_file=configs/models/debian_target.gin \
      --target=~/.cache/specjax/runs/debian_target --temperature=1 \
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
    "target", "~/.cache/specjax/runs/debian_target", "Training run or int8 file of the target."
)
flags.DEFINE_string("inputs", None, "Token arrays (.npz) whose inputs are decoded.", required=True)
flags.DEFINE_string("output", None, "Token arrays (.npz) to write.", required=True)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_integer("batch_size", 64, "Rows decoded together.")
flags.DEFINE_integer("input_limit", 64, "Longer inputs are cut to this many tokens.")
flags.DEFINE_integer("limit", 0, "Decode only this many pairs, spread evenly; 0 decodes all.")
flags.DEFINE_integer("seed", 0, "Of the sampling keys.")


def main(_) -> None:
    config.parse([FLAGS.gin_file])
    model = config.macro("MODEL")
    params = teacher.load_target(model, FLAGS.target)
    pairs = batches.load_pairs(FLAGS.inputs).cut(FLAGS.input_limit)
    if FLAGS.limit and FLAGS.limit < len(pairs):
        step = len(pairs) / FLAGS.limit
        kept = [int(i * step) for i in range(FLAGS.limit)]
        pairs = batches.TokenPairs(
            [pairs.inputs[i] for i in kept], [pairs.targets[i] for i in kept]
        )
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
