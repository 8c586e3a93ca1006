"""CpuLimit: a control group whose members, all together, may use so many CPUs. Does NOT choose
which ones.

Assumes Linux, root and the `cpu` controller with CFS bandwidth control, of cgroup version 1 or 2:
`cpus_available()` says what is missing.
"""

from __future__ import annotations

from roadtrain.errors import ConfigError
from roadtrain.lab.control_groups import ControlGroup, hierarchy, is_version_2
from roadtrain.lab.made import lacking

PERIOD_US = 20_000  # short: a process that used up its share waits at most so long
MIN_CPUS = 0.05  # the kernel takes no quota below 1 ms


def cpus_available() -> str | None:
    """Why CPUs cannot be limited here, or None when they can."""
    if why := lacking():
        return why
    root = hierarchy("cpu")
    if root is None or not (is_version_2(root) or (root / "cpu.cfs_quota_us").exists()):
        return "no CPU limits: no cgroup hierarchy with the cpu controller and its CFS quota"
    return None


class CpuLimit(ControlGroup):
    """A control group that holds its members, all together, to `cpus` CPUs (0.4: two fifths of
    one), whichever they run on.

    Raises ConfigError for a number below 0.05.
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
        """From now on, also for the processes that are in it."""
        self.cpus = _checked(cpus)
        quota = round(cpus * PERIOD_US)
        if is_version_2(self.group):
            (self.group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self.group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.group / "cpu.cfs_quota_us").write_text(str(quota))


def _checked(cpus: float) -> float:
    if not cpus >= MIN_CPUS:
        raise ConfigError(f"{cpus} CPUs for a host, at least {MIN_CPUS} can be given")
    return cpus
