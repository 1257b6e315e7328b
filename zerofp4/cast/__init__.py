"""Casting sharded master weights to NVFP4: plans, and the functions that find theirs by themselves."""

# ruff: noqa: F401
from zerofp4.cast.function import cast_master_weights_to_nvfp4
from zerofp4.cast.gather import all_gather_nvfp4, post_all_gather_processing
from zerofp4.cast.plan import CastPlan
from zerofp4.cast.request import check_castable, check_request, number_groups
from zerofp4.cast.scales import block_unit, travelling_scales, travelling_shards
