"""Print the lowest version of each dependency in setup.cfg, as constraints for pip: `make test-oldest`.

python tests/oldest.py > constraints.txt
"""

import configparser
import pathlib
import re

SETUP = pathlib.Path(__file__).parent.parent / "setup.cfg"


def lowest(*extras):
    """Return the lowest versions that setup.cfg accepts, by name, of the requirements and of some extras."""
    settings = configparser.ConfigParser()
    settings.read(SETUP)
    lines = [
        settings["options"]["install_requires"],
        *(settings["options.extras_require"][each] for each in extras),
    ]
    return dict(re.findall(r"^([\w-]+) >= ([\d.]+)$", "\n".join(lines), re.MULTILINE))


if __name__ == "__main__":
    print(*(f"{name}=={version}" for name, version in lowest("test").items()), sep="\n")
