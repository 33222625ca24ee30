"""Runs that survive the loss of processes: the remaining processes take over the work of the lost ones.

``python -m pytorch_accel_lite launch`` starts a supervisor (``supervisor.py``), whose fork servers (``fork_server.py``)
start the worker processes. A generation is the set of processes between two changes (``membership.py``). After a loss,
the remaining processes enter a new generation and repeat what was interrupted (``surviving_ranks.py``,
``surviving_step.py``). ``joining_processes.py`` admits new processes.
"""
