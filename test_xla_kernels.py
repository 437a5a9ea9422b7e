"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import ast
import atexit
import collections
import ctypes
import dataclasses
import doctest
import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import ad, batching, mlir
from jax.test_util import check_grads

import xla_kernels as xk

try:
    from numba import cuda
except ImportError:
    cuda = None
try:
    import warp as wp
except ImportError:
    wp = None

if hasattr(jax, "shard_map"):
    shard_map = functools.partial(jax.shard_map, check_vma=True)
else:  # jax < 0.6
    from jax.experimental.shard_map import shard_map as old_shard_map

    shard_map = functools.partial(old_shard_map, check_rep=False)

# ======================================================================================================
# The matrix: every operation x backend x transformation
# ======================================================================================================


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of the matrix: example inputs, what it should give, and its outputs' specs.

    `kernels` maps a backend to a generator for XLACustomKernel; one that is missing does not support the operation.
    """

    name: str
    inputs: Callable  # (rng, dtype) -> NumPy arrays; those of dtype float32 become `dtype`
    reference: Callable  # the same in JAX
    kernels: dict
    outs: Callable | None = None  # of the inputs; default: what the reference gives
    params: dict = dataclasses.field(default_factory=dict)
    dtypes: tuple = ("float32", "float64")
    scans: bool = False  # the first input can be replaced by the first output, again and again
    tolerance: float = 1e-5


def normal(*shapes):
    return lambda rng, dtype: [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def vector_and_spikes(n):
    return lambda rng, dtype: [rng.standard_normal(n).astype(dtype), rng.random(n) < 0.3]


def csr(rng, dtype, rows=12, columns=9):
    """data, indices, indptr of a random sparse matrix."""
    counts = rng.integers(0, 5, rows)
    indptr = np.r_[0, counts.cumsum()].astype(np.int32)
    indices = np.concatenate([rng.choice(columns, n, replace=False) for n in counts] or [[]]).astype(np.int32)
    return [rng.standard_normal(len(indices)).astype(dtype), indices, indptr]


def csr_dense(data, indices, indptr, columns):
    rows = jnp.searchsorted(indptr, jnp.arange(indices.size), side="right") - 1
    return jnp.zeros((indptr.size - 1, columns), data.dtype).at[rows, indices].add(data)


# -- Numba: one source, jitted with and without parallel=True ---------------------------------------------


def numba_generators(kernel, **options):
    """Generators for the serial and the parallel backend, from one plain function."""

    def make(parallel):
        compiled = numba.njit(parallel=parallel)(kernel)
        return lambda outs, **_: xk.numba_kernel(compiled, outs, **options)

    return {"numba": make(False), "numba_parallel": make(True)}


def nb_add(x, y, out):
    for i in numba.prange(x.size):
        out[i] = x[i] + y[i]


def nb_relu(x, out):
    for i in numba.prange(x.size):
        out[i] = max(x[i], 0)


def nb_leaky_relu(alpha):
    def leaky_relu(x, out):
        for i in numba.prange(x.size):
            out[i] = x[i] if x[i] > 0 else x.dtype.type(alpha) * x[i]

    return leaky_relu


def nb_hadamard(x, y, out):
    for i in numba.prange(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * y[i, j]


def nb_sum(x, out):
    total = x.dtype.type(0)
    for i in numba.prange(x.size):
        total += x[i]
    out[0] = total


def nb_mean_std(x, mean, std):
    mean[0] = x.sum() / x.size
    total = x.dtype.type(0)
    for i in numba.prange(x.size):
        total += (x[i] - mean[0]) ** 2
    std[0] = np.sqrt(total / x.size)


def nb_matvec(a, x, out):
    for i in numba.prange(a.shape[0]):
        total = x.dtype.type(0)
        for j in range(a.shape[1]):
            total += a[i, j] * x[j]
        out[i] = total


def nb_csr_matvec(data, indices, indptr, x, out):
    for i in numba.prange(out.size):
        total = x.dtype.type(0)
        for k in range(indptr[i], indptr[i + 1]):
            total += data[k] * x[indices[k]]
        out[i] = total


def nb_csr_event(data, indices, indptr, spikes, out):
    out[:] = 0
    for i in range(spikes.size):  # scatter-add: rows share columns, so not parallel
        if spikes[i]:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += data[k]


def nb_lif(v, current, new_v, spikes):
    for i in numba.prange(v.size):
        u = v[i] + (current[i] - v[i]) * v.dtype.type(0.1)
        spikes[i] = u > 1
        new_v[i] = 0 if u > 1 else u


def nb_trace(trace, spikes, out):
    for i in numba.prange(trace.size):
        out[i] = trace[i] * trace.dtype.type(0.9) + spikes[i]


def nb_stencil(x, out):
    for i in numba.prange(x.size):
        left = x[i - 1] if i > 0 else x.dtype.type(0)
        right = x[i + 1] if i + 1 < x.size else x.dtype.type(0)
        out[i] = left - 2 * x[i] + right


def nb_prefix_sum(x, out):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i]
        out[i] = total


def nb_decay_in_place(v, current, out):  # out starts as v
    for i in numba.prange(out.size):
        out[i] += (current[i] - out[i]) * out.dtype.type(0.1)


# -- Numba CUDA: on a GPU, or on the simulator -------------------------------------------------------------


def cuda_generators(kernel, dims=None, **options):
    """Generators for `numba_cuda_kernel`, and for `numba_cuda_callable` launching the same kernel itself."""

    def launch_dims(outs):
        return outs[0].shape if dims is None else dims

    def as_kernel(outs, **_):
        return xk.numba_cuda_kernel(kernel, outs, launch_dims=launch_dims(outs), **options)

    def as_callable(outs, **_):
        compiled = cuda.jit(kernel)
        block = {1: (32,), 2: (4, 8)}[len(np.atleast_1d(launch_dims(outs)))]
        grid = tuple(-(-n // b) for n, b in zip(np.atleast_1d(launch_dims(outs)).tolist(), block))

        def launch(*args):
            *arrays, stream = args
            compiled[grid, block, stream](*arrays)

        return xk.numba_cuda_callable(launch, outs, **options)

    return {"numba_cuda": as_kernel, "numba_cuda_callable": as_callable}


def cu_add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def cu_relu(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = max(x[i], 0)


def cu_leaky_relu(alpha):
    def leaky_relu(x, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] if x[i] > 0 else x.dtype.type(alpha) * x[i]

    return leaky_relu


def cu_hadamard(x, y, out):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = x[i, j] * y[i, j]


def cu_sum(x, out):
    if cuda.grid(1) == 0:
        out[0] = 0
        for i in range(x.size):
            out[0] += x[i]


def cu_mean_std(x, mean, std):
    if cuda.grid(1) == 0:
        mean[0] = 0
        std[0] = 0
        for i in range(x.size):
            mean[0] += x[i] / x.size
        for i in range(x.size):
            std[0] += (x[i] - mean[0]) ** 2 / x.size
        std[0] = math.sqrt(std[0])


def cu_matvec(a, x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = 0
        for j in range(x.size):
            out[i] += a[i, j] * x[j]


def cu_csr_matvec(data, indices, indptr, x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = 0
        for k in range(indptr[i], indptr[i + 1]):
            out[i] += data[k] * x[indices[k]]


def cu_csr_event(data, indices, indptr, spikes, out):
    j = cuda.grid(1)
    if j < out.size:
        out[j] = 0
    cuda.syncthreads()  # one block
    if j < spikes.size and spikes[j]:
        for k in range(indptr[j], indptr[j + 1]):
            cuda.atomic.add(out, indices[k], data[k])


def cu_lif(v, current, new_v, spikes):
    i = cuda.grid(1)
    if i < v.size:
        u = v[i] + (current[i] - v[i]) * v.dtype.type(0.1)
        spikes[i] = u > 1
        new_v[i] = 0 if u > 1 else u


def cu_trace(trace, spikes, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = trace[i] * trace.dtype.type(0.9) + spikes[i]


def cu_stencil(x, out):
    i = cuda.grid(1)
    if i < out.size:
        left = x[i - 1] if i > 0 else 0
        right = x[i + 1] if i + 1 < x.size else 0
        out[i] = left - 2 * x[i] + right


def cu_prefix_sum(x, out):
    if cuda.grid(1) == 0:
        out[0] = x[0]
        for i in range(1, x.size):
            out[i] = out[i - 1] + x[i]


def cu_decay_in_place(v, current, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] += (current[i] - out[i]) * out.dtype.type(0.1)


# -- Warp: kernels are typed, so each is made for a dtype --------------------------------------------------


def warp_generator(make, dims=None, **options):
    def generator(outs, **params):
        kernel = make(xk.jaxtype_to_warptype(outs[0].dtype), **params)
        return xk.warp_kernel(kernel, outs, launch_dims=outs[0].shape if dims is None else dims, **options)

    return {"warp": generator}


def wp_add(T):
    @wp.kernel
    def add(x: wp.array(dtype=T), y: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = x[i] + y[i]

    return add


def wp_relu(T):
    @wp.kernel
    def relu(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = wp.max(x[i], T(0.0))

    return relu


def wp_leaky_relu(T, alpha):
    @wp.kernel
    def leaky_relu(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = wp.where(x[i] > T(0.0), x[i], T(alpha) * x[i])

    return leaky_relu


def wp_hadamard(T):
    @wp.kernel
    def hadamard(x: wp.array2d(dtype=T), y: wp.array2d(dtype=T), out: wp.array2d(dtype=T)):
        i, j = wp.tid()
        out[i, j] = x[i, j] * y[i, j]

    return hadamard


def wp_sum(T):
    @wp.kernel
    def total(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        s = T(0.0)
        for i in range(x.shape[0]):
            s += x[i]
        out[0] = s

    return total


def wp_mean_std(T):
    @wp.kernel
    def mean_std(x: wp.array(dtype=T), mean: wp.array(dtype=T), std: wp.array(dtype=T)):
        m = T(0.0)
        for i in range(x.shape[0]):
            m += x[i] / T(x.shape[0])
        s = T(0.0)
        for i in range(x.shape[0]):
            s += (x[i] - m) * (x[i] - m) / T(x.shape[0])
        mean[0] = m
        std[0] = wp.sqrt(s)

    return mean_std


def wp_matvec(T):
    @wp.kernel
    def matvec(a: wp.array2d(dtype=T), x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        s = T(0.0)
        for j in range(x.shape[0]):
            s += a[i, j] * x[j]
        out[i] = s

    return matvec


def wp_csr_matvec(T):
    @wp.kernel
    def csr_matvec(
        data: wp.array(dtype=T),
        indices: wp.array(dtype=wp.int32),
        indptr: wp.array(dtype=wp.int32),
        x: wp.array(dtype=T),
        out: wp.array(dtype=T),
    ):
        i = wp.tid()
        s = T(0.0)
        for k in range(indptr[i], indptr[i + 1]):
            s += data[k] * x[indices[k]]
        out[i] = s

    return csr_matvec


def warp_csr_event(outs, **_):
    """Scatter-add with an accumulator that is given a value and returned."""
    T = xk.jaxtype_to_warptype(outs[0].dtype)

    @wp.kernel
    def csr_event(
        data: wp.array(dtype=T),
        indices: wp.array(dtype=wp.int32),
        indptr: wp.array(dtype=wp.int32),
        spikes: wp.array(dtype=wp.bool),
        total: wp.array(dtype=T),
    ):
        i = wp.tid()
        if spikes[i]:
            for k in range(indptr[i], indptr[i + 1]):
                wp.atomic_add(total, indices[k], data[k])

    def call(data, indices, indptr, spikes):
        launch = xk.warp_kernel(csr_event, outs, launch_dims=spikes.shape, in_out_argnames=["total"])
        return launch(data, indices, indptr, spikes, jnp.zeros(outs[0].shape, outs[0].dtype))

    return call


def wp_lif(T):
    @wp.kernel
    def lif(
        v: wp.array(dtype=T), current: wp.array(dtype=T), new_v: wp.array(dtype=T), spikes: wp.array(dtype=wp.bool)
    ):
        i = wp.tid()
        u = v[i] + (current[i] - v[i]) * T(0.1)
        spikes[i] = u > T(1.0)
        new_v[i] = wp.where(u > T(1.0), T(0.0), u)

    return lif


def wp_trace(T):
    @wp.kernel
    def trace(x: wp.array(dtype=T), spikes: wp.array(dtype=wp.bool), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = x[i] * T(0.9) + wp.where(spikes[i], T(1.0), T(0.0))

    return trace


def wp_stencil(T):
    @wp.kernel
    def stencil(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        left = T(0.0)
        right = T(0.0)
        if i > 0:
            left = x[i - 1]
        if i + 1 < x.shape[0]:
            right = x[i + 1]
        out[i] = left - T(2.0) * x[i] + right

    return stencil


def wp_prefix_sum(T):
    @wp.kernel
    def prefix_sum(x: wp.array(dtype=T), out: wp.array(dtype=T)):
        s = T(0.0)
        for i in range(x.shape[0]):
            s += x[i]
            out[i] = s

    return prefix_sum


def wp_decay_in_place(T):
    @wp.kernel
    def decay(v: wp.array(dtype=T), current: wp.array(dtype=T), out: wp.array(dtype=T)):
        i = wp.tid()
        out[i] = out[i] + (current[i] - out[i]) * T(0.1)

    return decay


# -- Pallas, in interpret mode -----------------------------------------------------------------------------


def pallas_generator(reference):
    """The reference as a Pallas kernel: it reads whole blocks and writes whole blocks."""

    def generator(outs, **params):
        def kernel(*refs):
            results = reference(*[ref[...] for ref in refs[: -len(outs)]], **params)
            for ref, result in zip(refs[-len(outs) :], jax.tree.leaves(results)):
                ref[...] = result

        return pl.pallas_call(kernel, out_shape=list(outs), interpret=True)

    return {"pallas": generator}


# -- the table ---------------------------------------------------------------------------------------------


def matrix_op(name, inputs, reference, *, nb, cu=None, wp_=None, dims=None, pallas=True, options=None, **fields):
    """One row: the kernels of all backends.  Parameters of the call reach kernels through makers."""
    options = options or {}

    def with_params(generators, maker):
        """A generator whose kernel is made from the call's parameters."""
        return {
            b: lambda outs, b=b, **params: generators(maker(**params), **options)[b](outs) for b in generators(maker(0))
        }

    params = fields.get("params")
    kernels = with_params(numba_generators, nb) if params else numba_generators(nb, **options)
    if cu is not None:
        on_gpu = functools.partial(cuda_generators, dims=dims)
        kernels |= with_params(on_gpu, cu) if params else on_gpu(cu, **options)
    kernels |= wp_ if isinstance(wp_, dict) else warp_generator(wp_, dims, **options)
    if pallas:
        kernels |= pallas_generator(reference)
    kernels |= {"jax": lambda outs, **params: functools.partial(reference, **params)}
    return Op(name, inputs, reference, kernels, **fields)


def lif_reference(v, current):
    u = v + (current - v) * v.dtype.type(0.1)
    return jnp.where(u > 1, 0, u).astype(v.dtype), u > 1


def csr_matvec_inputs(rng, dtype):
    return [*csr(rng, dtype), rng.standard_normal(9).astype(dtype)]


def csr_event_inputs(rng, dtype):
    return [*csr(rng, dtype), rng.random(12) < 0.5]


MATRIX = [
    matrix_op("add", normal(17, 17), lambda x, y: x + y, nb=nb_add, cu=cu_add, wp_=wp_add, scans=True),
    matrix_op("relu", normal(17), lambda x: jnp.maximum(x, 0), nb=nb_relu, cu=cu_relu, wp_=wp_relu, scans=True),
    matrix_op(
        "leaky_relu",
        normal(17),
        lambda x, alpha: jnp.where(x > 0, x, x.dtype.type(alpha) * x),
        nb=nb_leaky_relu,
        cu=cu_leaky_relu,
        wp_=wp_leaky_relu,
        params={"alpha": 0.25},
        scans=True,
    ),
    matrix_op(
        "hadamard",
        normal((5, 7), (5, 7)),
        lambda x, y: x * y,
        nb=nb_hadamard,
        cu=cu_hadamard,
        wp_=wp_hadamard,
        scans=True,
    ),
    matrix_op("sum", normal(33), lambda x: x.sum(keepdims=True), nb=nb_sum, cu=cu_sum, wp_=wp_sum, dims=1),
    matrix_op(
        "mean_std",
        normal(33),
        lambda x: (x.mean(keepdims=True), x.std(keepdims=True)),
        nb=nb_mean_std,
        cu=cu_mean_std,
        wp_=wp_mean_std,
        dims=1,
    ),
    matrix_op("matvec", normal((6, 6), 6), lambda a, x: a @ x, nb=nb_matvec, cu=cu_matvec, wp_=wp_matvec),
    matrix_op(
        "csr_matvec",
        csr_matvec_inputs,
        lambda data, indices, indptr, x: csr_dense(data, indices, indptr, x.size) @ x,
        nb=nb_csr_matvec,
        cu=cu_csr_matvec,
        wp_=wp_csr_matvec,
        pallas=False,
    ),
    matrix_op(
        "csr_event",
        csr_event_inputs,
        lambda data, indices, indptr, spikes: spikes.astype(data.dtype) @ csr_dense(data, indices, indptr, 9),
        nb=nb_csr_event,
        cu=cu_csr_event,
        wp_={"warp": warp_csr_event},
        dims=12,
        pallas=False,
    ),
    matrix_op("lif", normal(17, 17), lif_reference, nb=nb_lif, cu=cu_lif, wp_=wp_lif, scans=True),
    matrix_op(
        "trace",
        vector_and_spikes(17),
        lambda trace, spikes: trace * trace.dtype.type(0.9) + spikes,
        nb=nb_trace,
        cu=cu_trace,
        wp_=wp_trace,
        scans=True,
    ),
    matrix_op(
        "stencil",
        normal(17),
        lambda x: jnp.concatenate([x[:0], x[1:], x[:1] * 0]) - 2 * x + jnp.concatenate([x[:1] * 0, x[:-1]]),
        nb=nb_stencil,
        cu=cu_stencil,
        wp_=wp_stencil,
        scans=True,
    ),
    matrix_op(
        "prefix_sum", normal(17), jnp.cumsum, nb=nb_prefix_sum, cu=cu_prefix_sum, wp_=wp_prefix_sum, dims=1, scans=True
    ),
    matrix_op(
        "in_place",
        normal(17, 17),
        lambda v, current: v + (current - v) * v.dtype.type(0.1),
        nb=nb_decay_in_place,
        cu=cu_decay_in_place,
        wp_=wp_decay_in_place,
        options={"input_output_aliases": {0: 0}},
        scans=True,
    ),
]
OPS = {op.name: op for op in MATRIX}
BACKENDS = ["numba", "numba_parallel", "numba_cuda", "numba_cuda_callable", "warp", "pallas", "jax"]
CELLS = [(op.name, b, dtype) for op in MATRIX for b in BACKENDS if b in op.kernels for dtype in op.dtypes]
matrix = pytest.mark.parametrize("name, backend, dtype", CELLS, ids=["-".join(cell) for cell in CELLS])


@functools.cache
def custom_kernel(name):
    """The operation with every backend that this machine has, on the platform that JAX uses."""
    op = xk.XLACustomKernel(name)
    for backend, generator in OPS[name].kernels.items():
        op.def_kernel(backend, jax.default_backend(), generator)
    if OPS[name].reference is not None:
        reference = functools.partial(OPS[name].reference, **OPS[name].params)

        def jvp(primals, tangents, **_):
            outputs, derivatives = jax.jvp(reference, primals, tuple(map(ad.instantiate_zeros, tangents)))
            return jax.tree.leaves(outputs), jax.tree.leaves(derivatives)

        op.def_jvp_rule(jvp)
    return op


class Cell:
    """One operation on one backend: its function, inputs and reference."""

    def __init__(self, name, backend, dtype, seed=0):
        self.op, self.backend = OPS[name], backend
        self.inputs = self.op.inputs(np.random.default_rng(seed), np.dtype(dtype))
        self.reference = functools.partial(self.op.reference, **self.op.params)

    def __call__(self, *inputs):
        outs = jax.eval_shape(self.reference, *inputs)
        return custom_kernel(self.op.name)(*inputs, outs=outs, backend=self.backend, **self.op.params)

    def check(self, got, expected):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=self.op.tolerance, atol=self.op.tolerance)


@pytest.fixture
def cell(name, backend, dtype, enable_x64):
    with enable_x64(dtype == "float64"):
        yield Cell(name, backend, dtype)


@matrix
def test_eager(cell):
    before = [x.copy() for x in cell.inputs]
    cell.check(cell(*cell.inputs), cell.reference(*cell.inputs))
    for x, y in zip(cell.inputs, before):
        np.testing.assert_array_equal(x, y)


@matrix
def test_jit(cell):
    cell.check(jax.jit(cell)(*cell.inputs), cell.reference(*cell.inputs))


@matrix
def test_vmap(cell):
    """Over axis 0 of the first input, then over the last axis, with the other inputs unbatched; then nested."""
    first, *rest = cell.inputs
    batch = np.stack([first, 2 * first, first - 1])
    none = (None,) * len(rest)
    cell.check(jax.vmap(cell, (0, *none))(batch, *rest), jax.vmap(cell.reference, (0, *none))(batch, *rest))
    last = np.moveaxis(batch, 0, -1)
    cell.check(jax.vmap(cell, (-1, *none))(last, *rest), jax.vmap(cell.reference, (0, *none))(batch, *rest))
    nest = np.stack([batch, -batch])
    twice = lambda f: jax.jit(jax.vmap(jax.vmap(f, (0, *none)), (0, *none)))
    cell.check(twice(cell)(nest, *rest), twice(cell.reference)(nest, *rest))


@matrix
def test_vmap_of_all_inputs(cell):
    if cell.op.name.startswith("csr"):
        pytest.skip("the sparsity pattern has another size in every sample")
    batch = [np.stack([x, x[::-1] if x.ndim == 1 else -x]) for x in cell.inputs]
    cell.check(jax.vmap(cell)(*batch), jax.vmap(cell.reference)(*batch))


@matrix
def test_grad(cell):
    """Through the rule of the operation, against the gradient of the reference."""
    i = next(i for i, x in enumerate(cell.inputs) if x.dtype.kind == "f")
    loss = lambda f: (
        lambda *inputs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*inputs)) if y.dtype.kind == "f")
    )
    cell.check(jax.grad(loss(cell), i)(*cell.inputs), jax.grad(loss(cell.reference), i)(*cell.inputs))


@matrix
def test_scan(cell):
    if not cell.op.scans:
        pytest.skip("its output is no input")
    first, *rest = map(jnp.asarray, cell.inputs)
    run = lambda f: jax.jit(lambda x: jax.lax.scan(lambda x, _: (jax.tree.leaves(f(x, *rest))[0],) * 2, x, length=4))
    cell.check(run(cell)(first), run(cell.reference)(first))


@matrix
def test_shard_map(cell):
    """Each of four devices runs its own shard of a batch, with JAX's check of varying axes."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    first, *rest = cell.inputs
    batch = np.stack([first * (i + 1) for i in range(8)])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "i")
    P = jax.sharding.PartitionSpec
    run = lambda f: jax.vmap(lambda x: f(x, *rest))
    sharded = jax.jit(shard_map(run(cell), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    cell.check(sharded(batch), run(cell.reference)(batch))


# ======================================================================================================
# The package: README, imports, vendored copies, several processes
# ======================================================================================================

ROOT = pathlib.Path(__file__).parent


def run_python(*args, cwd=ROOT, timeout=300, **environment):
    """Run Python in a fresh process; returns its output, or fails with it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, args)]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_readme_block(number, tmp_path):
    code = README_BLOCKS[number]
    if "warp" in code and wp is None:
        pytest.skip("warp is not installed")
    (tmp_path / "block.py").write_text(code, encoding="utf-8")
    assert run_python(tmp_path / "block.py", cwd=tmp_path).strip()


def test_readme_has_the_two_lines():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'pip install -e ".[warp]" && python -m xla_kernels\n' in text
    assert 'pip install -e ".[test]" && pytest -n auto\n' in text


LOADED = "import sys; print(sorted({m.partition('.')[0] for m in sys.modules} & {'numba', 'warp', 'llvmlite', 'cuda'}))"


def test_import_loads_no_backend():
    assert run_python("-c", f"import xla_kernels; {LOADED}").strip() == "[]"


def test_import_check_can_fail():
    assert "numba" in run_python("-c", f"import xla_kernels, numba; {LOADED}")


def test_docstring_examples():
    assert doctest.testmod(xk).attempted > 0
    assert doctest.testmod(xk).failed == 0


def test_self_check_runs(tmp_path):
    """The file alone, under another name, in an empty folder, as a script and as a module."""
    shutil.copy(ROOT / "xla_kernels.py", tmp_path / "my_kernels.py")
    for args in (["my_kernels.py"], ["-m", "my_kernels"]):
        report = run_python(*args, cwd=tmp_path, PYTHONPATH="")
        assert re.search(r"^numba +cpu +works, [\d.]+ µs", report, re.MULTILINE), report


def test_self_check_fails_for_a_wrong_backend(tmp_path):
    text = (ROOT / "xla_kernels.py").read_text(encoding="utf-8")
    assert "out[i] = 2 * x[i] + y[i]" in text
    (tmp_path / "wrong.py").write_text(text.replace("out[i] = 2 * x[i] + y[i]", "out[i] = 3 * x[i] + y[i]"), "utf-8")
    with pytest.raises(AssertionError, match=r"exit code 1\n(.*\n)*.*FAILED: AssertionError"):
        run_python("wrong.py", cwd=tmp_path, PYTHONPATH="")


def test_missing_numba_is_explained(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('none here')")
    code = "import jax.numpy as jnp, xla_kernels as xk; xk.numba_kernel(lambda x, out: None, lambda x: x)(jnp.ones(3))"
    with pytest.raises(AssertionError, match=r"ImportError: numba_kernel needs numba.*pip install numba"):
        run_python("-c", code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")


# -- export: every operation of a backend, reloaded in a fresh process that traces the same kernels ----------


def exported_cells(backend):
    """(name, cell) of what `backend` can do, at float32."""
    return [(op.name, Cell(op.name, backend, "float32")) for op in MATRIX if backend in op.kernels]


def export_all(backend, folder):
    from jax import export

    for name, cell in exported_cells(backend):
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cell.inputs]
        jax.eval_shape(cell, *specs)  # registers the targets, so that they can be named
        exported = export.export(jax.jit(cell), disabled_checks=xk.export_checks())(*specs)
        (folder / f"{name}.bin").write_bytes(exported.serialize())


def check_exported(backend, folder):
    """In the fresh process."""
    from jax import export

    for name, cell in exported_cells(backend):
        jax.jit(cell).lower(*cell.inputs)
        run = export.deserialize(bytearray((pathlib.Path(folder) / f"{name}.bin").read_bytes())).call
        cell.check(run(*cell.inputs), cell.reference(*cell.inputs))
        print(name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_export_and_reload(backend, tmp_path):
    export_all(backend, tmp_path)
    code = f"import conftest, test_xla_kernels as t; t.check_exported({backend!r}, {str(tmp_path)!r})"
    checked = run_python("-c", code).split()
    assert checked == [name for name, _ in exported_cells(backend)]


# -- several processes ---------------------------------------------------------------------------------------

DISTRIBUTED = """
import sys
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec as P
import numba, xla_kernels as xk
square = xk.XLACustomKernel("square")
square.def_sharding_rule("i -> i")
@square.def_numba_kernel
@numba.njit
def kernel(x, out):
    for i in range(x.size):
        out[i] = x[i] * x[i]
mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
sharding = NamedSharding(mesh, P("d"))
x = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8, dtype=np.float32)[index])
total = jax.jit(lambda x: square(x, outs=x).sum())(x)
print("devices", len(jax.devices()), "total", float(total))
"""


def test_two_processes_share_a_mesh(tmp_path):
    (tmp_path / "worker.py").write_text(DISTRIBUTED)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers = [
        subprocess.Popen([sys.executable, "worker.py", port, str(i)], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert all("devices 4 total 140.0" in output for output in outputs), "\n".join(outputs)


# ======================================================================================================
# Numba on CPU
# ======================================================================================================


def test_numba_add():
    @xk.numba_kernel(outs=lambda x, y: x)
    def add(x, y, out):
        for i in range(x.size):
            out[i] = x[i] + y[i]

    x = jnp.arange(16.0)
    np.testing.assert_array_equal(add(x, x), 2 * x)


# ======================================================================================================
# Numba CUDA
# ======================================================================================================

# ======================================================================================================
# Warp
# ======================================================================================================

# ======================================================================================================
# XLACustomKernel
# ======================================================================================================

Spec = jax.ShapeDtypeStruct
X, Y = np.arange(1.0, 9.0, dtype=np.float32), np.linspace(-1.0, 1.0, 8, dtype=np.float32)
_NEGATE = {"cpu": lambda: lambda x: -x}


def _like(x, *rest):
    return x


def _kg_jax(outs):
    return lambda x, y: x * y


def _kg_numba(outs):
    @numba.njit
    def multiply(x, y, out):
        for i in np.ndindex(out.shape):
            out[i] = x[i] * y[i]

    return xk.numba_kernel(multiply, outs)


def _kg_pallas(outs):
    from jax.experimental import pallas as pl

    def multiply(x, y, out):
        out[...] = x[...] * y[...]

    return lambda x, y: (pl.pallas_call(multiply, out_shape=outs[0], interpret=True)(x, y),)


def _kg_no_batching(outs):
    """Code without a batching rule, as most hand-written primitives are."""
    return lambda x, y: [_multiply_p.bind(x, y)]


_multiply_p = xk.Primitive("multiply_without_batching_rule")
_multiply_p.def_abstract_eval(lambda x, y: x)
mlir.register_lowering(_multiply_p, mlir.lower_fun(lambda x, y: x * y, multiple_results=False))

OP_BACKENDS = {"jax": _kg_jax, "numba": _kg_numba, "pallas": _kg_pallas, "no_batching": _kg_no_batching}


def _product_op(backend="jax"):
    """The elementwise product, with its derivative and transpose in terms of the op itself."""
    op = xk.XLACustomKernel("product")
    op.def_kernel(backend, "cpu", OP_BACKENDS[backend])
    op.def_jvp_rule2(lambda t, x, y, outs: op(t, y, outs=outs), lambda t, x, y, outs: op(x, t, outs=outs))

    @op.def_transpose_rule
    def transpose(cotangents, x, y, outs):
        (ct,) = cotangents
        if ad.is_undefined_primal(x):
            return op(ct, y, outs=outs[0]), y
        return x, op(x, ct, outs=outs[0])

    return op


@pytest.fixture(params=OP_BACKENDS)
def product(request):
    if request.param == "pallas":
        pytest.importorskip("jax.experimental.pallas", reason="Pallas needs more than jax here")
        if "shard_map" in request.node.name:
            pytest.skip("Pallas' interpreter does not run inside shard_map(check_vma=True)")
    op = _product_op(request.param)
    return lambda x, y: op(x, y, outs=_like)


def _shard_map(f, in_specs, out_specs):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    from jax.experimental.shard_map import shard_map

    return shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _scan(f, x, y):
    return jax.lax.scan(lambda c, _: (f(c, y), c), x, None, length=3)


def _while(f, x, y):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1], y)), (0, x))[1]


def _constant(f, x, y):
    with jax.ensure_compile_time_eval():
        return np.asarray(f(x, y))  # a traced value could not become a NumPy array


def _disable_jit(f, x, y):
    with jax.disable_jit():
        return f(x, y), jax.vmap(f)(x[:2, None], y[:2, None])


def _hessian_vector(f, x, y):
    return jax.jvp(jax.grad(lambda x: (f(x, x) * f(x, y)).sum()), (x,), (y,))


ROWS = np.stack([X, X + 1, 2 * X])
P = jax.sharding.PartitionSpec
TRANSFORMS = {
    "eager": lambda f: f(X, Y),
    "jit": lambda f: jax.jit(f)(X, Y),
    "scalars": lambda f: f(2.0, np.float32(3.0)),
    "2d": lambda f: f(ROWS, ROWS),
    "zero_size": lambda f: f(X[:0], Y[:0]),
    "vmap": lambda f: jax.vmap(f)(ROWS, ROWS),
    "vmap_jit": lambda f: jax.jit(jax.vmap(f))(ROWS, ROWS),
    "vmap_unbatched": lambda f: jax.vmap(f, (0, None))(ROWS, Y),
    "vmap_unbatched_first": lambda f: jax.vmap(f, (None, 0))(Y, ROWS),
    "vmap_axis_1": lambda f: jax.vmap(f, (1, 0), out_axes=1)(ROWS.T, ROWS),
    "vmap_axis_last": lambda f: jax.vmap(f, (-1, None))(ROWS.T, Y),
    "vmap_of_one": lambda f: jax.vmap(f, (0, None))(ROWS[:1], Y),
    "vmap_of_none": lambda f: jax.vmap(f, (0, None))(ROWS[:0], Y),
    "vmap_nested": lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(ROWS, ROWS),
    "vmap_nested_deep": lambda f: jax.vmap(jax.vmap(jax.vmap(f, (None, 0)), (0, None)), (None, 1))(
        ROWS, np.arange(64.0, dtype=np.float32).reshape(4, 2, 8)
    ),
    "grad": lambda f: jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1))(X, Y),
    "grad_jit": lambda f: jax.jit(jax.grad(lambda x: f(x, x).sum()))(X),
    "jvp": lambda f: jax.jvp(f, (X, Y), (Y, X)),
    "jvp_one": lambda f: jax.jvp(lambda x: f(x, Y), (X,), (Y,)),
    "jvp_vmap": lambda f: jax.jvp(lambda x: jax.vmap(f, (0, None))(x, Y), (ROWS,), (ROWS,)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1))(X, Y),
    "jacrev": lambda f: jax.jacrev(f, (0, 1))(X, Y),
    "hessian_vector": lambda f: _hessian_vector(f, X, Y),
    "vjp": lambda f: jax.vjp(f, X, Y)[1](X),
    "grad_of_vmap": lambda f: jax.grad(lambda x, y: (jax.vmap(f, (0, None))(x, y) ** 2).sum(), (0, 1))(ROWS, Y),
    "grad_of_nested_vmap": lambda f: jax.grad(
        lambda x, y: (jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, y) ** 2).sum(), (0, 1)
    )(ROWS, ROWS[:2]),
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1)), (0, None))(ROWS, Y),
    "scan": lambda f: _scan(f, X, Y),
    "while": lambda f: jax.jit(functools.partial(_while, f))(X, Y),
    "cond": lambda f: jax.lax.cond(X[0] > 0, f, lambda x, y: x, X, Y),
    "grad_of_scan": lambda f: jax.grad(lambda x, y: _scan(f, x, y)[1].sum(), (0, 1))(X, Y),
    "vmap_of_scan": lambda f: jax.vmap(functools.partial(_scan, f), (0, None))(ROWS, Y),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda x: (f(x, Y) ** 2).sum()))(X),
    "linear_transpose": lambda f: jax.linear_transpose(lambda x: f(x, Y), X)(X),
    "linear_transpose_vmap": lambda f: jax.linear_transpose(lambda y: jax.vmap(f, (0, None))(ROWS, y), Y)(ROWS),
    "donated": lambda f: jax.jit(f, donate_argnums=0)(jnp.array(X), Y),
    "compile_time": lambda f: jax.jit(lambda: _constant(f, X, Y))(),
    "disable_jit": lambda f: _disable_jit(f, X, Y),
    "eval_shape": lambda f: np.zeros(jax.eval_shape(jax.vmap(f), ROWS, ROWS).shape),
    "make_jaxpr": lambda f: jax.core.eval_jaxpr(jax.make_jaxpr(f)(X, Y).jaxpr, [], X, Y),
    "shard_map": lambda f: jax.jit(_shard_map(f, (P("d"), P("d")), P("d")))(X, Y),
    "shard_map_eager": lambda f: _shard_map(f, (P("d"), P("d")), P("d"))(X, Y),
    "shard_map_replicated": lambda f: jax.jit(_shard_map(f, (P("d"), P()), P("d")))(X, Y[:2]),
    "shard_map_vmap": lambda f: _shard_map(jax.vmap(f, (0, None)), (P(None, "d"), P("d")), P(None, "d"))(ROWS, Y),
    "shard_map_scan": lambda f: jax.jit(_shard_map(lambda x, y: _scan(f, x, y)[0], (P("d"), P()), P("d")))(X, Y[:2]),
    "grad_of_shard_map": lambda f: jax.grad(
        lambda x, y: (_shard_map(f, (P("d"), P()), P("d"))(x, y) ** 2).sum(), (0, 1)
    )(X, Y[:2]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_op_under_transformations(product, name):
    twin = lambda x, y: jnp.asarray(x) * y
    got, want = TRANSFORMS[name](product), TRANSFORMS[name](twin)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def test_op_shard_map_sums_the_cotangent_of_a_replicated_operand(product):
    if not hasattr(jax, "shard_map"):
        pytest.skip("the grad inside shard_map of jax < 0.6 sums nothing")
    inside = jax.grad(lambda x, y: product(x, y).sum(), 1)
    got = _shard_map(inside, (P("d"), P()), P())(X, Y[:2])
    np.testing.assert_allclose(got, X.reshape(4, 2).sum(0))


def test_op_vmap_runs_the_backend_natively():
    lowered = jax.jit(jax.vmap(_product("numba"))).lower(ROWS, ROWS).as_text()
    assert lowered.count("custom_call") == 1
    assert "while" in jax.jit(jax.vmap(_product("no_batching"))).lower(ROWS, ROWS).as_text()


def _product(backend):
    op = _product_op(backend)
    return lambda x, y: op(x, y, outs=_like)


# -- outs, operands, parameters


@pytest.mark.parametrize(
    "outs",
    [
        Spec((8,), np.float32),
        [Spec((8,), np.float32)],
        (Spec((8,), np.float32),) * 2,
        {"a": Spec((8,), np.float32), "b": [Spec((2, 3), np.int32), Spec((), bool)]},
        jnp.zeros(8),
        lambda x: (x, {"x": x}),
    ],
    ids=["spec", "list", "tuple", "nested", "array", "callable"],
)
def test_op_returns_the_structure_of_outs(outs):
    op = xk.XLACustomKernel("zeros")
    op.def_kernel("jax", "cpu", lambda outs: lambda x: [jnp.zeros(s.shape, s.dtype) for s in outs])
    want = outs(Spec((8,), np.float32)) if callable(outs) else outs
    for call in (op, jax.jit(functools.partial(op, outs=outs)), jax.disable_jit()(functools.partial(op, outs=outs))):
        got = call(X, outs=outs) if call is op else call(X)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert jax.tree.map(lambda s: (s.shape, s.dtype), got) == jax.tree.map(lambda s: (s.shape, s.dtype), want)


@pytest.mark.parametrize(
    "results",
    [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"a": x}, lambda x: np.asarray([1.0, 2.0], np.float32)],
    ids=["bare", "tuple", "list", "dict", "numpy"],
)
def test_op_accepts_any_container_of_results(results):
    op = xk.XLACustomKernel("any")
    op.def_kernel("jax", "cpu", lambda outs: results)
    assert op(X[:2], outs=Spec((2,), np.float32)).shape == (2,)


class _WithDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class _WithJaxArray:
    def __jax_array__(self):
        return jnp.asarray(X)


@pytest.mark.parametrize(
    "x",
    [
        X,
        jnp.asarray(X),
        next(iter(X)),
        3.0,
        2,
        True,
        np.float32(2),
        np.array(2.0),
        _WithDlpack(jnp.asarray(X)),
        _WithJaxArray(),
    ],
    ids=["numpy", "jax", "scalar", "float", "int", "bool", "np_scalar", "0d", "dlpack", "jax_array"],
)
def test_op_operands(x):
    op = xk.XLACustomKernel("double")
    op.def_kernel("jax", "cpu", lambda: lambda x: x + x)
    want = np.asarray(x.__jax_array__() if hasattr(x, "__jax_array__") else getattr(x, "array", x))
    outs = lambda x: x
    if want.dtype == bool:
        want, outs = want.astype(np.float32), lambda x: Spec(x.shape, np.float32)
        op.def_kernel("jax", "cpu", lambda: lambda x: x.astype(np.float32) * 2)
    np.testing.assert_allclose(op(x, outs=outs), want + want)
    np.testing.assert_allclose(jax.jit(lambda: op(x, outs=outs))(), want + want)


def test_op_without_operands():
    op = xk.XLACustomKernel("seven")
    op.def_kernel("jax", "cpu", lambda outs: lambda: jnp.full(outs[0].shape, 7.0, outs[0].dtype))
    outs = Spec((2,), np.float32)
    assert op(outs=outs).tolist() == jax.jit(lambda: op(outs=outs))().tolist() == [7.0, 7.0]


@pytest.mark.parametrize("jit", [False, True])
def test_op_tells_equal_parameters_of_different_types_apart(jit):
    op = xk.XLACustomKernel("type")
    op.def_kernel("jax", "cpu", lambda k: lambda x: x + len(repr(k)))
    f = lambda x: [op(x, outs=x, k=k) - x for k in (1, 1.0, True, (1,), (1.0,), 0.0, -0.0, np.float32(1))]
    got = [int(y[0]) for y in (jax.jit(f) if jit else f)(jnp.asarray(X))]
    assert got == [len(repr(k)) for k in (1, 1.0, True, (1,), (1.0,), 0.0, -0.0, np.float32(1))]


def test_op_follows_jax_enable_x64():
    op = xk.XLACustomKernel("wide")
    op.def_kernel("jax", "cpu", lambda: lambda x: x)
    outs = Spec((2,), np.float64)
    with pytest.warns(UserWarning, match="float64"):
        assert op(np.ones(2), outs=outs).dtype == np.float32
    jax.config.update("jax_enable_x64", True)
    try:
        assert op(np.ones(2), outs=outs).dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)


# -- registration and dispatch


def _constant_op(**kernels):
    op = xk.XLACustomKernel("constant")
    for backend, value in kernels.items():
        op.def_kernel(backend, "cpu", _adds(value))
    return op


def _adds(value):
    return lambda: lambda x: x + value


def _zero_plus(op, **options):
    return float(op(0.0, outs=Spec((), np.float32), **options))


def test_op_first_backend_is_the_default_and_others_can_be_chosen():
    op = _constant_op(a=1, b=2)
    assert (op.defaults, op.get_default("cpu"), op.available_backends("cpu")) == ({"cpu": "a"}, "a", ["a", "b"])
    assert _zero_plus(op) == 1 and _zero_plus(op, backend="b") == 2
    op.def_kernel("c", "cpu", _adds(3), asdefault=True)
    assert _zero_plus(op) == 3 and op.get_default("cpu") == "c"
    assert op.get_default("tpu") is None and op.available_backends("tpu") == []
    entry = op._kernels["cpu"]["a"]
    assert (entry.backend, entry.platform, entry.kernel_generator()(1)) == ("a", "cpu", 2)


CHANGES = {
    "set_default": (lambda op: op.set_default("cpu", "b"), 2),
    "registered_again": (lambda op: op.def_kernel("a", "cpu", _adds(5)), 5),
    "asdefault": (lambda op: op.def_kernel("c", "cpu", _adds(3), asdefault=True), 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_op_change_reaches_warm_functions(change):
    op = _constant_op(a=1, b=2)
    spec = Spec((), np.float32)
    calls = {
        "eager": lambda: op(0.0, outs=spec),
        "jit": jax.jit(lambda: op(0.0, outs=spec)),
        "vmap": jax.jit(lambda: jax.vmap(lambda x: op(x, outs=spec))(jnp.zeros(1))[0]),
        "scan": jax.jit(lambda: jax.lax.scan(lambda c, _: (op(c, outs=spec), None), 0.0, None, length=1)[0]),
    }
    assert {name: float(call()) for name, call in calls.items()} == dict.fromkeys(calls, 1.0)
    apply, want = CHANGES[change]
    apply(op)
    assert {name: float(call()) for name, call in calls.items()} == dict.fromkeys(calls, float(want))


@pytest.mark.parametrize(
    ("lowered", "change", "clears"),
    [
        ({}, lambda op: op.set_default("cpu", "b"), 1),
        ({}, lambda op: op.set_default("cpu", "a"), 0),
        ({}, lambda op: op.def_kernel("c", "cpu", _adds(3)), 0),
        ({}, lambda op: op.def_kernel("a", "gpu", _adds(3)), 0),
        ({}, lambda op: op.def_kernel("b", "cpu", _adds(3)), 0),
        ({"backend": "b"}, lambda op: op.def_kernel("b", "cpu", _adds(3)), 1),
        ({"backend": "b"}, lambda op: op.set_default("cpu", "b"), 0),
        (None, lambda op: op.set_default("cpu", "b"), 0),
    ],
    ids=["new_default", "same", "another", "gpu", "b_unused", "b_used", "explicit", "never_called"],
)
def test_op_clears_caches_only_when_it_must(monkeypatch, lowered, change, clears):
    op, other = _constant_op(a=1, b=2), _constant_op(a=1, b=2)
    _zero_plus(other)
    if lowered is not None:
        _zero_plus(op, **lowered)
    count = []
    monkeypatch.setattr(jax, "clear_caches", lambda: count.append(1))
    change(op)
    assert len(count) == clears


def test_op_warp_serves_the_cpu_only_where_nothing_else_does():
    op = xk.XLACustomKernel("warp")
    op.def_warp_kernel(_adds(1), asdefault=True)
    assert op.defaults == {"gpu": "warp", "cpu": "warp"} and _zero_plus(op) == 1
    op.def_numba_kernel(_adds(2))
    assert op.defaults == {"gpu": "warp", "cpu": "numba"}
    assert _zero_plus(op) == 2 and _zero_plus(op, backend="warp") == 1
    op.set_default("cpu", "warp")
    op.def_kernel("jax", "cpu", _adds(3))
    assert _zero_plus(op) == 1


SHORTHANDS = {
    "def_numba_kernel": ("cpu", "numba", ()),
    "def_warp_kernel": ("gpu", "warp", ()),
    "def_numba_cuda_kernel": ("gpu", "numba_cuda", ()),
    "def_pallas_kernel": ("tpu", "pallas", ("tpu",)),
    "def_triton_kernel": ("gpu", "triton", ()),
    "def_cuda_raw_kernel": ("gpu", "cuda_raw", ()),
    "def_kernel": ("gpu", "mine", ("mine", "cuda")),
}


@pytest.mark.parametrize("name", SHORTHANDS)
def test_op_shorthands_and_decorators(name):
    platform, backend, args = SHORTHANDS[name]
    op, kg = xk.XLACustomKernel("op"), _adds(1)
    define = getattr(op, name)
    assert define(*args, kg) is kg and op.defaults[platform] == backend
    op.def_kernel("first", platform, kg, asdefault=True)
    assert define(*args)(kg) is kg and op.defaults[platform] == "first"
    assert define(*args, asdefault=True)(kg) is kg and op.defaults[platform] == backend
    assert op._kernels[platform][backend].kernel_generator() is not None


@pytest.mark.parametrize(
    ("platforms", "adds"),
    [(("cpu",), ["1.0"]), (("cuda",), ["2.0"]), (("tpu",), ["3.0"]), (("cpu", "cuda", "tpu"), ["1.0", "2.0", "3.0"])],
    ids=lambda v: "+".join(v),
)
def test_op_platform_is_that_of_the_lowering(platforms, adds):
    op = xk.XLACustomKernel("where")
    for i, platform in enumerate(("cpu", "gpu", "tpu")):
        op.def_kernel("jax", platform, _adds(1.0 + i))
    f = jax.jit(lambda x: op(x, outs=x))
    text = f.trace(X).lower(lowering_platforms=platforms).as_text()
    assert [v for v in ("1.0", "2.0", "3.0") if f"dense<{v}" in text] == adds


def test_op_names_may_repeat_and_ops_share_nothing():
    first, second = _constant_op(a=1), _constant_op(a=2)
    first.def_jvp_rule2(lambda t, x: 10 * t)
    second.def_jvp_rule2(lambda t, x: 20 * t)
    f = jax.jit(lambda x: (first(x, outs=x), second(x, outs=x)))
    assert [float(y) for y in f(0.0)] == [1.0, 2.0]
    assert [float(t) for t in jax.jvp(f, (0.0,), (1.0,))[1]] == [10.0, 20.0]


def test_op_repr():
    op = _constant_op(a=1, b=2)
    op.def_kernel("c", "gpu", _adds(1))
    assert repr(op) == "XLACustomKernel('constant')\n  cpu: a (default), b\n  gpu: c (default)"
    op.def_jvp_rule2(None)
    op.def_batching_rule(lambda args, axes: (args, axes))
    op.def_sharding_rule("->")
    assert repr(op).endswith("\n  rules: batching, jvp, sharding")
    op.register_general_batching()
    assert repr(op).endswith("\n  rules: jvp, sharding")


def test_op_doc_tags_and_call():
    op = xk.XLACustomKernel("op", doc="Adds one.")
    assert op.__doc__ == "Adds one."
    op.def_tags("csr", "binary")
    assert op._tags == {"csr", "binary"}
    with pytest.raises(ValueError, match="no call function"):
        op.call(1)
    op.def_call(lambda x, backend=None: (x, backend))
    assert op.call(1, backend="numba") == (1, "numba")


# -- ready kernels


@numba.njit
def _ready_add(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y[i]


def _generator_of_ready(outs):
    return _ready_add


@pytest.mark.parametrize(
    "kernel",
    [_ready_add, xk.numba_kernel(_ready_add, _like), _generator_of_ready],
    ids=["dispatcher", "wrapper", "generator_of_dispatcher"],
)
def test_op_takes_ready_kernels(kernel):
    op = xk.XLACustomKernel("add")
    assert op.def_numba_kernel(kernel) is kernel
    np.testing.assert_allclose(op(X, Y, outs=_like), X + Y)
    np.testing.assert_allclose(op(X, Y, outs=[Spec(X.shape, X.dtype)])[0], X + Y)
    np.testing.assert_allclose(jax.vmap(lambda x: op(x, Y, outs=_like))(ROWS), ROWS + Y)


def test_op_ready_kernel_with_options():
    @numba.njit
    def accumulate(total, x, out):
        for i in range(x.size):
            out[i] += x[i]

    op = xk.XLACustomKernel("accumulate")
    op.def_numba_kernel(input_output_aliases={0: 0})(accumulate)
    np.testing.assert_allclose(op(X, Y, outs=_like), X + Y)


@pytest.mark.parametrize("package", ["numba", "numba_cuda", "warp"])
@pytest.mark.parametrize("name", ["CUDADispatcher", "FakeCUDAKernel", "Dispatcher", "Kernel"])
def test_op_knows_ready_kernels_by_their_class(package, name):
    expected = {
        "numba": {"CUDADispatcher": "numba_cuda", "FakeCUDAKernel": "numba_cuda", "Dispatcher": "numba"},
        "numba_cuda": {"CUDADispatcher": "numba_cuda", "FakeCUDAKernel": "numba_cuda"},
        "warp": {"Kernel": "warp"},
    }
    base = type(name, (), {"__module__": f"{package}.somewhere"})
    kernel = type("Derived", (base,), {"__module__": "mine"})()
    assert xk._ready_kind(kernel) == expected[package].get(name)


def test_op_registration_imports_no_backend():
    code = """if True:
        import sys, xla_kernels as xk
        op = xk.XLACustomKernel("f")
        for define in (op.def_numba_kernel, op.def_warp_kernel, op.def_numba_cuda_kernel):
            define(lambda outs: lambda x: x)
        op.def_jvp_rule2(None)
        print(sorted({"numba", "warp", "numba_cuda", "cupy", "torch"} & set(sys.modules)))
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- errors


def _raises():
    raise KeyError("boom")


def _broken_op():
    op = xk.XLACustomKernel("broken")
    for backend, kg in {
        "two": lambda: lambda x: (x, x),
        "none": lambda: lambda x: None,
        "shape": lambda: lambda x: jnp.zeros(2),
        "dtype": lambda: lambda x: x.astype(np.int32),
        "generator": _raises,
        "kernel": lambda: lambda x: _raises(),
        "nothing": lambda: None,
    }.items():
        op.def_kernel(backend, "cpu", kg)
    op.def_kernel("far", "gpu", _adds(1))
    op.def_numba_kernel(_ready_add)
    return op


_RETURNED = (
    "XLACustomKernel 'broken': the kernel of backend '{}' for platform 'cpu' returned ({}), "
    "but outs declares (float32[8]). Return as many arrays as outs has, each of the declared shape and dtype"
)
_RAISED = "XLACustomKernel 'broken': the kernel of backend '{}' for platform 'cpu' raised {} (other backends registered"
OP_ERRORS: dict = {
    "two": ({"backend": "two"}, ValueError, _RETURNED.format("two", "float32[8], float32[8]")),
    "none": ({"backend": "none"}, ValueError, _RETURNED.format("none", "")),
    "shape": ({"backend": "shape"}, ValueError, _RETURNED.format("shape", "float32[2]")),
    "dtype": ({"backend": "dtype"}, ValueError, _RETURNED.format("dtype", "int32[8]")),
    "generator": ({"backend": "generator"}, RuntimeError, _RAISED.format("generator", "KeyError: 'boom'")),
    "kernel": ({"backend": "kernel"}, RuntimeError, _RAISED.format("kernel", "KeyError: 'boom'")),
    "nothing": ({"backend": "nothing"}, RuntimeError, "the generator must return the function to trace, got None"),
    "unknown": (
        {"backend": "nmba"},
        ValueError,
        "XLACustomKernel 'broken' has no backend 'nmba'; registered: cpu: two, none, shape, dtype, generator, kernel, "
        "nothing, numba; gpu: far. Use one of these, or backend=None for the default; register a new one with "
        "def_kernel('nmba', 'cpu', ...)",
    ),
    "elsewhere": ({"backend": "far"}, ValueError, "'broken' has no backend 'far' for platform 'cpu'; registered: cpu:"),
    "empty": ({"backend": ""}, ValueError, "has no backend ''; registered: cpu: two"),
    "number": ({"backend": 3}, TypeError, "XLACustomKernel 'broken': backend must be a string or None, got 3"),
    "list": (
        {"backend": "two", "alpha": [1, 2]},
        TypeError,
        "XLACustomKernel 'broken': parameter 'alpha' must be hashable, got [1, 2] of type list. Pass a number or a "
        "tuple, or pass the array as an operand",
    ),
    "array": ({"backend": "two", "alpha": np.ones(2)}, TypeError, "parameter 'alpha' must be hashable"),
    "ready": (
        {"backend": "numba", "alpha": 2},
        RuntimeError,
        "static parameters ('alpha') need a generator, but the numba kernel of XLACustomKernel 'broken' was registered "
        "ready. Register a function of the parameters that returns the kernel, or pass the values as operands",
    ),
    "signature": ({"backend": "two", "alpha": 2}, RuntimeError, "unexpected keyword argument 'alpha'"),
    "reserved": ({"backend": "two", "_batch": ()}, TypeError, "the parameter name '_batch' is reserved"),
    "outs": (
        {"backend": "two", "outs": (8,)},
        TypeError,
        "XLACustomKernel 'broken': outs must be specs with .shape and .dtype",
    ),
}


@pytest.mark.parametrize("how", ["eager", "jit", "trace", "vmap"])
@pytest.mark.parametrize("name", OP_ERRORS)
def test_op_errors(name, how):
    options, kind, text = OP_ERRORS[name]
    op = _broken_op()
    call = functools.partial(op, **{"outs": Spec((8,), np.float32), **options})
    run = {"eager": call, "jit": jax.jit(call), "trace": jax.make_jaxpr(call), "vmap": jax.vmap(call)}[how]
    with pytest.raises(kind) as raised:
        run(np.stack([X, X]) if how == "vmap" else X)
    assert text in str(raised.value)
    if name in ("generator", "kernel"):
        assert isinstance(_root_cause(raised.value), KeyError)


def _root_cause(error):
    """The exception at the end of the chain, leaving out the tracebacks that jax inserts."""
    found = error
    while error is not None:
        found = error if "Traceback" not in type(error).__name__ else found
        error = error.__cause__
    return found if not isinstance(found, RuntimeError) else found.__context__


def test_op_traced_parameter():
    op = xk.XLACustomKernel("axpy")
    op.def_kernel("jax", "cpu", lambda alpha: lambda x: alpha * x)
    f = lambda x, alpha: op(x, outs=x, alpha=alpha)
    with pytest.raises(
        TypeError, match=r"'axpy': parameter 'alpha' is traced .* jax.jit\(..., static_argnames='alpha'\)"
    ):
        jax.jit(f)(X, 2.0)
    np.testing.assert_allclose(jax.jit(f, static_argnames="alpha")(X, alpha=2.0), 2 * X)


def test_op_no_kernel_for_the_platform():
    op = xk.XLACustomKernel("gpu_only")
    with pytest.raises(NotImplementedError, match="no kernel for platform 'cpu'; registered: nothing"):
        op(X, outs=X)
    op.def_kernel("jax", "gpu", _adds(1))
    for f in (op, jax.jit(op, static_argnames="outs")):
        with pytest.raises(
            NotImplementedError, match=r"'gpu_only' has no kernel for platform 'cpu'; registered: gpu: jax. Register"
        ):
            f(X, outs=Spec(X.shape, X.dtype))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda op: op.def_kernel(1, "cpu", _adds(1)), TypeError, "backend must be a string"),
        (lambda op: op.def_kernel("a", 1, _adds(1)), TypeError, "platform must be a string"),
        (lambda op: op.def_kernel("", "cpu", _adds(1)), ValueError, "backend must not be empty"),
        (
            lambda op: op.def_kernel("a", "cpu", "kernel"),
            TypeError,
            "must be callable (a generator, or a Numba, Numba CUDA",
        ),
        (
            lambda op: op.def_kernel("a", "cpu", _adds(1), grid=3),
            TypeError,
            "grid can be given with a ready kernel only",
        ),
        (
            lambda op: op.def_pallas_kernel("gpus", _adds(1)),
            ValueError,
            "platform must be 'gpu', 'tpu' or 'cpu', got 'gpus'",
        ),
        (
            lambda op: op.set_default("cpu", "c"),
            ValueError,
            "has no backend 'c' for platform 'cpu'; registered: cpu: a",
        ),
        (lambda op: op.def_vjp_rule(None, _like), TypeError, "def_vjp_rule: a rule must be callable, got None"),
        (lambda op: op.def_jvp_rule2(3), TypeError, "defjvp: a rule must be callable, got 3"),
        (lambda op: xk.defjvp(3), TypeError, "expected an XLACustomKernel or a jax Primitive, got 3"),
        (lambda op: op.def_sharding_rule("i, i"), ValueError, "got 'i, i'"),
        (lambda op: op.def_sharding_rule("... i -> i"), ValueError, "got '... i -> i'"),
        (lambda op: op.def_sharding_rule("i i -> i"), ValueError, "occurs twice in one array: 'i i -> i'"),
        (lambda op: op([1.0], outs=X), TypeError, "input 0 must be an array or a number"),
        (
            lambda op: jax.grad(lambda x: op(x, outs=x))(1.0),
            NotImplementedError,
            "'constant' has no derivative: define one",
        ),
        (lambda op: jax.linear_transpose(lambda x: op(x, outs=x), 1.0)(1.0), NotImplementedError, "has no transpose"),
    ],
)
def test_op_misuse(call, kind, text):
    with pytest.raises(kind) as raised:
        call(_constant_op(a=1))
    assert text in str(raised.value)


# -- derivatives


def _sin_cos_op():
    """Two outputs of two dtypes: sin(a x) and, as integers, the signs."""
    op = xk.XLACustomKernel("sine")
    op.def_kernel("jax", "cpu", lambda outs, a: lambda x, n: (jnp.sin(a * x), jnp.sign(x).astype(np.int32) * n))
    return op, lambda x, n=np.int32(1), a=2.0: op(x, n, outs=(x, Spec(x.shape, np.int32)), a=a)


RULES = {
    "jvp": lambda op: op.def_jvp_rule(
        lambda primals, tangents, outs, a: (
            op.primitive.bind(*primals, outs=outs, a=a),
            [a * jnp.cos(a * primals[0]) * tangents[0], None],
        )
    ),
    "jvp2": lambda op: op.def_jvp_rule2(lambda t, x, n, a: (a * jnp.cos(a * x) * t, None), None),
    "jvp2_kwargs": lambda op: op.def_jvp_rule2(lambda t, x, n, **kw: [kw["a"] * jnp.cos(kw["a"] * x) * t, 0 * n], None),
    "vjp": lambda op: op.def_vjp_rule(
        lambda x, n, outs, a: (op(x, n, outs=outs, a=a), x), lambda x, ct, a: (a * jnp.cos(a * x) * ct[0], None)
    ),
}


@pytest.mark.parametrize("how", ["grad", "jit_grad", "vmap_grad", "grad_vmap", "jvp", "second", "scan"])
@pytest.mark.parametrize("rule", RULES)
def test_op_derivative_rules(rule, how):
    if rule == "vjp" and how == "jvp":
        pytest.skip("a vjp rule has no forward mode")
    op, f = _sin_cos_op()
    RULES[rule](op)
    twin = lambda x, n=1, a=2.0: (jnp.sin(a * x), jnp.sign(x).astype(np.int32) * n)

    def run(f):
        loss = lambda x: (f(x)[0] ** 2).sum()
        return {
            "grad": lambda: jax.grad(loss)(X),
            "jit_grad": lambda: jax.jit(jax.value_and_grad(loss))(X),
            "vmap_grad": lambda: jax.vmap(jax.grad(loss))(ROWS),
            "grad_vmap": lambda: jax.grad(lambda x: (jax.vmap(f)(x)[0] ** 2).sum())(ROWS),
            "jvp": lambda: jax.jvp(lambda x: f(x)[0], (X,), (Y,)),
            "second": lambda: jax.grad(lambda x: jax.grad(loss)(x).sum())(X),
            "scan": lambda: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c)[0], None), x, None, length=3)[0].sum())(
                X
            ),
        }[how]()

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), run(f), run(twin))


def test_op_derivative_agrees_with_finite_differences():
    op, f = _sin_cos_op()
    RULES["jvp2"](op)
    check_grads(lambda x: f(x)[0], (X,), order=2, modes=("fwd", "rev"), rtol=1e-2, atol=1e-2)


def test_op_jvp_rules_see_no_zero_tangents():
    op, seen = xk.XLACustomKernel("seen"), []
    op.def_kernel("jax", "cpu", lambda: lambda x, y: x * y)
    op.def_jvp_rule2(lambda t, x, y: seen.append("x") or t * y, lambda t, x, y: seen.append("y") or x * t)
    jax.jvp(lambda x: op(x, Y, outs=x), (X,), (X,))
    jax.grad(lambda y: op(X, y, outs=y).sum())(Y)
    assert seen == ["x", "y"]


def test_op_output_without_tangent_stays_symbolic():
    op = _constant_op(a=1)
    op.def_jvp_rule2(None)
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(lambda x: op(x, outs=x) * 2, (x,), (t,)))(1.0, 1.0)
    assert str(jaxpr).count("mul") == 1


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([lambda t, x, y: t], "'product' was given 1 jvp rules, but it has 2 operands"),
        ([None] * 3, "'product' was given 3 jvp rules, but it has 2 operands"),
        ([lambda t, x, y: (t, t), None], "operand 0 returned 2 tangents for 1 outputs"),
        ([lambda t, x, y: t[:2], None], "operand 0 returned float32[2] for an output float32[8]"),
        ([lambda t, x, y: t.astype(np.float16), None], "operand 0 returned float16[8] for an output float32[8]"),
    ],
    ids=["few", "many", "two", "shape", "dtype"],
)
@pytest.mark.parametrize("vmap", [False, True])
def test_op_jvp_rule_errors(rules, text, vmap):
    op = _product_op()
    op.def_jvp_rule2(*rules)
    f = lambda x: op(x, Y, outs=x)
    with pytest.raises(ValueError) as raised:
        jax.jvp(jax.vmap(f) if vmap else f, (ROWS if vmap else X,), (ROWS if vmap else X,))
    assert text in str(raised.value)


def test_op_transpose_and_vjp_rules_count_their_cotangents():
    op = _product_op()
    op.def_transpose_rule(lambda ct, x, y: ct)
    with pytest.raises(
        ValueError, match="transpose rule of XLACustomKernel 'product' returned 1 cotangents for 2 operands"
    ):
        jax.linear_transpose(lambda x: op(x, Y, outs=x), X)(X)
    op.def_vjp_rule(lambda x, y, outs: (op(x, y, outs=outs[0]), None), lambda res, ct: ct)
    with pytest.raises(ValueError, match="vjp rule of XLACustomKernel 'product' returned 1 cotangents for 2 operands"):
        jax.grad(lambda x: op(x, Y, outs=x).sum())(X)


def test_op_vjp_rule_structures():
    op = xk.XLACustomKernel("both")
    op.def_kernel("jax", "cpu", lambda: lambda x, i: (2 * x, 3 * x))
    outs = lambda x, i: {"a": x, "b": x}
    op.def_vjp_rule(lambda x, i: (op(x, i, outs=outs), ()), lambda _, ct: [2 * ct["a"] + 3 * ct["b"], None])
    loss = lambda x, i: (lambda r: (r["a"] * r["b"]).sum())(op(x, i, outs=outs))
    np.testing.assert_allclose(jax.grad(loss)(X, np.int32(1)), 12 * X)
    np.testing.assert_allclose(jax.grad(lambda x: jax.vmap(loss, (0, None))(x, np.int32(1)).sum())(ROWS), 12 * ROWS)


def test_op_rule_defined_later_reaches_warm_functions():
    op = _constant_op(a=1)
    op.def_jvp_rule2(lambda t, x: t)
    g = jax.jit(jax.grad(lambda x: op(x, outs=x)))
    assert float(g(0.0)) == 1.0
    op.def_vjp_rule(lambda x, outs: (op(x, outs=outs[0]), None), lambda _, ct: 5 * ct)
    assert float(g(0.0)) == 5.0


def test_defjvp_and_general_batching_rule_take_foreign_primitives():
    single, double = xk.Primitive("single"), xk.Primitive("double")
    double.multiple_results = True
    for primitive, f in ((single, lambda x: x * x), (double, lambda x: (x * x, x))):
        primitive.def_impl(f)
        primitive.def_abstract_eval(lambda x, p=primitive: [x, x] if p.multiple_results else x)
        mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=primitive.multiple_results))
        batching.primitive_batchers[primitive] = functools.partial(xk.general_batching_rule, primitive)
    xk.defjvp(single, lambda t, x: 2 * x * t)
    xk.defjvp(double, lambda t, x: (2 * x * t, t))
    np.testing.assert_allclose(jax.jvp(single.bind, (X,), (Y,))[1], 2 * X * Y)
    np.testing.assert_allclose(jax.jvp(double.bind, (X,), (Y,))[1][1], Y)
    np.testing.assert_allclose(jax.vmap(single.bind, 1)(ROWS.T), ROWS * ROWS)
    assert xk.general_batching_rule(lambda x: (x, x), (X,), (None,))[1] == (None, None)


# -- batching overrides


def test_op_batching_rules_as_brainevent_writes_them():
    mv, mm = xk.XLACustomKernel("mv"), xk.XLACustomKernel("mm")
    for op in (mv, mm):
        op.def_kernel("jax", "cpu", lambda **kw: lambda a, v: (a @ v * kw["scale"],))
    seen = []

    def rule(args, axes, **kwargs):
        seen.append(tuple(axes))
        if tuple(axes) == (None, 0):
            a, v = args
            outs = (Spec((a.shape[0], v.shape[0]), v.dtype),)
            return mm(a, v.T, outs=outs, backend=kwargs["backend"], scale=kwargs["scale"]), [1]
        return xk.general_batching_rule(mv, args, axes, **kwargs)

    mv.def_batching_rule(rule)
    matrix = ROWS @ ROWS.T
    f = lambda a, v: mv(a, v, outs=[Spec((3,), np.float32)], scale=2.0)[0]
    np.testing.assert_allclose(jax.vmap(f, (None, 0))(matrix, matrix), 2 * matrix @ matrix.T, rtol=1e-5)
    np.testing.assert_allclose(
        jax.vmap(f, (0, None))(np.stack([matrix] * 2), matrix[0])[1], 2 * matrix @ matrix[0], rtol=1e-5
    )
    nested = jax.vmap(jax.vmap(f, (0, None)), (None, 0))(np.stack([matrix] * 2), matrix)
    np.testing.assert_allclose(nested[1, 0], 2 * matrix @ matrix[1], rtol=1e-5)
    assert seen == [(None, 0), (0, None), (0, None)]
    mv.register_general_batching()
    np.testing.assert_allclose(jax.vmap(f, (None, 0))(matrix, matrix), 2 * matrix @ matrix.T, rtol=1e-5)
    assert len(seen) == 3


def test_op_rules_can_be_called_and_primitives_bound_as_brainevent_does():
    op = _product_op()
    op.def_transpose_rule(lambda ct, x, y, **kw: (ct[0], x))
    x = ad.UndefinedPrimal(xk._typeof(jnp.asarray(X)))
    assert ad.primitive_transposes[op.primitive]([Y], x, Y, backend=None)[0] is Y
    (out,) = op.primitive.bind(X, Y, outs=(Spec(X.shape, X.dtype),), backend=None)
    np.testing.assert_allclose(out, X * Y)


# -- sharding, export, threads, benchmark


def _mesh_sharding(*spec):
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",)), P(*spec))


SHARDED = {
    "elementwise": ("i, i -> i", lambda f: f, [("d",), ("d",)], ("d",)),
    "operand_replicated": ("i, i -> i", lambda f: f, [("d",), ()], ("d",)),
    "vmap": ("i, i -> i", lambda f: jax.vmap(f, (0, None)), [("d", None), (None,)], ("d", None)),
    "vmap_inside": ("i, i -> i", lambda f: jax.vmap(f), [(None, "d"), (None, "d")], (None, "d")),
}


@pytest.mark.parametrize("backend", ["jax", "numba"])
@pytest.mark.parametrize("name", SHARDED)
def test_op_sharding_rule_partitions_without_gather(name, backend):
    rule, transform, in_specs, out_spec = SHARDED[name]
    op, shapes = xk.XLACustomKernel("product"), []
    op.def_kernel(backend, "cpu", lambda outs: shapes.append(outs[0].shape) or OP_BACKENDS[backend](outs))
    op.def_sharding_rule(rule)
    shape = (8, 16)
    args = [np.arange(1.0, 129.0, dtype=np.float32).reshape(shape)] * 2
    args = [
        a if len(spec) == 2 or name in ("elementwise", "operand_replicated") else a[0]
        for a, spec in zip(args, in_specs)
    ]
    if name in ("elementwise", "operand_replicated"):
        args = [a[0] for a in args]
    f = transform(lambda x, y: op(x, y, outs=x))
    placed = [jax.device_put(a, _mesh_sharding(*spec)) for a, spec in zip(args, in_specs)]
    compiled = jax.jit(f).lower(*placed).compile()
    got = compiled(*placed)
    np.testing.assert_allclose(got, args[0] * args[1])
    assert "all-gather" not in compiled.as_text()
    assert got.sharding.is_equivalent_to(_mesh_sharding(*out_spec), got.ndim)
    assert shapes[-1] == ((16,) if name == "vmap" else (4,))
    assert got.addressable_shards[0].data.shape == tuple(n // 4 if s else n for n, s in zip(got.shape, out_spec))


def test_op_sharding_rule_gathers_what_is_reduced():
    op = xk.XLACustomKernel("matvec")
    op.def_kernel("jax", "cpu", lambda: lambda a, v: a @ v)
    op.def_sharding_rule("i j, j -> i")
    a = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    f = jax.jit(lambda a, v: op(a, v, outs=lambda a, v: Spec(a.shape[:1], a.dtype)))
    for spec in (("d",), (None, "d"), ()):
        got = f(jax.device_put(a, _mesh_sharding(*spec)), jax.device_put(X, _mesh_sharding("d")))
        np.testing.assert_allclose(got, a @ X)
    uneven = jax.device_put(a[:6], _mesh_sharding())
    np.testing.assert_allclose(f(uneven, X), a[:6] @ X)


def test_op_sharding_rule_composes():
    op = _product_op()
    op.def_sharding_rule("i, i -> i")
    f = lambda x, y: op(x, y, outs=x)
    x, y = (jax.device_put(v, _mesh_sharding("d")) for v in (X, Y))
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x, y: (f(x, y) ** 2).sum()))(x, y), 2 * X * Y * Y, rtol=1e-6)
    np.testing.assert_allclose(_shard_map(f, (P("d"), P("d")), P("d"))(X, Y), X * Y)
    np.testing.assert_allclose(jax.jit(f)(X, Y), X * Y)
    with pytest.raises(
        ValueError, match=r"'i, i -> i' is for operands of ranks \[1, 1\], but the call has operands of ranks \[2, 2\]"
    ):
        f(ROWS, ROWS)


def test_op_export():
    export = pytest.importorskip("jax.export")
    op = xk.XLACustomKernel("exported")
    op.def_kernel("jax", "cpu", _adds(1))
    op.def_kernel("jax", "gpu", _adds(2))
    f = jax.jit(jax.vmap(lambda x: op(x, outs=x)))
    exported = export.export(f, platforms=("cpu", "cuda"))(Spec((4,), np.float32))
    assert exported.call(X[:4]).tolist() == (X[:4] + 1).tolist()


def test_op_in_threads():
    def work(i):
        op = _constant_op(a=i, b=-i)
        results = [_zero_plus(op, backend=b) for b in ("a", "b", None) for _ in range(20)]
        op.def_jvp_rule2(lambda t, x: i * t)
        return [*results, float(jax.jit(jax.grad(lambda x: op(x, outs=x)))(0.0))]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(work, range(16)))
    assert found == [[float(i)] * 20 + [float(-i)] * 20 + [float(i)] * 21 for i in range(16)]


def test_op_threads_share_one_op():
    op = xk.XLACustomKernel("shared")
    op.def_kernel("jax", "cpu", lambda k: lambda x: x + k)
    f = lambda i: [float(op(0.0, outs=Spec((), np.float32), k=k)) for k in range(30)]
    with ThreadPoolExecutor(16) as pool:
        assert all(found == list(map(float, range(30))) for found in pool.map(f, range(16)))


def test_op_caches_are_bounded():
    op = xk.XLACustomKernel("many")
    op.def_kernel("jax", "cpu", lambda k: lambda x: x)
    for k in range(xk._MAX_EAGER_CALLS + 10):
        op._new_call((k,), Spec((), np.float32), None, {"k": k})
    assert len(op._calls) == xk._MAX_EAGER_CALLS


def test_op_benchmark_compares_backends():
    op = _constant_op(a=1, b=1.5)
    op.def_kernel("bad", "cpu", _raises)
    op.def_kernel("far", "gpu", _adds(1))
    result = op.benchmark(X, outs=_like)
    assert [row.backend for row in result.rows] == ["a", "b", "bad"]
    a, b, bad = result.rows
    assert a.difference == 0 and b.difference == 0.5 and a.first_ms > 0 and a.median_us > 0 and bad.error
    header, columns, *lines = str(result).splitlines()
    assert header == "constant on cpu" and columns.split() == [
        "backend",
        "first",
        "(ms)",
        "median",
        "(us)",
        "difference",
    ]
    assert len(lines) == 3 and "KeyError" in lines[2]
    with pytest.raises(NotImplementedError, match="no kernel for platform 'cpu'"):
        xk.XLACustomKernel("empty").benchmark(X, outs=_like)


def _microseconds(f, number=2000, repeat=7):
    f()
    return min(timeit.repeat(f, number=number, repeat=repeat)) / number * 1e6


@pytest.mark.bench
def test_op_eager_call_costs_little_more_than_a_jitted_function():
    op, x, spec = _product_op(), jnp.asarray(X), Spec(X.shape, X.dtype)
    f = jax.jit(lambda x, y: x * y)
    assert _microseconds(lambda: op(x, x, outs=spec)) < 2.5 * _microseconds(lambda: f(x, x))


@pytest.mark.bench
def test_op_vmap_costs_what_one_call_on_all_the_data_costs():
    op = xk.XLACustomKernel("add")
    op.def_numba_kernel(_ready_add)
    rows = jnp.ones((1000, 16))
    batched, flat = jax.jit(jax.vmap(lambda x, y: op(x, y, outs=x))), jax.jit(lambda x, y: op(x, y, outs=x))
    slices = _microseconds(lambda: batched(rows, rows).block_until_ready(), 300)
    assert slices < 4 * _microseconds(lambda: flat(rows.ravel(), rows.ravel()).block_until_ready(), 300)


# ======================================================================================================
# Benchmarks: pytest -m bench [--bench-out=PREFIX].  They measure and assert no time.
# Each comparison runs in a process of its own; its paths take turns, round by round.
# ======================================================================================================

ROUNDS = 7


def missing(what, why):
    """Raised by a path that cannot run here; its row says why."""
    raise ImportError(f"{what}: {why}")


def compare(paths, unit="µs", case="", rounds=ROUNDS):
    """Rows of one table: `paths` maps a name to a function that prepares it and returns one that measures once."""
    runs, rows = {}, {}
    for name, prepare in paths.items():
        rows[name] = {"case": case, "path": name, "unit": unit}
        try:
            run = prepare()
            run()
            runs[name] = (run, [])
        except ImportError as error:
            rows[name]["note"] = f"not installed ({error})"
        except Exception as error:
            rows[name]["note"] = f"fails: {type(error).__name__}: {str(error).splitlines()[0]:.100}"
    for _ in range(rounds):
        for run, samples in runs.values():
            samples.append(run())
    for name, (_, samples) in runs.items():
        rows[name].update(summary(samples))
    return with_ratios(list(rows.values()))


def over(paths, measure):
    """`paths` with every function handed to `measure` when its turn to be prepared comes."""
    return {name: functools.partial(measure, make) for name, make in paths.items()}


def summary(samples):
    return {"value": statistics.median(samples), "min": min(samples), "max": max(samples), "rounds": len(samples)}


def with_ratios(rows):
    """How many times the cost of the first path, which is ours."""
    ours = rows[0].get("value")
    return [{**row, "ratio": row["value"] / ours} if ours and "value" in row else row for row in rows]


def timed(function, seconds=0.02):
    """A function that measures one call of `function` in µs, averaged over about `seconds`."""

    def once(calls):
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    once(1)
    calls = max(1, int(seconds / once(2)))
    return lambda: once(calls) * 1e6


def timed_loop(f, x, y, seconds=0.02):
    """A function that measures one `f(x, y)` inside `lax.fori_loop`, in µs."""
    run = jax.jit(lambda x, steps: jax.lax.fori_loop(0, steps, lambda _, a: f(a, y), x), static_argnums=1)

    def once(steps):
        start = time.perf_counter()
        run(x, steps).block_until_ready()
        return (time.perf_counter() - start) / steps

    few = max(1, min(100, int(2e6 / x.size)))
    once(few)
    steps = max(1, int(seconds / once(few)))
    once(steps)
    return lambda: once(steps) * 1e6


# -- one addition, along every path -------------------------------------------------------------------


def add_loop(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y[i]


def add_numba(spec):
    return xk.numba_kernel(numba.njit(add_loop), spec)


def add_numba_cuda(spec):
    from numba import cuda

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = x[i] + y[i]

    return xk.numba_cuda_kernel(add, spec, launch_dims=spec.size)


def warp_add(scale=1):
    import warp as wp

    wp.config.quiet = True

    @wp.kernel(module="unique")
    def add(x: wp.array(dtype=float), y: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = x[i] + y[i] * float(scale)

    return add


def add_warp(spec, scale=1):
    return xk.warp_kernel(warp_add(scale), spec, launch_dims=spec.size)


def add_warp_jax(spec, scale=1):
    call = importlib.import_module("warp").jax_kernel(warp_add(scale))
    return lambda x, y: call(x, y)[0]


def add_op(spec):
    op = xk.XLACustomKernel("bench_add")
    op.def_numba_kernel(numba.njit(add_loop))
    return lambda x, y: op(x, y, outs=spec)


def add_brainevent(spec):
    import brainevent

    call = brainevent.numba_kernel(numba.njit(add_loop), outs=spec, vmap_method="sequential")
    return lambda x, y: jax.tree.leaves(call(x, y))[0]


def add_pure_callback(spec):
    return lambda x, y: jax.pure_callback(np.add, spec, x, y, vmap_method="sequential")


CPP_ADD = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using Array = ffi::Buffer<ffi::F32>;
static ffi::Error Add(Array x, Array y, ffi::Result<Array> out) {
  const float *a = x.typed_data(), *b = y.typed_data();
  float *c = out->typed_data();
  for (size_t i = 0, n = x.element_count(); i < n; ++i) c[i] = a[i] + b[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(add, Add, ffi::Ffi::Bind().Arg<Array>().Arg<Array>().Ret<Array>());
"""


def add_cpp(spec):
    register_cpp_add()
    return jax.ffi.ffi_call("bench_cpp_add", spec, vmap_method="sequential")


@functools.cache
def register_cpp_add():
    compiler = shutil.which("g++") or missing("g++", "no C++ compiler on this machine")
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, "add.cc"), os.path.join(folder, "add.so")
        with open(source, "w") as file:
            file.write(CPP_ADD)
        flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        handler = ctypes.CDLL(library).add
    jax.ffi.register_ffi_target("bench_cpp_add", jax.ffi.pycapsule(handler), platform="cpu")


ADD = {
    "cpu": {
        "numba_kernel": add_numba,
        "warp_kernel": add_warp,
        "XLACustomKernel (Numba)": add_op,
        "C++ FFI handler": add_cpp,
        "brainevent.numba_kernel": add_brainevent,
        "warp.jax_kernel": add_warp_jax,
        "jax.pure_callback": add_pure_callback,
        "jnp.add": lambda spec: jnp.add,
    },
    "gpu": {
        "numba_cuda_kernel": add_numba_cuda,
        "warp_kernel": add_warp,
        "warp.jax_kernel": add_warp_jax,
        "jax.pure_callback": add_pure_callback,
        "jnp.add": lambda spec: jnp.add,
    },
}


def adders(*left_out):
    """The paths of the platform, as functions of the output's spec."""
    paths = {name: make for name, make in ADD[jax.default_backend()].items() if name not in left_out}
    return {name: functools.partial(checked, make) for name, make in paths.items()}


def checked(make, spec):
    """The path for `spec`, after a look at its answer: a fast wrong one is worth no row."""
    f = make(spec)
    x = jnp.arange(spec.size, dtype=spec.dtype)
    np.testing.assert_array_equal(f(x, x), x + x)
    return f


def inputs(size):
    return jnp.ones(size), jnp.full(size, 1e-3), jax.ShapeDtypeStruct((size,), jnp.float32)


# -- the comparisons -----------------------------------------------------------------------------------


def bench_per_call():
    """One 16-element float32 add inside lax.fori_loop"""
    x, y, spec = inputs(16)
    return compare(over(adders(), lambda make: timed_loop(make(spec), x, y)))


def bench_eager():
    """One eager call, 16 elements"""
    x, y, spec = inputs(16)
    paths = over(adders("jnp.add", "jax.pure_callback"), lambda make: timed(functools.partial(make(spec), x, y)))
    jitted = jax.jit(lambda x, y: x + y)
    return compare({**paths, "a jitted x + y": lambda: timed(lambda: jitted(x, y))})


def bench_vmap():
    """vmap over 1,000 slices of 16 elements"""
    x, y, _ = inputs(16_000)
    spec = jax.ShapeDtypeStruct((16,), x.dtype)

    def batched(make):
        call, args = jax.jit(jax.vmap(make(spec))), (x.reshape(1000, 16), y.reshape(1000, 16))
        return timed(lambda: call(*args))

    def at_once(make):
        call = jax.jit(make(jax.ShapeDtypeStruct(x.shape, x.dtype)))
        return timed(lambda: call(x, y))

    paths = adders("jax.pure_callback")
    name, make = next(iter(paths.items()))
    return compare({**over(paths, batched), f"{name}, one call on all the data": lambda: at_once(make)})


def bench_threads():
    """Python threads, each in a jitted loop of 16-element adds: total speed against one thread"""
    return [row for count in (2, 4) for row in compare(over(adders(), scaling(count)), "x", f"{count} threads", 5)]


def scaling(count):
    def prepare(make):
        x, y, spec = inputs(16)
        f = make(spec)
        steps = max(100, int(3e4 / timed_loop(f, x, y)()))
        run = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, a: f(a, y), x))
        pool = ThreadPoolExecutor(count)

        def seconds(threads):
            start = time.perf_counter()
            list(pool.map(lambda _: run(x).block_until_ready(), range(threads)))
            return time.perf_counter() - start

        return lambda: count * seconds(1) / seconds(count)

    return prepare


def bench_first_call():
    """First call of a new kernel"""
    x, y, spec = inputs(16)
    constants = itertools.count(time.time_ns() % 2**20)  # Warp keeps compiled kernels on disk

    def first(make):
        start = time.perf_counter()
        jax.jit(make(next(constants)))(x, y).block_until_ready()
        return (time.perf_counter() - start) * 1e3

    def fresh(constant):
        return numba.njit(lambda x, y, out: add_scaled(x, y, np.float32(constant), out))

    def compile_alone():
        start = time.perf_counter()
        read_only = numba.types.Array(numba.float32, 1, "C", readonly=True)
        fresh(next(constants)).compile((read_only, read_only, numba.float32[::1]))
        return (time.perf_counter() - start) * 1e3

    def ours(constant):
        return xk.numba_kernel(fresh(constant), spec)

    def brainevent_(constant):
        call = importlib.import_module("brainevent").numba_kernel(fresh(constant), outs=spec)
        return lambda x, y: jax.tree.leaves(call(x, y))[0]

    def plain(constant):
        return lambda x, y: x + y * constant

    firsts = {
        "numba_kernel, all of it": ours,
        "warp_kernel": lambda constant: add_warp(spec, constant),
        "brainevent.numba_kernel": brainevent_,
        "warp.jax_kernel": lambda constant: add_warp_jax(spec, constant),
        "a jitted x + y": plain,
    }
    paths = {
        "numba_kernel, on top of Numba and jit": lambda: lambda: first(ours) - compile_alone() - first(plain),
        "Numba's compilation alone": lambda: compile_alone,
    }
    measured = over(firsts, lambda make: functools.partial(first, make))
    return compare({**paths, **measured}, "ms", rounds=5)


@numba.njit
def add_scaled(x, y, scale, out):
    for i in range(x.size):
        out[i] = x[i] + y[i] * scale


def bench_sizes():
    """One add in lax.fori_loop, by size"""
    rows = []
    for size in (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        x, y, spec = inputs(size)
        paths = over(adders("jax.pure_callback"), lambda make: timed_loop(make(spec), x, y, 0.01))
        rows += compare(paths, case=f"{size:,} elements", rounds=5)
    return rows


def scale_loop(x, out):
    for i in range(x.size):
        out[i] = x[i] * np.float32(1.0001)


def scale_prange(x, out):
    for i in numba.prange(x.size):
        out[i] = x[i] * np.float32(1.0001)


def scale_in_place(_, x):
    for i in numba.prange(x.size):
        x[i] *= np.float32(1.0001)


def bench_large():
    """Bandwidth: read an array and write one (8 bytes per element)"""
    return [row for size in (1_000_000, 10_000_000) for row in bandwidths(size)]


def bandwidths(size):
    x, source, target = jnp.ones(size), np.ones(size, np.float32), np.ones(size, np.float32)

    def bandwidth(f):
        once = timed(f)
        return lambda: 8e-3 * size / once()

    def new_memory(kernel, **options):
        f = jax.jit(xk.numba_kernel(numba.njit(**options)(kernel), lambda x: x))
        return lambda: bandwidth(lambda: f(x))

    def in_place(**options):
        def prepare():
            kernel = numba.njit(**options)(scale_in_place)
            f = jax.jit(xk.numba_kernel(kernel, lambda x: x, input_output_aliases={0: 0}), donate_argnums=0)
            state = [jnp.ones(size)]

            def run():
                state[0] = f(state[0])
                return state[0]

            return bandwidth(run)

        return prepare

    def copyto(threads):
        pool = ThreadPoolExecutor(threads)
        parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
        return lambda: bandwidth(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))

    scaled = jax.jit(lambda x: x * np.float32(1.0001))
    paths = {
        "numba_kernel, parallel, in place": in_place(parallel=True),
        "numba_kernel, serial, in place": in_place(),
        "np.copyto": lambda: bandwidth(lambda: np.copyto(target, source)),
        f"np.copyto, {os.cpu_count()} threads": copyto(os.cpu_count()),
        "numba_kernel, parallel, new array": new_memory(scale_prange, parallel=True),
        "numba_kernel, serial, new array": new_memory(scale_loop),
        "x * 1.0001 in jnp, new array": lambda: bandwidth(lambda: scaled(x)),
        "x.copy() in NumPy, new array": lambda: bandwidth(source.copy),
    }
    return compare(paths, "GB/s", f"{size:,} elements", 5)


def event_csr(events, weights, indptr, indices, out):
    out[:] = 0
    for i in range(events.size):
        if events[i]:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += weights[k]


def bench_csr():
    """Event-driven product events @ CSR, 10,000 x 10,000 with 1% connections, by activity"""
    import scipy.sparse

    n, rng = 10_000, np.random.default_rng(0)
    matrix = scipy.sparse.random(n, n, 0.01, "csr", np.float32, rng)
    return [row for activity in (0.01, 0.1, 1.0) for row in products(matrix, rng.random(n) < activity, activity)]


def products(matrix, events, activity):
    n = events.size
    parts = [jnp.asarray(part) for part in (matrix.data, matrix.indptr, matrix.indices)]
    weights, indptr, indices = parts
    spikes, floats, expected = jnp.asarray(events), events.astype(np.float32), events @ matrix

    def ours():
        op = xk.numba_kernel(event_csr, jax.ShapeDtypeStruct((n,), jnp.float32))
        return jitted(op, spikes, *parts)

    def jitted(f, *args):
        run = jax.jit(f)
        np.testing.assert_allclose(run(*args), expected, rtol=1e-3)
        return timed(lambda: run(*args))

    def jax_sparse():
        from jax.experimental import sparse

        across = matrix.T.tocsr()
        columns = sparse.BCSR(tuple(map(jnp.asarray, (across.data, across.indices, across.indptr))), shape=(n, n))
        return jitted(lambda m, v: m @ v, columns, jnp.asarray(floats))

    def brainevent_csr():
        import brainevent

        csr = brainevent.CSR((weights, indices, indptr), shape=(n, n))
        return jitted(lambda events: brainevent.BinaryArray(events) @ csr, spikes)

    paths = {
        "numba_kernel": ours,
        "brainevent BinaryArray @ CSR": brainevent_csr,
        "SciPy vector @ CSR": lambda: timed(lambda: floats @ matrix),
        "jax.experimental.sparse BCSR": jax_sparse,
        "dense matmul": lambda: jitted(jnp.matmul, jnp.asarray(floats), jnp.asarray(matrix.toarray())),
    }
    return compare(paths, case=f"{activity:.0%} active", rounds=5)


def readme_program(name):
    """The functions of the README's example that defines `name`, without the lines that run it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "README.md")
    if not os.path.exists(path):
        missing("README.md", "its example is what this runs")
    with open(path, encoding="utf-8") as file:
        blocks = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
    source = next(block for block in blocks if f"\ndef {name}(" in block)
    tree = ast.parse(source)
    end = next(i for i, node in enumerate(tree.body) if getattr(node, "name", "") == name) + 1
    namespace = {}
    exec(compile(ast.Module(tree.body[:end], []), path, "exec"), namespace)
    return namespace


def bench_cuba():
    """CUBA network (Brette et al. 2007), 80 synapses a neuron: one step of 0.1 ms"""
    readme = readme_program("cuba")

    def stepped(network, n, steps):
        run, state = network(n, steps)
        once = timed(lambda: run(*state), 0.1)
        return lambda: once() / steps

    def with_brainevent_kernel(kernel, outs, **options):
        numba_kernel = importlib.import_module("brainevent").numba_kernel
        return lambda *args: numba_kernel(numba.njit(kernel), outs=outs(*args), **options)(*args)

    rows = []
    for n, steps in ((4_000, 2_000), (40_000, 500)):
        paths = {
            "numba_kernel (the README's program)": (readme["cuba"], steps),
            "the same with brainevent.numba_kernel": (
                functools.partial(readme["cuba"], numba_kernel=with_brainevent_kernel), steps // 4),
            "brainevent BinaryArray @ CSR, neurons in jnp": (functools.partial(cuba_brainevent, readme), steps // 4),
        }  # fmt: skip
        measured = {name: functools.partial(stepped, net, n, k) for name, (net, k) in paths.items()}
        measured["Brian2 C++ standalone"] = functools.partial(cuba_brian2, n, 5 * steps, "float64")
        if n == 4_000:  # it takes long to build
            measured["Brian2 C++ standalone, float32"] = functools.partial(cuba_brian2, n, 5 * steps, "float32")
        rows += compare(measured, case=f"{n:,} neurons", rounds=5)
        rows += [spike_rate(readme["cuba"], n)]
    return rows


def spike_rate(cuba, n, steps=10_000):
    run, state = cuba(n, steps)
    rate = int(run(*state)[-1]) / n / (steps * 1e-4)
    return {"case": f"{n:,} neurons", "path": "firing rate (numba_kernel)", "unit": "Hz", "value": rate}


def cuba_brainevent(readme, n, steps):
    """The network of the README as brainevent's users write it."""
    import brainevent

    rng = np.random.default_rng(1)
    el, vt, vr = (readme[name] for name in ("EL", "VT", "VR"))

    def synapses(rows, weight):
        indptr = jnp.asarray(np.r_[0, rng.binomial(n, 80 / n, rows).cumsum()], jnp.int32)
        indices = jnp.asarray(rng.integers(0, n, indptr[-1]), jnp.int32)
        return brainevent.CSR((jnp.float32([weight]), indices, indptr), shape=(rows, n))

    excitatory = n * 4 // 5
    excite, inhibit = synapses(excitatory, 1.62), synapses(n - excitatory, -9)

    def step(carry, _):
        v, ge, gi, wait, total = carry
        u = el + (v - el) * readme["DECAY_V"] + ge * readme["GAIN_E"] + gi * readme["GAIN_I"]
        u = jnp.where(wait > 1, v, u)
        spikes = u > vt
        ge = ge * readme["DECAY_E"] + brainevent.BinaryArray(spikes[:excitatory]) @ excite
        gi = gi * readme["DECAY_I"] + brainevent.BinaryArray(spikes[excitatory:]) @ inhibit
        wait = jnp.where(spikes, readme["REFRACTORY"], wait - 1)
        return (jnp.where(spikes, vr, u), ge, gi, wait, total + spikes.sum()), None

    state = jnp.asarray(rng.uniform(vr, vt, n), jnp.float32), jnp.zeros(n), jnp.zeros(n), jnp.zeros(n, jnp.int32), 0
    return jax.jit(lambda *state: jax.lax.scan(step, state, length=steps)[0]), state


BRIAN2 = """
import sys
from brian2 import *
n, steps, dtype, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
set_device("cpp_standalone", build_on_run=False)
prefs.core.default_float_dtype = getattr(np, dtype)
equations = '''
dv/dt = (ge + gi - (v + 49*mV)) / (20*ms) : volt (unless refractory)
dge/dt = -ge / (5*ms) : volt
dgi/dt = -gi / (10*ms) : volt
'''
neurons = NeuronGroup(n, equations, threshold="v > -50*mV", reset="v = -60*mV", refractory=5*ms, method="exact")
neurons.v = "-60*mV + rand() * 10*mV"
excitatory = Synapses(neurons[:n * 4 // 5], neurons, on_pre="ge += 1.62*mV")
inhibitory = Synapses(neurons[n * 4 // 5:], neurons, on_pre="gi -= 9*mV")
excitatory.connect(p=80 / n)
inhibitory.connect(p=80 / n)
run(steps * 0.1*ms)
device.build(directory=folder, compile=True, run=False)
"""


def cuba_brian2(n, steps, dtype):
    """A function that runs Brian2's compiled program and reads the time of a step that it reports."""
    if importlib.util.find_spec("brian2") is None:
        missing("brian2", "pip install brian2")
    folder = tempfile.mkdtemp(prefix="bench_brian2_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-W", "ignore", "-c", BRIAN2, str(n), str(steps), dtype, folder]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)

    def once():
        subprocess.run([os.path.join(folder, "main")], check=True, capture_output=True, cwd=folder)
        with open(os.path.join(folder, "results", "last_run_info.txt")) as file:
            return float(file.read().split()[0]) / steps * 1e6

    return once


def bench_memory():
    """Growth of the process's memory"""
    x, y, spec = inputs(16)
    f = next(iter(ADD[jax.default_backend()].values()))(spec)
    loop = jax.jit(lambda steps: jax.lax.fori_loop(0, steps, lambda _, a: f(a, y), x))

    def eager(count):
        collections.deque((f(x, y) for _ in range(count)), maxlen=1)[0].block_until_ready()

    def retraces(make):
        return lambda count: [jax.jit(make(1.0)).lower(x, y) and None for _ in range(count)]

    return [
        growth("1,000,000 calls in a loop", lambda count: loop(count).block_until_ready(), 1_000_000),
        growth("100,000 eager calls", eager, 100_000),
        growth("1,000 retraces of equal closures", retraces(add_closure), 1_000),
        growth("1,000 retraces of x + y in jnp", retraces(lambda k: lambda x, y: x + y + k), 1_000),
    ]


def add_closure(scale):
    """A kernel that is a new closure each time, of equal content for equal `scale`."""

    def add(x, y, out):
        for i in range(x.size):
            out[i] = x[i] + y[i] + scale

    return xk.numba_kernel(add, lambda x, y: x)


def growth(name, action, count):
    """What the process grows by when `action` is repeated, after caches and arenas have filled."""
    action(count // 10)
    gc.collect()
    before = resident()
    action(count)
    gc.collect()
    return {"case": "", "path": name, "unit": "MB", "value": resident() - before}


def resident():
    """Resident memory of this process in MB (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


CPU_ONLY = {"large", "csr", "cuba"}  # their kernels are written for Numba on the CPU
BENCHMARKS = {name[6:]: function for name, function in list(globals().items()) if name.startswith("bench_")}


@pytest.mark.bench
@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_bench(name, platform, bench_table):
    if platform == "gpu" and (name in CPU_ONLY or jax.default_backend() != "gpu"):
        pytest.skip("needs a GPU and kernels for it")
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = {"gpu": "cuda", "cpu": "cpu"}[platform]
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title = f"{BENCHMARKS[name].__doc__}{' (GPU)' if platform == 'gpu' else ''}"
    bench_table(title, json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":  # one comparison, in a process of its own
    print(json.dumps(BENCHMARKS[sys.argv[1]]()))
