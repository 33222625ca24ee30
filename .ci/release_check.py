"""Build the sdist and the wheel, look into them, install them as users do, and try what they bring.

    make release-check                   after any change of the package's metadata or files
    make release-check ARGS=--release    before a release: what would only be noted is an error

The files that were checked are left in dist/. RELEASING.md says what else belongs to a release.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
FOR_DEVELOPERS = {"all", "bench", "docs", "test"}  # these have to resolve; all others are installed and tried

IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil, sys
import pytorch_accel_lite as package

assert package.__file__.startswith(sys.prefix), f"not the installed package: {package.__file__}"
assert package.__version__ == importlib.metadata.version("pytorch-accel-lite")
for module in pkgutil.walk_packages(package.__path__, "pytorch_accel_lite."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""

TRAIN = """
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerWithTimmScheduler
from pytorch_accel_lite.callbacks import ModelSummaryCallback, TrackerCallback

x = torch.randn(32, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))


def train(*callbacks, trainer_class=Trainer, **kwargs):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_class(model, torch.nn.MSELoss(), optimizer, callbacks=callbacks)
    trainer.train(data, 2, data, per_device_batch_size=8, **kwargs)
    return trainer
"""

MLFLOW = """
import os

os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": Path("mlruns").resolve().as_uri()}
train(TrackerCallback("mlflow"))
assert list(Path("mlruns").rglob("train_loss_epoch"))
"""

WANDB = """
train(TrackerCallback("wandb", init_kwargs={"mode": "offline"}))
assert list(Path("wandb").rglob("*.wandb"))
"""

TRACKIO = """
import os

os.environ["TRACKIO_DIR"] = str(Path("trackio").resolve())
train(TrackerCallback("trackio"))
assert list(Path("trackio").glob("*.db"))
"""

TIMM = """
from timm.scheduler import CosineLRScheduler

create = lambda optimizer: CosineLRScheduler(optimizer, t_initial=2)
train(trainer_class=TrainerWithTimmScheduler, create_scheduler_fn=create)
"""


def first_code(page: str) -> str:
    """Return the first block of Python on a page of the documentation."""
    return re.search(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)[1]


# What each extra is for.
TRIALS = {
    "plot": first_code("README.md") + '\nassert __import__("os").path.getsize("curves.png") > 10_000',
    "dataframe": TRAIN + "assert len(train().run_history.to_dataframe()) == 2",
    "tensorboard": TRAIN + 'train(TrackerCallback("tensorboard"))\nassert list(Path("runs").rglob("*tfevents*"))',
    "mlflow": f"{TRAIN}{MLFLOW}",
    "wandb": f"{TRAIN}{WANDB}",
    "trackio": f"{TRAIN}{TRACKIO}",
    "timm": f"{TRAIN}{TIMM}",
    "notebook": "from tqdm.notebook import tqdm\ntqdm(total=1, display=False).update()",
    "cli": 'import pytorch_accel_lite.experiment as e\ne.Experiment.from_file(None, {"model": "torch.nn.ReLU"})',
    "optuna": "from pytorch_accel_lite.experiment import OptunaPruningCallback\nOptunaPruningCallback(None)",
    "stats": "from pytorch_accel_lite.experiment import SeedComparison as Seeds\n"
    "print(Seeds(('a', 'b'), 'loss', False, [0, 1], ([1.0, 2.0], [2.0, 4.0]), 0.95, {}))",
    "summary": f"{TRAIN}train(ModelSummaryCallback())",
    "s3": 'from pytorch_accel_lite.extensions.remote import RemoteFolder\nRemoteFolder("s3://a")\nimport s3fs',
    "ray": "from pytorch_accel_lite.integrations import RayReportCallback\nRayReportCallback()",
    "examples": (ROOT / "examples" / "digits.py").read_text(),
}
# The extras without which an error of ours says what to install.
WITH_ERROR = [
    "plot",
    "dataframe",
    "tensorboard",
    "mlflow",
    "wandb",
    "trackio",
    "cli",
    "optuna",
    "stats",
    "summary",
    "ray",
]


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; what it prints is shown when it fails, which ends the check."""
    done = subprocess.run([str(part) for part in command], text=True, capture_output=True, check=False, cwd=cwd)
    if done.returncode != 0:
        raise SystemExit(f"FAILED: {shlex.join(str(part) for part in command)}\n{done.stdout}{done.stderr}")
    return done


class Environment:
    """An empty environment, and a folder to work in from which the checkout is not found.

    Args:
        folder: where both are made
    """

    def __init__(self, folder: Path) -> None:
        self.work = Path(tempfile.mkdtemp(dir=folder))
        self.python = self.work / "venv" / "bin" / "python"
        run("uv", "venv", "--quiet", "--python", sys.executable, self.work / "venv")

    def install(self, *requirements: str, dry_run: bool = False) -> None:
        """Install, and check that everything installed fits together."""
        run("uv", "pip", "install", *["--dry-run"] * dry_run, "--python", self.python, *requirements)
        run(sys.executable, "-m", "pip", "--python", self.python, "check")

    def execute(self, code: str, check: bool = True) -> str:
        """Run code with nothing but what is installed, and return what it printed to the error stream."""
        script = self.work / "script.py"
        script.write_text(code)
        command = [self.python, "-I", script, *["--epochs", "3"] * ("--epochs" in code)]
        if check:
            return run(*command, cwd=self.work).stderr
        return subprocess.run(command, cwd=self.work, text=True, capture_output=True, check=False).stderr


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist of the files that git knows, and the wheel from the sdist; return both."""
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", DIST, source)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def tracked() -> set[str]:
    """Return the names of the files that git knows and that are there."""
    names = run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


def check_contents(sdist: Path, wheel: Path) -> None:
    """The sdist holds all files of the repository, the wheel those of the package, and neither anything else."""
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    of_package = {name for name in tracked() if name.startswith("pytorch_accel_lite/")}
    generated = {name for name in in_sdist if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    described = {
        info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    }
    for file, found, expected in ((sdist, in_sdist - generated, tracked()), (wheel, in_wheel, of_package | described)):
        if found != expected:
            raise SystemExit(
                f"{file.name}\nlacks {sorted(expected - found)}\nshould not hold {sorted(found - expected)}\n"
                "MANIFEST.in says what the sdist holds, [tool.setuptools] in pyproject.toml what the wheel does."
            )


def check_metadata(wheel: Path) -> tuple[list[str], list[str]]:
    """Return the extras, and what is fine now but not in a release."""
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(name).decode())
    for field in ("Summary", "Author", "Keywords", "Requires-Python", "License-Expression", "License-File"):
        if not metadata[field]:
            raise SystemExit(f"The metadata lack {field}.")
    notes = []
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    if newest == "Unreleased":
        notes.append(f"the newest heading of CHANGELOG.md is Unreleased, not {metadata['Version']}")
    elif newest != metadata["Version"]:
        raise SystemExit(f"CHANGELOG.md says {newest}, pyproject.toml {metadata['Version']}.")
    labels = {link.partition(",")[0] for link in metadata.get_all("Project-URL", [])}
    missing = {"Repository", "Documentation", "Changelog", "Issues"} - labels
    if missing:
        notes.append(f"[project.urls] lacks {', '.join(sorted(missing))}")
    if re.search(r"\]\((?!https:)", (ROOT / "README.md").read_text()):
        notes.append("README.md has links without an address, which lead nowhere from the index")
    if run("git", "status", "--porcelain", cwd=ROOT).stdout:
        notes.append("there are changes that are not committed")
    return metadata.get_all("Provides-Extra", []), notes


def check_errors(environment: Environment, wheel: Path) -> None:
    """Without an extra either all works, or the error names a command after which it does."""
    environment.install(str(wheel))
    environment.execute(IMPORT_ALL)
    environment.execute(first_code("docs/index.md"))
    for extra in WITH_ERROR:
        error = environment.execute(TRIALS[extra], check=False)
        command = re.search(r"ImportError: .*Install it with: pip install (.+)$", error, re.MULTILINE)
        if command:
            print(f"  without {extra}: pip install {command[1]}", flush=True)
            environment.install(*shlex.split(command[1]))
        environment.execute(TRIALS[extra])


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true", help="what is not fit for a release is an error")
    release = parser.parse_args().release
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    start = time.monotonic()

    def done(what: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {what}", flush=True)

    # Beside the environment of the check, so that uv can link files where copies would take gigabytes.
    with tempfile.TemporaryDirectory(dir=sys.prefix) as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        done(f"built {sdist.name} and {wheel.name}")
        check_contents(sdist, wheel)
        extras, notes = check_metadata(wheel)
        if set(extras) != FOR_DEVELOPERS | set(TRIALS):
            raise SystemExit(f"The extras are {extras}; FOR_DEVELOPERS and TRIALS in {__file__} are of others.")
        for note in notes:
            print(f"  not fit for a release: {note}")
        if release and notes:
            raise SystemExit("See RELEASING.md.")
        done("contents and metadata")

        environment = Environment(folder)
        check_errors(environment, wheel)
        done("the wheel without extras, then with what its errors ask for")
        for extra in extras:
            requirement = f"pytorch-accel-lite[{extra}] @ {wheel.as_uri()}"
            if extra in FOR_DEVELOPERS:
                environment.install(requirement, dry_run=True)
                done(f"the requirements of [{extra}] can be met")
            else:
                fresh = Environment(folder)
                fresh.install(requirement)
                fresh.execute(IMPORT_ALL)
                fresh.execute(TRIALS[extra])
                shutil.rmtree(fresh.work)
                done(f"the wheel with [{extra}]")

        fresh = Environment(folder)
        fresh.install(str(sdist))
        fresh.execute(IMPORT_ALL)
        fresh.execute(first_code("docs/index.md"))
        done("the sdist")
    print(f"All is well. What was checked is in {DIST}.")


if __name__ == "__main__":
    main()
