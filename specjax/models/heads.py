"""What heads of all kinds have in common: they say pieces of their target's, through its output layer."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from specjax.models import layers
from specjax.models.draft_vocab import DraftVocab

# The target's hidden state that heads read: what its output layer reads.
TAP = "final"


def known(config: Any) -> int:
    """K, pieces that heads can say."""
    return config.vocab_size if config.draft_vocab is None else len(config.draft_vocab)


def checked(config: Any) -> DraftVocab | None:
    """A configuration's draft vocabulary, also from the fields that a file has of it.

    Raises:
      ValueError: it is of another vocabulary.
    """
    vocab = config.draft_vocab
    vocab = DraftVocab(**vocab) if isinstance(vocab, dict) else vocab
    if vocab is not None and vocab.vocab_size != config.vocab_size:
        raise ValueError(
            f"a draft vocabulary of {vocab.vocab_size} pieces, the heads have {config.vocab_size}"
        )
    return vocab


def check_target(config: Any, target: Any) -> None:
    """Raises ValueError unless a target has the heads' pieces and width."""
    ours, theirs = (config.vocab_size, config.emb_dim), target.config
    if ours != (theirs.vocab_size, theirs.emb_dim):
        raise ValueError(
            f"the heads are for {ours[0]} pieces and width {ours[1]}, the target has "
            f"{theirs.vocab_size} and {theirs.emb_dim}"
        )


def output_rows(config: Any, target: Any, params: PyTree) -> Float[Array, "K d"]:
    """The rows of a target's output layer of the pieces that heads can say; an array of its own."""
    output = layers.untile(target.output(params))
    if config.draft_vocab is None:
        return jnp.array(output)
    return output[jnp.asarray(config.draft_vocab.ids)]
