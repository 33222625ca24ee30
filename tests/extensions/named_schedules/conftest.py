"""The schedules of pytorch-accelerated, to compare with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import ancestor
from tests.extensions.named_schedules.both_schedules import ANCESTOR, COSINE_CASES, WSD_CASES
from tests.launching import run_code


@pytest.fixture(scope="session")
def ancestor_schedules() -> dict[str, Any]:
    """Rates and states of the ancestor's schedules, for each of the cases, and for its default warm-up."""
    ancestor.skip_without_it()
    return json.loads(run_code(ANCESTOR, json.dumps([WSD_CASES, COSINE_CASES])).splitlines()[-1])
