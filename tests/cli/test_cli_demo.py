"""`nbmoe demo`: runs without a file, checks itself, and its exit status says what it found."""

import numpy as np
import pytest

from nbmoe.cli import demo
from nbmoe.nn import MoEQuantized
from nbmoe.nn.comparison import Comparison


def test_runs_and_agrees_with_the_specification(nbmoe, backend):
    result = nbmoe("demo", "--backend", backend)
    assert (result.status, result.err) == (0, "")
    assert "the same bytes" in result.out
    assert f"{backend}: " in result.out
    assert result.out.count("expert ") >= demo.NUM_EXPERTS
    assert "[1/9]" in result.out and "[9/9]" in result.out
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
    monkeypatch.setattr(MoEQuantized, "__call__", lambda self, x: np.zeros_like(x))
    result = nbmoe("demo", "--backend", "reference")
    assert result.status == 1
    assert "DIFFERENT" in result.out


@pytest.mark.parametrize("size", [demo.HIDDEN_SIZE, demo.MOE_DIM])
def test_sizes_suit_nvfp4(size):
    assert size % 16 == 0
