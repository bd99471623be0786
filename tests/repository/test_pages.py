"""What the pages show works: Python blocks run, commands and their options exist, figures and variables are there.

The Python blocks of a page run in their order, in one namespace, on one rank, as a
reader has them: with the names of the blocks before, and no others. A block
that imports what is not installed, such as CuPy, is left out, and so are those that use
its names. The blocks of docs/frameworks.md, which need PyTorch and several ranks, run
in `make test-torch` (tests/pytorch/test_scripts.py).
"""

import ast
import configparser
import importlib.util
import inspect
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import textwrap

import pytest
from blocks import bound, imports
from commands import SUBCOMMANDS

import collectives
import mpicomp
from collectives.calls import checking
from collectives.calls.collective import COLLECTIVES
from collectives.exchange.step import Step

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONTRIBUTING = DOCS / "contributing"
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += sorted(
    [
        *DOCS.glob("*.md"),
        *CONTRIBUTING.glob("*.md"),
        *ROOT.glob("[a-z]*/README.md"),
        *ROOT.glob("[a-z]*/*/README.md"),
    ]
)
pages = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "diff", "text", "bash"}


def blocks(page, language="python"):
    """Yield the number of the first line and the text of each fenced block of a page."""
    text = page.read_text()
    for found in FENCED.finditer(text):
        if found.group(2) == language:
            yield text[: found.start()].count("\n") + 2, textwrap.dedent(found.group(3))


def missing(tree):
    """Return the packages that a block imports and that are not installed."""
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found |= {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    found = {name.partition(".")[0] for name in found}
    return {
        name
        for name in found
        if importlib.util.find_spec(name) is None
        or "fake_" in str(importlib.util.find_spec(name).origin)
    }


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Return the namespace of a page; what its blocks change for others is undone."""
    monkeypatch.chdir(tmp_path)
    algorithms = {name: dict(each.algorithms) for name, each in COLLECTIVES.items()}
    yield {"__name__": "page"}
    collectives.configure(timeout=None)
    for name, each in COLLECTIVES.items():
        each.algorithms.clear()
        each.algorithms.update(algorithms[name])


@pages
def test_the_python_of_a_page_runs(page, names):
    if page.name == "frameworks.md":
        pytest.skip("tests/pytorch runs the blocks of frameworks.md: make test-torch")
    left_out, unknown = {}, set()
    for line, code in blocks(page):
        tree = ast.parse(code)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if lacks := missing(tree) or (used & unknown) - names.keys():
            left_out[line] = ", ".join(sorted(lacks))
            unknown |= bound(tree)
        else:
            exec(compile("\n" * (line - 1) + code, page, "exec"), names)
    if left_out:
        pytest.skip(f"{page.name} has blocks that lack {left_out}, by their lines")


@pages
def test_an_error_that_a_page_catches_is_imported_in_the_block(page):
    """From `mpicomp`, where they are; a block that is copied alone says so too."""
    for line, code in blocks(page):
        tree = ast.parse(code)
        handlers = [
            node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)
        ]
        caught = {
            node.id
            for handler in handlers
            for node in ast.walk(handler.type or ast.Tuple([]))
            if isinstance(node, ast.Name) and hasattr(mpicomp, node.id)
        }
        assert caught <= {alias.name for alias in imports(tree)}, (page.name, line)


def test_pages_and_docstrings_run_in_the_debug_mode():
    if checking.is_enabled():
        pytest.skip("this is that run")
    tests = [
        "tests/repository/test_pages.py",
        "tests/repository/test_docstrings.py",
        "-k",
        "python_of or examples_of",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *tests,
    ]
    environment = os.environ | {checking.VARIABLE: "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_architecture_quotes_the_step():
    """As it is, without its docstring."""
    source = textwrap.dedent(inspect.getsource(Step.run))
    quotation = re.sub(r' +""".*?"""\n', "", source, flags=re.DOTALL)
    assert f"```text\n{quotation}```" in (CONTRIBUTING / "architecture.md").read_text()


@pages
def test_the_commands_of_a_page_exist(page):
    lines = [
        line
        for block in shell_blocks(page)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    for line in lines:
        check_command(line.partition(" # ")[0].split(" && "))


def shell_blocks(page):
    """Yield the indented blocks of a page that begin with a command, and those that are marked as bash."""
    text = FENCED.sub("", page.read_text())
    for block in re.findall(r"(?:^ {4,}\S.*\n)+", text, re.MULTILINE):
        block = textwrap.dedent(block)
        if program(block.splitlines()[0])[:1]:
            yield block
    yield from (block for _, block in blocks(page, "bash"))


PROGRAMS = {
    *(
        "make",
        "mpirun",
        "mpicomp",
        "python",
        "python3",
        "pip",
        "sbatch",
        "srun",
        "export",
        "spack",
        "eb",
        "git",
    ),
    *("apt-get", "twine", "source", "."),
}


def program(line):
    """Return a command line without the variables and the launcher before it; nothing for other text."""
    try:
        words = shlex.split(line.partition(" # ")[0])
    except ValueError:
        return []
    while words and (
        re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("sudo", "env")
    ):
        words = words[1:]
    if words[:1] == ["python"] and words[1:3] == [
        "benchmarks/testbed/testbed.py",
        "run",
    ]:
        words = words[3:]
    if words and words[0] in ("mpirun", "srun"):
        inner = next(
            (
                place
                for place, word in enumerate(words)
                if word in ("python", "mpicomp")
            ),
            len(words),
        )
        words = words[inner:] or words[:1]
    if words and words[0] == "python" and words[1:3] == ["-m", "mpi4py"]:
        words = ["python", *words[3:]]
    known = words and (
        words[0] in PROGRAMS or re.match(r"(tests|benchmarks|\.ci)/", words[0])
    )
    return words if known else []


def check_command(commands):
    """Raise AssertionError for a subcommand, an option, a target, an extra or a file that there is not."""
    for words in filter(None, map(program, commands)):
        if words[0] == "mpicomp" and words[1:2] != ["--version"]:
            prog = " ".join(
                words[:3] if words[1] == "bench" and len(words) > 2 else words[:2]
            )
            assert words[1:] == ["bench", "--help"] or prog in SUBCOMMANDS, words
            if "--help" not in words:
                options = [
                    word.partition("=")[0] for word in words if word.startswith("--")
                ]
                assert set(options) <= set(SUBCOMMANDS[prog]._option_string_actions), (
                    words
                )
        elif words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            makefile = (ROOT / "Makefile").read_text()
            assert all(
                re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets
            ), words
        elif words[0] == "pip":
            named = ",".join(re.findall(r"\.\[([^]]*)\]", " ".join(words)))
            assert set(re.findall(r"[\w-]+", named)) <= set(
                SETTINGS["options.extras_require"]
            ), words
        else:
            check_script(words[1:] if words[0] in ("python", "sbatch") else words)


def check_script(words):
    """Raise AssertionError unless the script of a command is there, and knows the options."""
    for script in [
        w
        for w in words
        if re.match(
            r"(examples|experiments|tests|benchmarks|slurm|docs|\.ci)/.*\.\w+$", w
        )
    ][:1]:
        assert (ROOT / script).is_file(), words
        options = {
            word.partition("=")[0]
            for word in words[words.index(script) + 1 :]
            if word.startswith("--")
        }
        text = "".join(
            path.read_text()
            for path in (ROOT / script).parent.glob(f"*{pathlib.Path(script).suffix}")
        )
        assert script.endswith(".sbatch") or all(
            option.strip("-") in text for option in options
        ), words


def test_the_readme_has_commands_that_are_checked():
    lines = [
        line
        for block in shell_blocks(ROOT / "README.md")
        for line in block.splitlines()
    ]
    assert len([line for line in lines if program(line)]) >= 6
    for wrong in (
        "mpicomp bench gtopk --length 5",
        "make bread",
        "pip install '.[bread]'",
        "python examples/bread.py",
    ):
        with pytest.raises(AssertionError):
            check_command([wrong])


@pages
def test_a_page_is_markdown_that_both_github_and_the_site_read(page):
    text = page.read_text()
    assert {found.group(2) for found in FENCED.finditer(text)} <= LANGUAGES
    assert text.count("```") == 2 * len(FENCED.findall(text)), "a block of another form"
    prose = FENCED.sub("", text)
    assert len(prose.split("\n# ")) == 1, "a page has one title"
    for figure in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
        assert (page.parent / figure).is_file(), figure
    for target in re.findall(r"(?<!!)\[[^]]+\]\(([^):#]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), target


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pages
def test_the_anchors_to_which_a_page_links_exist(page):
    links = re.findall(r"\]\(([^):#]*)#([^)]+)\)", FENCED.sub("", page.read_text()))
    for target, anchor in links:
        other = page.parent / target if target else page
        assert other.suffix != ".md" or anchor in anchors(other), (target, anchor)


def test_the_pages_for_users_are_short():
    """All words of README and docs/*.md, as `wc -w` counts them; pages for contributors are in docs/contributing."""
    pages = [page.read_text() for page in [ROOT / "README.md", *DOCS.glob("*.md")]]
    assert len(" ".join(pages).split()) <= 16_000


def test_a_word_of_the_search_is_of_one_page_that_exists():
    searched = runpy.run_path(str(DOCS / "conf.py"))["searched"]
    assert all((DOCS / f"{page}.md").is_file() for page in searched)
    words = [word for words in searched.values() for word in words]
    assert len(words) == len(set(words))
    add = runpy.run_path(str(DOCS / "pages.py"))["with_words"]
    page = add("# Title\n\nText.\n", ["hang", "outer step"])
    assert page == "# Title\n\n```{index} !hang, !outer step\n```\n\nText.\n"


def test_every_measured_figure_has_a_source():
    of = runpy.run_path(str(ROOT / "benchmarks" / "doc_figures.py"))
    found = of["all_figures"]()
    assert len(found) > 60
    assert [figure for figure in found if not of["source_of"](figure)] == []
    assert of["missing_files"]() == []
    used = {(figure.page, figure.section) for figure in found}
    named = {(page, each) for page, some in of["SOURCES"].items() for each in some}
    assert named <= used, "sections without figures"


def test_every_figure_is_on_a_page():
    shown = "".join(page.read_text() for page in PAGES)
    assert [
        figure.name
        for figure in (DOCS / "figures").glob("*.svg")
        if f"figures/{figure.name}" not in shown
    ] == []


STYLE = (DOCS / "static" / "site.css").read_text()
EM = 16  # pixels
POINT = 96 / 72  # pixels
LEAST = 9  # pixels
PADDING = 2 * 0.4 * EM  # of a figure


def sizes_of_letters(text):
    """Return the sizes of the letters of an SVG, in its units: of text, and of text as paths, 100 units an em."""
    found = re.findall(r"font-size: *([\d.]+)px|font: [^;\"]*?([\d.]+)px", text)
    glyphs = re.findall(r"scale\(([\d.]+) -[\d.]+\)", text)
    return [float(one or other) for one, other in found] + [
        100 * float(scale) for scale in glyphs
    ]


@pytest.mark.parametrize(
    "figure", sorted((DOCS / "figures").glob("*.svg")), ids=lambda path: path.stem
)
def test_no_letter_of_a_figure_is_shown_under_9_pixels(figure):
    """On a screen of 1280 pixels the column shrinks what is wider; on a phone all are as wide, and scroll."""
    text = figure.read_text()
    width, units = re.search(
        r'width="([\d.]+)pt"[^>]*viewBox="0 0 ([\d.]+)', text
    ).groups()
    column, phone = (
        float(re.search(rule, STYLE).group(1)) * EM - PADDING
        for rule in (
            r"\.content \{ width: (\d+)em",
            r"> img \{ max-width: none; width: (\d+)rem",
        )
    )
    sizes = sizes_of_letters(text)
    assert len(sizes) > 5
    for shown in min(column, POINT * float(width)), phone:
        assert min(sizes) * shown / float(units) >= LEAST


def test_the_tables_of_predictions_are_those_of_explain():
    pages = runpy.run_path(str(DOCS / "figures" / "choosing.py"))["pages"]()
    for found, expected in pages.values():
        assert found == expected, "run docs/figures/choosing.py"


def test_the_page_of_environment_variables_has_those_of_the_code():
    packages = [
        path
        for top in ("mpicomp", "collectives", "mpicomp_bench")
        for path in (ROOT / top).rglob("*.py")
    ]
    named = {
        name
        for path in packages
        for name in re.findall(r"MPICOMP_[A-Z_]+", path.read_text())
    }
    rows = re.findall(
        r"^\| `(MPICOMP_\w+)` \|", (DOCS / "versions.md").read_text(), re.MULTILINE
    )
    assert rows == sorted(named)


def test_the_version_is_the_same_everywhere():
    cff, spack, recipes = (
        ROOT / "CITATION.cff",
        ROOT / "slurm" / "spack" / "package.py",
        ROOT / "slurm" / "easybuild",
    )
    assert f"\nversion: {mpicomp.__version__}\n" in cff.read_text()
    assert f'\n    version("{mpicomp.__version__}")\n' in spack.read_text()
    (recipe,) = recipes.glob("*.eb")
    assert f"\nversion = '{mpicomp.__version__}'\n" in recipe.read_text()
    assert recipe.name in (ROOT / "slurm" / "README.md").read_text()
