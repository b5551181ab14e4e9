"""Kernels of other libraries on the same routing. Nothing else imports those libraries."""

from __future__ import annotations

from nbmoe.bench.peers.base import Pair, Peer
from nbmoe.bench.peers.deepgemm import DeepGemm
from nbmoe.bench.peers.humming import HUMMING
from nbmoe.bench.peers.torch_grouped import TorchBf16, TorchFp8
from nbmoe.bench.peers.triton_kernels import TritonKernels
from nbmoe.bench.peers.vllm_triton import VllmTriton
from nbmoe.errors import ConfigError, message

__all__ = ["PEERS", "Pair", "Peer", "chosen_peers"]

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        DeepGemm(),
        VllmTriton(),
        TritonKernels(),
        *HUMMING,
        TorchBf16(),
        TorchFp8(),
    )
}


def chosen_peers(text: str) -> tuple[list[Peer], dict[str, str]]:
    """The peers of a `--peers` argument that can run, and why others cannot.

    Args:
        text: "auto" for all, "none", or names or beginnings of names, with commas between.

    Raises:
        ConfigError: A name is no peer's.
    """
    if text == "none":
        return [], {}
    wanted = [part.strip().lower() for part in text.split(",")]
    found = {peer.name: peer for peer in PEERS.values()}
    if text != "auto":
        for part in wanted:
            if not part or not any(name.lower().startswith(part) for name in PEERS):
                rule = f"auto, none, or names out of {', '.join(PEERS)}"
                raise ConfigError(message("bench", "--peers", rule, part or "''"))
        found = {
            name: peer
            for name, peer in found.items()
            if any(name.lower().startswith(part) for part in wanted)
        }
    missing = {name: reason for name, peer in found.items() if (reason := peer.available())}
    return [peer for name, peer in found.items() if name not in missing], missing
