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
# Prompts of the decoder-only models; the longest crosses every edge of their rotary scaling.
LENGTHS = (40, 5, 17)
NEW = 20
PENALTIES = dict(repetition_penalty=1.5, no_repeat_ngram_size=3)
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
LLAMA = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
OPT = dict(
    vocab_size=48, hidden_size=16, ffn_dim=40, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=LENGTHS[0] + NEW,
)  # fmt: skip
# The kind, its configuration, what one shard holds at most, the type in the file, and what
# transformers 4 called what transformers 5 writes as rope_parameters.
CAUSAL = {
    "llama2": ("Llama", LLAMA, None, "float32", {}),
    # Of three waves, of 6, 16 and 40 tokens, the first is kept, the second blended, the third
    # stretched.
    "llama3": (
        "Llama",
        LLAMA | dict(
            num_attention_heads=4, num_key_value_heads=2, head_dim=6, attention_bias=True,
            mlp_bias=True, tie_word_embeddings=True, eos_token_id=[1, 7, 9],
            max_position_embeddings=128,
            rope_parameters=dict(
                rope_type="llama3", rope_theta=16.0, factor=4.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=32,
            ),
        ),
        "8KB",
        "float32",
        {},
    ),
    "llama_linear": (
        "Llama",
        LLAMA | dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=100.0)),
        None,
        "float32",
        {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 100.0},
    ),
    "llama_dynamic": (
        "Llama",
        LLAMA | dict(
            max_position_embeddings=16,
            rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=100.0),
        ),
        None,
        "float32",
        {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "rope_theta": 100.0},
    ),
    "qwen2": (
        "Qwen2",
        LLAMA | dict(
            num_attention_heads=4, num_key_value_heads=2, use_sliding_window=False,
            sliding_window=8, max_window_layers=1,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
        ),
        None,
        "bfloat16",
        {},
    ),
    "opt_125m": ("OPT", OPT, None, "float32", {}),
    "opt_350m": (
        "OPT", OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=12), "10KB", "float32", {}
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


def build_causal(kind: str, sizes: dict) -> transformers.PreTrainedModel:
    """A decoder-only model with random weights, all of them far from their initial values."""
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            noise = torch.randn(x.shape)
            if "norm" in name:
                x.copy_(0.2 * noise + name.endswith("weight"))
            elif name.endswith("bias"):
                x.copy_(0.3 * noise)
            elif "embed" in name:
                x.copy_((0.3 if config.tie_word_embeddings else 1) * noise)
            else:
                x.copy_(1.2 * noise * x.shape[1] ** -0.5)
    return model


def save_causal(model, folder: pathlib.Path, shard: str | None, dtype: str, old: dict) -> None:
    """Writes the model in a type, with the rotary scaling in older words where there are any."""
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if old:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        del config["rope_parameters"]
        file.write_text(json.dumps(config | old, indent=2) + "\n")


def golden_causal(folder: pathlib.Path, rng: np.random.Generator) -> tuple[dict, float]:
    """The same of a decoder-only model; every prompt by itself, and with a model that has read none
    before: transformers' dynamic scaling remembers the longest text."""

    def fresh():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    high, margins = fresh().config.vocab_size, []
    tokens = rng.integers(10, high, (len(LENGTHS), max(LENGTHS)))  # below are special ids
    logits = np.zeros((*tokens.shape, high), np.float32)
    made = {name: np.zeros((len(LENGTHS), NEW), np.int32) for name in ("greedy", "penalised")}
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = 0
        ask = torch.tensor(tokens[row : row + 1, :length])
        with torch.no_grad():
            logits[row, :length] = fresh()(ask).logits[0]
            for name, penalties in (("greedy", {}), ("penalised", PENALTIES)):
                out = fresh().generate(
                    ask, attention_mask=torch.ones_like(ask), do_sample=False, max_new_tokens=NEW,
                    output_scores=True, return_dict_in_generate=True, **penalties,
                )  # fmt: skip
                said = out.sequences[0, length:]
                made[name][row, : len(said)] = said
                top = torch.stack(out.scores).topk(2, dim=-1).values
                margins.append(float((top[..., 0] - top[..., 1]).min()))
    arrays = {"tokens": tokens.astype(np.int32), "lengths": np.asarray(LENGTHS, np.int32)}
    return arrays | made | {"logits": logits}, min(margins)


def lively(arrays: dict, ends: set[int]) -> bool:
    """Whether every end id ended some text, and no text only repeats itself."""
    rows = [row for name in ("greedy", "penalised") for row in arrays[name]]
    ended = {int(row[np.count_nonzero(row) - 1]) for row in rows}
    return ends <= ended and min(len(set(row)) for row in rows) >= 4


def write_causal(folder: pathlib.Path, kind: str, sizes: dict, *how) -> None:
    """Tries seeds until rounding does not decide and something happens."""
    ends = sizes.get("eos_token_id", 2)
    ends, margin, seed, arrays = {ends} if isinstance(ends, int) else set(ends), 0.0, 0, None
    while margin < MARGIN or not lively(arrays, ends):
        seed += 1
        torch.manual_seed(seed)
        save_causal(build_causal(kind, sizes), folder, *how)
        arrays, margin = golden_causal(folder, np.random.default_rng(seed))
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(f"{folder.name}: seed {seed}, margin {margin:.4f}\n{arrays['greedy']}")


def main() -> None:
    """Writes all models, or those named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=pathlib.Path, default=OUT)
    parser.add_argument("--only", nargs="+", choices=[*MODELS, *CAUSAL], help="models to write")
    args = parser.parse_args()
    wanted = args.only or [*MODELS, *CAUSAL]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name, how in CAUSAL.items():
        if name in wanted:
            write_causal(args.output_dir / name, *how)
    for name, (kind, sizes, shard) in MODELS.items():
        if name not in wanted:
            continue
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
