"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import ast
import atexit
import collections
import ctypes
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import ad

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
