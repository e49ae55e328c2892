"""The repeated blocks of a model, found in its module tree."""

from torch import nn


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks of a model: the children of its outermost ``ModuleList`` and ``ModuleDict``, whatever their class.

    A ``ModuleDict`` holds blocks where its children are of one class; otherwise it is a set of parts that have names.
    """
    found: list[str] = []

    def visit(name: str, parent: nn.Module) -> None:
        for key, child in parent.named_children():
            path = f"{name}.{key}" if name else key
            if _holds_blocks(child):
                found.extend(f"{path}.{own}" for own, block in child.named_children() if any(True for _ in block.parameters()))
            else:
                visit(path, child)

    visit("", module)
    return tuple(found)


def _holds_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 0
    return isinstance(module, nn.ModuleDict) and len(module) > 0 and len({type(child).__name__ for child in module.values()}) == 1
