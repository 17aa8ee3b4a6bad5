"""A reduced vocabulary for drafts: only the pieces that texts are mostly made of.

A large vocabulary is most of a small model. A draft that can say a sixth of the pieces loses the rounds in
which another one comes, and no exactness: what it cannot say it proposes with probability 0.

References:
  Li et al. 2025 (2503.01840), whose released heads have such a mapping ("d2t"); Zhao et al. 2025
  (2502.14856), section 3, which ranks pieces by how often they occur.
"""

import base64
import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class DraftVocab:
    """Which of a vocabulary's pieces a draft knows. Static: part of a model's configuration.

    The draft's own ids count the known pieces upwards; one more id stands for all others, which it can
    read and never says.

    Attributes:
      mask: a bit for every piece of the whole vocabulary, the highest of a byte first, as base64.
      vocab_size: V, pieces of the whole vocabulary.
    """

    mask: str
    vocab_size: int

    def __post_init__(self):
        if len(base64.b64decode(self.mask)) != -(-self.vocab_size // 8):
            raise ValueError(f"the mask of a draft vocabulary is not one of {self.vocab_size} bits")

    def __repr__(self) -> str:
        return f"DraftVocab({len(self)} of {self.vocab_size}, {self.mask[:64]}…)"

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def ids(self) -> Int[np.ndarray, " K"]:
        """The whole vocabulary's id of every known piece, upwards ("d2t", there as differences)."""
        bits = np.unpackbits(np.frombuffer(base64.b64decode(self.mask), np.uint8))
        return np.flatnonzero(bits[: self.vocab_size]).astype(np.int32)

    @functools.cached_property
    def own(self) -> Int[np.ndarray, " V"]:
        """The draft's id of every piece; K for those that it does not know ("t2d")."""
        own = np.full(self.vocab_size, len(self), np.int32)
        own[self.ids] = np.arange(len(self), dtype=np.int32)
        return own

    def whole(self, logits: Float[Array, "*B K"]) -> Float[Array, "*B V"]:
        """Logits over the whole vocabulary: minus infinity for what cannot be said."""
        wide = jnp.full((*logits.shape[:-1], self.vocab_size), -jnp.inf, logits.dtype)
        return wide.at[..., jnp.asarray(self.ids)].set(logits)


def of_ids(ids: Int[np.ndarray, " K"], vocab_size: int) -> DraftVocab:
    """The draft vocabulary of these ids.

    Raises:
      ValueError: there are none, or some lie beyond the vocabulary.
    """
    ids = np.unique(ids)
    if not ids.size or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"a draft vocabulary takes ids below {vocab_size}, and at least one")
    bits = np.zeros(vocab_size, np.uint8)
    bits[ids] = 1
    return DraftVocab(base64.b64encode(np.packbits(bits).tobytes()).decode(), vocab_size)


def most_frequent(
    files: tuple[str, ...], count: int, vocab_size: int, always: tuple[int, ...] = ()
) -> DraftVocab:
    """The pieces that occur most often in token files, every file weighing the same.

    Args:
      files: ``.npz`` with ``tokens``, as `specjax.training.causal_lm.Windows` reads them, or ``targets``
        (`specjax.training.batches.TokenPairs`).
      count: K, how many pieces; of two that are as frequent the lower id.
      vocab_size: V.
      always: ids that are among them whatever the files say, such as the end of a text.

    Raises:
      ValueError: no such file, or the vocabulary has fewer pieces.
    """
    if not 0 < count <= vocab_size:
        raise ValueError(f"a draft vocabulary of {count} pieces out of {vocab_size}")
    share = np.zeros(vocab_size)
    for file in files:
        path = pathlib.Path(file).expanduser()
        if not path.is_file():
            raise ValueError(f"no token file {file}")
        with np.load(path) as arrays:
            name = "tokens" if "tokens" in arrays else "targets"
            found = np.bincount(arrays[name], minlength=vocab_size)
        share += found / found.sum()
    share[list(always)] = np.inf
    return of_ids(np.argsort(-share, kind="stable")[:count], vocab_size)
