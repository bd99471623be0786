"""What a packager and a careful reader look for: supported versions, locks, recipes, and the files about security."""

import configparser
import importlib.util
import pathlib
import re
import subprocess

import oldest
import pytest

import mpicomp

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
PYTHON = SETTINGS["options"]["python_requires"].removeprefix(">=")
LOCKED = dict(
    re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "tests" / "locked.txt").read_text(), re.MULTILINE
    )
)
ROW = re.compile(
    r"^\| ([\w-]+)(?: \(extra `\w+`\))? \| ([\d.]+) \| (\S+)", re.MULTILINE
)


def test_the_page_of_versions_says_what_the_metadata_asks_for():
    rows = {
        name: (least, tested)
        for name, least, tested in ROW.findall(
            (ROOT / "docs" / "versions.md").read_text()
        )
    }
    required = {"python": PYTHON, **oldest.lowest("mpi", "gpu")}
    assert {name: least for name, (least, _) in rows.items()} == required
    assert {name: tested for name, (_, tested) in rows.items() if name in LOCKED} == {
        name: LOCKED[name] for name in rows if name in LOCKED
    }


def test_python_is_the_same_everywhere():
    target = "py" + PYTHON.replace(".", "")
    assert f'target-version = "{target}"' in (ROOT / "pyproject.toml").read_text()
    assert SETTINGS["mypy"]["python_version"] == PYTHON
    assert f"Python {PYTHON} or later" in (ROOT / "README.md").read_text()
    versions = re.findall(r"Python :: (3\.\d+)", SETTINGS["metadata"]["classifiers"])
    assert versions[0] == PYTHON


def test_the_lowest_versions_are_those_of_every_requirement():
    lines = SETTINGS["options"]["install_requires"].split()
    assert len(oldest.lowest()) == lines.count(">=") == 3


def test_the_lock_has_every_package_that_the_tests_install():
    extras = "\n".join(
        SETTINGS["options.extras_require"][name] for name in ("test", "examples", "dev")
    )
    names = re.findall(
        r"^([\w-]+)",
        SETTINGS["options"]["install_requires"] + "\n" + extras,
        re.MULTILINE,
    )
    assert set(names) <= LOCKED.keys()


def test_the_conda_recipe_asks_for_what_setup_cfg_asks_for():
    recipe = (ROOT / "slurm" / "conda" / "meta.yaml").read_text()
    run = recipe.partition("  run:\n")[2].partition("\ntest:")[0]
    assert dict(re.findall(r"- (\S+) >=(\S+)", run)) == {
        "python": PYTHON,
        **oldest.lowest(),
    }
    assert f'version = "{mpicomp.__version__}"' in recipe
    assert "mpicomp = mpicomp_bench:main" in recipe
    assert (
        SETTINGS["options.entry_points"]["console_scripts"].strip()
        == "mpicomp = mpicomp_bench:main"
    )


def sections():
    """Return the sections of the Apptainer recipe by name."""
    text = (ROOT / "slurm" / "apptainer" / "mpicomp.def").read_text()
    return dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))


def test_the_apptainer_recipe_copies_what_the_package_is_built_from(tmp_path):
    found = sections()
    copied = {name for line in found["files"].split("\n") for name in line.split()[:-1]}
    packages = {
        path.parent.name
        for path in ROOT.glob("*/__init__.py")
        if path.parent.name != "tests"
    }
    assert copied == {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", *packages}
    assert f"Version {mpicomp.__version__}" in found["labels"]
    for name in ("post", "environment", "test", "runscript"):
        subprocess.run(
            ["sh", "-n"], input=found[name], text=True, check=True, timeout=20
        )


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_of_the_files_about_the_project_lead_somewhere(name):
    for target in re.findall(r"\]\(([\w/.]+)\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target


def test_coverage_counts_what_is_installed():
    for package in SETTINGS["coverage:run"]["source_pkgs"].split(", "):
        assert importlib.util.find_spec(package) is not None
