"""Which parameters a decoding step reads, by their names."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

# Embedding tables, of which a step reads a row per token, unless they are the output layer too.
TABLES = ("token_embedder", "embed_tokens", "embed_positions")
OUTPUTS = ("logits_dense", "lm_head")


def leaves(params: PyTree) -> list[tuple[tuple[str, ...], Any]]:
    """(names from the root, leaf) of all parameters."""
    flat, _ = jax.tree.flatten_with_path(params)
    return [(tuple(str(getattr(k, "key", k)) for k in path), leaf) for path, leaf in flat]


def by_prefill_alone(path: tuple[str, ...]) -> bool:
    """What only prefill reads: the encoder, and cross-attention's keys and values."""
    cross = "encoder_decoder_attention" in path and ("key" in path or "value" in path)
    return path[0] == "encoder" or cross


def looked_up(params: PyTree) -> list[Any]:
    """Tables of which a step reads single rows."""
    is_table = _tables(params)
    return [leaf for path, leaf in leaves(params) if is_table(path)]


def whole(params: PyTree) -> list[Any]:
    """What a step reads from end to end."""
    is_table = _tables(params)
    return [leaf for path, leaf in leaves(params) if not (by_prefill_alone(path) or is_table(path))]


def _tables(params: PyTree) -> Callable[[tuple[str, ...]], bool]:
    """Whether a path is a table's. By names: a table and an output layer may be one array."""
    untied = any(name in path for path, _ in leaves(params) for name in OUTPUTS)
    return lambda path: path[0] in TABLES and (untied or path[0] == "embed_positions")
