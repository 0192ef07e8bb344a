"""Constants of a model that stay in fp32 when its weights go to half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["FullBuffers"]

_HALF = (torch.bfloat16, torch.float16)


class FullBuffers(nn.Module):
    """A module whose fp32 buffers are not rounded to half precision.

    A model's buffers are its rotary frequencies: rounded to 8 bits they turn late positions by a wrong angle.
    `trainer.precision` bf16-true, and DeepSpeed with any bf16 precision, convert all that floats.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullBuffers:
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.dtype == torch.float32
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            now = module._buffers[name]
            if now is not None and now.dtype in _HALF:
                module._buffers[name] = buffer.to(now.device)
        return self
