"""install() on a package that stands in for TransformerEngine's."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from cases import te_stand_in
from cases.transformer_engine import check, check_untouched, contents, make, places

import zerofp4.integrations.transformer_engine as adapter

UTILS = "transformer_engine.pytorch.tensor.utils"


@pytest.fixture
def package(monkeypatch):
    """(utils, calls): a package of a version is in sys.modules; its functions note their arguments."""
    calls = types.SimpleNamespace(cast=[], post=[])

    def place(version: str = "2.20.2") -> tuple[types.ModuleType, types.SimpleNamespace]:
        modules = te_stand_in.package(version, lambda *a: calls.cast.append(a), calls.post.append)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return modules[UTILS], calls

    yield place
    adapter.uninstall()


def functions(utils) -> tuple:
    return utils.quantize_master_weights, utils.post_all_gather_processing


def test_install_and_uninstall(package, monkeypatch):
    utils, calls = package()
    monkeypatch.setitem(sys.modules, "an_importer", te_stand_in.importer("an_importer"))
    importer = sys.modules["an_importer"]
    originals = functions(utils)
    assert (importer.quantize_master_weights, importer.te_post) == originals
    adapter.install()
    ours = functions(utils)
    assert not set(ours) & set(originals)
    assert (importer.quantize_master_weights, importer.te_post) == ours
    adapter.install()
    assert functions(utils) == ours
    monkeypatch.setitem(sys.modules, "a_later_one", te_stand_in.importer("a_later_one"))
    later = sys.modules["a_later_one"]
    adapter.uninstall()
    for module in (importer, later):
        assert (module.quantize_master_weights, module.te_post) == originals
    assert functions(utils) == originals
    adapter.uninstall()
    assert functions(utils) == originals
    utils.post_all_gather_processing(["of its own"])
    assert calls.post == [["of its own"]]
    adapter.install()
    assert functions(utils) == ours


def test_weights_are_cast_in_place(device, package):
    utils, calls = package()
    adapter.install()
    weights, masters, starts = make(device)
    before = places(weights)
    cleared = []
    for weight in weights:
        weight.clear_high_precision_init_val = lambda weight=weight: cleared.append(id(weight))
    for _ in range(2):
        utils.quantize_master_weights(weights, masters, starts, None, manual_post_all_gather_processing=True)
        utils.post_all_gather_processing(weights)
        check(weights, masters)
        masters = [-2 * master for master in masters]
    utils.quantize_master_weights(weights[:1], masters[:1], [0], None, None, True)
    utils.post_all_gather_processing(weights[0])  # not a list
    check(weights[:1], masters[:1])
    assert places(weights) == before
    assert cleared[: len(weights)] == [id(weight) for weight in weights]
    assert calls.cast == [] and calls.post == []


def test_other_weights_are_left_to_the_original(device, package):
    utils, calls = package()
    adapter.install()
    (weight, second), (master, last), _ = make(device, [(48, 288), (16, 16)])
    fp8, dense = types.SimpleNamespace(_rowwise_data=1), torch.zeros(2, device=device)
    weights, masters, starts = [fp8, weight, dense, second], [1, master, 2, last], [10, 0, 20, 0]
    utils.quantize_master_weights(weights, masters, starts, None, manual_post_all_gather_processing=True)
    assert calls.cast == [([fp8, dense], [1, 2], [10, 20], None, None, True)]
    utils.post_all_gather_processing(weights)
    assert calls.post == [[fp8, dense]]
    check([weight, second], [master, last])
    utils.quantize_master_weights([fp8], [1], [10], "group", [3])
    assert calls.cast[1:] == [([fp8], [1], [10], "group", [3], False)]
    utils.post_all_gather_processing(dense)
    assert len(calls.post[1]) == 1 and calls.post[1][0] is dense
    utils.quantize_master_weights([], [], [], None)
    utils.post_all_gather_processing([])
    assert len(calls.cast) == 2 and len(calls.post) == 2


def test_columnwise_copies_that_were_freed_are_left_to_the_original(package):
    utils, calls = package()
    adapter.install()
    weights, masters, starts = make("cpu", [(48, 288), (16, 16)])
    weights[1].update_usage(rowwise_usage=True, columnwise_usage=False)
    utils.quantize_master_weights(weights, masters, starts, None, None, True)
    utils.post_all_gather_processing(weights)
    assert len(calls.post) == 1 and [id(w) for w in calls.post[0]] == [id(weights[1])]
    check(weights, masters)


def test_freeing_the_columnwise_copies_in_each_step_is_refused(package):
    utils, calls = package()
    adapter.install()
    weights, masters, starts = make("cpu", [(16, 16)])
    before = contents(weights)
    with pytest.raises(ValueError, match=r"manual_post_all_gather_processing=False .* call post_all_gather"):
        utils.quantize_master_weights(weights, masters, starts, None)
    check_untouched(weights, before)
    assert calls.cast == []


def test_what_cannot_be_cast_into_is_refused_and_not_handed_on(package):
    utils, calls = package()
    adapter.install()
    weights, masters, starts = make("cpu", [(16, 16), (48, 288)])
    weights[1]._with_gemm_swizzled_scales = True
    with pytest.raises(ValueError, match=r"model_weights\[1\]: _with_gemm_swizzled_scales"):
        utils.quantize_master_weights(weights, masters, starts, None, None, True)
    with pytest.raises(ValueError, match=r"model_weights\[1\]: _with_gemm_swizzled_scales"):
        utils.post_all_gather_processing(weights)
    assert calls.cast == [] and calls.post == []


# What is not known


@pytest.mark.parametrize("version", ["2.14.0", "2.15.0.dev0+abc", "2.20.2+cu13"])
def test_known_versions(package, version):
    utils, _ = package(version)
    originals = functions(utils)
    adapter.install()
    assert not set(functions(utils)) & set(originals)


@pytest.mark.parametrize("version", ["2.13.0", "2.21.0", "3.0", "1.14", "from source"])
def test_versions_that_are_not_known_are_refused(package, version):
    utils, _ = package(version)
    originals = functions(utils)
    with pytest.raises(RuntimeError, match=rf"TransformerEngine {version} is not known .* 2.14 to 2.20"):
        adapter.install()
    assert functions(utils) == originals


@pytest.mark.parametrize("name", ["transformer_engine", UTILS])
def test_a_package_that_cannot_be_imported(package, monkeypatch, name):
    package()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"install\(\) needs TransformerEngine, which cannot be imported"):
        adapter.install()
