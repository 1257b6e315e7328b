"""torchtitan's Trainer with 4-bit all-gathers: one function, which changes the config of a run."""

from zerofp4.integrations.torchtitan.config import gather_in_nvfp4

__all__ = ["gather_in_nvfp4"]
