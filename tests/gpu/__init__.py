"""What needs a GPU: run by ``make gpu``; with ``ARGS=--rehearse`` on a CPU, with small sizes and stand-ins."""
