"""Programs of random features end in the same bits, however they are killed and resumed."""

from __future__ import annotations

import pytest

from tests.launching import SOAK
from tests.random_programs import Program, differences

pytestmark = [
    pytest.mark.programs,
    pytest.mark.extension(
        "closures", "failed_batches", "gradient_spikes", "logical", "manual_optimization", "metrics", "mixtures",
        "model_ema", "momentum_teacher", "monitoring", "named_schedules", "pytorch_accelerated", "shuffled_streams",
        "streams", "user_attributes", "worst_samples",
    ),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # of what random programs do
@pytest.mark.parametrize("number", range(1000 if SOAK else 10))
def test_a_random_program_resumes_to_the_same_bits(tmp_path, number):
    program = Program(number)
    assert not differences(program, tmp_path), program
