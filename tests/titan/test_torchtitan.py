"""The pipeline ``apsched`` in TorchTitan's graph trainer: a debug model traced by its own tracer
trains as without it.
"""

import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import apsched
from apsched.errors import InputError
from tests.helpers.processes import run_sizes

pytest.importorskip("torchtitan", reason="needs the extra torchtitan")

from apsched.compiler.settings import Settings
from apsched.integrations import torchtitan as integration
from apsched.integrations import torchtitan_keep
from apsched.integrations.torchtitan_keep import apsched_keep_pass, halves
from apsched.whole_step.keep_request import KeepRequest, keep_request
from tests.titan.titan_worker import CASES, IN_NODES


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, list[dict]]:
    """FSDP on two processes; on four HSDP."""
    return run_sizes(
        Path(__file__).parent / "titan_worker.py", tmp_path_factory.mktemp("titan"), timeout_s=500
    )


@pytest.fixture(params=[2, 4], ids="{} processes".format)
def reports(jobs, request) -> list[dict]:
    return jobs[request.param]


@pytest.mark.alone
def test_losses_and_weights_are_those_of_the_untouched_graph(reports):
    """Bit for bit: sums of two values have one order only."""
    for report in reports:
        assert len(set(report["untouched"]["losses"])) == 3, "it trains"
        for case in ("free", "bitwise"):
            assert report[case]["losses"] == report["untouched"]["losses"]
            assert report[case]["weights"] == report["untouched"]["weights"]
            assert report[case]["launches"] < report["untouched"]["launches"]
            assert report[case]["exact"] is True


@pytest.mark.alone
def test_kept_parameters_are_not_gathered_again_and_change_no_bit(reports):
    """TorchTitan itself never gathers the parameters of ``lm_head`` again."""
    for report in reports:
        for case in CASES.keys() & report:
            assert report[case]["losses"] == report["untouched"]["losses"], case
            assert report[case]["weights"] == report["untouched"]["weights"], case
            assert report[case]["exact"] is True
        again = report["free"]["again"]
        assert "layers.0.attention.wo.weight" in again
        assert set(report["keep auto"]["again"]) < set(again)
        assert report["keep none"]["again"] == again
        assert report["keep all"]["again"] == []
        if len(reports) == 2:
            others = [name for name in again if "layers.1." not in name]
            assert report["keep one block"]["again"] == others


@pytest.mark.alone
def test_the_choice_is_compared_in_the_joint_graph(reports):
    """On two processes in 31.5 MiB the halves keep 12 of 15 parameters, and the joint graph is
    faster with all kept.
    """
    for cap in ("", ", 31.5 MiB"):
        autos = [report[f"keep auto{cap}"] for report in reports]
        assert len({(tuple(auto["again"]), auto["step_us"]) for auto in autos}) == 1
        for choice in ("none", "all"):
            if (stated := reports[0].get(f"keep {choice}{cap}")) is not None:
                assert autos[0]["step_us"] <= stated["step_us"]
        assert len(set(autos[0]["solved"])) == len(autos[0]["solved"]), "each graph once"
        assert not any(auto["solved"] for auto in autos[1:]), "one process rank solves"
    assert reports[0]["keep auto"]["again"] == []


@pytest.mark.alone
def test_parameters_resharded_in_their_node_are_gathered_there_and_change_no_bit(jobs):
    """``lm_head`` is gathered once."""
    for report in jobs[4]:
        none, resharded, auto = (report[case] for case in IN_NODES)
        assert none["sizes"] == [["backward", 4, True], ["forward", 4, True]]
        for found in (resharded, auto):
            assert found["losses"] == none["losses"]
            assert found["weights"] == none["weights"]
            assert found["exact"] is True
        assert resharded["sizes"] == [["backward", 2, True], ["forward", 4, True]]
        assert resharded["again"] == none["again"]
        assert resharded["launches"] < none["launches"] + 3
        assert ["backward", 2, True] in auto["sizes"]
        assert resharded["step_us"] < none["step_us"]


@pytest.mark.alone
def test_two_micro_batches_as_one_graph_are_bit_for_bit_two_in_a_row(jobs):
    """With gradients added before they are reduced, losses agree to a millionth."""
    for report in jobs[2]:
        in_a_row = report["accumulated"]
        assert in_a_row["losses"][0] > report["untouched"]["losses"][0], "the sum of two"
        for case in ("joined", "joined, keep all"):
            assert report[case]["losses"] == in_a_row["losses"], case
            assert report[case]["weights"] == in_a_row["weights"], case
            assert report[case]["micro_batches"] == 2
            assert report[case]["exact"] is True
        assert report["joined, keep all"]["again"] == []
        once = report["joined, reduced once"]
        assert once["losses"] == pytest.approx(in_a_row["losses"], rel=1e-6)
        assert once["micro_batches"] == 2
        assert report["joined"]["again"] == report["free"]["again"], "once for both"
        assert report["joined"]["reductions"] == 2 * once["reductions"]
        assert once["reductions"] == report["free"]["reductions"]


@pytest.mark.alone
def test_both_directions_are_scheduled_under_the_names_of_the_state(reports):
    for report in reports:
        found = report["free"]
        assert found["named"] is True
        replicas = {"backward all_reduce"} if len(reports) == 4 else set()
        assert {*found["directions"]} == {
            "backward all_gather",
            "backward reduce_scatter",
            "forward all_gather",
            *replicas,
        }
        state = found["state"]
        assert {name for _, names in found["buckets"] for name in names} <= set(state)


@pytest.mark.alone
def test_bitwise_payload_order_is_that_of_the_state(reports):
    """A reduce-scatter for each block and one for the rest, each in the order in which the state
    names its parameters.
    """
    for report in reports:
        found = report["bitwise"]
        scatters = [names for kind, names in found["buckets"] if kind == "reduce_scatter"]
        assert all(names == sorted(names, key=found["state"].index) for names in scatters)
        blocks = [
            {name.split(".")[1] if name.startswith("layers.") else "" for name in names}
            for names in scatters
        ]
        assert sorted(map(sorted, blocks)) == [[""], ["0"], ["1"]]
        free = [names for kind, names in report["free"]["buckets"] if kind == "reduce_scatter"]
        assert free != scatters


def one(name: str):
    def function(gm, example_inputs=None):
        return gm

    function.__name__ = name
    return functools.partial(function)


def pipeline_of(
    monkeypatch,
    *names: str,
    on_error: str = "raise",
    keep: KeepRequest | None = None,
    **compile_config: object,
) -> list[str]:
    passes = [one(name) for name in names]
    monkeypatch.setattr(
        "torchtitan.experiments.graph_trainer.passes.construct_default_graph_passes",
        lambda *_, **__: passes,
    )
    config = SimpleNamespace(
        compile=SimpleNamespace(
            **{
                "precompile_artifact_dir": "",
                "inductor_compilation": "regional",
                "disable_passes": [],
            }
            | compile_config
        )
    )
    settings = Settings(on_error=on_error)
    found = integration.apsched_pipeline(None, config, settings=settings, keep=keep)
    return [integration.pass_name(p) for p in found]


def test_one_pass_of_the_default_pipeline_is_replaced(monkeypatch):
    assert pipeline_of(monkeypatch, "a", integration.REPLACED, "b") == [
        "a",
        "apsched_scheduling_pass",
        "b",
    ]
    chosen = {"precompile_artifact_dir": "somewhere"}
    assert pipeline_of(monkeypatch, "a", on_error="fallback", **chosen) == ["a"]
    with pytest.raises(InputError, match="precompile_artifact_dir: an artifact is made by"):
        pipeline_of(monkeypatch, "a", **chosen)
    with pytest.raises(
        InputError, match=r"expected joint_transformer.* among TorchTitan's passes, found a, b"
    ):
        pipeline_of(monkeypatch, "a", "b")
    with pytest.raises(InputError, match=r"turn off --compile\.enable_fsdp_dense_region_overlap"):
        pipeline_of(monkeypatch, integration.REPLACED, "schedule_fsdp_comms_to_dense_regions_pass")


def test_a_pass_behind_the_tags_decides_on_parameters(monkeypatch):
    found = pipeline_of(
        monkeypatch, "a", integration.TAGS, "b", integration.REPLACED, keep=KeepRequest(mode="all")
    )
    scheduling = "apsched_scheduling_pass"
    resharding = "apsched_reshard_pass"
    assert found == ["a", integration.TAGS, "apsched_keep_pass", "b", resharding, scheduling]


def test_wrong_requests_to_keep_are_refused():
    with pytest.raises(InputError, match=r"found 'a @next', an entry of a step of several micro"):
        integration.register(keep=["a @next"])
    with pytest.raises(InputError, match="keep: expected auto, none, all or a readable file"):
        integration.register(keep="missing.txt")


def choosing(keep: KeepRequest):
    """Return the pass that chooses, for graphs that are not described."""
    return functools.partial(
        apsched_keep_pass,
        keep=keep,
        names=lambda _: {},
        gradients=lambda _: {},
        describe=lambda _: {},
        until_scheduled=(),
        settings=Settings(),
        solved={},
        in_node=set(),
    )


def gathering() -> torch.fx.GraphModule:
    """Return a graph that gathers a shard."""
    graph = torch.fx.Graph()
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    gathered = graph.call_function(gather, (graph.placeholder("shard"), 2, "0"))
    wait = torch.ops._c10d_functional.wait_tensor.default
    graph.output((graph.call_function(wait, (gathered,)),))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_without_tags_nothing_can_be_chosen_and_without_collectives_nothing_is(mode):
    choose = choosing(KeepRequest(mode=mode))
    alone = torch.fx.symbolic_trace(torch.nn.Identity())
    assert choose(alone) is alone
    with pytest.raises(InputError, match="leave tag_with_memory_policy_pass out of"):
        choose(gathering())


def test_names_of_which_none_fits_are_refused(monkeypatch):
    monkeypatch.setattr(torchtitan_keep, "tagged_gathers", lambda *_: {"first.weight": []})
    choose = choosing(keep_request(["fast.weight"], "keep"))
    with pytest.raises(InputError, match=r"found fast\.weight: the nearest names are first\.w"):
        choose(gathering())


def test_a_result_of_a_forward_node_that_backward_reads_does_not_begin_backward():
    """TorchTitan repeats it right behind that node, marked as backward."""

    def step(x):
        variance, mean = torch.var_mean(x, [0])
        result = variance.relu()
        return result, result.neg() * mean

    joint = make_fx(step, tracing_mode="fake")(torch.randn(4, 4))
    calls = {node.name: node for node in joint.graph.nodes}
    for name in ("getitem_1", "neg", "mul"):
        calls[name].meta["autograd_backward"] = True
    assert list(calls).index("getitem_1") < list(calls).index("relu")
    forward, backward = (
        {node.name for node in half.module.graph.nodes if node.op == "call_function"}
        for half in halves(joint, {})
    )
    assert {"var_mean", "relu"} <= forward
    assert backward == {"neg", "mul"}


@pytest.mark.parametrize(
    ("pipeline_parallel", "changes", "found"),
    [
        (True, {}, "found pipeline parallelism"),
        (False, {"mode": "jit"}, "found --compile.mode jit"),
        (False, {"enable": False}, "which has no joint graph"),
        (False, {"enable_passes": False}, "found --compile.enable_passes turned off"),
        (False, {"precompile_artifact_dir": "there"}, "found --compile.precompile_artifact_dir"),
    ],
)
def test_a_trainer_whose_steps_ask_for_no_pipeline_is_refused(
    pipeline_parallel, changes, found, caplog
):
    from torchtitan.experiments.graph_trainer.registry import POST_INIT_HOOKS

    taken = {"enable": True, "mode": "aot_fx_trace", "enable_passes": True}
    taken["precompile_artifact_dir"] = ""
    trainer = SimpleNamespace(
        parallel_dims=SimpleNamespace(pp_enabled=pipeline_parallel),
        config=SimpleNamespace(compile=SimpleNamespace(**taken | changes)),
    )
    integration.register()
    with pytest.raises(InputError, match=found):
        POST_INIT_HOOKS["apsched"](trainer)
    integration.register(on_error="fallback")
    POST_INIT_HOOKS["apsched"](trainer)
    assert found in caplog.text
    assert "nothing is scheduled" in caplog.text


def test_a_trainer_whose_steps_ask_for_it_is_taken():
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    compile_config = GraphTrainerCompileConfig(enable=True, mode="aot_fx_trace")
    trainer = SimpleNamespace(
        parallel_dims=SimpleNamespace(pp_enabled=False),
        config=SimpleNamespace(compile=compile_config),
    )
    integration.set_up_trainer(trainer, settings=Settings())
    assert not hasattr(trainer, "forward_backward_step"), "its own, of one micro-batch"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"micro_batches": 0}, "expected a number of micro-batches, at least 1; found 0"),
        ({"micro_batches": True}, "expected a number of micro-batches"),
        ({"micro_batches": 2, "reduce": "never"}, "expected 'once' or 'each', found 'never'"),
        ({"reduce": "once"}, "set micro_batches"),
    ],
)
def test_wrong_numbers_of_micro_batches_are_refused(asked, found):
    with pytest.raises(InputError, match=found):
        integration.register(**asked)


def test_a_trainer_that_accumulates_another_number_is_refused_or_left_as_it_is(caplog):
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.registry import POST_INIT_HOOKS

    trainer = SimpleNamespace(
        parallel_dims=SimpleNamespace(pp_enabled=False),
        config=SimpleNamespace(compile=GraphTrainerCompileConfig(enable=True, mode="aot_fx_trace")),
        gradient_accumulation_steps=3,
        forward_backward_step=None,
    )
    integration.register(micro_batches=2)
    with pytest.raises(InputError, match=r"a divisor of the 3 micro-batches .*, found 2"):
        POST_INIT_HOOKS["apsched"](trainer)
    integration.register(micro_batches=2, on_error="fallback")
    POST_INIT_HOOKS["apsched"](trainer)
    assert "each micro-batch is a graph of its own" in caplog.text
    assert trainer.forward_backward_step is None
    integration.register(micro_batches=3)
    POST_INIT_HOOKS["apsched"](trainer)
    assert trainer.forward_backward_step is not None


def test_it_is_chosen_by_name_and_settings_are_checked():
    from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY

    integration.register(memory_cap="60GiB")
    assert PASS_PIPELINE_REGISTRY["apsched"].keywords["settings"].memory_cap == "60GiB"
    with pytest.raises(InputError, match="did you mean 'memory_cap'"):
        integration.register(memory_cup="60GiB")


def test_importing_apsched_imports_no_torchtitan(monkeypatch):
    code = (
        "import sys, apsched, apsched.integrations.torchtitan; assert 'torchtitan' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "torchtitan.experiments.graph_trainer.registry", None)
    with pytest.raises(apsched.InputError, match=r"pip install 'apsched\[torchtitan\]'"):
        integration.register()
