"""python -m benchmarks fidelity: arms train, stop and go on. Never how good or how fast one is."""

import hashlib
import json
import lzma
import math
import sys
import tarfile

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from cases.bench import measured
from cases.train import settings_restored
from torch._dynamo.testing import CompileCounter

from benchmarks import gradients, llama, text
from benchmarks.__main__ import main
from benchmarks.arms import ARMS, Hysteresis, Masked, Rounding, travel
from benchmarks.fidelity import FOLDER, Run, Watcher, claimed, learning_rate
from benchmarks.llama import PRESETS, Order, Tokens, make_model
from zerofp4 import reference
from zerofp4.testing import assert_bytes_equal

CPU = torch.device("cpu")
STEPS = 20


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens.of_standard_library(CPU)


@pytest.fixture(autouse=True)
def own_settings():
    """The command sets what holds for its whole process."""
    attention = torch.backends.cuda
    cudnn, efficient = attention.cudnn_sdp_enabled(), attention.mem_efficient_sdp_enabled()
    with settings_restored(), dynamo.patch(recompile_limit=64), inductor.patch(deterministic=True):
        yield
    attention.enable_cudnn_sdp(cudnn)
    attention.enable_mem_efficient_sdp(efficient)


def run(arm: str, tokens: Tokens, steps: int = STEPS) -> Run:
    return Run(arm, 0, "tiny", steps, tokens, CPU)


def result(run: Run) -> dict:
    return {key: value for key, value in run.record.items() if key not in ("seconds", "arm")}


@pytest.mark.heavy
@pytest.mark.parametrize("arm", ["until-80-w1x16-46", "averaged-90", "full"])
def test_a_run_that_stops_at_every_evaluation_ends_as_one_that_never_stops(arm, tokens, tmp_path):
    """Also beyond the step that ends quantization; with what a rounding keeps; with stochastic rounding."""
    whole, path = run(arm, tokens), tmp_path / "checkpoint.pt"
    assert whole.train(path, math.inf) and not path.exists()
    stops = 0
    while not (part := run(arm, tokens)).train(path, -math.inf):
        stops += 1
    assert stops == STEPS - 1
    assert result(part) == result(whole)
    with pytest.raises(ValueError, match=r"is of another run: \{'arm': '"):
        run("bf16", tokens).load(path)


@pytest.mark.heavy
def test_arms_that_leave_a_run_in_bf16(tokens, tmp_path):
    """bf16 goes on to the bit, others from its masters."""
    whole, trunk, unused = run("bf16", tokens), tmp_path / "trunk.pt", tmp_path / "unused.pt"
    assert whole.train(unused, math.inf)
    assert not run("bf16", tokens).train(trunk, math.inf, until=4)
    arms = {arm: run(arm, tokens) for arm in ("bf16", "w16x16", "compact", "averaged-90")}
    for arm, own in arms.items():
        own.fork(trunk)
        assert own.step == own.record["fork"] == 4 and own.record["curve"] == whole.record["curve"][:4], arm
        for (name, master), expected in zip(
            own.masters().items(), arms["bf16"].masters().values(), strict=True
        ):
            assert master.sub(expected).norm() < 1e-4 * expected.norm(), (arm, name)
    weights = dict(arms["averaged-90"].model.named_parameters())
    for name in arms["w16x16"].quantized:
        rounded = Rounding()(name, arms["averaged-90"].masters()[name], 4)
        assert rounded.equal(weights[name].float()), name
    assert arms["bf16"].train(unused, math.inf) and result(arms["bf16"]) == result(whole) | {"fork": 4}
    assert arms["w16x16"].train(unused, math.inf) and len(arms["w16x16"].record["curve"]) == STEPS


@pytest.mark.heavy
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flashoptim needs a GPU")
def test_flashoptim_goes_on_from_a_run_in_bf16_and_from_its_own(tmp_path):
    pytest.importorskip("flashoptim")
    device = torch.device("cuda")
    tokens = Tokens.of_standard_library(device)
    trunk, stopped, unused = (tmp_path / name for name in ("trunk.pt", "stopped.pt", "unused.pt"))
    plain, whole, part, rest = (
        Run(arm, 0, "tiny", STEPS, tokens, device) for arm in ("bf16", "flash", "flash", "flash")
    )
    assert not Run("bf16", 0, "tiny", STEPS, tokens, device).train(trunk, math.inf, until=4)
    for each in (plain, whole, part, rest):
        each.fork(trunk)
    for name, expected in plain.masters().items():
        assert whole.masters()[name].sub(expected).norm() < 1e-4 * expected.norm(), name
    assert whole.train(unused, math.inf)
    assert not part.train(stopped, math.inf, until=6)
    assert rest.train(stopped, math.inf) and result(rest) == result(whole)


@pytest.mark.heavy
def test_updates_in_backward_passes_end_as_steps_after_them(tokens, tmp_path):
    runs = [run(name, tokens) for name in ("update", "unclipped")]
    for each in runs:
        assert each.train(tmp_path / "checkpoint.pt", math.inf)
    assert len({each.record["digest"] for each in runs}) == 1
    assert runs[0].record["final"] == runs[1].record["final"]


def test_rounding_gives_the_values_of_converted_weights(tokens):
    own, names = run("w16x16", tokens, 40), ["blocks.0.q.weight", "blocks.1.down.weight"]
    own.train_segment(1)
    masters, weights = own.masters(), dict(own.model.named_parameters())
    for name in names:
        rounded = Rounding()(name, masters[name], 1)
        assert rounded.equal(weights[name].dequantize()), name
        assert Rounding().codes(name, rounded).equal(own.codes()[name])


def test_runs_of_an_arm_share_compiled_graphs(tokens, monkeypatch, fresh_compiler):
    """Layers with a recipe, too."""
    counter = CompileCounter()
    compiled = torch.compile(lambda block, *arguments: block(*arguments), backend=counter, dynamic=False)
    monkeypatch.setattr(llama, "run_block", compiled)
    counts = []
    for _ in range(2):
        run("full", tokens).backward_passes()
        counts.append(counter.frame_count)
    assert counts == [1, 1]


@pytest.mark.heavy
def test_the_command_runs_what_is_not_there_yet(tmp_path, capsys):
    options = ["--preset", "tiny", "--steps", str(STEPS), "--output", str(tmp_path / "out")]
    options += ["--checkpoints", str(tmp_path / "checkpoints"), "--arms", "control", "compact"]
    assert main(["fidelity", *options, "--seconds", "0"]) == 0
    folder = tmp_path / "out" / "tiny-0M"
    assert not folder.exists()
    assert "control 0: stopped after step 1\n" in capsys.readouterr().out
    with claimed(tmp_path / "checkpoints" / "tiny-0M" / "compact" / "0") as own:
        assert own is not None and main(["fidelity", *options]) == 0
    assert [path.name for path in folder.iterdir()] == ["control-0.json"]
    found = json.loads((folder / "control-0.json").read_text())
    assert found["curve"][-1]["step"] == found["steps"] == STEPS and len(found["curve"]) == 20
    assert found["final"].keys() == found["masters"].keys() == {"documents", "packages"}
    assert len(found["errors"]) == 14 and max(found["errors"].values()) < 2**-8  # its masters are codes
    assert found["curve"][-1].keys() == {"step", "train", "documents", "packages", "error"}
    capsys.readouterr()
    main(["fidelity", *options])
    assert "control" not in capsys.readouterr().out, "it is not run again"
    assert (folder / "compact-0.json").exists()
    options = [*options[:-2], "bf16", "w16x16", "--fork", "20"]
    assert main(["fidelity", *options]) == 0
    assert capsys.readouterr().out.count("bf16 0: step 4,") == 1, "it is one run that others leave"
    forked = json.loads((tmp_path / "out" / "tiny-0M-fork-20" / "w16x16-0.json").read_text())
    plain = json.loads((folder / "bf16-0.json").read_text())
    curves = [[{**row, "error": 0, "underflowing": 0} for row in each["curve"]] for each in (forked, plain)]
    assert forked["fork"] == 4 and curves[0][:4] == curves[1][:4] and curves[0][4] != curves[1][4]
    found["text"]["train"] = "another digest"
    (folder / "control-0.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"control-0\.json is of another text"):
        main(["fidelity", *options])


@pytest.mark.heavy
def test_errors_of_gradients(tmp_path):
    """Those of a host's mean: unbiased rounding of normal values, which gradients are nearly."""
    rows = measured(tmp_path, "gradients", "--preset", "tiny", "--steps", "1")["rows"]
    layers = {"q", "k", "v", "o", "gate", "up", "down", "blocks", "tokens", "lm_head"}
    assert rows.keys() == {f"{layer}/{format}" for layer in layers for format in gradients.FORMATS} | {"loss"}
    expected = {"bf16": 5e-6, "mxfp8": 1.3e-3, "nvfp4": 0.022, "nvfp4_plain": 0.019}
    for format, error in expected.items():
        assert rows[f"blocks/{format}"]["squared_error"] == pytest.approx(error, rel=0.3), format


def test_which_weights_an_arm_takes(tokens):
    model = make_model(PRESETS["tiny"], 0, CPU)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    every = {name for name in names if name != "lm_head"}
    assert len(every) == 14

    def taken(arm: str) -> set[str]:
        return {name for name in names if ARMS[arm].takes(name, 2)}

    assert taken("w16x16") == every
    assert taken("ends-w16x16") == set() == run("ends-w16x16", tokens).measure_weights().keys()
    assert taken("last-w16x16") == {name for name in every if ".0." in name}
    assert taken("down-o-w16x16") == {name for name in every if not name.endswith((".o", ".down"))}


def test_the_order_of_windows():
    order = Order(10, 4, 3, CPU)
    steps = [order.of_step(i) for i in range(5)]
    epochs = torch.cat(steps).view(2, 10)
    assert epochs.sort().values.equal(torch.arange(10).expand(2, 10)) and not epochs[0].equal(epochs[1])
    assert not Order(10, 4, 4, CPU).of_step(0).equal(steps[0])


def test_learning_rates():
    rates = [learning_rate(step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and 0 < rates[99] < 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_codes_with_hysteresis_stay_until_the_master_is_past_the_middle():
    """In a block whose largest value keeps the scale at 1: 3 and 4 meet at 3.5, and a quarter of half of 1 is
    an eighth.
    """
    rounding = Hysteresis(0.25, block=(1, 16))

    def rounded(value: float) -> float:
        master = torch.full((1, 16), value)
        master[0, 1] = 6.0
        return rounding("w", master, 0)[0, 0].item()

    assert [rounded(x) for x in (3.4, 3.6, 3.7, 3.4, 3.3, 0.1)] == pytest.approx([3, 3, 4, 4, 3, 0])


def test_elements_that_rounding_cut_off_get_no_gradient():
    """Beside a block that makes the least scale 1, the scale of one with 6.3125 is rounded from 1.05 to 1."""
    master = torch.full((16, 32), 1.0)
    master[0, 0], master[0, 16], master[1, 16], master[2, 16] = 6 * 448, 6.3125, 0.2, 0.0
    saturated, flushed = ([0, 16], [1, 16])
    for options, cut in (({"saturated": True}, [saturated]), ({"flushed": True}, [flushed])):
        rounding, gradient = Masked(**options), torch.ones(16, 32)
        assert rounding("w", master, 1).equal(Rounding()("w", master, 1).float())
        rounding.change_gradient("w", gradient)
        of_the_block = gradient[:, 16:] == 0  # in the first one, everything but 6 * 448 became 0
        assert (of_the_block.nonzero() + torch.tensor([0, 16])).tolist() == cut


def test_a_step_sees_masked_gradients(tokens):
    own = run("masked-flushed", tokens, 40)
    masks, parameters = dict(own.rounding.kept), dict(own.model.named_parameters())
    assert set(masks) == set(own.quantized)
    own.train_segment(1)
    for name, mask in masks.items():
        moment = own.optimizer.state[parameters[name]]["exp_avg"].whole()
        assert 0.01 < mask.float().mean() < 0.5, name
        assert not moment[mask].any() and (moment[~mask] != 0).float().mean() > 0.9, name


def test_codes_are_watched():
    """Over three steps: of four codes one changes once, and one forth and back and forth."""
    watcher = Watcher()
    assert watcher.shares() == {}
    for codes in ([1, 2, 3, 4], [1, 2, 4, 3], [1, 2, 3, 3], [1, 2, 4, 3]):
        watcher.look({"a": torch.tensor(codes[:2]), "b": torch.tensor(codes[2:])})
    assert watcher.shares() == {"flipped": pytest.approx(4 / 4 / 3), "oscillating": 0.25}


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
def test_gradients_travel_as_between_hosts(format):
    gradients, numbers, own = [torch.randn(64, 256), torch.randn(32, 64)], [3, 7], {"step": 5, "host": 2}
    received = travel(format, gradients, numbers, **own)
    for gradient, number, found in zip(gradients, numbers, received, strict=True):
        sent = reference.send_mean(gradient, format, number=number, **own)
        assert_bytes_equal(found, reference.mean_of_hosts([sent], format, gradient.shape[1]), format)


def test_an_arm_of_hosts_sends_what_it_may(tokens):
    """Embeddings and norms travel exactly."""
    sending, exact = run("hosts-nvfp4", tokens), run("hosts-fp32", tokens)
    for each in (sending, exact):
        each.backward_passes()
    pairs = zip(sending.model.named_parameters(), exact.model.parameters(), strict=True)
    assert {name for (name, p), q in pairs if not p.grad.equal(q.grad)} == set(sending.quantized)


# The text


def test_text_of_packages():
    page = "<head><title>t</title></head><nav>menu</nav><p>a &lt; b<br>c</p><td>1</td><td>2</td>"
    assert text.plain(page).split() == ["a", "<", "b", "c", "1", "2"]
    long = "a line of more than 24 characters"
    seen = text.Counter()
    assert text.without_repeats(f"{long}\nshort\n\n\n\nend", seen) == f"{long}\nshort\n\nend"
    assert text.without_repeats(f"{long}\nshort\nend", seen) == "short\nend"
    lines = [f"word{i}\n   meaning" for i in range(120)]
    runs = list(text.entries("\n".join(lines)))
    assert "\n".join(runs) == "\n".join(lines) and all(each.startswith("word") for each in runs)
    assert len(runs) == 3


def test_packages_have_the_versions_of_published_losses(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["text", "--packages"])
    text.main()
    named = [each.split("=") for each in capsys.readouterr().out.split()]
    assert [package for package, _ in named] == [*text.PACKAGES]
    about = json.loads((FOLDER / "tokens.json").read_text())
    assert dict(named) == {record["package"]: record["version"] for record in about["packages"]}


def test_documents_of_an_archive(tmp_path):
    """C files outside of architectures and drivers."""
    with tarfile.open(tmp_path / "source.tar.xz", "w:xz") as archive:
        for name in ("source/mm/slab.c", "source/drivers/ata.c", "source/mm/slab.h", "source/main.c"):
            (tmp_path / "file").write_text(name)
            archive.add(tmp_path / "file", name)
    assert list(text.archived(tmp_path / "source.tar.xz")) == ["source/mm/slab.c", "source/main.c"]


def test_tokens_of_another_digest(tmp_path):
    parts = {name: bytes([i, 0, i, 1]) for i, name in enumerate(text.PARTS)}
    about = {name: {"tokens": 2, "sha256": hashlib.sha256(own).hexdigest()} for name, own in parts.items()}
    (tmp_path / "tokens.json").write_text(json.dumps({"parts": about}))
    for n, some in enumerate((parts["train"] + parts["documents"], parts["packages"])):
        (tmp_path / f"tokens-0{n}.xz").write_bytes(lzma.compress(some))
    assert Tokens.read(tmp_path, CPU).parts["packages"].tolist() == [2, 258]
    (tmp_path / "tokens-00.xz").write_bytes(lzma.compress(bytes(8)))
    with pytest.raises(ValueError, match="another digest of 'train'"):
        Tokens.read(tmp_path, CPU)
