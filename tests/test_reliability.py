"""What docs/reliability.md says is tested has a test of that name."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "reliability.md").read_text()
TABLE = [line for line in TEXT.partition("## Faults")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")][
    1:
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_row_names_tests_that_exist():
    assert len(TABLE) > 20
    for row in TABLE[1:]:
        named = TEST.findall(row)
        assert named, f"no test in {row}"
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (path, name)


def test_every_row_is_whole():
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in TABLE)
