"""How many tokens are worth guessing: measured, while answers are made."""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 0.95  # what a pass still counts one pass later
_TRY: Final = 6  # passes of a try
_OLD: Final = 0.2  # what all before a try still counts in it
_AGAIN: Final = 100  # passes between two tries; twice as many after each that has changed nothing
_MOST: Final = 1600


class GuessLength:
    """Chooses the number of guesses by which tokens come fastest; 0 where guesses do not pay.

    Each of a few numbers is tried first, and one of the others now and then: texts differ, and so do times.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        """Without ``adaptive`` it is always ``most``."""
        self._numbers = sorted({0, 1, most // 2, most}) if adaptive else [most]
        self._tokens = dict.fromkeys(self._numbers, 0.0)
        self._seconds = dict.fromkeys(self._numbers, 0.0)
        self._to_try = list(self._numbers)
        self._trying: int | None = None
        self._n_left = 0  # passes until something else is tried
        self._pause = _AGAIN
        self._settled = -1  # the best number before the tries
        self._n_tries = 0
        self._number = -1
        self._is_new = False

    def choose(self) -> int:
        """The most tokens to guess before the next pass."""
        if self._n_left == 0:
            self._next_period()
        self._n_left -= 1
        number = self._best if self._trying is None else self._trying
        self._is_new = number != self._number
        self._number = number
        return number

    def count(self, n_tokens: int, seconds: float) -> None:
        """Takes note of a pass, with the guesses before it: the tokens that it made certain, and its time.

        The first pass of a number does not count: a drafter has to catch up with what it has not seen.
        """
        if not self._is_new:
            number = self._number
            self._tokens[number] = self._tokens[number] * _MEMORY + n_tokens
            self._seconds[number] = self._seconds[number] * _MEMORY + seconds

    def _next_period(self) -> None:
        others = [number for number in self._numbers if number != self._best]
        if self._trying is None and not self._to_try and others:
            self._to_try.append(others[self._n_tries % len(others)])
            self._n_tries += 1
        self._trying = self._to_try.pop() if self._to_try else None
        if self._trying is None:
            self._pause = min(_MOST, 2 * self._pause) if self._best == self._settled else _AGAIN
            self._n_left, self._settled = self._pause, self._best
        else:
            self._n_left = _TRY
            self._tokens[self._trying] *= _OLD
            self._seconds[self._trying] *= _OLD

    @property
    def _best(self) -> int:
        """The number of guesses by which tokens came fastest lately."""
        return max(self._numbers, key=lambda each: self._tokens[each] / (self._seconds[each] or 1))
