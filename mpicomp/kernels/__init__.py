"""The hot loops: arrays in, arrays out, under the same names on the host and on a device.

``host`` (Numba) serves arrays in host memory, ``device`` (CUDA) those on a GPU.
:func:`mpicomp.arrays.kernels_for` returns the module for an array.
"""
