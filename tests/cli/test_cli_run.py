"""`nbmoe run`: files in and out, the same bytes on every backend, one line for every error."""

import json

import ml_dtypes
import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from nbmoe.nn import make_layer
from tests.checkpoints.synthetic import families
from tests.cli.conftest import FIXTURES

CHECKPOINTS = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())
FAMILIES = families()


def test_prints_shapes_backend_times_and_error(nbmoe, fixtures, tmp_path, backend):
    name, output = "tiny_modelopt_nvfp4", tmp_path / "y.npy"
    result = nbmoe(
        "run",
        fixtures / name,
        "--tokens",
        16,
        "--seed",
        0,
        "--output",
        output,
        "--backend",
        backend,
    )
    assert (result.status, result.err) == (0, "")
    for text in (f"{name}, layer 0", "hidden 128", "4, top 2", "16 x 128", backend, str(output)):
        assert text in result.out
    for stage in ("route", "quantize", "gate_up + activation", "down", "combine", "relative error"):
        assert stage in result.out
    for what in ("format      nvfp4 weights", "activation  silu", "strategy    NvMxf4f8Strategy"):
        assert what in result.out
    assert "shared" not in result.out


def test_prints_what_is_special(nbmoe, tmp_path):
    folders = {name: FAMILIES[name].write(tmp_path / name) for name in ("deepseek_v3", "gpt_oss")}
    run = ("--tokens", 2, "--backend", "reference")
    deepseek = nbmoe("run", folders["deepseek_v3"], *run).out
    assert "sigmoid, weights scaled to sum 1, of 1 of 2 groups, chosen with a" in deepseek
    assert "times 2.5" in deepseek and "shared      moe dim 192, fp8_block weights" in deepseek
    assert "fp8_block weights, activations quantized in groups of 1 x 128 to fp8" in deepseek
    gpt_oss = nbmoe("run", folders["gpt_oss"], *run).out
    assert "4, top 2, softmax of the chosen" in gpt_oss
    assert "mxfp4 weights with biases, activations are not quantized" in gpt_oss
    assert "swigluoai (alpha 1.702, limit 7)" in gpt_oss


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_output_is_the_layers(nbmoe, fixtures, tmp_path, name, backend):
    output = tmp_path / "y.npy"
    arguments = ("--tokens", 5, "--seed", 3, "--layer", 1, "--output", output)
    nbmoe("run", fixtures / name, *arguments, "--backend", backend)
    # The documented meaning of --seed, written out.
    x = np.random.default_rng(3).standard_normal((5, 128), np.float32).astype(ml_dtypes.bfloat16)
    expected = make_layer(read_layer(fixtures / name, 1), backend="reference")(x)
    y = np.load(output)
    assert (y.dtype, y.shape) == (np.float32, (5, 128))
    assert y.tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(nbmoe, tmp_path, family, backend):
    folder, output = FAMILIES[family].write(tmp_path / family), tmp_path / "y.npy"
    arguments = ("--tokens", 2, "--output", output, "--json", "--backend", backend)
    result = nbmoe("run", folder, *arguments)
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["relative_error"] < 1e-2
    assert (len(found["rows_per_expert"]), sum(found["rows_per_expert"])) == (4, 4)
    assert (found["format"], found["activation_format"]) == (
        FAMILIES[family].format,
        FAMILIES[family].input_format,
    )
    assert found["unquantized_relative_error"] < 0.3
    x = np.random.default_rng(0).standard_normal((2, 128), np.float32).astype(ml_dtypes.bfloat16)
    expected = make_layer(read_layer(folder), backend="reference")(x)
    assert np.load(output).tobytes() == expected.astype(np.float32).tobytes()


def test_cudasim_writes_the_same_bytes(python_m_nbmoe, fixtures, tmp_path):
    written = {}
    for backend in ("cudasim", "reference"):
        output = tmp_path / f"{backend}.npy"
        arguments = ("--tokens", 3, "--output", output, "--backend", backend)
        result = python_m_nbmoe("run", fixtures / "tiny_modelopt_nvfp4", *arguments)
        assert (result.status, result.err) == (0, "")
        written[backend] = output.read_bytes()
    assert written["cudasim"] == written["reference"]


def test_input_is_rounded_to_bf16(nbmoe, fixtures, tmp_path):
    x = np.random.default_rng(1).standard_normal((3, 128), np.float32)
    outputs = []
    for i, tokens in enumerate((x, x.astype(ml_dtypes.bfloat16).astype(np.float32))):
        source, output = tmp_path / f"x{i}.npy", tmp_path / f"y{i}.npy"
        np.save(source, tokens)
        arguments = ("--input", source, "--output", output, "--backend", "reference")
        assert nbmoe("run", fixtures / "tiny_ct_NVFP4", *arguments).status == 0
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1]


def test_json(nbmoe, fixtures, backend):
    result = nbmoe("run", fixtures / "tiny_ct_NVFP4", "--tokens", 9, "--json", "--backend", backend)
    found = json.loads(result.out)
    assert found["backend"] == backend
    assert found["tokens"] == 9
    assert sum(found["rows_per_expert"]) == 18
    assert found["relative_error"] < 1e-2
    assert 0 < found["unquantized_relative_error"] < 0.25
    stages = ["route", "quantize", "gate_up + activation", "down", "combine"]
    assert list(found["seconds"]) == stages
    assert (found["format"], found["activation"], found["shared_moe_dim"]) == ("nvfp4", "silu", 0)


def test_no_tokens(nbmoe, fixtures, tmp_path, backend):
    output = tmp_path / "y.npy"
    arguments = ("--tokens", 0, "--output", output, "--backend", backend)
    assert nbmoe("run", fixtures / "tiny_ct_NVFP4", *arguments).status == 0
    assert np.load(output).shape == (0, 128)


def one_line(result):
    assert result.status == 2
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("nbmoe run: ")
    return lines[0]


def test_errors_are_one_line(nbmoe, fixtures, tmp_path):
    run = ("run", fixtures / "tiny_ct_NVFP4", "--backend", "reference")
    assert "config.json" in one_line(nbmoe("run", tmp_path / "absent"))
    assert "MoE layers 0, 1" in one_line(nbmoe(*run, "--layer", 4))
    assert "absent.npy" in one_line(nbmoe(*run, "--input", tmp_path / "absent.npy"))
    assert "no folder" in one_line(nbmoe(*run, "--output", tmp_path / "absent" / "y.npy"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.zeros((2, 128)), "float32"),
        (np.zeros((2, 64), np.float32), "(T, 128)"),
        (np.zeros(128, np.float32), "(T, 128)"),
        (b"not an array", "a .npy file"),
    ],
)
def test_bad_input_file(nbmoe, fixtures, tmp_path, content, text):
    source = tmp_path / "x.npy"
    if isinstance(content, bytes):
        source.write_bytes(content)
    else:
        np.save(source, content)
    arguments = ("--input", source, "--backend", "reference")
    assert text in one_line(nbmoe("run", fixtures / "tiny_ct_NVFP4", *arguments))


def test_gpu_without_one_is_an_error_not_a_fallback(nbmoe, fixtures, monkeypatch):
    monkeypatch.setattr("nbmoe.backend.find_gpus", lambda: ((), "no NVIDIA driver"))
    monkeypatch.setattr("nbmoe.backend.simulator_enabled", lambda: False)
    line = one_line(nbmoe("run", fixtures / "tiny_ct_NVFP4", "--backend", "gpu"))
    assert "no NVIDIA driver" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "-1"),
        ("--tokens", "many"),
        ("--layer", "-1"),
        ("--backend", "tpu"),
        ("--tokens", "16", "--input", "x.npy"),
    ],
)
def test_bad_arguments(nbmoe, fixtures, arguments):
    result = nbmoe("run", fixtures / "tiny_ct_NVFP4", *arguments)
    assert result.status == 2
    assert arguments[0] in result.err


def test_module_entry_prints_no_traceback(python_m_nbmoe, tmp_path):
    result = python_m_nbmoe("run", tmp_path)
    assert result.status == 2
    assert "Traceback" not in result.err and "config.json" in result.err


def test_python_m_nbmoe_without_a_command(python_m_nbmoe):
    result = python_m_nbmoe()
    assert result.status == 2
    assert "COMMAND" in result.err


def test_version(nbmoe):
    result = nbmoe("--version")
    assert result.status == 0
    assert result.out.startswith("nbmoe 0.")


def test_emulation_errors_are_one_line_too(nbmoe, fixtures, monkeypatch):
    import emulate

    def refuse(*_, **__):
        raise emulate.UnsupportedPlatform("no context switch for this machine")

    monkeypatch.setattr("nbmoe.nn.MoELayer.trace", refuse)
    result = nbmoe("run", fixtures / "tiny_ct_NVFP4", "--backend", "reference")
    assert result.status == 2
    assert result.err == "nbmoe run: no context switch for this machine\n"
