"""Writes what the authors' own Medusa, EAGLE-1 and EAGLE-3 heads compute from random weights.

    git clone https://github.com/FasterDecoding/Medusa && git -C Medusa checkout e2a5d20c
    git clone https://github.com/SafeAILab/EAGLE && git -C EAGLE checkout cb7e0841
    hf/bin/python scripts/make_heads_golden.py --medusa Medusa --eagle EAGLE

Needs torch and transformers, in an environment of its own (see make_hf_golden.py). The files are committed,
in tests/fixtures/heads, so that the tests need neither, nor the authors' code. Made with torch 2.14.1 and
transformers 5.24.0, from these commits:

    FasterDecoding/Medusa  e2a5d20c048a9b0a4092e6933c34313687422518  medusa/model/medusa_model.py
    SafeAILab/EAGLE        cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b  eagle/model/{configs,cnets1,cnets}.py

Their files are imported as they are, with this put in place of what they ask for:

  - Medusa: the modules of its Llama and Mistral, which ask transformers for names that it no longer has,
    are stand-ins that pass on the states they are given; so is the tokenizer. The heads need none of them.
  - EAGLE: transformers 5 fills in ``rope_scaling`` and takes ``rope_theta`` away; both are set again to what
    the configuration says, as transformers 4 had them.
"""

import argparse
import copy
import hashlib
import importlib
import json
import pathlib
import sys
import types
import warnings

import numpy as np

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "heads"
# What git calls the content of the files that are imported.
FILES = {
    "medusa/model/medusa_model.py": "1a5f70c949da8ab88a802cc85293deb8b5e4fa5f",
    "eagle/model/configs.py": "b355c2e7cbce1ad9e2ee146e3e3c349f52704e37",
    "eagle/model/cnets1.py": "25cad25a6ed933c061a3b1ae0dbd19ce5e38aa64",
    "eagle/model/cnets.py": "a8e13ca1688d72ef6e6c94386be2b435d3ecf740",
}
VOCAB, WIDTH = 96, 32
# Tokens of the text in the first and in the second round of drafting.
LENGTHS = (10, 13)
TREE = dict(total_tokens=8, depth=2, top_k=3)
EAGLE = dict(
    model_type="llama", vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=64,
    rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
# With a bias; without, as for Llama 3; two layers with biases of their own and scaled positions.
EAGLE1 = {
    "eagle1": {},
    "eagle1_no_bias": dict(bias=False, rope_theta=500000.0, rms_norm_eps=1e-5),
    "eagle1_deep": dict(
        model_type="qwen2", qkv_bias=True, num_hidden_layers=2,
        rope_scaling=dict(type="linear", factor=2.0),
    ),
}  # fmt: skip
EAGLE3 = {
    "eagle3": dict(draft_vocab_size=VOCAB // 2, rope_theta=500000.0, rms_norm_eps=1e-5),
    "eagle3_whole": dict(draft_vocab_size=VOCAB),
}
# Residual blocks, and whether each has weights of its own: the authors' class makes one and repeats it.
MEDUSA = {"medusa_1": (1, False), "medusa_2": (2, False), "medusa_2_apart": (2, True)}
MEDUSA_HEADS = 2


def check(checkout: pathlib.Path, package: str) -> None:
    """Says which of the files to import are not those that the goldens were made with."""
    for name, blob in FILES.items():
        if not name.startswith(f"{package}/"):
            continue
        content = (checkout / name).read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if found != blob:
            print(f"{checkout / name} is {found}, not {blob}", file=sys.stderr)


def coarse(x):
    """Multiples of 1/16, so that the files are small."""
    return (16 * x).round() / 16


def fill(module, generator) -> None:
    """Random parameters, all of them far from their initial values."""
    import torch

    with torch.no_grad():
        for name, x in module.named_parameters():
            noise = torch.randn(x.shape, generator=generator)
            if "norm" in name:
                made = 1 + 0.3 * noise
            elif name.endswith("bias"):
                made = 0.3 * noise
            elif "embed" in name:
                made = noise
            else:
                made = 0.8 * noise * x.shape[1] ** -0.5
            x.copy_(coarse(made))


def arrays_of(module) -> dict[str, np.ndarray]:
    """The state dict, under ``weights/``."""
    return {f"weights/{name}": x.numpy() for name, x in module.state_dict().items()}


def medusa_class(checkout: pathlib.Path):
    """The authors' class, on a stand-in for its target that passes on the states it is given."""
    import torch

    class Target(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.model = lambda input_ids, **_: (input_ids,)

    sys.path.insert(0, str(checkout))
    for family in ("Llama", "Mistral"):
        name = f"medusa.model.modeling_{family.lower()}_kv"
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], f"{family}ForCausalLM", Target)
    module = importlib.import_module("medusa.model.medusa_model")
    module.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: None)
    return module.MedusaModelLlama, module.ResBlock


def medusa(cls, block, layers: int, apart: bool) -> dict[str, np.ndarray]:
    """Inputs, weights, what the output layers read, and logits of Medusa's heads."""
    import torch

    generator = torch.Generator().manual_seed(1)
    said = dict(
        hidden_size=WIDTH, vocab_size=VOCAB, medusa_num_heads=MEDUSA_HEADS, medusa_num_layers=layers
    )
    model = cls(types.SimpleNamespace(**said, _name_or_path="target")).eval()
    for head in model.medusa_head if apart else ():
        for i in range(1, layers):
            head[i] = block(WIDTH)
    fill(model.medusa_head, generator)
    read = []
    for head in model.medusa_head:
        head[-1].register_forward_pre_hook(lambda module, given: read.append(given[0]))
    states = coarse(torch.randn((1, LENGTHS[0] - 1, WIDTH), generator=generator))
    logits = model(input_ids=states, medusa_forward=True)
    said |= dict(base_model_name_or_path="target")
    out = {"states": states, "read": torch.stack(read), "logits": logits}
    return {n: x.numpy() for n, x in out.items()} | arrays_of(model.medusa_head) | as_json(said)


def as_json(config: dict) -> dict[str, np.ndarray]:
    """The content of config.json."""
    return {"config": np.asarray(json.dumps(config))}


def eagle_model(config_class, model_class, said: dict, **options):
    """The authors' model, with rotary positions as the configuration says."""
    config = config_class(**copy.deepcopy(said))
    config.rope_scaling = copy.deepcopy(said.get("rope_scaling"))
    if "rope_theta" in said:
        config.rope_theta = said["rope_theta"]
    return model_class(config, **options, **TREE).eval()


def record(model, head, rounds) -> dict[str, np.ndarray]:
    """Every forward pass of the authors' drafting, and the trees that it says.

    Args:
      model: with an empty cache.
      head: the target's output layer; None where the model has its own.
      rounds: (the whole text, the target's states that are new) of each.

    Returns:
      Of every round ``text``; under ``pairs/`` the first step, of the pairs that were not in the cache; under
      ``nodes/`` the steps of the tree (their ``mask`` is of all nodes read so far); ``drafted`` and ``mask``,
      the tree itself behind its root. ``read`` is what the layer's attention read of the first pairs, and
      ``fc`` what came out of the layer of that name.
    """
    import torch

    calls, last, fc, read = [], [], [], []

    def on_forward(module, given, named, out):
        call = {"tokens": named["input_ids"][0], "states": given[0][0], "out": out[0][0]}
        if "position_ids" in named:
            seen = model.tree_mask[0, 0] > 0
            wide = torch.nn.functional.pad(seen, (0, TREE["depth"] * TREE["top_k"] - seen.shape[1]))
            call |= {"position": named["position_ids"], "mask": wide}
        calls.append(call)

    output = model.lm_head if head is None else head
    behind = (lambda x: output(model.norm(x))) if head is None else output
    attention = (model.layers[0] if hasattr(model, "layers") else model.midlayer).self_attn
    hooks = [
        model.register_forward_hook(on_forward, with_kwargs=True),
        output.register_forward_hook(lambda module, given, out: last.append(out)),
        model.fc.register_forward_hook(lambda module, given, out: fc.append(out[0])),
        attention.register_forward_pre_hook(
            lambda module, given, named: read.append(named["hidden_states"][0]), with_kwargs=True
        ),
    ]
    arrays = {}
    model.init_tree()
    model.reset_kv()
    for i, (tokens, states) in enumerate(rounds):
        calls.clear(), last.clear()
        drafted, _, mask, _ = model.topK_genrate(states, tokens, head, None)
        found = {"text": tokens[0], "drafted": drafted[0], "mask": mask[0, 0] > 0}
        first, *others = calls
        said = list(last)
        # Of the first step drafting asks for the last logits alone.
        first["logits"] = behind(first["out"])
        assert torch.allclose(first["logits"][-1], said[0][0], atol=1e-6)
        nodes = {name: torch.stack([call[name] for call in others]) for name in others[0]}
        nodes["logits"] = torch.stack(said[1:])
        found |= {f"pairs/{name}": x for name, x in first.items()}
        found |= {f"nodes/{name}": x for name, x in nodes.items()}
        arrays |= {f"round_{i}/{name}": x for name, x in found.items()}
    arrays |= {"fc": fc[0], "read": read[0]}
    for hook in hooks:
        hook.remove()
    small = {torch.int64: torch.int32}
    return {n: x.to(small.get(x.dtype, x.dtype)).numpy() for n, x in arrays.items()}


def same_trees(a: dict, b: dict) -> bool:
    """Whether both drafted the same."""
    names = [n for n in a if n.endswith(("drafted", "tokens"))]
    return all(np.array_equal(a[n], b[n]) for n in names)


def eagle(config_class, model_class, changes: dict, third: bool) -> dict[str, np.ndarray]:
    """Weights, and two rounds of drafting; tries seeds until rounding does not decide about the tree."""
    import torch

    said, seed = EAGLE | changes, 0
    while True:
        seed += 1
        generator = torch.Generator().manual_seed(seed)
        model = eagle_model(config_class, model_class, said, bias=said.get("bias", True))
        fill(model, generator)
        head = None if third else torch.nn.Linear(WIDTH, VOCAB, bias=False)
        few = third and said["draft_vocab_size"] < VOCAB
        if few:
            kept = (
                torch.randperm(VOCAB, generator=generator)[: said["draft_vocab_size"]].sort().values
            )
            model.d2t.copy_(kept - torch.arange(len(kept)))
            model.t2d[kept] = True
        elif third:
            del model.d2t, model.t2d  # as the authors do before they load such a head
        if head is not None:
            fill(head, generator)
        text = torch.randint(3, VOCAB, (1, max(LENGTHS)), generator=generator)
        wide = WIDTH * (3 if third else 1)
        states = coarse(torch.randn((1, max(LENGTHS) - 1, wide), generator=generator))
        edges = [0, *(n - 1 for n in LENGTHS)]
        rounds = [
            (text[:, :n], states[:, a:b])
            for n, a, b in zip(LENGTHS, edges[:-1], edges[1:], strict=True)
        ]
        other = copy.deepcopy(model)
        for x in other.parameters():
            x.data *= 1 + 1e-4 * torch.randn(x.shape, generator=generator)
        found = record(model, head, rounds)
        if same_trees(found, record(other, head, rounds)):
            print(f"seed {seed}", end=" ")
            target = {} if third else {"target/lm_head.weight": head.weight.numpy()}
            return found | arrays_of(model) | target | as_json(said)


def write(folder: pathlib.Path, name: str, arrays: dict[str, np.ndarray]) -> None:
    """One golden file."""
    file = folder / f"{name}.npz"
    np.savez_compressed(file, **arrays)
    print(f"{file}: {file.stat().st_size} bytes")


def main() -> None:
    """Writes all goldens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--medusa", type=pathlib.Path, required=True, help="checkout of the authors' Medusa"
    )
    parser.add_argument(
        "--eagle", type=pathlib.Path, required=True, help="checkout of the authors' EAGLE"
    )
    parser.add_argument("--output_dir", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore", FutureWarning)  # transformers on rope_scaling
    args.output_dir.mkdir(parents=True, exist_ok=True)
    check(args.medusa, "medusa")
    check(args.eagle, "eagle")
    cls, block = medusa_class(args.medusa)
    for name, how in MEDUSA.items():
        write(args.output_dir, name, medusa(cls, block, *how))
    sys.path.insert(0, str(args.eagle))
    config = importlib.import_module("eagle.model.configs").EConfig
    for module, cases, third in (("cnets1", EAGLE1, False), ("cnets", EAGLE3, True)):
        model = importlib.import_module(f"eagle.model.{module}").Model
        for name, changes in cases.items():
            write(args.output_dir, name, eagle(config, model, changes, third))


if __name__ == "__main__":
    main()
