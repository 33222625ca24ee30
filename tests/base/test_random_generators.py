"""Keeping the states of random generators."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators

DRAWS = {"python": random.random, "numpy": np.random.random_sample, "torch": lambda: torch.rand(()).item()}


@pytest.mark.parametrize("only", [(), *[(name,) for name in DRAWS], ("python", "torch")], ids=str)
def test_generators_are_preserved_by_name(only):
    def draw() -> dict[str, float]:
        return {name: draws() for name, draws in DRAWS.items()}

    with preserving_generators(*only):
        before = draw()
    after = draw()
    assert {name for name in DRAWS if after[name] == before[name]} == set(only or DRAWS)


def test_an_unknown_generator_is_named_before_the_block():
    with pytest.raises(KeyError, match="nonsense"), preserving_generators("nonsense"):
        pytest.fail("the block has begun")
