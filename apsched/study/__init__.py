"""Many questions at once: a grid of options, solved where it must be, kept in one file. Needs torch
only to capture. Called, it is the function :func:`apsched.cli.study_function.study`.
"""

import sys

from apsched import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
