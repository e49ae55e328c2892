"""Names of process groups that double others; see :mod:`apsched.second_group`."""

_SUFFIX = "+gathers"
RUNNING: dict[str, str] = {}
"""Name of a second group that runs in this process -> the group that it doubles."""


def second_name(group: str) -> str:
    """Return what the second group of ``group`` is called before it is made."""
    return group + _SUFFIX


def is_second(group: str) -> bool:
    """Whether ``group`` is called as a second group that is not made yet."""
    return group.endswith(_SUFFIX)


def first_name(group: str) -> str:
    """Return the group that ``group`` doubles, or ``group`` itself."""
    return RUNNING.get(group, group.removesuffix(_SUFFIX))
