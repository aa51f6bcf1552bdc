"""Bridges to other libraries: the same ToolEnv and the same trajectories there."""
