"""Pools of ranks with DeepSpeed, forked from a process that has imported it."""

from __future__ import annotations

from tests.distributed.pool import Pool

PRELOADED = (
    "tests.deepspeed.gradient_cases",
    "tests.deepspeed.loading_cases",
    "tests.deepspeed.starting_cases",
    "tests.deepspeed.ulysses_cases",
)


def pool_of(world_size: int) -> Pool:
    """Return a pool; its ranks start with the first function that it runs."""
    return Pool(world_size, timeout=240, forks=True, modules=PRELOADED)
