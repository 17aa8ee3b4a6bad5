"""Writes the tiny Hugging Face models that the tests read, with what transformers computes from them.

    python3 -m venv hf && hf/bin/pip install torch transformers safetensors numpy
    hf/bin/python scripts/make_hf_golden.py

Needs torch and transformers, which are no dependencies of this package: run it in an environment of
its own. The files are committed, so that the tests need neither. Made with transformers 5.24.0.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "hf"
STEPS = 16
# Between the two best tokens of every greedy step: rounding must not decide.
MARGIN = 2e-3
COMMON = dict(
    vocab_size=64, d_kv=8, num_heads=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
)
# The kind, its configuration, and what one shard holds at most (None: one file).
MODELS = {
    "t5_v1_0": (
        "T5",
        dict(d_model=24, d_ff=40, num_layers=2, feed_forward_proj="relu"),
        None,
    ),
    "t5_v1_1": (
        "T5",
        dict(
            d_model=16, d_ff=40, num_layers=2, num_decoder_layers=3,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        ),
        "20KB",
    ),
    "flan_t5": (
        "T5",
        dict(
            d_model=24, d_ff=32, num_layers=2, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False, relative_attention_max_distance=20,
        ),
        None,
    ),
    "mt5": ("MT5", dict(vocab_size=96, d_model=16, d_ff=32, num_layers=2), None),
    "umt5": (
        "UMT5",
        dict(d_model=16, d_ff=32, num_layers=2, num_decoder_layers=3, tie_word_embeddings=False),
        None,
    ),
}  # fmt: skip


def build(kind: str, sizes: dict) -> transformers.PreTrainedModel:
    """A model with random weights, all of them far from their initial values."""
    config = getattr(transformers, f"{kind}Config")(**COMMON | sizes)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    if kind == "MT5" or sizes.get("tie_word_embeddings") is False:
        # transformers 5 ties whatever the configuration says, until the two differ.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, x in model.named_parameters():
            noise = torch.randn(x.shape)
            if "layer_norm" in name:
                x.copy_(1 + 0.2 * noise)
            elif "shared" in name and model.lm_head.weight is x:
                x.copy_(0.25 * noise)  # a wider tied table would repeat the last token for ever
            elif "relative" in name or "shared" in name:
                x.copy_(noise)
            elif ".q." in name:
                x.copy_(0.4 * noise * x.shape[1] ** -0.5)  # sharper attention magnifies rounding
            else:
                x.copy_(1.2 * noise * x.shape[1] ** -0.5)
    return model


def save(model: transformers.PreTrainedModel, folder: pathlib.Path, shard: str | None) -> None:
    """Writes the model; of a sharded one the configuration as transformers 4 wrote it.

    Public v1.1 checkpoints say ``tie_word_embeddings: false`` and have no
    ``scale_decoder_outputs``; transformers 5 writes the latter and ties always.
    """
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if shard is None:
        return
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["scale_decoder_outputs"]
    file.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n")


def golden(folder: pathlib.Path, rng: np.random.Generator) -> tuple[dict, float]:
    """Logits and greedy ids of the model as it is read back from its files, and the closest call."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    high = model.config.vocab_size
    encoder = rng.integers(2, high, (4, 30))
    for row, length in enumerate((30, 3, 17, 1)):
        encoder[row, length:] = 0
    decoder = rng.integers(2, high, (4, 24))
    decoder[:, 0] = 0
    # The cache of transformers 5.24 has as many layers as the encoder, and fails on a deeper decoder.
    tokens, mask = torch.tensor(encoder), torch.tensor(encoder > 0).long()
    with torch.no_grad():
        logits = model(
            tokens, mask, decoder_input_ids=torch.tensor(decoder), use_cache=False
        ).logits
        out = model.generate(
            tokens, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=STEPS,
            use_cache=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    top = torch.stack(out.logits).topk(2, dim=-1).values
    margin = float((top[..., 0] - top[..., 1]).min())
    greedy = out.sequences[:, 1:].numpy()
    greedy = np.pad(greedy, ((0, 0), (0, STEPS - greedy.shape[1])))
    ids = {"encoder": encoder, "decoder": decoder, "greedy": greedy}
    return {k: x.astype(np.int32) for k, x in ids.items()} | {"logits": logits.numpy()}, margin


def main() -> None:
    """Writes all models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, (kind, sizes, shard) in MODELS.items():
        folder, margin, seed, arrays = args.output_dir / name, 0.0, 0, {"greedy": []}
        while margin < MARGIN or 1 not in arrays["greedy"]:  # some row must end by EOS
            seed += 1
            torch.manual_seed(seed)
            save(build(kind, sizes), folder, shard)
            arrays, margin = golden(folder, np.random.default_rng(seed))
        np.savez_compressed(folder / "golden.npz", **arrays)
        print(f"{name}: seed {seed}, margin {margin:.4f}\n{arrays['greedy']}")


if __name__ == "__main__":
    main()
