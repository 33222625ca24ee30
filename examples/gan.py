"""Train a small DCGAN on handwritten digits, drawing a picture every few epochs.

    python examples/gan.py
    torchrun --standalone --nproc_per_node 2 examples/gan.py

The architecture follows Radford et al., "Unsupervised Representation Learning with Deep
Convolutional Generative Adversarial Networks" (2016), scaled down to 8 x 8 pixels. A
classifier trained on the real digits judges the result by how confident it is about
each generated digit, and by how many different digits there are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks

NOISE = 16


def load_images() -> TensorDataset:
    """Return the digits with values from -1 to 1, of shape (1, 8, 8)."""
    images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    return TensorDataset(2 * images.unsqueeze(1) - 1)


def create_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 2 * 2),
        nn.Unflatten(1, (64, 2, 2)),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def create_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 1),
    )


class GANTrainer(Trainer):
    """Update the discriminator, then the generator, which is the trainer's model."""

    def __init__(self, **kwargs: Any) -> None:
        generator = create_generator()
        self.discriminator = create_discriminator()
        optimizers = {
            "generator": torch.optim.Adam(
                generator.parameters(), lr=1e-3, betas=(0.5, 0.999)
            ),
            "discriminator": torch.optim.Adam(
                self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)
            ),
        }
        super().__init__(generator, loss_func=None, optimizer=optimizers, **kwargs)

    def train_step(self, batch: tuple[torch.Tensor]) -> None:
        (real,) = batch
        fake = self.model(torch.randn(len(real), NOISE, device=self.device))
        right = softplus(-self.discriminator(real)) + softplus(
            self.discriminator(fake.detach())
        )
        self.update(right.mean(), "discriminator")
        self.update(softplus(-self.discriminator(fake)).mean(), "generator")

    @torch.no_grad()
    def draw(self, noise: torch.Tensor) -> torch.Tensor:
        """Return images of shape (N, 8, 8) with values from 0 to 1, on the CPU."""
        model = self.get_model()
        model.eval()
        return (model(noise.to(self.device)).squeeze(1).cpu() + 1) / 2


class PictureCallback(TrainerCallback):
    """Draw images from the same noise every few epochs."""

    def __init__(self, folder: Path, every_n_epochs: int) -> None:
        self.folder = folder
        self.every_n_epochs = every_n_epochs
        self.noise = torch.randn(80, NOISE, generator=torch.Generator().manual_seed(0))

    def on_training_run_epoch_end(self, trainer: GANTrainer, **kwargs: Any) -> None:
        epoch = trainer.progress.epoch
        if epoch % self.every_n_epochs == 0 and trainer.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            tiles = nn.functional.pad(trainer.draw(self.noise), (1, 1, 1, 1)).reshape(
                5, 16, 10, 10
            )
            sheet = (
                tiles.transpose(1, 2)
                .reshape(50, 160)
                .repeat_interleave(5, 0)
                .repeat_interleave(5, 1)
            )
            plt.imsave(
                self.folder / f"epoch_{epoch:03d}.png",
                sheet.numpy(),
                cmap="gray_r",
                vmin=0,
                vmax=1,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gan"), help="where to save pictures"
    )
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    pictures = PictureCallback(args.output, every_n_epochs=max(args.epochs // 6, 1))
    trainer = GANTrainer(callbacks=[*get_default_callbacks(), pictures], seed=args.seed)
    trainer.train(load_images(), num_epochs=args.epochs, per_device_batch_size=64)

    digits = load_digits()
    judge = LogisticRegression(max_iter=2000).fit(digits.data / 16, digits.target)
    drawn = trainer.draw(
        torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
    )
    probabilities = judge.predict_proba(drawn.flatten(1))
    kinds = len(set(probabilities.argmax(1)))
    sure = probabilities.max(1).mean()
    trainer.print(
        f"A classifier is {sure:.1%} sure of 1,000 drawn digits, of {kinds} kinds"
    )
    trainer.print(f"Pictures: {args.output}")


if __name__ == "__main__":
    main()
