"""A short training of an EAGLE head in a process of its own, which test_heads_killed.py kills.

python -m tests.training.heads_run FOLDER
"""

import pathlib
import sys

import jax
import numpy as np

from specjax.models.eagle import Eagle, EagleConfig
from specjax.training import answers, heads, loop, states
from tests import toys
from tests.models import decoders

TARGET = decoders.tiny_llama()
STEPS, ACCUMULATION = 60, 2


def main(folder: pathlib.Path) -> None:
    params = decoders.init(TARGET, 1)
    states.pretrained.load = lambda name: (TARGET, params, None)
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, toys.VOCAB, n).astype(np.int32) for n in rng.integers(6, 24, 60)]
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "texts.npz"
    answers.save(source, answers.Answered(texts, [np.arange(len(t)) >= 3 for t in texts]))
    batches = states.StateBatches(
        answers.AnswerBatches((str(source),), lengths=(12, 24), tokens=48), "toy",
        folder=str(folder / "states"),
    )  # fmt: skip
    c = TARGET.config
    model = Eagle(
        EagleConfig(
            vocab_size=toys.VOCAB, emb_dim=c.emb_dim, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32
        )
    )  # fmt: skip
    start = model.init(jax.random.key(2)) | model.taken(TARGET, params)
    loop.train(
        heads.Eagle1(model), batches, str(folder / "run"),
        loop.Schedule(1e-3, 5, STEPS // ACCUMULATION, 10), {"again": batches}, checkpoint_period=5,
        evaluation_period=20, log_period=5, initial_params=start, optimizer="adamw",
        accumulation=ACCUMULATION,
    )  # fmt: skip


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
