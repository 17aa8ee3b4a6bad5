"""Texts that a draft says while it is trained, with the target's law of them.

A draft is tested on its own tokens, so DistillSpec lets it say the texts that it learns from. It says them
as it drafts: one chain as long as the text, by the same code as in decoding.

References:
  Zhou et al. 2023, DistillSpec (2310.08461), the choice of data (fixed, draft-generated, or a mixture);
  Agarwal et al. 2023 (2306.13649), on-policy distillation.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from specjax.decode import loop as decoding
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.sampling import Sampling
from specjax.drafters.small_model import SmallModel
from specjax.models.t5 import T5
from specjax.training.distill import TeacherBatches


@dataclasses.dataclass(frozen=True)
class StudentBatches:
    """A source's inputs with what the draft says to them, and the target's law of that.

    A batch hangs on its position and on the draft's parameters, so a run that was stopped goes on the same.
    Texts end with EOS, or at the length of the references' padding. For one process.

    Attributes:
      source: the inputs, with the target.
      student: the draft.
      share: of the rows that the draft answers, drawn anew for every batch; the others keep their
        references. 1 is on-policy, less a mixture, 0 the fixed texts.
      temperature: that it answers with.
      seed: of both draws.
    """

    source: TeacherBatches
    student: T5
    share: float = 1.0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie in [0, 1], got {self.share}")

    def __len__(self) -> int:
        return len(self.source)

    def said_by(self, params: PyTree) -> "Said":
        """The batches as the draft answers now."""
        return Said(self, params)

    def __getitem__(self, position: int) -> dict[str, Array]:
        raise TypeError("what a draft says hangs on its parameters: ask said_by(params)")

    @functools.cached_property
    def _say(self):
        return jax.jit(functools.partial(say, self.student, self.source.teacher))


@dataclasses.dataclass(frozen=True)
class Said:
    """`StudentBatches` as a draft of these parameters says them."""

    source: StudentBatches
    params: PyTree = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, position: int) -> dict[str, Array]:
        source, given = self.source, self.source.source
        key = jax.random.fold_in(jax.random.key(source.seed), position)
        params = Params(given.parameters, self.params)
        batch = given.batches[position]
        said = source._say(params, batch, source.share, source.temperature, key)
        return given.read(batch | said)


def say(
    student: T5,
    teacher: T5,
    params: Params,
    batch: dict,
    share: Array,
    temperature: Array,
    key: Key[Array, ""],
) -> dict[str, Array]:
    """Targets, decoder inputs and weights of a batch of which the draft says a share of the rows."""
    rows, length = batch["targets"].shape
    prompt = Prompt(batch["inputs"], batch["input_mask"].sum(1, dtype=jnp.int32))
    keys = decoding.row_keys(key, jnp.arange(rows, dtype=jnp.int32))
    drafter = SmallModel(student, length)
    state = decoding.start(decoding.Decoder(teacher, length, drafter), params, prompt, keys)
    sampling = Sampling(temperature).rows(rows)
    drawn, _ = drafter.propose(params, state.drafter, state.text, sampling, keys)
    end = (drawn.tokens == teacher.eos_id).astype(jnp.int32)
    inside = end.cumsum(1) - end == 0  # up to and including the first EOS
    real = batch["weights"].any(1)  # not what fills a batch up
    own = (jax.random.uniform(jax.random.fold_in(key, rows), (rows,)) < share) & real
    weights = inside.astype(batch["weights"].dtype)
    targets = jnp.where(own[:, None], drawn.tokens, batch["targets"])
    return {
        "targets": targets,
        "decoder_inputs": jnp.concatenate(
            [batch["decoder_inputs"][:, :1], targets[:, :-1]], axis=1
        ),
        "weights": jnp.where(own[:, None], weights, batch["weights"]),
    }
