"""Several processes as one program: starting them, and what one of them decides for all.

Every process reads the same inputs and computes the same host values, but for training batches of seqio
tasks, of which it reads its own rows; process 0 alone prints and writes.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def initialize(
    coordinator_address: str | None = None,
    process_count: int | None = None,
    process_index: int | None = None,
) -> None:
    """Joins this process to the others, before anything else is asked of JAX.

    Args:
      coordinator_address: host and port of process 0; on Cloud TPU and GKE all three are found.
      process_count: how many processes there are.
      process_index: which of them this is.

    Raises:
      ValueError: only some of the three are given.
    """
    given = (coordinator_address, process_count, process_index)
    if any(x is None for x in given) and any(x is not None for x in given):
        raise ValueError(
            "coordinator_address, process_count and process_index belong together (on Cloud TPU "
            "leave all three out)"
        )
    if process_count is not None and not 0 <= process_index < process_count:
        raise ValueError(f"process_index must lie in 0 .. {process_count - 1}, got {process_index}")
    jax.distributed.initialize(coordinator_address, process_count, process_index)


def leads() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def decide(function: Callable[[], Any]) -> Any:
    """Calls a function in process 0 alone, and gives its result to all.

    Args:
      function: returns what JSON can hold.

    Raises:
      ValueError: it raised one there; the others stop with the same message instead of waiting.
    """
    if jax.process_count() == 1:
        return function()
    answer: dict[str, Any] = {}
    if leads():
        try:
            answer = {"value": function()}
        except Exception as error:  # whatever it is: the others must not wait for an answer
            answer = {"error": str(error) or type(error).__name__}
    answer = json.loads(_broadcast(json.dumps(answer).encode()))
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def _broadcast(data: bytes) -> bytes:
    size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(data), np.int32)))
    buffer = np.zeros(size, np.uint8)
    if leads():
        buffer[:] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8).tobytes()
