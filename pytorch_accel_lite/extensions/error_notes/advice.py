"""What to do about errors of torch and other libraries, by a pattern of their text."""

from __future__ import annotations

import re

_ADVICE = {
    "device-side assert": (
        "an index is out of range on the device, usually a label without a corresponding output, or an index into an "
        "embedding. The traceback may point to a later line: run on the CPU, with accelerator=Accelerator(cpu=True), "
        "where the error names the index."
    ),
    r"same device|the expected device|Input type \(torch\.(cuda\.)?\w+\) and weight type \(torch\.(cuda\.)?\w+\)": (
        "the trainer moves the tensors of a batch, also in nested tuples, lists and dicts, and modules that are its "
        "attributes. Create other tensors on device=trainer.device, register constants of a model with "
        "register_buffer(), and give your own objects a method to(device)."
    ),
    "(same dtype|Input type).*(BFloat16|Half)": (
        "the weights have 16 bits, the data 32, or the other way round. To compute in 16 bits, keep the weights in "
        "float32 and pass Trainer(mixed_precision='bf16'). A model of 16 bits needs inputs of its dtype: let the "
        "dataset convert them."
    ),
    "have the same dtype|type .* should be the same": (
        "the data have another dtype than the model's weights. Let the dataset return tensor.float() (NumPy arrays are "
        "float64 by default, and images of bytes are usually divided by 255, too), or convert the model before "
        "creating the optimizer."
    ),
    "multi-target not supported|expected target dtype|expected scalar type Long|with class probabilities": (
        "cross entropy takes the index of a class for each sample, as targets.long() without a dimension of size 1 "
        "(targets.squeeze(1)), or class probabilities as targets.float(). For binary classification with one output, "
        "use BCEWithLogitsLoss."
    ),
    "Expected target size": (
        "cross entropy takes the classes in dimension 1 of the outputs: for outputs of (batch, length, classes), use "
        "outputs.transpose(1, 2), or outputs.flatten(0, 1) with targets.flatten(). If the dataset is a list of ready "
        "batches, pass OwnShard(batches)."
    ),
    r"Target -?\d+ is out of bounds": (
        "the labels must range from 0 to the number of the model's outputs - 1. Give the model an output for each "
        "class, or number the labels from 0; pass ignore_index to the loss function to ignore a label."
    ),
    r"Target size \(.* must be the same as input size|target size \(.* that is different to the input size": (
        "this loss compares each output with a target of its own: give the targets the shape of the outputs, for "
        "example with targets.float().unsqueeze(1) in the dataset, or outputs.squeeze(1) in the model. For the index "
        "of a class, use CrossEntropyLoss."
    ),
    "be equal to (the )?number of (classes|labels)|more unique values in `(target|preds)`": (
        "the metric was made for another number of classes. Metrics that are given by name, as in metrics='accuracy', "
        "take it from the outputs of the model."
    ),
    "following values in `target`": (
        "this metric takes classes as targets, numbered from 0. For other numbers, use a metric for regression, such "
        "as 'r2score' or 'mean_absolute_error'."
    ),
    "can't be cast to the desired output type": "this loss needs floating point targets: use targets.float().",
    "exactly one of (decoder_)?input_ids or (decoder_)?inputs_embeds": (
        "the model got no input_ids. An encoder-decoder model needs decoder_input_ids, or labels from which it makes "
        "them, and predict() passes no labels. To predict, override calculate_predict_batch_output: return "
        "self.get_model().generate(batch['input_ids'], ...), or self.model(**batch).logits."
    ),
    "index out of range in self": "raise num_embeddings of the embedding, or check how the indices are created.",
    "more than 1 value per channel": (
        "batch norm cannot be trained on a single sample. Pass train_dataloader_kwargs={'drop_last': True}, which "
        "drops a smaller last batch, or choose another per_device_batch_size."
    ),
    "needed for gradient computation has been modified by an inplace operation": (
        "replace operations such as x += y. In an overridden train_step, an update() changes weights that the graphs "
        "of earlier outputs need: call the networks again after it, or change the order of the updates."
    ),
    "backward through the graph a second time": (
        "the graph of a loss is freed by its backward pass, which the trainer calls: do not call it in "
        "calculate_train_batch_loss. detach() what you keep from one step to the next. In an overridden train_step, "
        "pass retain_graph=True to update() if a later loss uses the same outputs."
    ),
    "stack expects each tensor to be equal size|resize storage that is not resizable": (
        "the samples of a batch differ in shape. Let the dataset crop or resize them to one shape, or pass a "
        "collate_fn that pads them."
    ),
    r"forward\(\) missing \d+ required positional argument": (
        "to a model with several inputs, they are passed by name: let the dataset return a dict with the names of "
        "forward's arguments, and the target as its other key; or override calculate_train_batch_loss."
    ),
    r"must be Tensor, not (tuple|dict|\w+Output)\b|'(tuple|dict|\w+Output)' object has no attribute 'size'": (
        "if this is what the model returns, let a function of your own take out what the loss needs, such as "
        "loss_func=lambda outputs, targets: functional.cross_entropy(outputs['logits'], targets); if the model returns "
        "its loss itself, as those of Hugging Face do when they get labels, pass loss_func=None."
    ),
    "must be Tensor, not list": (
        "lists of numbers in a sample become a list of tensors in a batch, one for each place. Let the dataset return "
        "torch.tensor(numbers), or call with_format('torch') on a Hugging Face dataset."
    ),
    "default_collate: batch must contain": (
        "let the dataset return tensors, NumPy arrays or numbers, or tuples, lists and dicts of them, or pass a "
        "collate_fn that makes a batch of what it returns."
    ),
    r"DataLoader worker \(pid.* (is killed|exited unexpectedly)": (
        "a worker process was ended from outside, usually because memory ran out. Lower num_workers, prefetch_factor "
        "or per_device_batch_size; or pass num_workers=0, which reads in this process, to see an error of the dataset."
    ),
    r"Timed out waiting \d+ms for (recv|send) operation": (
        "another process did not take part until the time limit of the process group. All must make the same calls in "
        "the same order: of update() in an overridden train_step, of evaluate(), gather() and the like in callbacks. "
        "HangWatchCallback shows where each process is."
    ),
}


def advise(error: Exception) -> str:
    """Return advice on an error; nothing if it is not known."""
    text = f"{type(error).__name__}: {error}"
    return next((answer for pattern, answer in _ADVICE.items() if re.search(pattern, text)), "")
