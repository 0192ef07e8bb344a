"""Lightning's GPU-only strategies on CPU processes: the refusal is taken away, all else is theirs."""

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType


class FSDPOnCPU(FSDPStrategy):
    """Lightning refuses the class itself, not what inherits from it; torch has to be told that the CPU is meant."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **self.kwargs,
        )

    def lightning_module_state_dict(self):
        """Moving a state to the CPU copies it, but for one that is there; it would be freed before it is written."""
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            return self.model.state_dict()
