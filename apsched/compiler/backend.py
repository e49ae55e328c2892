"""``apsched.backend``: torch.compile with every graph scheduled, forward, backward and
inference.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import torch

from apsched.capture.micro_batches import REDUCE_EACH, check_reduce, sum_passes
from apsched.compiler.code_cache import with_agreed_code
from apsched.compiler.inductor_partition import KeepPartition
from apsched.compiler.inductor_pass import InductorPass, ParameterPass
from apsched.compiler.inductor_settings import IN_ORDER, OFF, switched_on
from apsched.compiler.keep import (
    Pair,
    chosen_parameters,
    resharded,
    stated_or_of_schedules,
)
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_captured import RESULT, process_rank
from apsched.compiler.schedule_graph import prepare_joint, schedule_graph
from apsched.compiler.settings import Settings
from apsched.errors import InputError
from apsched.fx.chains import mark_chains
from apsched.fx.passes.lists import joint_passes
from apsched.fx.passes.merged_gathers import merge_gathers
from apsched.fx.passes.parameters import tag_backward
from apsched.fx.passes.roles import classify
from apsched.fx.passes.run_passes import PassList, run_passes
from apsched.graph.records import ParameterShard
from apsched.pipeline.result import Result
from apsched.problem.plan.apply import check_chooses_kept
from apsched.problem.plan.plan_file import as_plan
from apsched.torch_compat.compilers import (
    aot_compiled,
    boxed,
    default_partition,
    dynamo_parameters,
    inductor_compiled,
    inductor_setting,
    name_parameters,
    with_custom_pass,
)
from apsched.torch_compat.fsdp import local_part
from apsched.whole_step.choices import Choice, kept_in_node, kept_whole
from apsched.whole_step.keep_request import KeepRequest, plan_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """The parameters among the inputs of a graph of Dynamo."""

    of_inputs: Mapping[int, str] = field(default_factory=dict)
    """Position -> name."""
    shards: Mapping[str, ParameterShard] = field(default_factory=dict)
    """Name -> parameter, of those in floating point."""
    failed: Exception | None = None
    """Why they were not found: the graphs stay unchanged then, on all process ranks."""

    def write_into(self, graph: torch.fx.Graph) -> None:
        """Mark the parameters in ``graph``; raise the error where they were not found."""
        if self.failed is not None:
            raise self.failed
        name_parameters(graph, self.of_inputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
    """The object that ``torch.compile(model, backend=...)`` calls with each graph that Dynamo
    found; made by :func:`backend`.
    """

    settings: Settings
    inductor: bool
    reshard_after_forward: bool | None
    keep: KeepRequest | None = None
    """The parameters kept from forward to backward; ``None``: as ``reshard_after_forward``."""
    reduce: str = REDUCE_EACH
    """When the gradients of several micro-batches of one graph are reduced."""
    results: list[Result] = field(default_factory=list)
    """The answer for each graph that was scheduled in this process, in the order in which they were
    compiled.
    """
    _warned: list[bool] = field(default_factory=list)
    """Whether arguments without an effect were logged: not empty then."""

    __name__ = "apsched"

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **without_effect: Any
    ) -> Callable[..., Any]:
        """Return ``gm`` compiled: its graphs run in the order that they were given.

        ``without_effect``: ``mode`` and ``options`` of torch.compile, where they are stated.
        """
        self._warn_once(without_effect)
        names = self._parameters(gm, example_inputs)
        if self.inductor:
            around = partial(with_agreed_code, settings=self.settings)
            return inductor_compiled(
                gm,
                example_inputs,
                self._patches(names),
                around,
                joint_cache=not self.settings.agreements,
            )
        return aot_compiled(
            gm,
            example_inputs,
            forward=partial(self._compile, names, "forward"),
            backward=partial(self._compile, names, "backward"),
            inference=partial(self._compile, names, "graph"),
            partition=partial(self._partition, names),
        )

    def _warn_once(self, without_effect: Mapping[str, Any]) -> None:
        if not without_effect or self._warned or process_rank() != 0:
            return
        self._warned.append(True)
        found = ", ".join(f"{name}={value!r}" for name, value in without_effect.items())
        logger.warning(
            "torch.compile: expected neither mode nor options with apsched.backend, found %s, which"
            " has no effect; %s",
            found,
            "set torch._inductor.config in its place"
            if self.inductor
            else "leave it out, since graphs run node by node (inductor=True generates code)",
        )

    @property
    def _stated(self) -> dict[str, object]:
        """The settings that change the joint graph, by name."""
        keep = None if self.keep is None else ", ".join(self.keep.entries) or self.keep.mode
        return {
            "inductor": self.inductor,
            "keep": keep,
            "reduce": self.reduce,
            "reshard_after_forward": self.reshard_after_forward,
        }

    def _parameters(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> ParameterNames:
        try:
            names = dynamo_parameters(gm)
            return ParameterNames(
                of_inputs=names,
                shards={
                    name: ParameterShard(
                        size_bytes=local_part(inputs[k]).nbytes,
                        element_bytes=inputs[k].element_size(),
                        trained=inputs[k].requires_grad,
                    )
                    for k, name in names.items()
                    if inputs[k].is_floating_point()
                },
            )
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            return ParameterNames(failed=error)  # raised where the process ranks agree on a graph

    def _patches(self, names: ParameterNames) -> dict[str, Any]:
        """Return the settings that Inductor needs, for forward and for backward, which is compiled
        later.
        """
        shown = switched_on() if process_rank() == 0 else {}
        for name, value in shown.items():
            logger.warning(
                "Inductor's %s is off in graphs that apsched compiles (it was %r): it would undo"
                " the schedule",
                name,
                value,
            )
        hooks: dict[str, Any] = {
            "joint_custom_pre_pass": ParameterPass(
                names.of_inputs,
                self.reshard_after_forward if self.keep is None else True,
                self.settings,
                self.reduce,
                self._stated,
                names.failed,
            ),
            "post_grad_custom_post_pass": InductorPass(
                self.settings, names.of_inputs, names.shards, self.results
            ),
        }
        off = {name: OFF[name] for name in switched_on()}
        patches = {**off, **IN_ORDER} | {
            name: with_custom_pass(inductor_setting(name), own) for name, own in hooks.items()
        }
        if self.keep is None:
            return patches
        name = "custom_partitioner_fn"
        before = inductor_setting(name)
        return patches | {name: KeepPartition(self.keep, names.of_inputs, self.settings, before)}

    def _partition(
        self,
        names: ParameterNames,
        joint: torch.fx.GraphModule,
        joint_inputs: Any,
        **options: Any,
    ) -> Pair:
        again = self.reshard_after_forward
        summed = sum_passes(self.reduce)
        tag_backward(joint.graph, options["num_fwd_outputs"])

        def partition(module: torch.fx.GraphModule) -> Pair:
            return default_partition(module, joint_inputs, **options)

        def gathered_again() -> Pair:
            every = (*joint_passes(), merge_gathers(backward=True), *summed)
            return partition(run_passes(joint, every).module)

        def prepare(agreement: GraphAgreement | None) -> Pair:
            names.write_into(joint.graph)
            passes: PassList = (classify(),)
            chosen = Choice()
            if self.keep is not None:
                chosen = chosen_parameters(
                    self.keep, joint, gathered_again, self.settings, names.of_inputs, agreement
                )
                passes = joint_passes(kept=kept_whole(chosen))
            elif again is not None:
                passes = joint_passes(reshard_after_forward=again)
            decided = self.keep is not None or again is not None
            every = (*passes, merge_gathers(backward=decided), *summed, mark_chains())
            prepared = run_passes(joint, every).module
            return resharded(partition(prepared), kept_in_node(chosen), self.settings)

        prepared = prepare_joint(joint, self.settings, prepare, self._stated)
        return partition(joint) if prepared is None else prepared

    def _compile(
        self, names: ParameterNames, name: str, gm: torch.fx.GraphModule, _: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        fast = schedule_graph(
            gm,
            self.settings,
            name=name,
            parameter_names=partial(names.write_into, gm.graph),
            shards=names.shards,
        )
        if fast is not gm:
            self.results.append(fast.meta[RESULT])
        return boxed(fast)


def backend(
    *,
    inductor: bool = False,
    reshard_after_forward: bool | None = None,
    keep: str | PathLike[str] | Sequence[str] | None = None,
    reduce: str = REDUCE_EACH,
    **settings: Any,
) -> Backend:
    """Return a backend for ``torch.compile`` that schedules the collectives of every graph::

        model = torch.compile(model, backend=apsched.backend(cluster="h100", memory_cap="60GiB"))

    Parameters
    ----------
    inductor
        Compile with full Inductor, the order held by control dependencies; else graphs run node by
        node, as with ``aot_eager``.
    reshard_after_forward
        ``True``: the nodes that gather a parameter run again in backward, ``False``: gathered
        parameters are kept until then. ``None``: as the model says (activation checkpointing around
        the gather), else they are kept.
    keep
        Parameters whose gathered tensors stay from forward to backward: ``"none"``, ``"all"``,
        ``"auto"`` (the fastest choice that fits, forward and backward solved as one step, on one
        process rank for all), names or regular expressions, or a file of them, such as the
        ``kept.txt`` of ``apsched solve --keep auto``. Of ``NAME @node`` each process rank keeps one
        part, and gathers the others of its node in backward. In place of ``reshard_after_forward``.
        ``None`` with ``schedule=`` and without ``reshard_after_forward``: the choice of the answer
        that the schedules are of.
    reduce
        When a graph of several micro-batches (:func:`apsched.micro_batches`) reduces its gradients:
        ``"each"``, those of every micro-batch, as gradient accumulation does; ``"once"``, after
        they are added, which rounds in another order.
    settings
        See :class:`apsched.compiler.settings.Settings`.
    """
    if not isinstance(reshard_after_forward, bool | None):
        raise InputError(
            f"reshard_after_forward: expected True, False or None, found {reshard_after_forward!r}"
        )
    if not isinstance(inductor, bool):
        raise InputError(f"inductor: expected True or False, found {inductor!r}")
    if keep is not None and reshard_after_forward is not None:
        raise InputError(
            f"keep: expected it in place of reshard_after_forward, found {keep!r} and"
            f" {reshard_after_forward!r}; leave one out"
        )
    chosen = Settings.of(settings)
    keep_stated = None
    if reshard_after_forward is None:
        keep_stated = stated_or_of_schedules(keep, chosen)
    chosen.check_traced_by_dynamo()
    if keep_stated is not None:
        chosen = replace(chosen, plan=plan_for(as_plan(chosen.plan), keep_stated))
    check_chooses_kept(as_plan(chosen.plan))
    return Backend(
        settings=chosen,
        inductor=inductor,
        reshard_after_forward=reshard_after_forward,
        keep=keep_stated,
        reduce=check_reduce(reduce),
    )
