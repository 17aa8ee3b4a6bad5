"""Layers one after the other: unrolled, or scanned over stacked parameters.

Unrolled, layer i's parameters are the subtree ``layers_i``, and the compiler sees every layer.
Scanned, one subtree ``layers`` holds all layers' parameters, layers as first axis; the compiler sees
one layer, which is what an 80-layer model is compiled by. Keys and values follow suit
(`specjax.models.cache`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

SCANNED = "layers"

# What the backward pass finds in memory; the rest it computes again. T5X's names.
REMAT_POLICIES: dict[str, Callable | None] = {
    "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def run(stack: PyTree, body: Callable, x: Any, remat_policy: str = "none") -> tuple[Any, Any]:
    """Runs all layers of a stack.

    Args:
      stack: parameters, of which the layers are found by their names.
      body: ``(x, layer, i) -> (x, out)``; ``i`` is an int, or traced where layers are scanned.
      x: what the first layer gets.
      remat_policy: "none", or one of `REMAT_POLICIES`.

    Returns:
      The last layer's ``x``, and what the layers put out: a list, or where they are scanned one tree
      with layers as first axis.

    Raises:
      ValueError: no such policy.
    """
    body = rematerialised(body, remat_policy)
    if SCANNED in stack:
        layers = stack[SCANNED]
        index = jnp.arange(jax.tree.leaves(layers)[0].shape[0], dtype=jnp.int32)
        return lax.scan(lambda x, at: body(x, *at), x, (layers, index))
    outs = []
    for i, layer in enumerate(unrolled(stack)):
        x, out = body(x, layer, i)
        outs.append(out)
    return x, outs


def rematerialised(body: Callable, policy: str) -> Callable:
    """A layer whose activations the backward pass computes again, as far as the policy says."""
    if policy == "none":
        return body
    if policy not in REMAT_POLICIES:
        known = ", ".join(["none", *REMAT_POLICIES])
        raise ValueError(f"unknown remat_policy {policy!r}, known are {known}")
    # A layer's index must stay an int where layers are unrolled.
    kept = REMAT_POLICIES[policy]

    def again(x, layer, i):
        if isinstance(i, int):
            return jax.checkpoint(lambda x, layer: body(x, layer, i), policy=kept)(x, layer)
        return jax.checkpoint(body, policy=kept, prevent_cse=False)(x, layer, i)

    return again


def split(outs: Any) -> tuple[Any, dict]:
    """Of outs (kept, x) what is kept, and the layers' inputs under their taps' names."""
    if isinstance(outs, list):
        kept, seen = [out[0] for out in outs], [out[1] for out in outs]
    else:
        kept, seen = outs
    return kept, {f"layer_{i}": x for i, x in enumerate(seen)}


def unrolled(stack: PyTree) -> list[PyTree]:
    """Parameters of each layer of an unrolled stack."""
    count = sum(name.startswith("layers_") for name in stack)
    return [stack[f"layers_{i}"] for i in range(count)]


def table(depth: int, layer: PyTree[tuple], scan: bool) -> PyTree[tuple]:
    """(shape, logical axes, initializer) of a stack's parameters, from one layer's.

    Args:
      depth: layers.
      layer: of one layer; leaves are tuples.
      scan: whether layers are scanned.
    """
    if not scan or depth == 0:
        return {f"layers_{i}": layer for i in range(depth)}

    def of(leaf: tuple) -> tuple:
        shape, axes, init = leaf

        def stacked(key, _, dtype):
            keys = jax.random.split(key, depth)
            return jax.vmap(lambda key: init(key, shape, dtype))(keys)

        return (depth, *shape), ("layers", *axes), stacked

    return {SCANNED: jax.tree.map(of, layer, is_leaf=lambda node: isinstance(node, tuple))}


def pile(params: PyTree) -> PyTree:
    """Parameters of unrolled stacks as those of scanned ones, layers as first axis."""
    if not isinstance(params, dict):
        return params
    layers = unrolled(params)
    rest = {n: pile(x) for n, x in params.items() if not n.startswith("layers_")}
    return rest | {SCANNED: jax.tree.map(lambda *x: jnp.stack(x), *layers)} if layers else rest


def unpile(params: PyTree) -> PyTree:
    """Parameters of scanned stacks as those of unrolled ones; views, where the arrays are NumPy's."""
    if not isinstance(params, dict):
        return params
    out = {name: unpile(x) for name, x in params.items() if name != SCANNED}
    for path, leaf in jax.tree.leaves_with_path(params.get(SCANNED, {})):
        for i in range(leaf.shape[0]):
            *inner, last = (key.key for key in path)
            node = out.setdefault(f"layers_{i}", {})
            for name in inner:
                node = node.setdefault(name, {})
            node[last] = leaf[i]
    return out
