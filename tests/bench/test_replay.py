"""Rounds counted on recorded texts are those of the target itself."""

import jax
import numpy as np
import pytest

from specjax import generate
from specjax.bench import replay
from specjax.bench.replay import Recorded, Replay
from specjax.decode import stats
from specjax.decode.verify import GreedyMatch
from specjax.drafters.prompt_lookup import PromptLookup
from tests import toys
from tests.models import decoders


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_replay_has_the_rounds_of_the_target(family):
    """Prompt lookup on T5 (which copies from the encoder's input) and on a Llama, unequal rows."""
    model = toys.tiny_t5() if family == "t5" else decoders.tiny_llama()
    params = toys.init(model, 2) if family == "t5" else decoders.init(model, 2)
    prompt, drafter = toys.ask(5), PromptLookup(copy=4, spans=2, budget=6)
    out = generate(
        model, params, prompt, drafter=drafter, max_decode_len=30, verifier=GreedyMatch()
    )
    said = Recorded(prompt, np.asarray(out.tokens), np.asarray(out.lengths))
    start = 0 if family == "t5" else None
    found = replay.rounds(Replay(toys.VOCAB, toys.EOS, start), drafter, None, said)
    own = stats.summary(jax.device_get(out.stats))
    for key in ("rounds", "drafted", "accepted", "emitted", "tested", "accepted_histogram"):
        assert found[key] == own[key]
    assert found["accepted"] > 0


def test_a_record_that_ends_before_its_end_is_refused():
    """A text that neither ends with EOS nor fills the length cannot have been decoded."""
    prompt = toys.prompt([5, 6])
    said = Recorded(prompt, np.full((1, 4), 7, np.int32), np.asarray([3], np.int32))
    with pytest.raises(RuntimeError, match="not what was recorded"):
        replay.rounds(Replay(toys.VOCAB, toys.EOS), PromptLookup(), None, said)
