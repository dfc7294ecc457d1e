"""What workers are configured with: defaults by device, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.address import Address
from common.batch_sizes import BatchSizes
from common.config import describe, parse_config
from decode_worker.config import Config as DecodeConfig
from prefill_worker.config import Config as PrefillConfig

MIB = 1 << 20


def prefill(**given: Any) -> PrefillConfig:
    return PrefillConfig(model=Path("m"), **given)


def decode(**given: Any) -> DecodeConfig:
    return DecodeConfig(model=Path("m"), **given)


def test_on_the_cpu_the_defaults_are_those_of_the_reference() -> None:
    config = prefill()
    assert (config.device, config.dtype, config.page_size, config.max_running) == ("cpu", "float32", 16, 16)
    assert (config.chunk_tokens, config.pool_memory_mb, config.memory_fraction) == (256, 1024, None)
    assert (decode().max_running, decode().graph_sizes) == (64, ())


def test_on_cuda_the_defaults_are_a_gpus() -> None:
    config = prefill(device="cuda:1")
    assert (config.device, config.dtype, config.page_size, config.max_running) == ("cuda:1", "bfloat16", 64, 64)
    assert (config.chunk_tokens, config.pool_memory_mb, config.memory_fraction) == (8192, None, 0.9)
    worker = decode(device="cuda")
    assert (worker.device, worker.max_running, worker.graph_sizes) == ("cuda:0", 256, BatchSizes.up_to(256))


def test_what_is_given_wins_over_the_device() -> None:
    config = decode(
        device="cuda", dtype="float16", page_size=32, max_running=20, memory_fraction=0.5, graph_sizes=BatchSizes([1, 4])
    )
    assert (config.dtype, config.page_size, config.max_running, config.memory_fraction) == ("float16", 32, 20, 0.5)
    assert config.graph_sizes == (1, 4)
    assert decode(device="cuda", max_running=20).graph_sizes == (1, 2, 4, 8, 16, 20)
    assert decode(device="cuda", graph_sizes=BatchSizes()).graph_sizes == ()


def test_the_line_at_start_shows_what_holds() -> None:
    assert "device=cuda:0 engine=process dtype=bfloat16 page_size=64" in describe(prefill(device="cuda"))
    assert "graph_sizes=1,2,4,8 " in describe(decode(device="cuda", max_running=8))
    assert "graph_sizes=none " in describe(decode())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "tpu"}, "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "cuda:-1"}, "--device must be cpu, cuda or cuda:N, got 'cuda:-1'"),
        ({"device": "cuda:01"}, "--device must be cpu, cuda or cuda:N, got 'cuda:01'"),
        ({"memory_fraction": 0.5}, "--memory-fraction is for --device cuda; on cpu use --pool-memory-mb"),
        ({"device": "cuda", "memory_fraction": 0.0}, "--memory-fraction must be in (0, 1], got 0"),
        ({"device": "cuda", "memory_fraction": 1.5}, "--memory-fraction must be in (0, 1], got 1.5"),
        ({"prefill_attention": "flashinfer"}, "--prefill-attention flashinfer needs --device cuda, got cpu"),
        ({"decode_attention": "xqa"}, "--decode-attention xqa needs --device cuda, got cpu"),
        ({"graph_sizes": BatchSizes([1])}, "--graph-sizes needs --device cuda, got cpu"),
        (
            {"device": "cuda", "max_running": 8, "graph_sizes": BatchSizes([16])},
            "--graph-sizes must be at most --max-running, which is 8, got 16",
        ),
        ({"page_size": 0}, "--page-size must be at least 1, got 0"),
        ({"max_context": 1}, "--max-context must be at least 2, a token of prompt and one of output, got 1"),
        ({"pool_pages": (1 << 24) + 1}, "--pool-pages must be at most 16777216, got 16777217"),
        ({"max_running": (1 << 16) + 1}, "--max-running must be at most 65536, got 65537"),
        ({"advertise": Address("host", 0)}, "--advertise must be an address that can be dialled, got host:0"),
        ({"advertise": Address("::", 5)}, "--advertise must be an address that can be dialled, got [::]:5"),
        ({"router": (Address("0.0.0.0", 5),)}, "--router must be an address that can be dialled, got 0.0.0.0:5"),
        ({"threads": 5000}, "--threads must be at most 4096, got 5000"),
        ({"time_scale": 2.0}, "--sim-profile and --time-scale need --engine sim, got --engine thread"),
        ({"sim_profile": Path("p")}, "--sim-profile and --time-scale need --engine sim, got --engine thread"),
        ({"engine": "sim", "time_scale": 0.0}, "--time-scale must be more than 0, got 0"),
        ({"engine": "sim", "device": "cuda"}, "--engine sim computes nowhere: leave --device out, got cuda:0"),
        ({"engine": "sim", "pool_memory_mb": 5}, "--pool-memory-mb is for real engines: use --pool-pages, got 5"),
        ({"engine": "sim", "memory_fraction": 0.5}, "--memory-fraction is for --device cuda; on cpu use --pool-memory-mb"),
    ],
)
def test_what_cannot_work_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode(**given)
    assert str(caught.value) == message


def test_shm_is_for_pools_in_host_memory() -> None:
    assert prefill(transport="shm").transport == "shm"
    with pytest.raises(ValueError, match="--transport shm is for --device cpu; on cuda:0 use cuda_ipc, grpc or auto"):
        prefill(device="cuda", transport="shm")


def test_a_simulated_worker_has_a_gpus_sizes_and_a_transport_of_its_own() -> None:
    config = prefill(engine="sim")
    assert (config.device, config.shown_device, config.page_size, config.chunk_tokens) == ("cpu", "sim", 64, 8192)
    assert (config.transport, config.memory_fraction, config.pool_memory_mb) == ("sim", None, None)
    assert (decode(engine="sim").max_running, decode(engine="sim").graph_sizes) == (256, ())
    with pytest.raises(ValueError, match="--transport must be sim or auto with --engine sim, got grpc"):
        prefill(engine="sim", transport="grpc")
    with pytest.raises(ValueError, match="--transport sim needs --engine sim: it moves no KV"):
        prefill(transport="sim")


def test_a_worker_that_also_decodes_computes_prompts_in_shorter_steps() -> None:
    assert (decode().chunk_tokens, decode(device="cuda").chunk_tokens) == (256, 2048)
    assert (prefill().chunk_tokens, prefill(device="cuda").chunk_tokens) == (256, 8192)


def test_a_pool_on_the_cpu_is_sized_before_the_start_and_on_a_gpu_by_the_engine() -> None:
    assert prefill(pool_memory_mb=2).pages_before_start(MIB) == 2
    assert prefill(device="cuda").pages_before_start(MIB) is None
    assert prefill(device="cuda", pool_memory_mb=2).pages_before_start(MIB) is None
    assert prefill(device="cuda", pool_pages=7).pages_before_start(MIB) == prefill(pool_pages=7).pages_before_start(MIB) == 7
    with pytest.raises(ValueError, match="--pool-memory-mb must hold at least one page of 1048576000 bytes, got 1"):
        prefill(pool_memory_mb=1).pages_before_start(1000 * MIB)
    with pytest.raises(ValueError, match="--pool-memory-mb must be 16777216 pages of 1024 bytes at most, got 20000"):
        prefill(pool_memory_mb=20_000).pages_before_start(1024)


def test_help_shows_both_devices_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(DecodeConfig, prog="test", description="", argv=["--help"], env={})
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: float32 on cpu, bfloat16 on cuda; PDSERVE_DTYPE)" in shown
    assert "(default: none on cpu, 0.9 on cuda; PDSERVE_MEMORY_FRACTION)" in shown
    assert "(default: none on cpu, 1,2,4,8,16,24,... up to --max-running on cuda; PDSERVE_GRAPH_SIZES)" in shown


def test_flags_reach_the_config() -> None:
    argv = ["--model=m", "--device=cuda:3", "--memory-fraction=0.4", "--decode-attention=xqa", "--graph-sizes=none"]
    config = parse_config(DecodeConfig, prog="test", description="", argv=argv, env={"PDSERVE_MAX_RUNNING": "32"})
    assert (config.device, config.memory_fraction, config.decode_attention) == ("cuda:3", 0.4, "xqa")
    assert (config.graph_sizes, config.max_running, config.page_size) == ((), 32, 64)
