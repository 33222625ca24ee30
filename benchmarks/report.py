"""Ratios to a reference, and tables of them."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Rounds = dict[str, list[dict[str, Any]]]
PACKAGES = (
    "torch", "accelerate", "pytorch-accelerated", "lightning", "transformers", "pytorch-ignite", "fastai", "skorch",
    "keras", "timm",
)  # fmt: skip


def interleave(measure: Mapping[str, Callable[[], dict[str, float] | None]], rounds: int) -> Rounds:
    """Measure all contenders in turn for a number of rounds, omitting those that return ``None``."""
    results: Rounds = {name: [] for name in measure}
    for number in range(rounds):
        for name, call in measure.items():
            if number and not results[name]:
                continue
            result = call()
            if result is not None:
                results[name].append(result)
    return results


def pairs(results: Rounds, reference: str, name: str, quantity: str) -> list[tuple[float, float]]:
    """Return a contender's figures with those of the reference: measured with it, or else in the same round."""
    by_hand = f"{quantity} of plain loop"
    own = [values[quantity] for values in results[name]]
    if all(by_hand in values for values in results[name]):
        return list(zip(own, (values[by_hand] for values in results[name]), strict=True))
    return list(zip(own, (values[quantity] for values in results[reference]), strict=False))


def table(results: Rounds, reference: str, quantities: Sequence[str] = ("cpu", "wall")) -> str:
    """Return a Markdown table of the ratios' medians, minima and maxima, and of the differences in microseconds."""
    heads = [f"{quantity} time".replace("cpu", "CPU") for quantity in quantities]
    heads.append(f"more {heads[0]}, microseconds")
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    base: list[float] = []
    for name, rounds in results.items():
        if not rounds:
            lines.append(f"| {name} |" + " not installed |" * len(heads))
            continue
        cells = []
        for quantity in quantities:
            found = [value / before for value, before in pairs(results, reference, name, quantity)]
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
        both = pairs(results, reference, name, quantities[0])
        more = statistics.median(value - before for value, before in both)
        base += [before for _, before in both]
        lines.append(f"| {name} | {' | '.join(cells)} | {1e6 * more:+,.0f} |")
    if base:
        lines.append(f"\n1.00 is {1e6 * statistics.median(base):,.0f} microseconds.")
    return "\n".join(lines)


def plain_table(results: Rounds, unit: str) -> str:
    """Return a Markdown table of the medians themselves."""
    names = list(dict.fromkeys(name for rounds in results.values() for values in rounds for name in values))
    lines = [f"| | {' | '.join(names)} ({unit}) |", "|---|" + "---|" * len(names)]
    for contender, rounds in results.items():
        cells = [f"{statistics.median(values[name] for values in rounds):.1f}" for name in names]
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """Return the properties of the machine and the package versions that affect the figures."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "machine": platform.machine(), "cpu": _cpu_name(), **versions}


def footnote(*details: str) -> str:
    """Return what is printed below a table, after an empty line: details, the machine and the versions."""
    on = machine()
    versions = ", ".join(f"{name} {on[name]}" for name in PACKAGES if name in on)
    return "\n" + ". ".join([*details, f"Python {on['python']}, {on['machine']}, {on['cpu']}, {versions}."])


def in_rounds(count: int) -> str:
    return f"{count} round{'s' * (count > 1)}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write(
    folder: Path, workload: str, title: str, results: Rounds, reference: str, unit: str = "", body: str | None = None
) -> None:
    """Write a workload's figures as Markdown and JSON, and print them.

    Args:
        unit: show absolute figures in this unit instead of ratios to the reference
        body: show this instead of either
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounds = in_rounds(max(map(len, results.values())))
    if body is None:
        body = plain_table(results, unit) if unit else table(results, reference)
    text = f"### {title}\n\n{body}\n{footnote(rounds)}\n"
    (folder / f"{workload}.md").write_text(text)
    content = {"machine": machine(), "reference": reference, "rounds": results}
    (folder / f"{workload}.json").write_text(json.dumps(content, indent=1))
    print(text, flush=True)
