"""Process groups for the rest of this process."""

from contextlib import ExitStack

from apsched.capture.fake_world import world

_OPEN = ExitStack()


def running_world(size: int) -> None:
    """Start a fake process group of ``size``, which ends with the process."""
    _OPEN.enter_context(world(size))
