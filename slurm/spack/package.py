"""A Spack recipe: put it into a repository of your site, as packages/py_mpicomp/package.py (docs/slurm.md)."""

from spack.package import default_args, depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpicomp(PythonPackage):
    """Sparse MPI collectives for compressed gradients."""

    license("BSD-3-Clause")

    version("0.1.0")

    with default_args(type="build"):
        depends_on("py-setuptools@69:")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-mpi4py@4.0.3:")
        depends_on("py-numba@0.59:")
        depends_on("py-numpy@1.26:")
