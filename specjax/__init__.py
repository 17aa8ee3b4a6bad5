"""Speculative decoding in JAX."""

from specjax.decode.interfaces import Prompt
from specjax.decode.loop import Decoded, generate
from specjax.decode.sampling import Sampling

__all__ = ["Decoded", "Prompt", "Sampling", "generate"]
