"""Settings of the documentation site: Sphinx reads this file; `make docs` builds the site in build/site."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from mpicomp import __version__ as release

project = "mpicomp"
author = "The mpicomp developers"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "docstrings",
    "pages",
]
exclude_patterns = ["figures", "results"]
contents = {  # the pages in their order; those that are not here come last
    "Start": [
        "concepts",
        "choosing",
        "performance",
        "slow_links",
        "frameworks",
        "coming_from",
        "slurm",
        "working",
        "symptoms",
    ],
    "Use": [
        "exchange",
        "overlap",
        "compressors",
        "feedback",
        "collectives",
        "patches",
        "reliability",
        "devices",
        "memory",
    ],
    "Look up": [
        "api/index",
        "mpi",
        "versions",
        "project",
        "glossary",
    ],
    "For contributors": [
        "contributing/architecture",
        "contributing/own_compressor",
        "contributing/wire_format",
        "contributing/costs",
        "contributing/measurements",
        "contributing/faults",
        "contributing/gpu",
        "contributing/accuracy",
        "contributing/papers",
    ],
    "Experiments": [
        "files/experiments-every_step",
        "files/experiments-race",
        "files/experiments-papers",
    ],
}

searched = {  # words by which the search finds a page first
    "slow_links": [
        "quantization",
        "outer step",
        "global parameters",
        "learning rate",
        "federated",
        "local SGD",
        "local steps",
        "DiLoCo",
        "MuLoCo",
        "Muon",
    ],
    "frameworks": [
        "DDP",
        "FSDP",
        "FSDP2",
        "bfloat16",
        "mixed precision",
        "communication hook",
        "GradScaler",
        "JAX",
    ],
    "reliability": [
        "timeout",
        "hang",
        "deadlock",
        "stuck",
        "watchdog",
        "fault tolerance",
        "elastic",
        "CollectiveError",
    ],
    "collectives": ["allreduce", "allgather", "reduce-scatter", "ZeRO"],
    "compressors": ["sparsification", "gradient compression", "top-k"],
    "feedback": ["error compensation", "error feedback"],
    "performance": ["speedup", "throughput", "scaling", "bandwidth"],
    "exchange": ["checkpoint", "resume", "NaN", "overflow"],
    "devices": ["CUDA", "GPU"],
    "memory": ["out of memory", "OOM"],
    "overlap": ["overlap", "progress"],
    "working": ["debugging", "log", "report"],
    "project": ["cite", "citation", "uninstall", "pickle", "security"],
}

html_theme = "furo"
html_title = f"mpicomp {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(FOLDER / "static" / "scorer.js")
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
pygments_style = "default"  # comments and numbers have a contrast of 4.5 and more

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4  # anchors as on GitHub
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

default_role = "py:obj"  # a name in backticks is a link where the reference has it
autodoc_mock_imports = ["torch", "jax"]  # for those who build the site without them
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as a list, which needs no entry for each
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
add_module_names = False
