"""Training a language model that is divided over processes: FSDP2 from a checkpoint."""

import sys
from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from pytorch_accel_lite import Trainer, callbacks, get_default_callbacks

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
TOKENS = torch.tensor([ord(letter) for letter in TEXT])


class Sharded(Trainer):
    def parallelize_model(self, mesh):
        half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=mesh, mp_policy=half)
        return self.checkpoint  # each process reads its own shards of the weights


def predicted(model):
    """What the model expects after each letter of the beginning."""
    tokens = TOKENS[None, :32].to(model.device)
    return "".join(map(chr, model(input_ids=tokens).logits[0].argmax(-1).tolist()))


def main(checkpoint, output, backend="inductor"):
    config = AutoConfig.from_pretrained(checkpoint, use_cache=False)
    with torch.device("meta"):  # no process ever holds all weights
        model = AutoModelForCausalLM.from_config(config)
    trainer = Sharded(
        model,
        loss_func=None,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        seed=0,
        activation_checkpointing=True,
        compile_model={"blocks": True, "backend": backend},
        callbacks=[
            *get_default_callbacks(progress_bar=False),
            callbacks.SaveTrainingStateCallback(
                f"{output}/states", 1, sharded=True, asynchronous=True
            ),
            callbacks.SaveBestModelCallback(f"{output}/best.pt"),
            callbacks.ShowOutputsCallback(predicted, every="1 epochs"),
        ],
    )
    trainer.checkpoint = checkpoint
    rows = TOKENS.unfold(0, 32, 32)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer.train(data, 3, data[:8], gradient_clip_norm=1.0, resume_from="latest")
    trainer.save_model(f"{output}/model")  # one file, for from_pretrained()


if __name__ == "__main__":
    main(*sys.argv[1:])
