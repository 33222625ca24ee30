"""Measure trainers side by side: python -m benchmarks [--workloads loop tensors] [--rounds 5] [--quick].

Every contender runs in its own process, in interleaved rounds. Results are medians of the ratios to the hand-written
loop, with the minimum and maximum: training takes turns with that loop in the same process, everything else is compared
with it in the same round. The loop takes part itself: the spread of that row, the control, shows how reliable the other
figures are. On a shared machine, look at the CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.contenders import CONTENDERS, ONLY_IN
from benchmarks.other_workloads import OTHERS

REFERENCE = "plain loop"
TITLES = {
    "loop": "Cost of the loop: a tiny MLP, ready batches of 32, 2,000 updates",
    "tensors": "The same MLP on a shuffled TensorDataset",
    "first": "Time to the first update: imports, set-up and one step",
    "convnet": "A small convolutional network: ready batches of 32 images of 16 x 16",
    "transformer": "A transformer of 10 million parameters: batches of 8 x 64 bytes of text",
}


def run_worker(module: str, *arguments: str) -> dict[str, float] | None:
    """Run a module in its own process and return the JSON on its last line, or ``None`` if a package is missing."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if not arguments[0].startswith("gpu"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["STARTED_AT"] = str(time.time())
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return None if "missing" in result else result


def main(command: list[str] | None = None, run: Callable[..., dict[str, float] | None] = run_worker) -> None:
    """Run the benchmarks and write tables.

    Args:
        command: command line arguments
        run: runs a module with arguments in its own process
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[*TITLES, *OTHERS], default=[*TITLES, *OTHERS])
    parser.add_argument("--contenders", nargs="+", help="measure only these contenders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="a few steps only, to check that everything works")
    arguments = parser.parse_args(command)
    unknown = set(arguments.contenders or ()) - set(CONTENDERS)
    if unknown and not OTHERS.keys() >= set(arguments.workloads):
        parser.error(f"--contenders: {sorted(unknown)} are not among {list(CONTENDERS)}")
    mode = "quick" if arguments.quick else "full"
    for workload in arguments.workloads:
        if workload in OTHERS:
            other, chosen = OTHERS[workload], arguments.contenders
            if workload.startswith("gpu") and not (arguments.quick or torch.cuda.is_available()):
                continue
            measures = other.measures(arguments.quick, run)
            if chosen:
                names_of = list(measures)
                measures = {name: call for name, call in measures.items() if name in (other.reference, *chosen)}
                if not measures:
                    parser.error(f"--contenders: {chosen} are not among {names_of}")
            results = report.interleave(measures, 1 if workload == "memory" else arguments.rounds)
            made = None if other.make_table is None else other.make_table(results)
            report.write(arguments.output, workload, other.title, results, other.reference, other.unit, made)
            continue
        names = dict.fromkeys([REFERENCE, *(arguments.contenders or CONTENDERS)])
        if workload != "first" and REFERENCE not in (arguments.contenders or ()):
            del names[REFERENCE]  # it takes turns with each
        there = [name for name in names if ONLY_IN.get(name, workload) == workload]
        if not there:
            continue
        measures = {name: partial(run, "benchmarks.run_contender", name, workload, mode) for name in there}
        results = report.interleave(measures, arguments.rounds)
        report.write(arguments.output, workload, TITLES[workload], results, REFERENCE)


if __name__ == "__main__":
    main()
