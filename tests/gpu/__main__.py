"""Everything that needs a GPU, in one command: make gpu [OUTPUT=FOLDER] [ARGS=--rehearse]

Runs the tests of this folder, then those that need the GPU for themselves, then the benchmarks, in at most eight
minutes. A part that fails, hangs or takes too long does not keep the others from running. Writes to the folder:

- ``log.txt``: what all parts have printed
- ``tests.xml``: the tests, as JUnit XML
- ``gpu.json``: all results
- ``gpu.md``: a page made from these, also by ``make gpu ARGS="--page FOLDER/gpu.json"``, for the documentation

With ``--rehearse``, all of it runs on the CPU with small sizes. This program itself needs nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.page import page, summary

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "results" / "gpu.md"
LIMIT = 465.0  # seconds of all parts together: eight minutes, less what writing takes
PATIENCE = 10.0  # seconds for a part that is interrupted to write what it knows
MOST_LOGGED = 2_000_000  # characters
WORKLOADS = ("gpu_tiny", "gpu_gpt", "gpu_resnet")
MACHINE = """
import json, os, platform
from importlib import metadata
import torch
on_gpu = torch.cuda.is_available()
found = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "on_gpu": on_gpu}
found["device"] = torch.cuda.get_device_name(0) if on_gpu else "CPU"
found["cuda"] = torch.version.cuda if on_gpu else None
found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if on_gpu else None
for name in ("torch", "accelerate", "torchmetrics", "transformers", "pytorch-lightning", "timm", "pytest"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


TOGETHER = """
import sys, pytest
from benchmarks.gpu import main
main("all", sys.argv[1], "quick")
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Part:
    """A command with its limit of time.

    Args:
        name: the name of the part in the report
        command: the command with its arguments
        seconds: the time limit of the command, in seconds
        ahead: whether the command only prepares for later parts, beside those that follow
    """

    name: str
    command: list[str]
    seconds: float
    ahead: bool = False


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def pytest_command(expression: str, workers: int, xml: Path, limit: int) -> list[str]:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "-m", expression, "-v", "-rfEs"]
    command += ["-W", "default", "-p", "no:cacheprovider", "--tb=short", "--durations=15", f"--junitxml={xml}"]
    if has("xdist") and workers:  # in processes of their own, which are replaced if they crash
        command += ["-n", str(workers), "--dist", "loadgroup"]
    if has("pytest_timeout"):
        command += ["-o", f"timeout={limit}", "--timeout-method=thread"]  # a signal does not reach what waits for a GPU
    if has("pytest_randomly"):
        command += ["-p", "no:randomly"]
    return command


def parts(rehearses: bool, folder: Path) -> list[Part]:
    """All parts in their order."""
    if rehearses:  # in one process, as starts of Python take most of the time; nothing is compiled
        python, _, _, *arguments = pytest_command("gpu", 0, folder / "tests.xml", 900)
        together = [python, "-c", TOGETHER, ",".join(WORKLOADS), *arguments]
        return [Part("benchmarks and tests", together, 1520)]  # nothing is lost by waiting for a busy machine
    workers = max(2, min(8, len(os.sched_getaffinity(0)) // 2))

    def benchmark(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu", "all", *arguments]

    return [
        Part("compiling ahead", benchmark("gpu_gpt,gpu_resnet", "compile"), 200, ahead=True),
        Part("tests", pytest_command("gpu and not alone", workers, folder / "tests.xml", 110), 190),
        Part("tests alone", pytest_command("gpu and alone", 1, folder / "alone.xml", 110), 70),
        *(Part(f"benchmark {name}", benchmark(name, "full"), 65) for name in WORKLOADS),
    ]


def environment(rehearses: bool, folder: Path) -> dict[str, str]:
    changes = {
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch looks at it at the first product, whoever asks for it later
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),  # all parts share what one has compiled
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # in each of several processes
        "HF_HUB_OFFLINE": "1",
        "RES_OPTIONS": "timeout:1",  # there may be nobody to ask for names
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1" if rehearses else "2",
        "TMPDIR": str(folder),
    }
    if rehearses:
        changes |= {"REHEARSE_GPU_TESTS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in os.environ.items() if name != "REHEARSE_GPU_TESTS"} | changes


class Running:
    """A part that runs in a session of its own."""

    def __init__(self, part: Part, env: dict[str, str], folder: Path) -> None:
        self.part = part
        self.file = folder / f"{part.name.replace(' ', '_')}.log"
        with self.file.open("w") as output:
            self._process = subprocess.Popen(
                part.command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._start = time.monotonic()

    def wait(self, seconds: float) -> dict[str, Any]:
        """Wait for the end and return the outcome; kill the part after its time limit."""
        outcome = ""
        try:
            self._process.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            outcome = f"ended after its {seconds:.0f} seconds"
            self._end()
        code = self._process.returncode
        outcome = outcome or ("passed" if code == 0 else f"exit code {code}")
        taken = round(time.monotonic() - self._start, 1)
        return {"name": self.part.name, "outcome": outcome, "seconds": taken, "output": self.output}

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def _end(self) -> None:
        """Let the part write its results, then kill it with its children."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the system may not be able to end what waits for a device
            self._process.wait(10.0)


def run_parts(rehearses: bool, folder: Path, deadline: float) -> list[dict[str, Any]]:
    """Run all parts one after another, those that prepare beside the others.

    Args:
        deadline: when all must have ended, on the monotonic clock
    """
    env = environment(rehearses, folder)
    ahead: list[Running] = []
    done: list[dict[str, Any]] = []
    for part in parts(rehearses, folder):
        if part.name != "tests":  # times are measured from now on
            done += [ahead.pop().wait(1.0) for _ in list(ahead)]
        print(f"{part.name} ...", flush=True)
        running = Running(part, env, folder)
        if part.ahead:
            ahead.append(running)
            continue
        done.append(running.wait(min(part.seconds, deadline - time.monotonic())))
        print(f"{part.name}: {done[-1]['outcome']}, {done[-1]['seconds']} s", flush=True)
    done += [running.wait(1.0) for running in ahead]
    return done


# ------------------------------------------------------------------------------------------------ results


def read_tests(folder: Path, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tests with their outcomes and figures; from the output if a part left no XML."""
    found: list[dict[str, Any]] = []
    for part, name in (("tests", "tests.xml"), ("tests alone", "alone.xml")):
        try:
            cases = list(ET.parse(folder / name).iter("testcase"))
        except (OSError, ET.ParseError):
            output = next((each["output"] for each in done if each["name"] == part), "")
            found += from_output(output)
            continue
        found += [from_case(case) for case in cases]
    return found


def from_case(case: ET.Element) -> dict[str, Any]:
    outcome, reason = "passed", ""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            outcome = "skipped" if kind == "skipped" else "failed"
            reason = found.get("message", "").splitlines()[0][:300] if found.get("message") else kind
    figures = {each.get("name"): each.get("value") for each in case.iter("property")}
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
    seconds = round(float(case.get("time", 0)), 2)
    return {"name": name, "outcome": outcome, "reason": reason, "seconds": seconds, "figures": figures}


def from_output(output: str) -> list[dict[str, Any]]:
    """The outcomes in the lines of ``pytest -v``."""
    found = []
    for line in output.splitlines():
        for word, outcome in (("PASSED", "passed"), ("FAILED", "failed"), ("ERROR", "failed"), ("SKIPPED", "skipped")):
            name = next((piece for piece in line.split() if piece.startswith("tests/gpu/") and "::" in piece), None)
            if name is not None and f" {word} " in f" {line} " and "[gw" in line:
                short = name.partition("tests/gpu/")[2].replace(".py", "")
                found.append({"name": short, "outcome": outcome, "reason": "", "seconds": 0.0, "figures": {}})
    return found


def read_benchmarks(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that the benchmarks have printed, also those of one that was ended."""
    rows = []
    for part in done:
        if not part["name"].startswith("benchmark"):
            continue
        for line in part["output"].splitlines():
            if line.startswith('{"workload"'):
                with suppress(json.JSONDecodeError):
                    rows.append(json.loads(line))
    return rows


def merge(folder: Path, target: Path) -> None:
    """Write the tests of all parts as one file of JUnit XML."""
    suites = ET.Element("testsuites")
    for name in ("tests.xml", "alone.xml"):
        with suppress(OSError, ET.ParseError):
            suites.extend(ET.parse(folder / name).iter("testsuite"))
    ET.ElementTree(suites).write(target, encoding="utf-8", xml_declaration=True)


def write(output: Path, folder: Path, results: dict[str, Any], done: list[dict[str, Any]]) -> None:
    """Write all files, each even if another cannot be written."""
    share = MOST_LOGGED // max(len(done), 1)
    log = "".join(f"\n===== {part['name']}: {part['outcome']}\n{part['output'][-share:]}" for part in done)
    for name, content in (("gpu.json", json.dumps(results, indent=1)), ("log.txt", log), ("gpu.md", page(results))):
        (output / name).write_text(content)
    merge(folder, output / "tests.xml")


def describe_machine(rehearses: bool, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", MACHINE],
        env=environment(rehearses, folder),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300 if not rehearses else 1200,
    )
    if done.returncode:
        raise SystemExit(f"torch cannot be imported by {sys.executable}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def room_for_files() -> str | None:
    """Memory, if there is enough: states of a gigabyte are written."""
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 12 * 2**30
    return str(memory) if has_room else None


def main() -> int:
    """Run everything, and return whether anything failed."""
    parser = argparse.ArgumentParser(prog="make gpu ARGS=", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "gpu_results")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--page", type=Path, help="only write the page of the documentation from a gpu.json")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads(arguments.page.read_text())))
        print(f"Written: {PAGE.relative_to(ROOT)}")
        return 0
    start = time.monotonic()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=room_for_files(), ignore_cleanup_errors=True) as name:
        folder = Path(name)
        machine = describe_machine(arguments.rehearse, folder)
        if not machine["on_gpu"] and not arguments.rehearse:
            raise SystemExit("torch finds no CUDA device here. make gpu ARGS=--rehearse runs all of it on the CPU.")
        done = run_parts(arguments.rehearse, folder, start + (3600 if arguments.rehearse else LIMIT))
        results = {
            "rehearsal": arguments.rehearse,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "parts": [{name: value for name, value in part.items() if name != "output"} for part in done],
            "tests": read_tests(folder, done),
            "benchmarks": read_benchmarks(done),
        }
        results["seconds"] = round(time.monotonic() - start, 1)
        write(output, folder, results, done)
    print(summary(results))
    print(f"\nWritten to {arguments.output}: gpu.json, gpu.md, log.txt, tests.xml")
    if arguments.rehearse and has_failed(results):
        print((output / "log.txt").read_text()[-20_000:])
    return int(has_failed(results))


def has_failed(results: dict[str, Any]) -> bool:
    failed = any(test["outcome"] == "failed" for test in results["tests"])
    failed |= any("failed" in row for row in results["benchmarks"])
    unfinished = any(part["outcome"] != "passed" for part in results["parts"] if part["name"] != "compiling ahead")
    return failed or unfinished or not results["tests"] or not results["benchmarks"]


if __name__ == "__main__":
    sys.exit(main())
