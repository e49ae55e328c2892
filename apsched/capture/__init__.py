"""From modules and traces to FX graphs. Called, it is the function :func:`apsched.api.capture`."""

import sys

from apsched import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
