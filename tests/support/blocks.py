"""Names in the code blocks of pages."""

import ast


def bound(tree):
    """Return the names that a block makes."""
    made = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    made |= {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    return made | {alias.asname or alias.name for alias in imports(tree)}


def imports(tree):
    """Yield what a block imports, by its names there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from node.names
