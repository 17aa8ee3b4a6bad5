"""The same weights, prompts and lengths through transformers' `generate` and through specjax, in turns.

  python3 -m venv hf && hf/bin/pip install torch transformers accelerate -e .[gguf]
  hf/bin/python scripts/compare_transformers.py --model=smollm2-135m --prompts=FILE.jsonl --field=prompt

Needs torch and transformers beside specjax: an environment of its own. Methods run one after the other on
each prompt, in rotating order, both libraries on all cores; greedy, float32. Tokens are compared; where they
differ, the two tokens' logits say whether it was a near-tie. Prints one line per prompt and the medians, and
writes them to --output as JSON.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from rich.progress import track

from specjax import Prompt, checkpoints, generate, pretrained
from specjax.checkpoints import causal
from specjax.data import tokenizers
from specjax.drafters.small_model import SmallModel

# A difference of logits below this is rounding: both libraries add in another order.
NEAR_TIE = 1e-3


def theirs(path: str) -> transformers.PreTrainedModel:
    """transformers' model of a GGUF file or of a folder, in float32."""
    file = pathlib.Path(path)
    where = {"gguf_file": file.name} if file.suffix == ".gguf" else {}
    folder = file.parent if where else file
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return model.eval()


class Contest:
    """Both libraries' ways of decoding, each a function of ids that returns new ids."""

    def __init__(self, name: str, draft: str | None, gamma: int, new_tokens: int, width: int):
        self.path, self.new, self.width = pretrained.locate(name), new_tokens, width
        self.ours = pretrained.load(self.path)
        self.torch = theirs(self.path)
        # Both go on past the end of a text: all lengths are the same.
        self.methods = {"transformers, plain": self._hf(), "specjax, plain": self._jax(None, None)}
        self.methods["transformers, prompt lookup"] = self._hf(prompt_lookup_num_tokens=10)
        if draft is not None:
            small = pretrained.load(draft)
            self.methods[f"specjax, draft, gamma {gamma}"] = self._jax(
                SmallModel(small.model, gamma), small.params
            )
            model, params = checkpoints.load_any(pretrained.locate(draft))
            if model.draft_vocab is not None:
                print(
                    "transformers has no draft that knows only some pieces: no assisted generation there"
                )
                return
            with tempfile.TemporaryDirectory() as folder:  # the draft as transformers reads it
                causal.save(params, model, folder)
                assistant = theirs(folder)
            self.methods["transformers, assisted"] = self._hf(assistant_model=assistant)

    def _hf(self, **options):
        more = {"do_sample": False, "max_new_tokens": self.new, "eos_token_id": None} | options

        @torch.inference_mode()
        def run(ids: list[int]) -> list[int]:
            given = torch.tensor([ids])
            kept = {"attention_mask": torch.ones_like(given), "pad_token_id": 0}
            return self.torch.generate(given, **kept, **more)[0, len(ids) :].tolist()

        return run

    def _jax(self, drafter, params):
        def run(ids: list[int]) -> list[int]:
            # A program per 64 ids: transformers reads no padding either.
            row = np.zeros((1, min(self.width, -(-len(ids) // 64) * 64)), np.int32)
            row[0, : len(ids)] = ids
            prompt = Prompt(jnp.asarray(row), jnp.asarray([len(ids)], jnp.int32))
            with jax.default_matmul_precision("highest"):
                out = generate(
                    self.ours.model, self.ours.params, prompt, drafter=drafter,
                    draft_params=params, max_decode_len=self.new, eos_id=-1,
                )  # fmt: skip
            return np.asarray(out.tokens[0])[: int(out.lengths[0])].tolist()

        return run

    @torch.inference_mode()
    def gap(self, ids: list[int], a: int, b: int) -> float:
        """How far apart transformers' logits of two tokens are."""
        logits = self.torch(torch.tensor([ids])).logits[0, -1]
        return float((logits[a] - logits[b]).abs())

    def difference(
        self, ids: list[int], one: list[int], other: list[int]
    ) -> tuple[int, float] | None:
        """(place of the first difference, gap there), or None."""
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return i, self.gap(ids + one[:i], a, b)
        return None

    @torch.inference_mode()
    def logit_error(self, ids: list[int]) -> float:
        """Largest difference of any logit over a prompt."""
        one = self.torch(torch.tensor([ids])).logits[0].numpy()
        with jax.default_matmul_precision("highest"):
            other = self.ours.model.forward(self.ours.params, jnp.asarray([ids], jnp.int32))[0]
        return float(np.abs(one - np.asarray(other)).max())


def read(file: str, field: str, limit: int, skip: int) -> list[str]:
    rows = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
    texts = []
    for row in map(json.loads, rows):
        value = row[field]
        texts.append(value[0] if isinstance(value, list) else value)
    return texts[skip : skip + limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="name, GGUF file or folder")
    parser.add_argument("--draft", help="draft for assisted generation")
    parser.add_argument("--prompts", required=True, help="JSONL")
    parser.add_argument("--field", default="prompt")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument(
        "--width", type=int, default=256, help="ids of a prompt at most; longer are cut"
    )
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--output", default="runs/compare.json")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    contest = Contest(
        options.model, options.draft, options.gamma, options.new_tokens, options.width
    )
    encode = tokenizers.load(contest.path).encode
    texts = read(options.prompts, options.field, options.limit, options.skip)
    prompts = [encode(text)[: options.width] for text in texts]
    widths = {-(-len(ids) // 64): ids for ids in prompts}
    for run in contest.methods.values():  # compile, warm up
        for ids in widths.values():
            run(ids)
    seconds = {name: [] for name in contest.methods}
    lines, names = [], list(contest.methods)
    for number, ids in enumerate(track(prompts, "decoding")):
        found = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            found[name] = contest.methods[name](ids)
            seconds[name].append(time.perf_counter() - began)
        first = found["transformers, plain"]
        apart = {n: contest.difference(ids, first, out) for n, out in found.items()}
        line = {"prompt": number, "length": len(ids), "logit_error": contest.logit_error(ids)}
        line |= {"differs": {n: d for n, d in apart.items() if d is not None}}
        lines.append(line)
        print(json.dumps(line))
    base = seconds["transformers, plain"]
    summary = {
        name: {
            "tokens_per_second": options.new_tokens / statistics.median(taken),
            "times_transformers_plain": statistics.median(
                b / t for b, t in zip(base, taken, strict=True)
            ),
        }
        for name, taken in seconds.items()
    }
    wrong = [
        (line["prompt"], name)
        for line in lines
        for name, (_, gap) in line["differs"].items()
        if name.startswith("specjax") and gap > NEAR_TIE
    ]
    result = {"summary": summary, "largest_logit_error": max(x["logit_error"] for x in lines)}
    result |= {"prompts": lines, "unexplained": wrong}
    file = pathlib.Path(options.output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {k: result[k] for k in ("summary", "largest_logit_error", "unexplained")}, indent=1
        )
    )
    if wrong:
        raise SystemExit(f"{len(wrong)} outputs differ by more than near-ties; see {file}")


if __name__ == "__main__":
    main()
