"""Errors that apsched raises on purpose.

    ApschedError
    ├── InputError (also ValueError)      an argument or file of the user is wrong  exit 2
    ├── InfeasibleError                   no schedule keeps the caps                exit 1
    ├── RoundTripError                    a rewritten graph differs from its claim  exit 1
    ├── SelfCheckError                    an answer fails its check (a bug)         exit 1
    └── AgreementError                    process ranks of a job do not agree       exit 2

Every message has the expected value, the value found and the remedy. Any other exception that
escapes is a bug of apsched.
"""


class ApschedError(Exception):
    """Base of every error that apsched raises on purpose."""


class InputError(ApschedError, ValueError):
    """A source, file, option or graph that cannot be used; the message names it."""


class InfeasibleError(ApschedError):
    """No schedule keeps the caps; the message names the caps, the nodes and the least cap
    with a schedule.
    """


class RoundTripError(ApschedError):
    """A rewritten graph, exported and simulated again, differs from the claim; the message names
    the graph and the difference.
    """


class SelfCheckError(ApschedError):
    """An answer of the solver breaks a cap or its own figures, a bug of apsched; the message names
    the graph and the difference.
    """


class AgreementError(ApschedError):
    """Process ranks of a job would run different launches, or one of them does not answer; the
    message names it.
    """

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        """``is_silent``: one of them does not answer."""
        super().__init__(message)
        self.is_silent = is_silent
