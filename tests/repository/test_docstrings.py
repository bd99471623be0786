"""The examples in the docstrings of public names run, and the reference of the site has every public name."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import runpy
import textwrap

import pytest

import collectives
import mpicomp
from mpicomp.settings import CheckedKeywords

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

# objects that a user gets, and whose constructor no user calls
MADE_BY_THE_LIBRARY = {"Request", "SupportPlan", "Handle"}


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


def described():
    """Return the names of classes and functions in the reference, each with its members there."""
    with_public = runpy.run_path(str(API.parent / "pages.py"))["with_public"]
    pages = "".join(with_public(page.read_text()) for page in API.glob("*.rst"))
    entry = re.compile(
        r"(?m)^\.\. auto(?:class|function|exception):: ([\w.]+)\n(?: +:members: ((?:.*,\n)*.*)\n)?"
    )
    return {
        name: members.replace(",", " ").split()
        for name, members in entry.findall(pages)
    }


def test_the_reference_has_every_public_name():
    names = {
        f"{package.__name__}.{name}"
        for package in (mpicomp, collectives)
        for name in package.__all__
    }
    listed = {name for name in described() if name.count(".") == 1}
    assert listed == names, "add the name to docs/api/*.rst"


PACKAGES = ["mpicomp", "collectives", "collectives.torch", "collectives.jax"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_parameter_has_a_line_of_its_own(package):
    """In the section Args; and no section describes a parameter that is not there."""
    if package.count("."):
        pytest.importorskip(package.rpartition(".")[2])
    wrong = {}
    for full, members in described().items():
        owner, _, name = full.rpartition(".")
        target = getattr(importlib.import_module(package), name, None)
        if owner != package:
            continue
        methods = {f"{name}.{member}": getattr(target, member) for member in members}
        for where, function in {name: target, **methods}.items():
            if not callable(function) or where in MADE_BY_THE_LIBRARY:
                continue
            text = inspect.getdoc(function) or ""
            _, _, rest = text.partition("\nArgs:\n")
            section, *_ = re.split(r"(?m)^(?=\S)", rest)
            lines = re.findall(r"(?m)^    (\w+): \S", section)
            if names_of_parameters(function) != lines:
                wrong[where] = lines
    assert wrong == {}


def names_of_parameters(function):
    """Return the names of what a caller passes; none of an exception, which no caller makes."""
    if isinstance(function, type) and issubclass(function, Exception):
        return []
    parameters = inspect.signature(function).parameters.values()
    is_class = isinstance(function, type)
    # That of a class for unknown keywords, which raises for any, is not shown.
    return [
        one.name
        for one in parameters
        if one.name != "self" and not (is_class and one.kind is one.VAR_KEYWORD)
    ]


def test_the_reference_shows_no_member_that_a_class_does_not_have():
    for full, members in described().items():
        package, _, name = full.rpartition(".")
        if package in ("mpicomp", "collectives"):
            target = getattr(importlib.import_module(package), name)
            assert all(inspect.getdoc(getattr(target, member)) for member in members)


CHECKED = [
    name
    for name, each in PUBLIC.items()
    if isinstance(each, type) and issubclass(each, CheckedKeywords)
]


@pytest.mark.parametrize("name", [*CHECKED, "Request"])
def test_the_reference_shows_the_arguments_of_a_class(name):
    """Sphinx would show those of `__new__`; of a class that no user makes none."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    shown = runpy.run_path(str(API.parent / "docstrings.py"))["with_short_types"]
    target = PUBLIC[name]
    signature, _ = shown(None, "class", name, target, None, "(*args, **kwargs)", None)
    assert "**" not in signature
    if name == "Request":
        assert signature == ""
    else:
        names = set(inspect.signature(target.__init__).parameters) - {"self"}
        assert names == set(re.findall(r"(\w+): ", signature))
