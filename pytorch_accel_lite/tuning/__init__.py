"""Finding settings before a run, and measuring one: learning rate, batch size, time of a step, memory."""
