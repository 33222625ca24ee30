"""check(): mistakes that people make are found by the check that should find them; right programs raise no alarm."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.experiment.command_line import main
from pytorch_accel_lite.tuning.probing import Finding
from pytorch_accel_lite.tuning.program_check import ProgramError
from tests.launching import ROOT
from tests.tasks import Stream, quiet_trainer, same

CLASSES = 5


@dataclass
class Program:
    """A trainer, its data, and arguments of train()."""

    trainer: Trainer
    data: Any
    arguments: dict[str, Any] = field(default_factory=dict)


WRONG: list[tuple[str, Callable[[], Program]]] = []
RIGHT: list[Callable[[], Program]] = []


def wrong(check: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Mark a program with a mistake that a check should find."""

    def mark(make: Callable[[], Program]) -> Callable[[], Program]:
        WRONG.append((check, make))
        return make

    return mark


def right(make: Callable[[], Program]) -> Callable[[], Program]:
    """Mark a program without a mistake."""
    RIGHT.append(make)
    return make


# ------------------------------------------------------------------------------------------ parts of programs


def features(size: int = 200, width: int = 10, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


def labelled(size: int = 200, seed: int = 0) -> TensorDataset:
    x = features(size, seed=seed)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def regression(size: int = 200, seed: int = 0, column: bool = True) -> TensorDataset:
    x = features(size, seed=seed)
    y = x.sin().sum(1)
    return TensorDataset(x, y[:, None] if column else y)


def mlp(outputs: int = CLASSES, *last: nn.Module, inputs: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs), *last)


def classifier(model: nn.Module | None = None, loss: Any = None, lr: float = 0.01, **kwargs: Any) -> Trainer:
    model = mlp() if model is None else model
    optimizer = kwargs.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=lr)
    return quiet_trainer(model, loss or nn.CrossEntropyLoss(), optimizer, **kwargs)


def regressor(model: nn.Module | None = None, loss: Any = None, lr: float = 0.01, **kwargs: Any) -> Trainer:
    return classifier(mlp(1) if model is None else model, loss or nn.MSELoss(), lr, **kwargs)


class Step(Trainer):
    """Computes the same in training and in evaluation, by ``loss_of``."""

    def calculate_train_batch_loss(self, batch):
        return self.loss_of(batch)

    def calculate_eval_batch_loss(self, batch):
        return self.loss_of(batch)


def of_step(kind: type[Trainer], model: nn.Module, lr: float = 0.01, **kwargs: Any) -> Trainer:
    return kind(model, None, torch.optim.AdamW(model.parameters(), lr=lr), callbacks=[], **kwargs)


VOCABULARY, PAD = 20, 0


def tokens(size: int = 64, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(seed))


class SequenceModel(nn.Module):
    """A transformer block over tokens."""

    def __init__(self, causal: bool = True, outputs: int = VOCABULARY, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(64, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, outputs)
        self.causal = causal

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        x = x + self.attention(x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=False)[0]
        return self.head(self.dropout(x))


class NextToken(Step):
    shift = 1

    def loss_of(self, batch):
        (ids,) = batch
        logits = self.model(ids[:, : ids.shape[1] - self.shift])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, self.shift :].flatten()), "model_outputs": logits}


def padded_sentences(size: int = 64) -> list[dict[str, Any]]:
    lengths = torch.randint(3, 10, (size,), generator=torch.Generator().manual_seed(3)).tolist()
    return [{"ids": row[:length], "label": int(row[0]) % 2} for row, length in zip(tokens(size), lengths, strict=True)]


def pad_collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True, padding_value=PAD)
    return {"ids": ids, "mask": (ids != PAD).long(), "labels": torch.tensor([sample["label"] for sample in samples])}


class Pooled(nn.Module):
    """Classifies sentences by the mean of their embeddings."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.masked = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 2), masked

    def forward(self, ids, mask):
        x = self.embedding(ids)
        if not self.masked:
            return self.head(x.mean(1))
        weights = mask[..., None].float()
        return self.head((x * weights).sum(1) / weights.sum(1))


class Images(Dataset):
    """Images that may be augmented."""

    def __init__(self, augment: Callable[[torch.Tensor], torch.Tensor] | None = None, size: int = 64) -> None:
        self.images = torch.rand(size, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        self.labels = self.images[:, 0, :2, :2].flatten(1).argmax(1)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return (image if self.augment is None else self.augment(image)), self.labels[index]


def jitter(image: torch.Tensor) -> torch.Tensor:
    return image + 0.1 * torch.randn_like(image)


def convnet(*norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


# -------------------------------------------------------------------------------------------- wrong programs


@wrong("broadcast")
def mse_of_a_column_and_a_row():  # the warning of torch's MSELoss about sizes, in many forum threads
    return Program(regressor(), regression(column=False))


@wrong("broadcast")
def own_loss_of_a_column_and_a_row():  # Tobin, "Troubleshooting deep neural networks" (2019): silent broadcasting
    return Program(regressor(loss=lambda outputs, targets: ((outputs - targets) ** 2).mean()), regression(column=False))


@wrong("broadcast")
def weights_of_samples_are_a_column():  # forum: "weighted loss has the wrong shape"
    def loss(outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return (losses * torch.ones(len(losses), 1)).mean()

    return Program(classifier(loss=loss), labelled())


@wrong("broadcast")
def cross_entropy_of_one_output():  # forum: "CrossEntropyLoss is always 0"
    x = features()
    return Program(classifier(mlp(1)), TensorDataset(x, torch.zeros(200, dtype=torch.long)))


@wrong("initial_loss")
def softmax_before_cross_entropy():  # Karpathy, "Most common neural net mistakes" (2018): softmaxed outputs
    return Program(classifier(mlp(CLASSES, nn.Softmax(1))), labelled())


@wrong("initial_loss")
def sigmoid_before_bce_with_logits():  # forum: BCELoss or BCEWithLogitsLoss
    data = TensorDataset(features(), (features().sum(1, keepdim=True) > 0).float())
    return Program(classifier(mlp(1, nn.Sigmoid()), nn.BCEWithLogitsLoss()), data)


@wrong("initial_loss")
def nll_of_logits():  # the note in torch's documentation of NLLLoss; the loss becomes negative
    return Program(classifier(loss=nn.NLLLoss()), labelled())


@wrong("initial_loss")
def divergence_of_probabilities():  # the note in torch's documentation of KLDivLoss
    x = features()
    data = TensorDataset(x, x[:, :CLASSES].softmax(1))
    return Program(classifier(mlp(CLASSES, nn.Softmax(1)), nn.KLDivLoss(reduction="batchmean")), data)


@wrong("initial_loss")
def badly_scaled_weights():  # Karpathy, "A recipe for training neural networks" (2019): verify the loss at init
    model = mlp()
    nn.init.normal_(model[2].weight, std=10.0)
    return Program(classifier(model), labelled())


@wrong("initial_loss")
def relu_on_the_outputs_of_a_regression():  # "37 reasons why your neural network is not working" (2017)
    return Program(regressor(mlp(1, nn.ReLU())), regression())


@wrong("gradients")
def detached_features():  # forum: "my encoder does not train"
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(10, 16), nn.Linear(16, CLASSES)

        def forward(self, x):
            return self.head(self.body(x).detach().relu())

    return Program(classifier(Detached()), labelled())


@wrong("gradients")
def optimizer_of_another_model():  # forum: the model was replaced after the optimizer was created
    model = mlp()
    return Program(
        Trainer(mlp(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[]), labelled()
    )


@wrong("gradients")
def head_is_not_in_the_optimizer():  # forum: "new classifier is not trained" in transfer learning
    model = mlp()
    return Program(classifier(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1)), labelled())


@wrong("gradients")
def layers_in_a_plain_list():  # forum: nn.ModuleList or a Python list
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = [nn.Linear(10, 10), nn.Linear(10, 10)], nn.Linear(10, CLASSES)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(x)

    return Program(classifier(Listed()), labelled())


@wrong("gradients")
def loss_with_parameters_of_its_own():  # documentation of pytorch-metric-learning: the loss needs an optimizer, too
    class Proxies(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(CLASSES, 8))

        def forward(self, points, targets):
            return F.cross_entropy(F.normalize(points, dim=1) @ F.normalize(self.proxies, dim=1).T, targets)

    return Program(classifier(mlp(8), Proxies()), labelled())


@wrong("gradients")
def norm_at_zero():  # forum: sqrt has an infinite gradient at 0
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(10, 1)

        def forward(self, x):
            y = self.layer(x).relu()
            return (y - y).pow(2).sum(1, keepdim=True).sqrt() + y

    return Program(regressor(Norm()), regression())


@wrong("gradients")
def layer_that_is_never_called():  # find_unused_parameters in torch's DistributedDataParallel
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, CLASSES)

        def forward(self, x):
            return self.head(self.first(self.first(x).relu()).relu())

    return Program(classifier(Unused()), labelled())


@wrong("batch_independence")
def softmax_over_the_batch():  # the implicit dimension of softmax, of which torch warns
    class OverBatch(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.head = nn.Linear(10, 10), nn.Linear(10, CLASSES)

        def forward(self, x):
            return self.head(x * self.gate(x).softmax(0))

    return Program(classifier(OverBatch()), labelled())


@wrong("batch_independence")
def recurrent_without_batch_first():  # forum: the most frequent question about nn.LSTM
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    x = torch.randn(64, 6, 4)
    return Program(classifier(Recurrent()), TensorDataset(x, (x.sum((1, 2)) > 0).long()))


@wrong("batch_independence")
def attention_without_batch_first():  # torch warns of it in TransformerEncoder only for nested tensors
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.layer(x).mean(1))

    x = torch.randn(64, 6, 8)
    return Program(classifier(Encoder()), TensorDataset(x, (x.sum((1, 2)) > 0).long()))


@wrong("batch_independence")
def view_in_place_of_transpose():  # Karpathy (2018): "thinking view() and permute() are the same thing"
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 16), nn.Linear(16, 2)

        def forward(self, x):
            out, _ = self.rnn(x.reshape(x.shape[1], x.shape[0], x.shape[2]))
            return self.head(out[-1])

    x = torch.randn(64, 6, 4)
    return Program(classifier(Viewed()), TensorDataset(x, (x.sum((1, 2)) > 0).long()))


@wrong("batch_independence")
def normalised_by_the_whole_batch():  # a mean without a dimension
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body((x - x.mean()) / x.std())

    return Program(classifier(Normalised()), labelled())


@wrong("permutation")
def targets_shifted_over_samples():  # logits[:-1] in place of logits[:, :-1]
    class Shifted(Step):
        def loss_of(self, batch):
            x, y = batch
            return {"loss": F.cross_entropy(self.model(x)[:-1], y[1:])}

    return Program(of_step(Shifted, mlp()), labelled())


@wrong("determinism")
def functional_dropout_in_evaluation():  # forum: F.dropout is active in eval(), as training=True is its default
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(10, 32), nn.Linear(32, CLASSES)

        def forward(self, x):
            return self.second(F.dropout(self.first(x).relu()))

    return Program(classifier(Dropping()), labelled())


@wrong("determinism")
def evaluation_in_training_mode():  # Karpathy (2018): "you forgot to toggle train/eval mode"
    class Forgets(Trainer):
        def eval_epoch_start(self):
            pass

    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Program(Forgets(model, nn.CrossEntropyLoss(), optimizer, callbacks=[]), labelled())


@wrong("determinism")
def attention_always_drops_out():  # the note in torch's documentation of scaled_dot_product_attention
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.head = nn.Linear(4, 24), nn.Linear(8, 2)

        def forward(self, x):
            q, k, v = self.inputs(x).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).mean(1))

    x = torch.randn(64, 6, 4)
    return Program(classifier(Attention()), TensorDataset(x, (x.sum((1, 2)) > 0).long()))


@wrong("determinism")
def step_leaves_evaluation_mode():  # a metric computed within the step
    class Measures(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            self.model.eval()
            return output

    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.5), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Program(Measures(model, nn.CrossEntropyLoss(), optimizer, callbacks=[]), labelled())


@wrong("determinism")
def noise_that_evaluation_adds_too():  # noise as augmentation, without asking self.training
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x + 0.3 * torch.randn_like(x))

    return Program(classifier(Noisy()), labelled())


@wrong("mean_loss")
def sum_over_the_batch():  # the learning rate depends on the batch size: reduction='sum'
    return Program(
        regressor(loss=lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"), lr=1e-3), regression()
    )


@wrong("mean_loss")
def divided_by_the_batch_size_twice():  # a mean divided by len(batch) again
    return Program(
        classifier(loss=lambda outputs, targets: F.cross_entropy(outputs, targets) / len(targets)), labelled()
    )


@wrong("mean_loss")
def mean_over_tokens_without_their_number():  # "gradient accumulation fix" of transformers and Unsloth (2024)
    class Tokens(Step):
        def loss_of(self, batch):
            logits = self.model(batch[:, :-1])
            targets = batch[:, 1:].masked_fill(batch[:, 1:] == PAD, -100)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}

    ids = tokens()
    ids[::2, 4:] = PAD
    return Program(of_step(Tokens, SequenceModel()), ids)


@wrong("causality")
def no_causal_mask():  # Karpathy (2019): use backprop to chart dependencies
    return Program(of_step(NextToken, SequenceModel(causal=False)), TensorDataset(tokens()))


@wrong("causality")
def targets_are_not_shifted():
    class Unshifted(NextToken):
        shift = 0

    return Program(of_step(Unshifted, SequenceModel()), TensorDataset(tokens()))


@wrong("causality")
def targets_are_shifted_twice():  # the documentation of GPT2LMHeadModel: labels are shifted inside the model
    class Twice(Step):
        def loss_of(self, batch):
            (ids,) = batch
            logits, labels = self.model(ids[:, :-1]), ids[:, 1:]
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    return Program(of_step(Twice, SequenceModel()), TensorDataset(tokens()))


@wrong("causality")
def bidirectional_language_model():  # forum: "my LSTM language model has a perplexity of 1"
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(32, VOCABULARY)
            self.rnn = nn.LSTM(16, 16, batch_first=True, bidirectional=True)

        def forward(self, ids):
            return self.head(self.rnn(self.embedding(ids))[0])

    return Program(of_step(NextToken, Both()), TensorDataset(tokens()))


@wrong("padding")
def padding_in_the_mean():  # sentence-transformers' documentation: mean pooling must take the mask into account
    return Program(classifier(Pooled(masked=False)), padded_sentences(), {"collate_fn": pad_collate})


@wrong("padding")
def padding_in_the_loss():  # ignore_index forgotten
    class Tags(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 3)

        def forward(self, ids, mask):
            return self.head(self.embedding(ids)).transpose(1, 2)

    def collate(samples):
        batch = pad_collate(samples)
        return {"ids": batch["ids"], "mask": batch["mask"], "labels": batch["ids"] % 3}

    return Program(classifier(Tags()), padded_sentences(), {"collate_fn": collate})


@wrong("padding")
def backward_rnn_reads_padding_first():  # the documentation of pack_padded_sequence
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(16, 2)
            self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=True)

        def forward(self, ids, mask):
            last = self.rnn(self.embedding(ids))[1]
            return self.head(torch.cat([last[0], last[1]], dim=1))

    return Program(classifier(Reads()), padded_sentences(), {"collate_fn": pad_collate})


@wrong("learns")
def rate_is_far_too_high():  # Karpathy (2019): overfit a single batch
    return Program(regressor(optimizer=None, lr=300.0), regression())


@wrong("learns")
def rate_is_far_too_low():
    return Program(classifier(lr=1e-9), labelled())


@wrong("learns")
def loss_is_maximised():  # a sign that is wrong
    return Program(classifier(loss=lambda outputs, targets: -F.cross_entropy(outputs, targets), lr=1e-3), labelled())


@wrong("learns")
def weights_are_reset_in_each_step():  # an initialisation in forward()
    class Resets(Trainer):
        def optimizer_step(self):
            super().optimizer_step()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return Program(Resets(model, nn.CrossEntropyLoss(), optimizer, callbacks=[]), labelled())


@wrong("inputs_matter")
def inputs_are_overwritten():  # a variable of the same name
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.start = mlp(), nn.Parameter(torch.zeros(10))

        def forward(self, x):
            x = self.start.expand(len(x), -1)
            return self.body(x)

    return Program(classifier(Overwrites()), labelled())


@wrong("inputs_matter")
def one_of_two_inputs_is_ignored():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, image, sound):
            return self.body(image)

    rows = [{"image": x, "sound": x.flip(0), "labels": y} for x, y in labelled()]
    return Program(classifier(Two()), rows)


@wrong("data")
def nan_in_a_sample():  # "37 reasons": bad data
    data = labelled()
    data.tensors[0][137, 3] = math.nan
    return Program(classifier(), data)


@wrong("data")
def labels_begin_at_one():  # forum: "Target 5 is out of bounds", or an assertion on the device
    x, y = labelled().tensors
    return Program(classifier(), TensorDataset(x, y + 1))


@wrong("data")
def pixels_are_not_scaled():  # "37 reasons": check the preprocessing
    images = torch.randint(0, 256, (64, 1, 8, 8)).float()
    return Program(classifier(convnet()), TensorDataset(images, torch.randint(0, 4, (64,))))


@wrong("data")
def target_is_among_the_inputs():  # Kapoor and Narayanan, "Leakage and the reproducibility crisis" (2023)
    x, y = regression().tensors
    return Program(regressor(mlp(1, inputs=11)), TensorDataset(torch.cat([x, y], 1), y))


@wrong("data")
def sorted_and_not_shuffled():  # "37 reasons": shuffle the dataset
    x, y = labelled().tensors
    order = y.argsort()
    arguments = {"train_dataloader_kwargs": {"shuffle": False}, "per_device_batch_size": 16}
    return Program(classifier(), TensorDataset(x[order], y[order]), arguments)


@wrong("data")
def labels_of_bce_are_minus_one_and_one():
    data = TensorDataset(features(), features().sum(1, keepdim=True).sign())
    return Program(classifier(mlp(1), nn.BCEWithLogitsLoss()), data)


@wrong("data")
def evaluation_is_scaled_differently():  # statistics forgotten in the validation transform
    x, y = labelled(seed=1).tensors
    return Program(classifier(), labelled(), {"eval_dataset": TensorDataset(100 * x + 300, y)})


@wrong("data")
def always_the_same_sample():  # an index that is not used
    class Same(Images):
        def __getitem__(self, index):
            return self.images[0], self.labels[0]

    return Program(classifier(convnet()), Same())


@wrong("leakage")
def evaluation_data_are_training_data():
    data = labelled()
    return Program(classifier(), Subset(data, range(160)), {"eval_dataset": Subset(data, range(100, 200))})


@wrong("leakage")
def oversampled_before_the_split():  # Kapoor and Narayanan (2023)
    data = ConcatDataset([labelled(), labelled()])
    order = random.Random(0).sample(range(400), 400)
    return Program(classifier(), Subset(data, order[:300]), {"eval_dataset": Subset(data, order[300:])})


@wrong("augmentation")
def evaluation_data_are_augmented():  # the training transform in both datasets
    return Program(classifier(convnet()), Images(jitter), {"eval_dataset": Images(jitter)})


@wrong("augmentation")
def each_worker_draws_the_same():  # Pärnamaa, "Using PyTorch + NumPy? You're making a mistake" (2021)
    class Own(Images):
        def __init__(self):
            super().__init__(self.distort)
            self.rng = np.random.default_rng(0)

        def distort(self, image):
            return image + torch.from_numpy(self.rng.normal(size=image.shape)).float()

    return Program(classifier(convnet()), Own(), {"train_dataloader_kwargs": {"num_workers": 2}})


@wrong("augmentation")
def getitem_seeds_torch():
    class Seeds(Images):
        def __getitem__(self, index):
            torch.manual_seed(0)
            return jitter(self.images[index]), self.labels[index]

    return Program(classifier(convnet()), Seeds())


@wrong("augmentation")
def augmented_images_are_cached():
    class Caches(Images):
        def __init__(self):
            super().__init__(jitter)
            self.cache = {}

        def __getitem__(self, index):
            if index not in self.cache:
                self.cache[index] = super().__getitem__(index)
            return self.cache[index]

    return Program(classifier(convnet()), Caches())


@wrong("reload")
def statistics_are_no_buffers():  # forum: a tensor attribute is not in the state_dict
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.mean = mlp(), torch.zeros(10)

        def forward(self, x):
            if self.training:
                self.mean = 0.5 * self.mean + 0.5 * (x + 3).mean(0).detach()
            return self.body(x + 3 - self.mean)

    return Program(classifier(Running()), labelled())


@wrong("precision")
def weights_in_half_precision():  # Micikevicius et al., "Mixed precision training" (2018): keep a float32 copy
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp().half()

        def forward(self, x):
            return self.body(x.half()).float()

    return Program(classifier(Half()), labelled())


@wrong("schedule")
def cosine_in_epochs_stepped_by_updates():  # forum: T_max in epochs, scheduler.step() in the inner loop
    arguments = {"create_scheduler_fn": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10), "num_epochs": 10}
    return Program(classifier(), labelled(208), arguments)


@wrong("schedule")
def exponential_stepped_by_updates():
    arguments = {"create_scheduler_fn": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), "num_epochs": 10}
    return Program(classifier(), labelled(), arguments)


@wrong("schedule")
def warm_up_longer_than_the_run():
    warm_up = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.01, total_iters=10_000)
    return Program(classifier(), labelled(), {"create_scheduler_fn": warm_up, "num_epochs": 3})


@wrong("schedule")
def milestones_after_the_end():
    late = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[30_000, 60_000])
    return Program(classifier(), labelled(), {"create_scheduler_fn": late, "num_epochs": 3})


@wrong("schedule")
def one_cycle_shorter_than_the_run():
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=20)
    return Program(classifier(), labelled(), {"create_scheduler_fn": cycle, "num_epochs": 3})


@wrong("runs")
def loss_without_parameters():
    class Constant(Step):
        def loss_of(self, batch):
            return {"loss": F.cross_entropy(self.model(batch[0]).detach(), batch[1])}

    return Program(of_step(Constant, mlp()), labelled())


# -------------------------------------------------------------------------------------------- right programs


@right
def plain_classifier():
    return Program(classifier(), labelled(), {"eval_dataset": labelled(seed=1)})


@right
def plain_regression():
    return Program(regressor(), regression(), {"eval_dataset": regression(seed=1)})


@right
def noise_free_line():
    x = torch.linspace(-1, 1, 64)[:, None]
    return Program(classifier(nn.Linear(1, 1), nn.MSELoss()), TensorDataset(x, 3 * x + 1))


@right
def random_labels():
    return Program(classifier(), TensorDataset(features(), torch.randint(0, CLASSES, (200,))))


@right
def batch_norm_and_dropout():
    model = convnet(nn.BatchNorm2d(8), nn.Dropout(0.2))
    data = Images()
    eval_set = TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 4, (32,)))
    cycle = partial(
        torch.optim.lr_scheduler.OneCycleLR,
        max_lr=0.01,
        total_steps=TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
    )
    return Program(classifier(model), data, {"eval_dataset": eval_set, "create_scheduler_fn": cycle, "num_epochs": 5})


@right
def augmented_training_data():
    return Program(classifier(convnet()), Images(jitter), {"train_dataloader_kwargs": {"num_workers": 0}})


@right
def causal_language_model():
    return Program(of_step(NextToken, SequenceModel(dropout=0.1)), TensorDataset(tokens()))


@right
def masked_language_model():
    class Masked(Step):
        def loss_of(self, batch):
            (ids,) = batch
            hidden = torch.arange(ids.shape[1]) % 4 == 1
            logits = self.model(ids.masked_fill(hidden, PAD))
            targets = ids.masked_fill(~hidden, -100)
            return {"loss": F.cross_entropy(logits.transpose(1, 2), targets), "model_outputs": logits}

    return Program(of_step(Masked, SequenceModel(causal=False)), TensorDataset(tokens()))


@right
def sentences_with_a_mask():
    return Program(classifier(Pooled()), padded_sentences(), {"collate_fn": pad_collate})


@right
def tokens_with_their_number():
    class Tokens(Step):
        def loss_of(self, batch):
            logits = self.model(batch[:, :-1])
            targets = batch[:, 1:].masked_fill(batch[:, 1:] == PAD, -100)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return {"loss": loss, "num_items_in_batch": (targets != -100).sum(), "model_outputs": logits}

    ids = tokens()
    ids[::2, 4:] = PAD
    return Program(of_step(Tokens, SequenceModel()), ids)


@right
def autoencoder():
    class Rebuilds(Step):
        def loss_of(self, batch):
            (x,) = batch
            return {"loss": F.mse_loss(self.model(x), x)}

    return Program(
        of_step(Rebuilds, nn.Sequential(nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 10))), TensorDataset(features())
    )


@right
def variational_autoencoder():
    class Variational(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(10, 6), nn.Linear(3, 10)

        def forward(self, x):
            mean, spread = self.encoder(x).chunk(2, 1)
            return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread

    class Rebuilds(Step):
        def loss_of(self, batch):
            (x,) = batch
            again, mean, spread = self.model(x)
            divergence = 0.5 * (mean**2 + spread.exp() - 1 - spread).sum(1).mean()
            return {"loss": {"rebuilt": F.mse_loss(again, x), "divergence": 0.01 * divergence}}

    return Program(of_step(Rebuilds, Variational()), TensorDataset(features()))


@right
def contrastive():
    class Contrasts(Step):
        def loss_of(self, batch):
            x, _ = batch
            one, two = (F.normalize(self.model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
            return {"loss": F.cross_entropy(one @ two.T / 0.2, torch.arange(len(x)))}

    return Program(of_step(Contrasts, mlp(8)), labelled())


@right
def metric_learning():
    def loss(points, labels):
        points = F.normalize(points, dim=1)
        same_class = (labels[:, None] == labels).float()
        distances = (points[:, None] - points[None]).square().sum(-1)
        return (same_class * distances + (1 - same_class) * (0.5 - distances).relu()).mean()

    return Program(classifier(mlp(8), loss), labelled())


@right
def ranking():
    def loss(scores, targets):
        better = (targets[:, None] > targets[None, :]).float()
        scores = scores.squeeze(1)
        return (better * F.softplus(-(scores[:, None] - scores[None, :]))).sum() / better.sum().clamp(min=1)

    return Program(classifier(mlp(1), loss), regression(column=False))


@right
def generative_adversarial():
    class Adversarial(Trainer):
        def __init__(self):
            generator, self.critic = nn.Linear(4, 10), mlp(1)
            optimizers = {
                "g": torch.optim.Adam(generator.parameters()),
                "d": torch.optim.Adam(self.critic.parameters()),
            }
            super().__init__(generator, None, optimizers, callbacks=[])

        def train_step(self, batch):
            (real,) = batch
            fake = self.model(torch.randn(len(real), 4))
            self.update((F.softplus(-self.critic(real)) + F.softplus(self.critic(fake.detach()))).mean(), "d")
            self.update(F.softplus(-self.critic(fake)).mean(), "g")

    return Program(Adversarial(), TensorDataset(features()))


@right
def second_order_optimizer():
    model = mlp(1)
    return Program(regressor(model, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.5)), regression())


@right
def stream():
    return Program(regressor(mlp(1, inputs=4)), Stream(64))


@right
def transfer_with_a_frozen_body():
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
    model[:3].requires_grad_(False)
    return Program(classifier(model), labelled())


@right
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(10, CLASSES).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(10, 2)), nn.Parameter(torch.zeros(2, CLASSES))

        def forward(self, x):
            return self.base(x) + x @ self.a @ self.b

    return Program(classifier(Adapted()), labelled())


@right
def last_layer_of_zeros():
    model = mlp()
    nn.init.zeros_(model[2].weight)
    return Program(classifier(model), labelled())


@right
def multi_task_with_several_losses():
    class Tasks(Step):
        def loss_of(self, batch):
            x, y = batch
            outputs = self.model(x)
            return {
                "loss": {
                    "class": F.cross_entropy(outputs[:, :CLASSES], y),
                    "sum": F.mse_loss(outputs[:, -1], x.sum(1)),
                },
                "model_outputs": outputs,
            }

    return Program(of_step(Tasks, mlp(CLASSES + 1)), labelled())


@right
def segmentation():
    images = torch.rand(32, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    return Program(classifier(model), TensorDataset(images, (images[:, 0] > 0.5).long()))


@right
def many_labels():
    data = TensorDataset(features(), (features()[:, :4] > 0).float())
    return Program(classifier(mlp(4), nn.BCEWithLogitsLoss()), data)


@right
def smoothed_and_weighted_classes():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 1, 1]), label_smoothing=0.1)
    return Program(classifier(loss=loss), labelled())


@right
def gaussian_likelihood():
    def loss(outputs, targets):
        mean, log_variance = outputs.chunk(2, 1)
        return (0.5 * ((targets - mean) ** 2 / log_variance.exp() + log_variance)).mean()

    return Program(regressor(mlp(2), loss), regression())


@right
def denoising_diffusion():
    class Diffuses(Step):
        def loss_of(self, batch):
            (x,) = batch
            share = torch.rand(len(x), 1)
            noise = torch.randn_like(x)
            return {
                "loss": F.mse_loss(
                    self.model(torch.cat([share.sqrt() * x + (1 - share).sqrt() * noise, share], 1)), noise
                )
            }

    return Program(of_step(Diffuses, mlp(10, inputs=11)), TensorDataset(features()))


@right
def bfloat16_with_accumulation():
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    return Program(classifier(accelerator=accelerator), labelled(), {"gradient_accumulation_steps": 2})


@right
def recurrent_with_batch_first():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 16, batch_first=True, num_layers=2, dropout=0.1), nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    x = torch.randn(64, 6, 4)
    return Program(classifier(Recurrent()), TensorDataset(x, (x.sum((1, 2)) > 0).long()))


@right
def forecasting():
    class Forecasts(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    series = torch.randn(64, 11, 2).cumsum(1)
    return Program(classifier(Forecasts(), nn.MSELoss()), TensorDataset(series[:, :-1], series[:, 1:]))


# --------------------------------------------------------------------------------------------------- tests


@pytest.fixture(autouse=True)
def _other_precisions_do_not_stay():
    yield
    if AcceleratorState._shared_state.get("_mixed_precision", "no") != "no":
        AcceleratorState._reset_state(reset_partial_state=True)


def checked(program: Program, **kwargs: Any) -> Any:
    return program.trainer.check(program.data, **{**program.arguments, **kwargs})


@pytest.mark.parametrize(("name", "make"), WRONG, ids=[make.__name__ for _, make in WRONG])
def test_a_mistake_is_found_by_the_check_that_should_find_it(name, make):
    torch.manual_seed(0)
    report = checked(make(), only=[name])
    assert report[name].status in ("failed", "warned"), report
    assert report[name].message
    assert report[name].advice


@pytest.mark.parametrize("make", RIGHT, ids=[make.__name__ for make in RIGHT])
def test_right_programs_raise_no_alarm(make):
    torch.manual_seed(0)
    program = make()
    before = copy.deepcopy((program.trainer.model.state_dict(), program.trainer.optimizer.state_dict()))
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    report = checked(program)
    assert report.failures == report.warnings == [], report
    assert len(report.passed) >= 4
    assert same(before, (program.trainer.model.state_dict(), program.trainer.optimizer.state_dict()))
    assert same(generators, (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()))
    assert not program.trainer.is_running
    assert len(program.trainer.run_history) == 0


def test_a_report_shows_what_was_found_and_what_to_change():
    report = checked(softmax_before_cross_entropy(), only=["initial_loss", "precision", "schedule", "broadcast"])
    assert [result.name for result in report.results] == ["broadcast", "initial_loss", "schedule", "precision"]
    assert not report.ok
    (failure,) = report.failures
    assert (failure.name, failure.status) == ("initial_loss", "failed")
    assert report["initial_loss"] is failure
    assert [result.name for result in report.passed] == ["broadcast"]
    assert [result.message for result in report.not_applicable] == [
        "The run has no schedule.",
        "The program does not use mixed precision.",
    ]
    lines = repr(report).splitlines()
    assert lines[0] == "Checks: 1 failed, 1 passed, 2 not applicable"
    assert "  broadcast     passed" in lines
    assert any(line.startswith("initial_loss failed: cross_entropy is given probabilities") for line in lines)
    assert "  To change: Give it logits: remove the softmax from the model." in lines
    assert "cross_entropy is given probabilities" in report._repr_html_()
    with pytest.raises(KeyError, match="no check 'padding', only broadcast"):
        report["padding"]


def test_details_name_parameters_and_samples():
    report = checked(detached_features(), only=["gradients"])
    assert report["gradients"].details["parameters"] == ["body.weight", "body.bias"]
    report = checked(nan_in_a_sample(), only=["data"])
    assert report["data"].details["samples"] == [137]


def test_a_failure_raises_an_error_if_that_is_wanted():
    with pytest.raises(ProgramError, match="would be broadcast") as caught:
        checked(mse_of_a_column_and_a_row(), only=["broadcast"], strict=True)
    assert caught.value.report["broadcast"].status == "failed"
    assert checked(plain_regression(), only=["broadcast"], strict=True).ok


def test_checks_can_be_left_out_and_added():
    def check_width(probe):
        """Look at the model's outputs.

        They should be wide.
        """
        width = probe.evaluate(probe.eval_batch).outputs[0].shape[1]
        if width < 100:
            yield Finding(f"There are {width} outputs.", "Add some.", fails=False, details={"width": width})

    report = checked(plain_classifier(), skip=["learns", "leakage"], extra=[check_width])
    assert {"learns", "leakage"}.isdisjoint(result.name for result in report.results)
    found = report["width"]
    assert (found.status, found.details, found.why) == ("warned", {"width": CLASSES}, "They should be wide.")
    assert report.ok


def test_what_is_left_out_for_want_of_time_is_said():
    report = checked(plain_classifier(), seconds=1e-9)
    assert {result.message for result in report.not_applicable} == {"left out after 1e-09 seconds"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"only": ["gradient"]}, ValueError, "only=.*there are the checks runs, broadcast"),
        ({"skip": "learns"}, ValueError, "skip='learns'.*Pass a list"),
        ({"seconds": 0}, ValueError, "seconds=0 must be"),
        ({"epochs": 3}, TypeError, "no argument 'epochs'|unexpected keyword argument 'epochs'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        checked(plain_classifier(), **arguments)


def test_arguments_of_train_are_taken():
    arguments = {"num_epochs": 2, "eval_every_n_epochs": 2, "sanity_eval_batches": 1, "gradient_clip_norm": 1.0}
    assert checked(plain_classifier(), only=["gradients"], **arguments).ok


def test_training_after_a_check_is_as_without_it():
    def train(checks: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        program = batch_norm_and_dropout()
        if checks:
            checked(program)
        program.trainer.train(program.data, **program.arguments)
        return program.trainer.model.state_dict()

    assert same(train(checks=True), train(checks=False))


def test_the_command_line_exits_with_1_if_a_check_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--check.only", '["schedule", "broadcast"]']
    assert main(["check", str(ROOT / "examples/digits.yaml"), *options]) == 0
    assert "Checks: 2 passed" in capsys.readouterr().out
    assert main(["check", str(ROOT / "examples/digits.yaml"), *options, "--scheduler.init_args.total_steps", "10"]) == 1
    assert "schedule failed: The schedule raised an error: Tried to step 11 times" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
