"""Experts of Transformers' models, spread over ``ep`` by the model's own plan
(``base_model_ep_plan``).

The exchange of tokens computes the same as Transformers' ``all_to_all``
(transformers/distributed/expert_parallel.py), without its branch on the number of tokens received,
which no tracer can take: experts without tokens compute nothing. Its sizes depend on the routing.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from apsched.errors import InputError
from apsched.models.collectives import exchange_rows, exchange_tokens
from apsched.models.mesh import Group, Meshes, group_of

_SPREAD, _SPLIT = "ep_dispatch_experts", "grouped_gemm"
"""Styles of the plan: of a module whose tokens travel, of a parameter split along dim 0."""


def spread_experts(path: Path, module: Any, meshes: Meshes) -> None:
    """Have the experts of ``module`` take tokens from all process ranks of ``ep``, and name their
    parameters in ``expert_parallel``, by which :func:`apsched.models.own_modules.shard_module`
    splits them.

    Raises
    ------
    InputError
        for a model without such a plan, and for experts that ``ep`` does not divide.
    """
    ep = group_of(meshes.expert, "ep")
    module.config._experts_implementation = "grouped_mm"
    children = dict(module.named_modules())
    for name, style in _plan(path, module, meshes).items():
        owner_name, _, parameter = name.rpartition(".")
        if style == _SPLIT:
            owner = children[owner_name]
            size = owner._parameters[parameter].shape[0]
            if size % ep.size:
                raise InputError(
                    f"hf:{path}: expected a number of experts that ep divides, found {size} experts"
                    f" and ep={ep.size}"
                )
            owner.expert_parallel = (*getattr(owner, "expert_parallel", ()), parameter)
            owner.num_experts = size // ep.size
        elif style == _SPREAD:
            experts = children[name]
            experts.forward = _exchanged(experts, experts.forward, ep)
        else:
            raise InputError(
                f"hf:{path}: expected the styles {_SPREAD} and {_SPLIT} in the model's plan of"
                f" expert parallelism, found {style!r} for {name}; drop ep (fsdp shards experts)"
            )


def _plan(path: Path, module: Any, meshes: Meshes) -> dict[str, str]:
    distributed: Any = import_module("transformers.distributed")
    spec = meshes.spec
    try:
        chosen = distributed.DistributedConfig(ep_size=spec.ep, fsdp_size=spec.fsdp)
        plan: dict[str, str] = module._resolve_parallel_plans(chosen)[1]
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"hf:{path}: expected a model that Transformers spreads over ep={spec.ep} by its own"
            f" plan (base_model_ep_plan), found {type(error).__name__}: {reason}; drop ep (fsdp"
            " shards experts)"
        ) from error
    return plan


def _exchanged(experts: Any, inner: Callable[..., Any], ep: Group) -> Callable[..., Any]:
    """Return the forward pass of ``experts`` between two exchanges of tokens over ``ep``.

    T tokens of this process rank, each for K experts, make R = T x K rows; E experts, L of them
    here.
    """

    def forward(x_TD: Any, expert_TK: Any, weight_TK: Any) -> Any:
        expert_R = expert_TK.flatten()
        order_R = torch.argsort(expert_R, stable=True)
        sent_E = expert_R.new_zeros(ep.size * experts.num_experts)
        sent_E = sent_E.scatter_add(0, expert_R, torch.ones_like(expert_R))
        received_E = exchange_tokens(sent_E, ep)
        counts = torch.stack([sent_E, received_E]).view(2, ep.size, -1).sum(-1)
        sent, received = counts.tolist()
        torch._check(sum(sent) == expert_R.shape[0])  # type: ignore[no-untyped-call]
        rows = exchange_rows(x_TD[order_R // expert_TK.shape[1]], received, sent, ep)
        here = torch.arange(experts.num_experts, device=expert_R.device).repeat(ep.size)
        here = here.repeat_interleave(received_E, output_size=sum(received)).unsqueeze(-1)
        rows = inner(rows, here, torch.ones_like(here, dtype=rows.dtype))
        rows = exchange_rows(rows, sent, received, ep)
        y_TKD = torch.empty_like(rows).index_put((order_R,), rows).view(*expert_TK.shape, -1)
        return (y_TKD * weight_TK.unsqueeze(-1)).sum(1).to(x_TD.dtype)

    return forward
