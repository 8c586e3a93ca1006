"""Checks of faults that this machine cannot have: a fake /sys, /proc and /dev, or a fake report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from roadtrain.config.job import make_job
from roadtrain.device import accelerator
from roadtrain.doctor import (
    host_limits,
    reachable_names,
    software,
    store_directories,
    torch_report,
)
from roadtrain.doctor.diagnosis import Diagnosis, Subject, faults
from roadtrain.doctor.torch_report import TorchReport
from roadtrain.errors import ConfigError
from roadtrain.launch import host_report
from roadtrain.storage.rates import StorageRates
from roadtrain.units import GIB

Check = Callable[[Subject], Iterable[Diagnosis]]
H100 = ("NVIDIA H100", 70 * GIB, 80 * GIB)
CUDA = TorchReport("2.13.0", "CUDA 12.8", (H100,), "cuda", 8)


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def subject(tmp_path: Path, files: dict[str, str] | None = None, **fields: object) -> Subject:
    root = fake(tmp_path / "root", files or {})
    base = Subject((tmp_path,), environ={"HOME": str(tmp_path)}, root=root)
    return replace(base, **fields)  # type: ignore[arg-type]


def alarms(check: Check, of: Subject) -> list[tuple[str, str]]:
    found = [finding for finding in check(of) if finding.level != "note"]
    assert all(finding.what and finding.fix for finding in found)
    return [(finding.fault, finding.level) for finding in found]


GPU = {"dev/nvidia0": "", "dev/nvidiactl": ""}
DRIVER = {**GPU, "proc/driver/nvidia/version": "NVRM 570"}


@pytest.mark.parametrize(
    ("files", "torch", "environ", "expected"),
    [
        (DRIVER, CUDA, {}, []),
        ({}, TorchReport("2.13.0+cpu"), {}, []),
        ({}, TorchReport("2.13.0", "CUDA 12.8"), {}, []),  # a CI container with CUDA's torch
        (DRIVER, TorchReport("2.13.0+cpu"), {}, [("torch-build", "wrong")]),
        (GPU, TorchReport("2.13.0", "CUDA 12.8"), {}, [("driver", "wrong")]),
        (DRIVER, TorchReport("2.13.0", "CUDA 12.8"), {}, [("driver", "wrong")]),
        (
            DRIVER,
            TorchReport("2.13.0", "CUDA 12.8"),
            {"CUDA_VISIBLE_DEVICES": ""},
            [("hidden-devices", "wrong")],
        ),
        ({}, TorchReport(failure="torch is not installed"), {}, [("torch", "wrong")]),
        (DRIVER, TorchReport("2.13.0", unknown="not examined"), {}, []),
    ],
)
def test_torch_fits_the_devices(
    tmp_path: Path,
    files: dict[str, str],
    torch: TorchReport,
    environ: dict[str, str],
    expected: list[tuple[str, str]],
) -> None:
    of = subject(tmp_path, files, torch=torch, environ=environ)
    assert alarms(software.check_torch, of) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((H100, H100), []),
        ((H100, ("NVIDIA A40", 44 * GIB, 48 * GIB)), [("mixed-devices", "slow")]),
        ((H100, ("NVIDIA H100", GIB, 80 * GIB)), [("device-in-use", "slow")]),
    ],
)
def test_devices(
    tmp_path: Path, devices: tuple[tuple[str, int, int], ...], expected: list[tuple[str, str]]
) -> None:
    of = subject(tmp_path, torch=replace_devices(devices))
    assert alarms(software.check_devices, of) == expected


@pytest.mark.parametrize(
    ("device", "torch", "expected"),
    [
        ("", TorchReport("2.13.0"), []),
        ("cpu", TorchReport("2.13.0"), []),
        ("cuda", CUDA, []),
        ("cuda:0", CUDA, []),
        ("cuda", TorchReport("2.13.0"), [("missing-device", "wrong")]),
        ("cuda:1", CUDA, [("missing-device", "wrong")]),
        ("xpu", CUDA, [("missing-device", "wrong")]),
        ("cuda", TorchReport("2.13.0", unknown="too busy"), []),
    ],
)
def test_the_jobs_device_is_here(
    tmp_path: Path, device: str, torch: TorchReport, expected: list[tuple[str, str]]
) -> None:
    job = make_job({"model": {"config": {"model_type": "llama"}}, "run": {"device": device}})
    assert alarms(software.check_devices, subject(tmp_path, job=job, torch=torch)) == expected


NVIDIA_ON_PCI = {
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
}


def test_a_device_without_any_driver_is_found_on_the_bus(tmp_path: Path) -> None:
    of = subject(tmp_path, NVIDIA_ON_PCI, torch=TorchReport("2.13.0", "CUDA 12.8"))
    assert alarms(software.check_torch, of) == [("driver", "wrong")]
    fake(of.root, {".dockerenv": ""})  # the container has none of its host's devices
    assert alarms(software.check_torch, of) == []


class FakeAccelerator:
    """One of two devices, of which the first refuses to pin memory."""

    def __init__(self, device: str) -> None:
        self.number = int(device[-1])

    def memory(self) -> tuple[int, int]:
        if self.number:
            raise ConfigError("torch does not know how much memory it has")
        return 7 * GIB, 8 * GIB

    def try_pin(self, memory: object) -> bool:
        self.report("the system refused to pin 256 MiB")
        return False

    report: Callable[[str], None]


def test_a_report_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "accelerator_of", FakeAccelerator)
    module = SimpleNamespace(get_device_name=lambda number: f"device {number}")
    torch = SimpleNamespace(
        accelerator=SimpleNamespace(
            current_accelerator=lambda: SimpleNamespace(type="xpu"), device_count=lambda: 2
        ),
        get_device_module=lambda _: module,
        device=lambda kind, number: f"{kind}:{number}",
        zeros=lambda nbytes, dtype: None,
        uint8=None,
    )
    report = torch_report.with_devices(torch, TorchReport("2.13.0", "XPU 2025"))
    assert report.devices == (("device 0", 7 * GIB, 8 * GIB), ("device 1", 0, 0))
    assert report.kind == "xpu" and report.unpinned == "the system refused to pin 256 MiB"


def replace_devices(devices: tuple[tuple[str, int, int], ...]) -> TorchReport:
    return TorchReport("2.13.0", "CUDA 12.8", devices, "cuda", 8)


RDMA = {"sys/class/infiniband/mlx5_0/node_type": "1"}


@pytest.mark.parametrize(
    ("limit", "files", "torch", "level"),
    [
        (64 << 10, {}, CUDA, None),  # CUDA pins memory whatever the limit
        (64 << 10, {}, TorchReport("2.13.0+cpu"), None),
        (-1, RDMA, CUDA, None),
        (64 << 10, RDMA, CUDA, "wrong"),
        (64 << 10, {}, TorchReport("2.13.0", kind="xpu", unpinned="refused to pin"), "slow"),
    ],
)
def test_locked_memory_matters_where_memory_is_locked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    files: dict[str, str],
    torch: TorchReport,
    level: str | None,
) -> None:
    monkeypatch.setattr(host_limits.resource, "getrlimit", lambda _: (limit, limit))
    found = list(host_limits.check_pinning(subject(tmp_path, files, torch=torch)))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all("RLIMIT_MEMLOCK" in finding.what and finding.fix for finding in found)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}, []),
        (
            {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
            [("huge-pages", "slow")],
        ),
        (
            {
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
            },
            [("governor", "slow")],
        ),
        (  # the normal state of a workstation
            {
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
            },
            [],
        ),
        ({"proc/sys/net/ipv4/tcp_wmem": "4096 16384 65536"}, [("tcp-buffers", "slow")]),
    ],
)
def test_kernel_settings(
    tmp_path: Path, files: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert alarms(host_limits.check_kernel_settings, subject(tmp_path, files)) == expected


def test_strict_overcommit_below_the_budget(tmp_path: Path) -> None:
    meminfo = "CommitLimit: 2097152 kB\nCommitted_AS: 1048576 kB\n"
    files = {"proc/sys/vm/overcommit_memory": "2", "proc/meminfo": meminfo}
    job = make_job({"model": {"config": {"model_type": "llama"}}, "budget": {"host": "2GiB"}})
    [finding] = host_limits.check_memory(subject(tmp_path, files, job=job))
    assert finding.fault == "overcommit" and "leaves 1.0 GiB" in finding.what
    small = job.changed({"budget.host": "900MiB"})
    assert not list(host_limits.check_memory(subject(tmp_path, files, job=small)))


def test_a_full_memory_with_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(used=GIB))
    assert alarms(host_limits.check_memory, subject(tmp_path)) == []  # swapped out long ago
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=GIB // 2))
    assert ("swap", "slow") in alarms(host_limits.check_memory, subject(tmp_path))


@pytest.mark.parametrize("python", [(3, 10), (3, 15), (2, 7)])
def test_python_is_supported(tmp_path: Path, python: tuple[int, int]) -> None:
    assert ("python", "wrong") in alarms(software.check_versions, subject(tmp_path, python=python))
    assert not alarms(software.check_versions, subject(tmp_path, python=(3, 14)))


def test_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_report, "_network_files", lambda _: "nfs4 nas:/data /data")
    of = subject(tmp_path, named=True)
    assert alarms(store_directories.check_directories, of) == [("network-files", "slow")]
    assert alarms(store_directories.check_directories, replace(of, named=False)) == []


def test_a_full_file_system_is_full_rather_than_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = host_report.report_host

    def full(query: host_report.HostQuery) -> host_report.HostReport:
        found = report(query)
        [store] = found.stores
        at = msgspec.structs.replace(store.at, refused="No space left on device")
        store = msgspec.structs.replace(store, at=at)
        return msgspec.structs.replace(found, stores=(store,))

    monkeypatch.setattr(store_directories, "report_host", full)
    monkeypatch.setattr(store_directories, "free_nbytes", lambda _: 0)
    of = subject(tmp_path, named=True)
    assert ("full", "wrong") in alarms(store_directories.check_directories, of)
    assert ("directory", "wrong") not in alarms(store_directories.check_directories, of)


def test_rates_of_disks(tmp_path: Path) -> None:
    rates = {
        tmp_path / "fast": StorageRates(3e9, 2e9, 2e9),
        tmp_path / "slow": StorageRates(90e6, 90e6, 60e6),
        tmp_path / "hangs": None,
        tmp_path / "full": "it is full",
    }
    found = list(store_directories.check_rates(subject(tmp_path, rates=rates)))
    assert [f.level for f in found] == ["slow", "wrong", "note"]
    assert "60 MB/s, less than 100 MB/s" in found[0].what


def test_the_state_of_a_job_fits_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    tree = {"model": {"config": config, "dtype": "bf16"}, "run": {"dir": str(tmp_path)}}
    job = make_job(tree)
    shape = store_directories.shape_of(job)
    assert shape is not None and store_directories.file_bytes(job) == 28 * shape.params
    needs = 3 * GIB
    monkeypatch.setattr(store_directories, "file_bytes", lambda _: needs)
    monkeypatch.setattr(store_directories, "free_nbytes", lambda _: 2 * GIB)
    [finding] = store_directories.check_directories(subject(tmp_path, job=job, named=True))
    assert finding.fault == "full" and "2.0 GiB are free" in finding.what
    assert "needs 3.0 GiB" in finding.what


def test_a_store_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job({"model": {"config": {"model_type": "llama"}}, "run": {"dir": str(tmp_path)}})
    store = host_report.StoreReport(host_report.report_path(str(tmp_path)), job="theirs", step=7)

    def report(query: host_report.HostQuery) -> host_report.HostReport:
        at = host_report.report_path(query.directory)
        return host_report.HostReport("", 1, 1, {}, at, "ours", 3, (store,))

    monkeypatch.setattr(store_directories, "report_host", report)
    of = subject(tmp_path, job=job)
    assert ("store", "wrong") in alarms(store_directories.check_directories, of)
    of = replace(of, job=job.changed({"run.new_store": True}))
    assert ("store", "wrong") not in alarms(store_directories.check_directories, of)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ["eth0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0", "eth1"]),
        ("NCCL_SOCKET_IFNAME", "=eth", []),
        ("NCCL_SOCKET_IFNAME", "=eth1", ["eth1"]),
        ("NCCL_SOCKET_IFNAME", "^lo,eth0", ["eth1"]),
        ("NCCL_SOCKET_IFNAME", "ib,eth1", ["eth1"]),
    ],
)
def test_names_of_interfaces_are_read_as_their_libraries_do(
    name: str, value: str, found: list[str]
) -> None:
    assert reachable_names.matching(name, value, ["lo", "eth0", "eth1"]) == found


def test_an_interface_of_the_job(tmp_path: Path) -> None:
    tree = {"model": {"config": {"model_type": "llama"}}}
    section = {"dp": 2, "networks": [{"interface": "eth77"}]}
    job = make_job({**tree, "parallelism": section})
    assert alarms(reachable_names.check_interfaces, subject(tmp_path, job=job)) == [
        ("interface", "wrong")
    ]
    elsewhere = {"dp": 2, "networks": [{"interface": "eth77", "hosts": ["not-this-host"]}]}
    job = make_job({**tree, "parallelism": elsewhere})
    assert not alarms(reachable_names.check_interfaces, subject(tmp_path, job=job))


def test_the_loopback_interface_is_wrong_for_several_hosts(tmp_path: Path) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "lo"}
    assert not alarms(reachable_names.check_interfaces, subject(tmp_path, environ=environ))
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    found = alarms(reachable_names.check_interfaces, subject(tmp_path, environ=environ))
    assert found == [("interface", "wrong")]


def test_a_leading_address_that_is_this_host_itself(tmp_path: Path) -> None:
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    found = list(reachable_names.check_names(subject(tmp_path, environ=environ)))
    assert any("MASTER_ADDR=localhost" in finding.what for finding in found)
    environ["MASTER_ADDR"] = "no.such.host.invalid"
    found = list(reachable_names.check_names(subject(tmp_path, environ=environ)))
    assert any("does not resolve" in f.what and "MASTER" in f.what for f in found)


@pytest.mark.parametrize("value", ["many", "0", "-1"])
def test_a_number_of_threads_that_is_none(tmp_path: Path, value: str) -> None:
    of = subject(tmp_path, environ={"OMP_NUM_THREADS": value})
    assert ("threads", "wrong") in alarms(host_limits.check_threads, of)


def test_threads_are_shared_by_the_workers_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    environ = {"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "4"}
    assert not alarms(host_limits.check_threads, subject(tmp_path, environ=environ))
    environ["LOCAL_WORLD_SIZE"] = "2"
    found = alarms(host_limits.check_threads, subject(tmp_path, environ=environ))
    assert found == [("threads", "slow")]


def test_shared_memory_for_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = psutil.disk_usage("/")
    monkeypatch.setattr(psutil, "disk_usage", lambda _: usage._replace(free=64 << 20))
    of = subject(tmp_path, {"dev/shm/x": ""}, torch=CUDA)
    assert not alarms(host_limits.check_shared_memory, of)  # docker's default is enough for one
    of = replace(of, torch=replace_devices((H100, H100)))
    assert alarms(host_limits.check_shared_memory, of) == [("shared-memory", "wrong")]


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_quota_of_a_control_group_and_its_parents_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "groups"
    groups.write_text("0::/pod/container\n" if version == 2 else "4:cpu,cpuacct:/pod/container\n")
    top = root if version == 2 else root / "cpu"
    (top / "pod/container").mkdir(parents=True)
    for group, quota in ((top / "pod", 150_000), (top / "pod/container", None)):
        if version == 1:
            (group / "cpu.cfs_quota_us").write_text(str(quota or -1))
            (group / "cpu.cfs_period_us").write_text("100000")
        else:
            (group / "cpu.max").write_text(f"{quota or 'max'} 100000")
    words = host_limits.control_group_words
    monkeypatch.setattr(
        host_limits, "control_group_words", lambda *names: words(*names, groups, root)
    )
    assert host_limits.processor_limit() == 1.5
    groups.write_text("")
    assert host_limits.processor_limit() == float("inf")


def test_a_partition_is_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "sda/sda1", tmp_path / "sda/sda2"
    for path in (first, second):
        path.mkdir(parents=True)
        (path / "partition").write_text("1")
    array = [first, second, tmp_path / "sdb"]
    monkeypatch.setattr(store_directories, "disks_of", lambda _: array)
    expected = ("sda", "sda", "sdb")
    if store_directories.disk_of(Path("/"))[0].startswith("file system"):
        pytest.skip("/ is not on a disk here")
    assert store_directories.disk_of(Path("/")) == expected


def test_every_fault_has_its_texts_and_a_place_in_the_code() -> None:
    folder = Path(host_limits.__file__).parent
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    for entry, texts in faults().items():
        assert f'"{entry}"' in code, f"no check names {entry}"
        assert {"level", "what", "fix"} <= texts.keys()
        assert bool(texts["fix"]) or texts["level"] == "note", f"{entry} says no way out"
        assert ("about" in texts) == ("/" not in entry), entry
    assert len([entry for entry in faults() if "/" not in entry]) >= 20
