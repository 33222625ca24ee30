"""A rank of a tests/rank_pool.py job: it runs the functions that it receives, and resets global state in between."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.launching import use_filters

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


class Surroundings:
    """Global state that a function may change."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._environment = dict(os.environ)
        self._handlers = [signal.getsignal(number) for number in SIGNALS]

    def restore(self) -> None:
        os.chdir(self._folder)
        os.environ.clear()
        os.environ.update(self._environment)
        for number, handler in zip(SIGNALS, self._handlers, strict=True):
            signal.signal(number, handler)
        faulthandler.register(signal.SIGUSR2)  # runs that end in order at signals replace it
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        gc.collect()
        gc.freeze()  # what is left stays: the next collection need not look at it


def call(module: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    try:
        value, failure = getattr(importlib.import_module(module), function)(*args, **kwargs), None
    except BaseException:
        value, failure = None, traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return value, failure


def main(socket: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    surroundings = Surroundings()
    gc.freeze()
    with Client(socket, "AF_UNIX") as master:
        master.send_bytes(pickle.dumps((accelerator.process_index, accelerator.num_processes, os.getpid())))
        del accelerator
        while (request := pickle.loads(master.recv_bytes())) is not None:
            surroundings.restore()
            *function, filters = request
            use_filters(filters)
            master.send_bytes(pickle.dumps(call(*function)))
