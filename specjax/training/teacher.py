"""A target's own outputs on given inputs, as token arrays to train drafts on."""

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from rich import progress

from specjax.checkpoints import int8, native, structure
from specjax.decode import api, stopping
from specjax.decode.interfaces import Model, Prompt
from specjax.decode.sampling import Sampling
from specjax.training.batches import TokenPairs, load_pairs, save_pairs


def load_target(model: Model, path: str) -> PyTree:
    """Parameters of a trained target, from an int8 file or a training run's newest checkpoint.

    Args:
      model: what the parameters must fit.
      path: a ``.safetensors`` file or a run's folder.
    """
    if path.endswith(".safetensors"):
        return int8.load(pathlib.Path(path).expanduser(), model)
    return native.load_run(path, model.abstract(jnp.float32))


def decode_pairs(
    model: Model,
    params: PyTree,
    pairs: TokenPairs,
    output: str,
    *,
    temperature: float = 0.0,
    batch_size: int = 64,
    seed: int = 0,
    lengths: tuple[int, ...] = (32, 64, 128),
    chunk: int = 64,
) -> TokenPairs:
    """Decodes every input plainly; outputs that do not end within the length limit are left out.

    Inputs of like size are decoded together, with a limit of twice the reference's length. Chunks
    of ``chunk`` batches are kept beside ``output`` until all are done, so a stopped run goes on.

    Args:
      model: the target.
      params: its parameters.
      pairs: inputs, and references for their lengths.
      output: ``.npz`` file to write.
      temperature: 0 is greedy.
      batch_size: rows decoded together.
      seed: of the sampling keys.
      lengths: paddings of inputs and output limits (each pair of them is compiled once).
      chunk: batches per saved part.

    Returns:
      Inputs with the target's outputs.
    """
    plan = _plan(pairs, batch_size, lengths)
    if jax.default_backend() == "cpu":
        params = model.tile(params)
    target = pathlib.Path(output).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    run = _fingerprint(params, plan, temperature, seed)
    label = f"decoding to {target.name}"
    for number in progress.track(range(0, len(plan), chunk), description=label):
        part = target.with_name(f"{target.stem}.{run}.part{number}.npz")
        if not part.exists():
            key = jax.random.fold_in(jax.random.key(seed), number)
            batches = plan[number : number + chunk]
            made = _decode(model, params, pairs, batches, temperature, batch_size, key)
            unfinished = part.with_name(f"unfinished-{part.name}")
            save_pairs(unfinished, made)
            unfinished.replace(part)  # a part that exists is whole
        parts.append(part)
    done = sum((load_pairs(p) for p in parts), TokenPairs([], []))
    save_pairs(target, done)
    for part in parts:
        part.unlink()
    return done


def _fingerprint(params: PyTree, plan: list[tuple], temperature: float, seed: int) -> str:
    """Short digest of what decides the outputs: parts of another run are not taken up."""
    what = repr((plan, temperature, seed, structure.fingerprint(params)))
    return hashlib.sha256(what.encode()).hexdigest()[:12]


def _plan(pairs: TokenPairs, batch_size: int, lengths: tuple[int, ...]) -> list[tuple]:
    """(input padding, output limit, members) of each batch, like sizes together."""
    fit = lambda n: next((x for x in lengths if n <= x), None)  # noqa: E731
    groups: dict[tuple, list[int]] = {}
    for i, (source, target) in enumerate(zip(pairs.inputs, pairs.targets, strict=True)):
        shape = fit(len(source)), fit(min(2 * len(target), lengths[-1]))
        if None not in shape:
            groups.setdefault(shape, []).append(i)
    plan = []
    for shape, members in sorted(groups.items()):
        members.sort(key=lambda i: len(pairs.targets[i]))
        plan += [(*shape, members[j : j + batch_size]) for j in range(0, len(members), batch_size)]
    return plan


def _decode(model, params, pairs, batches, temperature, batch_size, key) -> TokenPairs:
    inputs, targets = [], []
    for number, (length, limit, members) in enumerate(batches):
        tokens = np.zeros((batch_size, length), np.int32)
        counts = np.ones(batch_size, np.int32)
        for row, member in enumerate(members):
            source = pairs.inputs[member]
            tokens[row, : len(source)], counts[row] = source, len(source)
        out = api.generate(
            model,
            params,
            Prompt(jnp.asarray(tokens), jnp.asarray(counts)),
            sampling=Sampling(temperature),
            max_decode_len=limit,
            key=jax.random.fold_in(key, number),
        )
        out = jax.device_get(out)
        for row, member in enumerate(members):
            if out.finish_reason[row] == stopping.STOP:
                inputs.append(pairs.inputs[member])
                targets.append(out.tokens[row, : out.lengths[row]])
    return TokenPairs(inputs, targets)
