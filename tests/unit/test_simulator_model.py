"""Shapes, machines, layouts and the operators that are worked out from them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.simulator import operators
from sparetrain_megatron.simulator.layout import Layout, stage_memory
from sparetrain_megatron.simulator.machine import GIB, PRESETS, Link, machine
from sparetrain_megatron.simulator.model import SHAPES, from_megatron, shape


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-70b", 70.6),
        ("mistral-large", 122.6),
        ("llama4-scout", 107.8),
        ("llama3-405b", 405.9),
    ],
)
def test_parameters(name, billions):
    assert shape(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_unknown_names():
    with pytest.raises(UsageError, match="llama3-70b"):
        shape("gpt-17")
    with pytest.raises(UsageError, match="h100, h200, b200"):
        machine("a100")
    with pytest.raises(UsageError, match="positive"):
        machine("h200", 0)


def test_memory_is_in_gib():
    assert machine("h200", 80).memory == 80 * GIB


@given(st.floats(1, 1e11), st.floats(1, 1e11))
def test_larger_messages_take_longer_and_go_faster(a, b):
    small, large = sorted((a, b))
    for link in (PRESETS["h200"].nvlink, PRESETS["h200"].network, PRESETS["h200"].wire):
        assert link.rate(small) <= link.rate(large)
        assert link.send(small) <= link.send(large) * (1 + 1e-9)


def test_known_points_of_a_link():
    link = Link(0.0, ((1e6, 22e9), (1e7, 125e9)))
    assert link.rate(1e3) == link.rate(1e6) == 22e9
    assert link.rate(1e9) == 125e9
    assert link.all_reduce(1e7, 2) == pytest.approx(1e7 / 125e9)
    assert link.all_reduce(1e7, 1) == 0
    assert link.all_gather(1e7, 8) == pytest.approx(link.all_reduce(1e7, 8) / 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 7}, "doesn't divide 64 attention heads"),
        ({"tensor": 16}, "a node has 8 GPUs"),
        ({"pipeline": 81}, "81 x 1 stages for 80 layers"),
        ({"virtual": 2}, "virtual stages need a pipeline"),
        ({"pipeline": 3, "virtual": 2}, "divide evenly"),
        ({"pipeline": 4, "virtual": 2, "global_batch": 6}, "multiple of 4 stages"),
        ({"data": 3}, "no multiple of data 3"),
        ({"expert": 2}, "no experts"),
        ({"pipeline": 0}, "pipeline 0"),
    ],
)
def test_wrong_layouts_say_why(changes, words):
    with pytest.raises(UsageError, match=words):
        Layout(**changes).validate(shape("llama3-70b"), machine("h200"))


@given(st.integers(1, 20), st.integers(1, 4))
def test_every_layer_is_on_one_stage(pipeline, virtual):
    layers = Layout(pipeline=pipeline, virtual=virtual).stage_layers(SHAPES["llama3-70b"])
    assert [n for some in layers for n in some] == list(range(1, 81))
    assert max(map(len, layers)) - min(map(len, layers)) <= 1
    assert len(layers) == pipeline * virtual


def test_memory_of_all_stages_is_the_model():
    model = shape("mistral-large")
    layout = Layout(tensor=8, pipeline=4, distributed_optimizer=False)
    memories = [stage_memory(model, layout, stage) for stage in range(4)]
    parameters = 8 * sum(memory.parameters for memory in memories)
    assert parameters == pytest.approx(model.parameters, rel=1e-3)
    for memory in memories:
        assert memory.weights + memory.optimizer == pytest.approx(18 * memory.parameters)
    cut = stage_memory(model, Layout(tensor=8, pipeline=4, data=4), 0)
    assert cut.optimizer == pytest.approx(memories[0].optimizer / 4)


def test_layer_has_the_flops_of_its_parameters():
    """Time in matrix products is what 2 FLOP a parameter and token come to; the backward twice."""
    model, layout = shape("llama3-70b"), Layout()
    device = dataclasses.replace(machine("h200"), half_rate=0.0, launch=0.0)
    forward, recompute, backward = operators.layer(model, layout, device, "none")
    products = sum(o.seconds for o in forward.operators if o.name == "mm")
    parameters = model.dense_parameters - 2 * model.hidden
    expected = 2 * parameters * model.sequence / layout.tensor / device.matmul
    assert products == pytest.approx(expected, rel=0.02)
    assert [o.name for o in recompute.operators] == [o.name for o in forward.operators]
    assert all(o.recomputed for o in recompute.operators)
    back = sum(o.seconds for o in backward.operators if o.name == "mm")
    assert back == pytest.approx(2 * products)


def test_collectives_and_windows():
    model, device = shape("llama3-70b"), machine("h200")
    pairs = operators.layer(model, Layout(), device, "none")
    assert [len(t.windows) for t in pairs] == [4, 4, 4]
    reduced = operators.layer(model, Layout(sequence_parallel=False), device, "none")
    assert [len(t.windows) for t in reduced] == [2, 2, 2]
    alone = operators.layer(model, Layout(tensor=1, sequence_parallel=False), device, "none")
    assert not any(t.windows for t in alone)

    def waiting(overlap):
        templates = operators.layer(model, Layout(), device, overlap)
        return sum(w.seconds for t in templates for w in t.windows)

    assert waiting("async") < waiting("backward") < waiting("none")


def test_expert_layers_have_dynamic_windows():
    model = shape("llama4-scout")
    templates = operators.layer(model, Layout(expert=8), machine("h200"), "none")
    for template in templates:
        dynamic = [w for w in template.windows if w.dynamic]
        assert [w.what for w in dynamic] == ["expert", "expert"]
    assert any(o.integer for o in templates[0].operators)
    across = operators.layer(model, Layout(data=2, expert=16), machine("h200"), "none")
    assert {w.kind for w in across[0].windows if w.dynamic} == {"inter"}


def test_megatron_arguments():
    flags = (
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 128256 "
        "--swiglu --untie-embeddings-and-output-weights --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 32 "
        "--sequence-parallel --recompute-granularity full --bf16 --lr 1e-4"
    ).split()
    model, layout = from_megatron(flags)
    assert dataclasses.replace(model, name="llama3-70b", sequence=8192, topk=1) == shape(
        "llama3-70b"
    )
    assert Layout(**layout).pipeline == 2
    assert layout["global_batch"] == 32 and layout["recompute"] and layout["sequence_parallel"]
    with pytest.raises(UsageError, match="--seq-length"):
        from_megatron(["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"])
    with pytest.raises(UsageError, match="num-layers"):
        from_megatron(["--num-layers", "two"])


def test_an_adapter_of_a_node_is_shared_by_its_gpus():
    shared = PRESETS["h200"].shared_adapter(8e9)
    assert shared.wire.send(1e9) == pytest.approx(1.0, rel=1e-3)
    assert shared.network.all_reduce(1e9, 2) == pytest.approx(1.0, rel=1e-3)
    assert shared.nvlink == PRESETS["h200"].nvlink


def test_deterministic_collectives_are_slower_inside_a_node_only():
    plain, ring = PRESETS["h200"], PRESETS["h200"].deterministic()
    assert ring.nvlink.rate(1e9) == pytest.approx(365e9)
    assert ring.wire == plain.wire


def test_saved_activations_are_cut_without_sequence_parallelism_too():
    whole = Layout(8, 2, sequence_parallel=False)
    cut = dataclasses.replace(whole, distribute_saved=True)
    model = shape("llama3-70b")
    held = stage_memory(model, whole, 0).held
    assert stage_memory(model, cut, 0).held == held / 8
    assert stage_memory(model, Layout(8, 2), 0).held == held / 8
    _, layout = from_megatron(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--distribute-saved-activations".split()
    )
    assert layout["distribute_saved"]
