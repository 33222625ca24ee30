"""Twenty small models of different kinds: each has one hash, however many processes train it, whole or sharded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.extensions.logical.norm_by_rows import norm_by_rows
from tests.launching import CAN_SHARD, SOAK
from tests.ranks import world_size
from tests.sharded import gathered, mesh_of
from tests.small_models import adamw_trainer

pytestmark = [CAN_SHARD, pytest.mark.processes]
VOCABULARY, CLASSES = 11, 3


class Then(nn.Module):
    """Computes something between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def mean_of_image() -> Then:
    return Then(lambda x: x.mean((2, 3)))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def convolution_with_batch_norm() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), mean_of_image()]
    return nn.Sequential(*layers, nn.Linear(5, CLASSES))


def depthwise_with_group_norm() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.GroupNorm(2, 6), nn.SiLU()]
    return nn.Sequential(*layers, mean_of_image(), nn.Linear(6, CLASSES))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Dropout2d(0.1))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        logits: torch.Tensor = self.head((x + self.block(x)).mean((2, 3)))
        return logits


def several_dropouts() -> nn.Module:
    layers = [nn.Linear(8, 20), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(20, 12), nn.GELU(), nn.Dropout(0.4)]
    return nn.Sequential(*layers, nn.Linear(12, CLASSES))


def bag_of_words() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(VOCABULARY, 7), nn.LayerNorm(7), nn.Linear(7, CLASSES))


class TiedWeights(nn.Module):
    """The weights of the embedding are those of the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(torch.tanh(self.hidden(self.embedding(tokens)))).mean(1)
        return logits


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), encoder, Then(lambda x: x.mean(1)), nn.Linear(8, CLASSES))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.layer = layer
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(self.embedding(tokens))
        logits: torch.Tensor = self.head(states[:, -1])
        return logits


def gru() -> nn.Module:
    return Recurrent(nn.GRU(5, 7, batch_first=True), 7)


def lstm_in_both_directions() -> nn.Module:
    return Recurrent(nn.LSTM(5, 4, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True), 8)


def instance_norm_with_statistics() -> nn.Module:
    norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    layers = [Then(lambda x: x.flatten(2)), nn.Conv1d(3, 6, 3, stride=2), norm, nn.ELU(), Then(lambda x: x.mean(2))]
    return nn.Sequential(*layers, nn.Linear(6, CLASSES))


def learned_slopes() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 9), nn.PReLU(9), nn.RMSNorm(9), nn.Linear(9, CLASSES))


def frozen_features() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), mean_of_image(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    model[0].requires_grad_(False)
    return model


class OwnBuffers(nn.Module):
    """Keeps statistics of its inputs, of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.mean(0), 0.1)
        logits: torch.Tensor = self.layer(x - self.mean)
        return logits


class ComplexWeights(nn.Module):
    """Multiplies frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(x)[:, None] * self.weights
        logits: torch.Tensor = self.head(torch.fft.irfft(frequencies, n=8).flatten(1))
        return logits


class LowRank(nn.Module):
    """Trains two thin matrices beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.base(x) + self.up(self.down(x))))
        return logits


class Experts(nn.Module):
    """Each sample goes to one of several experts, so that some get no gradient in a share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return outputs[torch.arange(len(x)), chosen] * weights[:, None]


class LearnedQuery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        keys = self.embedding(tokens)
        found, _ = self.attention(self.query.expand(len(tokens), -1, -1), keys, keys, need_weights=False)
        logits: torch.Tensor = self.head(found[:, 0])
        return logits


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 10)), nn.ReLU(), nn.Linear(10, CLASSES))


def spectral_norm() -> nn.Module:
    """Its buffers change in each forward pass."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 10)), nn.ReLU(), nn.Linear(10, CLASSES))


VECTORS, IMAGES, TOKENS = "vectors", "images", "tokens"
MODELS: dict[Callable[[], nn.Module], str] = {
    perceptron: VECTORS, convolution_with_batch_norm: IMAGES, depthwise_with_group_norm: IMAGES, Residual: IMAGES,
    several_dropouts: VECTORS, bag_of_words: TOKENS, TiedWeights: TOKENS, transformer: TOKENS, gru: TOKENS,
    lstm_in_both_directions: TOKENS, instance_norm_with_statistics: IMAGES, learned_slopes: VECTORS,
    frozen_features: IMAGES, OwnBuffers: VECTORS, ComplexWeights: VECTORS, LowRank: VECTORS, Experts: VECTORS,
    LearnedQuery: TOKENS, weight_norm: VECTORS, spectral_norm: VECTORS,
}  # fmt: skip
SOME = [convolution_with_batch_norm, TiedWeights, LowRank]


def data_of(kind: str, count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(count)
    labels = torch.randint(CLASSES, (count,), generator=drawn)
    if kind == TOKENS:
        return TensorDataset(torch.randint(VOCABULARY, (count, 6), generator=drawn), labels)
    return TensorDataset(torch.randn(count, *((8,) if kind == VECTORS else (3, 8, 8)), generator=drawn), labels)


def optimizer_of(number: int, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if number % 3 == 0:
        return torch.optim.AdamW(trained, lr=0.02)
    if number % 3 == 1:
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True)
    return torch.optim.RMSprop(trained, lr=0.005)


def hash_of(create: Callable[[], nn.Module], is_sharded: bool) -> str:
    """The hash of weights, buffers, states of the optimizer, history and predictions after a run of two epochs."""
    torch.manual_seed(0)
    model = create()
    if is_sharded:  # torch wants one dtype
        has_one_dtype = len({parameter.dtype for parameter in model.parameters()}) == 1
        fully_shard(model if has_one_dtype else cast(Any, model).head, mesh=mesh_of(world_size(), names=("dp",)))
    optimizer = optimizer_of([*MODELS].index(create), model)
    options: dict[str, Any] = {"seed": 3, "logical_processes": 6, "accelerator": Accelerator(cpu=True)}
    trainer = adamw_trainer(model, F.cross_entropy, optimizer=optimizer, callbacks=[], **options)
    training, others = data_of(MODELS[create], 53), data_of(MODELS[create], 19)
    arguments = {"gradient_clip_norm": 0.5, "gradient_accumulation_steps": 2, "create_scheduler_fn": "cosine"}
    trainer.train(training, 2, others, per_device_batch_size=2, **arguments)
    predicted = trainer.predict(others, per_device_batch_size=2)
    found = hashlib.sha256(json.dumps(trainer.run_history.to_dict()).encode())
    states = {f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    for tensors in (gathered(trainer.get_model().state_dict()), gathered(states), {"predicted": predicted}):
        for name in sorted(tensors):
            if tensors[name] is not None:
                found.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def hashes(creators: list[Callable[[], nn.Module]], is_sharded: bool = False) -> list[str]:
    return [hash_of(create, is_sharded) for create in creators]


@cache
def of_one_process() -> list[str]:
    return hashes([*MODELS] if SOAK else SOME)


def test_the_models_have_different_hashes():
    found = of_one_process()
    assert len({*found}) == len(found)


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize(("processes", "is_sharded"), [(3, False), *[(2, True), (2, False)] * SOAK])
def test_every_model_has_one_hash(job, processes, is_sharded):
    creators = [*MODELS] if SOAK else SOME
    for found in job(processes).run(hashes, creators, is_sharded):
        assert dict(zip(creators, found, strict=True)) == dict(zip(creators, of_one_process(), strict=True))


def test_the_norm_of_complex_gradients_is_that_of_torch():
    """For complex numbers, ``square()`` is not the squared absolute value."""
    gradients = [torch.randn(3, 4, dtype=torch.complex64), torch.randn(5), torch.randn(2, dtype=torch.complex64)]
    norm = norm_by_rows(gradients, Ranks(Accelerator(cpu=True)))
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients))
