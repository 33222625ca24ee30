"""On each rank: a whole run, and one resumed from every state that it saved.

torchrun ... every_save_point.py FOLDER ACCUMULATION
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.scripts import resumable
from tests.scripts.resumable import CopyStates, run

if os.environ["WORLD_SIZE"] == "3":
    resumable.SIZE = 24  # batch norm takes no share of one sample
folder, accumulation = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
kwargs = {"accumulation": accumulation, "save_every_n_epochs": 1}
results = [run(folder, resume_from=None, extra=(CopyStates(folder),), **kwargs)]
for copy in sorted((folder / "copies").glob("*/update-*")):
    torch.manual_seed(99)
    results.append(run(folder / f"again-{copy.parent.name}", resume_from=copy, **kwargs))
torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")
