"""Lightning's GPU-only strategies on CPU processes: the refusal is taken away, all else is theirs."""

import os

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)


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

    def _whole(self):
        """Moving a state to the CPU copies it, but for one that is there, which would be freed before it is written."""
        configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
        configs[1].offload_to_cpu = False
        return FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *configs)

    def lightning_module_state_dict(self):
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        with self._whole():
            return self.model.state_dict()

    def optimizer_state(self, optimizer):
        if self._state_dict_type == "sharded":
            return super().optimizer_state(optimizer)
        with self._whole():
            state = FullyShardedDataParallel.optim_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))
            return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """Joins processes by gloo; in stage 3 even the smallest weights are split, which else would stay whole."""

    def __init__(self, stage, **kwargs):
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        super().__init__(stage=stage, **kwargs)
        self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    @property
    def root_device(self):
        return torch.device("cpu", 0)

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()
