"""Tests of xla_kernels: the matrix of operations, backends and transformations, and everything that broke elsewhere."""

import ctypes
import dataclasses
import functools
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap
import types
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
# Robustness
# ======================================================================================================


@xk.numba_kernel(outs=lambda x, y: (x, jax.ShapeDtypeStruct((), x.dtype)))
def running_sum(x, y, out, total):
    """Couples all elements of a slice, so any mix-up of rows, batches or strides changes the result."""
    acc = x.size * y[()]
    for i in np.ndindex(x.shape):
        acc += x[i]
        out[i] = acc
    total[()] = acc


def running_sum_reference(x, y):
    out = (x.size * y + np.cumsum(x.ravel())).astype(x.dtype).reshape(x.shape)
    return out, np.asarray(out.ravel()[-1] if x.size else 0, x.dtype)


@xk.numba_kernel(outs=lambda x: x)
def add_one(x, out):
    for i in range(x.size):
        out[i] = x[i] + 1


@xk.numba_kernel(outs=lambda x: x)
def refuse_negative(x, out):
    for i in range(x.size):
        if x[i] < 0:
            raise ValueError("negative element", i)
        out[i] = x[i]


def run_python(code, *argv, timeout=120, rc=0, **env):
    """Run `code` in a fresh interpreter with this file's imports; returns its output."""
    start = """
        import os, sys, threading, warnings
        import jax, jax.numpy as jnp, numba, numpy as np
        import xla_kernels as xk
        def add_one(x, out):
            for i in range(x.size):
                out[i] = x[i] + 1
        """
    command = [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code), *map(str, argv)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.dirname(xk.__file__), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == rc, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def target_of(function, *specs):
    """The name under which XLA finds the kernel."""
    return re.search(r"custom_call @\"?(xla_kernels[\w.]*)", jax.jit(function).lower(*specs).as_text())[1]


def x64(enabled):
    return jax.enable_x64(enabled) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(enabled)


FLOATS = jax.ShapeDtypeStruct((4,), jnp.float32)

# -- any shape, layout and batch -----------------------------------------------------------------------

SHAPE_DTYPES = ["float32", "int32", "uint32", "complex64"]


def random_shape(rng, rank):
    return tuple(int(n) for n in rng.choice([0, 1, 2, 3, 5, 7], rank, p=[0.06, 0.2, 0.2, 0.2, 0.2, 0.14]))


def random_array(rng, shape, dtype):
    return rng.integers(0, 4, shape).astype(dtype)


def random_layout(rng, x):
    """A transposed, reversed or strided way to read x, for NumPy and JAX alike."""
    perm = tuple(int(i) for i in rng.permutation(x.ndim))
    index = tuple(slice(None, None, int(rng.choice([1, 1, -1, 2]))) for _ in perm)
    return lambda a: a.transpose(perm)[index]


@pytest.mark.parametrize("dtype", SHAPE_DTYPES)
@pytest.mark.parametrize("rank", range(5))
def test_any_shape_and_layout_matches_numpy(dtype, rank):
    rng = np.random.default_rng([rank, SHAPE_DTYPES.index(dtype)])
    for _ in range(2):
        shapes = [random_shape(rng, rank) for _ in range(50)] + [{1: (70_000,), 2: (300, 200)}.get(rank, (2,) * rank)]
        arrays = [random_array(rng, shape, dtype) for shape in shapes]
        layouts = [random_layout(rng, x) for x in arrays]
        y = random_array(rng, (), dtype)
        results = jax.jit(lambda xs: [running_sum(f(x), y) for f, x in zip(layouts, xs)])(arrays)
        for x, layout, result in zip(arrays, layouts, results):
            expected = running_sum_reference(layout(x), y)
            jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_numpy_views_are_taken_as_they_are():
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for view in (base.T, base[:, ::-1, ::2], np.asfortranarray(base), base[1:1], base.astype(">f4").astype("f4")):
        jax.tree.map(np.testing.assert_array_equal, running_sum(view, 1), running_sum_reference(view, np.float32(1)))


def nest_reference(x, y, nest):
    """What nested vmaps mean: loops over slices."""
    if not nest:
        return running_sum_reference(x, y)
    (size, x_axis, y_axis), inner = nest[0], nest[1:]
    take = lambda a, axis, i: a if axis is None else np.take(a, i, axis)
    slices = [nest_reference(take(x, x_axis, i), take(y, y_axis, i), inner) for i in range(size)]
    if slices:
        return tuple(np.stack(parts) for parts in zip(*slices))
    zeros = lambda a, axis: a if axis is None else np.zeros(a.shape[:axis] + a.shape[axis + 1 :], a.dtype)
    return tuple(np.zeros((0, *a.shape), a.dtype) for a in nest_reference(zeros(x, x_axis), zeros(y, y_axis), inner))


def random_nest(rng, rank, dtype):
    """Operands, and for every vmap from the outermost in: its size and in_axes."""
    x_shape, y_shape, nest = [*random_shape(rng, rank)], [], []
    for size in rng.choice([0, 1, 2, 3], rng.integers(0, 4), p=[0.08, 0.22, 0.35, 0.35]):
        axes = []
        batched = rng.integers(1, 4)
        for shape, bit in ((x_shape, 1), (y_shape, 2)):
            axes.append(int(rng.integers(0, len(shape) + 1)) if batched & bit else None)
            if batched & bit:
                shape.insert(axes[-1], int(size))
        nest.insert(0, (int(size), *axes))
    return random_array(rng, x_shape, dtype), random_array(rng, y_shape, dtype), nest


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("rank", range(3))
def test_any_nest_of_vmaps_is_a_loop_over_slices(dtype, rank):
    rng = np.random.default_rng([7, rank, len(dtype)])
    for _ in range(5):
        cases = [random_nest(rng, rank, dtype) for _ in range(40)]

        def run(operands):
            results = []
            for (x, y), (_, _, nest) in zip(operands, cases):
                f = running_sum
                for _, *axes in reversed(nest):
                    f = jax.vmap(f, in_axes=tuple(axes))
                results.append(f(x, y))
            return results

        for (x, y, nest), result in zip(cases, jax.jit(run)([case[:2] for case in cases])):
            jax.tree.map(np.testing.assert_array_equal, result, nest_reference(x, y, nest))


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", None])
def test_every_vmap_method_gives_the_same_answer(method):
    total = xk.numba_kernel(outs=lambda x: jax.ShapeDtypeStruct((), x.dtype), vmap_method=method)(sum_kernel)
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(total, 1), 0)(x), x.sum(1))


def sum_kernel(x, out):
    out[()] = x.sum()


def test_a_very_deep_nest_of_vmaps():
    f = add_one
    for _ in range(12):
        f = jax.vmap(f)
    np.testing.assert_array_equal(f(np.ones((1, 2) * 6 + (3,), np.float32)), 2 * np.ones((1, 2) * 6 + (3,)))


def test_thirty_arguments_and_none():
    names = [f"a{i}" for i in range(30)]
    namespace = {}
    exec(f"def add_all({', '.join(names)}, out):\n    out[:] = {' + '.join(names)}", namespace)
    f = xk.numba_kernel(namespace["add_all"], outs=lambda *xs: xs[0])
    np.testing.assert_array_equal(f(*[np.full(3, i, np.float32) for i in range(30)]), [435.0] * 3)

    @xk.numba_kernel(outs=[jax.ShapeDtypeStruct((3,), np.int32)])
    def count(out):
        for i in range(out.size):
            out[i] = i

    np.testing.assert_array_equal(count()[0], [0, 1, 2])
    np.testing.assert_array_equal(jax.vmap(lambda x: x + count()[0])(np.zeros(2, np.int32)), [[0, 1, 2]] * 2)


@pytest.mark.parametrize("enabled", [True, False], ids=["x64", "x32"])
@pytest.mark.parametrize("dtype", "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 "
                                  "complex128".split())  # fmt: skip
def test_every_dtype_in_and_out(dtype, enabled):
    with x64(enabled):
        x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
        result = copy(x)
        assert result.dtype == jax.dtypes.canonicalize_dtype(dtype)
        np.testing.assert_array_equal(result, x)
        np.testing.assert_array_equal(jax.vmap(copy)(x[:, :, None])[..., 0], x)


@xk.numba_kernel(outs=lambda x: x)
def copy(x, out):
    for i in np.ndindex(x.shape):
        out[i] = x[i]


# -- errors --------------------------------------------------------------------------------------------


def writes_input(x, out):
    x[0] = 1


def untypable(x, out):
    out[0] = x.nothing


def returns(x, out):
    return x.size


def wrap(kernel=None, outs=lambda x: x, **options):
    return xk.numba_kernel(kernel or add_one.__wrapped__, outs, **options)


def fails_with(text):
    return wrap(raising(text))


def raising(*args):
    arg = args[0]

    def raiser(x, out):
        raise ArithmeticError(arg)

    return raiser


F32 = np.ones(4, np.float32)
ERRORS = {
    "no kernel": (lambda: wrap(3), TypeError, "numba_kernel takes a function decorated with numba.njit or a plain "
                                               "function; got int 3"),
    "vmap_method": (lambda: wrap(vmap_method="loop"), ValueError, "vmap_method must be one of .*got 'loop'"),
    "outs": (lambda: wrap(outs=3), TypeError, r"outs must be specs .*jax.ShapeDtypeStruct.*got 3 of type int"),
    "outs in a list": (lambda: wrap(outs=[FLOATS, "f4"]), TypeError, r"outs\[1\] must be specs .*got 'f4' of type str"),
    "outs from a callable": (lambda: wrap(outs=lambda x: 1.5)(F32), TypeError, "outs must be specs .*got 1.5 of type"),
    "outs forgotten": (lambda: wrap(outs=None)(F32), TypeError, "outs|1 inputs and 0 outputs"),
    "outs with another count of inputs": (lambda: wrap()(F32, F32), TypeError, "positional argument"),
    "a negative dimension": (lambda: wrap(outs=jax.ShapeDtypeStruct((-1,), "f4")), ValueError, r"negative.*\(-1,\)"),
    "too many outputs": (lambda: wrap(outs=[FLOATS] * 2)(F32), TypeError,
                         r"kernel 'add_one' takes the parameters \(x, out\), but this call gives it 1 inputs and 2 "
                         r"outputs: kernel\(in..., out...\) must take them all"),
    "too many inputs": (lambda: wrap(outs=FLOATS)(F32, F32), TypeError, "2 inputs and 1 outputs"),
    "scratch counts": (lambda: wrap(scratch=FLOATS)(F32), TypeError, "1 inputs and 2 outputs and scratch buffers"),
    "a list": (lambda: add_one([1, 2]), TypeError, r"add_one: input 0 must be an array or a number; got list \[1, 2\]; "
                                                   "pass its leaves one by one"),
    "a string": (lambda: add_one("ab"), TypeError, "input 0 must be an array or a number; got str 'ab'; convert it"),
    "a None": (lambda: add_one(None), TypeError, "input 0 must be an array or a number; got NoneType None"),
    "an array of text": (lambda: add_one(np.array(["a"])), TypeError, "<U1|str"),
    "a key": (lambda: add_one(jax.random.key(0)), TypeError, r"input 0 .*key<.*pass plain arrays.*key_data"),
    "returns": (lambda: wrap(returns)(F32), TypeError, "kernel 'returns' returns int64; a kernel writes to its output "
                                                       "arrays and returns nothing"),
    "writes to an input": (lambda: wrap(writes_input)(F32), TypeError,
                           "(?s)kernel 'writes_input' .*inputs? .*input_output_aliases"),
    "untypable": (lambda: wrap(untypable)(F32), TypeError,
                  r"(?s)Numba cannot compile kernel 'untypable' for \(float32\[:\]\) -> \(float32\[:\]\).*nothing"),
    "untypable on tracing": (lambda: jax.eval_shape(wrap(untypable), FLOATS), TypeError, "Numba cannot compile"),
    "no such input": (lambda: wrap(input_output_aliases={1: 0})(F32), ValueError,
                      r"input_output_aliases={1: 0}: there is no input 1; the call has 1 inputs, numbered from 0"),
    "no such output": (lambda: wrap(input_output_aliases={0: -1})(F32), ValueError, "there is no output -1"),
    "aliased shapes": (lambda: wrap(outs=jax.ShapeDtypeStruct((3,), np.float32), input_output_aliases={0: 0})(F32),
                       ValueError, r"input 0 \(float32\[4\]\) and output 0 \(float32\[3\]\) share memory"),
    "aliased dtypes": (lambda: wrap(outs=jax.ShapeDtypeStruct((4,), np.int32), input_output_aliases={0: 0})(F32),
                       ValueError, r"input 0 \(float32\[4\]\) and output 0 \(int32\[4\]\) share memory"),
    "aliased twice": (lambda: wrap(outs=FLOATS, input_output_aliases={0: 0, 1: 0})(F32, F32), ValueError,
                      "an output can alias one input only"),
    "derivative": (lambda: jax.grad(lambda x: add_one(x).sum())(F32), TypeError, "no derivative.*jax.custom_vjp"),
    **{f"input of {dtype}": (lambda dtype=dtype: add_one(jnp.ones(4, dtype)), TypeError,
                             rf"numba_kernel 'add_one': input 0 is {dtype}\[4\], a dtype for which Numba has no CPU "
                             r"arithmetic; cast it, e.g. x.astype\(jnp.float32\)")
       for dtype in ("float16", "bfloat16", "float8_e4m3fn", "int4", "uint4")},
    "output of bfloat16": (lambda: wrap(outs=jax.ShapeDtypeStruct((4,), jnp.bfloat16))(F32), TypeError,
                           r"output 0 is bfloat16\[4\]"),
    "raised": (lambda: refuse_negative(-F32), jax.errors.JaxRuntimeError,
               r"ValueError: \('negative element', 0\) \(raised in kernel 'refuse_negative'\)"),
    "raised in a slice": (lambda: jax.vmap(refuse_negative)(np.array([[1], [-1]], np.float32)),
                          jax.errors.JaxRuntimeError, "ValueError.*'refuse_negative'"),
    "not ascii": (lambda: fails_with("größe 日本 \U0001f600")(F32), jax.errors.JaxRuntimeError,
                  "ArithmeticError: größe 日本 \U0001f600 .raised in kernel 'raiser'"),
    "half a surrogate": (lambda: fails_with("a\udc80b")(F32), jax.errors.JaxRuntimeError, "ArithmeticError: a"),
    "a NUL": (lambda: fails_with("a\0b")(F32), jax.errors.JaxRuntimeError, "ArithmeticError: a.*raised in kernel"),
    "a megabyte": (lambda: fails_with("x" * 1_000_000)(F32), jax.errors.JaxRuntimeError, "ArithmeticError: xxx"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_the_rule_and_the_value(case):
    call, kind, text = ERRORS[case]
    with pytest.raises(kind, match=text):
        jax.block_until_ready(call())
    np.testing.assert_array_equal(add_one(F32), F32 + 1)  # the process goes on


class ErrorWithoutText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OwnError(LookupError):
    pass


def raise_division(x, out):
    out[0] = 1 // int(x[0] - 1)


def raise_own(x, out):
    raise OwnError("mine", 3)


def raise_without_text(x, out):
    raise ErrorWithoutText()


def raise_class(x, out):
    raise StopIteration


def raise_assertion(x, out):
    assert x[0] > 1, "too small"


@numba.njit(boundscheck=True)
def raise_bounds(x, out):
    out[0] = x[x.size]


def fail_in_python():
    raise KeyError("from Python")


@numba.njit
def raise_in_objmode(x, out):
    with numba.objmode():
        fail_in_python()


RAISED = {
    raise_division: "ZeroDivisionError: integer division by zero",
    raise_own: r"OwnError: \('mine', 3\)",
    raise_without_text: "ErrorWithoutText",
    raise_class: "StopIteration",
    raise_assertion: "AssertionError: too small",
    raise_bounds: "IndexError",
    raise_in_objmode: "KeyError: 'from Python'",
}


@pytest.mark.parametrize("kernel", RAISED, ids=lambda kernel: kernel.__name__)
def test_exception_in_a_kernel_becomes_an_error(kernel):
    for f in (wrap(kernel), jax.jit(wrap(kernel)), lambda x: jax.vmap(wrap(kernel))(x[None])):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{RAISED[kernel]}.*raised in kernel '{kernel.__name__}'"):
            jax.block_until_ready(f(F32))


# -- inputs are never changed --------------------------------------------------------------------------


@numba.njit
def write_first(a):
    a.flat[0] = 77


@numba.vectorize(["float32(float32)"])
def plus_one(a):
    return a + 1


WRITES = {
    name: f"def write(x, out):\n    {code}" for name, code in {
        "item": "x[0] = 77", "slice": "x[1:] = 77", "mask": "x[x > 0] = 77", "all": "x[...] = 77",
        "in place": "x += 77",
        "in place slice": "x[:2] -= 77", "sort": "x[::-1].sort()", "fill": "x.fill(77)",
        "swap": "x[0], x[1] = x[1], x[0]",
        "ufunc": "np.add(x, 77, x)", "sin": "np.sin(x, x)", "vectorize": "plus_one(x, x)",
        "dot": "np.dot(np.ones((4, 4), np.float32), out, x)",
        "dot out": "np.dot(np.ones((4, 4), np.float32), out, out=x)",
        "flat": "x.flat[0] = 77", "helper": "write_first(x)", "closure": "(lambda a: a.fill(77))(x)",
        "nditer": "for v in np.nditer(x):\n        v[()] = 77",
        "nditer of two": "for v, w in np.nditer((x, out)):\n        v[()] = 77",
        "view": "x.view(np.int32)[0] = 77", "reshape": "x.reshape((2, 2))[0, 0] = 77", "ravel": "x.ravel()[0] = 77",
        "transpose": "x.T[0] = 77", "ascontiguousarray": "np.ascontiguousarray(x)[0] = 77",
        "asfortranarray": "np.asfortranarray(x)[0] = 77", "asarray": "np.asarray(x)[0] = 77",
        "fill_diagonal": "np.fill_diagonal(x.reshape((2, 2)), 77)", "shuffle": "np.random.shuffle(x)",
        "list": "l = [out, x]\n    l[1][0] = 77", "tuple": "for a in (x, out):\n        a[0] = 77",
        "typed list": "l = numba.typed.List()\n    l.append(out)\n    l.append(x)\n    l[1][0] = 77",
        "typed dict": "d = numba.typed.Dict()\n    d[0] = out\n    d[1] = x\n    d[1][0] = 77",
        "either": "a = out if out.size == 0 else x\n    a[0] = 77",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("case", [*WRITES, "parallel in place", "parallel ufunc", "parallel flat"])
def test_an_input_is_never_changed(case):
    """Numba refuses the kernel, or it runs on a copy."""
    parallel, case = case.startswith("parallel"), case.removeprefix("parallel ")
    exec(WRITES[case], globals() | {"numba": numba}, namespace := {})
    x = jnp.array([4.0, 3.0, 2.0, 1.0], jnp.float32)
    try:
        jax.block_until_ready(wrap(numba.njit(parallel=parallel)(namespace["write"]))(x))
    except TypeError as error:
        assert "input" in str(error) or "Numba cannot compile" in str(error)
    np.testing.assert_array_equal(x, [4, 3, 2, 1])


def test_reading_through_flat_and_nditer_works():
    def read(x, out):
        for i, v in enumerate(x.flat):
            out[i] = v
        for v in np.nditer(x):
            out[0] += v.item()

    np.testing.assert_array_equal(wrap(read)(F32), [5, 1, 1, 1])


# -- aliases, scratch, effects -------------------------------------------------------------------------


@xk.numba_kernel(outs=lambda acc, x: acc, input_output_aliases={0: 0})
def accumulate(acc, x, out):
    for i in range(x.size):
        out[0] += x[i]


def test_an_aliased_output_starts_with_the_input_and_the_caller_keeps_its_array():
    acc, x = jnp.array([10.0, 5.0]), jnp.arange(4.0)
    for f in (accumulate, jax.jit(accumulate)):
        np.testing.assert_array_equal(f(acc, x), [16, 5])
        np.testing.assert_array_equal(acc, [10, 5])
    looped = jax.lax.fori_loop(0, 3, lambda i, a: accumulate(a, x), acc)
    np.testing.assert_array_equal(looped, [28, 5])


def test_an_aliased_operand_under_vmap_belongs_to_each_slice():
    acc, x = jnp.array([10.0, 5.0]), jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(jax.vmap(accumulate, (None, 0))(acc, x), [[11, 5], [15, 5], [19, 5]])
    np.testing.assert_array_equal(jax.vmap(accumulate, (0, None))(jnp.stack([acc, acc + 1]), x[1]), [[15, 5], [16, 6]])
    np.testing.assert_array_equal(acc, [10, 5])


def test_a_donated_array_is_updated_in_place():
    acc = jnp.zeros(1000)
    before = acc.unsafe_buffer_pointer()
    result = jax.jit(accumulate, donate_argnums=0)(acc, jnp.ones(5))
    assert result[0] == 5 and acc.is_deleted() and result.unsafe_buffer_pointer() == before


def test_scratch_is_passed_and_not_returned():
    @xk.numba_kernel(outs=lambda x: x, scratch=lambda x: {"twice": x, "n": jax.ShapeDtypeStruct((), np.int32)})
    def reverse(x, out, n, work):
        n[()] = x.size
        work[:] = x
        for i in range(n[()]):
            out[i] = work[x.size - 1 - i]

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(reverse(x[0]), [2, 1, 0])
    np.testing.assert_array_equal(jax.vmap(reverse)(x), x[:, ::-1])


@pytest.mark.parametrize("kept", [True, False])
def test_a_side_effect_keeps_an_unused_call(kept):
    f = wrap(has_side_effect=kept)
    hlo = jax.jit(lambda x: (f(x), x * 2)[1]).lower(FLOATS).compile().as_text()
    assert ("custom-call" in hlo) == kept
    jax.lax.scan(lambda c, _: (f(c), None), jnp.ones(4), None, length=3)[0].block_until_ready()


# -- transformations -----------------------------------------------------------------------------------


def sharded(f, mesh, in_specs, out_specs):
    return shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def mesh(*shape):
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), tuple("ij")[: len(shape)])


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), f(c).sum()), x, None, length=3)[0]


P = jax.sharding.PartitionSpec
TRANSFORMED = {
    "jit": lambda x: jax.jit(add_one)(x),
    "disable_jit": lambda x: with_jit_off(add_one, x),
    "scan": lambda x: scanned(add_one)(x) - 2,
    "scan with disable_jit": lambda x: with_jit_off(scanned(add_one), x) - 2,
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 5, add_one, x) - 4,
    "fori": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: add_one(c), x) - 1,
    "cond": lambda x: jax.lax.cond(x[0] == 0, add_one, lambda x: x, x),
    "vmapped cond": lambda x: jax.vmap(lambda y: jax.lax.cond(y[0] >= 0, add_one, lambda y: y, y))(x[:, None])[:, 0],
    "switch": lambda x: jax.lax.switch(1, [lambda x: x, add_one], x),
    "map": lambda x: jax.lax.map(add_one, x[:, None])[:, 0],
    "associative scan": lambda x: jax.lax.associative_scan(
        lambda a, b: jax.vmap(add_one)(a) * 0 + b, x[:, None])[:, 0] + 1,
    "checkpoint": lambda x: jax.checkpoint(add_one)(x),
    "pmap": lambda x: jax.pmap(add_one)(x.reshape(4, 2)).reshape(8),
    "shard_map": lambda x: sharded(add_one, mesh(4), P("i"), P("i"))(x),
    "shard_map of scan": lambda x: sharded(scanned(add_one), mesh(4), P("i"), P("i"))(x) - 2,
    "jitted shard_map": lambda x: jax.jit(sharded(add_one, mesh(2, 2), P(("i", "j")), P(("i", "j"))))(x),
    "shard_map, replicated": lambda x: sharded(add_one, mesh(4), P(), P())(x),
    "vmap of shard_map": lambda x: jax.vmap(sharded(add_one, mesh(4), P("i"), P("i")))(x[None])[0],
    "jit over a mesh": lambda x: jax.jit(add_one)(jax.device_put(x, jax.sharding.NamedSharding(mesh(4), P("i")))),
    "jit over an explicit mesh": lambda x: jax.jit(add_one)(
        jax.device_put(x, jax.sharding.NamedSharding(jax.make_mesh((4,), ("i",)), P("i")))),
    "another device": lambda x: add_one(jax.device_put(x, jax.devices()[3])),
    "custom_vjp forward": lambda x: halve(x) * 0 + x + 1,
    "pure compile": lambda x: jax.jit(add_one).lower(x).compile()(x),
    "committed jit inside vmap": lambda x: jax.vmap(jax.jit(add_one))(x[None])[0],
    "dlpack": lambda x: add_one(np.asarray(x)),
}  # fmt: skip


def with_jit_off(f, x):
    with jax.disable_jit():
        return f(x)


@jax.custom_vjp
def halve(x):
    return half_kernel(x)


@xk.numba_kernel(outs=lambda x: x)
def half_kernel(x, out):
    for i in np.ndindex(x.shape):
        out[i] = x[i] / 2


halve.defvjp(lambda x: (halve(x), None), lambda _, ct: (half_kernel(ct),))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_call_gives_the_same_answer(name):
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(TRANSFORMED[name](x), np.arange(8.0) + 1)


def test_devices_run_at_once():
    arrays = [jax.device_put(jnp.arange(1000.0) + i, device) for i, device in enumerate(jax.devices())]
    for _ in range(20):
        results = [add_one(x) for x in arrays]
    for i, (result, device) in enumerate(zip(results, jax.devices())):
        assert result.devices() == {device}
        np.testing.assert_array_equal(result, np.arange(1000.0) + i + 1)


def test_grad_of_vmap_and_vmap_of_grad_through_custom_vjp():
    x = jnp.arange(6.0).reshape(2, 3)
    loss = lambda x: (halve(x) ** 2).sum()
    for gradient in (jax.grad(loss)(x), jax.vmap(jax.grad(loss))(x), jax.grad(lambda x: jax.vmap(loss)(x).sum())(x),
                     jax.grad(jax.checkpoint(loss))(x), jax.jit(jax.grad(loss))(x)):  # fmt: skip
        np.testing.assert_allclose(gradient, x / 2)


def test_shard_map_sums_the_gradient_of_a_replicated_input():
    if not hasattr(jax, "shard_map"):
        pytest.skip("jax < 0.6 tracks no varying axes")

    @jax.custom_vjp
    def scale(w, x):
        return multiply(w, x)

    @xk.numba_kernel(outs=lambda w, x: x)
    def multiply(w, x, out):
        for i in range(x.size):
            out[i] = w[i] * x[i]

    scale.defvjp(lambda w, x: (scale(w, x), (w, x)), lambda saved, ct: (multiply(ct, saved[1]), multiply(ct, saved[0])))
    devices = mesh(4)
    loss = lambda w, x: jax.shard_map(
        lambda w, x: jax.lax.psum(scale(jax.lax.pcast(w, "i", to="varying") if hasattr(jax.lax, "pcast") else
                                        jax.lax.pvary(w, "i"), x).sum(), "i"),
        mesh=devices, in_specs=(P(), P("i")), out_specs=P()
    )(w, x)  # fmt: skip
    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(2), jnp.arange(8.0)), [12, 16])


def test_symbolic_shapes_are_exported():
    from jax import export

    (n,) = export.symbolic_shape("n")
    spec = jax.ShapeDtypeStruct((n,), np.float32)
    jax.eval_shape(add_one, FLOATS)
    program = export.export(jax.jit(add_one), disabled_checks=xk.export_checks())(spec)
    for size in (1, 5, 8):
        np.testing.assert_array_equal(program.call(np.ones(size, np.float32)), np.full(size, 2.0))


# -- names and digests ---------------------------------------------------------------------------------


def kernel_from(source, *, name="kernel", **values):
    namespace = {"np": np, "numba": numba, "math": math, **values}
    exec(textwrap.dedent(source), namespace)
    return namespace[name]


def add_value(value):
    def kernel(x, out):
        out[0] = x[0] + np.float32(value)

    return kernel


def add_first(values):
    def kernel(x, out):
        out[0] = x[0] + values[0]

    return kernel


def with_helper(helper):
    def kernel(x, out):
        out[0] = helper(x[0])

    return kernel


def with_module(module):
    def kernel(x, out):
        out[0] = module.helper(x[0])

    return kernel


def with_submodule(helper):
    package, module = types.ModuleType("package"), types.ModuleType("package.module")
    package.module, module.helper = module, helper
    return kernel_from("def kernel(x, out):\n    out[0] = package.module.helper(x[0])", package=package)


def module_of(helper):
    module = types.ModuleType("module_of_helpers")
    module.helper = helper
    return module


def adder(n, jit=numba.njit):
    return jit(kernel_from(f"def helper(a):\n    return a + {n}", name="helper"))


def lowered_name(kernel):
    return target_of(xk.numba_kernel(kernel, outs=lambda x: x), FLOATS)


def plain(x, out):
    out[0] = x[0] / 3


SAME = {
    "closure value": lambda: add_value(2.5),
    "closure array": lambda: add_first(np.arange(3.0)),
    "helper": lambda: with_helper(adder(1)),
    "helper of helper": lambda: with_helper(numba.njit(with_return(adder(1)))),
    "vectorize": lambda: with_helper(adder(1, numba.vectorize)),
    "module": lambda: with_module(module_of(adder(1))),
    "nested function": lambda: kernel_from(
        "def kernel(x, out):\n    def f(a):\n        return a + 1\n    out[0] = f(x[0])"),
    "line moved": lambda lines=itertools.count(): kernel_from(
        "\n" * next(lines) + "def kernel(x, out):\n    out[0] = 1"),
    "options": lambda: numba.njit(fastmath=True, error_model="numpy")(plain),
    "default argument": lambda: kernel_from("def kernel(x, out, n=3):\n    out[0] = x[0] + n"),
    "recursion": lambda: with_helper(kernel_from(
        "@numba.njit\ndef fact(a):\n    if a < 2:\n        return a\n    return a * fact(a - 1)", name="fact")),
}  # fmt: skip


def with_return(helper):
    def function(a):
        return helper(a) * 2

    return function


@pytest.mark.parametrize("case", SAME)
def test_equal_content_is_one_target(case):
    assert len({lowered_name(SAME[case]()) for _ in range(3)}) == 1


DIFFERENT = {
    "closure constants": [add_value(v) for v in (1, True, 1.0, 0.0, -0.0, math.nan, math.inf, 2, np.float64(2), 2**40)],
    "closure arrays": [add_first(v) for v in (np.arange(3), np.arange(3.0), np.arange(1, 4), np.arange(3)[::-1].copy(),
                                              np.arange(4), (0, 1), (0.0, 1.0), (1, 0))],
    "globals": [kernel_from("def kernel(x, out):\n    out[0] = x[0] + g", g=g) for g in (1, 2, 1.0, True)],
    "global arrays": [kernel_from("def kernel(x, out):\n    out[0] = x[0] + g[0]", g=np.array([g]))
                      for g in (1, 2, 1.0)],
    "code": [kernel_from(f"def kernel(x, out):\n    out[0] = x[0] {op} 2") for op in "+-*/"],
    "constants": [kernel_from(f"def kernel(x, out):\n    out[0] = x[0] + {c}")
                  for c in ("1", "1.0", "True", "-0.0", "0.0")],
    "defaults": [kernel_from(f"def kernel(x, out, n={n}):\n    out[0] = x[0] + n") for n in (1, 2)],
    "nested functions": [kernel_from(f"def kernel(x, out):\n    f = lambda a: a + {n}\n    out[0] = f(x[0])")
                         for n in (1, 2)],
    "helpers": [with_helper(adder(n)) for n in (1, 2)],
    "helpers of helpers": [with_helper(numba.njit(with_return(adder(n)))) for n in (1, 2)],
    "helpers' options": [with_helper(adder(1, numba.njit(**{o: True}))) for o in ("fastmath", "boundscheck", "nogil")],
    "vectorize": [with_helper(adder(n, numba.vectorize)) for n in (1, 2)],
    "vectorize with signatures": [with_helper(adder(n, numba.vectorize(["float32(float32)"]))) for n in (1, 2)],
    "modules in closures": [with_module(module_of(adder(n))) for n in (1, 2)],
    "modules in modules": [with_submodule(adder(n)) for n in (1, 2)],
    "fastmath": [numba.njit(fastmath=f)(plain) for f in (False, True, {"nnan"}, {"ninf"})],
    "error_model": [numba.njit(error_model=m)(plain) for m in ("python", "numpy")],
    "boundscheck": [numba.njit(boundscheck=b)(plain) for b in (False, True)],
    "parallel": [numba.njit(parallel=b)(plain) for b in (False, True)],
    "functions": [kernel_from(f"def kernel(x, out):\n    out[0] = math.{f}(x[0])") for f in ("sin", "cos")],
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_content_is_another_target(case):
    kernels = DIFFERENT[case]
    assert len({lowered_name(kernel) for kernel in kernels}) == len(kernels)


def test_different_signatures_are_different_targets():
    f, shapes = wrap(copy.__wrapped__), [((4,), "f4"), ((4,), "i4"), ((2, 2), "f4"), ((), "f4")]
    assert len({target_of(f, jax.ShapeDtypeStruct(*spec)) for spec in shapes}) == 4
    assert target_of(f, jax.ShapeDtypeStruct((9,), "f4")) == target_of(f, FLOATS)
    assert target_of(jax.vmap(f), jax.ShapeDtypeStruct((3, 4), "f4")) == target_of(f, FLOATS)


def test_an_edited_helper_in_a_module_is_seen():
    module = module_of(adder(1))
    for n in (1, 10):
        module.helper = adder(n)
        assert xk.numba_kernel(with_module(module), outs=lambda x: x)(F32)[0] == 1 + n


EXPLICIT = {
    "exact": ["void(float32[::1], float32[::1])"],
    "any layout": ["void(float32[:], float32[:])"],
    "second of two": ["void(float64[:], float64[:])", "void(float32[:], float32[:])"],
}


@pytest.mark.parametrize("case", EXPLICIT)
def test_explicit_signatures_keep_working(case):
    kernel = numba.njit(EXPLICIT[case])(add_one.__wrapped__)
    x = jnp.ones(4)
    np.testing.assert_array_equal(xk.numba_kernel(kernel, outs=lambda x: x)(x), F32 + 1)
    np.testing.assert_array_equal(jax.vmap(wrap(kernel))(jnp.ones((3, 4))), np.full((3, 4), 2.0))
    with pytest.raises(TypeError, match=r"(?s)Numba cannot compile.*int32"):
        wrap(kernel)(np.ones(4, np.int32))


def test_a_lazy_kernel_may_call_an_explicit_helper():
    helper = numba.njit(["void(float32[::1], float32[::1])"])(add_one.__wrapped__)

    def kernel(x, out):
        helper(x, out)

    np.testing.assert_array_equal(wrap(kernel)(F32), F32 + 1)


def test_star_args_and_keyword_defaults():
    def scaled(x, out, factor=3):
        out[:] = factor * x

    def first(*arrays):
        arrays[-1][:] = arrays[0]

    np.testing.assert_array_equal(wrap(first, lambda x, y: x)(F32, 2 * F32), F32)
    np.testing.assert_array_equal(wrap(scaled)(F32), 3 * F32)


# -- processes -----------------------------------------------------------------------------------------


def test_names_are_equal_in_another_process():
    code = """
        import math
        table = np.arange(4.0)
        @numba.vectorize
        def up(a): return a + 1
        def kernel(x, out, scale=2.0):
            f = lambda a: a * scale
            for i in range(x.size):
                if i in (1, 2, 3): out[i] = up(f(x[i])) + table[i] + math.sin(x[i]) + np.pi
        jax.eval_shape(xk.numba_kernel(kernel, outs=lambda x: x), jax.ShapeDtypeStruct((4,), "f4"))
        print([check for check in xk.export_checks()])
        """
    assert len({run_python(code, PYTHONHASHSEED=str(seed)) for seed in (1, 2)}) == 1


def test_an_exported_program_runs_where_the_same_kernels_are_registered(tmp_path):
    code = """
        from jax import export
        spec, path = jax.ShapeDtypeStruct((4,), jnp.float32), sys.argv[2]
        f = xk.numba_kernel(add_one, outs=lambda x: x)
        if sys.argv[1] != "unregistered": jax.eval_shape(f, spec)
        if sys.argv[1] == "write":
            program = export.export(jax.jit(jax.vmap(f)), disabled_checks=xk.export_checks())
            open(path, "wb").write(program(jax.ShapeDtypeStruct((3, 4), jnp.float32)).serialize())
        else:
            program = export.deserialize(bytearray(open(path, "rb").read()))
            try:
                print(program.call(jnp.ones((3, 4))).tolist())
            except jax.errors.JaxRuntimeError as error:
                print("No FFI handler" if "add_one" in str(error) else error)
        """
    run_python(code, "write", tmp_path / "program")
    assert run_python(code, "read", tmp_path / "program").strip() == str([[2.0] * 4] * 3)
    assert "No FFI handler" in run_python(code, "unregistered", tmp_path / "program")


def test_the_persistent_cache_hits_and_never_mixes_up_kernels(tmp_path):
    code = """
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        n = float(sys.argv[2])
        def kernel(x, out):
            out[0] = x[0] + n
        f = jax.jit(lambda x: xk.numba_kernel(kernel, outs=lambda x: x)(x))
        x = np.zeros(1, np.float32)
        print(np.asarray(f(x))[0], sum(hits))
        """
    assert [run_python(code, tmp_path, n).split() for n in (1, 1, 2)] == [["1.0", "0"], ["1.0", "1"], ["2.0", "0"]]


def test_numba_cache_on_disk(tmp_path):
    (tmp_path / "cached.py").write_text(
        "import numba\n@numba.njit(cache=True, parallel=True)\ndef kernel(x, out):\n"
        "    for i in numba.prange(x.size):\n        out[i] = x[i] + 1\n        if x[i] < 0: out[i] = 0\n"
    )
    code = """
        warnings.simplefilter("error")
        sys.path.insert(0, sys.argv[1])
        import cached
        f = xk.numba_kernel(cached.kernel, outs=lambda x: x)
        def work():
            for _ in range(200):
                assert f(np.ones(10000, np.float32))[-1] == 2
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        print("done")
        """
    for _ in range(2):
        assert "done" in run_python(code, tmp_path, NUMBA_THREADING_LAYER="workqueue")


def test_without_jit_the_kernel_is_plain_python():
    code = """
        def kernel(x, out):
            print("x is", x, out.shape, x.flags.writeable)
            if x.ndim and x[0] < 0: raise KeyError("negative", x[0].item())
            out[...] = x + 1
        f = xk.numba_kernel(kernel, outs=lambda x: x)
        assert f(np.ones(2, np.float32)).tolist() == [2, 2] and f(np.float32(1)) == 2
        assert f(np.ones((2, 0), np.float32)).shape == (2, 0) and f(np.array([], np.complex64)).shape == (0,)
        assert jax.vmap(f)(np.ones((3, 2), np.float32)).shape == (3, 2)
        assert xk.numba_kernel(numba.njit(add_one), outs=lambda x: x)(np.ones(2, np.int8)).tolist() == [2, 2]
        def write(x, out): x[0] = 1
        for call, text in ((f, "KeyError: ('negative', -1.0)"),
                           (xk.numba_kernel(write, outs=lambda x: x), "read-only")):
            try:
                call(-np.ones(2, np.float32)).block_until_ready()
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # jaxlib's fast path may raise ValueError
                print("caught", text in str(error))
        """
    output = run_python(code, NUMBA_DISABLE_JIT="1")
    assert "x is [1. 1.] (2,) False" in output and output.count("caught True") == 2


CRASH = {
    "raising in a loop": """
        def fail(x, out):
            if x[0] < 0: raise ValueError("negative", x[0])
            out[0] = x[0]
        f = xk.numba_kernel(fail, outs=lambda x: x)
        def work(n):
            for i in range(n):
                try:
                    assert f(np.array([i % 2 - 1], np.float32)).block_until_ready()[0] == 0
                except jax.errors.JaxRuntimeError as error:
                    assert "('negative', -1.0)" in str(error) and i % 2 == 0
        work(1000)
        threads = [threading.Thread(target=work, args=(300,)) for _ in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        for _ in range(20):
            try: jax.pmap(f)(-np.ones((4, 1), np.float32)).block_until_ready()
            except jax.errors.JaxRuntimeError as error: assert "negative" in str(error) or "Event" in str(error), error
        """,
    "raising in object mode on XLA's threads": """
        def fail(): raise KeyError("in Python")
        @numba.njit
        def kernel(x, out):
            with numba.objmode(): fail()
        f = xk.numba_kernel(kernel, outs=lambda x: x)
        for _ in range(20):
            try: jax.pmap(f)(np.ones((4, 8), np.float32)).block_until_ready()
            except jax.errors.JaxRuntimeError: pass
            else: raise SystemExit(3)
        """,
    "exception without text on XLA's threads": """
        class Bad(Exception):
            def __str__(self): raise RuntimeError("no text")
        def kernel(x, out): raise Bad()
        f = xk.numba_kernel(kernel, outs=lambda x: x)
        try: jax.pmap(f)(np.ones((4, 8), np.float32)).block_until_ready()
        except jax.errors.JaxRuntimeError: pass
        """,
    "parallel kernels entered at once": """
        @numba.njit(parallel=True)
        def helper(x, out):
            for i in numba.prange(x.size): out[i] = x[i] + 1
            if x[0] < 0: raise ValueError("negative")
        @numba.njit
        def kernel(x, out): helper(x, out)
        f = xk.numba_kernel(kernel, outs=lambda x: x)
        two = jax.jit(lambda x, y: (f(x), f(y)))
        def work():
            for i in range(100):
                assert f(np.ones(5000, np.float32))[-1] == 2
                assert two(np.ones(5000, np.float32), np.zeros(5000, np.float32))[1][0] == 1
                try: f(-np.ones(10, np.float32)).block_until_ready()
                except jax.errors.JaxRuntimeError: pass
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads: t.start()
        for _ in range(50): assert (jax.pmap(f)(np.ones((4, 1000), np.float32)) == 2).all()
        for t in threads: t.join()
        """,
    "buffers of another count, rank or dtype": """
        spec = jax.ShapeDtypeStruct((4,), jnp.float32)
        jax.eval_shape(xk.numba_kernel(add_one, outs=lambda x: x), spec)
        name = str(xk.export_checks()[0]).split("'")[1] if "'" in str(xk.export_checks()[0]) else None
        name = name or xk.export_checks()[0].is_custom_call()
        x = np.ones(4, np.float32)
        calls = [(spec, ()), (spec, (x, x)), ([spec, spec], (x,)), (spec, (x.astype(np.int32),)), (spec, (x[0],)),
                 (jax.ShapeDtypeStruct((4,), jnp.int32), (x,)), (jax.ShapeDtypeStruct((2, 4), jnp.float32), (x,)),
                 (jax.ShapeDtypeStruct((), jnp.float32), (x[0],)), (spec, (x[None],)),
                 (spec, (x.astype(jnp.bfloat16),))]
        for outs, args in calls:
            try:
                jax.block_until_ready(jax.ffi.ffi_call(name, outs)(*args))
            except jax.errors.JaxRuntimeError as error:
                assert "add_one" in str(error), error
            else:
                raise SystemExit(f"accepted {outs} {args}")
        assert jax.ffi.ffi_call(name, spec)(x)[0] == 2
        for a, b in (((3, 4), (2, 4)), ((3, 4), (1, 4)), ((4,), (3,)), ((2, 3, 4), (2, 2, 4))):  # they differ in shape
            spec = jax.ShapeDtypeStruct(b, jnp.float32)
            try: jax.block_until_ready(jax.ffi.ffi_call(name, spec)(np.ones(a, np.float32)))
            except jax.errors.JaxRuntimeError: pass
        """,
    "collected wrappers": """
        import gc
        def make(n):
            def kernel(x, out): out[0] = x[0] + n
            return xk.numba_kernel(kernel, outs=lambda x: x)
        x = np.ones(1, np.float32)
        compiled = [jax.jit(make(n)).lower(x).compile() for n in range(20)]
        gc.collect(); jax.clear_caches(); gc.collect()
        for _ in range(3):
            assert [float(c(x)[0]) for c in compiled] == [n + 1 for n in range(20)]
        """,
    "interpreter exit with work in flight": """
        def slow(x, out):
            for j in range(100_000_000): out[0] += np.sin(x[0] + j)
        f = jax.jit(xk.numba_kernel(slow, outs=lambda x: x))
        x = np.ones(1, np.float32)
        f.lower(x).compile()
        thread = threading.Thread(target=lambda: f(x), daemon=True)
        thread.start()
        pending = f(jax.device_put(x, jax.devices()[1]))
        """,
    "fork after registration": """
        import multiprocessing
        f = xk.numba_kernel(add_one, outs=lambda x: x)
        jax.eval_shape(f, jax.ShapeDtypeStruct((4,), jnp.float32))  # registered, the backend not yet started
        def work(): assert f(np.ones(4, np.float32))[3] == 2
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        work()
        child.join()
        assert child.exitcode == 0
        """,
    "registering before the backend starts": """
        f = xk.numba_kernel(add_one, outs=lambda x: x)
        jax.eval_shape(f, jax.ShapeDtypeStruct((4,), jnp.float32))
        jax.config.update("jax_platforms", "cpu")
        assert f(np.ones(4, np.float32))[3] == 2
        """,
    "reload, import again, purge": """
        import importlib
        x = np.ones(4, np.float32)
        old = xk.numba_kernel(add_one, outs=lambda x: x)
        held = jax.jit(old)
        def check(module):
            new = module.numba_kernel(add_one, outs=lambda x: x)
            for f in (old, held, new, jax.vmap(new)):
                assert f(x[None] if f is not old and f is not held and f is not new else x).ravel()[3] == 2
        check(xk)
        check(importlib.reload(xk))
        del sys.modules["xla_kernels"]
        check(importlib.import_module("xla_kernels"))
        for name in [name for name in sys.modules if name.startswith("xla_kernels")]: del sys.modules[name]
        check(importlib.import_module("xla_kernels"))
        """,
    "two copies": """
        import importlib.util
        x = np.ones(4, np.float32)
        def load(name):
            spec = importlib.util.spec_from_file_location(name, xk.__file__)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
        copies = [xk, load("vendored_a"), load("package.vendored_b"), load("xla_kernels"), load("xla_kernels")]
        functions = [copy.numba_kernel(add_one, outs=lambda x: x) for copy in copies]
        for f in functions: assert f(x)[3] == 2
        @jax.jit
        def chain(x):
            for f in functions: x = f(x)
            return x
        assert chain(x)[0] == 6
        """,
    "sixteen threads": """
        import time
        shared = xk.numba_kernel(add_one, outs=lambda x: x)
        wrong, start = [], threading.Barrier(16)
        def work(k):
            rng = np.random.default_rng(k)
            start.wait()
            for i in range(12):
                n = int(rng.integers(1, 30))
                value = int(rng.integers(0, 6))
                def kernel(x, out):
                    for i in range(x.size): out[i] = x[i] + value
                x = np.arange(n, dtype=rng.choice(["float32", "int32"]))
                f = xk.numba_kernel(kernel, outs=lambda x: x)
                results = [(shared(x), x + 1), (f(x), x + value), (jax.jit(lambda x: f(shared(x)))(x), x + value + 1),
                           (jax.vmap(f)(x[None]), x[None] + value)]
                wrong.extend(1 for a, b in results if not np.array_equal(a, b))
        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(16)]
        for t in threads: t.start()
        for t in threads: t.join(90)
        assert not wrong and not any(t.is_alive() for t in threads)
        assert len(xk.export_checks()) <= 2 + 12
        """,
    "memory of calls, retraces and errors": """
        import resource
        def rss(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
        f = xk.numba_kernel(add_one, outs=lambda x: x)
        x = np.zeros(16, np.float32)
        loop = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: f(x) * 0.5, x))
        loop(x, 1000).block_until_ready()
        before = rss()
        loop(x, 1_000_000).block_until_ready()
        assert rss() - before < 5, ("calls", rss() - before)
        def closure(n):
            def kernel(x, out): out[0] = x[0] + n
            return xk.numba_kernel(kernel, outs=lambda x: x)
        retrace = lambda: jax.make_jaxpr(closure(2.5))(x)
        for _ in range(100): retrace()
        before, targets = rss(), len(xk.export_checks())
        for _ in range(1000): retrace()
        assert len(xk.export_checks()) == targets and rss() - before < 20, ("retraces", rss() - before)
        def fail(x, out): raise ValueError("no", x[0])
        g = xk.numba_kernel(fail, outs=lambda x: x)
        def errors(n):
            for _ in range(n):
                try: g(x).block_until_ready()
                except jax.errors.JaxRuntimeError: pass
        errors(500)
        before = rss()
        errors(3000)
        assert rss() - before < 8, ("errors", rss() - before)
        """,
    "kernels of every origin": """
        exec("def kernel(x, out): out[0] = x[0] + 1", anonymous := {})
        exec("def kernel(x, out): out[0] = x[0] + 2", other := {})
        x = np.ones(1, np.float32)
        run = lambda kernel: xk.numba_kernel(kernel, outs=lambda x: x)(x)[0]
        assert (run(anonymous["kernel"]), run(other["kernel"])) == (2, 3)
        @numba.njit
        def allocate(x, out):
            d = numba.typed.Dict()
            l = numba.typed.List()
            for i in range(100):
                l.append(np.full(10, i))
                d[i] = l[i].sum()
            print("from the kernel", d[99])
            out[0] = d[99]
        assert run(allocate) == 990
        assert (jax.pmap(xk.numba_kernel(allocate, outs=lambda x: x))(np.ones((4, 1), np.float32)) == 990).all()
        """,
}


@pytest.mark.parametrize("case", CRASH)
def test_the_process_survives(case):
    run_python(CRASH[case], NUMBA_THREADING_LAYER="workqueue" if "parallel" in case else "default", timeout=100)


# -- the C interface -----------------------------------------------------------------------------------

C_KINDS = {"size_t": 8, "int64_t": 8, "int": 4, "uint32_t": 4, "XLA_FFI_Handler_Traits": 4, "XLA_FFI_DataType": 4,
           "XLA_FFI_ExecutionStage": 4, "XLA_FFI_Error_Code": 4, "XLA_FFI_Extension_Type": 4,
           "XLA_FFI_InternalExtension_Type": 4, "int32_t": 4}  # fmt: skip


def c_header():
    with open(os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h"), encoding="utf-8") as header:
        text = re.sub(r"//.*", "", header.read())
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", text)
    return text.replace("XLA_FFI_Extension_Base", "XLA_FFI_InternalExtension")  # its name before jaxlib 0.10


def c_fields(text, name):
    """(name, type) of every field of a struct in the header; pointers have the type '*'."""
    body = re.search(rf"struct {name} \{{(.*?)\}}", text, re.DOTALL)[1]
    pattern = r"(?:const |struct )?(\w+)\s*(\**)\s*(\w+)"
    fields = [re.fullmatch(pattern, " ".join(field.split())) for field in body.split(";")[:-1]]
    return [(field[3], "*" if field[2] else field[1]) for field in fields]


def abi_differences(struct, text):
    """How a ctypes mirror differs from the header; the header may have more fields at the end."""
    found, expected = [], c_fields(text, struct.__name__)[: len(struct._fields_)]
    for (name, kind), (c_name, c_kind) in itertools.zip_longest(struct._fields_, expected, fillvalue=("missing", "")):
        if issubclass(kind, ctypes.Structure):
            same = kind.__name__ == c_kind
        else:
            same = ctypes.sizeof(kind) == (8 if c_kind == "*" else C_KINDS.get(c_kind, 0))
        if name != c_name or not same:
            found.append(f"{struct.__name__}.{name}: {kind.__name__}, in the header {c_name}: {c_kind}")
    return found


MIRRORS = [value for name, value in vars(xk).items() if name.startswith("XLA_FFI_") and isinstance(value, type)]


@pytest.mark.parametrize("struct", MIRRORS, ids=lambda struct: struct.__name__)
def test_mirrored_struct_equals_the_header(struct):
    assert abi_differences(struct, c_header()) == []


def test_the_comparison_with_the_header_can_fail():
    class XLA_FFI_Buffer(ctypes.Structure):
        _fields_ = [(n, t) for n, t in xk.XLA_FFI_Buffer._fields_ if n != "rank"]

    class XLA_FFI_Error_Create_Args(ctypes.Structure):
        _fields_ = [(n, ctypes.c_int64 if n == "errc" else t) for n, t in xk.XLA_FFI_Error_Create_Args._fields_]

    assert any("rank" in text for text in abi_differences(XLA_FFI_Buffer, c_header()))
    assert any("errc" in text for text in abi_differences(XLA_FFI_Error_Create_Args, c_header()))
    assert abi_differences(xk.XLA_FFI_Array, c_header().replace("size_t size;", "int32_t size;"))


def test_mirrored_numbers_equal_the_header():
    text = c_header()
    short = {"bool": "PRED", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
             "complex64": "C64", "complex128": "C128"}  # fmt: skip
    for name, number in xk._XLA_FFI_DATA_TYPES.items():
        c_name = short.get(name) or re.sub(r"(u?)int(\d+)", lambda m: ("U" if m[1] else "S") + m[2], name)
        assert re.search(rf"XLA_FFI_DataType_{c_name} = {number},", text), name
    for c_name, number in (("ExecutionStage_EXECUTE", xk._STAGE_EXECUTE),
                           ("Extension_Metadata", xk._EXTENSION_METADATA),
                           ("Error_Code_INTERNAL", xk._ERROR_INTERNAL),
                           ("Error_Code_INVALID_ARGUMENT", xk._ERROR_INVALID_ARGUMENT)):  # fmt: skip
        assert re.search(rf"XLA_FFI_{c_name} = {number}\b", text), c_name


# ======================================================================================================
# Numba CUDA
# ======================================================================================================

# ======================================================================================================
# Warp
# ======================================================================================================

# ======================================================================================================
# XLACustomKernel
# ======================================================================================================
