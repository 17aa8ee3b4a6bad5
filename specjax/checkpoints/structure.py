"""Parameter trees as flat dicts of dotted names, and one strict check of what a file holds."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import traverse_util
from jaxtyping import PyTree

from specjax.decode import devices


def flatten(tree: PyTree) -> dict[str, Any]:
    """Leaves of a nested dict under dotted names, e.g. ``encoder.layers_0.mlp.wo.weight``."""
    return traverse_util.flatten_dict(tree, sep=".")


def unflatten(flat: Mapping[str, Any]) -> PyTree:
    """The nested dict of dotted names."""
    return traverse_util.unflatten_dict(dict(flat), sep=".")


def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Dotted name to shape."""
    return {name: tuple(leaf.shape) for name, leaf in flatten(tree).items()}


def fingerprint(params: PyTree) -> str:
    """Short digest of the first values of every parameter, to tell one set of weights from another."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        head = devices.fetch(leaf[(0,) * (leaf.ndim - 1)][:64])
        digest.update(repr((leaf.shape, str(leaf.dtype))).encode() + head.tobytes())
    return digest.hexdigest()[:16]


def check(found: Mapping[str, Any], expected: Mapping[str, Any], where: str, **also: list) -> None:
    """Compares what a file holds with what a model needs.

    All that is wrong is said at once: a user who fixes one name after the other loads a large
    checkpoint many times.

    Args:
      found: name to shape (or to a text that describes shape and type).
      expected: the same, of the model.
      where: the file, for the message.
      **also: further problems by label (underscores become spaces), each a list of names.

    Raises:
      ValueError: names of all missing, unexpected and misshapen tensors, and of ``also``.
    """
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [
            f"{name} is {found[name]}, not {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
        **{label.replace("_", " "): names for label, names in also.items()},
    }
    parts = [f"{label}: {', '.join(sorted(names))}" for label, names in problems.items() if names]
    if parts:
        raise ValueError(f"{where} does not fit the model; {'; '.join(parts)}")
