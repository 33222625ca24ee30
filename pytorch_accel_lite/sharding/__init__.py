"""Models whose weights are sharded over the processes: how the data are divided then, gradients, placing weights."""
