"""A linear layer with adapters, as it computes here. Apart, for peft takes seconds to import."""

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor


class Adapted(Linear):
    """y = W x + B (alpha/rank A x), W in any form. peft multiplies behind B, over far more numbers."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        (name,) = self.active_adapters
        return result + self.lora_B[name](self.lora_A[name](x) * self.scaling[name])
