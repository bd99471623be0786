"""JAX: exchange a pytree of gradients. The library itself does not import this module."""

from collections import Counter
from typing import Any

import jax

from collectives.exchange import GradientExchange


def exchange_pytree(exchange: GradientExchange, gradients: Any) -> Any:
    """Return the means of a pytree of gradients, as a pytree of the same structure.

    Call it outside `jax.jit`: it waits for the gradients, and communicates.

    Args:
        exchange: of these gradients alone.
        gradients: a pytree of JAX arrays, with the same structure, shapes and dtypes on every
            rank and in every step. Each leaf is a tensor of its own, named by its path, such
            as "[0]['bias']".

    Returns:
        A pytree of JAX arrays of the same shapes and dtypes.

    Raises:
        CollectiveError: another rank failed. The errors of a call of the exchange are raised
            too.

    >>> gradients = jax.grad(loss)(parameters, batch)
    >>> means = exchange_pytree(exchange, gradients)
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
    by_path = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if len(by_path) < len(leaves):
        names = Counter(jax.tree_util.keystr(path) for path, _ in leaves)
        [(name, repeats)] = names.most_common(1)
        exchange.fail(
            ValueError(
                f"{repeats} leaves of the gradients have the path {name!r}: expected a path of its own for each leaf; "
                "look at the keys of the nodes that were registered with JAX"
            )
        )
    means = exchange(by_path)
    return jax.tree_util.tree_unflatten(structure, [means[name] for name in by_path])
