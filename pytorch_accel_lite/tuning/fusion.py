"""Finding out whether compiling a step would pay: how much of its time takes what a compiler fuses."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operations that read and write each element once or a few times: torch's own code for them makes one pass over memory
# each, while inductor's makes one for several.
_FUSIBLE = re.compile(
    r"norm|pool|elu|silu|sigmoid|tanh|threshold|clamp|softmax|dropout|where"
    r"|^aten::(add|sub|mul|div|pow|exp|log|sqrt|rsqrt|abs|neg|copy|fill|erf|sin|cos|lerp|addcmul|addcdiv)_?(\.|$)"
)


def fusible_share(compute: Callable[[], Any]) -> float:
    """Return the part of the time of a computation on the CPU, from 0 to 1, that goes into operations to be fused."""
    with _Timed() as timed:
        compute()
    return timed.fusible / timed.total if timed.total else 0.0


class _Timed(TorchDispatchMode):
    """Measures operations, those of backward passes included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.fusible = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - begin
        self.total += seconds
        if _FUSIBLE.search(func.name()):
            self.fusible += seconds
        return result
