"""Complete programs against the loops they come from: bit for bit, also after being killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import run_forked
from tests.small_models import equal_weights, listener, weights

Weights = dict[str, torch.Tensor]


def numbers(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Program(NamedTuple):
    """A trainer and the loop that it replaces.

    Args:
        create: creates the trainer, with callbacks
        arguments: those of ``train``
        by_hand: the loop; returns the weights
    """

    create: Callable[[list[Any]], Trainer]
    arguments: dict[str, Any]
    by_hand: Callable[[], Weights]


# ----------------------------------------------------------- a recurrent network whose state is carried, time first

TEXT = torch.randint(7, (4 * 5 + 1, 3), generator=torch.Generator().manual_seed(1))  # steps x streams
WINDOWS = [(TEXT[i : i + 4], TEXT[i + 1 : i + 5]) for i in range(0, 20, 4)]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(7, 6), nn.LSTM(6, 6)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor, hidden: Any = None) -> tuple[torch.Tensor, Any]:
        outputs, hidden = self.cell(self.drop(self.embedding(tokens)), hidden)
        return self.head(self.drop(outputs)).flatten(0, 1), tuple(part.detach() for part in hidden)


class Hidden:
    """The state of the network after the last window."""

    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class LanguageTrainer(Trainer):
    def __init__(self, callbacks: list[Any]) -> None:
        model = LanguageModel()
        super().__init__(model, None, torch.optim.SGD(model.parameters(), lr=2.0), callbacks)
        self.hidden = Hidden()
        self.register_for_checkpointing("hidden", self.hidden)

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return WINDOWS

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.hidden.value = None

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        tokens, targets = batch
        outputs, self.hidden.value = self.model(tokens, self.hidden.value)
        loss = functional.cross_entropy(outputs, targets.flatten())
        return {"loss": loss, "model_outputs": outputs, "batch_size": tokens.shape[1]}


def language_model_by_hand() -> Weights:
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for _ in range(2):
        hidden = None
        for tokens, targets in WINDOWS:
            optimizer.zero_grad()
            outputs, hidden = model(tokens, hidden)
            functional.cross_entropy(outputs, targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    return weights(model)


# --------------------------------------------------------------------------------- a GAN, with two optimizers

IMAGES = TensorDataset(numbers(14, 1, 8, 8))
REAL_OR_FAKE = nn.BCEWithLogitsLoss()


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    up = nn.ConvTranspose2d(3, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh()
    down = nn.Conv2d(1, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4), nn.Flatten(0)
    return nn.Sequential(*up), nn.Sequential(*down)


def adams(generator: nn.Module, discriminator: nn.Module) -> dict[str, torch.optim.Optimizer]:
    named = {"discriminator": discriminator, "generator": generator}
    return {name: torch.optim.Adam(of.parameters(), lr=0.01, betas=(0.5, 0.999)) for name, of in named.items()}


class GANTrainer(Trainer):
    def __init__(self, callbacks: list[Any]) -> None:
        generator, self.discriminator = networks()
        super().__init__(generator, REAL_OR_FAKE, adams(generator, self.discriminator), callbacks)

    def train_step(self, batch: Any) -> None:
        (real,) = batch
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        real_loss = self.loss_func(self.discriminator(real), ones)
        fake = self.model(torch.randn(len(real), 3, 1, 1))
        fake_loss = self.loss_func(self.discriminator(fake.detach()), zeros)
        self.update(real_loss + fake_loss, "discriminator")
        self.update(self.loss_func(self.discriminator(fake), ones), "generator")


def gan_by_hand() -> Weights:
    generator, discriminator = networks()
    optimizers = adams(generator, discriminator)
    for _ in range(2):
        for (real,) in DataLoader(IMAGES, 4, shuffle=True):
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            discriminator.zero_grad()
            REAL_OR_FAKE(discriminator(real), ones).backward()
            fake = generator(torch.randn(len(real), 3, 1, 1))
            REAL_OR_FAKE(discriminator(fake.detach()), zeros).backward()
            optimizers["discriminator"].step()
            generator.zero_grad()
            REAL_OR_FAKE(discriminator(fake), ones).backward()
            optimizers["generator"].step()
    return weights(generator) | {f"discriminator.{name}": value for name, value in weights(discriminator).items()}


# ------------------------------------------------------------------------- time sequences by LBFGS, in float64

WAVES = torch.sin(torch.arange(12, dtype=torch.float64) / 2 + numbers(3, 1).double())
BEFORE_AND_AFTER = TensorDataset(WAVES[:, :-1], WAVES[:, 1:])


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, 5), nn.Linear(5, 1)
        self.double()

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        hidden, outputs = None, []
        for value in waves.split(1, dim=1):
            hidden = self.cell(value, hidden)
            outputs.append(self.head(hidden[0]))
        return torch.cat(outputs, dim=1)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=5)


def sequence_trainer(callbacks: list[Any]) -> Trainer:
    model = Sequence()
    return Trainer(model, nn.MSELoss(), lbfgs(model), callbacks)


def sequence_by_hand() -> Weights:
    model = Sequence()
    optimizer = lbfgs(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(WAVES[:, :-1]), WAVES[:, 1:])
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    return weights(model)


# ------------------------------------------------------------------------------------------ reinforcement learning


class Walk:
    """An environment: a position that the agent moves and noise disturbs; it is to stay near zero.

    Attributes:
        generator: the generator of the noise
        position: the position
        average: the running mean of what episodes have brought
    """

    def __init__(self) -> None:
        self.generator = np.random.default_rng(7)
        self.position = self.average = 0.0

    def step(self, action: int) -> float:
        self.position += action - 0.5 + float(self.generator.normal())
        return -abs(self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "average": self.average, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.average = state["position"], state["average"]
        self.generator.bit_generator.state = state["generator"]


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 2))


def loss_of_episode(model: nn.Module, environment: Walk) -> torch.Tensor:
    """Play an episode, which continues where the last one ended."""
    chances, rewards = [], []
    for _ in range(6):
        choices = Categorical(logits=model(torch.tensor([environment.position])))
        action = choices.sample()
        chances.append(choices.log_prob(action))
        rewards.append(environment.step(int(action)))
    returns = torch.tensor([*itertools.accumulate(reversed(rewards))][::-1])
    environment.average = 0.9 * environment.average + 0.1 * float(returns[0])
    return -(torch.stack(chances) * (returns - environment.average)).mean()


class Episodes:
    """An endless stream of the numbers of episodes."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class PolicyTrainer(Trainer):
    def __init__(self, callbacks: list[Any]) -> None:
        model = policy()
        super().__init__(model, None, torch.optim.Adam(model.parameters(), lr=0.02), callbacks)
        self.environment = Walk()
        self.register_for_checkpointing("environment", self.environment)

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return Episodes()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of_episode(self.model, self.environment), "batch_size": 1}


def policy_by_hand() -> Weights:
    model, environment = policy(), Walk()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(7):
        optimizer.zero_grad()
        loss_of_episode(model, environment).backward()
        optimizer.step()
    return weights(model)


# --------------------------------------------------------------------------------------- a variational autoencoder

DIGITS = TensorDataset(numbers(18, 9).sigmoid())


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(9, 6), nn.Linear(3, 9)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        return self.decode(mean + noise * (0.5 * log_variance).exp()).sigmoid(), mean, log_variance


def elbo(outputs: Any, x: torch.Tensor) -> torch.Tensor:
    found, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    return (functional.binary_cross_entropy(found, x, reduction="sum") + divergence) / len(x)


class VAETrainer(Trainer):
    def __init__(self, callbacks: list[Any]) -> None:
        model = VAE()
        super().__init__(model, elbo, torch.optim.Adam(model.parameters(), lr=0.01), callbacks)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        (x,) = batch
        outputs = self.model(x)
        return {"loss": self.loss_func(outputs, x), "model_outputs": outputs}


def vae_by_hand() -> Weights:
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for (x,) in DataLoader(DIGITS, 4, shuffle=True):
            optimizer.zero_grad()
            elbo(model(x), x).backward()
            optimizer.step()
    return weights(model)


# -------------------------------------------------------------------------------------------------------- triplets


class Triplets(Dataset[Any]):
    """An image, one of the same class and one of another, drawn at random each time."""

    images = numbers(18, 5)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        same = random.randrange(index % 3, len(self), 3)
        other = random.randrange((index + random.choice([1, 2])) % 3, len(self), 3)
        return self.images[index], self.images[same], self.images[other]


def embedder() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


class TripletTrainer(Trainer):
    def __init__(self, callbacks: list[Any]) -> None:
        model = embedder()
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        super().__init__(model, nn.TripletMarginLoss(), optimizer, callbacks)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        embeddings = [self.model(images) for images in batch]
        return {"loss": self.loss_func(*embeddings), "model_outputs": embeddings}


def triplets_by_hand() -> Weights:
    model = embedder()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for _ in range(2):
        for batch in DataLoader(Triplets(), 4, shuffle=True):
            optimizer.zero_grad()
            functional.triplet_margin_loss(*map(model, batch)).backward()
            optimizer.step()
    return weights(model)


# ------------------------------------------------------------------------------------ a graph, which is one batch

NODES = 12
EDGES = ((numbers(NODES, NODES) > 0.8).float() + torch.eye(NODES)).softmax(1)
GRAPH = numbers(NODES, 4), EDGES, torch.arange(NODES) % 3, torch.arange(NODES) < 8  # features, classes, which to train


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout((edges @ self.inner(features)).relu(), 0.5, self.training)
        return (edges @ self.outer(hidden)).log_softmax(1)


def graph_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


class GraphTrainer(Trainer):
    def __init__(self, callbacks: list[Any]) -> None:
        model = GraphNetwork()
        super().__init__(model, nn.NLLLoss(), graph_optimizer(model), callbacks)

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return [GRAPH]

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        features, edges, classes, is_trained = batch
        outputs = self.model(features, edges)
        return {"loss": self.loss_func(outputs[is_trained], classes[is_trained]), "model_outputs": outputs}


def graph_by_hand() -> Weights:
    model = GraphNetwork()
    optimizer = graph_optimizer(model)
    features, edges, classes, is_trained = GRAPH
    for _ in range(6):
        optimizer.zero_grad()
        functional.nll_loss(model(features, edges)[is_trained], classes[is_trained]).backward()
        optimizer.step()
    return weights(model)


# ----------------------------------------------------------------------------------------------------------- tests

FOURS = {"num_epochs": 2, "per_device_batch_size": 4}
PROGRAMS = {
    "language model": Program(
        LanguageTrainer, {"train_dataset": None, "num_epochs": 2, "gradient_clip_norm": 0.25}, language_model_by_hand
    ),
    "gan": Program(GANTrainer, {"train_dataset": IMAGES} | FOURS, gan_by_hand),
    "lbfgs": Program(
        sequence_trainer,
        {
            "train_dataset": BEFORE_AND_AFTER,
            "num_epochs": 6,
            "per_device_batch_size": 3,
            "train_dataloader_kwargs": {"shuffle": False},
        },
        sequence_by_hand,
    ),
    "policy": Program(PolicyTrainer, {"train_dataset": None, "max_num_train_steps": 7}, policy_by_hand),
    "vae": Program(VAETrainer, {"train_dataset": DIGITS} | FOURS, vae_by_hand),
    "triplets": Program(
        TripletTrainer,
        {"train_dataset": Triplets(), "train_dataloader_kwargs": {"num_workers": 0}} | FOURS,
        triplets_by_hand,
    ),
    "graph": Program(GraphTrainer, {"train_dataset": None, "num_epochs": 6}, graph_by_hand),
}
#: The extensions that programs need: some read lists and iterables of their own.
NEEDED = dict.fromkeys(("graph", "language model", "policy"), ("streams",)) | {
    "gan": ("manual_optimization",),
    "lbfgs": ("closures",),
}
EACH = [
    pytest.param(program, id=name, marks=pytest.mark.extension(*NEEDED.get(name, ())))
    for name, program in PROGRAMS.items()
]


def seed(value: int) -> None:
    for with_seed in (torch.manual_seed, np.random.seed, random.seed):
        with_seed(value)


def trained(program: Program, callbacks: list[Any], **kwargs: Any) -> Weights:
    """Train, and return the weights of all networks."""
    trainer = program.create(callbacks)
    trainer.train(**program.arguments, **kwargs)
    others = {"discriminator": trainer.discriminator} if isinstance(trainer, GANTrainer) else {}
    return weights(trainer.get_model()) | {
        f"{of}.{name}": value for of, network in others.items() for name, value in weights(network).items()
    }


@pytest.mark.sampled
@pytest.mark.parametrize("program", EACH)
def test_a_program_equals_its_loop_bit_for_bit(program):
    seed(0)
    expected = program.by_hand()
    seed(0)
    assert equal_weights(trained(program, []), expected)


def kill(trainer: Trainer, **kwargs: Any) -> None:
    if trainer.progress.update == 5:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sampled
@pytest.mark.parametrize("program", EACH)
def test_a_program_that_is_killed_resumes_to_the_same_bits(program, tmp_path):
    def saving(name: str) -> SaveTrainingStateCallback:
        return SaveTrainingStateCallback(tmp_path / name, save_every_n_steps=2)

    seed(0)
    whole = trained(program, [saving("whole")])

    def until_killed() -> None:
        seed(0)
        trained(program, [saving("killed"), listener(on_train_step_end=kill)])

    assert run_forked(until_killed).returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "update-000000004").is_dir()
    seed(1)
    assert equal_weights(trained(program, [saving("killed")], resume_from="latest"), whole)
