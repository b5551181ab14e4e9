"""`nbmoe demo`: runs without a file, checks itself, and its exit status says what it found."""

import numpy as np
import pytest

from nbmoe.checkpoints.stack import WEIGHT_FORMATS
from nbmoe.cli import demo
from nbmoe.cli.options import FORMATS
from nbmoe.nn import MoELayer
from nbmoe.nn.comparison import Comparison


def small(monkeypatch):
    for size, value in (("TOKENS", 4), ("HIDDEN_SIZE", 128), ("MOE_DIM", 96)):
        monkeypatch.setattr(demo, size, value)


def test_runs_and_agrees_with_the_specification(nbmoe, monkeypatch, backend):
    if backend == "cudasim":  # which would interpret half a minute of kernels
        small(monkeypatch)
    result = nbmoe("demo", "--backend", backend)
    assert (result.status, result.err) == (0, "")
    assert "the same bytes" in result.out
    assert f"{backend}: " in result.out
    assert result.out.count("expert ") >= demo.NUM_EXPERTS
    assert "[1/7]" in result.out and "[7/7]" in result.out
    assert "\r" not in result.out and "\x1b" not in result.out  # stdout is no terminal here


def test_needs_no_unicode(python_m_nbmoe):
    result = python_m_nbmoe("demo", "--backend", "reference", PYTHONIOENCODING="ascii")
    assert (result.status, result.err) == (0, "")
    assert result.out.isascii()


def test_large_error_fails(nbmoe, monkeypatch):
    broken = Comparison(arithmetic=0.5, inner=0.09, total=0.5)
    monkeypatch.setattr("nbmoe.nn.comparison.compare_with_float64", lambda *_: broken)
    result = nbmoe("demo", "--backend", "reference")
    assert result.status == 1
    assert "ABOVE" in result.out


def test_other_bytes_fail(nbmoe, monkeypatch):
    monkeypatch.setattr(MoELayer, "__call__", lambda self, x: np.zeros_like(x))
    result = nbmoe("demo", "--backend", "reference")
    assert result.status == 1
    assert "DIFFERENT" in result.out


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_format(nbmoe, monkeypatch, format_name):
    small(monkeypatch)
    result = nbmoe("demo", "--format", format_name, "--backend", "reference")
    assert (result.status, result.err) == (0, "")
    assert f"format      {format_name} weights" in result.out


@pytest.mark.parametrize("size", [demo.HIDDEN_SIZE, demo.MOE_DIM])
@pytest.mark.parametrize("format_name", FORMATS)
def test_sizes_suit_every_format(format_name, size):
    assert size % WEIGHT_FORMATS[format_name].multiple == 0
