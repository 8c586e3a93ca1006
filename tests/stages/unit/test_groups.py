"""Process groups (stages/rank_groups.py, host_ranks.py) on clusters of any size, checked against
the paper's formulas and by brute force; which parallelisms are refused or suit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.stages.host_ranks import DataGroups, suited_parallelisms
from roadtrain.stages.parallelism import Parallelism, RankPosition
from roadtrain.stages.rank_groups import GroupKind, Groups

TWO_AND_ONE = [("a0", "a", 2), ("a1", "a", 2), ("b0", "b", 2)]  # clusters of 4 and 2 devices


def printed_rank(gpus: int, nodes: tuple[int, ...], i: int, k: int, j: int) -> int:
    """Cluster i, node k, device j, all from 1; section 2.4 with its numbering corrected."""
    return gpus * (sum(nodes[: i - 1]) + k - 1) + j


def printed_groups(n: int, d: int, t: int, p: int) -> dict[GroupKind, set[tuple[int, ...]]]:
    """Yang et al. (Holmes), equations 1 and 3, with ranks counted from 1."""
    assert n == d * t * p
    return {
        GroupKind.TENSOR: {
            tuple((i - 1) * t + j for j in range(1, t + 1)) for i in range(1, p * d + 1)
        },
        GroupKind.DATA: {
            tuple((i - 1) % t + ((i - 1) // t * d + j - 1) * t + 1 for j in range(1, d + 1))
            for i in range(1, p * t + 1)
        },
    }


def one_host_each(n: int, devices: int) -> list[tuple[str, str, int]]:
    return [(f"h{i}", "c", devices) for i in range(n // devices)]


EQUAL = [
    (n, n // t // p, t, p)
    for n in (8, 12, 16, 24, 48, 64)
    for t in (1, 2, 4)
    for p in range(1, n // t + 1)
    if n % (t * p) == 0
]


@pytest.mark.parametrize(("n", "d", "t", "p"), EQUAL)
def test_equal_stages_are_the_papers_groups(n: int, d: int, t: int, p: int) -> None:
    groups = Groups.of(Parallelism(dp=d, tp=t, pp=p), one_host_each(n, 4))
    for kind, printed in printed_groups(n, d, t, p).items():
        found = [group for group in groups.to_create if group.kind is kind]
        assert {tuple(rank + 1 for rank in group.ranks) for group in found} == printed
        assert sorted(itertools.chain(*printed)) == list(range(1, n + 1))


def test_ranks_are_the_papers_with_its_numbering_corrected() -> None:
    """2 clusters of 2 nodes of 4 devices: the printed formula would give 1, 2, 3, 4, 2, 3, ..."""
    hosts = [(f"c{i} n{k}", f"c{i}", 4) for i in (1, 2) for k in (1, 2)]
    groups = Groups.of(Parallelism(dp=8, pp=2), hosts)
    for i, k, j in itertools.product((1, 2), (1, 2), range(1, 5)):
        rank = printed_rank(4, (2, 2), i, k, j) - 1
        assert (groups.host(rank), groups.host_of[rank].cluster) == (f"c{i} n{k}", f"c{i}")


@st.composite
def parallelisms(draw: st.DrawFn) -> Parallelism:
    pp = draw(st.integers(1, 4))
    widths = tuple(draw(st.lists(st.integers(1, 4), min_size=pp, max_size=pp)))
    return Parallelism(tp=draw(st.integers(1, 3)), pp=pp, widths=widths, cp=draw(st.integers(1, 2)))


@given(parallelisms())
def test_groups_equal_those_found_by_brute_force(parallelism: Parallelism) -> None:
    """A group holds all ranks whose other two coordinates agree."""
    groups = Groups.of(parallelism, [("h", "c", parallelism.devices)])
    at = [groups.position(rank) for rank in range(len(groups.host_of))]
    assert [parallelism.rank(position) for position in at] == list(range(len(groups.host_of)))
    assert at == sorted(
        at, key=lambda position: (position.stage, position.replica, position.tensor)
    )

    def alike(key) -> set[tuple[int, ...]]:
        found: dict[tuple[int, int], list[int]] = {}
        for rank, position in enumerate(at):
            found.setdefault(key(position), []).append(rank)
        return {tuple(ranks) for ranks in found.values()}

    assert {g.ranks for g in groups.data} == alike(
        lambda position: (position.stage, position.tensor)
    )
    assert {g.ranks for g in groups.tensor} == alike(
        lambda position: (position.stage, position.replica)
    )
    names = [group.name for group in groups.to_create]
    assert len(set(names)) == len(names)


@given(parallelisms(), st.integers(4, 30))
def test_micro_batches_go_along_the_pipelines(parallelism: Parallelism, total: int) -> None:
    """Each stage runs each micro-batch once, and neighbours are in one boundary group."""
    parallelism.check_micro_batches(total)
    groups = Groups.of(parallelism, [("h", "c", parallelism.devices)])
    runs: dict[int, list[tuple[int, int]]] = {}
    for stage, replicas in enumerate(parallelism.replicas_of):
        for replica in range(0, replicas, parallelism.cp):
            for micro in parallelism.micro_batches(stage, replica, total):
                runs.setdefault(micro, []).append((stage, replica))
    assert set(runs) == set(range(total))
    for found in runs.values():
        assert [stage for stage, _ in found] == list(range(parallelism.pp))
        for context, tensor in itertools.product(range(parallelism.cp), range(parallelism.tp)):
            ranks = [parallelism.rank(RankPosition(s, r + context, tensor)) for s, r in found]
            for a, b in itertools.pairwise(ranks):
                assert sum({a, b} <= set(group.ranks) for group in groups.boundaries) == 2


def test_clusters_of_unequal_size() -> None:
    groups = Groups.of(Parallelism(pp=2, widths=(4, 2)), TWO_AND_ONE)
    assert [group.ranks for group in groups.data] == [(0, 1, 2, 3), (4, 5)]
    assert [(group.name, group.ranks) for group in groups.boundaries] == [
        ("activations stage 0 to 1", (0, 1, 2, 3, 4, 5)),
        ("gradients stage 1 to 0", (0, 1, 2, 3, 4, 5)),
    ]
    assert list(groups.stage_ranks(1)) == [4, 5]
    assert groups.group_of(GroupKind.DATA, 5).name == "dp stage 1 tensor index 0"


def test_interleaved_stages_meet_in_a_ring() -> None:
    assert Parallelism(pp=3, virtual_stages=2).boundaries == ((0, 1), (1, 2), (2, 0))
    groups = Groups.of(Parallelism(pp=2, virtual_stages=2), [("h", "c", 2)])
    assert [group.name for group in groups.boundaries] == [
        "activations stage 0 to 1",
        "gradients stage 1 to 0",
        "activations stage 1 to 0",
        "gradients stage 0 to 1",
    ]
    assert Parallelism(virtual_stages=2).boundaries == ()


def test_equal_widths_are_dp() -> None:
    assert Parallelism(pp=2, widths=(3, 3)) == Parallelism(dp=3, pp=2)
    assert Parallelism(dp=3, pp=2, widths=(3, 3), virtual_stages=2).replicas == 3
    assert str(Parallelism(pp=2, widths=(4, 2))) == "dp 4+2 x tp 1 x pp 2"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pp": 3, "widths": (2, 1)}, "widths 2, 1 do not match pp 3"),
        ({"dp": 4, "pp": 2, "widths": (2, 1)}, "dp 4 and widths 2, 1 contradict each other"),
        ({"pp": 2, "widths": (2, 1), "virtual_stages": 2}, "differ, but virtual_stages is 2"),
        ({"pp": 2, "widths": (4, 3), "ep": 2}, "ep 2 does not divide width 3 x cp 1 of stage 1"),
        ({"pp": 2, "widths": (2, 0)}, "greater than or equal to 1"),
    ],
)
def test_invalid_widths_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Parallelism(**fields)


def test_features_that_need_equal_widths_refuse_others() -> None:
    with pytest.raises(ConfigError, match="widths 4, 2 must be equal in a simulation"):
        _ = Parallelism(pp=2, widths=(4, 2)).replicas
    with pytest.raises(ConfigError, match="a step has 3 micro-batches, but a stage has 4 replicas"):
        Parallelism(pp=2, widths=(4, 2)).check_micro_batches(3)
    with pytest.raises(
        ConfigError, match="a step has 6 micro-batches, but with virtual_stages 2 the number must"
    ):
        Parallelism(dp=2, pp=2, virtual_stages=2).check_micro_batches(6)
    Parallelism(dp=2, pp=2, virtual_stages=2).check_micro_batches(8)
    with pytest.raises(ConfigError, match="rank 6 is out of range"):
        Parallelism(pp=2, widths=(4, 2)).position(6)


@pytest.mark.parametrize(
    ("parallelism", "hosts", "message", "hint"),
    [
        (
            Parallelism(pp=2, widths=(4, 3)),
            TWO_AND_ONE,
            r"dp 4\+3 x tp 1 x pp 2 needs 7 ranks, but 3 hosts have 6 devices",
            "add up to the number of devices",
        ),
        (Parallelism(dp=2), TWO_AND_ONE, "needs 2 ranks, but 3 hosts have 6 devices", "widths"),
        (
            Parallelism(dp=3, pp=3),
            TWO_AND_ONE,
            r"stage 2 \(ranks 6 to 8\) has no devices: 3 hosts have 6 devices",
            "start 9 ranks",
        ),
        (
            Parallelism(dp=1, tp=3, pp=2),
            TWO_AND_ONE,
            r"tensor group 0 \(ranks 0 to 2\) crosses hosts 'a0' and 'a1': tp is 3, host 'a0' has 2",
            "tp must divide the number of devices of every host",
        ),
        (
            Parallelism(dp=3, pp=2),
            TWO_AND_ONE,
            r"data group of stage 1 \(ranks 3 to 5\) mixes clusters: 1 of 'a' and 2 of 'b'",
            "sets the number of ranks of each stage",
        ),
        (
            Parallelism(pp=2, widths=(4, 2)),
            [("a0", "a", 2), ("a0", "b", 4)],
            "host 'a0' is in cluster 'a' and in 'b'",
            "a unique name",
        ),
        (Parallelism(), [("a0", "a", 0)], "host 'a0' of cluster 'a' has 0 devices", "leave"),
        (Parallelism(pp=6), TWO_AND_ONE, "4 layers cannot fill 6 stages", "set pp to at most 4"),
    ],
)
def test_impossible_groups_are_refused(
    parallelism: Parallelism, hosts: list, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Groups.of(parallelism, hosts, blocks=4)
    assert hint in error.value.hint and "\n" not in str(error.value).partition("\nhint: ")[0]


def test_a_data_group_may_mix_clusters_if_across_clusters_is_set() -> None:
    groups = Groups.of(Parallelism(dp=6), TWO_AND_ONE, data_groups=DataGroups.ANYWHERE)
    assert [group.ranks for group in groups.data] == [tuple(range(6))]
    with pytest.raises(ConfigError, match="mixes clusters: 4 of 'a' and 2 of 'b'"):
        Groups.of(Parallelism(dp=6), TWO_AND_ONE)


CLUSTERS = st.lists(
    st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3), min_size=1, max_size=3
)


@given(CLUSTERS, st.sampled_from([1, 2]), st.integers(3, 12))
def test_suited_parallelisms_are_all_that_can_work(
    clusters: list[list[int]], tp: int, blocks: int
) -> None:
    """`Groups.of` accepts each of them, the first has a stage per cluster, and none with stages of
    equal width inside each cluster is left out."""
    hosts = [
        (f"c{i}h{k}", f"c{i}", devices)
        for i, cluster in enumerate(clusters)
        for k, devices in enumerate(cluster)
    ]
    found = list(suited_parallelisms(hosts, blocks, tp=tp))
    for parallelism in found:
        Groups.of(parallelism, hosts, blocks=blocks)
    assert found[0].pp == len(clusters)
    assert found[0].replicas_of == tuple(sum(cluster) // tp for cluster in clusters)
    slots = [sum(cluster) // tp for cluster in clusters]
    tried = itertools.product(*([d for d in range(1, n + 1) if n % d == 0] for n in slots))
    expected = {
        tuple(n // k for n, k in zip(slots, stages) for _ in range(k))
        for stages in tried
        if sum(stages) <= blocks
    }
    assert {parallelism.replicas_of for parallelism in found} == expected and len(found) == len(
        expected
    )


def test_the_fewest_stages_come_first() -> None:
    found = suited_parallelisms(TWO_AND_ONE, 12)
    assert next(found) == Parallelism(pp=2, widths=(4, 2))
    assert next(found) == Parallelism(dp=2, pp=3)
    found = suited_parallelisms(TWO_AND_ONE, 12, tp=2)
    assert next(found) == Parallelism(tp=2, pp=2, widths=(2, 1))
    assert next(suited_parallelisms([("h", "c", 4)], 12)) == Parallelism(dp=4)


@pytest.mark.parametrize(
    ("hosts", "blocks", "options", "message"),
    [
        (TWO_AND_ONE, 1, {}, "2 clusters need at least one block each, but the model has 1"),
        (TWO_AND_ONE, 12, {"tp": 4}, "tp 4 does not divide the 2 devices of host 'a0'"),
        (
            [("x", "a", 1), ("y", "b", 1), ("z", "a", 1)],
            9,
            {},
            "cluster 'a' are split into 2 ranges",
        ),
        ([], 9, {}, "no hosts are listed"),
    ],
)
def test_hosts_that_suit_no_parallelism_are_refused(
    hosts: list, blocks: int, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        next(suited_parallelisms(hosts, blocks, **options))
