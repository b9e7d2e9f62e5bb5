"""Pages of keys and values, and whose turn it is: nothing is lost, nothing is shared that is not the same."""

from __future__ import annotations

import random

import pytest

from moeoffload.serve.block_manager import BlockManager
from moeoffload.serve.request import SamplingOptions
from moeoffload.serve.scheduler import Scheduler
from moeoffload.serve.sequence import Sequence

PAGE = 4


def sequence(tokens: list[int], max_tokens: int = 8) -> Sequence:
    return Sequence(list(tokens), SamplingOptions(max_tokens, temperature=0), lambda _: None)


@pytest.mark.parametrize("reuse", [True, False])
def test_whatever_comes_and_goes_pages_hold_what_their_sequences_say(reuse: bool) -> None:
    chance = random.Random(3)
    blocks = BlockManager(12, PAGE, reuse=reuse)
    here = Scheduler(blocks, 16, 4)
    memory: dict[int, int] = {}
    alive: list[Sequence] = []
    for _ in range(3000):
        if chance.random() < 0.3 and len(alive) < 8:
            alive.append(sequence([chance.randrange(2) for _ in range(chance.randrange(1, 24))], 20))
            here.add(alive[-1])
        if alive and chance.random() < 0.05:
            here.remove(alive.pop(chance.randrange(len(alive))))
        shares = here.schedule()
        assert shares or not alive
        for share in shares:
            pages, past = share.sequence.pages, share.past
            for at, token in enumerate(share.tokens, past):
                memory[pages[at // PAGE] * PAGE + at % PAGE] = token
            seen = [memory[pages[at // PAGE] * PAGE + at % PAGE] for at in range(past + len(share.tokens))]
            assert seen == share.sequence.tokens[: len(seen)]
        for share in shares:
            here.commit(share, [chance.randrange(2)] if share.has_token else [])
            if share.sequence.n_answer >= share.sequence.options.max_tokens:
                here.remove(share.sequence)
                alive.remove(share.sequence)
    for each in alive:
        here.remove(each)
    assert blocks.n_free == 12
    assert blocks.cache_tokens()[0] == 0
