"""Where a round's time goes: a profile of the compiled loop, summed by its named scopes.

The loop names its parts (draft, verify, commit). A compiled program remembers in which of them each
instruction was written, and a profile says how long each ran, on CPUs and TPUs alike.
"""

import functools
import gzip
import json
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.bench import harness
from specjax.bench.harness import Method, Runner
from specjax.decode import loop
from specjax.decode.interfaces import Params, Prompt
from specjax.decode.sampling import Sampling

SCOPES = ("draft", "verify", "commit")
# These hold others, which are counted by themselves.
CONTAINERS = ("while", "conditional", "call")

_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*op_name="([^"]*)"')


class Parts(NamedTuple):
    """Milliseconds of one round, by scope.

    Attributes:
      draft, verify, commit: the scopes of `specjax.decode.loop`.
      rest: what stands in none of them; a plain step stands there wholly.
    """

    draft: float
    verify: float
    commit: float
    rest: float

    @property
    def total(self) -> float:
        return sum(self)


def profile(
    runner: Runner,
    methods: list[Method],
    params: Params,
    prompt: Prompt,
    folder: pathlib.Path,
    count: int = 32,
) -> dict[Method, Parts]:
    """Profiles ``count`` rounds of each method; the traces stay in ``folder`` (TensorBoard, Perfetto).

    Args:
      runner: the target.
      methods: what to profile.
      params: of target and drafts.
      prompt: a batch to decode.
      folder: where traces go, a folder per method.
      count: rounds.

    Returns:
      Milliseconds per round and scope. Timed under the profiler, which costs some: ratios count.
    """
    batch = prompt.length.shape[0]
    keys = loop.row_keys(jax.random.key(0), jnp.arange(batch, dtype=jnp.int32))
    sampling, found = Sampling(0.0).rows(batch), {}
    for method in methods:
        decoder = method.decoder(runner, eos_id=-1)
        own = method.pick(params)
        state = loop.jit_start(decoder, own, prompt, keys)
        arguments = (decoder, own, state, sampling, jnp.int32(count))
        text = harness.rounds.lower(*arguments).compile().as_text()
        run = functools.partial(harness.rounds, *arguments)
        jax.block_until_ready(run())
        place = folder / f"{method.name} {method.gamma}".replace(" ", "-")
        with jax.profiler.trace(str(place)):
            jax.block_until_ready(run())
        seconds = by_scope(events(place), scopes(text))
        found[method] = Parts(*(seconds[name] * 1e3 / count for name in (*SCOPES, "rest")))
    return found


def scopes(hlo: str) -> dict[str, str]:
    """Instruction name to scope, of a compiled program's text."""
    found = {}
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            name, path = match.groups()
            parts = path.split("/")
            found[name] = next((scope for scope in SCOPES if scope in parts), "rest")
    return found


def events(folder: pathlib.Path) -> list[tuple[str, float]]:
    """(instruction, seconds) of the newest trace in a folder.

    Raises:
      ValueError: there is none.
    """
    traces = sorted(folder.glob("**/*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not traces:
        raise ValueError(f"no trace in {folder}")
    with gzip.open(traces[-1], "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    ran = [e for e in found if e.get("ph") == "X" and "hlo_op" in e.get("args", {})]
    return [(e["args"]["hlo_op"], e["dur"] * 1e-6) for e in ran]


def by_scope(ran: list[tuple[str, float]], known: Mapping[str, str]) -> dict[str, float]:
    """Seconds per scope; what the program has no scope for (copies, converted types) is rest."""
    sums = dict.fromkeys((*SCOPES, "rest"), 0.0)
    for name, seconds in ran:
        if name.split(".")[0] not in CONTAINERS:
            sums[known.get(name, "rest")] += seconds
    return sums


def c(parts: Parts, plain: Parts, gamma: int) -> float:
    """Cost of a drafted token over a plain step, as Leviathan et al. read it from their profiles."""
    return parts.draft / gamma / plain.total
