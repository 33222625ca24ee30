"""Extensions: folders that use the public names of the package only, and can each be deleted.

The package names them in its facade alone, the files beside this folder.
"""
