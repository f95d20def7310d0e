"""Devices by name. Tests marked ``gpu`` run on every device beside the CPU: ``scripts/check-vulkan`` provides some."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from conftest import GOLDEN, DrafterFactory, SmolFactory, TargetFactory

from dspine_local import _native
from dspine_local.convert import convert_checkpoint
from dspine_local.engine import Engine
from dspine_local.errors import BackendError
from dspine_local.native_models import open_drafter, open_target
from dspine_local.options import GREEDY, EngineOptions
from dspine_local.parity import run_case
from dspine_local.planning.measure import PlannedFiles, measure
from dspine_local.rpc import connect

DEVICES = [name for name, _, computes, _, _ in _native.devices() if computes]
RPC_SERVER = [sys.executable, "-m", "dspine_local", "rpc-server"]


def has_rpc() -> bool:
    """Whether this build of llama.cpp has the RPC backend."""
    try:
        _native.serve_rpc("127.0.0.1:1", ["no such device"])
    except BackendError:
        return False
    except ValueError:
        return True
    raise AssertionError("expected an error")


on_devices = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="there is no device beside the CPU")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["Vulkan7"]}, "no device 'Vulkan7', expected one of: .*CPU"),
        ({"devices": ["CPU"]}, "device 'CPU' is the CPU"),
        ({"devices": [""]}, "no device ''"),
        ({"split_mode": "row"}, "split_mode"),
        ({"tensor_split": [1, 2], "devices": []}, "tensor_split has 2 shares, expected at most one for each of 0"),
        ({"tensor_split": [0.0]}, "tensor_split must be shares"),
        ({"tensor_split": [-1.0]}, "tensor_split"),
        ({"tensor_split": [float("nan")]}, "tensor_split"),
        ({"tensor_split": [1.0] * 999}, "tensor_split has 999 shares"),
    ],
)
def test_wrong_device_options_are_refused(options: dict[str, object], message: str, tiny_target: TargetFactory) -> None:
    with pytest.raises(ValueError, match=message):
        open_target(str(tiny_target("llama").path), EngineOptions(**options), n_ctx=64, n_draft=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"devices": "CPU"}, {"devices": [1]}, {"tensor_split": ["x"]}, {"split_mode": 1}])
def test_device_options_have_types(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"devices|tensor_split|split_mode"):
        EngineOptions(**options)  # type: ignore[arg-type]


def test_options_with_lists_can_be_keys() -> None:
    assert hash(EngineOptions(devices=["a"], tensor_split=[1.0])) == hash(
        EngineOptions(devices=("a",), tensor_split=(1.0,))
    )


def test_unknown_drafter_device_is_refused(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    tiny = tiny_target("llama")
    gguf = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), gguf, outtype="f32")
    with pytest.raises(ValueError, match=r"no device 'CUDA9', expected one of: .*CPU"):
        Engine(tiny.path, gguf, drafter_device="CUDA9", n_ctx=256, n_draft=3)


def test_everything_on_the_cpu_by_name(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    tiny = tiny_target("llama", "q8_0")
    gguf = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), gguf)
    engine = Engine(tiny.path, gguf, devices=[], drafter_device="cpu", n_ctx=256, n_draft=7)
    assert engine.drafter is not None
    assert engine.drafter.device == "CPU"
    answer = engine.generate([65, 66, 67], max_tokens=20, sampling=GREEDY)
    plain = Engine(tiny.path, n_ctx=256, devices=[]).generate([65, 66, 67], max_tokens=20, sampling=GREEDY)
    assert answer.read() == plain.read()


@pytest.mark.parametrize("server", ["", "host", "host:", "host:0", "host:65536", "host:12x", ":50052"])
def test_rpc_servers_are_host_and_port(server: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        connect([server])


def test_unreachable_rpc_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(BackendError, match=r"no RPC server answers at|has no RPC backend"):
        connect([f"127.0.0.1:{port}"])


def test_something_else_at_the_rpc_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(64)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        Thread(target=answer, daemon=True).start()
        with pytest.raises(BackendError, match=r"no RPC server answers at|has no RPC backend"):
            connect([f"127.0.0.1:{listener.getsockname()[1]}"])


def test_rpc_server_needs_the_backend_and_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*RPC_SERVER, "--port", port], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr
    if not has_rpc():
        done = subprocess.run([*RPC_SERVER, "--port", port], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "-DGGML_RPC=ON" in done.stderr


@pytest.fixture
def two_workers() -> Iterator[list[str]]:
    """Two RPC servers on this machine's loopback, each with the CPU."""
    if not has_rpc():
        pytest.skip("this build of llama.cpp has no RPC backend")
    workers, servers = [], []
    try:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            command = [*RPC_SERVER, "--port", str(port), "--device", "CPU", "--threads", "1"]
            workers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            servers.append(f"127.0.0.1:{port}")
        yield servers
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


SPLIT = """
import sys, time
from dspine_local import Engine
from dspine_local.errors import BackendError
from dspine_local.options import GREEDY
from dspine_local.rpc import connect
target, drafter, *servers = sys.argv[1:]
for attempt in range(20):
    try:
        connect(servers)
        break
    except BackendError:
        time.sleep(0.5)
engine = Engine(target, drafter, devices=["RPC0", "RPC1"], tensor_split=[1, 1], n_ctx=512, n_draft=5)
used = {device for device, part, size in engine.target.memory() if part == "weights" and size}
assert {"RPC0", "RPC1"} <= used, used
assert engine.drafter.device not in used - {"CPU"}, engine.drafter.device
drafted = engine.chat([{"role": "user", "content": "Name three fruits."}], max_tokens=40, sampling=GREEDY)
text = drafted.read()
assert drafted.stats.accepted > 0
plain = engine.chat([{"role": "user", "content": "Name three fruits."}], max_tokens=40, sampling=GREEDY, n_draft=0)
assert plain.read() == text, (plain.read(), text)
print(text)
"""


@pytest.mark.slow
def test_target_split_over_two_machines(two_workers: list[str], smollm2: SmolFactory, trained_drafter: Path) -> None:
    arguments = [str(smollm2("q8_0")), str(trained_drafter), *two_workers]
    done = subprocess.run([sys.executable, "-c", SPLIT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


class TestOnDevice:
    """Everything that differs between devices: arithmetic, memory, copies."""

    pytestmark = on_devices

    @pytest.fixture(params=DEVICES or ["none"])
    def device(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir()))
    def test_golden_parity(self, device: str, case: str) -> None:
        result = run_case(GOLDEN / case, device=device)
        assert result.passed, result

    @pytest.mark.parametrize(
        ("qtype", "drafter_device", "n_draft"), [("q8_0", "same", 3), ("q8_0", "CPU", 7), ("q4_0", "same", 7)]
    )
    def test_answers_are_those_of_plain_decoding(
        self, device: str, qtype: str, drafter_device: str, n_draft: int, smollm2: SmolFactory, trained_drafter: Path
    ) -> None:
        engine = Engine(
            smollm2(qtype),
            trained_drafter,
            devices=[device],
            drafter_device=device if drafter_device == "same" else "CPU",
            n_ctx=512,
            n_draft=n_draft,
        )
        messages = [{"role": "user", "content": "Explain how a bicycle stays upright."}]
        plain = engine.chat(messages, max_tokens=40, sampling=GREEDY, n_draft=0).read()
        drafted = engine.chat(messages, max_tokens=40, sampling=GREEDY)
        assert drafted.read() == plain
        assert drafted.stats is not None
        assert drafted.stats.accepted > 0

    def test_automatic_length_and_changing_ones(self, device: str, smollm2: SmolFactory, trained_drafter: Path) -> None:
        """Batches of different sizes follow each other, as they do while costs are measured."""
        engine = Engine(smollm2("q8_0"), trained_drafter, devices=[device], n_ctx=512)
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        plain = engine.chat(messages, max_tokens=16, sampling=GREEDY, n_draft=0).read()
        for n_draft in (None, 1, 2, 3):
            assert engine.chat(messages, max_tokens=16, sampling=GREEDY, n_draft=n_draft).read() == plain

    def test_drafter_on_the_device_of_a_target_on_the_cpu(
        self, device: str, smollm2: SmolFactory, trained_drafter: Path
    ) -> None:
        engine = Engine(smollm2("q8_0"), trained_drafter, devices=[], drafter_device=device, n_ctx=512, n_draft=4)
        assert engine.drafter is not None
        assert engine.drafter.device == device
        copied = {part: size for on, part, size in engine.drafter.memory() if on == device}
        assert copied["output matrix"] > 0
        messages = [{"role": "user", "content": "Count to twenty."}]
        drafted = engine.chat(messages, max_tokens=40, sampling=GREEDY)
        text = drafted.read()
        assert drafted.stats is not None
        assert drafted.stats.accepted > 0
        assert engine.chat(messages, max_tokens=40, sampling=GREEDY, n_draft=0).read() == text

    @pytest.mark.parametrize("drafter_on_cpu", [False, True])
    def test_plan_is_what_is_allocated(
        self, device: str, drafter_on_cpu: bool, smollm2: SmolFactory, trained_drafter: Path
    ) -> None:
        options = EngineOptions(
            n_ctx=2048, devices=[device], drafter_device="CPU" if drafter_on_cpu else None, n_parallel=2
        )
        target = open_target(str(smollm2("q8_0")), options, n_ctx=2048, n_draft=7)
        drafter = open_drafter(str(trained_drafter), target, options)
        target.enable_taps(drafter.target_layers)
        planned = measure(PlannedFiles(str(smollm2("q8_0")), str(trained_drafter)), options, 2048, 7)
        for name in (device, "CPU"):
            real = sum(size for on, _, size in [*target.memory(), *drafter.memory()] if on == name)
            buffers = [line for line in planned.lines if line.device == name and line.part != "vocabulary, graphs"]
            assert sum(line.n_bytes for line in buffers) == pytest.approx(real, rel=0.03)
