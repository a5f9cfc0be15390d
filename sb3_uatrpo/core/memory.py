"""How much a device processes at once."""

import torch as th

#: A GPU processes this many times more at once: its memory is larger, and small pieces take it as long to start.
GPU_FACTOR = 32


def at_once(limit: int, device: th.device) -> int:
    """:return: how many bytes or rows the device processes at once where a CPU processes ``limit``"""
    return limit * GPU_FACTOR if device.type == "cuda" else limit
