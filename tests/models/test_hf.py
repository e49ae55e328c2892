"""Models of Transformers, from a configuration on disk: captured as they are, with their own
numbers, and refused where they do not fit.
"""

import json
import sys
from pathlib import Path

import pytest

from apsched.capture.captured import Capture
from apsched.errors import InputError
from apsched.fx.collectives import is_collective
from apsched.models.transformers.config import read_config
from apsched.pipeline.sources import SourceRequest, opened
from tests.helpers.processes import WORKERS, run_sizes

pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(scope="module")
def configs():
    from tests.helpers.graphs import hf_configs

    return hf_configs


def captured(path: Path, mesh: str, **chosen: object) -> Capture:
    with opened(SourceRequest(source=f"hf:{path}", mesh=mesh, seq_len=32, **chosen)) as source:
        return source.capture


def gathered(capture: Capture, name: str) -> list[str]:
    """Return the parameters that one graph gathers, or whose gradients it reduces."""
    graph = next(g for g in capture.graphs if g.name == name)
    customs = [n.meta["custom"] for n in graph.module.graph.nodes if is_collective(n)]
    return [custom["apsched_parameter"] for custom in customs if "apsched_parameter" in custom]


@pytest.mark.parametrize(("name", "per_layer"), [("llama", 9), ("qwen3", 11), ("mixtral", 9)])
def test_each_parameter_is_gathered_under_its_own_name(configs, tmp_path, name, per_layer):
    capture = captured(configs.written(tmp_path, name, num_hidden_layers=1), "fsdp=4")
    forward = gathered(capture, "forward")
    tied = configs.CONFIGS[name].get("tie_word_embeddings", False)
    assert len(forward) == per_layer + (2 if tied else 3), "each once, a tied embedding too"
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
    } <= set(forward)
    graph = capture.graphs[0].module.graph
    stacks = {
        list(n.meta["nn_module_stack"])[-1] for n in graph.nodes if n.meta.get("nn_module_stack")
    }
    assert {
        "model.layers.0.mlp.gate_proj" if name != "mixtral" else "model.layers.0.mlp.experts",
        "model.rotary_emb",
    } <= stacks


def test_layers_mesh_and_checkpointing_can_be_chosen(configs, tmp_path):
    path = configs.written(tmp_path, "llama")
    capture = captured(path, "replicate=2,fsdp=2", num_layers=1, activation_checkpoint="full")
    assert len(gathered(capture, "forward")) == 9 + 3
    assert [len(ranks) for ranks in capture.group_ranks.values()] == [2, 2]
    recomputed = [
        n
        for n in capture.graphs[1].module.graph.nodes
        if "scaled_dot_product_flash_attention_for_cpu.default" in str(n.target)
    ]
    assert len(recomputed) == 1, "attention of the layer, in backward"


def test_a_configuration_is_a_source_like_any_other(configs, run, tmp_path):
    configs.written(tmp_path, "llama")
    ran = run(
        "capture",
        "hf:llama.json",
        "--mesh",
        "fsdp=2,tp=2",
        "--seq",
        "32",
        "--layers",
        "1",
        "-o",
        "step.graph",
        "--json",
    )
    assert ran.code == 0, ran.stderr
    assert [graph["name"] for graph in json.loads(ran.stdout)["graphs"]] == ["forward", "backward"]
    (tmp_path / "tiny").mkdir()
    configs.written(tmp_path / "tiny", "llama").rename(tmp_path / "tiny" / "config.json")
    ran = run(
        "audit", "hf:tiny", "--mesh", "fsdp=2", "--seq", "32", "--layers", "1", "--budget", "0"
    )
    assert ran.code == 0, ran.stderr


@pytest.mark.parametrize(
    ("name", "changes", "mesh", "found"),
    [
        ("llama", {"model_type": "unheard-of"}, "fsdp=2", "found 'unheard-of'"),
        ("llama", {"model_type": "wav2vec2"}, "fsdp=2", "a model of tokens or pixels"),
        ("llama", {"model_type": "whisper"}, "fsdp=2", r"tokens or pixels.*\(WhisperModel\)"),
        (
            "llama",
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "fsdp=2",
            r"tokens or pixels.*\(WhisperForConditionalGeneration\)",
        ),
        (
            "llama",
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
            "fsdp=2",
            r"found LlavaForConditionalGeneration with several inputs \(input_ids, pixel_values\);"
            " capture it as package.module:function",
        ),
        (
            "llama",
            {"model_type": "clip", "architectures": ["CLIPModel"]},
            "fsdp=2",
            "found CLIPModel with several inputs",
        ),
        ("llama", {"model_type": "gpt2"}, "fsdp=2,tp=2", "by its own plan"),
        ("llama", {"model_type": "opt"}, "fsdp=2,ep=2", "base_model_ep_plan.*; drop ep"),
        ("llama", {"model_type": "opt", "max_position_embeddings": 16}, "fsdp=2", "--seq 16"),
        ("llama", {"num_attention_heads": 3}, "fsdp=2", "that Transformers accepts, found"),
        ("llama", {}, "tp=4", "tp must divide the 2 key-value heads; found tp=4"),
        ("llama", {}, "fsdp=2,ep=2", "base_model_ep_plan.*; drop ep"),
        ("mixtral", {"num_local_experts": 3}, "fsdp=2,ep=2", "found 3 experts and ep=2"),
        ("mixtral", {"sliding_window": 16}, "fsdp=2", "sliding window of 16 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(configs, tmp_path, name, changes, mesh, found):
    with pytest.raises(InputError, match=found) as error:
        captured(configs.written(tmp_path, name, **changes), mesh)
    assert f"{name}.json" in str(error.value)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    """``time_step_limit`` of Mamba2."""
    limits = [0.0, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mamba2", "time_step_limit": limits})
    )
    fields = read_config(tmp_path / "config.json")
    assert fields["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize(
    ("name", "mesh", "some"),
    [
        ("gpt2", "fsdp=4", "transformer.h.0.attn.c_attn.weight"),
        ("bert", "replicate=2,fsdp=2", "bert.encoder.layer.0.attention.self.query.weight"),
        ("vit", "fsdp=2", "vit.embeddings.cls_token"),
    ],
)
def test_any_architecture_is_captured_under_its_own_names(configs, tmp_path, name, mesh, some):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(configs.AUTO[name]))
    capture = captured(path, mesh)
    forward = gathered(capture, "forward")
    assert some in forward
    assert not [other for other in forward if "parametrizations" in other]
    reduced = set(gathered(capture, "backward"))
    assert set(forward) <= reduced


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"model_type": "fnet"}, r"\w+Error: Unsupported dtype BFloat16"),
        (
            {"model_type": "reformer", "is_decoder": False, "axial_pos_embds_dim": [16, 48]},
            "ValueError: If training, make sure that config.axial_pos_shape",
        ),
    ],
)
def test_a_model_that_fails_is_no_bug_of_apsched(configs, tmp_path, fields, found):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(configs.CONFIGS["llama"] | fields))
    expected = rf"model.json: expected a model that runs.*{found}.*modeling_\w+\.py:.*--seq"
    with pytest.raises(InputError, match=expected):
        captured(path, "fsdp=2")


def test_a_vision_model_has_images_per_second(configs, run, tmp_path):
    """A sequence length does not apply to it, so its rate does not depend on one."""
    (tmp_path / "vit.json").write_text(json.dumps(configs.AUTO["vit"]))

    def rate_line(seq: str) -> str:
        source = ("hf:vit.json", "--mesh", "fsdp=2", "--batch", "3", "--seq", seq)
        options = ("--keep", "none", "--optimizer", "none", "--budget", "0", "-o", "out")
        ran = run("solve", *source, *options)
        assert ran.code == 0, ran.stderr
        (line,) = (text for text in ran.stdout.splitlines() if "/s a process rank" in text)
        return line

    line = rate_line("64")
    assert line == rate_line("128")
    graphs = json.loads(Path("out/result.json").read_text())["graphs"]
    step_us = sum(graph["step_time_us"] for graph in graphs)
    assert line.startswith(f"{3 / step_us * 1e6:,.0f} images/s a process rank")


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {"attention_bias": True}), ("mixtral", {})]
)
def test_tensor_parallelism_follows_the_plan_of_the_model(configs, tmp_path, name, changes):
    path = configs.written(tmp_path, name, num_hidden_layers=1, **changes)
    capture = captured(path, "fsdp=2,tp=2")
    sizes = {len(ranks) for ranks in capture.group_ranks.values()}
    assert sizes == {2}
    assert len(capture.group_ranks) == 2
    assert "model.layers.0.self_attn.q_proj.weight" in gathered(capture, "forward")


def test_experts_are_spread_by_the_plan_of_the_model(configs, tmp_path):
    """Tokens travel to the experts and back, in numbers that the routing decides; experts are
    sharded over the rest of FSDP, everything else over all of it.
    """
    path = configs.written(tmp_path, "mixtral", num_hidden_layers=1)
    capture = captured(path, "fsdp=4,ep=2")
    sizes = {name: len(ranks) for name, ranks in capture.group_ranks.items()}
    groups: dict[str, set[int]] = {}
    for node in capture.graphs[0].module.graph.nodes:
        if is_collective(node):
            name = node.meta["custom"].get("apsched_parameter", node.target._opname)
            groups.setdefault(name, set()).add(sizes[node.args[-1]])
    assert groups["model.layers.0.mlp.experts.down_proj"] == {2}
    assert groups["model.layers.0.mlp.gate.weight"] == {4}
    assert groups["all_to_all_single"] == {2}
    exchanged = [
        node.meta["val"].shape[0]
        for graph in capture.graphs
        for node in graph.module.graph.nodes
        if is_collective(node) and "all_to_all" in str(node.target)
    ]
    assert len(exchanged) == 5, "of numbers, of tokens there and back, and of their gradients"
    assert sum(isinstance(size, int) for size in exchanged) == 1, "numbers alone are known before"


def test_files_that_are_no_configuration_are_refused(run, tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, found in (
        ("missing.json", "No such file"),
        ("broken.json", "expected JSON"),
        ("list.json", "found None"),
    ):
        ran = run("capture", f"hf:{name}", "-o", "x.graph")
        assert ran.code == 2
        assert found in ran.errors[0]


def test_without_transformers_the_extra_is_named(configs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'apsched\[hf\]'"):
        captured(configs.written(tmp_path, "llama"), "fsdp=2")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, list[dict]]:
    return run_sizes(WORKERS / "graphs/hf_worker.py", tmp_path_factory.mktemp("hf"), timeout_s=300)


@pytest.fixture(params=[2, 4], ids="{} processes".format)
def reports(jobs, request) -> list[dict]:
    return jobs[request.param]


@pytest.mark.ranks
def test_graphs_compute_what_transformers_computes(reports):
    """Loss and every gradient, against the eager model of Transformers with the same weights and
    tokens.
    """
    for report in reports:
        assert len({case.split()[0] for case in report}) == 3, "all families"
        for case, found in report.items():
            assert found["names"], case
            rough = case.startswith("mixtral")  # in bfloat16
            assert found["loss"] == pytest.approx(found["expected"], rel=1e-2 if rough else 1e-6), (
                case
            )
            assert rough or found["distance"] < 2e-5, case


@pytest.mark.ranks
def test_rewritten_graphs_compute_the_same_bits(reports):
    """Sums of two values have one order only; those of four values of 32 bits have no rounding in
    64.
    """
    for report in reports:
        for case, found in report.items():
            assert found["same loss"], case
            assert found["unequal"] == [], case
        assert min(min(report[case]["buckets"]) for case in report if "fsdp" in case) >= 1


@pytest.fixture(scope="module")
def auto_jobs(tmp_path_factory) -> dict[int, list[dict]]:
    worker = WORKERS / "graphs/auto_worker.py"
    return run_sizes(worker, tmp_path_factory.mktemp("auto"), timeout_s=300)


@pytest.mark.ranks
@pytest.mark.parametrize("num_processes", [2, 4])
def test_any_architecture_computes_what_transformers_computes(auto_jobs, num_processes):
    """Loss and every gradient, against the eager model: FSDP, HSDP, DDP, and the model's own plans
    of tensor and of expert parallelism.
    """
    for report in auto_jobs[num_processes]:
        for case, found in report.items():
            assert found["names"], case
            assert found["count"] > 5, case
            assert found["loss"] == pytest.approx(found["expected"], rel=1e-5), case
            assert found["distance"] < 1e-4, case
