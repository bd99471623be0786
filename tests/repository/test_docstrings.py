"""The examples in the docstrings of public names run, and the reference of the site has every public name."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import textwrap

import pytest

import collectives
import mpicomp

API = pathlib.Path(__file__).parents[2] / "docs" / "api"
PUBLIC = {
    name: getattr(package, name)
    for package in (mpicomp, collectives)
    for name in package.__all__
}
# bases, records and settings of parts, and what one rank alone or a test of seconds
# cannot show
NO_EXAMPLE = {
    *("Basis", "Compressor", "Wrapper", "Feedback", "Statistics", "Traffic"),
    *("agree", "shrink"),
    *(name for name in PUBLIC if name.endswith("Error") or "_i" in name),
}


def names_of_examples():
    """Return the names that the examples use, made by the code in the reference."""
    names = dict(PUBLIC)
    exec(textwrap.dedent((API / "index.rst").read_text().rpartition("::\n")[2]), names)
    return names


def docstrings(name):
    """Yield the docstring of a name, and those of its own methods."""
    found = PUBLIC[name]
    yield name, inspect.getdoc(found) or ""
    if isinstance(found, type):
        for method, function in vars(found).items():
            yield f"{name}.{method}", inspect.getdoc(function) or ""


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_of_a_docstring_run(name):
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    tests = [
        parser.get_doctest(text, names_of_examples(), where, where, 0)
        for where, text in docstrings(name)
    ]
    assert (name in NO_EXAMPLE) != bool(tests[0].examples)
    said = []
    for test in tests:
        runner.run(test, out=said.append)
    collectives.configure(timeout=None)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("package", [mpicomp, collectives])
def test_every_public_method_has_a_docstring_or_overrides_a_method_that_has_one(
    package,
):
    missing = set()
    for _, module, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "torch" in module or "jax" in module or ".kernels." in module:
            continue
        for kind in filter(
            inspect.isclass, vars(importlib.import_module(module)).values()
        ):
            if kind.__module__ == module and not kind.__name__.startswith("_"):
                members = (
                    (name, member)
                    for name, member in vars(kind).items()
                    if not name.startswith("_")
                )
                missing |= {
                    f"{module}.{kind.__name__}.{name}"
                    for name, member in members
                    if inspect.isroutine(member) or isinstance(member, property)
                    if not inspect.getdoc(getattr(kind, name))
                }
    assert not missing


def test_the_example_for_jax_runs():
    jax = pytest.importorskip("jax")
    from collectives.jax import exchange_pytree

    names = {
        **names_of_examples(),
        "jax": jax,
        "exchange_pytree": exchange_pytree,
        "batch": 2.0,
    }
    names["exchange"] = names["GradientExchange"](
        names["comm"], names["TopK"](k=2), small=0
    )
    names |= {
        "parameters": jax.numpy.ones(4),
        "loss": lambda parameters, batch: (batch * parameters**2).sum(),
    }
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(exchange_pytree), names, "exchange_pytree", None, 0
    )
    assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
    assert test.globs["means"].tolist().count(4.0) == 2


def test_the_reference_has_every_public_name():
    pages = "".join(map(pathlib.Path.read_text, API.glob("*.rst")))
    listed = re.findall(
        r"(?m)^\.\. auto(?:class|function|exception)\w*:: (?:mpicomp|collectives)\.(\w+)$",
        pages,
    )
    assert ".. automodule:: mpicomp.compressors\n" in pages
    listed += mpicomp.compressors.__all__
    assert sorted(listed) == sorted(PUBLIC), "add the name to docs/api/*.rst"
