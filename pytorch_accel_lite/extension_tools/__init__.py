"""What extensions are written with besides the seams and types in ``extending.py``, by subject: a file each.

What ``extending_callbacks``, ``extending_data`` or ``extending_schedulers`` has too keeps its name. The rest is used by
the package's own extensions alone so far, and may change in any version.
"""
