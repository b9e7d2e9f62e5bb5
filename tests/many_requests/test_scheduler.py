"""Pages of keys and values, and whose turn it is: nothing is lost, nothing is shared that is not the same."""

from __future__ import annotations

import random

import pytest

from moeoffload.serve.block_manager import BlockManager
from moeoffload.serve.request import SamplingOptions
from moeoffload.serve.scheduler import Scheduler
from moeoffload.serve.sequence import Sequence, Share

PAGE = 4


def sequence(tokens: list[int], max_tokens: int = 8) -> Sequence:
    return Sequence(list(tokens), SamplingOptions(max_tokens, temperature=0), lambda _: None)


def scheduler(n_pages: int, *, reuse: bool = True, step_rows: int = 64, max_running: int = 8) -> Scheduler:
    return Scheduler(BlockManager(n_pages, PAGE, reuse=reuse), step_rows, max_running)


def commit(scheduler: Scheduler, shares: list[Share], token: int = 7) -> None:
    for share in shares:
        scheduler.commit(share, [token] if share.has_token else [])


def test_prompts_share_what_answers_leave_of_a_step() -> None:
    here = scheduler(1000, step_rows=100)
    first = sequence([1] * 10)
    here.add(first)
    commit(here, here.schedule())
    others = [sequence([2] * 500) for _ in range(2)]
    for each in others:
        here.add(each)
    shares = here.schedule()
    assert [share.sequence for share in shares] == [first, *others]
    assert [len(share.tokens) for share in shares] == [1, 50, 49]
    assert [share.has_token for share in shares] == [True, False, False]


def test_the_newest_gives_its_pages_up_and_starts_again_with_what_it_said() -> None:
    here = scheduler(4, reuse=False)
    old, new = sequence([1] * 7), sequence([2] * 7)
    for each in (old, new):
        here.add(each)
    for _ in range(2):
        commit(here, here.schedule())
    assert [share.sequence for share in here.schedule()] == [old]
    assert (new.pages, new.n_computed, len(new.tokens)) == ([], 0, 9)
    assert [share.sequence for share in here.schedule()] == [old], "nothing starts while pages are short"
    here.remove(old)
    (again,) = here.schedule()
    assert (again.sequence, again.tokens, again.has_token) == (new, new.tokens, True)


def test_a_beginning_is_used_again_and_one_token_is_always_computed() -> None:
    here = scheduler(8)
    first = sequence(list(range(8)))
    here.add(first)
    commit(here, here.schedule())
    here.remove(first)
    for tokens, past in ((list(range(8)), 4), ([*range(8), 50], 8), ([9, *range(1, 8)], 0)):
        again = sequence(tokens)
        here.add(again)
        (share,) = here.schedule()
        assert share.past == past
        here.remove(again)


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
