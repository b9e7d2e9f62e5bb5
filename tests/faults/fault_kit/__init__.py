"""Faults on purpose: servers that can be killed, links that can be cut, replies that can be spoiled, leaks counted.

Everything here acts on real processes and real sockets. `schedule` draws faults from a seed, `world` runs a generation
of the demo model under one of them and says what came of it. Used by the tests beside it and by ``bench/``.
"""
