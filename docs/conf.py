"""Sphinx configuration."""

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.ext.napoleon import Config, GoogleDocstring

DOCS = Path(__file__).parent
# Pages must lie below this folder; the notebooks belong to the examples.
shutil.copytree(
    DOCS.parent / "examples" / "notebooks", DOCS / "notebooks", dirs_exist_ok=True
)

project = "pytorch_accel_lite"
author = "The pytorch_accel_lite authors"
copyright = "2026, the pytorch_accel_lite authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "results"]

html_theme = "furo"
html_title = "pytorch_accel_lite"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Notebooks are shown with the outputs that are stored in them.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
sections = Config(napoleon_use_ivar=True, napoleon_attr_annotations=False)
toc_object_entries_show_parents = "hide"

# Prompts and output are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"

# What people type into the search, and the page that it finds first, or a heading of a
# page ("page#Heading").
SEARCHED = {
    "installation": ["install", "installation", "requirements"],
    "quickstart": ["getting started", "train", "save and load"],
    "recipes": ["how do i", "recipes", "how to"],
    "recipes#Train a model": ["train a model", "fit", "minimal example"],
    "hugging_face": [
        "hugging face",
        "huggingface",
        "transformers model",
        "tokenizer",
        "collator",
        "bert",
        "gpt2",
        "language model",
        "perplexity",
    ],
    "recipes#Weight imbalanced classes": [
        "class weight",
        "class weights",
        "imbalanced",
        "imbalanced data",
        "imbalanced classes",
        "weighted loss",
    ],
    "recipes#Save memory with gradient checkpointing": [
        "gradient checkpointing",
        "activation checkpointing",
        "recompute activations",
    ],
    "recipes#Smooth labels": ["label smoothing", "smooth labels"],
    "recipes#Change the learning rate in the middle": [
        "change learning rate",
        "change the learning rate",
    ],
    "inputs_and_losses": [
        "two inputs",
        "several inputs",
        "multiple inputs",
        "custom loss",
        "own loss",
    ],
    "exporting": [
        "export",
        "onnx",
        "torch.export",
        "deploy",
        "inference",
        "predict",
        "prediction",
        "load the best model",
        "load best model",
        "load a checkpoint",
        "load weights",
        "load model",
        "save model",
        "save weights",
        "save the model",
    ],
    "without_a_dataset": [
        "reinforcement learning",
        "no dataset",
        "full batch",
        "full batch graph",
        "gnn",
        "rl",
        "graphs",
        "graph neural network",
        "ready batches",
    ],
    "comparing_with_a_loop": [
        "bit by bit",
        "bitwise",
        "compare with a loop",
        "compare with my loop",
        "reproducibility",
        "reproducible",
    ],
    "data": [
        "dataloader",
        "data loading",
        "dataset",
        "workers",
        "collate_fn",
        "collate",
    ],
    "data#Workers, samplers and data in memory": [
        "sampler",
        "weighted sampler",
        "class imbalance",
        "oversampling",
        "num_workers",
    ],
    "data#Random augmentation and seeds": ["seed", "augmentation", "random seed"],
    "data#Quick trial runs": ["dry run", "fast dev run", "limit batches", "debug"],
    "switching": ["lightning", "transformers", "pytorch-accelerated"],
    "training_states": ["checkpoint", "checkpointing", "resume", "training state"],
    "distributed": [
        "multi-gpu",
        "multi gpu",
        "multiple gpus",
        "two gpus",
        "gpu",
        "ddp",
        "torchrun",
        "distributed",
    ],
    "metrics": ["metrics", "accuracy", "evaluation", "f1", "auroc", "evaluate"],
    "metrics#When to evaluate": [
        "validation",
        "test set",
        "evaluate only",
        "evaluate every n steps",
    ],
    "stopping": ["early stopping", "stop early on accuracy", "best model"],
    "finding_settings": [
        "learning rate",
        "learning rate finder",
        "find a learning rate",
        "find lr",
        "batch size",
    ],
    "schedulers": ["scheduler", "learning rate schedule", "warm-up"],
    "schedulers#Schedules by name": [
        "cosine",
        "cosine schedule",
        "warmup",
        "linear schedule",
    ],
    "optimizers": [
        "gan",
        "several optimizers",
        "multiple optimizers",
        "two optimizers",
        "schedule-free",
    ],
    "finetuning": ["freeze", "freezing", "freeze layers", "unfreeze", "fine-tuning"],
    "ema": [
        "ema",
        "averaged weights",
        "exponential moving average",
        "swa",
        "weight averaging",
    ],
    "momentum_teachers": [
        "momentum teacher",
        "momentum encoder",
        "target network",
        "byol",
        "dino",
        "moco",
        "dqn",
        "mean teacher",
        "polyak",
    ],
    "schedulers#Any value by the update": [
        "weight decay schedule",
        "temperature schedule",
        "global step",
        "global_step",
    ],
    "callbacks": ["callbacks", "callback", "write a callback", "events"],
    "builtin_callbacks": ["built-in callbacks"],
    "clusters": [
        "slurm",
        "sbatch",
        "cluster",
        "ray",
        "multi-node",
        "multi node",
        "multinode",
        "preemption",
    ],
    "sharding": ["fsdp", "sharded", "sharding", "tensor parallelism", "deepspeed"],
    "metrics#Log your own numbers": [
        "own numbers",
        "log numbers",
        "log a value",
        "log my own numbers",
        "log my own metric",
        "log a custom value",
        "custom metric",
        "trainer.log",
        "log",
    ],
    "logging": ["tensorboard", "log to tensorboard", "logging", "tracker", "csv"],
    "logging#TensorBoard, MLflow, Weights & Biases": [
        "wandb",
        "w&b",
        "weights & biases",
        "weights and biases",
        "trackio",
        "mlflow",
    ],
    "monitoring": [
        "profiler",
        "profiling",
        "slow",
        "slow training",
        "what is slow",
        "gradient norm",
    ],
    "monitoring#Table of epochs": [
        "output",
        "silent",
        "quiet",
        "verbose",
        "print less",
    ],
    "monitoring#Progress bar": ["progress bar", "tqdm"],
    "performance": ["performance", "overhead", "speed"],
    "performance#Compiled steps": ["compile", "torch.compile"],
    "searching": [
        "hyperparameter search",
        "hyperparameters",
        "sweep",
        "tuning",
        "optuna",
    ],
    "cross_validation": ["cross validation", "k-fold", "kfold"],
    "comparing_runs#Is the difference real?": [
        "seeds",
        "significance",
        "confidence interval",
        "t-test",
        "ablation",
    ],
    "examples#Notebooks": ["notebook", "notebooks", "jupyter", "colab"],
    "experiments": [
        "yaml",
        "config file",
        "configuration file",
        "command line",
        "cli",
        "experiment",
        "experiments",
    ],
    "experiments#Completion in shells": [
        "completion",
        "autocomplete",
        "tab completion",
        "shell completion",
    ],
    "plots": [
        "plot",
        "confusion matrix",
        "worst samples",
        "plot loss",
        "plot the loss",
    ],
    "schemes": ["training schemes"],
    "schemes/vae": ["vae", "variational autoencoder"],
    "schemes/detection": ["detection", "object detection", "faster r-cnn", "map"],
    "schemes/simclr": ["simclr", "self-supervised", "contrastive"],
    "schemes/metric_learning": ["metric learning", "embeddings", "recall@1"],
    "schemes/distillation": ["distillation", "teacher", "student"],
    "schemes/multi_task": ["multi-task", "several losses"],
    "failures": ["out of memory", "oom", "nan", "fault tolerance"],
    "loop": ["training loop", "training step", "override a step"],
    "loop#Mixed precision": [
        "mixed precision",
        "amp",
        "autocast",
        "bf16",
        "bfloat16",
        "fp16",
        "half precision",
        "precision",
    ],
    "loop#Gradient accumulation": ["gradient accumulation", "accumulate gradients"],
    "loop#Customizing a step": [
        "gradient clipping",
        "clip gradients",
        "clip the gradients",
    ],
}


def add_index_entries(app, name, source):
    """Let a page, or a heading of it, be found by the words that people use for it."""
    for place, entries in SEARCHED.items():
        page, _, heading = place.partition("#")
        if page != name:
            continue
        lines = "".join(f"   ! {entry}\n" for entry in entries)
        index = f"```{{eval-rst}}\n.. index::\n{lines}```\n\n"
        text = "\n" + source[0]
        line = rf"(\n##+ {re.escape(heading)}\n)" if heading else r"(\n# )"
        parts = re.split(line, text, maxsplit=1)
        assert len(parts) == 3, f"{place}: there is no such heading"
        before, line, after = parts
        source[0] = f"{before}\n{index}{line}{after}".lstrip("\n")


def read_sections(app, what, name, documented, options, lines):
    """Turn the sections of a docstring into fields, such as Args and Raises.

    The extension napoleon itself also takes what stands before a colon in the docstring
    of an attribute for its type.
    """
    lines[:] = GoogleDocstring(lines, sections).lines()


def link_names(app, doctree, page):
    """Link the names of documented objects in running text to the API pages."""
    documented = {}
    for full_name, entry in app.env.get_domain("py").objects.items():
        of_class = 2 if entry.objtype in ("method", "attribute", "property") else 1
        documented[".".join(full_name.split(".")[-of_class:])] = entry
    for literal in list(doctree.findall(nodes.literal)):
        name, call = re.fullmatch(r"(.*?)(\(\))?", literal.astext(), re.S).groups()
        owner, _, member = name.rpartition(".")
        kind = described_class(literal)
        if owner == "trainer" or (call and not owner):
            names = [f"{kind}.{name}"] if kind else []
            names += [name, f"Trainer.{member}"]
        else:
            names = [name, f"TrainerCallback.{name}"]
        entry = next((documented[n] for n in names if n in documented), None)
        if entry is None or is_linked(literal) or (entry.docname == page and not kind):
            continue
        uri = app.builder.get_relative_uri(page, entry.docname)
        link = nodes.reference(refuri=f"{uri}#{entry.node_id}", internal=True)
        literal.replace_self(link)
        link += literal


def described_class(node):
    """Return the name of the class or function in whose docstring a node is."""
    while node := node.parent:
        if isinstance(node, addnodes.desc):
            signature = node.next_node(addnodes.desc_signature)
            return signature.get("class") or signature.get("fullname", "")
    return ""


def is_linked(node):
    """Whether a node is in a link or in a heading, which must not have any."""
    while node := node.parent:
        if isinstance(node, (nodes.reference, nodes.title)):
            return True
    return False


# The navigation as on a page that it does not list, by that page.
navigation = {}


def reuse_navigation(app, pagename, templatename, context, doctree):
    """Compute the navigation once: on each page, it would take a fourth of a build."""
    folders = pagename.split("/")[:-1]
    if folders[:1] == ["_modules"]:  # pages with code, which are not listed
        folders = ["_modules"] * len(folders)
    unlisted = "/".join([*folders, "_"])
    link = app.builder.get_relative_uri(unlisted, pagename)

    def toctree(**options):
        if unlisted not in navigation:
            create = app.builder._get_local_toctree  # noqa: SLF001
            navigation[unlisted] = create(unlisted, **options)
        return with_current_page(navigation[unlisted], link)

    if "toctree" in context:
        context["toctree"] = toctree


def with_current_page(html, link):
    """Mark the current page in the navigation, and all entries above it."""
    before, entry, after = html.partition(
        f'<a class="reference internal" href="{link}">'
    )
    if not entry:
        return html
    opened = []
    for tag in re.finditer(r"<(/?)(?:ul|li)\b[^>]*>", before):
        opened.pop() if tag[1] else opened.append(tag)
    for tag in reversed(opened):
        marked = tag[0].replace("<ul>", '<ul class="current">')
        marked = re.sub(r'<li class="([^"]*)', r'<li class="\1 current', marked)
        before = before[: tag.start()] + marked + before[tag.end() :]
    return f'{before}<a class="current reference internal" href="#">{after}'


def setup(app):
    app.connect("html-page-context", reuse_navigation, priority=400)  # before the theme
    app.connect("source-read", add_index_entries)
    app.connect("autodoc-process-docstring", read_sections)
    app.connect("doctree-resolved", link_names)
