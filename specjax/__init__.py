"""Speculative decoding in JAX."""

from specjax.decode.api import generate, stream
from specjax.decode.interfaces import Prompt
from specjax.decode.loop import Decoded
from specjax.decode.sampling import Sampling

__all__ = ["Decoded", "Prompt", "Sampling", "generate", "load", "stream"]


def load(name, dtype: str = "float32"):
    """Model, parameters and vocabulary, by name or path: see `specjax.pretrained.load`."""
    from specjax import pretrained  # checkpoint readers are slow to import, and not always needed

    return pretrained.load(name, dtype)
