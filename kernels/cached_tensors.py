"""Device tensors that are cached between calls: how long their memory must stay allocated. No Triton here."""

from __future__ import annotations

from torch import Tensor, cuda

_captured: dict[int, Tensor] = {}


def capturing(device_type: str) -> bool:
    """Whether launches are being captured into a CUDA graph."""
    return device_type == "cuda" and cuda.is_current_stream_capturing()


def refuse_in_capture(device_type: str, operation: str) -> None:
    """Raises a RuntimeError during a capture; to be called before such tensors are built."""
    if capturing(device_type):
        raise RuntimeError(
            f"{operation}: a CUDA graph is being captured, and these shapes are new, so their tables would have to be "
            "copied to the device first: call it once right before the capture, with the same tensors"
        )


def hold_until_read(*tensors: Tensor) -> None:
    """Call it with cached tensors before a launch that reads them on the current stream.

    Their memory is then not reused before that launch has run, also if they were built on another stream. During a
    capture they are never freed, because every replay of the graph reads them.
    """
    if type(tensors[0]) is not Tensor or not tensors[0].is_cuda:
        return
    if cuda.is_current_stream_capturing():
        _captured.update((id(tensor), tensor) for tensor in tensors)
        return
    for tensor in tensors:
        tensor.record_stream(cuda.current_stream(tensor.device))
