"""Device tensors that are kept from call to call: when they may go. No Triton here."""

from __future__ import annotations

from torch import Tensor, cuda

_captured: dict[int, Tensor] = {}


def capturing(device_type: str) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device_type == "cuda" and cuda.is_current_stream_capturing()


def refuse_in_capture(device_type: str, operation: str) -> None:
    """Raises RuntimeError in a capture, for who is about to make such tensors."""
    if capturing(device_type):
        raise RuntimeError(
            f"{operation}: a CUDA graph is being captured, and these shapes are new, so their tables would have to be "
            "copied to the device first: call it once right before the capture, with the same tensors"
        )


def about_to_read(*tensors: Tensor) -> None:
    """Of kept tensors that the current stream is given to read: their memory is not used again before it has, also
    where they were made on another stream; and never, if it is a graph that will read them at each replay."""
    if type(tensors[0]) is not Tensor or not tensors[0].is_cuda:
        return
    if cuda.is_current_stream_capturing():
        _captured.update((id(tensor), tensor) for tensor in tensors)
        return
    for tensor in tensors:
        tensor.record_stream(cuda.current_stream(tensor.device))
