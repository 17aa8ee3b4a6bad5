"""Speculative decoding in JAX."""

from specjax.decode.api import generate, stream
from specjax.decode.interfaces import Prompt
from specjax.decode.loop import Decoded
from specjax.decode.sampling import Sampling

__all__ = ["Decoded", "Prompt", "Sampling", "generate", "stream"]
