"""Progressive resizing: train on small images first, then on larger ones.

    python examples/progressive_resizing.py

The images are shapes in random colours, drawn into class folders of a temporary
directory. The model is timm's ResNet. Needs the extra ``timm``.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import timm
import torch
from PIL import Image, ImageDraw
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks

SHAPES = ("circle", "square", "triangle")


def draw(shape: str, rng: random.Random) -> Image.Image:
    """Draw a shape of random size, position and colour on a dark background."""
    image = Image.new("RGB", (64, 64), tuple(rng.randrange(60) for _ in range(3)))
    colour, r = tuple(rng.randrange(120, 256) for _ in range(3)), rng.randrange(12, 24)
    x, y = rng.randrange(r, 64 - r), rng.randrange(r, 64 - r)
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    else:
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    return image


def draw_folder(folder: Path, per_class: int, seed: int) -> Path:
    rng = random.Random(seed)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
        for i in range(per_class):
            draw(shape, rng).save(folder / shape / f"{i}.png")
    return folder


def images(folder: Path, size: int) -> ImageFolder:
    steps = [
        v2.Resize(size),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.4] * 3, [0.3] * 3),
    ]
    return ImageFolder(folder, v2.Compose(steps))


class AccuracyCallback(TrainerCallback):
    """Measure the accuracy of every evaluation over all processes."""

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.correct = torch.zeros(2, device=trainer.device)

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        hits = batch_output["model_outputs"].argmax(1) == batch[1]
        self.correct += torch.stack(
            [hits.sum(), torch.tensor(len(hits), device=trainer.device)]
        )

    def on_eval_epoch_end(self, trainer, **kwargs):
        right, seen = (
            trainer.tensor_to_numeric(number, reduce="sum") for number in self.correct
        )
        trainer.run_history.update_metric("accuracy", right / seen)


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", pretrained=False, num_classes=len(SHAPES))
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.001),
        callbacks=[*get_default_callbacks(progress_bar=False), AccuracyCallback()],
        seed=0,
        channels_last=True,
    )
    with tempfile.TemporaryDirectory() as name:
        train = draw_folder(Path(name, "train"), per_class=60, seed=1)
        valid = draw_folder(Path(name, "valid"), per_class=30, seed=2)
        for size in (32, 48, 64):  # model, optimizer and history carry over
            trainer.train(
                images(train, size),
                num_epochs=1,
                eval_dataset=images(valid, size),
                per_device_batch_size=16,
                reset_run_history=False,
                train_dataloader_kwargs={"num_workers": 0},
                eval_dataloader_kwargs={"num_workers": 0},
            )
            accuracy = trainer.run_history.get_latest_metric("accuracy")
            trainer.print(
                f"\n{size} pixels: {accuracy:.2%} of 90 shapes "
                "the model has never seen\n"
            )


if __name__ == "__main__":
    main()
