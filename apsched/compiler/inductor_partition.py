"""Forward and backward graph of Inductor with parameters kept, or resharded in their node: its own
partitioner, called on a joint graph with the tags of the choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from apsched.compiler.fingerprint import fingerprint
from apsched.compiler.inductor_pass import AS_IT_WAS
from apsched.compiler.keep import Pair, chosen_parameters, resharded
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_graph import prepare_joint
from apsched.compiler.settings import Settings
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import mark_parameters
from apsched.torch_compat.compilers import inductor_partition
from apsched.whole_step.choices import Choice, kept_in_node, kept_whole
from apsched.whole_step.keep_request import KeepRequest


@dataclass(frozen=True, eq=False)
class KeepPartition(CustomPartitionerFn):
    """For ``custom_partitioner_fn``: a pass before it has named the parameters
    (:class:`apsched.compiler.inductor_pass.ParameterPass`).
    """

    keep: KeepRequest
    names: Mapping[int, str]
    settings: Settings
    before: CustomPartitionerFn | None = None
    """The partitioner that the user set; ``None``: Inductor's own."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> Pair:
        """Return both graphs; with ``on_error="fallback"`` as Inductor makes them if that fails."""
        own = self.before or inductor_partition

        def partition(module: GraphModule) -> Pair:
            return own(module, joint_inputs, **options)

        if gm.meta.get(AS_IT_WAS):
            return partition(gm)

        def with_tags(kept: Choice) -> Pair:
            module = copied(gm)
            mark_parameters(module.graph, reshard_after_forward=True, kept=kept_whole(kept))
            return partition(module)

        def prepare(agreement: GraphAgreement | None) -> Pair:
            chosen = chosen_parameters(
                self.keep, gm, partial(with_tags, Choice()), self.settings, self.names, agreement
            )
            return resharded(with_tags(chosen), kept_in_node(chosen), self.settings)

        prepared = prepare_joint(gm, self.settings, prepare)
        return partition(gm) if prepared is None else prepared

    def uuid(self) -> str | None:
        """Return everything that the result depends on in addition to the graph."""
        before = None if self.before is None else self.before.uuid()
        if self.before is not None and before is None:
            return None
        return fingerprint(self.settings, self.keep, sorted(self.names.items()), before)
