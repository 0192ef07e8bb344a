"""GTPO, Group-relative Trajectory-based Policy Optimization, as PyTorch Lightning parts (arXiv 2508.03772)."""

from gtpo_lightning.hooks import RLCallback
from gtpo_lightning.module import GTPOModule
from gtpo_lightning.policy_module import PolicyModule
from gtpo_lightning.rollout import Problem, Prompts, Rollout
from gtpo_lightning.sft import SFTModule

__all__ = ["GTPOModule", "PolicyModule", "Problem", "Prompts", "RLCallback", "Rollout", "SFTModule"]
