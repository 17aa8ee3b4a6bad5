"""Operations of a program's matrix products, counted where a scan's turns are still known."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def of(function: Callable, *args: Any) -> float:
    """Multiplications and additions of all matrix products.

    Args:
      function: traced, not run.
      *args: arrays or their shapes.

    Returns:
      Their number over all devices; of code under `jax.shard_map` over one group's share. A loop whose
      turns are not known before counts as one turn, of branches the dearest one.
    """
    return count(jax.make_jaxpr(function)(*args).jaxpr)


def count(jaxpr: core.Jaxpr) -> float:
    """The same of a traced program."""
    total = 0.0
    for equation in jaxpr.eqns:
        kind, params = equation.primitive.name, equation.params
        if kind == "dot_general":
            total += _product(equation)
        elif kind == "cond":
            total += max(count(branch.jaxpr) for branch in params["branches"])
        else:
            turns = params["length"] if kind == "scan" else 1
            total += turns * sum(count(inner) for inner in _inside(params))
    return total


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * inner * math.prod(equation.outvars[0].aval.shape)


def _inside(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one
