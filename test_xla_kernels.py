"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Callable

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

needs_warp = pytest.mark.needs("warp")
F32, F64, I32 = np.float32, np.float64, np.int32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sample(*shape, dtype=F32, seed=0):
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(dtype)


@functools.cache
def warp_kernels():
    """The kernels of the table below; made on first use, so that the file loads without Warp."""

    @wp.struct
    class Inner:
        offset: wp.vec3

    @wp.struct
    class Config:
        gain: wp.float64
        flag: wp.bool
        inner: Inner

    @wp.kernel
    def add(x: wp.array(dtype=float), y: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = x[i] + y[i]

    @wp.kernel
    def stencil(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        n = x.shape[0]
        out[i] = x[wp.max(i - 1, 0)] - 2.0 * x[i] + x[wp.min(i + 1, n - 1)]

    @wp.kernel
    def outer(x: wp.array(dtype=float), y: wp.array(dtype=float), out: wp.array2d(dtype=float)):
        i, j = wp.tid()
        out[i, j] = x[i] * y[j]

    @wp.kernel
    def total(x: wp.array2d(dtype=float), out: wp.array(dtype=float)):
        s = float(0.0)  # noqa: UP018
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                s += x[i, j]
        out[0] = s

    @wp.kernel
    def cross(x: wp.array(dtype=wp.vec3), y: wp.array(dtype=wp.vec3), out: wp.array(dtype=wp.vec3)):
        i = wp.tid()
        out[i] = wp.cross(x[i], y[i])

    @wp.kernel
    def matvec(m: wp.array2d(dtype=wp.mat22), v: wp.array2d(dtype=wp.vec2), out: wp.array2d(dtype=wp.vec2)):
        i, j = wp.tid()
        out[i, j] = m[i, j] * v[i, j]

    @wp.kernel
    def flip(x: wp.array4d(dtype=float), out: wp.array4d(dtype=float)):
        i, j, k, n = wp.tid()
        out[n, k, j, i] = x[i, j, k, n]

    @wp.kernel
    def moments(x: wp.array(dtype=float), mean: wp.array(dtype=float), above: wp.array(dtype=wp.int32)):
        s = float(0.0)  # noqa: UP018
        for i in range(x.shape[0]):
            s += x[i]
        mean[0] = s / float(x.shape[0])
        for i in range(x.shape[0]):
            if x[i] > mean[0]:
                above[i] = 1
            else:
                above[i] = 0

    @wp.kernel
    def histogram(index: wp.array(dtype=wp.int32), weight: float, acc: wp.array(dtype=float)):
        wp.atomic_add(acc, index[wp.tid()], weight)

    @wp.kernel
    def configured(
        x: wp.array(dtype=wp.float64), c: Config, n: wp.int8, m: wp.mat22, v: wp.vec3h, out: wp.array(dtype=wp.float64)
    ):
        i = wp.tid()
        if c.flag:
            s = m[0, 1] + c.inner.offset[2] + float(v[1]) + float(n)
            out[i] = c.gain * x[i] + wp.float64(s)
        else:
            out[i] = x[i]

    @wp.kernel
    def scratchy(x: wp.array(dtype=float), out: wp.array(dtype=float), buffer: wp.array(dtype=float)):
        i = wp.tid()
        buffer[i] = 3.0 * x[i]
        out[i] = buffer[i] + 1.0

    @wp.kernel
    def smooth(x: wp.array(dtype=float), k: wp.array(dtype=wp.int32), a: float, sq: wp.array(dtype=float),
               si: wp.array(dtype=float), count: wp.array(dtype=wp.int32)):  # fmt: skip
        i = wp.tid()
        sq[i] = a * x[i] * x[k[i]]
        if i < si.shape[0]:
            si[i] = wp.sin(x[i])
        count[i] = 1

    config = Config()
    config.gain, config.flag, config.inner.offset = 2.5, True, wp.vec3(1.0, 2.0, 4.0)
    return types.SimpleNamespace(**locals())


def stencil_reference(x):
    p = np.pad(x, 1, mode="edge")
    return p[:-2] - 2 * x + p[2:]


# name: (options of warp_kernel, arguments, NumPy reference)
WARP_OPS = {
    "add": ({"outs": lambda x, y: x}, (sample(5), sample(5, seed=1)), lambda x, y: x + y),
    "stencil": ({"outs": lambda x: x}, (sample(6),), stencil_reference),
    "outer": (
        {"outs": lambda x, y: spec(*x.shape, *y.shape), "launch_dims": lambda x, y: (*x.shape, *y.shape)},
        (sample(3), sample(4, seed=1)),
        np.outer,
    ),
    "total": ({"outs": spec(1), "launch_dims": 1}, (sample(3, 4),), lambda x: x.sum()[None]),
    "cross": ({"outs": lambda x, y: x}, (sample(4, 3), sample(4, 3, seed=1)), np.cross),
    "matvec": (
        {"outs": lambda m, v: v},
        (sample(2, 3, 2, 2), sample(2, 3, 2, seed=1)),
        lambda m, v: np.einsum("ijkl,ijl->ijk", m, v),
    ),
    "flip": ({"outs": lambda x: spec(*x.shape[::-1])}, (sample(2, 3, 4, 5),), lambda x: x.transpose(3, 2, 1, 0)),
    "moments": (
        {"outs": lambda x: {"mean": spec(1), "over": spec(*x.shape, dtype=I32)}, "launch_dims": (1,)},
        (sample(7),),
        lambda x: {"mean": x.mean()[None], "over": (x > x.mean()).astype(I32)},
    ),
    "scratchy": ({"outs": lambda x: x, "scratch": lambda x: x}, (sample(5),), lambda x: 3 * x + 1),
}


@pytest.fixture(params=[pytest.param(path, marks=needs_warp) for path in ("native", "replay")])
def warp_path(request, monkeypatch):
    """Both ways to run a Warp kernel on the CPU; other target names keep them apart.  GPUs have the second only."""
    if request.param == "replay":
        monkeypatch.setattr(xk, "__name__", "xk_replay")
        monkeypatch.setattr(xk, "_warp_layout", lambda plan, launch: None)
    return request.param


def warp_op(name):
    options, args, reference = WARP_OPS[name]
    return xk.warp_kernel(getattr(warp_kernels(), name), **options), args, reference


def check_equal(actual, expected, **tolerance):
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 1e-5})), actual, expected
    )


def slices(f, axes, args, size):
    """What vmap must equal: a Python loop."""
    rows = [f(*(x if d is None else np.take(x, i, d) for x, d in zip(args, axes))) for i in range(size)]
    return jax.tree_util.tree_map(lambda *leaves: np.stack(leaves), *rows)


@pytest.mark.parametrize("name", WARP_OPS)
def test_warp_ops(name, warp_path):
    f, args, reference = warp_op(name)
    expected = reference(*args)
    check_equal(f(*args), expected)
    check_equal(jax.jit(f)(*args), expected)
    native = warp_path == "native" and jax.default_backend() == "cpu"
    target = xk._WarpEmitter if native else xk._CallbackEmitter
    kept = [c.keep for (key, _), c in xk._STORE.targets.items() if key.startswith(f"{xk.__name__}.{name}.")]
    assert any(isinstance(keep, tuple) and isinstance(keep[1], target) for keep in kept)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", WARP_OPS)
def test_warp_vmap(name, size, warp_path):
    f, args, _ = warp_op(name)
    batched = [np.stack([x * (i + 1) for i in range(size)], axis=min(1, x.ndim)) for x in args]
    axes = [1] * len(args)
    check_equal(jax.vmap(f, in_axes=axes)(*batched), slices(f, axes, batched, size))
    if len(args) == 2:
        axes, mixed = [1, None], [batched[0], args[1]]
        check_equal(jax.jit(jax.vmap(f, in_axes=axes))(*mixed), slices(f, axes, mixed, size))
    twice = [np.stack([x, -x]) for x in args]
    nested = jax.vmap(jax.vmap(f, in_axes=[None] * (len(args) - 1) + [0]))
    stacked = [*twice[:-1], np.stack([twice[-1]] * size, axis=1)]
    inner = [slices(f, [None] * (len(args) - 1) + [0], [x[i] for x in stacked], size) for i in range(2)]
    check_equal(nested(*stacked), jax.tree_util.tree_map(lambda *leaves: np.stack(leaves), *inner))


def test_warp_vmap_of_nothing(warp_path):
    f, (x, y), _ = warp_op("add")
    assert jax.vmap(f)(x[None][:0], y[None][:0]).shape == (0, 5)


def test_warp_values(warp_path):
    k = warp_kernels()
    f = xk.warp_kernel(k.configured, outs=lambda x, *values: x)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x = sample(4, dtype=F64)
        m, v = [[1, 2], [3, 4]], np.array([1, 0.5, 2], np.float16)
        expected = 2.5 * x + 2 + 4 + 0.5 - 7
        check_equal(f(x, k.config, -7, m, v), expected)
        check_equal(
            jax.jit(lambda x: f(x, k.config, np.int8(-7), wp.mat22(1, 2, 3, 4), wp.vec3h(1, 0.5, 2)))(x), expected
        )
        check_equal(jax.vmap(lambda x: f(x, k.config, -7, m, v))(np.stack([x, x])), np.stack([expected] * 2))
        k.config.gain = 4.0  # a changed struct is a changed value
        try:
            check_equal(f(x, k.config, -7, m, v), expected + 1.5 * x)
        finally:
            k.config.gain = 2.5
        names = {name for name, _ in xk._STORE.targets if name.startswith(f"{xk.__name__}.configured.")}
        assert len(names) == 1  # values are data, not code


@pytest.mark.parametrize(
    "name", "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split()
)
def test_warp_dtypes(name, warp_path):
    dtype = np.dtype(getattr(jnp, name))
    if not hasattr(wp, name):
        with pytest.raises(ValueError, match=r"Warp has no scalar type for dtype .*it has bool, int8, .*float64"):
            xk.jaxtype_to_warptype(dtype)
        return
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x = jnp.arange(6).reshape(2, 3).astype(dtype)
        info = xk.jaxinfo_to_warpinfo(x)

        @wp.kernel(module="unique")
        def double(x: info, flag: wp.array(dtype=wp.bool), out: info):
            i, j = wp.tid()
            if flag[i]:
                out[i, j] = x[i, j] + x[i, j]
            else:
                out[i, j] = x[i, j]

        out = xk.warp_kernel(double, outs=lambda x, flag: x)(x, jnp.array([True, False]))
        assert out.dtype == dtype
        np.testing.assert_array_equal(out.astype(F64), np.arange(6).reshape(2, 3) * [[2], [1]])


def test_warp_in_out(warp_path):
    f = xk.warp_kernel(warp_kernels().histogram, lambda index, weight, acc: acc, in_out_argnames=["acc"],
                       launch_dims=lambda index, weight, acc: index.shape)  # fmt: skip
    index, acc = jnp.array([0, 2, 2, 1], jnp.int32), jnp.ones(3)
    expected = 1 + 0.5 * np.array([1, 1, 2])
    np.testing.assert_array_equal(f(index, 0.5, acc), expected)
    np.testing.assert_array_equal(acc, np.ones(3))
    np.testing.assert_array_equal(jax.jit(lambda a: f(index, 0.5, f(index, 0.5, a)))(acc), 2 * expected - 1)
    rows = jnp.array([[0, 0, 0, 0], [1, 1, 1, 2]], jnp.int32)
    np.testing.assert_array_equal(jax.vmap(f, (0, None, None))(rows, 0.5, acc), [[3, 1, 1], [1, 2.5, 1.5]])


def test_warp_alias(warp_path):
    @wp.kernel(module="unique")
    def bump(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        if wp.tid() < 2:
            out[wp.tid()] += 1.0

    f = xk.warp_kernel(bump, lambda x: x, input_output_aliases={0: 0})
    np.testing.assert_array_equal(f(jnp.zeros(4)), [1, 1, 0, 0])
    np.testing.assert_array_equal(jax.vmap(f)(jnp.zeros((2, 4))), [[1, 1, 0, 0]] * 2)


def test_warp_empty_launch(warp_path):
    f = xk.warp_kernel(warp_kernels().add, spec(1000), launch_dims=0)
    big = jnp.full(1000, 7.0)
    for _ in range(5):
        assert not jax.jit(lambda x: f(x, x))(big + 1).any()
    g = xk.warp_kernel(warp_kernels().add, lambda x, y: x)
    assert g(big[:0], big[:0]).shape == (0,)


# -- derivatives


def smooth_call(differentiable=True):
    f = xk.warp_kernel(warp_kernels().smooth, lambda x, k, a: (x, spec(3), spec(*x.shape, dtype=I32)),
                       launch_dims=lambda x, k, a: x.shape, differentiable=differentiable)  # fmt: skip
    k = jnp.array([1, 1, 3, 0, 2], jnp.int32)
    return lambda x: f(x, k, 1.5), lambda x: (1.5 * x * x[k], jnp.sin(x[:3]), jnp.ones(5, jnp.int32))


def loss_of(f):
    return lambda x: (f(x)[0] ** 2).sum() + (f(x)[1] * jnp.arange(3.0)).sum()


def test_warp_grad(warp_path):
    f, reference = smooth_call()
    x = jnp.asarray(sample(5))
    check_equal(f(x), reference(x))
    expected = jax.grad(loss_of(reference))
    check_equal(jax.grad(loss_of(f))(x), expected(x), rtol=1e-4)
    check_equal(jax.jit(jax.grad(loss_of(f)))(x), expected(x), rtol=1e-4)
    e, h = np.eye(5, dtype=F32), 1e-2
    finite = [(loss_of(f)(x + h * d) - loss_of(f)(x - h * d)) / (2 * h) for d in e]
    check_equal(jax.grad(loss_of(f))(x), np.array(finite), rtol=2e-2, atol=2e-2)
    xs = jnp.stack([x, 2 * x, -x])
    check_equal(jax.vmap(jax.grad(loss_of(f)))(xs), jax.vmap(expected)(xs), rtol=1e-4)
    batched = lambda g: lambda xs: jax.vmap(loss_of(g))(xs).sum()
    check_equal(jax.grad(batched(f))(xs), jax.grad(batched(reference))(xs), rtol=1e-4)
    check_equal(jax.jacrev(lambda x: f(x)[0])(x), jax.jacrev(lambda x: reference(x)[0])(x), rtol=1e-4)


@pytest.mark.parametrize("name, function", [("cross", jnp.cross), ("outer", jnp.outer)])
def test_warp_grad_of_shapes(name, function, warp_path):
    options, args, _ = WARP_OPS[name]
    f = xk.warp_kernel(getattr(warp_kernels(), name), **options, differentiable=True)
    args = [jnp.asarray(x) for x in args]
    weight = jnp.asarray(sample(*f(*args).shape, seed=3))
    grads = [jax.grad(lambda *a: (g(*a) * weight).sum(), (0, 1)) for g in (f, function)]
    check_equal(grads[0](*args), grads[1](*args))
    stacked = [jnp.stack([args[0], -args[0]]), args[1]]  # the gradient of an unbatched operand is summed
    losses = [lambda *a: (jax.vmap(g, (0, None))(*a) * weight).sum() for g in (f, function)]
    check_equal(*(jax.grad(loss, (0, 1))(*stacked) for loss in losses))


def test_warp_cotangent_is_not_changed(warp_path):
    @wp.kernel(module="unique")
    def twice(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = 2.0 * x[i]

    f = xk.warp_kernel(twice, lambda x: x, differentiable=True)
    x, ct = jnp.arange(4.0), jnp.ones(4)
    pullback = jax.vjp(f, x)[1]
    for _ in range(2):
        np.testing.assert_array_equal(pullback(ct)[0], 2 * np.ones(4))
    np.testing.assert_array_equal(ct, np.ones(4))
    zero = jax.grad(lambda k: xk.warp_kernel(warp_kernels().smooth, lambda x, k, a: (x, spec(3), spec(5, dtype=I32)),
                    differentiable=True)(jnp.arange(5.0), k, 1.0)[0].sum(), allow_int=True)(jnp.arange(5))  # fmt: skip
    assert zero.dtype == jax.dtypes.float0


# -- names, lifetime, threads


@needs_warp
def test_warp_generators():
    def generate(constant, info):
        c = wp.constant(constant)

        @wp.kernel(module=wp.get_module("generated"))
        def scaled(x: info, out: info):
            i = wp.tid()
            out[i] = c * x[i]

        return xk.warp_kernel(scaled, lambda x: x)

    def names():
        return {name for name, _ in xk._STORE.targets if ".scaled." in name}

    x = jnp.arange(3.0)
    first = generate(2.0, xk.jaxinfo_to_warpinfo(x))
    np.testing.assert_array_equal(first(x), 2 * x)
    before = names()
    for _ in range(20):
        jax.jit(lambda x: generate(2.0, xk.jaxinfo_to_warpinfo(x))(x)).trace(x)
    assert names() == before
    np.testing.assert_array_equal(generate(3.0, xk.jaxinfo_to_warpinfo(x))(x), 3 * x)
    np.testing.assert_array_equal(first(x), 2 * x)  # its module was rebuilt, its code is still there
    assert len(names()) == len(before) + 1


@needs_warp
def test_warp_names_are_stable():
    source = """
import jax, warp as wp, xla_kernels as xk
@wp.struct
class P:
    a: float
@wp.kernel
def named(x: wp.array(dtype=float), p: P, out: wp.array(dtype=float)):
    out[wp.tid()] = p.a * x[wp.tid()]
f = xk.warp_kernel(named, lambda x, p: x)
print(jax.jit(lambda x: f(x, P())).lower(jax.ShapeDtypeStruct((3,), "float32")).as_text())
"""
    root = pathlib.Path(xk.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "named.py")
        script.write_text(source)
        env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs = [
            subprocess.Popen([sys.executable, script], env={**env, "PYTHONHASHSEED": seed}, **pipes) for seed in "12"
        ]
        texts = [run.communicate()[0] for run in runs]
    assert texts[0] == texts[1] and texts[0].startswith("module @")  # Warp prints nothing either


@needs_warp
def test_warp_export():
    pytest.importorskip("flatbuffers")
    from jax import export

    f, (x, y), _ = warp_op("add")
    jax.eval_shape(f, x, y)
    data = export.export(jax.jit(f), disabled_checks=xk.export_checks())(x, y).serialize()
    np.testing.assert_array_equal(export.deserialize(data).call(x, y), x + y)


@needs_warp
def test_warp_threads():
    def work(i):
        @wp.kernel(module=wp.get_module("threaded"))
        def shifted(x: wp.array(dtype=float), shift: float, out: wp.array(dtype=float)):
            j = wp.tid()
            out[j] = x[j] + shift

        f = xk.warp_kernel(shifted, lambda x, shift: x)
        x = jnp.arange(float(8 + i % 4))
        return all((jax.jit(lambda x: f(f(x, float(i)), 1.0))(x) == x + i + 1).all() for _ in range(5))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(32)))


@needs_warp
def test_warp_tiles():
    @wp.kernel(module="unique")
    def tiled(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        t = wp.tile_load(x, shape=64, offset=i * 64)
        wp.tile_store(out, t * 2.0, offset=i * 64)

    f = xk.warp_kernel(tiled, lambda x: x, launch_dims=lambda x: x.size // 64)
    call = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: 0.5 * f(y), x))
    x = jnp.arange(64.0 * 32)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for out in pool.map(lambda i: call(x + i) - i, range(16)):
            np.testing.assert_array_equal(out, x)


@needs_warp
def test_warp_settings_are_the_users():
    settings = {name: value for name, value in vars(wp.config).items() if isinstance(value, (int, str))}
    f, args, _ = warp_op("add")
    f(*args)
    assert settings == {name: vars(wp.config)[name] for name in settings}


@needs_warp
def test_warp_lowering_for_gpu():
    f, args, _ = warp_op("outer")
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla_kernels.outer." in text and "dense<[3, 4, 1, 1, 2, 12]> : tensor<6xi64>" in text
    with pytest.raises(NotImplementedError, match=r"Warp kernel 'outer' runs on CPUs and NVIDIA GPUs; .* 'tpu'"):
        jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",))


@needs_warp
def test_warp_launches_on_the_stream(monkeypatch):
    """What the GPU path does around Warp's launch, with the CPU in the place of the GPU."""
    if jax.default_backend() != "cpu":
        pytest.skip("the real path is tested here")
    streams = []
    record = xk._WarpPlan.record
    monkeypatch.setattr(xk, "__name__", "xk_stream")
    monkeypatch.setattr(xk, "_warp_layout", lambda plan, launch: None)
    monkeypatch.setattr(xk, "_cuda_context", lambda frame: (3, 1234))
    monkeypatch.setattr(xk._WarpPlan, "record", lambda self, device: streams.append(device) or record(self, "cpu"))
    init = xk._WarpReplay.__init__
    monkeypatch.setattr(xk._WarpReplay, "__init__", lambda self, plan, sig, platform: init(self, plan, sig, "cuda"))
    monkeypatch.setattr(wp, "Stream", lambda device, cuda_stream: streams.append(cuda_stream))
    monkeypatch.setattr(wp, "ScopedStream", lambda stream, sync_enter: contextlib.nullcontext())
    options, args, function = WARP_OPS["outer"]
    f = xk.warp_kernel(warp_kernels().outer, **options, differentiable=True)
    check_equal(jax.jit(f)(*args), function(*args))
    check_equal(jax.grad(lambda x, y: f(x, y).sum())(*map(jnp.asarray, args)), np.full(3, args[1].sum()))
    assert streams[:3] == ["cpu", "cuda:3", 1234]  # the first: to learn that the layout is unknown


@needs_warp
def test_warp_reads_the_context_of_a_call():
    def answer(struct, field, value):
        def function(args):
            setattr(struct.from_address(args), field, value)

        return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(function)

    stream = answer(xk.XLA_FFI_Stream_Get_Args, "stream", 77)
    ordinal = answer(xk.XLA_FFI_DeviceOrdinal_Get_Args, "device_ordinal", 2)
    api = xk.XLA_FFI_Api(
        XLA_FFI_Stream_Get=ctypes.cast(stream, ctypes.c_void_p).value,
        XLA_FFI_DeviceOrdinal_Get=ctypes.cast(ordinal, ctypes.c_void_p).value,
    )
    frame = xk.XLA_FFI_CallFrame(api=ctypes.addressof(api))
    assert xk._cuda_context(ctypes.addressof(frame)) == (2, 77)


@needs_warp
def test_warp_interop():
    assert callable(xk.jax_kernel) and callable(xk.jax_callable)
    f = xk.jax_kernel(warp_kernels().add)
    assert type(f).__module__.startswith("warp.")


# -- errors

# case: kernel, options, arguments (None: the wrapper itself is wrong), error, message
WARP_ERRORS = {
    "dtype": (
        *("add", {}, (np.arange(3), sample(3)), TypeError),
        r"'add': argument 'x' is a warp.array, float32\[:\] for JAX; got int\d+\[3\]: wrong dtype",
    ),
    "rank": ("add", {}, (sample(3), sample(3, 1)), TypeError, r"'y' .*got float32\[3,1\]: wrong number of dimensions"),
    "0-d": ("add", {}, (F32(1), sample(3)), TypeError, r"'x' .* wrong number of dimensions; reshape it to \(1,\)"),
    "inner": ("cross", {}, (sample(4, 3), sample(4, 2)), TypeError, r"'y' .*float32\[:,3\].*: wrong inner dimensions"),
    "output": (
        *("add", {"outs": spec(3, dtype=I32)}, (sample(3), sample(3)), TypeError),
        r"'out' .*got int32\[3\]: wrong dtype",
    ),
    "few": ("add", {}, (sample(3),), TypeError, r"the parameters \(x, y, out\).* gives it 1 inputs and 1 outputs"),
    "many": ("add", {}, (sample(3),) * 4, TypeError, r"gives it 4 inputs and 1 outputs"),
    "value": ("histogram", {}, (np.arange(3, dtype=I32),), TypeError, r"1 arguments, but 'weight' is passed by value"),
    "value type": (
        *("histogram", {}, (np.arange(3, dtype=I32), "a", sample(3)), TypeError),
        r"parameter 'weight' \(float32\) is passed by value; got str 'a'",
    ),
    "struct": (
        *("configured", {}, (sample(3), 1, 1, [1, 2], [1, 2, 3]), TypeError),
        r"parameter 'c' \(struct .*Config\) is passed by value; got int 1, not an instance",
    ),
    "negative": ("add", {"launch_dims": -1}, None, ValueError, r"1 to 4 numbers from 0 to 2147483647; got \(-1,\)"),
    "huge": ("add", {"launch_dims": lambda *a: 2**31}, (sample(3),) * 2, ValueError, r"1 to 4 .*got \(2147483648,\)"),
    "dims": ("add", {"launch_dims": (1,) * 5}, None, ValueError, r"launch_dims must be 1 to 4 numbers"),
    "dims type": ("add", {"launch_dims": "3"}, None, TypeError, r"launch_dims must be an int or a tuple of ints; got"),
    "block": ("add", {"block_dim": 2048}, None, ValueError, r"block_dim must be 1 to 1024 threads; got 2048"),
    "in-out": ("add", {"in_out_argnames": ["z"]}, None, ValueError, r"\['z'\]: 'z' must be the name of an array param"),
    "in-out grad": (
        *("histogram", {"in_out_argnames": ["acc"], "differentiable": True}, None, ValueError),
        r"differentiable=True does not go with in_out_argnames or input_output_aliases: the adjoint needs",
    ),
    "scratch": ("scratchy", {"scratch": spec(3), "differentiable": True}, None, ValueError, r"not go with scratch"),
    "alias": ("histogram", {"input_output_aliases": {1: 0}}, None, ValueError, r"argument 1 is not an array"),
    "outs": ("add", {"outs": None}, None, TypeError, r"outs is missing"),
}


@needs_warp
@pytest.mark.parametrize("case", WARP_ERRORS)
def test_warp_errors(case):
    name, options, args, error, message = WARP_ERRORS[case]
    with pytest.raises(error, match=message):
        f = xk.warp_kernel(getattr(warp_kernels(), name), **{"outs": lambda x, *rest: x, **options})
        assert args is not None, "this is an error of the wrapper, not of the call"
        f(*args)


@needs_warp
def test_warp_traced_value():
    f = xk.warp_kernel(warp_kernels().histogram, lambda i, w, acc: acc, in_out_argnames=["acc"])
    with pytest.raises(TypeError, match=r"'weight' \(float32\) .* must be known when JAX traces.*static_argnames"):
        jax.jit(f)(jnp.arange(3), 0.5, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"'n' \(int8\) is passed by value; 300 is out of its range"):
        xk.warp_kernel(warp_kernels().configured, spec(3))(sample(3), warp_kernels().config, 300, np.eye(2), np.ones(3))


@needs_warp
def test_warp_unsupported_kernels():
    def plain(x):
        pass

    with pytest.raises(TypeError, match=r"takes a function decorated with warp.kernel; got function"):
        xk.warp_kernel(plain, spec(3))

    @wp.kernel(module="unique")
    def generic(x: wp.array(dtype=typing.Any), out: wp.array(dtype=typing.Any)):
        out[wp.tid()] = x[wp.tid()]

    with pytest.raises(TypeError, match=r"'generic' is generic; .* made by warp.overload\(generic"):
        xk.warp_kernel(generic, lambda x: x)
    concrete = wp.overload(generic, [wp.array(dtype=float), wp.array(dtype=float)])
    np.testing.assert_array_equal(xk.warp_kernel(concrete, lambda x: x)(jnp.arange(3.0)), np.arange(3.0))

    @wp.struct
    class Holder:
        values: wp.array(dtype=float)

    @wp.kernel(module="unique")
    def holding(h: Holder, out: wp.array(dtype=float)):
        out[wp.tid()] = h.values[wp.tid()]

    with pytest.raises(TypeError, match=r"parameter 'h' is .*; supported are arrays of .* and structs without arrays"):
        xk.warp_kernel(holding, spec(3))

    @wp.kernel(enable_backward=False, module="unique")
    def forward_only(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        out[wp.tid()] = x[wp.tid()]

    f = xk.warp_kernel(forward_only, lambda x: x, differentiable=True)
    np.testing.assert_array_equal(f(jnp.arange(3.0)), np.arange(3.0))
    with pytest.raises(RuntimeError, match="'forward_only' was built without its adjoint"):
        jax.grad(lambda x: f(x).sum())(jnp.arange(3.0))


@needs_warp
def test_warp_types():
    assert xk.jaxtype_to_warptype("float32") is wp.float32
    assert xk.jaxtype_to_warptype(jnp.bool_) is wp.bool
    for bad in (np.complex64, "nonsense", jnp.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"Warp has no scalar type for dtype .*; it has bool, int8"):
            xk.jaxtype_to_warptype(bad)
    with pytest.raises(ValueError, match=r"1 to 4 dimensions; got 0 in float32\[\]; reshape it to \(1,\)"):
        xk.jaxinfo_to_warpinfo(spec())
    with pytest.raises(ValueError, match=r"1 to 4 dimensions; got 5 in float32\[1,1,1,1,1\]"):
        xk.jaxinfo_to_warpinfo(spec(1, 1, 1, 1, 1))


@needs_warp
def test_warp_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(ImportError, match=r"warp_kernel needs warp, .*install it: pip install warp-lang"):
        xk.warp_kernel(lambda x: x, spec(3))


# ======================================================================================================
# XLACustomKernel
# ======================================================================================================
