"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import gc
import math
import os
import re
import shutil
import subprocess
import sys
import weakref
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

CUDASIM = bool(int(os.environ.get("NUMBA_ENABLE_CUDASIM", "0")))
simulated = pytest.mark.skipif(not CUDASIM, reason="runs in the subprocess of test_cuda_simulator")
compiled = pytest.mark.skipif(CUDASIM, reason="the simulator compiles nothing")
GPUS = [] if CUDASIM else xk._cuda_ordinals()


def on_gpu(test):
    return pytest.mark.filterwarnings("ignore:Grid size")(pytest.mark.gpu(test))  # small grids are meant


def on_device(test):
    """On a GPU or, in the same way, in the simulator."""
    return pytest.mark.filterwarnings("ignore:Grid size")(pytest.mark.needs("cuda")(test))


CUDA_DTYPES = sorted(xk._CUDA_DTYPES - {"int64", "uint64", "float64", "complex128"})  # without x64


def cuda_ptx(function, signature, **options):
    """PTX for compute capability 9.0, which takes no driver."""
    try:
        return cuda.compile(function, xk._cuda_types(signature), device=False, abi="numba", cc=(9, 0), **options)[0]
    except ImportError as error:
        pytest.skip(f"Numba CUDA has no NVVM here: {error}")


def run_pytest(*args, **environment):
    """Run tests of this file in a process with another environment; returns how many passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *args]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return int(re.search(r"(\d+) passed", result.stdout)[1])


def cuda_signature(*arrays, n_in=None):
    """A signature from pairs (dtype, rank); the last one is the output."""
    specs = [jax.ShapeDtypeStruct((1,) * rank, np.dtype(dtype)) for dtype, rank in arrays]
    n_in = len(specs) - 1 if n_in is None else n_in
    return xk._Signature("kernel", n_in, tuple(s.dtype for s in specs), tuple(len(s.shape) for s in specs))


# -- without a GPU: the layout of parameters


@compiled
@pytest.mark.parametrize("rank", range(5))
@pytest.mark.parametrize("dtype", sorted(xk._CUDA_DTYPES))
def test_cuda_layout_is_that_of_ptx(dtype, rank):
    def kernel(x, y, out):
        pass

    signature = cuda_signature((dtype, rank), ("float32", 2), (dtype, rank))
    ptx = cuda_ptx(kernel, signature)
    entry = re.search(r"\.entry\s+(\w+)", ptx)[1]
    assert xk._ptx_params(ptx, entry) == xk._cuda_params(signature.ranks)


@compiled
@pytest.mark.parametrize(
    "index, expression",
    [(2, ".size"), (3, ".itemsize"), (4, "[0, 0, 0]"), *((5 + d, f".shape[{d}]") for d in range(3)),
     *((8 + d, f".strides[{d}]") for d in range(3))],
)  # fmt: skip
def test_cuda_parameters_mean_what_the_handler_packs(index, expression):
    namespace = {}
    exec(f"def kernel(a, b, out): out[0] = b{expression}", namespace)
    ptx = cuda_ptx(namespace["kernel"], cuda_signature(("float32", 2), ("int64", 3), ("int64", 1)))
    read = {int(n) for n in re.findall(r"ld\.param\.\w+\s+%\w+, \[\w+_param_(\d+)\]", ptx)}
    assert read == {9 + index, 9 + 11 + 4}  # after the 9 parameters of `a`; and the data pointer of `out`


def test_ptx_params_sees_other_layouts():
    ptx = ".visible .entry k(\n .param .u64 k_param_0,\n .param .align 8 .b8 k_param_1[56],\n .param .u32 k_param_2\n)"
    assert xk._ptx_params(ptx, "k") == ["u64", "b8", "u32"]
    assert xk._ptx_params(ptx, "other") == []


# -- without a GPU: what the handler gives to cuLaunchKernel


class RecordingDriver:
    """Stands in for libcuda: records launches, in a handler that is registered for the CPU."""

    STREAM = 0x5EED

    def __init__(self, ranks, code=0, ordinal=0):
        self.launches, self.code, self.ordinal, self.callbacks = [], code, ordinal, {}
        self.ranks = ranks
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        params = ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))
        self.add("cuLaunchKernel", self.launch, ctypes.c_int32, pointer, *[number] * 7, pointer, params, pointer)
        self.add("cuCtxGetDevice", self.device, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))
        self.add("Stream_Get", self.stream, pointer, pointer)
        self.add("DeviceOrdinal_Get", self.xla_device, pointer, pointer)
        self.overrides = {name: self.address(name) for name in ("Stream_Get", "DeviceOrdinal_Get")}

    def add(self, name, function, *types_):
        self.callbacks[name] = ctypes.CFUNCTYPE(*types_)(function)

    def address(self, name):
        return ctypes.cast(self.callbacks[name], ctypes.c_void_p).value

    def describe(self, code):
        return {1: "CUDA_ERROR_INVALID_VALUE: invalid argument"}[code]

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        values = iter([params[i][0] for i in range(sum(5 + 2 * rank for rank in self.ranks))])
        arrays = [[next(values) for _ in range(5 + 2 * rank)] for rank in self.ranks]
        assert extra is None and all(array[:2] == [0, 0] for array in arrays)  # meminfo, parent
        self.launches.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, [a[2:] for a in arrays]))
        return self.code

    def device(self, result):
        result[0] = self.ordinal
        return 0

    def stream(self, args):
        xk.XLA_FFI_Stream_Get_Args.from_address(args).stream = self.STREAM

    def xla_device(self, args):
        xk.XLA_FFI_DeviceOrdinal_Get_Args.from_address(args).device_ordinal = self.ordinal


def record(monkeypatch, ranks, outs=lambda *ins: ins[0], functions=(0xF0, 0xF1), n_args=None, aliases=None, **launch):
    """A wrapper whose launches on the CPU are recorded, and the recorder."""
    options = {key: launch.pop(key) for key in ("code", "ordinal") if key in launch}
    driver = RecordingDriver(ranks, **options)
    names = [f"a{i}" for i in range(n_args or len(ranks))]
    namespace = {"token": object()}  # known by identity: every recorder has a target of its own
    exec(f"def kernel({', '.join(names)}): token", namespace)
    wrapper = xk.numba_cuda_kernel(namespace["kernel"], outs, input_output_aliases=aliases, **launch)
    table = (ctypes.c_uint64 * len(functions))(*functions)

    def get_ready(self, name, signature, platform):
        make = lambda: xk._Compiled(*xk._compile_handler(signature, xk._CudaEmitter(signature, driver, table)))
        xk._register(name, "cpu", make)

    monkeypatch.setattr(xk._CudaCode, "get_ready", get_ready)
    return wrapper, driver


def aligned(shape, dtype="float32"):
    """An array that JAX takes over without a copy, so that its address is that of the handler's buffer."""
    return jax.device_put(np.zeros(shape, dtype))


@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_cuda_handler_packs_arrays(monkeypatch, dtype):
    op, driver = record(monkeypatch, (3, 0, 2), outs=lambda x, s: jax.ShapeDtypeStruct((4, 5), "int16"), grid=(2, 3),
                        block=(4, 5, 6), shared_mem=128)  # fmt: skip
    x, s = aligned((2, 3, 4), dtype), aligned((), "float32")
    jax.block_until_ready(op(x, s))
    [(function, grid, block, shared, stream, (a, b, out))] = driver.launches
    n = np.dtype(dtype).itemsize
    assert (function, grid, block, shared, stream) == (0xF0, (2, 3, 1), (4, 5, 6), 128, driver.STREAM)
    assert a == [24, n, x.unsafe_buffer_pointer(), 2, 3, 4, 12 * n, 4 * n, n]
    assert b == [1, 4, s.unsafe_buffer_pointer()]
    assert out[:2] == [20, 2] and out[3:] == [4, 5, 10, 2]


def test_cuda_handler_serves_every_shape(monkeypatch):
    op, driver = record(monkeypatch, (1, 1), launch_dims=lambda x: x.size)
    before = set(xk._STORE.targets)
    for n in (1, 256, 257):
        jax.block_until_ready(op(aligned((n,))))
    assert [launch[1:3] for launch in driver.launches] == [((g, 1, 1), (256, 1, 1)) for g in (1, 1, 2)]
    assert [launch[5][0][3:] for launch in driver.launches] == [[1, 4], [256, 4], [257, 4]]
    assert [platform for _, platform in set(xk._STORE.targets) - before if platform == "cpu"] == ["cpu"]


def test_cuda_handler_launches_once_per_slice(monkeypatch):
    op, driver = record(monkeypatch, (1, 1, 1), grid=7, block=32)
    x, y = aligned((3, 5)), aligned((5,))
    jax.block_until_ready(jax.vmap(op, in_axes=(0, None))(x, y))
    assert [launch[1:5] for launch in driver.launches] == [((7, 1, 1), (32, 1, 1), 0, driver.STREAM)] * 3
    starts = [[array[2] for array in launch[5]] for launch in driver.launches]
    assert [s[0] - starts[0][0] for s in starts] == [0, 20, 40]
    assert [s[1] - starts[0][1] for s in starts] == [0, 0, 0]  # unbatched: not copied
    assert [s[2] - starts[0][2] for s in starts] == [0, 20, 40]
    assert all(launch[5][0][3:] == [5, 4] for launch in driver.launches)


def test_cuda_handler_launches_nested_batches(monkeypatch):
    op, driver = record(monkeypatch, (1, 1, 1), grid=1, block=1)
    nested = jax.vmap(jax.vmap(op, in_axes=(0, None)), in_axes=(None, 0))
    jax.block_until_ready(nested(aligned((3, 5)), aligned((2, 5))))
    starts = [[array[2] for array in launch[5]] for launch in driver.launches]
    offsets = [[(a - b) // 20 for a, b in zip(s, starts[0], strict=True)] for s in starts]
    assert offsets == [[j, i, 3 * i + j] for i in range(2) for j in range(3)]
    jax.block_until_ready(jax.vmap(op)(aligned((0, 5)), aligned((0, 5))))
    assert len(driver.launches) == 6


def test_cuda_handler_uses_the_function_of_its_device(monkeypatch):
    op, driver = record(monkeypatch, (1, 1), grid=1, block=1, ordinal=1)
    jax.block_until_ready(op(aligned((2,))))
    assert driver.launches[0][0] == 0xF1


@pytest.mark.parametrize("ordinal", [-1, 1, 2, 1000])
def test_cuda_handler_refuses_a_device_it_was_not_loaded_for(monkeypatch, ordinal):
    op, driver = record(monkeypatch, (1, 1), grid=1, block=1, ordinal=ordinal, functions=(0xF0, 0))
    with pytest.raises(Exception, match="kernel 'kernel' is not loaded on this GPU"):
        jax.block_until_ready(op(aligned((2,))))
    assert driver.launches == []


def test_cuda_launch_failure_is_the_users_error(monkeypatch):
    op, driver = record(monkeypatch, (1, 1), grid=(1, 2), block=64, shared_mem=300_000, code=1)
    text = re.escape(
        "RuntimeError: CUDA_ERROR_INVALID_VALUE: invalid argument, from a launch with grid=(1, 2, 1), "
        "block=(64, 1, 1), shared_mem=300000 (raised in kernel 'kernel')"
    )
    for _ in range(2):
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(op(aligned((2,))))
    driver.code = 0
    jax.block_until_ready(op(aligned((2,))))
    with pytest.raises(Exception, match=text):
        driver.code = 1
        jax.block_until_ready(jax.vmap(op)(aligned((4, 2))))
    assert len(driver.launches) == 4  # the first slice that fails is the last one launched


def test_cuda_handler_is_command_buffer_compatible():
    assert xk._CudaEmitter.traits == xk._COMMAND_BUFFER_COMPATIBLE == 1
    extension, metadata = xk.XLA_FFI_Metadata_Extension(), xk.XLA_FFI_Metadata()
    extension.extension_base.type, extension.metadata = xk._EXTENSION_METADATA, ctypes.addressof(metadata)
    signature = cuda_signature(("float32", 1), ("float32", 1))
    emitter = xk._CudaEmitter(signature, RecordingDriver((1, 1)), (ctypes.c_uint64 * 1)(1))
    address, keep = xk._compile_handler(signature, emitter)
    frame = xk.XLA_FFI_CallFrame(extension_start=ctypes.addressof(extension))
    assert ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)(ctypes.addressof(frame)) is None
    assert metadata.traits == 1 and keep is not None
    assert (metadata.api_version.major_version, metadata.api_version.minor_version) == xk._ffi_api_version()


@compiled
@pytest.mark.parametrize("command_buffer", [False, True])
def test_cuda_callable_traits(command_buffer):
    call = xk.numba_cuda_callable(cuda_copy, lambda x: x, command_buffer=command_buffer)
    emitter = call.code.emitter(cuda_signature(("float32", 1), ("float32", 1)), RecordingDriver((1, 1)))
    assert emitter.traits == command_buffer and not emitter.host_memory


def test_cuda_empty_launch_gives_zeros_and_keeps_aliases(monkeypatch):
    op, driver = record(monkeypatch, (1, 1, 1), outs=lambda x: (x, x), aliases={0: 1}, launch_dims=0, n_args=3)
    zeros, kept = jax.jit(op)(jnp.arange(3.0))
    np.testing.assert_array_equal(zeros, [0, 0, 0])
    np.testing.assert_array_equal(kept, [0, 1, 2])
    assert driver.launches == []


# -- without a GPU: what XLA is told


def cuda_copy(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i]


def lower_for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@compiled
def test_cuda_lowering():
    op = xk.numba_cuda_kernel(cuda_copy, lambda x: x, launch_dims=lambda x: x.size, shared_mem=64)
    text = lower_for_cuda(op, jax.ShapeDtypeStruct((1000,), jnp.float32))
    assert re.search(r"stablehlo.custom_call @xla_kernels\.cuda_copy\.[0-9a-f]{24}\(", text)
    assert re.search(r"launch = (array<i64: |dense<\[)4, 1, 1, 256, 1, 1, 64\]?>", text)
    assert "output_operand_alias" not in text and "has_side_effect = true" not in text
    aliased = xk.numba_cuda_kernel(cuda_copy, lambda x: x, grid=4, block=(8, 8), input_output_aliases={0: 0},
                                   has_side_effect=True)  # fmt: skip
    text = lower_for_cuda(aliased, jax.ShapeDtypeStruct((1000,), jnp.float32))
    assert re.search(r"launch = (array<i64: |dense<\[)4, 1, 1, 8, 8, 1, 0\]?>", text)
    assert "output_operand_alias" in text and "has_side_effect = true" in text


@compiled
def test_cuda_wrappers_can_be_freed():
    def trace():
        wrapper = xk.numba_cuda_kernel(lambda x, out: None, lambda x: x, grid=1, block=1)
        jax.eval_shape(wrapper, jax.ShapeDtypeStruct((5,), jnp.float32))
        return weakref.ref(wrapper)

    wrappers = [trace() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in wrappers] == [None] * 3


@compiled
@pytest.mark.skipif(bool(GPUS), reason="shows what can be done without a GPU")
def test_cuda_export_from_a_machine_without_gpu():
    op = jax.jit(xk.numba_cuda_kernel(cuda_copy, lambda x: x, launch_dims=lambda x: x.size))
    spec = jax.ShapeDtypeStruct((5,), jnp.float32)
    jax.eval_shape(op, spec)
    exported = jax.export.export(op, platforms=["cuda"], disabled_checks=xk.export_checks())(spec)
    assert exported.platforms == ("cuda",) and "xla_kernels.cuda_copy." in exported.mlir_module()


@compiled
def test_cuda_targets_derive_from_content():
    def name(factor, dtype=jnp.float32, **options):
        def kernel(x, out):
            out[0] = factor * x[0]

        kernel = cuda.jit(**options)(kernel) if options else kernel
        text = lower_for_cuda(
            xk.numba_cuda_kernel(kernel, lambda x: x, grid=1, block=1), jax.ShapeDtypeStruct((1,), dtype)
        )
        return re.search(r"custom_call @([\w.]+)", text)[1]

    names = [name(2), name(3), name(2, jnp.int32), name(2, fastmath=False), name(2, fastmath=True)]
    assert len(set(names)) == 5
    assert name(2) == names[0] and name(2, fastmath=True) == names[4]


@compiled
@pytest.mark.parametrize("body, text", [
    ("x[0] = out[0]", "; its inputs are read-only, because JAX may share them: write to an output, and use "
     "input_output_aliases to start it with an input's value:\n"),
    ("out[0] = x.nope", ":\n"),
    ("return 1", "; it returns a value: write to the output arrays and return nothing:\n"),
])  # fmt: skip
def test_cuda_kernel_that_cannot_be_compiled(body, text):
    cuda_ptx(cuda_copy, cuda_signature(("float32", 1), ("float32", 1)))  # skips without NVVM
    namespace = {}
    exec(f"def kernel(x, out): {body}", namespace)
    op = xk.numba_cuda_kernel(namespace["kernel"], lambda x: x, grid=1, block=1)
    refused = "Numba CUDA cannot compile kernel 'kernel' for (float32[:]) -> (float32[:])"
    with pytest.raises(TypeError, match=re.escape(refused + text)):
        lower_for_cuda(op, jax.ShapeDtypeStruct((1,), jnp.float32))


def cuda_error_cases():
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    half = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    kernel, call, host = (lambda x, out: None), (lambda x, out, stream: None), numba.njit(lambda x, out: None)
    build = lambda outs=spec, **options: xk.numba_cuda_kernel(kernel, outs, **options)
    one = lambda *args, outs=spec: jax.eval_shape(build(outs, grid=1, block=1), *args)
    many = lambda *args: jax.eval_shape(xk.numba_cuda_callable(call, spec), *args)
    form, ints = (
        "give either both grid and block, or launch_dims; got ",
        "must be an int or a tuple of 1 to 3 ints; got ",
    )
    # fmt: off
    return [
        ("no_form", lambda: build(), ValueError, form + "none"),
        ("grid_only", lambda: build(grid=1), ValueError, form + "grid"),
        ("block_only", lambda: build(block=1), ValueError, form + "block"),
        ("both", lambda: build(grid=1, block=1, launch_dims=1), ValueError, form + "grid and block and launch_dims"),
        ("four", lambda: build(launch_dims=(1, 2, 3, 4)), ValueError, f"launch_dims {ints}(1, 2, 3, 4)"),
        ("four_block", lambda: build(grid=1, block=(1,) * 4), ValueError, f"block {ints}(1, 1, 1, 1)"),
        ("zero", lambda: build(grid=(), block=1), ValueError, f"grid {ints}()"),
        ("float", lambda: build(grid=1.5, block=1), TypeError, f"grid {ints}1.5"),
        ("threads", lambda: build(grid=1, block=(32, 64)), ValueError,
         "a CUDA block has at most 1024 threads; block=(32, 64, 1) has 2048"),
        ("block_x", lambda: build(grid=1, block=1025), ValueError, "block.x must be from 1 to 1024; got 1025"),
        ("block_z", lambda: build(grid=1, block=(1, 1, 65)), ValueError, "block.z must be from 1 to 64; got 65"),
        ("block_0", lambda: build(grid=1, block=0), ValueError, "block.x must be from 1 to 1024; got 0"),
        ("per_block", lambda: build(launch_dims=1, threads_per_block=2048), ValueError, "from 1 to 1024; got 2048"),
        ("per_block_2d", lambda: build(launch_dims=1, threads_per_block=(8, 8)), TypeError, "an int; got (8, 8)"),
        ("grid_neg", lambda: build(grid=-1, block=1), ValueError, "grid.x must be from 0 to 2147483647; got -1"),
        ("grid_x", lambda: build(grid=2**31, block=1), ValueError, "from 0 to 2147483647; got 2147483648 in grid="),
        ("grid_y", lambda: build(grid=(1, 65536), block=1), ValueError, "grid.y must be from 0 to 65535; got 65536"),
        ("dims_neg", lambda: build(launch_dims=(4, -1)), ValueError, "launch_dims must not be negative; got (4, -1)"),
        ("dims_call", lambda: jax.eval_shape(build(launch_dims=lambda x: (-x.size,)), spec), ValueError,
         "launch_dims must not be negative; got (-3,)"),
        ("shared", lambda: build(grid=1, block=1, shared_mem=-1), ValueError,
         "shared_mem must be a number of bytes; got -1"),
        ("dtype_in", lambda: one(half), TypeError, "input 0 is bfloat16[3], a dtype that Numba CUDA has no arrays of"),
        ("dtype_out", lambda: one(spec, outs=half), TypeError, "output 0 is bfloat16[3], a dtype that Numba CUDA has"),
        ("arity", lambda: one(spec, spec), TypeError, "this call gives it 2 inputs and 1 outputs"),
        ("outs", lambda: build(3, grid=1, block=1), TypeError, "outs must be specs"),
        ("method", lambda: build(grid=1, block=1, vmap_method="loop"), ValueError, "vmap_method must be one of"),
        ("host", lambda: xk.numba_cuda_kernel(host, spec, grid=1, block=1), TypeError,
         "takes a function decorated with numba.cuda.jit (without [grid, block]) or a plain function; got"),
        ("call_arity", lambda: many(spec, spec), TypeError, "takes the parameters (x, out, stream), but this call "
         "gives it 2 inputs, 1 outputs and scratch buffers, and a stream: func(in..., out..., stream)"),
        ("call_kind", lambda: xk.numba_cuda_callable(3, spec), TypeError,
         "takes a Python function that launches kernels (for one kernel use numba_cuda_kernel); got int 3"),
        ("call_kernel", lambda: xk.numba_cuda_callable(host, spec), TypeError, "for one kernel use numba_cuda_kernel"),
    ]
    # fmt: on


@pytest.mark.parametrize("call, kind, text", [pytest.param(*case, id=name) for name, *case in cuda_error_cases()])
def test_cuda_errors(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.skipif(bool(GPUS) or CUDASIM, reason="there is somewhere to run")
def test_cuda_without_gpu_or_simulator():
    op = xk.numba_cuda_kernel(cuda_copy, lambda x: x, launch_dims=3)
    text = (
        r"numba_cuda_kernel 'cuda_copy': this computation is compiled for 'cpu', but it runs on NVIDIA GPUs \(pip "
        r"install .*\); to run it in Python on the CPU set NUMBA_ENABLE_CUDASIM=1 before .* or use numba_kernel"
    )
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=text):
            op(jnp.arange(3.0))
    call = xk.numba_cuda_callable(lambda x, out, stream: None, lambda x: x)
    with pytest.raises(
        NotImplementedError, match=r"numba_cuda_callable '<lambda>': this computation is compiled for 'cpu'"
    ):
        jax.jit(call)(jnp.arange(3.0))


def test_cuda_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba.cuda", None)
    op = xk.numba_cuda_kernel(cuda_copy, lambda x: x, launch_dims=3)
    with pytest.raises(ImportError, match=r"numba_cuda_kernel needs numba, .*pip install 'xla_kernels\[cuda13\]'"):
        op(jnp.arange(3.0))


# -- without a GPU: the code that talks to Numba and to the driver, against a driver that only keeps a log

FAKE_DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef int R; typedef void *P; typedef uint64_t D; typedef unsigned U;
static char fake_log_[1 << 16]; static int used; static uintptr_t next_ = 0x20000;
static __thread uintptr_t stack[64]; static __thread int top;
#define LOG(...) used += snprintf(fake_log_ + used, sizeof fake_log_ - used, __VA_ARGS__)
const char *fake_log(void) { used = 0; return fake_log_; }
R cuInit(U f) { return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuDeviceGetCount(int *n) { *n = 2; return 0; }
R cuDeviceGet(int *d, int i) { *d = i; return 0; }
R cuDeviceGetName(char *s, int n, int d) { strncpy(s, "fake", n); return 0; }
R cuDeviceGetUuid(char *s, int d) { memset(s, d + 1, 16); return 0; }
R cuDeviceGetUuid_v2(char *s, int d) { return cuDeviceGetUuid(s, d); }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : 1024; return 0; }
R cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)(uintptr_t)(0x1000 + 16 * d); return 0; }
R cuDevicePrimaryCtxGetState(int d, U *f, int *a) { *f = 0; *a = 1; return 0; }
R cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
R cuCtxPushCurrent_v2(P c) { stack[top++] = (uintptr_t)c; return 0; }
R cuCtxPopCurrent_v2(P *c) { if (!top) return 201; *c = (P)stack[--top]; return 0; }
R cuCtxGetCurrent(P *c) { *c = top ? (P)stack[top - 1] : 0; return 0; }
R cuCtxSetCurrent(P c) { stack[top ? top - 1 : top++] = (uintptr_t)c; return 0; }
R cuCtxGetDevice(int *d) { if (!top) return 201; *d = (stack[top - 1] - 0x1000) / 16; return 0; }
R cuStreamGetCtx(P s, P *c) { return cuCtxGetCurrent(c); }
R cuStreamGetDevice(P s, int *d) { return cuCtxGetDevice(d); }
R cuMemGetInfo_v2(size_t *f, size_t *t) { *f = *t = 1ull << 37; return 0; }
R cuModuleLoadData(P *m, const char *image) { *m = (P)(next_ += 16); return memcmp(image, "\177ELF", 4) ? 200 : 0; }
R cuModuleLoadDataEx(P *m, P image, U n, P o, P v) { *m = (P)((next_ += 16) | 1u << 30); return 0; }  // Numba's way
R cuModuleUnload(P m) { return 0; }
R cuModuleGetFunction(P *f, uintptr_t m, P name) { *f = (P)(m >> 30 ? m : m | stack[top - 1] << 32); return 0; }
R cuModuleGetGlobal_v2(D *p, size_t *n, P m, P s) { *p = 0x1234; *n = 4; return 0; }
R cuFuncSetAttribute(P f, int a, int v) { LOG("attribute %d=%d\n", a, v); return 0; }
R cuFuncGetAttribute(int *v, int a, P f) { *v = a == 1 ? 128 : 64; return 0; }
R cuLibraryLoadData(P *l, P c, P a, P b, U n, P d, P e, U m) { *l = (P)(next_ += 16); return 0; }
R cuLibraryGetKernel(P *k, P l, P name) { *k = l; return 0; }
R cuLibraryGetGlobal(D *p, size_t *n, P l, P s) { *p = 0x1234; *n = 4; return 0; }
R cuKernelGetFunction(P *f, P k) { *f = k; return 0; }
R cuKernelGetAttribute(int *v, int a, P k, int d) { *v = 64; return 0; }
R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, P f, int b, size_t s) { *n = 4; return 0; }
R cuPointerGetAttribute(D *data, int a, D p) { *data = p; return 0; }
R cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_INVALID_VALUE"; return 0; }
R cuGetErrorString(int e, const char **s) { *s = "invalid argument"; return 0; }
R cuMemsetD8Async(D p, unsigned char v, size_t n, P s) { return 0; }
R cuMemcpyDtoH_v2(P d, D s, size_t n) { memset(d, 0, n); return 0; }
R cuIpcOpenMemHandle(void) { return 0; }
R cuIpcOpenMemHandle_v2(void) { return 0; }
R cuLinkCreate_v2(U n, P a, P b, P *s) { *s = (P)9; return 0; }
R cuLinkAddData_v2(P s, int t, P d, size_t n, P name, U k, P a, P b) { return 0; }
R cuLinkAddFile_v2(P s, int t, P path, U k, P a, P b) { return 0; }
R cuLinkComplete(P s, P *o, size_t *n) { static char cubin[] = "\177ELF"; *o = cubin; *n = 5; return 0; }
R cuLinkDestroy(P s) { return 0; }
R cuLaunchKernel(P f, U gx, U gy, U gz, U bx, U by, U bz, U shared, P stream, D **params, P extra) {
  LOG("launch %s on device %d: %u,%u,%u x %u,%u,%u +%u stream %zx\n", (uintptr_t)f >> 32 ? "native" : "numba",
      (uintptr_t)f >> 32 ? (int)(((uintptr_t)f >> 32) - 0x1000) / 16 : top ? (int)(stack[top - 1] - 0x1000) / 16 : -1,
      gx, gy, gz, bx, by, bz, shared, (size_t)stream);
  return bx == 999;
}
R cuLaunchCooperativeKernel(P f, U a, U b, U c, U d, U e, U g, U shared, P stream, P params) {
  return cuLaunchKernel(f, a, b, c, d, e, g, shared, stream, params, 0);
}
typedef struct { U gx, gy, gz, bx, by, bz, shared; P stream; } Config;
R cuLaunchKernelEx(const Config *c, P f, P params, P extra) {
  return cuLaunchKernel(f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, params, extra);
}
#include <dlfcn.h>
static R nothing(void) { return 0; }
R cuGetProcAddress_v2(const char *name, P *result, int version, D flags, int *status) {
  char versioned[128];
  P self = dlopen("libcuda.so.1", RTLD_LAZY);
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *result = dlsym(self, versioned);
  if (!*result) { *result = dlsym(self, name); }
  if (!*result) { *result = (P)nothing; }
  if (status) { *status = 0; }
  return 0;
}
R cuGetProcAddress(const char *name, P *result, int version, D flags) {
  return cuGetProcAddress_v2(name, result, version, flags, 0);
}
"""

FAKE_CUDA = "XLA_KERNELS_FAKE_CUDA" in os.environ


def faked(test):
    test = pytest.mark.filterwarnings("ignore:Grid size")(test)
    return pytest.mark.skipif(not FAKE_CUDA, reason="runs in the subprocess of test_cuda_fake_driver")(test)


@pytest.mark.skipif(CUDASIM or FAKE_CUDA, reason="runs once")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_cuda_fake_driver(tmp_path):
    cuda_ptx(cuda_copy, cuda_signature(("float32", 1), ("float32", 1)))  # skips without NVVM
    library = tmp_path / "libcuda.so.1"
    (tmp_path / "fake.c").write_text(FAKE_DRIVER)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        f"-Wl,-soname,{library.name}",
        "-o",
        library,
        tmp_path / "fake.c",
        "-ldl",
    ]
    subprocess.run(command, check=True)
    paths = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = {"XLA_KERNELS_FAKE_CUDA": "1", "LD_LIBRARY_PATH": paths, "NUMBA_CUDA_DRIVER": str(library)}
    assert run_pytest("-k", "fakecuda", **environment) >= 8


PLACE = RecordingDriver(())  # the stream and the device that handlers are told; targets live on, and so does this


@pytest.fixture
def fake_gpus(monkeypatch):
    """Two fake GPUs, whose handlers are registered for the CPU; returns the log and a setter of the device."""

    class Driver(xk._CudaDriver):
        def __init__(self):
            super().__init__()
            self.overrides = {name: where.address(name) for name in ("Stream_Get", "DeviceOrdinal_Get")}

        def address(self, name):
            return (
                where.address(name) if name in where.callbacks and name != "cuLaunchKernel" else super().address(name)
            )

    def get_ready(self, name, signature, platform):
        make = lambda: xk._Compiled(*xk._compile_handler(signature, self.emitter(signature, xk._CudaDriver())))
        xk._register(name, "cpu", make)

    where = PLACE
    where.ordinal = 0
    fake_log = ctypes.CDLL("libcuda.so.1").fake_log
    fake_log.restype = ctypes.c_char_p
    monkeypatch.setattr(xk, "_cuda_ordinals", lambda: [0, 1])
    monkeypatch.setattr(xk, "_CudaDriver", Driver)
    monkeypatch.setattr(xk._CudaCode, "get_ready", get_ready)
    fake_log()
    return (lambda: fake_log().decode().splitlines()), functools.partial(setattr, where, "ordinal")


@faked
def test_fakecuda_native_launch_on_each_device(fake_gpus):
    log, set_device = fake_gpus
    op = xk.numba_cuda_kernel(cuda_stencil, lambda x: x, grid=(2, 3), block=8, shared_mem=64)
    jax.block_until_ready(op(jnp.arange(9.0)))
    # 227 KiB less the kernel's static shared memory are allowed on both
    assert log() == ["attribute 8=232320"] * 2 + ["launch native on device 0: 2,3,1 x 8,1,1 +64 stream 5eed"]
    set_device(1)
    jax.block_until_ready(jax.vmap(op)(jnp.ones((2, 9))))
    assert log() == ["launch native on device 1: 2,3,1 x 8,1,1 +64 stream 5eed"] * 2
    set_device(2)
    with pytest.raises(Exception, match="kernel 'cuda_stencil' is not loaded on this GPU"):
        jax.block_until_ready(op(jnp.arange(9.0)))


@faked
def test_fakecuda_failed_launch(fake_gpus):
    op = xk.numba_cuda_kernel(cuda_stencil, lambda x: x, grid=1, block=999)
    with pytest.raises(Exception, match=r"CUDA_ERROR_INVALID_VALUE: invalid .* \(raised in kernel 'cuda_stencil'\)"):
        jax.block_until_ready(op(jnp.arange(9.0)))


def cooperative_kernel(x, out):
    cuda.cg.this_grid().sync()
    out[0] = x[0]


@faked
@pytest.mark.parametrize("kind", ["debug", "cooperative", "layout"])
def test_fakecuda_python_launch(fake_gpus, monkeypatch, kind):
    log, set_device = fake_gpus
    if kind == "layout":  # as if Numba had changed it
        monkeypatch.setattr(xk, "_cuda_params", lambda ranks: ["u64"])
    options = {"debug": True, "opt": False} if kind == "debug" else {"fastmath": kind == "layout"}
    kernel = cuda.jit(**options)(cooperative_kernel if kind == "cooperative" else cuda_copy)
    op = xk.numba_cuda_kernel(kernel, lambda x: x, grid=(2, 3), block=8, shared_mem=64)
    set_device(1)
    jax.block_until_ready(jax.vmap(op)(jnp.ones((2, 9))))
    assert log() == ["launch numba on device 1: 2,3,1 x 8,1,1 +64 stream 5eed"] * 2


@faked
def test_fakecuda_callable(fake_gpus):
    log, set_device = fake_gpus
    seen, kernel = [], cuda.jit(cuda_copy)

    @xk.numba_cuda_callable(outs=lambda x: jax.ShapeDtypeStruct((2, 3), "int8"), scratch=lambda x: x)
    def call(x, out, tmp, stream):
        seen.extend((a.shape, str(a.dtype), a.strides) for a in (x, out, tmp))
        kernel[1, 8, stream](x, tmp)
        if x.shape == (0,):
            raise LookupError("empty")

    set_device(1)
    jax.block_until_ready(call(jnp.arange(5).astype("float16")))
    assert seen == [((5,), "float16", (2,)), ((2, 3), "int8", (3, 1)), ((5,), "float16", (2,))]
    assert log() == ["launch numba on device 1: 1,1,1 x 8,1,1 +0 stream 5eed"]
    with pytest.raises(Exception, match=r"LookupError: empty \(raised in kernel 'call'\)"):
        jax.block_until_ready(call(jnp.zeros(0, "float16")))


@faked
def test_fakecuda_explicit_signature_and_errors(fake_gpus):
    explicit = cuda.jit("void(float32[:], float32[:])")(cuda_copy)
    jax.block_until_ready(xk.numba_cuda_kernel(explicit, lambda x: x, grid=1, block=8)(jnp.ones(3)))

    def writes(x, out):
        x[0] = 1

    def adds(x, out):
        cuda.atomic.add(x[1:], 0, 1)

    for kernel in (writes, adds):
        with pytest.raises(TypeError, match=f"kernel '{kernel.__name__}' .*; its inputs are read-only"):
            xk.numba_cuda_kernel(kernel, lambda x: x, grid=1, block=8)(jnp.ones(3))


@faked
def test_fakecuda_transient_failure_is_not_remembered(fake_gpus, monkeypatch):
    def kernel(x, out):
        out[0] = x[0] - 1

    def fails(*args):
        raise RuntimeError("cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY")

    op = xk.numba_cuda_kernel(kernel, lambda x: x, grid=1, block=8)
    with monkeypatch.context() as patch:
        patch.setattr(xk._CudaDriver, "load", fails)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            op(jnp.ones(3))
    jax.block_until_ready(op(jnp.ones(3)))
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed with CUDA_ERROR_INVALID_VALUE: invalid argument"):
        xk._CudaDriver().load(b"no cubin", "kernel", 0, None)


# -- the simulator, and the same on a GPU


@pytest.mark.skipif(CUDASIM, reason="this is the simulator")
def test_cuda_simulator():
    """The tests below in a process with the simulator, which Numba decides on when it is imported."""
    assert run_pytest("-k", "cuda and not ptx", NUMBA_ENABLE_CUDASIM="1", JAX_PLATFORMS="cpu") >= 50


def launch_1d(x, *rest):
    return x.size


def cuda_add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def cuda_stencil(x, out):
    i = cuda.grid(1)
    if i < out.size:
        total = x[i]
        if i > 0:
            total += x[i - 1]
        if i + 1 < x.size:
            total += x[i + 1]
        out[i] = total


def cuda_scale(x, factor, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = factor[()] * x[i]


def stencil_reference(x):
    padded = np.pad(np.asarray(x), [(0, 0)] * (x.ndim - 1) + [(1, 1)])
    return padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]


@on_device
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_cuda_dtypes(dtype):
    x = jnp.arange(1, 38).astype(dtype)
    kernel, n = (cuda_copy, 1) if dtype == "bool" else (cuda_add, 2)  # Numba adds two bools to an integer
    out = xk.numba_cuda_kernel(kernel, lambda *ins: ins[0], launch_dims=launch_1d, threads_per_block=32)(*[x] * n)
    np.testing.assert_array_equal(out, n * np.asarray(x))
    assert out.dtype == np.dtype(dtype)


@on_device
@pytest.mark.parametrize("shape", [(1,), (40,), (3, 5), (17, 18), (2, 3, 5), (9, 3, 5)])
def test_cuda_launch_dims_cover_ragged_edges(shape):
    @cuda.jit
    def write_1d(x, out):
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = 1 + x[i]

    @cuda.jit
    def write_2d(x, out):
        i, j = cuda.grid(2)
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = 1 + x[i, j]

    @cuda.jit
    def write_3d(x, out):
        i, j, k = cuda.grid(3)
        if i < out.shape[0] and j < out.shape[1] and k < out.shape[2]:
            out[i, j, k] = 1 + x[i, j, k]

    kernel = [write_1d, write_2d, write_3d][len(shape) - 1]
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    op = xk.numba_cuda_kernel(kernel, lambda x: x, launch_dims=lambda x: x.shape, threads_per_block=16)
    np.testing.assert_array_equal(jax.jit(op)(x), 1 + x)


@on_device
@pytest.mark.parametrize("dynamic", [False, True])
def test_cuda_shared_memory_and_syncthreads(dynamic):
    @cuda.jit
    def reverse_blocks(x, out):
        tile = cuda.shared.array(0 if dynamic else 8, numba.float32)
        i, t = cuda.grid(1), cuda.threadIdx.x
        tile[t] = x[i]
        cuda.syncthreads()
        out[i] = tile[cuda.blockDim.x - 1 - t]

    op = xk.numba_cuda_kernel(reverse_blocks, lambda x: x, grid=3, block=8, shared_mem=32 * dynamic)
    x = jnp.arange(24, dtype=jnp.float32)
    np.testing.assert_array_equal(op(x), x.reshape(3, 8)[:, ::-1].ravel())


@on_device
def test_cuda_atomics_into_an_aliased_output():
    @cuda.jit
    def scatter_add(index, value, total, out):  # out starts as total
        i = cuda.grid(1)
        if i < index.size:
            cuda.atomic.add(out, index[i], value[i])

    op = xk.numba_cuda_kernel(scatter_add, lambda i, v, t: t, launch_dims=launch_1d, threads_per_block=16,
                              input_output_aliases={2: 0})  # fmt: skip
    index, value = jnp.array([0, 2, 2, 1, 2]), jnp.arange(1.0, 6)
    total = jnp.full(4, 10.0)
    np.testing.assert_array_equal(op(index, value, total), [11, 14, 20, 10])
    np.testing.assert_array_equal(total, [10] * 4)
    batched = jax.vmap(op, in_axes=(None, 0, None))(index, jnp.stack([value, 2 * value]), total)
    np.testing.assert_array_equal(batched, [[11, 14, 20, 10], [12, 18, 30, 10]])


@on_device
def test_cuda_vmap_runs_the_kernel_per_slice():
    op = xk.numba_cuda_kernel(cuda_stencil, lambda x: x, launch_dims=launch_1d, threads_per_block=8)
    x = jnp.asarray(np.random.default_rng(1).integers(0, 9, (3, 2, 11)).astype("float32"))
    np.testing.assert_array_equal(jax.vmap(jax.vmap(op))(x), stencil_reference(x))
    np.testing.assert_array_equal(jax.jit(jax.vmap(op, in_axes=1, out_axes=1))(x[0].T), stencil_reference(x[0]).T)
    explicit = xk.numba_cuda_kernel(cuda_stencil, lambda x: x, grid=2, block=8)
    np.testing.assert_array_equal(jax.vmap(explicit)(x[0]), stencil_reference(x[0]))
    assert jax.vmap(op)(x[:, 0][:0]).shape == (0, 11)


@on_device
def test_cuda_zero_dimensional_and_unbatched_operands():
    op = xk.numba_cuda_kernel(cuda_scale, lambda x, f: x, launch_dims=launch_1d, threads_per_block=8)
    x, factors = jnp.arange(5.0), jnp.array([2.0, 3.0])
    np.testing.assert_array_equal(op(x, factors[0]), 2 * x)
    np.testing.assert_array_equal(jax.vmap(op, (None, 0))(x, factors), np.outer(factors, x))


@on_device
def test_cuda_zero_size_arrays():
    op = xk.numba_cuda_kernel(cuda_add, lambda x, y: x, launch_dims=launch_1d)
    assert op(jnp.zeros(0), jnp.zeros(0)).shape == (0,)
    launched = xk.numba_cuda_kernel(cuda_add, lambda x, y: x, grid=1, block=4)
    assert launched(jnp.zeros(0), jnp.zeros(0)).shape == (0,)
    unread = xk.numba_cuda_kernel(cuda_copy, jax.ShapeDtypeStruct((2,), jnp.float32), launch_dims=launch_1d)
    np.testing.assert_array_equal(unread(jnp.zeros(0)), [0, 0])


@on_device
def test_cuda_several_outputs_and_scratch():
    @cuda.jit
    def step(x, out, total, tmp):
        i = cuda.grid(1)
        if i == 0:
            total[0] = 0
        if i < x.size:
            tmp[i] = x[i] + 1
            out[i] = tmp[i]

        cuda.syncthreads()
        if i < x.size:
            cuda.atomic.add(total, 0, tmp[i])

    spec = jax.ShapeDtypeStruct((1,), jnp.float32)
    op = xk.numba_cuda_kernel(step, lambda x: {"moved": x, "total": spec}, scratch=lambda x: x, grid=1, block=8)
    x = jnp.arange(10.0).reshape(2, 5)
    out = jax.vmap(op)(x)
    np.testing.assert_array_equal(out["moved"], x + 1)
    np.testing.assert_array_equal(out["total"], (x + 1).sum(1, keepdims=True))


@on_device
def test_cuda_callable_launches_several_kernels():
    add = cuda.jit(cuda_add)

    @xk.numba_cuda_callable(outs=lambda x: (x, x), scratch=lambda x: x)
    def twice(x, y, z, tmp, stream):
        own = cuda.device_array(x.shape, x.dtype)
        add[2, 8, stream](x, x, tmp)
        add[2, 8, stream](tmp, tmp, y)
        add[2, 8, stream](x, y, own)
        add[2, 8, stream](own, own, z)

    x = jnp.arange(11.0)
    for f in (twice, jax.jit(twice)):
        y, z = f(x)
        np.testing.assert_array_equal(y, 4 * x)
        np.testing.assert_array_equal(z, 10 * x)
    y, _ = jax.vmap(jax.vmap(twice))(jnp.ones((2, 3, 5)))
    np.testing.assert_array_equal(y, np.full((2, 3, 5), 4))


@on_device
def test_cuda_callable_exception_reaches_the_user():
    @xk.numba_cuda_callable(outs=lambda x: x)
    def fails(x, out, stream):
        raise LookupError(f"no table for {x.shape}")

    for _ in range(3):
        with pytest.raises(Exception, match=r"LookupError: no table for \(3,\) \(raised in kernel 'fails'\)"):
            jax.block_until_ready(fails(jnp.arange(3.0)))


@on_device
def test_cuda_decorator_and_control_flow():
    @xk.numba_cuda_kernel(outs=lambda x: x, launch_dims=launch_1d, threads_per_block=8)
    def increment(x, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] + 1

    x = jnp.arange(5.0)
    np.testing.assert_array_equal(jax.lax.fori_loop(0, 4, lambda _, c: increment(c), x), x + 4)
    last, all_ = jax.lax.scan(lambda c, _: (increment(c), increment(c)), x, None, length=3)
    np.testing.assert_array_equal(last, x + 3)
    np.testing.assert_array_equal(all_, x + np.arange(1, 4)[:, None])
    np.testing.assert_array_equal(jax.lax.cond(True, increment, lambda c: c, x), x + 1)


@on_device
def test_cuda_helper_functions_and_closures():
    @cuda.jit(device=True)
    def helper(value, factor):
        return factor * value

    def make(factor):
        @cuda.jit
        def kernel(x, out):
            i = cuda.grid(1)
            if i < out.size:
                out[i] = helper(x[i], factor)

        return xk.numba_cuda_kernel(kernel, lambda x: x, launch_dims=launch_1d, threads_per_block=8)

    x = jnp.arange(5.0)
    before = len(xk._STORE.targets)
    for _ in range(3):
        for factor in (2.0, 3.0):
            np.testing.assert_array_equal(make(factor)(x), factor * x)
    assert len(xk._STORE.targets) == before + 2


@simulated
def test_cudasim_input_is_read_only_and_errors_name_the_thread():
    @xk.numba_cuda_kernel(outs=lambda x: x, grid=1, block=1)
    def writes(x, out):
        x[0] = 1

    with pytest.raises(Exception, match=r"ValueError: tid=\[0, 0, 0\] ctaid=\[0, 0, 0\]: assignment destination is "
                                        r"read-only \(raised in kernel 'writes'\)"):  # fmt: skip
        jax.block_until_ready(writes(jnp.arange(3.0)))
    op = xk.numba_cuda_kernel(cuda_add, lambda x, y: x, launch_dims=launch_1d, threads_per_block=8)
    np.testing.assert_array_equal(op(jnp.ones(3), jnp.ones(3)), [2, 2, 2])


@simulated
def test_cudasim_runs_one_kernel_at_a_time():
    op = xk.numba_cuda_kernel(cuda_stencil, lambda x: x, launch_dims=launch_1d, threads_per_block=8)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(8, 12)).astype("float32"))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda row: np.asarray(op(row)), x))
    np.testing.assert_allclose(results, stencil_reference(x), rtol=1e-6)


@simulated
def test_cudasim_runs_on_cpu_only():
    op = xk.numba_cuda_kernel(cuda_add, lambda x, y: x, launch_dims=launch_1d)
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(
        NotImplementedError, match="compiled for 'cuda', but NUMBA_ENABLE_CUDASIM=1 runs kernels on the CPU"
    ):
        lower_for_cuda(op, spec, spec)


# -- with a GPU


@on_gpu
@pytest.mark.parametrize("launch", [{"grid": 1, "block": 64, "shared_mem": 10**6}, {"grid": 1, "block": 1024}])
def test_gpu_failed_launch_is_the_users_error(launch):
    @cuda.jit
    def kernel(x, out):
        table = cuda.shared.array(0, numba.float32)
        table[0] = x[0]
        local = cuda.local.array(64, numba.float32)  # many registers: 1,024 threads do not fit
        for i in range(64):
            local[i] = x[i % x.size] * i
        for i in range(64):
            out[0] += local[63 - i] * local[i]

    too_much = launch["block"] < 1024
    op = xk.numba_cuda_kernel(kernel, lambda x: x, **launch)
    if too_much:
        with pytest.raises(Exception, match=r"CUDA_ERROR_\w+: .*, from a launch with grid=\(1, 1, 1\), block=\(64, "):
            jax.block_until_ready(op(jnp.ones(4)))
    np.testing.assert_array_equal(xk.numba_cuda_kernel(cuda_copy, lambda x: x, launch_dims=4)(jnp.ones(4)), np.ones(4))


@on_gpu
def test_gpu_large_shared_memory():
    @cuda.jit
    def kernel(x, out):
        table = cuda.shared.array(0, numba.float32)
        table[16_000 + cuda.threadIdx.x] = x[cuda.threadIdx.x]
        cuda.syncthreads()
        out[cuda.threadIdx.x] = table[16_000 + cuda.threadIdx.x]

    op = xk.numba_cuda_kernel(kernel, lambda x: x, grid=1, block=32, shared_mem=4 * 16_032)  # above the usual 48 KiB
    np.testing.assert_array_equal(op(jnp.arange(32.0)), np.arange(32))


@on_gpu
@pytest.mark.parametrize("kind", ["native", "debug", "callable"])
def test_gpu_stream_order_under_load(kind):
    """The kernel stands between two XLA operations that take their time, many times over."""
    if kind == "callable":
        kernel = cuda.jit(cuda_stencil)
        launch = lambda x, out, stream: kernel[x.size // 256 + 1, 256, stream](x, out)
        op = xk.numba_cuda_callable(launch, lambda x: x)
    else:
        kernel = cuda.jit(debug=True, opt=False)(cuda_stencil) if kind == "debug" else cuda_stencil
        op = xk.numba_cuda_kernel(kernel, lambda x: x, launch_dims=launch_1d)

    @jax.jit
    def chain(a):
        for _ in range(20):
            a = a @ a / jnp.max(a)
            a = op(a.ravel()).reshape(a.shape)
            a = a @ a / jnp.max(a)
        return a

    def reference(a):
        pad = lambda x: jnp.pad(x, 1)
        for _ in range(20):
            a = a @ a / jnp.max(a)
            padded = pad(a.ravel())
            a = (padded[:-2] + padded[1:-1] + padded[2:]).reshape(a.shape)
            a = a @ a / jnp.max(a)
        return a

    a = jnp.asarray(np.random.default_rng(3).uniform(size=(512, 512)).astype("float32"))
    expected = jax.jit(reference)(a)
    for _ in range(5):
        np.testing.assert_allclose(chain(a), expected, rtol=1e-2)


@on_gpu
@pytest.mark.parametrize("flags", [
    "--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL",
])  # fmt: skip
def test_gpu_command_buffers(flags):
    """The tests above with CUDA graphs off, and on for every computation."""
    xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {flags} --xla_gpu_graph_min_graph_size=1"
    only = "(test_cuda or stream_order) and not simulator and not fake"
    assert run_pytest("-k", only, XLA_FLAGS=xla_flags, XLA_PYTHON_CLIENT_PREALLOCATE="false") >= 20


@on_gpu
def test_gpu_callable_in_a_command_buffer():
    cuda_copy_kernel = cuda.jit("void(float32[::1], float32[::1])")(cuda_copy)
    op = xk.numba_cuda_callable(lambda x, out, stream: cuda_copy_kernel[1, 32, stream](x, out), lambda x: x,
                                command_buffer=True)  # fmt: skip
    x = jnp.arange(8.0)
    step = jax.jit(lambda x: op(op(x * 2) + 1))
    for k in range(4):
        np.testing.assert_array_equal(step(x + k), (x + k) * 2 + 1)


@on_gpu
def test_gpu_every_device():
    op = jax.jit(xk.numba_cuda_kernel(cuda_stencil, lambda x: x, launch_dims=launch_1d))
    for k, device in enumerate(jax.local_devices(backend="cuda")):
        x = jax.device_put(jnp.arange(9.0) + k, device)
        assert op(x).devices() == {device}
        np.testing.assert_array_equal(op(x), stencil_reference(x))


@on_gpu
def test_gpu_cooperative_kernel_goes_through_python():
    @cuda.jit
    def kernel(x, out):
        cuda.cg.this_grid().sync()
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] + 1

    op = xk.numba_cuda_kernel(kernel, lambda x: x, grid=2, block=8)
    np.testing.assert_array_equal(op(jnp.arange(9.0)), np.arange(9) + 1)


# ======================================================================================================
# Warp
# ======================================================================================================

# ======================================================================================================
# XLACustomKernel
# ======================================================================================================
