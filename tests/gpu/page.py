"""The page of GPU results, and the table that the command prints at the end."""

from __future__ import annotations

import statistics
from typing import Any

NOTHING = """\
Nothing has been run on a GPU yet. `make gpu` runs the tests that need one and measures what this page shows;
that command itself is rehearsed on a CPU.
"""
TITLES = {
    "gpu_tiny": "A perceptron of 13,000 parameters, batches of 32: the cost of the loop",
    "gpu_gpt": "A transformer of 124 million parameters in bf16 with flash attention, batches of 16 x 1,024 tokens",
    "gpu_resnet": "ResNet-50 in bf16, channels-last, batches of 64 images of 224 x 224 in memory",
}


def outcomes(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"passed": [], "failed": [], "skipped": []}
    for test in results["tests"]:
        found[test["outcome"]].append(test)
    return found


def page(results: dict[str, Any] | None) -> str:
    """Return the page as Markdown; without results, that there are none."""
    if results is None or results["rehearsal"]:
        shown = "" if results is None else f"\nA rehearsal on a CPU:\n\n{tables(results)}\n"
        return NOTHING + shown
    on = results["machine"]
    packages = ("torch", "accelerate", "torchmetrics", "transformers", "pytorch-lightning", "timm")
    versions = ", ".join(f"{name} {on[name]}" for name in packages if name in on)
    where = (
        f"Measured on one {on['device']} on {results['date']}: CUDA {on['cuda']}, Python {on['python']}, {versions}."
    )
    return f"{where}\n\n{tables(results)}\n"


def tables(results: dict[str, Any]) -> str:
    found = outcomes(results)
    counts = ", ".join(f"{len(tests)} {outcome}" for outcome, tests in found.items())
    lines = [f"**Tests** (`tests/gpu/`): {counts}."]
    if found["failed"]:
        lines += ["", "| failed | |", "|---|---|"]
        lines += [f"| `{test['name']}` | {cell(test['reason'])} |" for test in found["failed"]]
    figures = [(test["name"], test["figures"]) for test in results["tests"] if test["figures"]]
    if figures:
        lines += ["", "| figures that tests have measured | |", "|---|---|"]
        lines += [f"| `{name}` | {', '.join(f'{k} {v}' for k, v in found.items())} |" for name, found in figures]
    for workload in dict.fromkeys(row["workload"] for row in results["benchmarks"]):
        rows = [row for row in results["benchmarks"] if row["workload"] == workload]
        lines += ["", f"**{TITLES.get(workload, workload)}**", "", *benchmark(rows)]
    lines += [
        "",
        "Ratios of times to those of the plain loop, with which each row took turns in one process; by events of",
    ]
    lines += [
        "the device, medians and quartiles of the turns. The control is that loop again. The synchronisations are"
    ]
    lines += ["those that torch's debug mode has counted."]
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def benchmark(rows: list[dict[str, Any]]) -> list[str]:
    heads = ["", "time", "more, microseconds a step", "CPU time", "synchronisations a step"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) - 1)]
    for row in rows:
        name = row["contender"] + (", compiled" if row["compiled"] else "")
        if "ratios" not in row:
            why = "not installed" if "missing" in row else f"failed: {cell(row['failed'])[:120]}"
            lines.append(f"| {name} | {why} | | | |")
            continue
        more = 1e6 * (row["event"] - row["event of plain loop"])
        waits = row.get("synchronisations")
        counted = "not counted" if waits is None else f"{waits:.3g}"
        if row.get("first synchronisation"):
            counted += f", first at {row['first synchronisation']}"
        cpu = row["cpu"] / row["cpu of plain loop"]
        lines.append(f"| {name} | {spread(row['ratios'])} | {more:+,.1f} | {cpu:.3f} | {counted} |")
    base = [row["event of plain loop"] for row in rows if "ratios" in row and not row["compiled"]]
    if base:
        lines += ["", f"The plain loop, not compiled, takes {1e6 * statistics.median(base):,.0f} microseconds a step."]
    return lines


def spread(ratios: list[float]) -> str:
    first, median, third = statistics.quantiles(ratios, n=4)
    return f"{median:.4f} ({first:.4f} to {third:.4f})"


def summary(results: dict[str, Any]) -> str:
    """Return the final summary: outcomes, first lines of failures, ratios."""
    found = outcomes(results)
    lines = ["", f"{results['machine']['device']}, {results['seconds']:.0f} s"]
    lines += [f"  {part['name']:<22} {part['seconds']:>6} s  {part['outcome']}" for part in results["parts"]]
    lines += [f"tests: {', '.join(f'{len(tests)} {outcome}' for outcome, tests in found.items())}"]
    lines += [f"  FAILED {test['name']}: {test['reason']}" for test in found["failed"]]
    lines += [f"  skipped {test['name']}: {test['reason']}" for test in found["skipped"]]
    for test in results["tests"]:
        if test["figures"]:
            lines.append(f"  {test['name']}: {', '.join(f'{k} {v}' for k, v in test['figures'].items())}")
    for row in results["benchmarks"]:
        name = f"{row['workload']}, {row['contender']}{', compiled' if row['compiled'] else ''}"
        if "ratios" in row:
            waits = row.get("synchronisations")
            waited = "" if waits is None else f", {waits:.3g} synchronisations a step"
            lines.append(f"  {name}: {statistics.median(row['ratios']):.4f} of the plain loop{waited}")
        else:
            lines.append(f"  {name}: {row.get('failed', 'not installed')}")
    return "\n".join(lines)
