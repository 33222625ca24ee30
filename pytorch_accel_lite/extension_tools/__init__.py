"""What extensions are written with besides the seams and types in ``extending.py``, by subject: a file each.

Yours may use them, too: the names in ``__all__`` of these files stay.
"""
