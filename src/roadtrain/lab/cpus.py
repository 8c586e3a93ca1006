"""CpuLimit: a control group that limits the CPU time of its members. Members are not pinned to
CPUs.

Requires Linux, root and the `cpu` controller with CFS bandwidth control; `cpus_available()` reports
what is missing.
"""

from __future__ import annotations

from roadtrain.errors import ConfigError
from roadtrain.lab.control_groups import ControlGroup, hierarchy, is_version_2
from roadtrain.lab.resource import why_not

PERIOD_US = 20_000  # period of the quota; short, since members may wait that long for CPU time
MIN_CPUS = 0.05  # the kernel's smallest quota is 1 ms


def cpus_available() -> str | None:
    """Return the reason why CPUs cannot be limited on this machine, or None if they can."""
    if why := why_not():
        return why
    root = hierarchy("cpu")
    if root is None or not (is_version_2(root) or (root / "cpu.cfs_quota_us").exists()):
        return "no CPU limits: there is no cgroup hierarchy with the cpu controller and CFS quota"
    return None


class CpuLimit(ControlGroup):
    """A control group whose members together get the time of `cpus` CPUs (0.4: two fifths of a
    CPU).

    Raises ConfigError if `cpus` is less than 0.05.
    """

    controller = "cpu"

    def __init__(self, cpus: float) -> None:
        self.cpus = _checked(cpus)

    def _make(self) -> None:
        root = self.group.parent
        if is_version_2(root) and "cpu" not in (root / "cgroup.subtree_control").read_text():
            (root / "cgroup.subtree_control").write_text("+cpu")
        self.set_cpus(self.cpus)

    def set_cpus(self, cpus: float) -> None:
        """Change the limit, also for running processes."""
        self.cpus = _checked(cpus)
        quota = round(cpus * PERIOD_US)
        if is_version_2(self.group):
            (self.group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self.group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.group / "cpu.cfs_quota_us").write_text(str(quota))


def _checked(cpus: float) -> float:
    if not cpus >= MIN_CPUS:
        raise ConfigError(f"{cpus} CPUs for a host are too few: at least {MIN_CPUS} are needed")
    return cpus
