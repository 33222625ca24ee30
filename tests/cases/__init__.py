"""What several processes do: each function runs on every rank of a job (see tests/rank_pool.py), and returns what the
tests look at. With one process, tests call it directly."""

from tests.cases import adapters, callbacks, data, evaluation, failures, optimizers, stopping, streams, training

__all__ = ["adapters", "callbacks", "data", "evaluation", "failures", "optimizers", "stopping", "streams", "training"]
