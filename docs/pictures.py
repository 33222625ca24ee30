"""Redraw the pictures of the documentation: ``make pictures``.

All have the style of the package's own plots, also those that the code of a page draws
with matplotlib alone. Screenshots are taken with Chromium or Chrome, if installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import optuna
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter
from optuna.visualization.matplotlib import plot_slice
from PIL import Image, ImageChops
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite import callbacks as available
from pytorch_accel_lite.extensions.plots.figure_style import COLOURS, GRID, INK
from pytorch_accel_lite.plotting import plot_schedule

DOCS = Path(__file__).resolve().parent
PICTURES = [
    "comparison.png",
    "confusion.png",
    "curves.png",
    "find_lr.png",
    "monitors.png",
    "resumed_schedule.png",
    "run_log.png",
    "schedule.png",
    "search.png",
    "worst_samples.png",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STYLE = {
    "figure.dpi": 120,
    "text.color": INK,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
}

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1300], labels[:1300])
test_set = TensorDataset(images[1300:], labels[1300:])


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(512, 10),
    )


def new_trainer(*callbacks: Any) -> Trainer:
    model = small_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.05)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=0)


def draw_a_run() -> None:
    """Train a small network with all monitors, and draw what can be seen of that."""
    accuracy = {"accuracy": MulticlassAccuracy(10)}
    nested = [available.MetricsCallback(accuracy)]
    worst = available.WorstSamplesCallback(k=10)
    trainer = new_trainer(
        available.MetricsCallback(accuracy),
        available.ModelEmaCallback(0.98, save_path=None, callbacks=nested),
        worst,
        available.LearningRateMonitorCallback(),
        available.GradientNormCallback(),
        available.ThroughputCallback(),
        available.DeviceMemoryCallback(),
        available.TimingCallback(show=False),
        available.SaveTrainingStateCallback("states"),
        available.RunLogCallback("digits", {"dropout": 0.2}, name="Digits, two layers"),
    )
    steps = TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS
    schedule = partial(OneCycleLR, max_lr=0.004, total_steps=steps)
    trainer.train(train_set, 20, test_set, 32, create_scheduler_fn=schedule)
    history = trainer.run_history
    history.plot(DOCS / "monitors.png")
    chosen = ["train_loss_epoch", "eval_loss_epoch", "accuracy"]
    history.plot(DOCS / "curves.png", metrics=chosen)
    worst.plot(test_set, DOCS / "worst_samples.png")
    predictions = trainer.predict(test_set).argmax(1)
    display = ConfusionMatrixDisplay.from_predictions(
        labels[1300:], predictions, cmap="Blues"
    )
    display.ax_.grid(False)
    display.figure_.savefig(DOCS / "confusion.png")
    plot_schedule(schedule, 500, path=DOCS / "schedule.png")
    photograph(Path("digits", "summary.html"), DOCS / "run_log.png", "<h2>Epochs")


def draw_a_range_test() -> None:
    new_trainer().find_lr(train_set, 32).plot(DOCS / "find_lr.png")


def draw_the_resumed_schedule() -> None:
    run_page(DOCS / "schedulers.md")
    shutil.copy("resumed_schedule.png", DOCS)


def draw_a_search() -> None:
    """Search for settings with the example, and draw the study and its runs."""
    from pytorch_accel_lite import compare_runs  # of an extension

    example = DOCS.parent / "examples" / "search.py"
    command = [sys.executable, example, "--output", "search", "--trials", "20"]
    subprocess.run(command, check=True)
    draw_trials("sqlite:///search/study.db")
    ranked = compare_runs("search", sort_by="accuracy").runs
    best = compare_runs([Path("search", run.name) for run in ranked[:8]])
    photograph(best.save("comparison.html"), DOCS / "comparison.png", "<details>")


def draw_trials(storage: str) -> None:
    """Draw the plot of the example, which Optuna draws in a style of its own."""
    study = optuna.load_study(study_name=None, storage=storage)
    with mpl.rc_context():
        plot_slice(study, target_name="accuracy")
        figure = plt.gcf()
        figure.suptitle("")
        figure.set_size_inches(10.8, 3.2)
        *axes, _ = figure.axes  # the last is the scale of colours
        for axis in axes:
            axis.set_facecolor("white")
            axis.grid(color=GRID, linewidth=0.6)
            axis.spines[["left", "bottom"]].set(color=INK, visible=True)
            axis.xaxis.set_minor_formatter(NullFormatter())
        for axis in figure.axes:
            axis.tick_params(labelsize=8, color=INK, labelcolor=INK)
            for label in (axis.xaxis.label, axis.yaxis.label):
                label.set(fontsize=8.5, color=INK)
        figure.savefig(DOCS / "search.png", dpi=120, bbox_inches="tight")
        plt.close(figure)


def draw_schemes() -> None:
    for page in sorted((DOCS / "schemes").glob("*.md")):
        run_page(page)
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            shutil.copy(name, DOCS / "schemes")


def draw_the_gan() -> None:
    example = DOCS.parent / "examples" / "gan.py"
    subprocess.run([sys.executable, example, "--output", "gan"], check=True)
    for epoch in ("010", "060"):
        shutil.copy(
            f"gan/epoch_{epoch}.png", DOCS / "examples" / f"gan_epoch_{epoch}.png"
        )


def run_page(page: Path) -> None:
    """Run the code of a page, which saves its pictures in the current folder."""
    namespace = {"__name__": "docs"}
    code_blocks = r"^```python\n(.*?)^```$"
    with mpl.rc_context(STYLE):
        for code in re.findall(code_blocks, page.read_text(), re.MULTILINE | re.DOTALL):
            exec(code, namespace)


def photograph(page: Path, picture: Path, end: str) -> None:
    """Take a picture of a page, of its source only what comes before a text."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"{picture.name} stays as it is: there is no browser.")
        return
    upper = Path("upper.html").resolve()
    source = page.read_text()
    upper.write_text(source[: source.index(end)])
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars"]
    command += ["--window-size=1200,4000", f"--screenshot={picture}"]
    subprocess.run([*command, upper.as_uri()], check=True, capture_output=True)
    image = Image.open(picture).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, 0)))
    *_, bottom = ImageChops.difference(image, empty).getbbox()
    image.crop((0, 0, image.width, bottom + 24)).save(picture)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny
    os.chdir(tempfile.mkdtemp())
    # What is loaded or drawn for the first time takes longer: it must be no epoch's.
    first = new_trainer(available.RunLogCallback("first"))
    first.train(train_set, 2, test_set)
    draw_a_run()
    draw_a_range_test()
    draw_the_resumed_schedule()
    draw_a_search()
    draw_schemes()
    draw_the_gan()
