"""How many tokens are worth guessing, measured while answers are generated."""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 0.95  # weight that a pass keeps with each further pass
_TRY: Final = 6  # passes of one trial
_OLD: Final = 0.2  # weight that earlier passes of a number keep when its trial begins
_AGAIN: Final = 100  # passes between two trials; doubled after a trial that changed nothing, up to _MOST
_MOST: Final = 1600


class GuessLength:
    """Chooses the number of guesses that yields the most tokens per second; 0 where guesses do not pay.

    A few numbers are each tried at first, and one of the others again now and then, since texts and times change.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        """Without ``adaptive`` the number is always ``most``."""
        self._numbers = sorted({0, 1, most // 2, most}) if adaptive else [most]
        self._tokens = dict.fromkeys(self._numbers, 0.0)
        self._seconds = dict.fromkeys(self._numbers, 0.0)
        self._to_try = list(self._numbers)
        self._trying: int | None = None
        self._n_left = 0  # passes until the next trial begins or the current one ends
        self._pause = _AGAIN
        self._settled = -1  # the best number before the last trial
        self._n_tries = 0
        self._number = -1
        self._is_new = False

    def choose(self) -> int:
        """Returns the most tokens to guess before the next pass."""
        if self._n_left == 0:
            self._next_period()
        self._n_left -= 1
        number = self._best if self._trying is None else self._trying
        self._is_new = number != self._number
        self._number = number
        return number

    def count(self, n_tokens: int, seconds: float) -> None:
        """Records a pass together with its guesses: the tokens it yielded, and its time.

        The first pass with a new number is not counted: the drafter first has to catch up with tokens it has not seen.
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
        """The number of guesses that recently yielded the most tokens per second."""
        return max(self._numbers, key=lambda each: self._tokens[each] / (self._seconds[each] or 1))
