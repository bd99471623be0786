"""Every fault of docs/contributing/faults.md has a row in tests/faults.md, and this names tests that exist."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(path):
    """Return the cells of each row of the first table of a page whose first column is `fault`."""
    lines = (
        (ROOT / path)
        .read_text()
        .partition("| fault |")[2]
        .partition("\n\n")[0]
        .splitlines()[2:]
    )
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]


def test_every_fault_has_tests_that_exist():
    table = rows("tests/faults.md")
    assert len(table) > 20
    for fault, tests in table:
        named = TEST.findall(tests)
        assert named, f"no test of {fault}"
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef)
            }, (path, name)


def test_the_two_pages_have_the_same_faults():
    page = rows("docs/contributing/faults.md")
    assert [row[0] for row in page] == [row[0] for row in rows("tests/faults.md")]
    assert all(len(row) == 3 for row in page)
