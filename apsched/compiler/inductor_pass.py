"""Scheduling under full Inductor: passes for its hooks, each with a key for its caches."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from apsched.capture.micro_batches import REDUCE_EACH, REDUCE_ONCE
from apsched.compiler.code_cache import graph_in_inductor
from apsched.compiler.fingerprint import fingerprint
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_captured import RESULT
from apsched.compiler.schedule_graph import prepare_joint, schedule_graph
from apsched.compiler.settings import Settings
from apsched.fx.chains import set_chains
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import is_backward, mark_parameters
from apsched.fx.passes.summed_scatters import put_sums_first
from apsched.fx.passes.sums_last import put_sums_last
from apsched.graph.records import ParameterShard
from apsched.pipeline.result import Result
from apsched.problem.plan.rules import digest
from apsched.torch_compat.compilers import name_parameters, replace_graph, sort_nodes

AS_IT_WAS = "apsched_as_it_was"
"""Key in ``meta`` of a joint graph that stays unchanged on all process ranks."""


@dataclass(frozen=True, eq=False)
class InductorPass(CustomGraphPass):
    """For ``torch._inductor.config.post_grad_custom_post_pass``: schedules a graph in place, with
    its order held.

    The key of Inductor's caches is computed before the pass runs, from the graph and from ``uuid``.
    """

    settings: Settings
    names: Mapping[int, str] = field(default_factory=dict)
    """Position -> name, of the inputs that are parameters, if the graph's own descriptors do not
    have them.
    """
    shards: Mapping[str, ParameterShard] = field(default_factory=dict)
    """Name -> parameter, of all parameters of the step."""
    results: list[Result] = field(default_factory=list)

    def __call__(self, graph: Graph) -> None:
        """Schedule ``graph``; it stays unchanged if it has no collectives."""
        sort_nodes(graph)
        module = graph.owning_module or GraphModule(torch.nn.Module(), graph)
        current = graph_in_inductor()
        with current.passed() if current is not None else nullcontext() as agreement:
            fast = schedule_graph(
                module,
                self.settings,
                parameter_names=partial(name_parameters, graph, self.names),
                shards=self.shards,
                held=True,
                agreement=agreement,
            )
        if fast is not module:
            self.results.append(fast.meta[RESULT])
            replace_graph(graph, fast)

    def uuid(self) -> str | None:
        """Return everything that the result depends on in addition to the graph, for the key of
        Inductor's caches; ``None`` turns them off.

        Where process ranks compare their launches, a process rank that found its code in a cache
        would not answer the others: the caches are off there, unless the caller of Inductor handles
        that (:mod:`apsched.compiler.code_cache`; ``apsched.backend`` does).
        """
        current = graph_in_inductor()
        if not (current.cached if current is not None else not self.settings.agreements):
            return None
        return fingerprint(
            self.settings, sorted(self.names.items()), sorted(map(repr, self.shards.items()))
        )


@dataclass(frozen=True, eq=False)
class ParameterPass(CustomGraphPass):
    """For ``joint_custom_pre_pass``: marks the inputs that are parameters, and whether they are
    gathered again in backward; with ``reduce="once"`` it adds gradients before they are reduced,
    else at the end.
    """

    names: Mapping[int, str]
    reshard_after_forward: bool | None
    settings: Settings
    reduce: str = REDUCE_EACH
    stated: Mapping[str, object] | None = None
    """Settings that all process ranks compare first."""
    failed: Exception | None = None
    """Why ``names`` were not found here: the graph stays unchanged, on all process ranks."""

    def __call__(self, graph: Graph) -> None:
        """Change a joint graph in place, where that works on all process ranks, and on none else;
        nothing on others.
        """
        module = graph.owning_module or GraphModule(torch.nn.Module(), graph)
        worked = GraphModule(torch.nn.Module(), Graph())

        def attempt(_: GraphAgreement | None) -> GraphModule:
            self._change(copied(module).graph)
            return worked

        if prepare_joint(module, self.settings, attempt, self.stated) is worked:
            self._change(graph)
        else:
            module.meta[AS_IT_WAS] = True

    def _change(self, graph: Graph) -> None:
        if self.failed is not None:
            raise self.failed
        if self.reduce == REDUCE_ONCE:
            put_sums_first(graph)
        else:
            put_sums_last(graph)
        name_parameters(graph, self.names)
        again = self.reshard_after_forward
        if again is not None and any(is_backward(node) for node in graph.nodes):
            mark_parameters(graph, reshard_after_forward=again)
        set_chains(graph)

    def uuid(self) -> str:
        """Return a digest of the settings of the pass."""
        how = ("parameters", self.reshard_after_forward, self.reduce, *sorted(self.names.items()))
        return digest(map(repr, how))


def inductor_pass(**settings: Any) -> InductorPass:
    """Return a pass that schedules the collectives of a graph inside of Inductor::

        torch._inductor.config.post_grad_custom_post_pass = apsched.inductor_pass(cluster="h100",
        memory_cap="60GiB")

    for callers of Inductor other than ``torch.compile(backend=apsched.backend(inductor=True))``,
    which sets this up. It is called with forward, backward and inference graphs; the setting must
    still be there when backward is compiled, which is at the first backward. ``settings`` are those
    of :class:`apsched.compiler.settings.Settings`.
    """
    chosen = Settings.of(settings)
    chosen.check_traced_by_dynamo()
    return InductorPass(chosen)
