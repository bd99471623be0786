"""The names of tensors, without what PyTorch's wrappers add to them."""

from collections.abc import Iterable

# Parts that wrappers add to a name, at any place.
_WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"


def canonical(name: str) -> str:
    """Return the name of a PyTorch parameter without what wrappers add: the compiler, checkpointing, data parallelism.

    >>> canonical("module.layer._orig_mod.weight")
    'layer.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS] or [name]
    if parts[0] == "module" and len(parts) > 1:
        del parts[0]
    return ".".join(parts)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Return the canonical name of each; the names themselves if two would be the same."""
    canonical_of = {name: canonical(name) for name in names}
    if len({*canonical_of.values()}) < len(canonical_of):
        return {name: name for name in canonical_of}
    return canonical_of
