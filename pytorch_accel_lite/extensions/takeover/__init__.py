"""Runs that survive the death of their processes: those that are left compute what the others would have.

``python -m pytorch_accel_lite launch`` starts the processes (``supervisor.py``) as copies of one that has imported
everything (``nursery.py``). Each belongs to generations of the job (``membership.py``), in which its trainers repeat
what a lost process has interrupted (``surviving_ranks.py``, ``surviving_step.py``). ``joining.py`` lets others come.
"""
