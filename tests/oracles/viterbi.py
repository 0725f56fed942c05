"""Tail-biting trellis search, slow and obvious, in integers, written from QTIP's Algorithm 4."""

from __future__ import annotations

import itertools

import numpy as np


def viterbi(x, levels, window, k, start=None, end=None):
    """Best path over all 2^L states: costs per *state* (not per suffix), int64.

    ``start`` and ``end`` pin the suffix before the first and after the last step.
    """
    n_states, keep = 1 << window, (1 << (window - k)) - 1
    cost, back = np.zeros(n_states, np.int64), []
    big = np.int64(1) << 50
    state = np.arange(n_states)
    for t, value in enumerate(x):
        own = (levels[state].astype(np.int64) - int(value)) ** 2
        if t == 0:
            cost = own + (0 if start is None else np.where(state >> k == start, 0, big))
            back.append(None)
            continue
        # Predecessors of s are the states whose low L-k bits are s >> k; the lowest wins a tie.
        before = (np.arange(1 << k)[:, None] << (window - k)) + (state >> k)[None, :]
        choice = np.argmin(cost[before], axis=0)
        back.append(before[choice, state])
        cost = cost[before[choice, state]] + own
    # At the end the lowest suffix wins a tie, then the lowest choice within it.
    order = np.lexsort((state >> (window - k), state & keep))
    allowed = order if end is None else order[(order & keep) == end]
    last = int(allowed[np.argmin(cost[allowed])])
    path = [last]
    for t in range(len(x) - 1, 0, -1):
        path.append(int(back[t][path[-1]]))
    return path[::-1], int(cost[last])


def algorithm_4(x, levels, window, k, warmup=None):
    """Two passes: rolled and free to find the suffix at the seam, then pinned to it at both ends."""
    n = len(x)
    w = n // 2 if warmup is None else warmup
    rolled = [x[(t - w) % n] for t in range(2 * w)]
    path, _ = viterbi(rolled, levels, window, k)
    seam = path[w] >> k
    return viterbi(x, levels, window, k, seam, seam)


def exhaustive(x, levels, window, k):
    """Cost of the best closed path: one pinned search for every suffix."""
    return min(viterbi(x, levels, window, k, seam, seam)[1] for seam in range(1 << (window - k)))


def brute_force(x, levels, window, k):
    """Cost of the best closed path by trying every symbol sequence; needs T·k ≥ L and a small T."""
    mask, best = (1 << window) - 1, None
    for symbols in itertools.product(range(1 << k), repeat=len(x)):
        state = 0
        for symbol in symbols:  # the state after one round depends on the last L bits only
            state = ((state << k) | symbol) & mask
        cost = 0
        for value, symbol in zip(x, symbols, strict=True):
            state = ((state << k) | symbol) & mask
            cost += (int(levels[state]) - int(value)) ** 2
        best = cost if best is None else min(best, cost)
    return best
