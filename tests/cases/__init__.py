"""What several processes do: each function runs on every rank of a job (see tests/rank_pool.py), and returns what the
tests look at. With one process, tests call it directly."""

from tests.cases import (
    beside_model,
    callbacks,
    carried,
    closures,
    data,
    evaluation,
    failures,
    language,
    optimizer_factories,
    optimizers,
    own_steps,
    processes,
    replicas,
    states,
    stopping,
    streams,
    tools,
    training,
)

__all__ = [
    "beside_model",
    "callbacks",
    "carried",
    "closures",
    "data",
    "evaluation",
    "failures",
    "language",
    "optimizer_factories",
    "optimizers",
    "own_steps",
    "processes",
    "replicas",
    "states",
    "stopping",
    "streams",
    "tools",
    "training",
]
