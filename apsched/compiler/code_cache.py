"""Inductor's cache of code in a job: cached code is used only if all process ranks found it, with
the same launches.

Inductor looks for code before any pass runs, and runs no pass where it finds code. So the process
ranks begin to compare a graph around that search, not in the pass: a process rank with code sends
the order of launches that was noted in it, a process rank without code reports that from within the
pass. Where all have the same order, the code is used; else the process ranks with code discard it,
and compile like the others.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from apsched.compiler.ranks.agreement import GraphAgreement, agreement_of
from apsched.compiler.settings import Settings
from apsched.errors import AgreementError
from apsched.torch_compat.compilers import forget_code, forget_hashes, note_in_code, notes_in_code

logger = logging.getLogger(__name__)


class GraphInInductor:
    """One graph that Inductor compiles or finds in its cache."""

    def __init__(self, agreement: GraphAgreement | None, settings: Settings) -> None:
        """``agreement`` is the agreement of the process ranks on it; ``None`` without other
        process ranks.
        """
        self.agreement, self._settings = agreement, settings
        self.cached = True
        """Whether the cache is looked at."""
        self._passed = self._compared = False
        self._beating = ExitStack()

    @contextmanager
    def passed(self) -> Iterator[GraphAgreement | None]:
        """Enclose the work of the pass on the graph: no code was found, or it is not used."""
        self._passed = True
        self._beating.close()  # who waits for others from now on says no longer that it works
        if self.agreement is not None and not self._compared:
            self._compared = True
            self._same_code(None)
        yield self.agreement
        if self.agreement is not None and self.agreement.launched:
            note_in_code(json.dumps(self.agreement.launched))

    def compiled(self, compile_graph: Callable[[], Any]) -> Any:
        """Return the code for the graph: found where all have the same, else made."""
        with self.agreement or ExitStack():
            code = self._attempt(compile_graph)
            launched = _launched()
            if self._passed or self.agreement is None:
                return code
            self._compared = True
            if self._same_code(launched):
                logger.info(
                    "code for a graph taken from Inductor's cache; all process ranks launch the"
                    " same"
                )
                return code
            logger.info(
                "code for a graph in Inductor's cache is not used, and replaced: not all process"
                " ranks have the same"
            )
            forget_code(code)
            code = self._attempt(compile_graph)
            if not self._passed:  # another process has just written it
                self.cached = False
                code = self._attempt(compile_graph)
            _launched()
            return code

    def _same_code(self, launched: dict[str, str] | None) -> bool:
        """Return whether all found the same code; ``False`` where they cannot compare it and errors
        only fall back: the code compiled then is compared again.
        """
        assert self.agreement is not None
        try:
            return self.agreement.same_code(launched)
        except AgreementError as error:
            if self._settings.on_error == "raise":
                raise
            logger.warning("code in Inductor's cache is not used: %s", error)
            return False

    def _attempt(self, compile_graph: Callable[[], Any]) -> Any:
        notes_in_code()
        token = _CURRENT.set(self)
        try:
            with self._beating:
                if self.agreement is not None:
                    self._beating.enter_context(self.agreement.job.working())
                return compile_graph()
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[GraphInInductor | None] = ContextVar("apsched_graph_in_inductor", default=None)


def graph_in_inductor() -> GraphInInductor | None:
    """Return the graph that Inductor compiles now under :func:`with_agreed_code`; ``None`` where
    Inductor was called without it.
    """
    return _CURRENT.get()


def with_agreed_code(compile_graph: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Return ``compile_graph(gm, inputs, ...)``, which looks into Inductor's cache, so that no
    process rank uses code that others lack.
    """

    def compiled(gm: Any, inputs: Any, **options: Any) -> Any:
        return GraphInInductor(agreement_of(gm, settings.deadline_s), settings).compiled(
            partial(_compiled_anywhere, compile_graph, gm, inputs, **options)
        )

    return compiled


def _compiled_anywhere(
    compile_graph: Callable[..., Any], gm: Any, inputs: Any, **options: Any
) -> Any:
    """Return the code for a graph, under a key that is the same in the next job."""
    forget_hashes(inputs)
    return compile_graph(gm, inputs, **options)


def _launched() -> dict[str, str] | None:
    """Return group name -> digest of its launches as noted in the code that was made or found
    last.
    """
    notes = notes_in_code()
    launched: dict[str, str] | None = json.loads(notes[0]) if len(notes) == 1 else None
    return launched
