"""The CPU that stands in for a CUDA device."""

import copy
import os
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from sparetrain_megatron import hostdevice
from sparetrain_megatron.hostdevice._patches import Patches
from sparetrain_megatron.hostdevice.adam import FusedAdam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """The stand-in, for the length of a test."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    hostdevice.install()
    yield
    hostdevice.uninstall()


def test_installing_twice_is_installing_once(device: None) -> None:
    current_device = torch.cuda.current_device
    hostdevice.install()
    assert torch.cuda.current_device is current_device
    assert hostdevice.installed()


def test_uninstalling_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    owners = (torch.cuda, torch.accelerator, torch.distributed, torch.Tensor, threading.Thread)
    before = [dict(vars(owner)) for owner in owners]
    hostdevice.install()
    hostdevice.uninstall()
    assert [dict(vars(owner)) for owner in owners] == before
    assert not hostdevice.installed()
    assert not torch.ones(1).is_cuda


def test_a_real_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA device is present"):
        hostdevice.install()
    assert not hostdevice.installed()


@pytest.mark.parametrize("value", ["0", None])
def test_compilation_is_switched_off_unless_set(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    if value is None:
        monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    hostdevice.install()
    try:
        assert os.environ["TORCH_COMPILE_DISABLE"] == (value or "1")
    finally:
        hostdevice.uninstall()


def test_preparing_megatron_needs_the_device() -> None:
    with pytest.raises(RuntimeError, match="install"):
        hostdevice.prepare_megatron()


@pytest.mark.parametrize("place", ["cuda", "cuda:1", 0, torch.device("cuda", 3)])
def test_tensors_are_made_on_the_cpu(device: None, place) -> None:
    tensor = torch.arange(4, device=place)
    assert tensor.device.type == "cpu"
    assert tensor.is_cuda
    for moved in (tensor.to(place), tensor.to(device=place), tensor.cuda()):
        assert moved.device.type == "cpu"
    assert torch.empty_like(tensor, device=place).device.type == "cpu"
    assert torch.zeros(1, pin_memory=True).is_pinned()
    assert torch.nn.Linear(2, 2, device=place).cuda().weight.device.type == "cpu"
    with torch.device("cuda"):
        assert torch.ones(1).device.type == "cpu"


def test_a_copy_to_the_host_is_a_copy(device: None) -> None:
    tensor = torch.zeros(2, device="cuda")
    host = tensor.cpu()
    tensor += 1
    assert host.tolist() == [0, 0]


def test_type_names_are_those_of_a_cuda_tensor(device: None) -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    assert tensor.type() == "torch.cuda.BFloat16Tensor"
    assert tensor.type("torch.cuda.FloatTensor").dtype is torch.float32
    assert tensor.type(torch.int64).dtype is torch.int64


def test_the_device_is_there_in_every_thread(device: None) -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda").is_cuda))
    thread.start()
    thread.join()
    assert seen == [True]


def test_the_device_is_there_in_backward(device: None) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            # As a recomputing function does: makes tensors and runs backward again.
            leaf = torch.ones(2, device="cuda", requires_grad=True)
            with torch.enable_grad():
                (leaf * torch.full((2,), 2.0, device="cuda")).sum().backward()
            return grad * leaf.grad

    x = torch.ones(2, device="cuda", requires_grad=True)
    Scale.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
    (gradient,) = torch.autograd.grad(Scale.apply(x).sum(), x)
    assert gradient.tolist() == [2, 2]


def test_streams_and_events_have_nothing_to_wait_for(device: None) -> None:
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        start, end = torch.cuda.Event(enable_timing=True), stream.record_event()
        start.record()
        tensor = torch.ones(1, device="cuda")
        tensor.record_stream(torch.cuda.current_stream())
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    stream.wait_event(end)
    torch.cuda.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) > 0


def test_each_rank_has_a_device(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 4
    torch.cuda.set_device(torch.device("cuda:3"))
    assert torch.cuda.current_device() == 3
    assert torch.cuda.get_device_name() == "cpu"
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    assert torch.cuda.max_memory_allocated() == 0


def test_saved_random_states_bring_back_the_same_draws(device: None) -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(100, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(100, device="cuda")))
    assert torch.cuda.default_generators[0] is torch.default_generator


def test_process_groups_of_nccl_are_gloo(device: None, tmp_path) -> None:
    distributed = torch.distributed
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda:0"),
    )
    try:
        assert distributed.get_backend() == "gloo"
        group = distributed.new_group([0], backend="nccl")
        assert distributed.get_backend(group) == "gloo"
        tensor = torch.ones(1, device="cuda")
        distributed.all_reduce(tensor, group=group)
        assert tensor.item() == 1
    finally:
        distributed.destroy_process_group()


def test_a_tensor_that_is_being_sent_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, dst: sent.append(tensor))
    hostdevice.install()
    try:
        tensor = torch.ones(3)
        torch.distributed.isend(tensor, 1)
        tensor.data = torch.empty(1)
        assert sent[0].tolist() == [1, 1, 1]
    finally:
        hostdevice.uninstall()


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_a_data_loader_that_pins_memory_works(device: None) -> None:
    loader = DataLoader([torch.ones(2), torch.zeros(2)], batch_size=2, pin_memory=True)
    assert next(iter(loader)).tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_optimizer_computes_what_torch_computes(decoupled: bool) -> None:
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    start = torch.randn(3, 5)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizer = FusedAdam([ours], adam_w_mode=decoupled, **options)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **options)
    for _ in range(3):
        ours.grad = torch.randn(3, 5)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(optimizer.state[ours]["exp_avg_sq"], reference.state[theirs]["exp_avg_sq"])
    assert optimizer.param_groups[0]["step"] == 3


def test_the_optimizer_continues_from_a_saved_state() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([parameter])
    parameter.grad = torch.full((4,), 0.5)
    optimizer.step()
    other = torch.nn.Parameter(parameter.detach().clone())
    resumed = FusedAdam([other])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.grad = parameter.grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(parameter, other)


def test_the_optimizer_refuses_graphs() -> None:
    with pytest.raises(ValueError, match="cuda-graph"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], capturable=True)


def test_patches_remove_what_was_not_there() -> None:
    class Target:
        known = 1

    patches = Patches()
    patches.set(Target, "known", 2)
    patches.set(Target, "known", 3)
    patches.set(Target, "new", 4)
    patches.undo()
    assert Target.known == 1
    assert not hasattr(Target, "new")
