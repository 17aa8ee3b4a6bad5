"""Draws the masks that trees become, from the blocks that a target reads.

    python scripts/mask_pictures.py                # all of them, into docs/img

A picture is a function in `PICTURES` that returns a tree of one row, the role of every token (the root's
first) and, if a token's depth says too little, its label.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Sampling
from specjax.analysis import plots
from specjax.decode import tree
from specjax.decode.interfaces import Params, Text, TokenTree
from specjax.drafters import trie
from specjax.drafters.lookahead import Lookahead, LookaheadState

ROOT = 1
DEPTHS = ("first token behind it", "second token", "third token")


def lookahead() -> tuple[TokenTree, list[str]]:
    """Window 5, 4-grams, 5 guesses: 30 tokens in one step (the picture of Fu et al. 2024 has 2 guesses)."""
    drafter = Lookahead(window=5, ngram=4, guesses=5, pool=5)
    levels, width = drafter.ngram - 1, drafter.window
    pool = np.arange(2, 2 + drafter.guesses)[:, None] * 10 + np.arange(drafter.ngram)
    pool[:, 0] = ROOT  # all begin with the root, and no two have a word in common behind it
    window = 100 + np.arange(levels * width).reshape(levels, width)
    one = jnp.ones(1, jnp.int32)
    text = Text(jnp.full((1, 1), ROOT, jnp.int32), one)
    batched = [jnp.asarray(x, jnp.int32)[None] for x in (window, pool)]
    state = LookaheadState(*batched, one, prompt=None)
    keys = jax.random.split(jax.random.key(0), 1)
    proposed, _ = drafter.propose(Params(None, None), state, text, Sampling().rows(1), keys)
    names = ["oldest level", "middle level", "newest level"]
    roles = ["newest committed token"]
    roles += [f"window: {names[cell // width]}" for cell in range(1, levels * width)]
    return proposed, roles + [f"guess {g}" for g in range(drafter.guesses) for _ in range(levels)]


def product() -> tuple[TokenTree, list[str], list[str]]:
    """The example of SpecInfer and Medusa: two first words, each with the same three behind it."""
    shape, words = tree.Template.of_widths(2, 3), (("It", "I"), ("is", "'", "the"))
    said = [words[level - 1][rank] for level, rank in zip(shape.levels, shape.ranks, strict=True)]
    tokens = jnp.arange(2, 2 + shape.nodes, dtype=jnp.int32)[None]
    roles = ["newest committed token", *(DEPTHS[level - 1] for level in shape.levels)]
    return shape.chosen(tokens, jnp.ones_like(tokens, bool)), roles, ["…", *said]


def branches() -> tuple[TokenTree, list[str], list[str]]:
    """Hierarchical branches of Alibaba's Lookahead: what followed "the" in a text, as one prefix tree."""
    said = "the cat sat on the mat and the cat ran to the mat by the cat sat up and the"
    words = list(dict.fromkeys(said.split()))
    ids = jnp.asarray([[ROOT + words.index(word) for word in said.split()]], jnp.int32)
    drafter = trie.Trie(depth=3, budget=9, outputs=9, max_match=1, weight=0.5, eos_id=-1)
    length = jnp.asarray([ids.shape[1]], jnp.int32)
    text = Text(
        jnp.pad(ids, ((0, 0), (0, 4))), length, jnp.zeros_like(length), jnp.ones_like(length)
    )
    keys = jax.random.split(jax.random.key(0), 1)
    drafted, _ = drafter.propose(Params(None, None), (), text, Sampling(0.0).rows(1), keys)
    depth = np.asarray(tree.depths(drafted.parent, drafted.depth)[0])
    valid = np.asarray(drafted.valid[0])
    named = [words[t - ROOT] if on else "–" for t, on in zip(drafted.tokens[0], valid, strict=True)]
    roles = [DEPTHS[d - 1] if on else "left empty" for d, on in zip(depth[1:], valid, strict=True)]
    return drafted, ["newest committed token", *roles], ["the", *named]


PICTURES = {"lookahead": lookahead, "product": product, "trie": branches}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=sorted(PICTURES), help="which ones")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/img"))
    args = parser.parse_args()
    for name in args.names:
        drafted, roles, *labels = PICTURES[name]()
        block = tree.block(drafted, jnp.full(1, ROOT, jnp.int32))
        depths = [str(depth) for depth in np.asarray(block.depth[0])]
        path = args.out / f"{name}_mask.png"
        plots.mask_picture(np.asarray(block.mask[0]), *labels or [depths], roles, path)
        print(path)


if __name__ == "__main__":
    main()
