"""A small greedy generator of pairwise covering arrays with constraints."""

import itertools
import random


def pairwise(options: dict, allowed, seed: int = 0) -> list[dict]:
    """Rows over `options` (name -> values) such that every pair of values which an allowed row can hold is in one.

    `allowed(row)` judges full rows. What can be held is found by sampling rows round every pair. Deterministic.
    """
    names, lists = list(options), list(options.values())
    rng = random.Random(seed)

    def row_of(choice):
        return {name: values[i] for name, values, i in zip(names, lists, choice, strict=True)}

    pool = [choice for choice in dict.fromkeys(candidates(lists, rng)) if allowed(row_of(choice))]
    pairs = {choice: pairs_of(choice) for choice in pool}
    wanted = set().union(*pairs.values())
    rows = []
    while wanted:
        best = max(rng.sample(pool, min(len(pool), 150)), key=lambda c: len(pairs[c] & wanted))
        if not pairs[best] & wanted:  # the last few pairs: find their rows directly
            target = min(wanted)
            best = next(c for c in pool if target in pairs[c])
        rows.append(row_of(best))
        wanted -= pairs[best]
    return rows


def pairs_of(choice: tuple) -> frozenset:
    """Pairs of (position, value index), each packed in one integer."""
    items = [64 * position + value for position, value in enumerate(choice)]
    return frozenset(4096 * a + b for a, b in itertools.combinations(items, 2))


def candidates(lists: list, rng: random.Random, each: int = 6):
    """For every pair of values, some random rows that hold it."""
    for i, j in itertools.combinations(range(len(lists)), 2):
        for x, y in itertools.product(range(len(lists[i])), range(len(lists[j]))):
            for _ in range(each):
                choice = [rng.randrange(len(values)) for values in lists]
                choice[i], choice[j] = x, y
                yield tuple(choice)
