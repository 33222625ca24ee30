"""Packed sequences: gradients equal those of padded batches, and runs are exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import (
    PackSequences,
    TokenBatchSampler,
    packed_attention,
    packed_mask,
    packed_mask_function,
    unpack,
)
from tests.ranks import shared_folder
from tests.small_models import equal_weights, largest_difference, listener, weights
from tests.streams import SavesEachUpdate

transformers = pytest.importorskip("transformers")

VOCABULARY = 20
IGNORED = -100
TOLERANCE = 1e-6


def texts(size: int = 23) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (size,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


class SmallTransformer(nn.Module):
    """A block of attention between embeddings and logits.

    Args:
        attention: ``"mask"`` or ``"bounds"``, by which packed sequences are kept apart
        causal: whether a token attends only to earlier ones
        dropout: the probability that a unit of the embedding is dropped out
    """

    def __init__(self, attention: str = "mask", causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.causal = attention, causal
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(12, 8)
        self.to_heads, self.to_logits = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Any, position_ids: Any = None, bounds: Any = None) -> Any:
        """Without ``position_ids``, a row is one sequence, with padding at its end or without."""
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        query, key, value = self.to_heads(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if position_ids is None:
            found = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        elif self.attention == "mask":
            mask = packed_mask(position_ids, self.causal)
            found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            found = packed_attention(query, key, value, bounds, self.causal)
        return self.to_logits(x + found.transpose(1, 2).flatten(2))


def small_transformer(*args: Any, **kwargs: Any) -> SmallTransformer:
    torch.manual_seed(0)
    return SmallTransformer(*args, **kwargs).double()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_row_has_the_sequences_with_their_positions_and_bounds():
    batch = PackSequences()([torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 4])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, IGNORED, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["bounds"] == [0, 3, 4, 6]
    assert batch["labels"].dtype == torch.int64


def test_samples_of_all_kinds_lose_their_padding():
    tokenized = {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "token_type_ids": [0, 1, 0]}
    batch = PackSequences(causal=False)([tokenized, {"input_ids": [7], "token_type_ids": [1]}])
    assert {name: value.tolist() for name, value in batch.items() if name != "bounds"} == {
        "input_ids": [[5, 6, 7]],
        "token_type_ids": [[0, 1, 1]],
        "position_ids": [[0, 1, 0]],
    }
    pairs = [(torch.tensor([1, 2]), torch.tensor([2, 3])), (torch.tensor([4]), torch.tensor([5]))]
    batch = PackSequences(causal=False)(pairs)
    assert batch["labels"].tolist() == [[2, 3, 5]]
    assert pairs[0][1].tolist() == [2, 3]
    labelled = [{"input_ids": [1, 2], "labels": torch.tensor([1, 2])}]
    assert PackSequences()(labelled)["labels"].tolist() == [[IGNORED, 2]]
    assert labelled[0]["labels"].tolist() == [1, 2]
    assert PackSequences()([[1, 2], texts()[0].numpy()])["bounds"] == [0, 2, 2 + len(texts()[0])]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"input_ids": [1, 2], "label": 3}, r"'label' of a sample has shape \(\), .* each of its 2 tokens"),
        ({"input_ids": [1, 2], "labels": [3]}, "'labels' of a sample has shape"),
        ({"tokens": [1, 2]}, r"must be a row of tokens, or have it as 'input_ids', not of shapes \{'tokens'"),
        (3, "must be a row of tokens"),
        ([[1, 2], [3, 4]], r"must be a row of tokens, .* not of shapes .* \(2, 2\)"),
        ({"input_ids": torch.ones(1, 5)}, r"not of shapes .* \(1, 5\)"),
        ((torch.ones(2), torch.ones(2), torch.ones(2)), "is a tuple of 3 values: pass a dict"),
        ({"input_ids": [1, 2], "text": "a b"}, "'text' of a sample is 'a b', but a packed row needs a number for each"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "has no tokens"),
    ],
)
def test_samples_that_cannot_be_packed_are_named(sample, words):
    with pytest.raises(ValueError, match=words):
        PackSequences()([sample])


@pytest.mark.parametrize("order", [1, -1])
def test_samples_with_different_contents_are_named(order):
    samples = [{"input_ids": [1, 2]}, {"input_ids": [3], "labels": [4]}]
    with pytest.raises(ValueError, match=r"The samples of a batch to pack have \['input_ids'.* and \['input_ids'"):
        PackSequences(causal=False)(samples[::order])


@pytest.mark.parametrize("attention", ["mask", "bounds"])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_a_custom_model_are_those_of_each_sequence(attention, causal):
    samples, model = texts(), small_transformer(attention, causal)
    packed = PackSequences(model)(samples)
    alone = [(model(sample[None]), sample[None]) for sample in samples]
    labels = sum(len(sample) - 1 for sample in samples)
    whole = sum(loss_of(*pair) * (pair[1].shape[1] - 1) for pair in alone if pair[1].shape[1] > 1) / labels
    expected = gradients(model, whole)
    inputs = {name: packed[name] for name in ("input_ids", "position_ids", "bounds")}
    assert largest_difference(gradients(model, loss_of(model(**inputs), packed["labels"])), expected) < 1e-12
    if causal:
        batch = padded(samples)
        of_padded = gradients(model, loss_of(model(batch["input_ids"]), batch["labels"]))
        assert largest_difference(of_padded, expected) < 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_mask():
    """The forward pass only: torch computes no gradients of flex attention on the CPU."""
    packed = PackSequences()(texts())
    positions, tokens = packed["position_ids"], packed["input_ids"].shape[1]
    query, key, value = torch.randn(3, 1, 2, tokens, 4, dtype=torch.float64)
    for causal in (True, False):
        mask = packed_mask_function(positions, causal)
        blocks = create_block_mask(mask, 1, None, tokens, tokens, device="cpu")
        expected = scaled_dot_product_attention(query, key, value, attn_mask=packed_mask(positions, causal))
        assert torch.allclose(flex_attention(query, key, value, block_mask=blocks), expected, atol=1e-12)
        additive = packed_mask(positions, causal, torch.float64)
        found = scaled_dot_product_attention(query, key, value, attn_mask=additive)
        assert torch.allclose(found, expected, atol=1e-12)
        assert torch.allclose(packed_attention(query, key, value, packed["bounds"], causal), expected, atol=1e-12)
        shared = packed_attention(query, key[:, :1], value[:, :1], packed["bounds"], causal, enable_gqa=True, scale=0.5)
        key, value = (tensor[:, :1].expand_as(query) for tensor in (key, value))
        assert torch.allclose(shared, packed_attention(query, key, value, packed["bounds"], causal), atol=1e-12)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
SHORT = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 16}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "GPT-2": lambda: transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **SPECIAL
    ),
    "Llama": lambda: transformers.LlamaConfig(**SHORT, **SPECIAL),
    "Mistral with a window": lambda: transformers.MistralConfig(
        **SHORT, num_key_value_heads=2, sliding_window=4, **SPECIAL
    ),
    "OPT": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=16,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=16,
        dropout=0,
    ),
    "BERT": lambda: transformers.BertConfig(**SHORT, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    "RoBERTa": lambda: transformers.RobertaConfig(
        **SHORT | {"max_position_embeddings": 20}, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=0
    ),
}


def hugging_face_model(name: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    kind = transformers.AutoModelForMaskedLM if "BERT" in name.upper() else transformers.AutoModelForCausalLM
    return kind.from_config(CONFIGS[name](), attn_implementation=attention).double()


def batch_of_padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = padded(samples)
    return {**batch, "attention_mask": (batch["labels"] != IGNORED).long()}


@pytest.mark.sampled
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_hugging_face_models_are_those_of_padding(name, attention):
    samples, model = texts(), hugging_face_model(name, attention)
    try:
        pack = PackSequences(model)
    except ValueError:
        if int(transformers.__version__.split(".")[0]) >= 5:
            raise
        pytest.skip("this version of transformers takes neither positions nor such masks here")
    assert model.training
    packed = pack(samples)
    if not pack.causal:
        packed["labels"] = packed["input_ids"]
    found = gradients(model, model(**packed).loss)
    counts = [len(sample) - pack.causal for sample in samples]
    losses = [
        model(input_ids=row[None], labels=row[None]).loss * n for row, n in zip(samples, counts, strict=True) if n
    ]
    assert largest_difference(found, gradients(model, sum(losses) / sum(counts))) < TOLERANCE
    if "window" not in name:  # in padding without a token in its window, eager attention is NaN
        assert largest_difference(found, gradients(model, model(**batch_of_padded(samples)).loss)) < TOLERANCE


class ForgetsPositions(SmallTransformer):
    def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
        return super().forward(input_ids)


def test_a_model_that_cannot_keep_sequences_apart_is_refused():
    with pytest.raises(ValueError, match="ForgetsPositions does not compute packed sequences as it computes each by"):
        PackSequences(ForgetsPositions())
    with pytest.raises(ValueError, match=r"Sequential.forward takes no position_ids"):
        PackSequences(nn.Sequential(nn.Embedding(3, 3)))
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=2)
    mamba = transformers.MambaForCausalLM(config)
    with pytest.raises(ValueError, match=r"MambaForCausalLM.forward takes no position_ids"):
        PackSequences(mamba)


def test_flash_attention_gets_the_bounds_and_the_longest_length():
    model = hugging_face_model("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    batch = PackSequences(model)(texts(3))
    sizes = [len(text) for text in texts(3)]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert batch[name].dtype == torch.int32
        assert batch[name].diff().tolist() == sizes
    assert batch["max_length_q"] == batch["max_length_k"] == max(sizes)


class Tokens(Trainer):
    def calculate_train_batch_loss(self, batch: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]
        items = (labels[:, 1:] != IGNORED).sum()
        return {"loss": loss_of(self.model(**inputs), labels), "num_items_in_batch": items}

    calculate_eval_batch_loss = calculate_train_batch_loss


def run(packs: bool = True, accumulation: int = 3, workers: int = 0, dropout: float = 0.0, **kwargs: Any) -> Any:
    """Weights, samples and losses of a run by budgets of tokens, with sequences packed or padded."""
    model, seen, sizes = small_transformer("bounds", dropout=dropout), [], []

    def remember(trainer: Any, batch_output: Any, **kwargs: Any) -> None:
        seen.append(trainer.all_gather_object(trainer.batch_indices))
        sizes.append(batch_output["batch_size"])

    callbacks = [listener(on_train_step_end=remember), *kwargs.pop("callbacks", [])]
    samples = texts()
    sampler = TokenBatchSampler(samples, max_tokens=30, length=len, packed=True)
    trainer = Tokens(model, None, torch.optim.SGD(model.parameters(), lr=0.5), callbacks=callbacks, seed=3)
    trainer.train(
        samples,
        2,
        eval_dataset=samples,
        per_device_batch_size=4,
        collate_fn=PackSequences() if packs else padded,
        gradient_accumulation_steps=accumulation,
        train_dataloader_kwargs={"batch_sampler": sampler, "num_workers": workers},
        eval_dataloader_kwargs={"num_workers": 0},
        **kwargs,
    )
    losses = [trainer.run_history.get_metric_values(f"{kind}_loss_epoch") for kind in ("train", "eval")]
    return {"weights": weights(model), "seen": seen, "losses": losses, "sizes": sizes}


def both() -> Any:
    return run(), run(packs=False)


def check_both(packed: Any, of_padded: Any) -> None:
    assert packed["seen"] == of_padded["seen"]
    assert packed["sizes"] == of_padded["sizes"]
    assert largest_difference(packed["weights"], of_padded["weights"]) < TOLERANCE
    for found, expected in zip(packed["losses"], of_padded["losses"], strict=True):
        assert found == pytest.approx(expected, abs=TOLERANCE)


def test_training_gives_the_weights_and_losses_of_padded_batches():
    check_both(*both())


@pytest.mark.processes
def test_packed_training_on_several_processes_is_exact(ranks):
    for result in ranks(both):
        check_both(*result)


def test_workers_give_the_same_bits():
    assert equal_weights(run(workers=2)["weights"], run()["weights"])


def resuming() -> Any:
    """A whole run, with dropout, and those that resume from each state within its epochs."""
    with shared_folder() as folder:
        whole = run(accumulation=1, dropout=0.3, callbacks=[SavesEachUpdate(folder)])
        states = sorted(folder.iterdir(), key=lambda path: int(path.name))
        resumed = [run(accumulation=1, dropout=0.3, resume_from=state) for state in states[:-1:2]]
    return {"whole": whole, "resumed": resumed}


def test_runs_resume_to_the_same_bits():
    result = resuming()
    assert len(result["resumed"]) > 1
    for resumed in result["resumed"]:
        assert equal_weights(resumed["weights"], result["whole"]["weights"])
        assert resumed["seen"] == result["whole"]["seen"][-len(resumed["seen"]) :]


def hugging_face_run(packs: bool) -> Any:
    model, samples = hugging_face_model("Llama"), texts()
    sampler = TokenBatchSampler(samples, max_tokens=30, length=len)
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.5), callbacks=[], seed=1)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PackSequences(model) if packs else batch_of_padded)
    trainer.train(loader, 2, gradient_accumulation_steps=2)
    evaluated = trainer.evaluate(loader)
    return {"weights": weights(model), "losses": evaluated, "samples": trainer.progress.samples}


def test_hugging_face_models_train_as_on_padded_batches():
    packed, of_padded = hugging_face_run(True), hugging_face_run(False)
    assert largest_difference(packed["weights"], of_padded["weights"]) < TOLERANCE
    assert packed["losses"] == pytest.approx(of_padded["losses"], abs=TOLERANCE)
    assert packed["samples"] == of_padded["samples"] == 46


def test_outputs_are_unpacked_for_predictions():
    class Predicts(Tokens):
        def calculate_predict_batch_output(self, batch):
            batch = copy.copy(batch)
            del batch["labels"]
            return unpack(self.model(**batch), batch["position_ids"])

    model, samples = small_transformer("bounds"), texts()
    trainer = Predicts(model, None, None, callbacks=[])
    outputs = trainer.predict(samples, per_device_batch_size=4, collate_fn=PackSequences())
    assert [len(output) for output in outputs] == [len(sample) for sample in samples]
    for output, sample in zip(outputs, samples, strict=True):
        assert torch.allclose(output, model(sample[None])[0], atol=1e-12)


@pytest.mark.extension("failed_batches")
def test_a_row_is_not_split_into_microbatches():
    model = small_transformer("bounds")
    forward = model.forward

    def limited(**kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > 10:
            raise torch.OutOfMemoryError("out of memory")
        return forward(**kwargs)

    model.forward = limited
    trainer = Tokens(model, None, torch.optim.SGD(model.parameters(), lr=0.5), callbacks=[])
    with pytest.raises(ValueError, match="nothing in it has an element for each of its 8 samples"):
        trainer.train(texts(), 1, per_device_batch_size=8, collate_fn=PackSequences(), auto_microbatch=True)


@pytest.mark.parametrize("keeps_apart", [True, False])
@pytest.mark.extension("checking")
def test_a_check_finds_sequences_that_are_not_kept_apart(keeps_apart):
    """Models of transformers take a row for one sequence when they have a cache, which they have by default."""
    model = hugging_face_model("Llama")
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.5), callbacks=[])
    pack = PackSequences(model)

    def with_cache(samples: list[Any]) -> dict[str, Any]:
        batch = pack(samples)
        return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}

    report = trainer.check(
        texts(), collate_fn=pack if keeps_apart else with_cache, per_device_batch_size=4, only=["batch_independence"]
    )
    assert report["batch_independence"].status == ("passed" if keeps_apart else "failed")
    assert keeps_apart == ("first sequence of a packed row" not in report["batch_independence"].message)


@pytest.mark.extension("tuning")
def test_diagnose_counts_the_sequences_of_a_packed_row():
    model = small_transformer("bounds")
    trainer = Tokens(model, None, torch.optim.SGD(model.parameters(), lr=0.5), callbacks=[])
    found = trainer.diagnose(texts(8), collate_fn=PackSequences(), per_device_batch_size=4, num_steps=3)
    assert found.samples == 4
