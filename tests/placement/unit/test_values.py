"""Option values of place(): invalid ones are refused, and former keywords give the same values with
a printed line each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roadtrain
from roadtrain import Delay, Downcast, FanIn, Files, Memory, Servers, SwitchNode, TopK
from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.config.job import make_job
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.placement.session_plan import Request, plan_session
from roadtrain.placement.stores import store_of
from roadtrain.training.job_options import placed_options
from roadtrain.transport.tcp import TcpOptions, Tls

A, B = "10.0.0.1:7000", "10.0.0.2:7000"
TREE = FanIn((SwitchNode(A), SwitchNode(B, parent=A, workers=(0, 1))), wire="int8")


class OtherOptions(TcpOptions):
    """Options of another transport."""


OPTIONS: dict[str, Any] = dict.fromkeys(("store", "compress", "delay", "host_budget"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0), "`keep` cannot be 0\nhint: `keep` must be a fraction"),
        (lambda: TopK(1.0), r"`keep` cannot be 1\.0"),
        (lambda: TopK("1 %"), "`keep` cannot be '1 %'"),  # type: ignore[arg-type]
        (lambda: TopK(True), "cannot be True"),
        (lambda: Downcast("fp8"), "`dtype` cannot be 'fp8'"),
        (lambda: Downcast("fp32"), "`dtype` cannot be 'fp32'"),
        (lambda: Delay(0), "`steps` cannot be 0"),
        (lambda: Delay(1.5), "`steps` cannot be 1.5"),  # type: ignore[arg-type]
        (lambda: Delay(-1), "`steps` cannot be -1"),
        (lambda: Files([]), r"`directories` cannot be \[\]"),
        (lambda: Files(["a", "b"], rates=[1]), r"rates \[1\] do not fit 2 directories"),
        (lambda: Files("a", rates=[float("nan")]), r"`rates` cannot be \[nan\]"),
        (lambda: Files("a", rates="fast"), "`rates` cannot be 'fast'"),  # type: ignore[arg-type]
        (lambda: Servers([]), r"Servers\(\[\]\) has no addresses"),
        (lambda: Servers(A), f"`addresses` cannot be '{A}'"),
        (lambda: Servers(["nowhere"]), "'nowhere' is not an address"),
        (lambda: Servers([A], replicas=2), r"replicas = 2 with 1 server\(s\)"),
        (lambda: Servers([A, B], replicas=3), "replicas = 3"),  # type: ignore[arg-type]
        (lambda: Servers([A, B], give_up=[A]), "with replicas = 1"),
        (lambda: Servers([A, B], replicas=2, give_up=[A, B]), "give_up = .* with replicas = 2"),
        (lambda: Servers([A, B], replicas=2, give_up=["x:1"]), "give_up = .*x:1"),
        (
            lambda: Servers([A, B], replicas=2, relay="1GiB"),
            "a relay cannot be combined with replicas = 2",
        ),
        (lambda: Servers([A], buffering="some"), "`buffering` cannot be 'some'"),  # type: ignore[arg-type]
        (lambda: Servers([A], residuals=Files(["a", "b"])), "but 2 are named"),
        (lambda: Servers([A], token=b"x" * 16, link=TcpOptions()), "combined with token"),
        (lambda: Servers([A], fan_in=B), f"`fan_in` cannot be '{B}'"),
        (lambda: Servers([A], fan_in=[]), "fan_in has no switch"),
        (lambda: Servers([A], fan_in=[A, B]), "2 switches have no parent"),
        (lambda: Servers([A], fan_in=["rack"]), "'rack' is not an address"),
        (lambda: Servers([A], fan_in=[B], tls=Tls(ca=Path("ca.pem"))), "not encrypted"),
        (lambda: Servers([A], fan_in=[B], link=TcpOptions(tls=Tls())), "not encrypted"),
        (lambda: Servers([A], fan_in=[B], link=OtherOptions()), "`link` is .*OtherOptions"),
    ],
)
def test_invalid_option_values_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert "hint: " in str(caught.value)


def test_a_path_stands_for_files_and_nothing_for_memory() -> None:
    assert store_of("a") == Files("a")
    assert store_of(["a", Path("b")]) == Files(["a", Path("b")])
    assert Files("a").paths == (Path("a"),)
    assert store_of(None) == store_of([]) == Memory()


def test_links_wait_as_long_as_the_deadline() -> None:
    secret = b"0123456789abcdef"
    tls = Tls(ca=Path("ca.pem"))
    made = Servers([A], token=secret, tls=tls, connections=3).options(7.0)
    assert made == TcpOptions(token=secret, tls=tls, connections=3, retry_s=7.0)
    assert Servers([A], retry_s=2.0).options(7.0).retry_s == 2.0
    assert Servers([A], link=TcpOptions(retry_s=1.0)).options(7.0) == TcpOptions(retry_s=1.0)


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert Servers([A], token=file).options(1.0).token == b"0123456789abcdef"


def request_of(local: int = 1, **options: Any) -> Request:
    fields = {
        "store": Memory(),
        "compress": None,
        "delay": None,
        "host_budget": None,
        "device_budget": None,
        "backwards_per_step": None,
        "chunk_elements": 1 << 16,
        "compile": False,
        "deadline_s": 1.0,
        "group": WorkerIdentity(local=local),
        "report": lambda _: None,
    }
    return Request(**{**fields, **options})


FEEDBACK = TopK(0.1, error_feedback=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress": Downcast("bf16")}, "without servers: no gradients are sent"),
        ({"compress": FEEDBACK, "store": Servers([A])}, r"error_feedback is True, but .* not set"),
        ({"store": Servers([A], residuals="r")}, "error_feedback is False, but .* are set"),
        (
            {"compress": FEEDBACK, "delay": Delay(1)},
            "error feedback needs all updates",
        ),
        ({"compress": FEEDBACK, "backwards_per_step": 2}, "one residual per step"),
        (
            {"compress": TopK(0.1), "store": Servers([A], relay="1GiB"), "local": 2},
            "whole gradients of 2 workers",
        ),
        (
            {"delay": Delay(2), "store": Servers([A], buffering="none")},
            "but a block fetched again may differ",
        ),
        (
            {"compress": TopK(0.1), "store": Servers([A], fan_in=[B])},
            "switches add whole gradients",
        ),
        (
            {"store": Servers([A], fan_in=TREE), "group": WorkerIdentity(workers=3)},
            r"the switches list workers \[0, 1\], but the job has workers 0 to 2",
        ),
        (
            {
                "store": Servers([A], fan_in=TREE, relay="1GiB"),
                "group": WorkerIdentity(workers=2, local=2),
            },
            r"the switches list workers \[0, 1\], but the job has workers 0 to 0",
        ),
        (
            {"store": Servers([A], fan_in=[B]), "group": WorkerIdentity(workers=65)},
            "10.0.0.2:7000 has 65 children, not 1 to 64",
        ),
        ({"group": WorkerIdentity(1, 2)}, "2 workers were started .*, but there are 0 servers"),
        ({"store": Files("a"), "group": WorkerIdentity(0, 3)}, "3 workers were started"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        request_of(**options)


def test_the_error_bound_of_sums_in_the_network_is_printed() -> None:  # Rule 2
    lines: list[str] = []
    group = WorkerIdentity(workers=2)
    request_of(store=Servers([A], fan_in=TREE), group=group, report=lines.append).say_lossy()
    # 2 workers, 6 bits of magnitude each: 2 units of 2^-6 of a power of two of up to twice as much
    assert len(lines) == 1 and "summed in the network as int8, by 2 switch(es)" in lines[0]
    assert f"off by at most {2 * 2 * 2.0**-6:.1e} of the greatest magnitude" in lines[0]
    relayed = Servers([A], fan_in=[B], relay="1GiB")
    lines.clear()
    request_of(
        store=relayed, group=WorkerIdentity(workers=4, local=2), report=lines.append
    ).say_lossy()
    assert "an element of the sum of 2 is off" in lines[0]  # relays are summed, not workers


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("budgte", "unknown option of place `budgte`"),
        ("host_budgets", "did you mean `host_budget`"),
        ("servers", "unknown option of place `servers`"),
    ],
)
def test_an_unknown_option_is_named(option: str, words: str) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=words):
        roadtrain.place(model, torch.optim.AdamW(model.parameters()), **{option: 1})


def placed_losses(**options: Any) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    losses = []
    with roadtrain.place(model, adamw, report=lambda _: None, **options) as optimizer:
        for _ in range(3):
            loss = model(torch.ones(2, 8)).square().mean()
            losses.append(loss.item().hex())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_device_budget_needs_an_accelerator() -> None:
    with pytest.raises(ConfigError, match=r"device_budget = 1.0 GiB.*\n?.*host_budget='1GiB'"):
        placed_losses(device_budget="1GiB")


def test_a_block_too_large_for_the_accelerator_is_refused_with_both_numbers() -> None:
    table = ChunkTable.build([("", []), ("block", [ParamSpec("w", (1 << 20,), "fp32", True, 0)])])
    rules = rules_for(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    request = request_of(host_budget="1GiB", device_budget="10MiB", backwards_per_step=1)
    with EmulatedDevice().active() as device:
        with pytest.raises(BudgetError, match=r"at least 37 MiB of device memory.* is 10\.0 MiB"):
            plan_session(request, device.device, table, rules)
        enough = replace(request, device_budget="37MiB")
        budgets = plan_session(enough, device.device, table, rules).budgets.worker.device
    assert budgets is not None and budgets.slots == 2


def test_lossy_and_late_options_are_printed() -> None:
    lines: list[str] = []
    request_of(compress=TopK(0.01), delay=Delay(1), report=lines.append).say_lossy()
    request_of(delay=Delay(None), report=lines.append).say_lossy()
    assert lines == [
        "lossy: top-k, 1.00% of the gradient's elements are kept, error feedback False",
        "late: each step computes with parameters that lack the last update",
        "late: each step computes with parameters that lack up to 16 updates",
    ]


def test_a_host_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"the budget is 1\.0 MiB"):
        placed_losses(host_budget="1MiB")


def test_a_jobs_switches_reach_its_servers() -> None:
    job = make_job({"model": {"pretrained": "x"}, "servers": {"addresses": [A], "switches": [B]}})
    store = placed_options(job, moves=False)["store"]
    assert isinstance(store, Servers) and store.route.plan == FanIn((SwitchNode(B),))  # type: ignore[attr-defined]
    alone = make_job({"model": {"pretrained": "x"}, "servers": {"switches": [B]}})
    with pytest.raises(ConfigError, match="switches are set, but there are no servers"):
        placed_options(alone, moves=False)
