"""What can be checked of slurm/ without a Slurm; tests/slurm runs the scripts."""

import ast
import configparser
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
README = (ROOT / "slurm" / "README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_how_to_start_it_and_what_to_change(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n# ")
    assert re.search(rf"^# .*sbatch (slurm/)?{script.name}", text, re.MULTILINE)
    assert text.count("# SITE: ") >= 3, "partition, MPI and environment, launcher"
    assert f"`{script.name}`" in README


def depended_on(recipe):
    """Yield (package, least version) of a Spack recipe."""
    for node in ast.walk(ast.parse(recipe)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "depends_on":
            name, _, version = node.args[0].value.partition("@")
            yield name.removeprefix("py-"), version.rstrip(":")


def test_the_spack_recipe_asks_for_what_setup_cfg_asks_for():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = dict(line.split(" >= ") for line in settings["options"]["install_requires"].split("\n") if line)
    required["python"] = settings["options"]["python_requires"].removeprefix(">=")
    required["setuptools"] = re.search(r"setuptools >= (\d+)", (ROOT / "pyproject.toml").read_text()).group(1)
    assert dict(depended_on((ROOT / "slurm" / "spack" / "package.py").read_text())) == required
