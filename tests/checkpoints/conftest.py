"""Checkpoints that T5X wrote, with what T5X itself computes from them."""

import pathlib
import shutil
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Prompt
from specjax.models.t5 import T5, T5Config

T5X = pathlib.Path(__file__).parents[1] / "fixtures" / "t5x"

MODELS = {
    "t5x_tiny": T5(
        T5Config(
            vocab_size=64, emb_dim=32, num_heads=4, head_dim=8, mlp_dim=64,
            num_encoder_layers=2, num_decoder_layers=2,
        )
    ),
    "t5x_tiny_draft": T5(
        T5Config(
            vocab_size=64, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32,
            num_encoder_layers=1, num_decoder_layers=1,
        )
    ),
    "t5x_scanned": T5(
        T5Config(
            vocab_size=64, emb_dim=24, num_heads=3, head_dim=8, mlp_dim=48,
            num_encoder_layers=3, num_decoder_layers=3, shared_relative_bias=False,
        )
    ),
}  # fmt: skip


class Golden(NamedTuple):
    """T5X's own results.

    Attributes:
      prompt: the encoder's input.
      decoder_inputs: int32 ``[B, T]``.
      weights: int32 ``[B, T]``, 0 where the decoder's target is padding.
      logits: ``[B, T, V]``.
      greedy: int32 ``[B, 16]``.
    """

    prompt: Prompt
    decoder_inputs: np.ndarray
    weights: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray


def read_golden(name: str) -> Golden:
    """The golden file beside a checkpoint."""
    with np.load(T5X / f"{name}_golden.npz") as arrays:
        tokens = arrays["encoder_input_tokens"]
        length = (tokens > 0).sum(1, dtype=np.int32)
        return Golden(
            Prompt(jnp.asarray(tokens), jnp.asarray(length)),
            arrays["decoder_input_tokens"],
            arrays["decoder_loss_weights"],
            arrays["logits"],
            arrays["greedy"],
        )


@pytest.fixture
def tiny(tmp_path) -> pathlib.Path:
    """A writable copy of t5x_tiny's model directory."""
    return shutil.copytree(T5X / "t5x_tiny", tmp_path / "t5x_tiny")


def error_of(function, *args, **kwargs) -> str:
    """The message of the ValueError that a call must raise: one line."""
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)
