"""Models, data and trainers of which the programs that are checked consist."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from pytorch_accel_lite import Trainer

CLASSES, WORDS, PAD = 5, 20, 0


#: A trainer, its data, and arguments of train().
Program = tuple[Trainer, Any, dict[str, Any]]


class Own(nn.Module):
    """A model of some parts, whose forward pass is a function of it and its input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


class OwnTrainer(Trainer):
    """Computes the loss of a batch by a function of the model and the batch, in training and in evaluation."""

    def __init__(self, model, function, lr=0.01, **kwargs):
        super().__init__(model, None, torch.optim.AdamW(model.parameters(), lr=lr), callbacks=[], **kwargs)
        self.function = function

    def calculate_train_batch_loss(self, batch):
        found = self.function(self.model, batch)
        return found if isinstance(found, dict) else {"loss": found}

    calculate_eval_batch_loss = calculate_train_batch_loss


def features(size=200, width=10, seed=0):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


def labelled(size=200, seed=0):
    x = features(size, seed=seed)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def regression(column=True, seed=0):
    x = features(seed=seed)
    return TensorDataset(x, x.sin().sum(1, keepdim=column))


def mlp(outputs=CLASSES, *last, inputs=10):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs), *last)


def dropping(*more):
    return nn.Sequential(nn.Linear(10, 32), *more, nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES))


def classifier(
    model=None, loss=None, data=None, lr=0.01, optimizer=None, kind=Trainer, options=None, **arguments
) -> Program:
    """Return a program that classifies, by default ``labelled()``."""
    model = mlp() if model is None else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    trainer = kind(model, loss or nn.CrossEntropyLoss(), optimizer, **{"callbacks": [], **(options or {})})
    return trainer, labelled() if data is None else data, arguments


def regressor(model=None, loss=None, data=None, **kwargs) -> Program:
    data = regression() if data is None else data
    return classifier(mlp(1) if model is None else model, loss or nn.MSELoss(), data, **kwargs)


def own(model, function, data=None, **kwargs) -> Program:
    """Return a program whose step is a function of the model and the batch."""
    return OwnTrainer(model, function, **kwargs), labelled() if data is None else data, {}


def tokens(size=64, length=12):
    return torch.randint(1, WORDS, (size, length), generator=torch.Generator().manual_seed(0))


def padded_tokens():
    ids = tokens()
    ids[::2, 4:] = PAD
    return ids


class SequenceModel(nn.Module):
    """A transformer block over tokens."""

    def __init__(self, causal=True, dropout=0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.positions = nn.Parameter(0.02 * torch.randn(64, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dropout, self.causal = nn.Dropout(dropout), causal

    def forward(self, ids):
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        x = x + self.attention(x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=False)[0]
        return self.head(self.dropout(x))


def next_token(model, batch, shift=1):
    (ids,) = batch
    logits = model(ids[:, : ids.shape[1] - shift])
    return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, shift:].flatten()), "model_outputs": logits}


def shifted_twice(model, batch):
    (ids,) = batch
    logits, labels = model(ids[:, :-1]), ids[:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def known_tokens(model, batch, counts=True):
    logits, targets = model(batch[:, :-1]), batch[:, 1:].masked_fill(batch[:, 1:] == PAD, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return {"loss": loss, **({"num_items_in_batch": (targets != -100).sum()} if counts else {})}


def sentences(classes=2):
    lengths = torch.randint(3, 10, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    rows = zip(tokens(), lengths, strict=True)
    return [{"ids": row[:length], "label": int(row[0]) % classes} for row, length in rows]


def pad_collate(samples, tags=False):
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True, padding_value=PAD)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"ids": ids, "mask": (ids != PAD).long(), "labels": ids % 3 if tags else labels}


class OfSentences(nn.Module):
    """Classifies sentences, or each of their words, by a function of the model, the embedded words and the mask."""

    def __init__(self, function, outputs=2, **parts):
        super().__init__()
        self.embedding, self.head, self.function = nn.Embedding(WORDS, 16), nn.Linear(16, outputs), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, ids, mask):
        return self.head(self.function(self, self.embedding(ids), mask[..., None].float()))


def of_sentences(function, tags=False, **parts) -> Program:
    model = OfSentences(function, 3 if tags else 2, **parts)
    loss = (lambda outputs, labels: F.cross_entropy(outputs.transpose(1, 2), labels)) if tags else None
    return classifier(model, loss, sentences(), collate_fn=partial(pad_collate, tags=tags))


def series(width=4):
    x = torch.randn(64, 6, width)
    return TensorDataset(x, (x.sum((1, 2)) > 0).long())


class Images(Dataset):
    """Images that may be augmented."""

    def __init__(self, augment=None):
        self.images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        self.labels = self.images[:, 0, :2, :2].flatten(1).argmax(1)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return (image if self.augment is None else self.augment(image)), self.labels[index]


def jitter(image):
    return image + 0.1 * torch.randn_like(image)


def convnet(*norm):
    return nn.Sequential(nn.Conv2d(1, 8, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def of_images(data, **arguments) -> Program:
    return classifier(convnet(), None, data, **arguments)


def with_schedule(create, **kwargs) -> Program:
    return classifier(data=labelled(208), create_scheduler_fn=create, **{"num_epochs": 10, **kwargs})


def scaled(model, factor):
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model


def rnn(**kwargs):
    return {"rnn": nn.GRU(4, 16, **kwargs), "head": nn.Linear(16, 2)}
