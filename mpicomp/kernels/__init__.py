"""The hot loops: arrays in, arrays out, under the same names for every place where an array can live.

``host`` (Numba) serves arrays in main memory. :func:`mpicomp.arrays.kernels_for` picks the module for an array.
"""
