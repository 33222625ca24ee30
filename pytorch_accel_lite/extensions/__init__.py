"""Extensions: folders that use the public names of the package only, and can each be deleted.

Only the facade of the package names them: the files beside this folder, and ``callbacks``, ``data`` and ``optimizers``.
"""
