"""GTPO, Group-relative Trajectory-based Policy Optimization, as PyTorch Lightning parts (arXiv 2508.03772)."""
